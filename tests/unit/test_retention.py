"""Retention: what may go, in what order, and what a crash, a restart, a replay and the audit make of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.checkpoint import CheckpointState, checkpoints, newest_whole, write_checkpoint
from rl_core.errors import (
    BrokenFile,
    CheckpointDamaged,
    ClaimedShardCorrupt,
    ConfigError,
    DiskQuotaTooSmall,
    ShardRetired,
)
from rl_core.experience import experience as experience_module
from rl_core.experience.archive import read_archived, try_archive
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.index import KeySet, group_key, group_keys
from rl_core.experience.ledger import (
    RetiredRow,
    put_drops,
    put_retired,
    read_claim,
    read_retired,
    retired_below,
    void_step,
)
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.positions import FINISHED
from rl_core.experience.reader import read_claim_rows
from rl_core.experience.retention import Fates, first_needed
from rl_core.experience.retirement import finish_retirement, retire
from rl_core.experience.shards import ShardWriter
from rl_core.experience.verify import map_shard
from rl_core.landed_answers import answer_table
from rl_core.landed_groups import group_table
from rl_core.run_dir import RunDir
from rl_core.types import Claim, Drop, Outcome
from tasks.checkpoint import make_room, retire_shards
from tests.builders import make_group, make_run, make_versions, next_owner, store_config

B = 4
STEPS = 8


def story(run: RunDir, *, steps: int = STEPS) -> str:
    """Shards of 3 groups and claims of 4: shard i ends in claim ceil(3 (i + 1) / 4) - 1. Beside them in shard 0 a stale
    group, in shard 1 a filtered one; the last shard holds a group that waits. Returns the stream."""
    w = ShardWriter(run, "w", 1, {}, False)
    trained = [make_group(i) for i in range(B * steps)]
    parts = [trained[i:i + 3] for i in range(0, len(trained), 3)]
    parts[0].append(make_group(100))
    parts[1].append(make_group(101))
    parts[-1].append(make_group(102))
    for part in parts:
        w.land(part)
    w.land([replace(make_group(1), idx_min=0), make_group(0)])  # duplicates
    put_drops(run, 0, [Drop(group_id="e0-p100-t0", reason="stale", n_tokens=1),
                       Drop(group_id="e0-p101-t0", reason="filtered", n_tokens=1)], attempt=1)
    experience = next_owner(run)
    for step in range(steps):
        assert isinstance(experience.claim(step, 5), Claim)
    return w.stream


@pytest.fixture
def told(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "told")
    story(run)
    return run


def shards_there(run: RunDir) -> list[int]:
    (stream,) = run.streams.iterdir()
    return sorted(int(path.stem) for path in stream.glob("*.arrow"))


def readable(run: RunDir, step: int) -> bool:
    try:
        read_claim_rows(run, read_claim(run, step), rank=0, ranks=1, versions=make_versions(3))
    except ShardRetired:
        return False
    return True


# -- R

WHOLE: dict[str, tuple[list[int], int, int]] = {
    "none": ([], 2, 0),
    "fewer than keep: the initial model counts": ([20], 2, 0),
    "the older of two": ([10, 20], 2, 10),
    "older ones, anchors among them, hold no shards": ([5, 10, 20, 30], 2, 20),
    "one": ([5, 10], 1, 10),
    "in any order": ([30, 10, 20], 2, 20),
}


@pytest.mark.parametrize(("whole", "keep", "first"), WHOLE.values(), ids=WHOLE)
def test_the_first_step_that_a_start_may_need(whole: list[int], keep: int, first: int) -> None:
    assert first_needed(whole, keep) == first


def keys(*names: str) -> KeySet:
    found = KeySet()
    found.add(group_key(name) for name in names)
    return found


LETS_GO: dict[str, tuple[dict[str, Any], bool]] = {
    "all claimed below": ({"claimed_below": {("w", 0): 2}}, True),
    "one is claimed later": ({"claimed_below": {("w", 0): 1}, "claimed_later": {("w", 0): 1}}, False),
    "one waits": ({"judged": keys("e0-p1-t0")}, False),
    "both ended": ({}, True),
    "nothing is known of either": ({"judged": KeySet()}, False),
    "their dataset epoch is closed": ({"judged": KeySet(), "closed": frozenset({0})}, True),
    "another one is closed": ({"judged": KeySet(), "closed": frozenset({1})}, False),
}


@pytest.mark.parametrize(("facts", "goes"), LETS_GO.values(), ids=LETS_GO)
def test_a_shard_goes_when_every_row_has_ended_below(facts: dict[str, Any], goes: bool) -> None:
    known = Fates(**({"claimed_below": {}, "claimed_later": {}, "judged": keys("e0-p1-t0", "e0-p2-t0")} | facts))
    zeros = np.zeros(2, np.int32)
    assert known.lets_go(("w", 0), group_keys(zeros, np.array([1, 2]), zeros), zeros) is goes


# -- retiring


@pytest.mark.parametrize("below", range(STEPS + 1))
def test_steps_from_r_on_keep_every_shard(told: RunDir, below: int) -> None:
    before = shards_there(told)
    gone = retire(told, below, attempt=99)
    assert [step for step in range(below, STEPS) if not readable(told, step)] == []
    used_up = [i for i in before if i < 3 * STEPS and 3 * (i + 1) <= B * below and i not in (10,)]
    assert sorted(seq for _, seq in gone.shards if seq < 10) == [i for i in used_up if i < 10]
    assert sorted({*shards_there(told), *(seq for _, seq in gone.shards)}) == before
    assert (10 in shards_there(told)) is True, "the last one holds a group that waits"
    assert audit(told).holds


def test_duplicates_and_dropped_rows_do_not_keep_a_shard(told: RunDir) -> None:
    assert shards_there(told) == list(range(12))
    gone = retire(told, 3, attempt=99)
    assert shards_there(told) == [4, 5, 6, 7, 8, 9, 10]
    assert gone.below == 3 and len(gone.shards) == 5 and gone.bytes > 0
    report = audit(told)
    assert report.holds and report.shard_states["retired"] == 5 and report.shard_states["claimed"] == 6
    assert report.shard_states["eligible"] == 1 and report.shards == 12
    assert {state: n for state, n in report.rows.items() if n} == {
        "claimed": 32, "dropped": 1, "filtered": 1, "duplicate": 2, "eligible": 1}
    assert {state: n for state, n in report.positions.items() if n and state != "unleased"} == {
        "trained": 32, "dropped": 1, "filtered": 1, "pending": 1}


def test_a_retirement_without_anything_to_retire_writes_nothing(told: RunDir) -> None:
    retire(told, 3, attempt=99)
    ledger = sorted(path.name for path in told.ledger().iterdir())
    assert retire(told, 3, attempt=99).shards == ()
    assert sorted(path.name for path in told.ledger().iterdir()) == ledger
    assert retire(told, 0, attempt=99).shards == ()


def test_a_second_retirement_behind_the_same_step_is_a_file_of_its_own(told: RunDir) -> None:
    retire(told, 3, attempt=99)
    put_drops(told, 8, [Drop(group_id="e0-p102-t0", reason="stale", n_tokens=1)], attempt=99)
    retire(told, 8, attempt=99)
    assert retired_below(told) == 8 and len(read_retired(told).shards) == 12
    assert shards_there(told) == []
    report = audit(told)
    assert report.holds and report.shard_states["retired"] == 12 and report.rows["dropped"] == 2


def test_the_order_is_snapshot_then_word_then_unlink(told: RunDir) -> None:
    seen: list[tuple[str, bool, bool, int]] = []

    def look(point: str) -> None:
        seen.append((point, told.snapshot(3).exists(), told.retired(3, 0).exists(), len(shards_there(told))))

    retire(told, 3, attempt=99, reached=look)
    assert seen == [("snapshot", True, False, 12), ("retired", True, True, 12),
                    *[("unlinked", True, True, 12 - i) for i in range(1, 6)]]


class Killed(Exception):
    """What stands for kill -9 at a point of the protocol."""


def knowledge(run: RunDir) -> dict[str, Any]:
    """What a start knows, and what it goes on with."""
    experience = next_owner(run)
    experience.discover(full=True)
    experience.attach(200, lambda epoch, position: position)
    experience.leases_known()
    return {"next": experience.next_step, "L": experience.L,
            "tries": [experience.positions.try_of(0, position) for position in range(200)],
            "waits": experience.index.waiting.key.tolist(), "again": experience.positions.waiting_again}


@pytest.mark.parametrize("point", ["snapshot", "retired", "unlinked 1", "unlinked 3", "unlinked 5"])
def test_a_kill_at_any_point_costs_nothing(told: RunDir, point: str) -> None:
    before = knowledge(told)
    name, _, count = point.partition(" ")
    seen: list[str] = []

    def die(at: str) -> None:
        seen.append(at)
        if at == name and seen.count(at) == int(count or 1):
            raise Killed

    with pytest.raises(Killed):
        retire(told, 3, attempt=99, reached=die)
    assert audit(told).holds, "before anybody has finished it"
    assert knowledge(told) == before
    assert shards_there(told) == (list(range(12)) if name == "snapshot" else [4, 5, 6, 7, 8, 9, 10])
    assert before["tries"][100] == 0 and before["again"] == 1 and before["tries"][101] == FINISHED
    next_owner(run := told).retire(3)
    assert shards_there(run) == [4, 5, 6, 7, 8, 9, 10]
    assert knowledge(run) == before and audit(run).holds
    for snapshot in run.ledger().glob("snap-*"):
        snapshot.unlink()
    assert knowledge(run) == before, "snapshots can be made again from the rest"
    assert finish_retirement(run) == 0


def test_a_shard_is_not_looked_for_again_and_its_bytes_count_no_longer(told: RunDir) -> None:
    experience = next_owner(told)
    experience.discover(full=True)
    before, groups = experience.discovery.landed_bytes, experience.discovery.landed_groups
    state = experience.admission(0)
    gone = experience.retire(3)
    assert experience.discovery.landed_bytes == before - gone.bytes > 0
    assert experience.discovery.landed_groups == groups, "what a group takes is known from all that landed"
    assert experience.admission(0).group_bytes == state.group_bytes
    (stream,) = told.streams.iterdir()
    assert experience.discover(full=True) == 0
    again = next_owner(told)
    again.discover(full=True)
    assert again.discovery.landed_bytes == sum(path.stat().st_size for path in stream.glob("*.arrow"))
    assert again.discover() == 0


def test_a_shard_that_lands_behind_retired_ones_is_found(told: RunDir) -> None:
    retire(told, 3, attempt=99)
    experience = next_owner(told)
    experience.discover(full=True)
    (stream,) = told.streams.iterdir()
    w = ShardWriter(told, "w", 1, {}, False)
    shutil.move(told.shard(w.stream, w.land([make_group(50)]).seq), told.shard(stream.name, 12))
    assert experience.discover() == 1  # found by its name; that it was moved there is told by its quarantine
    assert told.quarantined(stream.name, 12).exists()


def test_a_row_that_waited_is_a_violation_when_its_shard_is_retired(told: RunDir) -> None:
    (stream,) = told.streams.iterdir()
    rows = [RetiredRow(group_id=f"e0-p{position}-t0", dataset_epoch=0, position=position, idx_min=0,
                       stream=stream.name, seq=10, row=row) for row, position in enumerate((30, 31, 102))]
    put_retired(told, 8, [(stream.name, 10)], rows, attempt=99)
    finish_retirement(told)
    assert audit(told).violations == [f"shard {stream.name}/10 was retired, but e0-p102-t0 in its row 2 waits"]


def test_the_audit_holds_at_every_moment_of_a_retirement(told: RunDir) -> None:
    with ThreadPoolExecutor(1) as pool:
        for below in range(1, STEPS + 1):
            looking = pool.submit(audit, told)
            retire(told, below, attempt=99)
            assert looking.result().violations == []


# -- what is asked for later


def test_a_step_of_retired_shards_has_a_named_error(told: RunDir) -> None:
    retire(told, 3, attempt=99)
    with pytest.raises(ShardRetired, match=r"claim of step 1: .*00000001.arrow was retired, and 1 more: the step lies "
                                           r"before the window .* steps from 3 on can"):
        read_claim_rows(told, read_claim(told, 1), rank=0, ranks=1, versions=make_versions(3))
    assert not issubclass(ShardRetired, ClaimedShardCorrupt) and issubclass(ShardRetired, BrokenFile)
    (stream,) = told.streams.iterdir()
    told.shard(stream.name, 6).unlink()
    with pytest.raises(ClaimedShardCorrupt):
        read_claim_rows(told, read_claim(told, 5), rank=0, ranks=1, versions=make_versions(3))
    assert f"stream {stream.name}: shard 6 is gone, shard 10 is there" in audit(told).violations


def test_frames_skip_retired_shards_with_a_word(told: RunDir) -> None:
    whole = group_table(told, gaps=[])
    retire(told, 3, attempt=99)
    gaps: list[str] = []
    table = group_table(told, gaps)
    assert gaps == [f"{told.streams}: 5 shards are retired (retention.replay): of their groups only the ledger tells"]
    steps = {name: step for name, step in zip(table.column("group_id").to_pylist(), table.column("step").to_pylist(),
                                              strict=True) if step is not None}
    assert len(steps) == 32 and steps == {
        name: step for name, step in zip(whole.column("group_id").to_pylist(), whole.column("step").to_pylist(),
                                         strict=True) if step is not None}
    assert table.column("reward_mean").null_count == 12, "those that the retired shards held"
    gaps = []
    assert answer_table(told, step=0, gaps=gaps).num_rows == 0
    assert len(gaps) == 1 and "step 0: " in gaps[0] and "was retired" in gaps[0]
    with pytest.raises(ShardRetired):
        answer_table(told, step=0)
    assert answer_table(told, step=5, gaps=[]).num_rows == 16


def put_checkpoint(run: RunDir, n: int, *, keep: int = 9) -> None:
    settings = store_config(checkpoint={"keep": keep}).checkpoint
    write_checkpoint(run, CheckpointState(n=n, revision=0, weights_digest="", version_step=n, version_digest="",
                                          skipped_in_a_row=0), parameters={}, optimizer={}, version=None, attempt=99,
                     settings=settings, fsync=False)


def test_a_start_never_falls_back_behind_the_window(told: RunDir) -> None:
    for n in (1, 3, 6):
        put_checkpoint(told, n)
    retire(told, first_needed([1, 3, 6], 2), attempt=99)
    damage = [told.checkpoint(n) / "manifest.json" for n in (6, 3)]
    damage[0].write_bytes(b"{")
    found = newest_whole(told)
    assert found is not None and found.state.n == 3, "the one before the newest has all its shards"
    damage[1].write_bytes(b"{")
    with pytest.raises(ShardRetired, match=r"n-000000001: the steps behind it cannot be trained again .*claim of step 1"
                                           r".* the checkpoints after it are damaged .*n-000000006"):
        newest_whole(told)

    (told.checkpoint(1) / "manifest.json").write_bytes(b"{")
    with pytest.raises(CheckpointDamaged, match=r"n-000000006.*n-000000003.*n-000000001.* does not go back to step 0 "
                                                r"by itself: .*claim of step 0: .* was retired.*new run .*"
                                                r"`headway rerun told --from-step 0`"):
        newest_whole(told)


def test_a_voided_step_needs_no_shards(told: RunDir) -> None:
    put_checkpoint(told, 2)
    for step in (0, 1, 2):
        void_step(told, step, reason="x", attempt=99)
    retire(told, 3, attempt=99)
    assert newest_whole(told) is not None


# -- the archive


def test_an_archived_shard_keeps_its_reward_parts(run: RunDir, tmp_path: Path) -> None:
    w = ShardWriter(run, "w", 1, {"model": "m"}, False, parts=["format"])
    w.land([make_group(i) for i in range(4)])
    next_owner(run).claim(0, 5)
    want = map_shard(run.shard(w.stream, 0))[0].to_pylist()
    retire(run, 1, attempt=99, archive=tmp_path)
    batch, meta = read_archived(run.archived(tmp_path, w.stream, 0))
    np.testing.assert_equal(batch.to_pylist(), want)
    assert meta["rl.digest.model"] == "m" and not run.shard(w.stream, 0).exists()


def test_an_archived_shard_has_the_same_columns_and_digests(told: RunDir, tmp_path: Path) -> None:
    (stream,) = told.streams.iterdir()
    want = {seq: (map_shard(told.shard(stream.name, seq))[0].to_pylist(), map_shard(told.shard(stream.name, seq))[1])
            for seq in (0, 1, 2, 3, 11)}
    experience = next_owner(told, store_config(retention={"archive": str(tmp_path / "archive")}))
    assert len(experience.retire(3).shards) == 5
    for seq, (rows, meta) in want.items():
        batch, found = read_archived(tmp_path / "archive" / "told" / stream.name / f"{seq:08d}.parquet")
        assert batch.to_pylist() == rows and found == meta
    path = tmp_path / "archive" / "told" / stream.name / "00000001.parquet"
    data = path.read_bytes()
    for at in range(len(data) // 8, len(data), max(1, len(data) // 8)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
        with suppress(BrokenFile):
            assert read_archived(path)[0].to_pylist() == want[1][0]


def test_nothing_is_removed_that_the_archive_does_not_take(told: RunDir, tmp_path: Path) -> None:
    (stream,) = told.streams.iterdir()
    taken = tmp_path / "told" / stream.name / "00000002.parquet"
    taken.parent.mkdir(parents=True)
    taken.write_bytes(b"something else")
    with pytest.raises(BrokenFile, match="not an archived shard"):
        retire(told, 3, attempt=99, archive=tmp_path)
    assert shards_there(told) == list(range(12)) and read_retired(told).shards == frozenset()


# -- property, and the mutant


Rule = Callable[[Sequence[int], int], int]


def lived(run: RunDir, seed: int, rule: Rule) -> list[str]:
    """A random life: groups land, are claimed, dropped, checkpointed, damaged and retired by `rule`. Returns what is
    gone that is needed: steps behind one of the `keep` checkpoints that were the newest whole ones at the last
    retirement (any of them may be what a start finds), and rows that wait."""
    rng = np.random.default_rng(seed)
    keep, w, position = int(rng.integers(1, 4)), ShardWriter(run, "w", 1, {}, False), 0
    experience, whole, lost, window = next_owner(run), set[int](), list[str](), 0
    for _ in range(60):
        match int(rng.integers(0, 6)):
            case 0 | 1:
                n = int(rng.integers(1, 9))
                w.land([make_group(position + i, rewards=[0.0, 1.0, 0.0, 1.0]) for i in range(n)]
                       + [make_group(int(rng.integers(0, position + 1)), seed=1)])
                position += n
                experience.discover()
            case 2 | 3:
                while experience.try_claim(experience.next_step) is not None and rng.random() < 0.5:
                    pass
            case 4:
                if len(experience.index.waiting) and rng.random() < 0.5:
                    row = int(rng.integers(0, len(experience.index.waiting)))
                    name = f"e0-p{int(experience.index.waiting.prompt_idx[row])}-t0"
                    put_outcome(run, Outcome(group_id=name, kind="failed", reason="x", error="x", try_no=0,
                                             position=int(name.split("-")[1][1:]), dataset_epoch=0))
                    experience.discover()
                whole.add(int(rng.integers(max(whole, default=0), experience.next_step + 1)))
                if len(whole) > keep and rng.random() < 0.3:
                    whole.discard(max(whole))  # damaged
            case _:
                if len(whole) >= keep:
                    window = max(window, min(sorted(whole)[-keep:]))
                experience.retire(rule(sorted(whole), keep))
                if rng.random() < 0.3:
                    experience = next_owner(run)
                    experience.discover(full=True)
        lost += [f"step {step} behind checkpoint {window}" for step in range(window, experience.next_step)
                 if not all(run.shard(g.stream, g.seq).exists() for g in read_claim(run, step).groups)]
        waiting = {(experience.index.shards[int(i)].stream, experience.index.shards[int(i)].seq)
                   for i in experience.index.waiting.shard}
        lost += [f"waiting rows of {shard}" for shard in waiting if not run.shard(*shard).exists()]
    report = audit(run)
    assert report.holds, report.violations
    return lost


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_let_go_that_a_start_from_a_whole_checkpoint_would_need(run: RunDir, seed: int) -> None:
    assert lived(run, seed, first_needed) == []


MUTANTS: dict[str, Rule] = {
    "retention that ignores kept checkpoints": lambda whole, keep: max(whole, default=0),
    "retention that keeps one checkpoint fewer": lambda whole, keep: first_needed(whole, max(1, keep - 1)),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_property_catches_a_mutant(tmp_path: Path, mutant: Rule) -> None:
    assert any(lived(make_run(tmp_path / str(seed)), seed, mutant) for seed in range(12))


# -- the quota


def tight(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Experience:
    """Nine groups wait no more, two wait, and the quota has no room for another one."""
    monkeypatch.setattr(experience_module, "reserve_bytes", lambda run: 0)
    landed = sum(path.stat().st_size for path in run.streams.glob("*/*.arrow"))
    experience = next_owner(run, store_config(storage={"fsync": False, "bytes_quota": landed + 100}))
    experience.discover(full=True)
    experience.attach(200, lambda epoch, position: position)
    experience.leases_known()
    experience.serves("w", 9)
    return experience


def test_a_full_quota_asks_for_room_and_goes_on_when_some_is_made(told: RunDir,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    experience = tight(told, monkeypatch)
    experience.makes_room = True
    assert experience.grant(["w"]) == [] and experience.poll(STEPS, 0.0) is None
    assert experience.short_of_room == STEPS
    experience.made_room(experience.retire(3).bytes)
    assert experience.short_of_room is None
    assert experience.poll(STEPS, 0.0) is None and experience.short_of_room is None
    assert len(experience.grant(["w"])) > 0


def test_a_full_quota_ends_the_run_by_name_when_nothing_can_be_freed(told: RunDir,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    experience = tight(told, monkeypatch)
    experience.makes_room = True
    experience.poll(STEPS, 0.0)
    experience.made_room(0)
    with pytest.raises(DiskQuotaTooSmall, match=r"no shard can be retired; raise storage\.bytes_quota"):
        experience.poll(STEPS, 0.0)
    alone = tight(told, monkeypatch)
    with pytest.raises(DiskQuotaTooSmall):
        alone.poll(STEPS, 0.0)


def test_what_is_free_of_the_file_system_stops_admission_too(told: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    experience = next_owner(told)
    experience.discover(full=True)
    assert experience.admission(9).free_bytes == pytest.approx(shutil.disk_usage(told.root).free, rel=0.2)
    experience.attach(200, lambda epoch, position: position)
    experience.leases_known()
    experience.serves("w", 9)
    monkeypatch.setattr(experience_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2, 2, 0))  # pyright: ignore
    experience.discover()
    assert experience.grant(["w"]) == []
    assert "what is free of the file system" in experience.stall_report()
    with pytest.raises(DiskQuotaTooSmall, match="0 bytes of the file system are free"):
        experience.poll(STEPS, 0.0)


# -- what the flow does with it


class Owner:
    """What retention needs of an owner, over a real run; its learner writes real checkpoints."""

    def __init__(self, run: RunDir, **over: Any) -> None:
        self.run, self.config, self.experience = run, store_config(**over), next_owner(run, store_config(**over))
        self.whole_checkpoints, self.notes, self.learner, self.progress = set[int](), list[str](), self, self
        self.experience.discover(full=True)

    def checkpoint(self) -> int:
        put_checkpoint(self.run, STEPS)
        return STEPS

    def set(self, note: str) -> None:
        self.notes.append(note)


def test_a_damaged_checkpoint_does_not_move_the_window(told: RunDir) -> None:
    for n in (1, 3, 6, 8):
        put_checkpoint(told, n)
    (told.checkpoint(6) / "optimizer.safetensors").write_bytes(b"rotten")
    owner: Any = Owner(told, retention={"replay": "window"}, checkpoint={"keep": 2})
    assert retire_shards(owner).below == 3, "of 8 and 3, the newest two that are whole"
    assert owner.whole_checkpoints == {3, 8} and owner.notes == []
    assert [step for step in range(STEPS) if readable(told, step)] == [3, 4, 5, 6, 7]


def test_a_full_quota_makes_a_checkpoint_at_once_and_says_what_it_cost(told: RunDir) -> None:
    put_checkpoint(told, 3)
    owner: Any = Owner(told, checkpoint={"keep": 2})
    assert make_room(owner, STEPS) > 0
    assert checkpoints(told) == [3, 8] and retired_below(told) == 3
    assert owner.notes == ["storage.bytes_quota is used up: 5 shards of steps before 3 are retired; these steps cannot "
                           "be trained again"]
    assert make_room(owner, STEPS) == 0 and len(owner.notes) == 1


def test_what_keeps_shards_from_being_retired_is_a_note(told: RunDir, tmp_path: Path) -> None:
    for n in (3, 6):
        put_checkpoint(told, n)
    (tmp_path / "archive").write_text("a file")
    owner: Any = Owner(told, retention={"replay": "window", "archive": str(tmp_path / "archive")})
    assert retire_shards(owner).shards == () and shards_there(told) == list(range(12))
    assert len(owner.notes) == 1 and owner.notes[0].startswith("no shard was retired: ")


def test_an_archive_is_tried_before_a_start_and_one_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    wanted = tmp_path / "new" / "archive"
    assert try_archive(str(wanted), make=False) == wanted and not wanted.exists()
    assert try_archive(str(wanted), make=True) == wanted and list(wanted.iterdir()) == []
    (tmp_path / "file").write_text("a file")
    for make in (False, True):
        with pytest.raises(ConfigError, match=r"retention\.archive: shards cannot be written to .*Not a directory"):
            try_archive(str(tmp_path / "file" / "archive"), make=make)
