from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rl_core.config import Config
from rl_core.experience.audit import POSITION_STATES, ROW_STATES, audit
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import (
    EndOfData,
    group_ids_digest,
    put_claim,
    put_drops,
    put_end,
    read_claim,
    void_step,
)
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent, to_json
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
        "unleased": 11}
    assert counts(report.rows) == {"claimed": 4, "void": 4, "duplicate": 2, "eligible": 1, "dropped": 2, "filtered": 1,
                                   "fenced": 1, "quarantined": 1, "unverified": 1}
    assert (report.frontier, report.claims, report.recorded, report.shards) == ((0, 27), 2, 1, 4)
    assert sum(report.positions.values()) == 27
    json.dumps(report.as_json())


def test_positions_that_left_no_trace_are_counted_over_all_dataset_epochs(run: RunDir) -> None:
    ShardWriter(run, "w", 1, {}, False).land([make_group(2), make_group(0, dataset_epoch=1)])
    assert counts(audit(run).positions) == {"pending": 2, "unleased": 2}
    assert counts(audit(run, n_prompts=5).positions) == {"pending": 2, "unleased": 4}


def test_only_a_live_owner_holds_leases(run: RunDir) -> None:
    ShardWriter(run, "w", 1, {}, False).land([make_group(2)])
    owner = OwnerLock(run)
    assert counts(audit(run).positions) == {"pending": 1, "leased": 2}
    owner.release()
    assert counts(audit(run).positions) == {"pending": 1, "unleased": 2}


def test_the_highest_try_says_where_an_unfinished_position_stands(run: RunDir) -> None:
    ShardWriter(run, "w", 1, {}, False).land([make_group(0), make_group(0, try_no=2)])
    put_drops(run, 0, [Drop(group_id="e0-p0-t0", reason="stale", n_tokens=1)], attempt=1)
    put_outcome(run, outcome(0, "failed", 1))
    assert counts(audit(run).positions) == {"pending": 1}
    put_outcome(run, outcome(0, "failed", 2))
    assert counts(audit(run).positions) == {"failed": 1}


def test_failed_tries_are_counted_by_reason_also_where_their_group_landed(run: RunDir) -> None:
    metas = [{"failures": 3, "last_failure": "reward_error", "failed": {"reward_error": 2, "engine_error": 1}},
             {"failures": 2, "last_failure": "reward_timeout"},  # of before reasons were counted
             {"failed": "no table"}, {}]
    ShardWriter(run, "w", 1, {}, False).land([replace(make_group(i), meta=meta) for i, meta in enumerate(metas)])
    put_outcome(run, replace(outcome(4, "failed"), reason="reward_error"))
    put_outcome(run, replace(outcome(4, "given_up", 1), reason="reward_error"))
    put_outcome(run, replace(outcome(5, "poison"), reason="prompt_refused"))
    put_outcome(run, replace(outcome(6, "filtered"), reason="too_easy"))
    report = audit(run)
    assert report.holds and report.as_json()["failed"] == {"engine_error": 1, "reward_error": 2, "reward_timeout": 2}
    assert report.as_json()["failed_groups"] == {"prompt_refused": 1, "reward_error": 2}
    assert report.filtered == {"too_easy": 1}


N_PROMPTS = 12


@pytest.fixture
def ended(run: RunDir) -> RunDir:
    """One pass over 12 prompts that ended with the data: 8 trained, one poison, one filtered, one given up after a drop
    and a failure, one left over. Position 2 was trained by its second try, the first one was too old."""
    writer = ShardWriter(run, "w", 1, {}, False)
    writer.land([make_group(i) for i in range(5)])
    put_drops(run, 0, [Drop(group_id="e0-p2-t0", reason="stale", n_tokens=1)], attempt=1)
    writer.land([make_group(2, try_no=1), *(make_group(i) for i in range(5, 8))])
    experience = start(run)
    experience.claim(0, 5)
    experience.claim(1, 5)
    writer.land([make_group(9), make_group(10)])
    writer.land([make_group(11)])
    put_drops(run, 2, [Drop(group_id="e0-p9-t0", reason="filtered", n_tokens=1)], attempt=1)
    put_drops(run, 2, [Drop(group_id="e0-p10-t0", reason="stale", n_tokens=1)], attempt=1)
    put_outcome(run, outcome(8, "poison"))
    put_outcome(run, outcome(10, "failed", 1))
    put_outcome(run, outcome(10, "given_up", 2))
    put_end(run, EndOfData(step=2, reason="data", left_over=1), revision=0, attempt=1)
    return run


