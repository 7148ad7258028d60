from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rl_core.config import Config
from rl_core.experience.audit import POSITION_STATES, ROW_STATES, audit
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import group_ids_digest, put_claim, put_drops, read_claim, void_step
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.types import Claim, Drop, Outcome, OutcomeKind
from tests.builders import make_group

B = 4


def start(run: RunDir) -> Experience:
    put_if_absent(run.attempt(1), b"{}", fsync=False)
    config = Config.model_validate({"groups_per_step": B, "group_size": 4, "storage": {"fsync": False}})
    return Experience(run, config, 1)


def outcome(position: int, kind: OutcomeKind, try_no: int = 0) -> Outcome:
    return Outcome(group_id=f"e0-p{position}-t{try_no}", kind=kind, reason="x", error="x", try_no=try_no,
                   position=position, dataset_epoch=0)


@pytest.fixture
def trained(run: RunDir) -> RunDir:
    """Two claims of positions 0 to 7, position 8 waits."""
    ShardWriter(run, "w", 1, {}, False).land([make_group(i) for i in range(9)])
    experience = start(run)
    experience.claim(0, 5)
    experience.claim(1, 5)
    return run


def counts(found: dict[str, int]) -> dict[str, int]:
    return {state: n for state, n in found.items() if n}


def test_an_empty_run_directory_holds(run: RunDir) -> None:
    report = audit(run)
    assert report.holds and report.frontier == (0, 0)
    assert report.as_json()["positions"] == dict.fromkeys(POSITION_STATES, 0)
    assert report.as_json()["rows"] == dict.fromkeys(ROW_STATES, 0)


def test_every_position_and_row_is_in_exactly_one_state(trained: RunDir) -> None:
    """Beside the trained ones: every other way for a group to be."""
    run = trained
    w = ShardWriter(run, "w2", 1, {}, False)
    w.land([make_group(0, seed=1), make_group(8, seed=1), *(make_group(i) for i in range(20, 24))])
    put_drops(run, 2, [Drop(group_id="e0-p20-t0", reason="stale", n_tokens=1),
                       Drop(group_id="e0-p21-t0", reason="filtered", n_tokens=1),
                       Drop(group_id="e0-p22-t0", reason="fenced", n_tokens=1)], attempt=1)
    ends: list[tuple[int, OutcomeKind]] = [(23, "failed"), (24, "failed"), (25, "poison"), (26, "given_up")]
    for position, kind in ends:
        put_outcome(run, outcome(position, kind))
    bad = ShardWriter(run, "w3", 1, {}, False)
    for i in (30, 31):
        path = run.shard(bad.stream, bad.land([make_group(i)]).seq)
        path.write_bytes(path.read_bytes()[:-200])
    put_if_absent(run.quarantined(bad.stream, 0), to_json({"stream": bad.stream, "seq": 0, "error": "x", "ts_us": 0}))
    void_step(run, 1, reason="x", attempt=1)
    put_if_absent(run.record(0), b"{}")
    report = audit(run)
    assert report.violations == []
    assert counts(report.positions) == {
        "trained": 4, "voided": 4, "pending": 1, "dropped": 2, "filtered": 1, "failed": 2, "poison": 1, "given_up": 1,
        "leased": 11}
    assert counts(report.rows) == {"claimed": 4, "void": 4, "duplicate": 2, "eligible": 1, "dropped": 2, "filtered": 1,
                                   "fenced": 1, "quarantined": 1, "unverified": 1}
    assert (report.frontier, report.claims, report.recorded, report.shards) == ((0, 27), 2, 1, 4)
    assert sum(report.positions.values()) == 27
    json.dumps(report.as_json())


def test_a_closed_dataset_epoch_counts_positions_that_left_no_trace(run: RunDir) -> None:
    ShardWriter(run, "w", 1, {}, False).land([make_group(2), make_group(0, dataset_epoch=1)])
    assert counts(audit(run).positions) == {"pending": 2, "leased": 2}
    assert counts(audit(run, n_prompts=5).positions) == {"pending": 2, "leased": 4}


