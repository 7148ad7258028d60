"""What no owner leases again: groups that were poison, whoever found it, and those that lose their workers under one
owner after the other."""

from __future__ import annotations

from typing import Any

import pytest

from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.lost_leases import put_lost, read_lost
from rl_core.experience.outcomes import outcome_ids, put_outcome, read_outcome
from rl_core.run_dir import RunDir
from rl_core.types import Outcome
from tests.builders import next_owner, store_config

W = "rollout-0"
ALL = [f"e0-p{i}-t0" for i in range(6)]
"""One pass over six prompts, all in flight at once."""


def start(run: RunDir, max_leases: int = 3, in_flight: tuple[str, ...] = ()) -> Experience:
    """The next owner, at the start of its attempt, beside a worker that still has these groups in flight."""
    config: dict[str, Any] = {"data": {"epochs": 1}, "failure": {"max_leases": max_leases}}
    experience = next_owner(run, store_config(**config))
    experience.attach(len(ALL), lambda epoch, position: position)
    experience.discover(full=True)
    experience.serves(W, 0)
    assert all(experience.adopt(W, name, 0) for name in in_flight)
    experience.leases_known()
    return experience


def granted(experience: Experience) -> list[str]:
    return [lease.group_id for lease in experience.grant([W])]


def lose_all(experience: Experience) -> None:
    experience.worker_ended(W)
    experience.serves(W, 0)


def refused(name: str) -> Outcome:
    return Outcome(group_id=name, kind="poison", reason="prompt_refused", error="too long", try_no=0,
                   position=int(name.split("-")[1][1:]), dataset_epoch=0)


def test_the_next_owner_leases_everything_but_what_was_poison(run: RunDir) -> None:
    first = start(run, max_leases=1)
    assert granted(first) == ALL
    put_outcome(run, refused("e0-p1-t0"))  # by the worker, which died before its owner heard of it
    first.outcome(refused("e0-p3-t0"))
    put_outcome(run, refused("e0-p3-t0"))
    first.leases.by_id = {"e0-p4-t0": first.leases.by_id["e0-p4-t0"]}
    lose_all(first)
    assert {name: read_outcome(run, name).reason for name in outcome_ids(run)} == {
        "e0-p1-t0": "prompt_refused", "e0-p3-t0": "prompt_refused", "e0-p4-t0": "max_leases"}
    for _ in range(2):
        owner = start(run)
        assert granted(owner) == ["e0-p0-t0", "e0-p2-t0", "e0-p5-t0"] and granted(owner) == []
        assert not owner.adopt(W, "e0-p4-t0", 0), "a worker that was believed dead has it in flight"
    assert audit(run).positions["poison"] == 3


def test_leases_that_were_lost_under_earlier_owners_count(run: RunDir) -> None:
    first = start(run)
    assert granted(first) == ALL
    lose_all(first)
    assert granted(first) == ALL, "lost once, leased again by the same owner"
    second = start(run)
    assert granted(second) == ALL, "its owner died with it: that is in no file, and counts for nothing"
    lose_all(second)
    assert read_lost(run) == dict.fromkeys(ALL, 2) and outcome_ids(run) == []
    third = start(run, in_flight=("e0-p2-t0",))
    third.worker_ended(W)
    assert outcome_ids(run) == ["e0-p2-t0"], "leased by the owner before, and lost for the third time"
    outcome = read_outcome(run, "e0-p2-t0")
    assert (outcome.kind, outcome.reason, outcome.error[:14]) == ("poison", "max_leases", "3 workers died")
    fourth = start(run)
    assert granted(fourth) == [name for name in ALL if name != "e0-p2-t0"]
    lose_all(fourth)
    assert outcome_ids(run) == ALL and granted(fourth) == [] and granted(start(run)) == []
    assert audit(run).positions["poison"] == len(ALL)


def test_each_loss_is_a_file_of_its_own_under_its_attempt(run: RunDir) -> None:
    assert read_lost(run) == {}
    put_lost(run, 1, ["e0-p0-t0", "e0-p1-t0"])
    put_lost(run, 1, ["e0-p0-t0"])
    put_lost(run, 2, ["e0-p0-t1"])
    assert [path.name for path in sorted(run.lost.iterdir())] == [
        "attempt-000001-000000.json", "attempt-000001-000001.json", "attempt-000002-000000.json"]
    assert read_lost(run) == {"e0-p0-t0": 2, "e0-p1-t0": 1, "e0-p0-t1": 1}, "another try has a count of its own"


def test_a_loss_that_cannot_be_recorded_is_leased_again_all_the_same(run: RunDir,
                                                                    caplog: pytest.LogCaptureFixture) -> None:
    owner = start(run)
    assert granted(owner) == ALL
    run.lost.write_text("not a directory: as a disk that takes nothing")
    lose_all(owner)
    assert granted(owner) == ALL
    assert "6 lost leases count in this start only" in caplog.text