def test_at_the_end_of_the_data_every_position_is_finished(ended: RunDir) -> None:
    report = audit(ended, n_prompts=N_PROMPTS, epochs=1)
    assert report.violations == []
    assert counts(report.positions) == {"trained": 8, "poison": 1, "filtered": 1, "given_up": 1, "pending": 1}


def _shard(run: RunDir, seq: int) -> None:
    next(run.streams.glob(f"*/{seq:08d}.arrow")).unlink()


LOST = {
    "a claimed shard": (lambda run: _shard(run, 0), "claim 0: e0-p0-t0 is not in shard"),
    "a shard inside a stream": (lambda run: _shard(run, 1), "shard 1 is gone, shard 3 is there"),
    "a shard whose groups were dropped": (lambda run: _shard(run, 2), "e0-p9-t0 is dropped as filtered, but no shard"),
    "the last shard": (lambda run: _shard(run, 3), "dataset epoch 0 position 11 is lost, but the data has ended"),
    "the poison": (lambda run: run.outcome("e0-p8-t0").unlink(), "dataset epoch 0 position 8 is lost"),
    "the failed try": (lambda run: run.outcome("e0-p10-t1").unlink(), "has a try 2, but nothing ended e0-p10-t1"),
    "the giving up": (lambda run: run.outcome("e0-p10-t2").unlink(), "dataset epoch 0 position 10 is failed, but"),
    "the drop of a trained position": (lambda run: run.drops(0, 0).unlink(), "has a try 1, but nothing ended e0-p2-t0"),
    "the drop of a filtered group": (lambda run: run.drops(2, 0).unlink(), "2 groups wait, but the data ended with 1"),
    "the drop of a position given up": (lambda run: run.drops(2, 1).unlink(), "nothing ended e0-p10-t0"),
    "the last claim": (lambda run: run.claim(1).unlink(), "ended at step 2, but 1 steps have a claim"),
}


@pytest.mark.parametrize(("lose", "want"), LOST.values(), ids=LOST)
def test_a_file_that_is_gone_is_missed(ended: RunDir, lose: Callable[[RunDir], Any], want: str) -> None:
    lose(ended)
    report = audit(ended, n_prompts=N_PROMPTS, epochs=1)
    assert not report.holds
    assert any(want in violation for violation in report.violations), report.violations


MISSED_WHILE_IT_RUNS = ("a claimed shard", "a shard inside a stream", "the failed try",
                        "the drop of a trained position", "the drop of a position given up")


@pytest.mark.parametrize("name", MISSED_WHILE_IT_RUNS)
def test_most_is_missed_before_the_end_already(ended: RunDir, name: str) -> None:
    """The others are made again: nothing below the frontier stays without a lease for longer than until the next
    start."""
    ended.end(0).unlink()
    assert audit(ended, n_prompts=N_PROMPTS, epochs=1).holds
    lose, want = LOST[name]
    lose(ended)
    assert any(want in violation for violation in audit(ended, n_prompts=N_PROMPTS, epochs=1).violations)


def test_prompts_after_the_last_one_that_left_a_trace_are_lost_too(ended: RunDir) -> None:
    report = audit(ended, n_prompts=15, epochs=2)
    assert report.positions["lost"] == 18
    assert [text for text in report.violations if "lost" in text] == [
        "dataset epoch 0 position 12-14 is lost, but the data has ended",
        "dataset epoch 1 position 0-14 is lost, but the data has ended"]


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
