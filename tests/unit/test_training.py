"""The owner's side of training: where it goes on, and claims made ahead."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config
from rl_core.errors import BrokenFile, FailureBudgetSpent, LearnerDead
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.types import Claim
from tasks.training import Claims, LearnerGroup, first_step


class Source:
    """Stands where Experience does: claims come when `ready` is set; notes the deadlines it was given."""

    def __init__(self) -> None:
        self.ready, self.deadlines = threading.Event(), []
        self.short_of_room: int | None = None
        self.makes_room, self.freed = False, list[int]()

    def claim(self, step: int, deadline_s: float) -> Any:
        self.deadlines.append(deadline_s)
        self.ready.wait(20)
        return Claim(step=step, idx=step, attempt=1, consumer="learner", eta="4", hard_max=8, policy="keep", groups=(),
                     group_ids_digest="", shard_digests={}, masked=(), dropped=(), revision=0, ts_us=1)

    def made_room(self, freed: int) -> None:
        self.freed.append(freed)
        self.short_of_room = None

    def close(self) -> None:
        self.ready.set()


def records(run: RunDir, steps: list[int], voided: list[int]) -> None:
    for step in steps:
        put_if_absent(run.record(step), to_json({"step": step}))
    for step in voided:
        put_if_absent(run.void(step), to_json({"step": step, "reason": "bad data"}))


PLACES = {
    "nothing yet": ([], [], 0),
    "records alone": ([0, 1, 2], [], 3),
    "a voided step between": ([0, 2], [1], 3),
    "voided steps behind": ([0, 1], [2, 3], 4),
    "a voided step behind one that is to be trained": ([0, 1], [3], 2),
}


@pytest.mark.parametrize(("steps", "voided", "first"), PLACES.values(), ids=PLACES)
def test_training_goes_on_at_the_first_step_that_is_not_done(tmp_path: Path, steps: list[int], voided: list[int],
                                                            first: int) -> None:
    records(RunDir(tmp_path), steps, voided)
    assert first_step(RunDir(tmp_path)) == first


def test_a_hole_in_the_records_is_named(tmp_path: Path) -> None:
    records(RunDir(tmp_path), [0, 2], [])
    with pytest.raises(BrokenFile, match=r"step-000000001\.json: absent, but step 2 has a record"):
        first_step(RunDir(tmp_path))


def claims(source: Source, check: Any = lambda: None, make_room: Any = None) -> Claims:
    config = Config(total_steps=5)
    deadlines = config.deadlines.model_copy(update={"claim_s": 100.0, "step_s": 1000.0})
    return Claims(source, config.model_copy(update={"deadlines": deadlines}), check, make_room)  # pyright: ignore


def test_a_wait_for_nothing_but_bytes_makes_room_once() -> None:
    """The thread that would make a checkpoint is the one that waits for the claim."""
    source, made = Source(), list[int]()

    def make_room(steps: int) -> int:
        made.append(steps)
        return 7

    source.short_of_room = 3
    threading.Timer(0.8, source.ready.set).start()
    waiting = claims(source, make_room=make_room)
    assert source.makes_room
    assert waiting.take(3).step == 3
    assert made == [3] and source.freed == [7]
    waiting.close()


def test_the_step_trained_meanwhile_is_no_time_waited() -> None:
    source, claimed = Source(), threading.Event()
    source.ready.set()
    made = claims(source)
    assert made.take(0).step == 0
    made.ahead(1, lambda step: claimed.set())
    assert made.take(1).step == 1
    assert source.deadlines == [100.0, 1100.0]
    assert claimed.wait(5)
    made.close()


def test_a_failure_is_raised_before_a_claim_that_is_ready_and_within_a_wait() -> None:
    failures: list[Exception] = []

    def check() -> None:
        if failures:
            raise failures[0]

    source = Source()
    made = claims(source, check)
    threading.Timer(0.2, lambda: failures.append(BrokenFile("the pump"))).start()
    begun = time.monotonic()
    with pytest.raises(BrokenFile, match="the pump"):
        made.take(0)
    assert time.monotonic() - begun < 2
    source.ready.set()
    made.ahead(1, lambda step: None)
    with pytest.raises(BrokenFile, match="the pump"):
        made.take(1)
    made.close()


def test_deaths_during_recovery_count_against_the_budget(tmp_path: Path) -> None:
    config = Config()
    config = config.model_copy(update={"failure": config.failure.model_copy(update={"learner_restarts": 2})})
    starts: list[Path] = []

    def specs(meeting: Path) -> Any:
        starts.append(meeting)
        raise LearnerDead("learner/0 is dead")

    group = LearnerGroup(RunDir(tmp_path), config, specs, lambda: None)
    with pytest.raises(FailureBudgetSpent, match="the learner died 3 times"):
        group.train(0)
    assert len(set(starts)) == 3 and starts[0].parent == RunDir(tmp_path).services
