"""Snapshots of the ledger: a start from one knows the same as a start from all claims; a bad one is passed over."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.index import group_keys
from rl_core.experience.ledger import put_drops, read_claim
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.positions import FINISHED
from rl_core.experience.shards import ShardWriter
from rl_core.experience.snapshots import put_snapshot, read_past, snapshots
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.types import Claim, Drop, Outcome, OutcomeKind
from tests.builders import make_group, make_run, next_owner, store_config

B = 4


def outcome(position: int, kind: OutcomeKind, epoch: int = 0, try_no: int = 0) -> Outcome:
    return Outcome(group_id=f"e{epoch}-p{position}-t{try_no}", kind=kind, reason="x", error="x", try_no=try_no,
                   position=position, dataset_epoch=epoch)


def story(run: RunDir) -> RunDir:
    """Five claims of positions 0 to 20 of one dataset epoch; 4 is filtered, 9 stale and trained by its second try, 22
    poison, 23 has failed, 21 and 24 to 26 wait."""
    put_if_absent(run.inputs, to_json({"digests": {}, "rows": 30}))
    w = ShardWriter(run, "w", 1, {}, False)
    w.land([make_group(i) for i in range(12)])
    put_drops(run, 0, [Drop(group_id="e0-p4-t0", reason="filtered", n_tokens=7),
                       Drop(group_id="e0-p9-t0", reason="stale", n_tokens=9)], attempt=1)
    put_outcome(run, outcome(22, "poison"))
    put_outcome(run, outcome(23, "failed"))
    w.land([make_group(9, try_no=1, lease_no=12), *(make_group(i) for i in (*range(12, 22), 24, 25, 26))])
    experience = next_owner(run)
    for step in range(5):
        assert isinstance(experience.claim(step, 5), Claim)
    return run


@pytest.fixture
def told(tmp_path: Path) -> RunDir:
    return story(make_run(tmp_path / "told"))


def knowledge(run: RunDir) -> dict[str, Any]:
    """All that a start knows, in a form that can be compared."""
    experience = next_owner(run)
    experience.discover(full=True)
    experience.attach(30, lambda epoch, position: position)
    experience.leases_known()
    index, positions = experience.index, experience.positions
    keys = [int(key) for key in group_keys(np.zeros(90, np.int32), np.arange(90) % 30, np.arange(90) // 30)]
    return {"next": experience.next_step, "claimed": [key for key in keys if key in index.claimed],
            "ended": [key for key in keys if key in index.ended], "waits": sorted(index.waiting.key.tolist()),
            "tries": [positions.try_of(0, position) for position in range(30)], "L": experience.L,
            "again": positions.waiting_again, "bytes": experience.discovery.landed_bytes,
            "read": sorted((shard.stream, shard.seq) for shard in index.shards)}


@pytest.mark.parametrize("below", [0, 1, 3, 5])
def test_a_start_from_a_snapshot_knows_the_same(told: RunDir, below: int) -> None:
    before = knowledge(told)
    path = put_snapshot(told, below, attempt=99)
    assert path == told.snapshot(below) and path.exists()
    assert knowledge(told) == before
    assert before["next"] == 5 and before["L"] == 4
    assert [before["tries"][i] for i in (4, 9, 22)] == [FINISHED] * 3


def test_only_claims_and_drops_after_the_newest_snapshot_are_read(told: RunDir) -> None:
    put_snapshot(told, 3, attempt=99)
    for step in range(3):
        if step != 2:  # the one that the snapshot is bound to
            told.claim(step).write_bytes(b"not read any more")
    next(told.ledger().glob("drops-*")).write_bytes(b"neither is this")
    told.outcome("e0-p22-t0").write_bytes(b"nor this")
    past = read_past(told)
    assert past.claimed.steps == 5 and len(past.claimed.groups_G4) == 20 and past.passed_over == ()
    assert sum(past.claimed.rows_by_shard.values()) == 20
    assert [drop.group_id for drop in past.claimed.dropped] == ["e0-p4-t0", "e0-p9-t0"]
    assert past.outcomes["e0-p22-t0"] == outcome(22, "poison")


def test_drops_and_outcomes_behind_a_snapshot_are_read(told: RunDir) -> None:
    put_snapshot(told, 5, attempt=99)
    put_drops(told, 5, [Drop(group_id="e0-p24-t0", reason="stale", n_tokens=1)], attempt=99)
    put_drops(told, 2, [Drop(group_id="e0-p25-t0", reason="stale", n_tokens=1)], attempt=99)  # of a late rival
    put_outcome(told, outcome(27, "given_up", try_no=3))
    experience = next_owner(told)
    experience.discover(full=True)
    assert experience.L == 2
    assert experience.positions.try_of(0, 27) == FINISHED


def damaged(change: Callable[[bytes], bytes]) -> Callable[[RunDir], None]:
    def spoil(run: RunDir) -> None:
        run.snapshot(5).write_bytes(change(run.snapshot(5).read_bytes()))

    return spoil


def flipped(data: bytes) -> bytes:
    at = data.index(b"ARROW1") + len(data) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1:]


def of_another_run(run: RunDir) -> None:
    """The same steps of a run with the same settings, whose last claim took other groups."""
    other = story(make_run(run.root.parent / "other"))
    claim = read_claim(other, 4)
    other.claim(4).unlink()
    other.claim(4).write_bytes(run.claim(4).read_bytes() + b" ")
    assert claim.step == 4
    run.snapshot(5).unlink()
    run.snapshot(5).write_bytes(put_snapshot(other, 5, attempt=99).read_bytes())


def of_other_steps(run: RunDir) -> None:
    run.snapshot(5).write_bytes(run.snapshot(3).read_bytes())


BAD: dict[str, tuple[Callable[[RunDir], None], str]] = {
    "cut off": (damaged(lambda data: data[:len(data) // 2]), "Invalid|ArrowInvalid"),
    "empty": (damaged(lambda data: b""), "Invalid"),
    "a flipped bit": (damaged(flipped), ""),
    "zeroed": (damaged(lambda data: data[:len(data) // 2] + bytes(99) + data[len(data) // 2 + 99:]), ""),
    "of another run": (of_another_run, r"other claims or another run \(rl.last_claim differ\)"),
    "of other steps": (of_other_steps, r"other claims or another run \(rl.last_claim, rl.step differ\)"),
}


@pytest.mark.parametrize(("spoil", "why"), BAD.values(), ids=BAD)
def test_a_bad_snapshot_is_passed_over_by_name(told: RunDir, spoil: Callable[[RunDir], None], why: str,
                                               caplog: pytest.LogCaptureFixture) -> None:
    put_snapshot(told, 3, attempt=99)
    put_snapshot(told, 5, attempt=99)
    told.snapshot(5).chmod(0o644)
    before = knowledge(told)
    spoil(told)
    with caplog.at_level(logging.WARNING):
        assert knowledge(told) == before
    passed = read_past(told).passed_over
    assert len(passed) == 1 and passed[0].startswith(f"{told.snapshot(5)}: ")
    assert re.search(why, passed[0])
    assert str(told.snapshot(5)) in caplog.text
    told.snapshot(3).write_bytes(b"")
    assert len(read_past(told).passed_over) == 2
    assert knowledge(told) == before, "all claims are read"


def test_a_bad_snapshot_is_written_again_and_the_two_newest_stay(told: RunDir) -> None:
    for below in (1, 2, 3):
        put_snapshot(told, below, attempt=99)
    assert [step for step, _ in snapshots(told)] == [2, 3]
    good = told.snapshot(3).read_bytes()
    told.snapshot(3).write_bytes(good[:100])
    put_snapshot(told, 3, attempt=99)
    assert read_past(told).passed_over == ()
    assert audit(told).holds


def test_a_snapshot_needs_the_claims_it_tells_of(told: RunDir) -> None:
    with pytest.raises(ValueError, match="there are 5"):
        put_snapshot(told, 6, attempt=99)


def test_snapshots_are_written_while_claims_are_made(run: RunDir) -> None:
    ShardWriter(run, "w", 1, {}, False).land([make_group(i) for i in range(28)])
    experience = next_owner(run, store_config(retention={"snapshot_every": 3}))
    for step in range(7):
        experience.claim(step, 5)
    assert [step for step, _ in snapshots(run)] == [3, 6]
    again = next_owner(run)
    assert again.next_step == 7 and again.claim(6, 5) == read_claim(run, 6)


def test_a_snapshot_is_readable_by_anything_that_knows_arrow(told: RunDir) -> None:
    table = pa.ipc.open_file(pa.py_buffer(put_snapshot(told, 5, attempt=99).read_bytes())).read_all()
    assert table.num_rows == 1
    assert len(table.column("position")[0].as_py()) == 20
    assert table.column("stream")[0].as_py()[0].startswith("w-")


def closed_epoch(run: RunDir) -> Experience:
    """Dataset epoch 0 has 8 prompts: 4 to 7 and 0 to 2 are finished, and 3 once `end` is given."""
    put_if_absent(run.inputs, to_json({"digests": {}, "rows": 8}))
    w = ShardWriter(run, "w", 1, {}, False)
    w.land([make_group(i) for i in (0, 1, 2, 4, 5, 6, 7)])
    put_drops(run, 0, [Drop(group_id="e0-p2-t0", reason="filtered", n_tokens=1)], attempt=1)
    put_outcome(run, outcome(7, "poison"))
    w.land([make_group(i, dataset_epoch=1) for i in range(3)])
    experience = next_owner(run)
    experience.claim(0, 5)  # 0, 1, 4, 5
    experience.claim(1, 5)  # 6 and 0, 1, 2 of the next one
    return experience


def test_ids_of_a_dataset_epoch_are_forgotten_only_when_every_position_is_finished(run: RunDir) -> None:
    closed_epoch(run)
    put_snapshot(run, 2, attempt=99)
    assert read_past(run).closed == {}, "position 3 is open"
    put_outcome(run, outcome(3, "failed"))
    run.snapshot(2).unlink()
    put_snapshot(run, 2, attempt=99)
    assert read_past(run).closed == {}, "a failed try is not the last one"
    put_outcome(run, outcome(3, "given_up", try_no=1))
    run.snapshot(2).unlink()
    put_snapshot(run, 2, attempt=99)
    past = read_past(run)
    assert past.closed == {0: 8}
    assert past.claimed.groups_G4[:, 0].tolist() == [1, 1, 1] and past.claimed.dropped == () and past.outcomes == {}


def test_what_lands_late_of_a_closed_dataset_epoch_never_waits_and_is_never_leased(run: RunDir) -> None:
    closed_epoch(run)
    put_outcome(run, outcome(3, "given_up", try_no=1))
    put_snapshot(run, 2, attempt=99)
    ShardWriter(run, "zombie", 1, {}, False).land([make_group(i) for i in (0, 3, 7)])
    experience = next_owner(run)
    experience.discover(full=True)
    assert experience.L == 0
    experience.attach(8, lambda epoch, position: position)
    assert not experience.adopt("w", "e0-p3-t0", 0)
    experience.leases_known()
    experience.serves("w", 5)
    leased = {lease.group_id for lease in experience.grant(["w"])}
    assert "e1-p3-t0" in leased and not leased & {f"e1-p{i}-t0" for i in range(3)}

