from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from flows.auditing_text import audit_lines
from rl_core.config import Config
from rl_core.experience.audit import audit
from rl_core.experience.audit_states import POSITION_STATES, ROW_STATES, SHARD_STATES
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import (
    EndOfData,
    RetiredRow,
    group_ids_digest,
    put_claim,
    put_drops,
    put_end,
    put_retired,
    read_claim,
    void_step,
)
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent, to_json
from rl_core.types import Claim, Drop, DropReason, Outcome, OutcomeKind
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


DROPPED: list[tuple[int, DropReason]] = [
    (9, "stale"), (10, "all_masked"), (11, "stale"), (12, "partial"), (13, "fenced"), (14, "filtered"),
    (19, "stale"), (20, "stale")]
"""Position -> why its first try was dropped."""
ENDED_WITHOUT_A_ROW: list[tuple[int, int, OutcomeKind, str]] = [
    (15, 0, "failed", "group_deadline"), (16, 0, "poison", "prompt_refused"), (17, 0, "failed", "reward_error"),
    (17, 1, "given_up", "engine_error"), (18, 0, "filtered", "too_easy"), (19, 1, "failed", "reward_error")]
"""Position, try, kind, reason."""


@pytest.fixture
def every_state(run: RunDir) -> RunDir:
    """Every state of a position that a run of its own has without a lease, of a row and of a shard, and every reason.
    Stream `a`: claims 0 and 1, of which step 1 is void and shard 0 retired; `b`: what was dropped and what waits; `c`:
    a duplicate, a drop alone, a shard in quarantine, one that does not verify."""
    a, b, c = (ShardWriter(run, name, 1, {}, False) for name in "abc")
    a.land([make_group(i) for i in range(4)])
    put_drops(run, 0, [Drop(group_id="e0-p2-t0", reason="stale", n_tokens=1)], attempt=1)
    a.land([make_group(2, try_no=1), *(make_group(i) for i in range(4, 8))])
    experience = start(run)
    experience.claim(0, 5)
    experience.claim(1, 5)
    void_step(run, 1, reason="x", attempt=1)
    row = RetiredRow(group_id="e0-p2-t0", dataset_epoch=0, position=2, idx_min=0, stream=a.stream, seq=0, row=2)
    put_retired(run, 1, [(a.stream, 0)], [row], attempt=1)
    run.shard(a.stream, 0).unlink()
    b.land([*(make_group(i) for i in range(8, 15)), make_group(19), make_group(23)])
    c.land([make_group(0, seed=1)])
    c.land([make_group(20)])
    for position in (21, 22):
        path = run.shard(c.stream, c.land([make_group(position)]).seq)
        path.write_bytes(path.read_bytes()[:-200])
    put_if_absent(run.quarantined(c.stream, 2), to_json({"stream": c.stream, "seq": 2, "error": "torn", "ts_us": 0}))
    put_drops(run, 2, [Drop(group_id=f"e0-p{i}-t0", reason=reason, n_tokens=1) for i, reason in DROPPED], attempt=1)
    for position, try_no, kind, reason in ENDED_WITHOUT_A_ROW:
        put_outcome(run, replace(outcome(position, kind, try_no), reason=reason))
    return run


EACH_PROMPT = [
    (0, 0, "e0-p0-t0", "trained", 0, None, 1, []),
    (0, 1, "e0-p1-t0", "trained", 0, None, 1, []),
    (0, 2, "e0-p2-t1", "trained", 0, None, 2, ["stale"]),
    (0, 3, "e0-p3-t0", "trained", 0, None, 1, []),
    *((0, i, f"e0-p{i}-t0", "voided", 1, None, 1, []) for i in range(4, 8)),
    (0, 8, "e0-p8-t0", "pending", None, None, 1, []),
    (0, 9, "e0-p9-t0", "dropped", None, "stale", 1, []),
    (0, 10, "e0-p10-t0", "dropped", None, "all_masked", 1, []),
    (0, 11, "e0-p11-t0", "dropped", None, "stale", 1, []),
    (0, 12, "e0-p12-t0", "dropped", None, "partial", 1, []),
    (0, 13, "e0-p13-t0", "dropped", None, "fenced", 1, []),
    (0, 14, "e0-p14-t0", "filtered", None, "no_spread", 1, []),
    (0, 15, "e0-p15-t0", "failed", None, "group_deadline", 1, []),
    (0, 16, "e0-p16-t0", "poison", None, "prompt_refused", 1, []),
    (0, 17, "e0-p17-t1", "given_up", None, "engine_error", 2, ["reward_error"]),
    (0, 18, "e0-p18-t0", "filtered", None, "too_easy", 1, []),
    (0, 19, "e0-p19-t1", "failed", None, "reward_error", 2, ["stale"]),
    (0, 20, "e0-p20-t0", "dropped", None, "stale", 1, []),
    (0, 21, None, "unleased", None, None, 0, []),
    (0, 22, None, "unleased", None, None, 0, []),
    (0, 23, "e0-p23-t0", "pending", None, None, 1, [])]
