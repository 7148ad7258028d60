"""The experience store against the file system, against memcpy and against in-memory queues.

Data: groups of 8 answers, lognormal(7.3, 0.8) clipped to 200-8000 tokens, about 16 k tokens and 140 KB a group. Every
ratio is taken inside one run of this module. The page cache is warm and fsync is what the disk makes of it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rl_core.experience.batch import groups_to_batch
from rl_core.experience.columns import column_digests
from rl_core.experience.reader import copy_tokens, read_claim_rows, stage_claim, token_places, token_views
from rl_core.experience.shards import ShardWriter, map_shard, verify_shard
from rl_core.experience.staging import Staging
from rl_core.run_dir import RunDir, fsync_dir
from rl_core.types import Claim, ShardRef, TrajectoryGroup
from tests.benchmarks.measure import figure, side_by_side, timed
from tests.benchmarks.peers import PACKAGES, TRANSFER_QUEUE
from tests.benchmarks.store_claims import claim_figures
from tests.builders import long_groups, make_claim, make_run, make_versions

ROOT = Path(__file__).resolve().parents[2]
GROUPS = 128
BATCH = 512
LAND_BARS = {(False, 16): ">= 0.3", (False, 64): ">= 0.6", (True, 16): ">= 0.2", (True, 64): ">= 0.5"}
PEER_TIMEOUT_S = 300
PEER_BARS = {"verl-padded": (">= 5", ">= 200"), "verl-jagged": (">= 3", ">= 40"), "transfer-queue": (">= 3", ">= 15")}
"""Peer -> bars of (durable put, get and build)."""


def figures() -> Iterator[dict[str, Any]]:
    """All figures of the store."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-", dir=os.environ.get("HEADWAY_BENCH_DIR")) as scratch:
        yield from land_figures(Path(scratch), long_groups(GROUPS))
        yield from read_figures(Path(scratch), long_groups(BATCH))
        yield from peer_figures(Path(scratch), long_groups(GROUPS))
        yield from claim_figures(Path(scratch))


def slices(groups: Sequence[TrajectoryGroup], per_shard: int) -> list[Sequence[TrajectoryGroup]]:
    return [groups[i:i + per_shard] for i in range(0, len(groups), per_shard)]


def writer_in(root: Path, *, fsync: bool) -> tuple[RunDir, ShardWriter]:
    run = make_run(Path(tempfile.mkdtemp(dir=root)))
    return run, ShardWriter(run, "bench", 1, {}, fsync)


def shard_bytes(run: RunDir, writer: ShardWriter, shards: int) -> bytes:
    """The bytes of the last `shards` shards."""
    return b"".join(run.shard(writer.stream, writer.next_seq - 1 - i).read_bytes() for i in range(shards))


# -- landing


def land_figures(root: Path, groups: Sequence[TrajectoryGroup]) -> Iterator[dict[str, Any]]:
    """Landing record batches (and, without a bar, from answers on) against one new file of the same bytes."""
    for (fsync, per_shard), bar in LAND_BARS.items():
        parts = slices(groups, per_shard)
        base, landed, whole = land_seconds(root, parts, fsync=fsync)
        name = f"store/land_{'fsync' if fsync else 'no_fsync'}_{per_shard}"
        yield figure(name, base / landed, "x one file of the same bytes", bar, groups_per_s=round(len(groups) / landed))
        yield figure(f"{name}_from_answers", base / whole, "x one file of the same bytes",
                     groups_per_s=round(len(groups) / whole))


def land_seconds(root: Path, parts: Sequence[Sequence[TrajectoryGroup]], *, fsync: bool) -> list[float]:
    """Median seconds of: one new file of the same bytes, landing batches, building and landing them.

    With fsync wall seconds; without, processor seconds, since then it is copies and system calls only. Files stay, as
    those of a run do.
    """
    run, writer = writer_in(root, fsync=fsync)
    batches = [groups_to_batch(part) for part in parts]
    names = [tuple(group.lease.group_id for group in part) for part in parts]

    def land() -> None:
        for batch, ids in zip(batches, names, strict=True):
            writer.land_batch(batch, ids)

    def land_groups() -> None:
        for part in parts:
            writer.land(part)

    land_groups()
    one_file = write_one_file(Path(tempfile.mkdtemp(dir=root)), shard_bytes(run, writer, len(parts)), fsync=fsync)
    return side_by_side(one_file, land, land_groups, rounds=9, clock=time.perf_counter if fsync else time.process_time)


