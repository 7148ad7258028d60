from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from rl_core.errors import BrokenFile, FormatTooNew, StaleAttempt
from rl_core.experience.ledger import (
    EndOfData,
    claim_digest,
    claim_from_json,
    claim_to_json,
    claimed_steps,
    claims,
    drop_files,
    group_ids_digest,
    put_claim,
    put_drops,
    put_end,
    read_claim,
    read_drops,
    read_end,
    segments_of,
    void_step,
    voided_steps,
)
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent
from rl_core.types import Claim, ClaimedGroup, Drop, Segment
from tests.chaos.rivals import race

DROPS = (Drop(group_id="e0-p9-t0", reason="stale", n_tokens=120),
         Drop(group_id="e0-p4-t1", reason="filtered", n_tokens=7))


def make_claim(step: int, *, attempt: int = 1, first: int = 0) -> Claim:
    groups = tuple(
        ClaimedGroup(dataset_epoch=0, position=first + i, try_no=0, prompt_idx=first + i + 100, stream=stream, seq=seq,
                     row=row)
        for i, (stream, seq, row) in enumerate([("w1-b", 3, 7), ("w0-a", 0, 1), ("w0-a", 0, 0), ("w1-b", 3, 4)]))
    return Claim(step=step, idx=step, attempt=attempt, consumer="learner", eta="0.5", hard_max=2, policy="mask",
                 groups=groups, group_ids_digest=group_ids_digest(g.group_id for g in groups),
                 shard_digests={"w0-a/0": "aa", "w1-b/3": "bb"}, masked=((1, 17),), dropped=DROPS, revision=2, ts_us=5)


def start_attempt(run: RunDir) -> int:
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    return attempt


def test_a_claim_survives_its_json() -> None:
    claim = make_claim(3)
    payload = json.loads(claim_to_json(claim))
    assert payload["groups"] == [[0, 0, 0, 100], [0, 1, 0, 101], [0, 2, 0, 102], [0, 3, 0, 103]]
    assert payload["segments"] == [["w0-a", 0, 0, 2], ["w1-b", 3, 4, 5], ["w1-b", 3, 7, 8]]
    assert payload["rows"] == [[2, 7], [0, 1], [0, 0], [1, 4]]
    assert payload["dropped"] == [["e0-p9-t0", "stale", 120], ["e0-p4-t1", "filtered", 7]]
    assert payload["format"] == 1
    assert claim_from_json(payload) == claim


def test_neighbouring_rows_are_one_segment() -> None:
    assert segments_of(make_claim(0).groups) == (
        Segment(stream="w0-a", seq=0, lo=0, hi=2), Segment(stream="w1-b", seq=3, lo=4, hi=5),
        Segment(stream="w1-b", seq=3, lo=7, hi=8))


def test_the_claim_digest_is_of_the_data_not_of_who_claimed_it() -> None:
    assert claim_digest(make_claim(3)) == claim_digest(make_claim(3, attempt=9))
    assert claim_digest(make_claim(3)) != claim_digest(make_claim(3, first=1))


def test_whoever_claimed_first_claimed(run: RunDir) -> None:
    start_attempt(run)
    first, second = make_claim(0), make_claim(0, first=50)
    assert put_claim(run, first) == first
    assert put_claim(run, second) == first == read_claim(run, 0)


def test_a_zombie_neither_claims_nor_adopts(run: RunDir) -> None:
    old = start_attempt(run)
    start_attempt(run)
    with pytest.raises(StaleAttempt, match="attempt 1 is over, attempt 2 owns the run"):
        put_claim(run, make_claim(0, attempt=old))
    assert claimed_steps(run) == []
    with pytest.raises(StaleAttempt):
        put_drops(run, 0, DROPS, attempt=old)


def rivals_claim(rival: int, step: int, attempt: int) -> Claim:
    """What a rival wants a step to be: no two want the same."""
    return make_claim(step, attempt=attempt, first=4 * (3 * step + rival))


def test_of_three_rivals_one_wins_each_step_and_the_others_adopt_its_claim(run: RunDir) -> None:
    """The short form of tests/chaos/test_proofs.py."""
    found = race(run, 100, rivals_claim, fsync=False)
    assert found.disagreements == 0
    assert found.winners == {1: 100}
    assert found.adopted == 200
    assert min(found.won) > 0, "they did not race"


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [(lambda p: {**p, "format": 99}, FormatTooNew, "newer than this Headway reads"),
     (lambda p: {**p, "groups": [[0, 0, 1, 100], *p["groups"][1:]]}, BrokenFile, "do not match their digest")],
    ids=["newer format", "another group"])
def test_a_claim_that_cannot_be_trusted_is_refused_by_name(run: RunDir, spoil: Callable[[dict], dict],
                                                           error: type[Exception], match: str) -> None:
    put_claim(run, make_claim(0))
    run.claim(0).write_text(json.dumps(spoil(json.loads(run.claim(0).read_text()))))
    with pytest.raises(error, match=match):
        read_claim(run, 0)


def test_a_torn_claim_is_refused_by_name(run: RunDir) -> None:
    put_claim(run, make_claim(0))
    run.claim(0).write_bytes(run.claim(0).read_bytes()[:40])
    with pytest.raises(BrokenFile, match=r"step-000000000\.json: not JSON"):
        read_claim(run, 0)


def test_a_gap_in_the_ledger_is_named(run: RunDir) -> None:
    for step in (0, 1, 3):
        put_claim(run, make_claim(step, first=10 * step))
    with pytest.raises(BrokenFile, match=r"step-000000002\.json: absent, but step 3 has a claim"):
        claimed_steps(run)


def test_claims_come_in_order_from_a_step_on(run: RunDir) -> None:
    for step in range(4):
        put_claim(run, make_claim(step, first=10 * step))
    assert [claim.step for claim in claims(run, first=2)] == [2, 3]
    assert sorted(path.name for path in run.ledger().iterdir())[0] == "step-000000000.json", "no tmp file is left"


def test_drops_are_numbered_within_their_step(run: RunDir) -> None:
    start_attempt(run)
    put_drops(run, 4, DROPS[:1], attempt=1)
    put_drops(run, 4, DROPS[1:], attempt=1)
    put_drops(run, 3, DROPS, attempt=1)
    assert [path.name for path in drop_files(run)] == [
        "drops-000000003-000000.json", "drops-000000004-000000.json", "drops-000000004-000001.json"]
    assert read_drops(drop_files(run)[2]) == DROPS[1:]


def test_only_a_claimed_step_without_a_record_can_be_void(run: RunDir) -> None:
    with pytest.raises(ValueError, match="step 0 has no claim"):
        void_step(run, 0, reason="bad reward", attempt=1)
    put_claim(run, make_claim(0))
    assert void_step(run, 0, reason="bad reward", attempt=1)
    assert not void_step(run, 0, reason="again", attempt=1)
    assert voided_steps(run) == {0: "bad reward"}
    put_claim(run, make_claim(1, first=10))
    put_if_absent(run.record(1), b"{}")
    with pytest.raises(ValueError, match="step 1 has a record: it was trained; fork the run from step 1"):
        void_step(run, 1, reason="late", attempt=1)
    assert claimed_steps(run) == [0, 1]


def test_the_end_is_written_once_per_revision(run: RunDir) -> None:
    assert read_end(run, 0) is None
    end = EndOfData(step=7, reason="data", left_over=3)
    assert put_end(run, end, revision=0, attempt=1) == end
    assert put_end(run, EndOfData(step=9, reason="steps", left_over=0), revision=0, attempt=1) == end
    assert read_end(run, 0) == end and read_end(run, 1) is None