"""Dataset epoch, position, group, state, step, reason, tries, what ended those before."""
EACH_SHARD = [
    ("a/0", "retired", [0], {"claimed": 3, "dropped": 1}, None),
    ("a/1", "claimed", [0, 1], {"claimed": 1, "void": 4}, None),
    ("b/0", "eligible", [], {"dropped": 5, "filtered": 1, "fenced": 1, "eligible": 2}, None),
    ("c/0", "duplicate", [], {"duplicate": 1}, None),
    ("c/1", "dropped", [], {"dropped": 1}, None),
    ("c/2", "quarantined", [], {"quarantined": 1}, "torn"),
    ("c/3", "unverified", [], {"unverified": 1}, "not whole")]
"""Shard, state, steps, rows, why it is not read."""


def short(shard: str) -> str:
    """`a-4f2a9c0b11d3/1` -> `a/1`."""
    stream, seq = shard.split("/")
    return f"{stream.split('-')[0]}/{seq}"


def test_what_became_of_each_prompt_is_listed_with_its_step_or_reason(every_state: RunDir) -> None:
    report = audit(every_state, each_prompt=True)
    assert report.violations == [] and report.each_shard is None
    assert report.each_prompt == EACH_PROMPT
    assert counts(report.positions) == Counter(prompt[3] for prompt in EACH_PROMPT)
    assert {prompt[3] for prompt in EACH_PROMPT} == set(POSITION_STATES) - {"leased", "absent", "lost"}
    assert {reason for _, reason in DROPPED} == set(get_args(DropReason))
    listed = json.loads(json.dumps(report.as_json()))["each_prompt"]
    assert [tuple(prompt.values()) for prompt in listed] == EACH_PROMPT
    assert listed[2] == {"dataset_epoch": 0, "position": 2, "group_id": "e0-p2-t1", "state": "trained", "step": 0,
                         "reason": None, "tries": 2, "before": ["stale"]}


def test_what_became_of_each_shard_is_listed_with_its_steps_and_rows(every_state: RunDir) -> None:
    report = audit(every_state, each_shard=True)
    assert report.violations == [] and report.each_prompt is None and report.each_shard is not None
    found = [each._replace(shard=short(each.shard)) for each in report.each_shard]
    assert found[:-1] == EACH_SHARD[:-1]
    assert found[-1][:4] == EACH_SHARD[-1][:4] and "00000003.arrow" in str(found[-1].reason)
    assert report.shard_states == dict.fromkeys(SHARD_STATES, 1)
    assert counts(report.rows) == sum((Counter(each[3]) for each in EACH_SHARD), Counter[str]())
    assert {state for each in EACH_SHARD for state in each[3]} == set(ROW_STATES)
    listed = json.loads(json.dumps(report.as_json()))["each_shard"]
    assert [(short(each["shard"]), *list(each.values())[1:]) for each in listed[:-1]] == EACH_SHARD[:-1]


def test_shards_are_listed_in_the_order_of_their_numbers(run: RunDir) -> None:
    writer = ShardWriter(run, "w", 1, {}, False)
    for i in range(11):
        writer.land([make_group(i)])
    assert [short(shard.shard) for shard in audit(run, each_shard=True).each_shard or ()] == \
        [f"w/{i}" for i in range(11)]


def test_reasons_are_counted_and_nothing_is_listed_that_nobody_asked_for(every_state: RunDir) -> None:
    report = audit(every_state).as_json()
    assert report["dropped"] == {"all_masked": 1, "fenced": 1, "partial": 1, "stale": 5}
    assert report["filtered"] == {"no_spread": 1, "too_easy": 1}
    assert report["failed_groups"] == {"engine_error": 1, "group_deadline": 1, "prompt_refused": 1, "reward_error": 2}
    assert report["each_prompt"] is None and report["each_shard"] is None


