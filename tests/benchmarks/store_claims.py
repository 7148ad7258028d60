"""Figures of the ledger and the index: claims, selection, discovery, and the index after a restart."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.config import Config
from rl_core.experience.discovery import Discovery
from rl_core.experience.experience import Experience
from rl_core.experience.index import Index, Rows, Shard, group_keys
from rl_core.experience.ledger import claim_to_json, group_ids_digest, put_claim
from rl_core.experience.snapshots import put_snapshot
from rl_core.experience.staleness import rule_of
from rl_core.run_dir import RunDir
from rl_core.types import Claim, ClaimedGroup
from tests.benchmarks.measure import figure, side_by_side, timed
from tests.builders import make_run

STREAMS = 64
STEPS = 10_000
RESUME_GROUPS = 32
"""Groups of one claim in the restart figure: 320 k groups, each a segment of its own, over 10^4 claims."""


def claim_figures(root: Path) -> Iterator[dict[str, Any]]:
    """All figures of this module."""
    yield durable_claim(make_run(root / "claims"))
    yield select_among_a_million()
    yield discover_among_many(make_run(root / "discovery"))
    yield from resume(make_run(root / "resume"))


def some_claim(step: int, n: int) -> Claim:
    """A claim of n groups over up to 32 shards."""
    groups = tuple(ClaimedGroup(dataset_epoch=0, position=step * n + i, try_no=0, prompt_idx=step * n + i,
                                stream=f"rollout-{i % 4}-0123456789ab", seq=step * 8 + i % 32 // 4, row=i // 32)
                   for i in range(n))
    digests = {f"{g.stream}/{g.seq}": "0123456789abcdef" for g in groups}
    return Claim(step=step, idx=step, attempt=1, consumer="learner", eta="2", hard_max=8, policy="keep", groups=groups,
                 group_ids_digest=group_ids_digest(g.group_id for g in groups), shard_digests=digests, masked=(),
                 dropped=(), revision=0, ts_us=0)


def durable_claim(run: RunDir) -> dict[str, Any]:
    """Median time of making a claim of 512 groups durable."""
    claims = [some_claim(step, 512) for step in range(60)]
    seconds = [timed(lambda c=claim: put_claim(run, c)) for claim in claims]
    return figure("store/durable_claim_p50", float(np.median(seconds)) * 1e3, "ms", "<= 30",
                  p95=round(float(np.percentile(seconds, 95)) * 1e3, 1),
                  kilobytes=len(claim_to_json(claims[0])) // 1000)


def select_among_a_million() -> dict[str, Any]:
    """Time of choosing the 512 oldest of 10^6 groups that wait, median of 9, in processor time."""
    n, rng = 1_000_000, np.random.default_rng(0)
    index = Index(rule_of(Config()))
    index.shards = [Shard(stream=f"rollout-{i % 4}-0123456789ab", seq=i // 4, digest="0123456789abcdef")
                    for i in range(n // 64 + 1)]
    position = np.arange(n)
    zeros = np.zeros(n, np.int32)
    index.waiting = Rows(
        key=group_keys(zeros, position, zeros), dataset_epoch=zeros, position=position, prompt_idx=position,
        try_no=zeros, lease_no=rng.permutation(n), n_responses=zeros + 8,
        idx_min=rng.integers(3, 6, n).astype(np.int32), idx_max=zeros + 5, n_tokens=zeros + 16_000,
        spread=np.ones(n, np.float32), shard=(position // 64).astype(np.int32), row=(position % 64).astype(np.int32))

    def select() -> None:
        selection = index.select(5, 512, {})
        assert selection is not None and len(selection.groups) == 512

    (seconds,) = side_by_side(select, rounds=9, clock=time.process_time)
    return figure("store/select_512_of_1e6", seconds * 1e3, "ms", "<= 20")


def discover_among_many(run: RunDir) -> dict[str, Any]:
    """Time of finding 512 new names among 10^5 in 64 streams, the fastest of 9."""
    streams = [f"rollout-{i}-0123456789ab" for i in range(STREAMS)]
    for stream in streams:
        run.stream(stream).mkdir(parents=True)
    counts = dict.fromkeys(streams, 0)

    def add(n: int) -> None:
        for stream in itertools.islice(itertools.cycle(streams), n):
            os.close(os.open(run.shard(stream, counts[stream]), os.O_CREAT | os.O_WRONLY))
            counts[stream] += 1

    add(100_000)
    discovery = Discovery(run)
    assert len(discovery.new(full=True)) == 100_000
    seconds: list[float] = []
    for _ in range(9):
        add(512)
        found: list[Any] = []
        seconds.append(timed(lambda found=found: found.extend(discovery.new())))
        assert len(found) == 512
    return figure("store/discover_512_among_1e5", min(seconds) * 1e3, "ms", "<= 20")


def resume(run: RunDir) -> Iterator[dict[str, Any]]:
    """Time of a restart's index from 10^4 claims, the fastest of 3: from all of them, and from a snapshot as old as it
    gets before the next one is written."""
    run.ledger().mkdir(parents=True)
    for step in range(STEPS):
        run.claim(step).write_bytes(claim_to_json(some_claim(step, RESUME_GROUPS)))
    config = Config(groups_per_step=RESUME_GROUPS, total_steps=STEPS + 1)
    seconds = [timed(lambda: Experience(run, config, 1)) for _ in range(3)]
    yield figure("store/resume_index_1e4_claims", min(seconds), "s", "<= 5", groups_per_claim=RESUME_GROUPS)
    since = config.retention.snapshot_every - 1
    wrote = timed(lambda: put_snapshot(run, STEPS - since, attempt=1))
    seconds = [timed(lambda: Experience(run, config, 1)) for _ in range(3)]
    yield figure("store/resume_index_1e4_claims_snapshot", min(seconds), "s", "<= 1", claims_since=since,
                 write_s=round(wrote, 2), megabytes=round(run.snapshot(STEPS - since).stat().st_size / 1e6, 1))
