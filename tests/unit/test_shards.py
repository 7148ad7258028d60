from __future__ import annotations

import dataclasses
import errno
import gc
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rl_core.errors import BrokenFile, DataError, DeadlinePassed, DeadPart, FormatTooNew, ShardCorrupt
from rl_core.experience.columns import column_digests, digest_of_digests
from rl_core.experience.shards import GroupCommit, ShardWriter, map_shard, sweep_tmp, verify_shard
from rl_core.experience.verify import SEAL
from rl_core.run_dir import RunDir
from rl_core.types import Landed, Score, TrajectoryGroup
from tests.builders import make_group, make_run

ROOT = Path(__file__).resolve().parents[2]
DIGESTS = {"model": "m1", "tokenizer": "t1"}


def writer_in(tmp_path: Path, *, fsync: bool = False) -> tuple[RunDir, ShardWriter]:
    run = make_run(tmp_path / "run")
    return run, ShardWriter(run, "rollout-0", 7, DIGESTS, fsync)


def groups(n: int, start: int = 0, **settings: Any) -> list[TrajectoryGroup]:
    return [make_group(i, **settings) for i in range(start, start + n)]


def names(run: RunDir, writer: ShardWriter) -> list[str]:
    return sorted(os.listdir(run.stream(writer.stream)))


# -- landing


@pytest.mark.parametrize("fsync", [True, False], ids=["fsync", "no fsync"])
def test_a_landed_shard_is_whole_numbered_and_leaves_no_tmp(tmp_path: Path, fsync: bool) -> None:
    run, writer = writer_in(tmp_path, fsync=fsync)
    first, second = writer.land(groups(3)), writer.land(groups(2, 3))
    assert first == Landed(stream=writer.stream, seq=0, group_ids=("e0-p0-t0", "e0-p1-t0", "e0-p2-t0"),
                           n_tokens=first.n_tokens)
    assert (second.seq, writer.next_seq) == (1, 2)
    assert names(run, writer) == [".tmp", "00000000.arrow", "00000001.arrow"]
    assert os.listdir(run.stream_tmp(writer.stream)) == []
    info = verify_shard(run.shard(writer.stream, 1))
    assert (info.ref.seq, info.attempt, info.digests, info.group_id) == (1, 7, DIGESTS, ("e0-p3-t0", "e0-p4-t0"))


def test_each_start_writes_a_stream_of_its_own(tmp_path: Path) -> None:
    run, one = writer_in(tmp_path)
    two = ShardWriter(run, "rollout-0", 8, DIGESTS, False)
    assert one.stream != two.stream
    assert all(len(w.stream) == len("rollout-0-") + 12 for w in (one, two))