PROMPT_LINES = """\
epoch 0 position 0        e0-p0-t0       trained at step 0
epoch 0 position 1        e0-p1-t0       trained at step 0
epoch 0 position 2        e0-p2-t1       trained at step 0  2 tries, before: stale
epoch 0 position 3        e0-p3-t0       trained at step 0
epoch 0 position 4        e0-p4-t0       voided at step 1
epoch 0 position 5        e0-p5-t0       voided at step 1
epoch 0 position 6        e0-p6-t0       voided at step 1
epoch 0 position 7        e0-p7-t0       voided at step 1
epoch 0 position 8        e0-p8-t0       pending
epoch 0 position 9        e0-p9-t0       dropped (stale)
epoch 0 position 10       e0-p10-t0      dropped (all_masked)
epoch 0 position 11       e0-p11-t0      dropped (stale)
epoch 0 position 12       e0-p12-t0      dropped (partial)
epoch 0 position 13       e0-p13-t0      dropped (fenced)
epoch 0 position 14       e0-p14-t0      filtered (no_spread)
epoch 0 position 15       e0-p15-t0      failed (group_deadline)
epoch 0 position 16       e0-p16-t0      poison (prompt_refused)
epoch 0 position 17       e0-p17-t1      given_up (engine_error)  2 tries, before: reward_error
epoch 0 position 18       e0-p18-t0      filtered (too_easy)
epoch 0 position 19       e0-p19-t1      failed (reward_error)  2 tries, before: stale
epoch 0 position 20       e0-p20-t0      dropped (stale)
epoch 0 position 21       -              unleased
epoch 0 position 22       -              unleased
epoch 0 position 23       e0-p23-t0      pending
"""
SHARD_LINES = """\
a/0  retired by step 0: 3 claimed, 1 dropped
a/1  claimed by steps 0, 1: 1 claimed, 4 void
b/0  eligible: 5 dropped, 1 filtered, 1 fenced, 2 eligible
c/0  duplicate: 1 duplicate
c/1  dropped: 1 dropped
c/2  quarantined: 1 quarantined (torn)
c/3  unverified: 1 unverified (not whole)
"""
COUNT_LINES = [
    "k: 2 claims, 0 records, 7 shards; prompts up to position 24 of dataset epoch 0",
    "positions       24  4 trained, 4 voided, 2 filtered, 6 dropped, 2 failed, 1 poison, 1 given_up, 2 pending, "
    "2 unleased",
    "rows            22  1 unverified, 4 claimed, 4 void, 7 dropped, 1 filtered, 1 duplicate, 1 fenced, 2 eligible, "
    "1 quarantined",
    "shards           7  1 eligible, 1 claimed, 1 dropped, 1 duplicate, 1 quarantined, 1 unverified, 1 retired",
    "filtered         2  1 no_spread, 1 too_easy",
    "dropped          8  1 all_masked, 1 fenced, 1 partial, 5 stale: groups that no step takes",
    "ended            5  1 engine_error, 1 group_deadline, 1 prompt_refused, 2 reward_error: tries of groups that have "
    "no row",
    "holds: every prompt and every landed group is in exactly one state"]


def test_lists_are_printed_before_the_counts(every_state: RunDir) -> None:
    report = {"run_key": "k", **audit(every_state, each_prompt=True, each_shard=True).as_json()}
    for each in report["each_shard"]:
        each["shard"] = short(each["shard"])
    report["each_shard"][-1]["reason"] = "not whole"
    assert audit_lines(report) == [*PROMPT_LINES.splitlines(), *SHARD_LINES.splitlines(), "", *COUNT_LINES]
    assert audit_lines({**report, "each_prompt": None, "each_shard": None}) == COUNT_LINES


@pytest.mark.parametrize("state", ["leased", "absent", "lost"])
def test_a_position_that_no_file_names_is_listed_too(run: RunDir, state: str) -> None:
    put_if_absent(run.attempt(1), b"{}", fsync=False)
    ShardWriter(run, "w", 1, {}, False).land([make_group(1)])
    owner = OwnerLock(run) if state == "leased" else None
    if state == "absent":
        put_if_absent(run.taken, to_json({
            "run_key": "k", "run_uuid": "u", "digest": "d", "rescored": False, "scored_by": {}, "groups": 1,
            "shards": {}, "superseded": [], "gone": [], "gone_rows": []}))
    if state == "lost":
        put_end(run, EndOfData(step=0, reason="data", left_over=1), revision=0, attempt=1)
    report = audit(run, n_prompts=3, epochs=1, each_prompt=True)
    waits, gone = (0, 1, "e0-p1-t0", "pending", None, None, 1, []), (None, state, None, None, 0, [])
    assert report.each_prompt == [(0, 0, *gone), waits, *([(0, 2, *gone)] if state == "lost" else [])]
    if owner is not None:
        owner.release()


def test_a_try_of_which_nothing_says_why_it_ended_is_listed_without_a_reason(run: RunDir) -> None:
    ShardWriter(run, "w", 1, {}, False).land([make_group(0, try_no=2)])
    put_outcome(run, outcome(0, "failed", 1))
    report = audit(run, each_prompt=True)
    assert report.each_prompt == [(0, 0, "e0-p0-t2", "pending", None, None, 3, [None, "x"])]
    assert report.violations == ["dataset epoch 0 position 0 has a try 2, but nothing ended e0-p0-t0"]
    assert audit_lines({"run_key": "k", **report.as_json()})[0].endswith("pending  3 tries, before: unknown, x")


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