def test_the_highest_try_says_where_an_unfinished_position_stands(run: RunDir) -> None:
    ShardWriter(run, "w", 1, {}, False).land([make_group(0), make_group(0, try_no=2)])
    put_drops(run, 0, [Drop(group_id="e0-p0-t0", reason="stale", n_tokens=1)], attempt=1)
    put_outcome(run, outcome(0, "failed", 1))
    assert counts(audit(run).positions) == {"pending": 1}
    put_outcome(run, outcome(0, "failed", 2))
    assert counts(audit(run).positions) == {"failed": 1}


def rewrite(run: RunDir, step: int, change: Callable[[Claim], Claim]) -> None:
    claim = change(read_claim(run, step))
    run.claim(step).unlink()
    put_claim(run, replace(claim, group_ids_digest=group_ids_digest(g.group_id for g in claim.groups)), fsync=False)


def _twice(run: RunDir) -> None:
    again = read_claim(run, 0)
    rewrite(run, 1, lambda claim: replace(claim, groups=again.groups, shard_digests=again.shard_digests))


def _rot(run: RunDir) -> None:
    path = next(run.streams.glob("*/*.arrow"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _out_of_order(run: RunDir) -> None:
    rewrite(run, 1, lambda claim: replace(claim, groups=claim.groups[::-1]))


def _wrong_row(run: RunDir) -> None:
    rewrite(run, 1, lambda claim: replace(claim, groups=(replace(claim.groups[0], row=8), *claim.groups[1:])))


def _no_such_row(run: RunDir) -> None:
    rewrite(run, 1, lambda claim: replace(claim, groups=(replace(claim.groups[0], row=60), *claim.groups[1:])))


def _other_digest(run: RunDir) -> None:
    rewrite(run, 1, lambda claim: replace(claim, shard_digests=dict.fromkeys(claim.shard_digests, "0")))


def _dropped(run: RunDir) -> None:
    put_drops(run, 2, [Drop(group_id="e0-p3-t0", reason="stale", n_tokens=1)], attempt=1)


def _dropped_twice(run: RunDir) -> None:
    for _ in range(2):
        put_drops(run, 2, [Drop(group_id="e0-p8-t0", reason="stale", n_tokens=1)], attempt=1)


def _poisoned(run: RunDir) -> None:
    put_outcome(run, outcome(3, "poison", 1))


def _gap(run: RunDir) -> None:
    run.claim(0).unlink()


def _torn(run: RunDir) -> None:
    run.claim(1).write_bytes(run.claim(1).read_bytes()[:50])


def _void_and_recorded(run: RunDir) -> None:
    void_step(run, 1, reason="x", attempt=1)
    put_if_absent(run.record(1), b"{}")


def _recorded_without_claim(run: RunDir) -> None:
    put_if_absent(run.record(2), b"{}")


@pytest.mark.parametrize(
    ("spoil", "want"),
    [(_twice, "dataset epoch 0 position 0 is claimed by steps 0 and 1"), (_rot, "does not verify any more"),
     (_out_of_order, "claim 1: groups are not in training order"), (_wrong_row, "row 8 holds e0-p8-t0, not e0-p4-t0"),
     (_no_such_row, "claim 1: e0-p4-t0 is not in shard"), (_other_digest, "is not the one that was claimed"),
     (_dropped, "e0-p3-t0 is claimed by step 0 and dropped as stale"),
     (_dropped_twice, "e0-p8-t0 is dropped again by drops"),
     (_poisoned, "dataset epoch 0 position 3 is poison and trained"), (_gap, "the ledger has a gap"),
     (_torn, "not JSON"), (_void_and_recorded, "step 1 is void but has a record"),
     (_recorded_without_claim, "step 2 has a record but no claim")],
    ids=lambda value: value.__name__.strip("_") if callable(value) else None)
def test_what_contradicts_the_partition_is_named(trained: RunDir, spoil: Callable[[RunDir], Any], want: str) -> None:
    assert audit(trained).holds
    spoil(trained)
    report = audit(trained)
    assert not report.holds
    assert any(want in violation for violation in report.violations), report.violations