def write_one_file(directory: Path, data: bytes, *, fsync: bool) -> Callable[[], None]:
    """A function that writes these bytes as one new file each time."""
    numbers = itertools.count()

    def write() -> None:
        fd = os.open(directory / str(next(numbers)), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest):]
        if fsync:
            os.fsync(fd)
        os.close(fd)
        if fsync:
            fsync_dir(directory)

    return write


# -- reading


def landed_claim(root: Path, groups: Sequence[TrajectoryGroup], per_shard: int, *,
                 shuffled: bool = False) -> tuple[RunDir, Claim]:
    """Land the groups in their order, or in a random one that is not the order of the claim, and claim them all."""
    run, writer = writer_in(root, fsync=False)
    order = np.random.default_rng(1).permutation(len(groups)) if shuffled else np.arange(len(groups))
    hints = [writer.land([groups[i] for i in part]) for part in np.array_split(order, len(groups) // per_shard)]
    return run, make_claim(run, [ShardRef(stream=hint.stream, seq=hint.seq) for hint in hints])


def read_figures(root: Path, groups: Sequence[TrajectoryGroup]) -> Iterator[dict[str, Any]]:
    """Staging and verifying 512 groups against memcpy of the same bytes, in processor time."""
    for name, shuffled in (("", False), ("_random_order", True)):
        run, claim = landed_claim(root, groups, 16, shuffled=shuffled)
        batches, copy, from_warm, from_cold, whole = stage_seconds(run, claim)
        bars = (None, None) if shuffled else ("<= 1.3", "<= 5")
        yield figure(f"store/stage_512_pages_mapped{name}", from_warm / copy, "x memcpy", bars[0])
        yield figure(f"store/stage_512_cold_map{name}", from_cold / copy, "x memcpy", bars[1])
        yield figure(f"store/read_claim_512{name}", whole / copy, "x memcpy", ms=round(whole * 1e3, 1))
        if not shuffled:
            yield from verify_figures(batches, 16, None)
    run, claim = landed_claim(root, groups, 64)
    yield from verify_figures(token_places(run, claim)[0], 64, "<= 1.0")
    yield figure("store/verify_shard_64", min(timed(lambda p=path: verify_shard(p)) for path in shard_paths(run, claim))
                 * 1e3, "ms")


def stage_seconds(run: RunDir, claim: Claim) -> tuple[list[pa.RecordBatch], float, float, float, float]:
    """Shards of the claim, and seconds of: memcpy, copy from memory, map and copy, verify and read all of it."""
    paths, versions, staging = shard_paths(run, claim), make_versions(5), Staging()
    batches, *places = token_places(run, claim)
    views = token_views(batches)
    memcpy = copy_of(9 * int(places[2].sum()))
    copy, from_warm = side_by_side(memcpy, lambda: copy_tokens(views, *places, staging), rounds=25,
                                   clock=time.process_time)
    from_cold, whole = side_by_side(
        lambda: copy_tokens(token_views([map_shard(path)[0] for path in paths]), *places, staging),
        lambda: read_claim_rows(run, claim, rank=0, ranks=1, versions=versions, staging=staging), rounds=15,
        clock=time.process_time)
    return batches, copy, from_warm, from_cold, whole


def verify_figures(batches: Sequence[pa.RecordBatch], per_shard: int, bar: str | None) -> Iterator[dict[str, Any]]:
    """Digests of all columns of mapped shards, as verification takes them."""
    def digests() -> None:
        for batch in batches:
            column_digests(batch)

    copy, hashed = side_by_side(copy_of(sum(batch.nbytes for batch in batches)), digests, rounds=25,
                                clock=time.process_time)
    yield figure(f"store/verify_xxh3_{per_shard}", hashed / copy, "x memcpy", bar)


def copy_of(nbytes: int) -> Callable[[], None]:
    """A function that copies this many bytes between two arrays that have been touched."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def memcpy() -> None:
        target[:] = source

    return memcpy


def shard_paths(run: RunDir, claim: Claim) -> list[Path]:
    return sorted({run.shard(group.stream, group.seq) for group in claim.groups})


# -- peers


def peer_figures(root: Path, groups: Sequence[TrajectoryGroup]) -> Iterator[dict[str, Any]]:
    """Durable landing and reading of 128 groups, 16 a shard, against what the queues do with the same groups.

    Ours is measured before and after each of them; medians of rounds everywhere. `get` verifies nothing, as the queues
    do not; `get_verified` is what the learner does.
    """
    for peer, (put_bar, get_bar) in PEER_BARS.items():
        before = own_rates(root, groups)
        theirs = peer_rates(peer)
        after = own_rates(root, groups)
        name = f"store/{{}}_vs_{peer.replace('-', '_')}"
        if isinstance(theirs, str):
            yield figure(name.format("put_durable"), None, "x", put_bar, reason=theirs)
            yield figure(name.format("get"), None, "x", get_bar, reason=theirs)
            continue
        ours = {key: (before[key] + after[key]) / 2 for key in before}
        for step, bar in (("put_durable", put_bar), ("get", get_bar), ("get_verified", None)):
            for rows in [key for key in ("", "_by_group") if f"put{key}" in theirs]:
                rate = theirs[("put" if step == "put_durable" else "get") + rows]
                yield figure(name.format(step) + rows, ours[step] / rate, "x", None if rows else bar,
                             ours=round(ours[step]), theirs=round(rate), rate="groups/s")
        if peer == "verl-padded":
            yield figure("store/bytes_per_group_vs_verl_padded", ours["bytes"] / theirs["bytes"], "x",
                         f"<= {1 / 15:.5f}", ours=round(ours["bytes"]), theirs=round(theirs["bytes"]))


def own_rates(root: Path, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Groups per second of landing (fsync of every file and directory), of mapping shards and building the batch, and
    of the learner's read, which also verifies every digest again; bytes per group."""
    run, writer = writer_in(root, fsync=True)
    writer.land(groups[:16])

    def put() -> None:
        for part in slices(groups, 16):
            writer.land(part)

    (put_s,) = side_by_side(put, rounds=9)
    shards = len(groups) // 16
    claim = make_claim(run, [ShardRef(stream=writer.stream, seq=writer.next_seq - 1 - i) for i in range(shards)])
    staging, versions = Staging(), make_versions(5)

    def get() -> None:
        keys = sorted({(group.stream, group.seq) for group in claim.groups})
        place = {key: i for i, key in enumerate(keys)}
        shard_G = np.array([place[group.stream, group.seq] for group in claim.groups], np.int64)
        row_G = np.array([group.row for group in claim.groups], np.int64)
        stage_claim([map_shard(run.shard(*key))[0] for key in keys], shard_G, row_G, claim, rank=0, ranks=1,
                    versions=versions, staging=staging)

    def get_verified() -> None:
        read_claim_rows(run, claim, rank=0, ranks=1, versions=versions, staging=staging)

    get_s, verified_s = side_by_side(get, get_verified, rounds=15)
    return {"put_durable": len(groups) / put_s, "get": len(groups) / get_s, "get_verified": len(groups) / verified_s,
            "bytes": len(shard_bytes(run, writer, shards)) / len(groups)}


def peer_rates(peer: str) -> dict[str, float] | str:
    """What peers.py measured, or why it could not."""
    if peer == "transfer-queue" and (reason := install_transfer_queue()) is not None:
        return reason
    try:
        done = subprocess.run([sys.executable, str(Path(__file__).with_name("peers.py")), peer, str(GROUPS)], cwd=ROOT,
                              capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer after {PEER_TIMEOUT_S} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return f"exit status {done.returncode}: {(done.stderr.splitlines() or ['no output'])[-1]}"
    return json.loads(lines[-1])


def install_transfer_queue() -> str | None:
    """Install TransferQueue apart from the project's environment, once. Returns why it could not be."""
    if (PACKAGES / "transfer_queue").is_dir():
        return None
    needs = ["pyzmq", "hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.*", "msgspec", "prometheus_client"]
    try:
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
                               str(PACKAGES), TRANSFER_QUEUE, *needs], capture_output=True, text=True,
                              timeout=PEER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{TRANSFER_QUEUE} was not installed after {PEER_TIMEOUT_S} s"
    if done.returncode:
        return f"{TRANSFER_QUEUE} cannot be installed: {(done.stderr.splitlines() or ['?'])[-1]}"
    return None