def test_the_footer_says_where_it_belongs(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    landed = writer.land([make_group(0, versions=(3, 6)), make_group(1, versions=(4,))])
    batch, meta = map_shard(run.shard(writer.stream, 0))
    expected = {"rl.schema": "1", "rl.stream": writer.stream, "rl.seq": "0", "rl.groups": "2", "rl.idx_min": "3",
                "rl.tokens": str(landed.n_tokens), "rl.idx_max": "6", "rl.attempt": "7", "rl.digest.model": "m1",
                "rl.digest.tokenizer": "t1"}
    assert {key: meta[key] for key in expected} == expected
    assert json.loads(meta["rl.xxh3"]) == column_digests(batch)


def test_any_arrow_reader_opens_a_shard(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    writer.land(groups(3))
    table = pa.ipc.open_file(run.shard(writer.stream, 0)).read_all()
    assert table.column("group_id").to_pylist() == ["e0-p0-t0", "e0-p1-t0", "e0-p2-t0"]
    assert table.to_pandas().shape == (3, 32)


def full_disk(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize("call", ["open", "writev", "fsync", "link"])
def test_a_full_disk_leaves_no_name_and_the_same_number_is_taken_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    run, writer = writer_in(tmp_path, fsync=True)
    writer.land(groups(1))
    with monkeypatch.context() as patch:
        full_disk(patch, call)
        with pytest.raises(OSError, match="No space left") as caught:
            writer.land(groups(2, 1))
    assert caught.value.errno == errno.ENOSPC
    assert names(run, writer) == [".tmp", "00000000.arrow"]
    assert os.listdir(run.stream_tmp(writer.stream)) == []
    assert writer.land(groups(2, 1)).seq == 1


def test_a_real_refusal_of_the_kernel_half_way_through_a_write_leaves_no_name(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.land(groups(4, lengths=[1000] * 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names(run, writer) == [".tmp"]
    assert writer.land(groups(4, lengths=[1000] * 4)).seq == 0


def test_a_failed_fsync_of_the_directory_is_settled_before_the_next_number(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, writer = writer_in(tmp_path, fsync=True)
    real, calls = os.fsync, iter([False, True])

    def second_fails(fd: int) -> None:
        if next(calls):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", second_fails)
        with pytest.raises(OSError, match="Input/output"):
            writer.land(groups(2))
    assert names(run, writer) == [".tmp", "00000000.arrow"]
    again = writer.land(groups(2))
    assert again.seq == 0 and names(run, writer) == [".tmp", "00000000.arrow"]
    assert writer.land(groups(2, 2)).seq == 1


def test_a_tmp_file_swept_away_before_the_link_is_written_again_under_the_same_number(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, writer = writer_in(tmp_path)
    real, swept = os.link, [0]

    def sweep_first(source: Path, target: Path) -> None:
        if swept[0] < 2:
            swept[0] += sweep_tmp(run, ())
        real(source, target)

    monkeypatch.setattr(os, "link", sweep_first)
    assert writer.land(groups(2)).seq == 0
    assert swept[0] == 2
    assert verify_shard(run.shard(writer.stream, 0)).rows == 2


def test_a_lost_reply_of_link_is_accepted_and_another_file_under_the_name_is_not(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, writer = writer_in(tmp_path)
    real = os.link

    def reply_lost(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", reply_lost)
        assert writer.land(groups(1)).seq == 0
    run.shard(writer.stream, 1).write_bytes(b"another")
    with pytest.raises(BrokenFile, match=r"00000001\.arrow: another file stands under this name"):
        writer.land(groups(1, 1))
    assert run.shard(writer.stream, 1).read_bytes() == b"another"


def test_groups_over_the_byte_cap_are_refused_by_size(tmp_path: Path) -> None:
    _, writer = writer_in(tmp_path)
    big = [make_group(i, n=1, lengths=[4_000_000]) for i in range(2)]
    with pytest.raises(DataError, match=r"2 groups are 7[0-9]{7} bytes, a shard holds 67108864; land fewer"):
        writer.land(big)
    with pytest.raises(DataError, match="group e0-p0-t0 alone is 7"):
        writer.land([make_group(0, n=1, lengths=[8_000_000])])
    assert writer.land(big[:1]).seq == 0


def test_a_worker_name_that_would_leave_the_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"worker name '\.\./x'"):
        ShardWriter(make_run(tmp_path / "run"), "../x", 1, {})


# -- kill -9 at every point of the protocol

CHILD = """
import os, signal, sys
from pathlib import Path
from rl_core.experience import shards
from rl_core.run_dir import RunDir
from tests.builders import make_group

point, protocol, root = sys.argv[1:]
def die(): os.kill(os.getpid(), signal.SIGKILL)
def after(name, when=lambda *a: True):
    real = getattr(os, name)
    def call(*args, **kwargs):
        result = real(*args, **kwargs)
        if when(*args): die()
        return result
    setattr(os, name, call)
def half(fd, pieces):
    flat = b"".join(bytes(p) for p in pieces)
    os.write(fd, flat[:len(flat) // 2]); die()

run = RunDir(Path(root))
writer = shards.ShardWriter(run, "rollout-0", 1, {}, True)
writer.land([make_group(0)])
if protocol == "inplace":                       # the mutant: O_EXCL under the final name
    def shard_tmp(self, stream, seq): return self.shard(stream, seq)
    RunDir.shard_tmp = shard_tmp
    os.link = lambda a, b: None
    Path.unlink = lambda self, missing_ok=False: None
print(writer.stream, flush=True)
match point:
    case "tmp-created": after("open", lambda path, *a: ".tmp" in str(path) or str(path).endswith(".arrow"))
    case "tmp-half": os.writev = half
    case "tmp-synced": after("fsync")
    case "linked": after("link")
    case "unlinked":
        real = Path.unlink
        def unlink(self, missing_ok=False):
            there = self.exists(); real(self, missing_ok=missing_ok)
            if there: die()
        Path.unlink = unlink
writer.land([make_group(i) for i in range(1, 4)])
"""

POINTS = {"tmp-created": (1, 1), "tmp-half": (1, 1), "tmp-synced": (1, 1), "linked": (2, 1), "unlinked": (2, 0)}
"""Point -> (shards with a name, files left in .tmp)."""


def kill_at(run: RunDir, point: str, protocol: str) -> str:
    """Run a writer that is killed at `point` while it lands its second shard; returns its stream."""
    done = subprocess.run([sys.executable, "-c", CHILD, point, protocol, str(run.root)], capture_output=True, text=True,
                          cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.strip()


def torn(run: RunDir, stream: str) -> list[str]:
    """Shards under a final name that do not verify."""
    bad: list[str] = []
    for path in sorted(run.stream(stream).glob("*.arrow")):
        try:
            verify_shard(path)
        except ShardCorrupt:
            bad.append(path.name)
    return bad


@pytest.mark.parametrize(("point", "left"), POINTS.items(), ids=POINTS.keys())
def test_a_kill_at_any_point_leaves_whole_shards_only_and_its_tmp_is_swept(
        tmp_path: Path, point: str, left: tuple[int, int]) -> None:
    run = make_run(tmp_path / "run")
    stream = kill_at(run, point, "link")
    assert torn(run, stream) == []
    assert (len(list(run.stream(stream).glob("*.arrow"))), len(os.listdir(run.stream_tmp(stream)))) == left
    assert sweep_tmp(run, [stream]) == 0
    assert sweep_tmp(run, []) == left[1]
    assert torn(run, stream) == [] and os.listdir(run.stream_tmp(stream)) == []


@pytest.mark.parametrize("point", ["tmp-created", "tmp-half"])
def test_the_kill_test_finds_a_writer_that_writes_under_the_final_name(tmp_path: Path, point: str) -> None:
    run = make_run(tmp_path / "run")
    assert torn(run, kill_at(run, point, "inplace")) == ["00000001.arrow"]


# -- verification


def test_verify_tells_the_index_what_it_needs(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    writer.land([make_group(5, n=2, versions=(2, 4), lengths=[6, 3], rewards=[0.25, 1.0], try_no=1, lease_no=40,
                            dataset_epoch=3),
                 make_group(6, n=1, n_expected=2, versions=(9,), lengths=[5], rewards=[0.5], lease_no=41)])
    path = run.shard(writer.stream, 0)
    info = verify_shard(path)
    assert info.group_id == ("e3-p5-t1", "e0-p6-t0")
    expected: dict[str, list[float]] = {
        "dataset_epoch": [3, 0], "position": [5, 6], "prompt_idx": [5, 6], "try_no": [1, 0], "lease_no": [40, 41],
        "n_responses": [2, 1], "n_expected": [2, 2], "idx_min": [2, 9], "idx_max": [4, 9], "n_tokens": [15, 11],
        "reward_spread": [0.75, 0.0], "reward_mean": [0.625, 0.5], "version_offsets": [0, 2, 3], "version": [2, 4, 9],
        "version_tokens": [3 + 1, 3 + 2, 5]}
    for name, values in expected.items():
        assert getattr(info, name).tolist() == values, name
    assert info.nbytes.sum() == info.file_bytes == path.stat().st_size
    assert info.rows == 2 and (info.ref.stream, info.ref.seq) == (writer.stream, 0)


def test_version_tokens_count_sampled_tokens_only(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    group = make_group(0, n=1, versions=(1, 2), lengths=[6])
    answer = group.trajectories[0]
    answer.loss_mask_L[:] = [1, 0, 0, 1, 0, 1]
    answer.behavior_logprobs_L[:] *= answer.loss_mask_L
    writer.land([group])
    info = verify_shard(run.shard(writer.stream, 0))
    assert (info.version.tolist(), info.version_tokens.tolist()) == ([1, 2], [1, 2])


def test_the_digest_of_a_shard_is_of_its_data_not_of_its_name(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    for i in (0, 0, 1):
        writer.land([make_group(i)])
    one, same, other = (verify_shard(run.shard(writer.stream, seq)).shard_digest for seq in range(3))
    assert one == same != other


def damage_truncate(data: bytearray) -> bytearray:
    return data[:-100]


def damage_half(data: bytearray) -> bytearray:
    return data[:len(data) // 2]


def damage_zero_extent(data: bytearray) -> bytearray:
    middle = len(data) // 2
    data[middle:middle + 4096] = bytes(4096)
    return data


def damage_flip(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 4
    return data


DAMAGE: dict[str, tuple[Callable[[bytearray], bytearray], str]] = {
    "empty": (lambda data: bytearray(), "not a whole Arrow file"),
    "one byte": (lambda data: data[:1], "not a whole Arrow file"),
    "truncated": (damage_truncate, "not a whole Arrow file"),
    "half": (damage_half, "not a whole Arrow file"),
    "zeroed extent": (damage_zero_extent, "xxh3 of"),
    "flipped bit": (damage_flip, r"xxh3 of \['behavior_logprobs'\] does not match"),
    "text": (lambda data: bytearray(b"hello\n"), "not a whole Arrow file"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_shard_is_refused_by_name(
        tmp_path: Path, damage: Callable[[bytearray], bytearray], message: str) -> None:
    run, writer = writer_in(tmp_path)
    writer.land(groups(4, lengths=[900] * 4))
    path = run.shard(writer.stream, 0)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    with pytest.raises(ShardCorrupt, match=message) as caught:
        verify_shard(path)
    assert str(path) in str(caught.value)


def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """Bits of data and metadata anywhere in the file; what is not found lies in padding or in the first, unused schema.
    """
    run, writer = writer_in(tmp_path)
    writer.land(groups(3))
    path = run.shard(writer.stream, 0)
    good, truth = path.read_bytes(), map_shard(path)[0].to_pylist()
    rng = np.random.default_rng(0)
    found = 0
    for at in rng.integers(0, len(good), 1500):
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            verify_shard(path)
        except ShardCorrupt:
            found += 1
        else:
            assert map_shard(path)[0].to_pylist() == truth, f"byte {at}"
    assert found > 500


def test_a_flipped_bit_in_the_message_is_found_and_never_takes_the_process_with_it(tmp_path: Path) -> None:
    """Arrow aborts over lengths and offsets that it trusted; so they are validated before anything is sliced."""
    run, writer = writer_in(tmp_path)
    writer.land([make_group(0, n=1)])
    path = run.shard(writer.stream, 0)
    good = path.read_bytes()
    message = good.index(b"\xff\xff\xff\xff", 16)
    for at in range(message, message + int.from_bytes(good[message + 4:message + 8], "little")):
        bad = bytearray(good)
        bad[at] ^= 0x80
        path.write_bytes(bad)
        try:
            verify_shard(path)
        except ShardCorrupt:
            pass
        else:
            assert map_shard(path)[0].equals(pa.ipc.open_file(pa.BufferReader(good)).get_batch(0)), f"byte {at}"


def reseal(path: Path, change: Callable[[dict[str, str]], dict[str, str]], batch: pa.RecordBatch | None = None) -> None:
    """Write the shard again with other metadata, sealed as a writer would."""
    stored, meta = map_shard(path)
    meta = change({key: value for key, value in meta.items() if key != SEAL})
    meta[SEAL] = digest_of_digests(sorted(meta.items()))
    batch = (stored if batch is None else batch)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema.with_metadata(meta)) as out:
        out.write_batch(batch)
    path.unlink()
    path.write_bytes(sink.getvalue())


FOREIGN: dict[str, tuple[Callable[[dict[str, str]], dict[str, str]], type[Exception], str]] = {
    "no shard": (lambda meta: {}, ShardCorrupt, "not a shard"),
    "newer": (lambda meta: meta | {"rl.schema": "2"}, FormatTooNew, "schema 2 is newer"),
    "unknown schema": (lambda meta: meta | {"rl.schema": "x"}, ShardCorrupt, "schema 'x' is unknown"),
    "copied": (lambda meta: meta | {"rl.seq": "5"}, ShardCorrupt, "/5: copied or renamed"),
    "other stream": (lambda meta: meta | {"rl.stream": "w-1"}, ShardCorrupt, "holds shard w-1/0"),
    "digests of others": (lambda meta: meta | {"rl.xxh3": "{}"}, ShardCorrupt, "xxh3 of"),
    "row count": (lambda meta: meta | {"rl.groups": "9"}, ShardCorrupt, "`rl.groups` says 9"),
}


@pytest.mark.parametrize(("change", "error", "message"), FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_or_moved_file_is_refused(tmp_path: Path, change: Callable[[dict[str, str]], dict[str, str]],
                                            error: type[Exception], message: str) -> None:
    run, writer = writer_in(tmp_path)
    writer.land(groups(2))
    path = run.shard(writer.stream, 0)
    reseal(path, change)
    with pytest.raises(error, match=message):
        verify_shard(path)


def test_metadata_that_was_changed_without_its_seal_is_refused(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    writer.land(groups(2))
    path = run.shard(writer.stream, 0)
    data = path.read_bytes()
    at = data.rindex(b"m1\x00")
    path.write_bytes(data[:at] + b"m2" + data[at + 2:])
    with pytest.raises(ShardCorrupt, match="seal"):
        verify_shard(path)


def test_a_table_that_is_no_shard_and_an_absent_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "00000000.arrow"
    with pytest.raises(FileNotFoundError):
        verify_shard(path)
    table = pa.record_batch({"a": [1, 2]})
    with pa.ipc.new_file(str(path), table.schema) as out:
        out.write_batch(table)
        out.write_batch(table)
    with pytest.raises(ShardCorrupt, match="2 record batches"):
        verify_shard(path)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM], ids=["no files left", "no maps left"])
def test_what_cannot_be_mapped_now_is_not_called_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         number: int) -> None:
    run, writer = writer_in(tmp_path)
    writer.land(groups(2))
    path = run.shard(writer.stream, 0)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refused)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            verify_shard(path)
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert verify_shard(path).rows == 2
    path.unlink()
    path.mkdir()
    with pytest.raises(ShardCorrupt, match="not a whole Arrow file"):
        verify_shard(path)


def test_verification_keeps_no_file_open(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    writer.land(groups(2))
    gc.collect()  # files that others have left to the collector
    before = len(os.listdir("/proc/self/fd"))
    infos = [verify_shard(run.shard(writer.stream, 0)) for _ in range(20)]
    assert len(infos) == 20 and len(os.listdir("/proc/self/fd")) == before


# -- group commit


class Heard:
    """What a GroupCommit reported, in order."""

    def __init__(self) -> None:
        self.landed: list[Landed] = []
        self.refused: list[tuple[str, str]] = []
        self.errors: list[OSError] = []

    def commit(self, writer: ShardWriter, **settings: Any) -> GroupCommit:
        return GroupCommit(writer, on_landed=self.landed.append, on_error=self.errors.append,
                           on_refused=lambda g, e: self.refused.append((g.lease.group_id, str(e))), **settings)


def test_what_finishes_during_a_landing_goes_into_the_next_shard(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, writer = writer_in(tmp_path)
    real, inside, go = writer.land, threading.Event(), threading.Event()

    def slow(batch: list[TrajectoryGroup]) -> Landed:
        inside.set()
        assert go.wait(10)
        return real(batch)

    monkeypatch.setattr(writer, "land", slow)
    heard = Heard()
    commit = heard.commit(writer, cap_groups=8)
    commit.put(make_group(0))
    assert inside.wait(10)
    for group in groups(12, 1):
        commit.put(group)
    go.set()
    commit.close(10)
    assert [len(landed.group_ids) for landed in heard.landed] == [1, 8, 4]
    assert [gid for landed in heard.landed for gid in landed.group_ids] == [f"e0-p{i}-t0" for i in range(13)]


def test_bytes_cap_a_shard_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, writer = writer_in(tmp_path)
    heard, ready = Heard(), threading.Event()
    real = writer.land
    monkeypatch.setattr(writer, "land", lambda batch: real(batch) if ready.wait(10) else None)
    commit = heard.commit(writer, cap_bytes=100_000)
    for i in range(5):
        commit.put(make_group(i, n=1, lengths=[4000]))
    time.sleep(0.05)
    ready.set()
    commit.close(10)
    assert all(len(landed.group_ids) <= 2 for landed in heard.landed)
    assert sum(len(landed.group_ids) for landed in heard.landed) == 5


def test_one_group_that_no_shard_holds_does_not_take_its_neighbours_with_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, writer = writer_in(tmp_path)
    heard, ready = Heard(), threading.Event()
    real = writer.land
    monkeypatch.setattr(writer, "land", lambda batch: real(batch) if ready.wait(10) else None)
    commit = heard.commit(writer)
    bad = make_group(1)
    bad.trajectories[2].behavior_logprobs_L[0] = np.nan
    for group in (make_group(0), bad, make_group(2)):
        commit.put(group)
    ready.set()
    commit.close(10)
    assert sorted(gid for landed in heard.landed for gid in landed.group_ids) == ["e0-p0-t0", "e0-p2-t0"]
    assert [gid for gid, _ in heard.refused] == ["e0-p1-t0"] and "not finite" in heard.refused[0][1]


def test_groups_wait_for_a_full_disk_and_land_when_it_has_room(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, writer = writer_in(tmp_path)
    heard, room = Heard(), threading.Event()
    real = os.link

    def link(source: Path, target: Path) -> None:
        if not room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    commit = heard.commit(writer, retry_s=0.01)
    commit.put(make_group(0))
    while len(heard.errors) < 3:
        time.sleep(0.005)
    assert names(run, writer) == [".tmp"] and heard.landed == []
    room.set()
    commit.close(10)
    assert [landed.seq for landed in heard.landed] == [0]
    assert {error.errno for error in heard.errors} == {errno.ENOSPC}


def test_close_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, writer = writer_in(tmp_path)
    full_disk(monkeypatch, "link")
    commit = Heard().commit(writer, retry_s=0.01)
    commit.put(make_group(0))
    with pytest.raises(DeadlinePassed, match=r"are not landed after 0\.1 s"):
        commit.close(0.1)


def test_a_foreign_file_in_the_stream_stops_the_commit_with_its_cause(tmp_path: Path) -> None:
    run, writer = writer_in(tmp_path)
    run.shard(writer.stream, 0).write_bytes(b"another")
    commit = Heard().commit(writer)
    commit.put(make_group(0))
    for _ in range(1000):
        try:
            commit.put(make_group(1))
        except DeadPart as error:
            assert isinstance(error.__cause__, BrokenFile)
            return
        time.sleep(0.005)
    pytest.fail("put never raised")


def test_whatever_ends_a_landing_is_the_cause_that_put_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, writer = writer_in(tmp_path)

    def broken(batch: list[TrajectoryGroup]) -> Landed:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(writer, "land", broken)
    commit = Heard().commit(writer)
    commit.put(make_group(0))
    commit._thread.join(10)
    with pytest.raises(DeadPart, match=r"landing thread of .* is gone") as raised:
        commit.put(make_group(1))
    assert isinstance(raised.value.__cause__, RuntimeError) and "not foreseen" in str(raised.value.__cause__)


def test_a_text_that_cannot_be_encoded_refuses_its_group_alone(tmp_path: Path) -> None:
    _, writer = writer_in(tmp_path)
    heard = Heard()
    whole = make_group(1)
    first = dataclasses.replace(whole.trajectories[0], score=Score(reward=1.0, extracted="a\ud800"))
    bad = dataclasses.replace(whole, trajectories=(first, *whole.trajectories[1:]))
    commit = heard.commit(writer)
    for group in (make_group(0), bad, make_group(2)):
        commit.put(group)
    commit.close(10)
    assert sorted(gid for landed in heard.landed for gid in landed.group_ids) == ["e0-p0-t0", "e0-p2-t0"]
    assert heard.refused == [("e0-p1-t0", "extracted 'a\\ud800' cannot be encoded as UTF-8 (surrogates not allowed)")]
