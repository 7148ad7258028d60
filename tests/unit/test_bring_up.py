"""A learner group is brought up: real learners in this process, called on threads as actors are."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config
from rl_core.errors import LearnerDead, StaleAttempt
from rl_core.experience.ledger import void_step
from rl_core.learner import fold
from rl_core.learner import learner as learner_module
from rl_core.learner.blocks import decoder_blocks
from rl_core.learner.learner import After, Learner, fold_claims
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, check_attempt
from tasks import training
from tasks.training import LearnerGroup
from tests.learning import start_attempt
from tests.unit.test_learner import learner_of, new_run, settings, started


class Here:
    """Stands where the handle of an actor does, of one attempt."""

    adopted = False

    def __init__(self, learner: Learner, attempt: int) -> None:
        self.learner, self.attempt = learner, attempt
        self._calls = ThreadPoolExecutor(4)

    def call_async(self, method: str, *args: Any) -> Future[Any]:
        return self._calls.submit(getattr(self.learner, method), *args, attempt=self.attempt)

    def kill(self) -> None:
        self._calls.shutdown(wait=False)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "start_all", lambda specs: list(specs))
    monkeypatch.setattr(training, "gather", lambda calls, deadline_s, check: [call.result(60) for call in calls])


def group_of(run: RunDir, config: Config, learners: Iterator[Learner], attempt: int = 1) -> LearnerGroup:
    """Each start takes the next learner."""
    specs: Any = lambda meeting: [Here(next(learners), attempt)]  # noqa: E731
    group = LearnerGroup(run, config, specs, lambda: None)
    group.start()
    return group


def wait_for(what: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


class Waiting(Learner):
    """Ends a step when it may `go`."""

    restored = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trains, self.go = threading.Event(), threading.Event()

    def restore(self, attempt: int | None = None) -> int:
        self.restored += 1
        return super().restore(attempt)

    def _after(self, step: int, *, write: bool) -> After:
        self.trains.set()
        assert self.go.wait(20)
        return super()._after(step, write=write)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The attempts that a learner has found to be the newest."""
    found: list[int] = []

    def check(run: RunDir, attempt: int) -> None:
        check_attempt(run, attempt)
        found.append(attempt)

    monkeypatch.setattr(learner_module, "check_attempt", check)
    return found


def test_a_learner_adopted_in_a_step_goes_on_behind_it_and_drops_what_its_dead_owner_sent(
        tmp_path: Path, asked: list[int]) -> None:
    config = settings()
    run = new_run(tmp_path, config, steps=2)
    learner = Waiting(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
    learner.restore()
    learner.publish_current()
    group = group_of(run, config, iter([learner]), attempt=2)
    with ThreadPoolExecutor(3) as calls:
        running = calls.submit(learner.train, 0, attempt=1)
        assert learner.trains.wait(20)
        ahead = calls.submit(learner.train, 1, attempt=1)
        time.sleep(0.3)  # until it waits for the step before it
        start_attempt(run, 2)
        brought = calls.submit(group.bring_up)
        wait_for(lambda: 2 in asked)
        learner.go.set()
        assert brought.result(60) == group.restored == 1
        done = running.result(60)
        assert done is not None and done.attempt == 2
        with pytest.raises(StaleAttempt):
            ahead.result(60)
    assert learner.restored == 1, "its state was right"
    assert recorded_steps(run) == [0] and read_record(run, 0).attempt == 2
    record = group.train(1)
    assert record is not None and record.weights_digest == fold_claims(str(run.root), config)


def test_a_step_that_waits_for_its_turn_is_dropped_when_its_owner_is_over(tmp_path: Path) -> None:
    config = settings()
    run = new_run(tmp_path, config, steps=2)
    learner = started(run, config)
    with ThreadPoolExecutor(1) as calls:
        ahead = calls.submit(learner.train, 1, attempt=1)
        time.sleep(0.3)  # until it waits
        start_attempt(run, 2)
        learner.train(0, attempt=2)
        with pytest.raises(StaleAttempt):
            ahead.result(60)
    assert learner.next_step() == 1 and recorded_steps(run) == [0]


@pytest.mark.parametrize("checkpoint", [True, False], ids=["a checkpoint behind it", "none behind it"])
def test_a_start_passes_a_voided_last_step(tmp_path: Path, checkpoint: bool) -> None:
    config = settings()
    run = new_run(tmp_path, config, steps=3)
    learner = started(run, config)
    learner.train(0)
    void_step(run, 1, reason="test", attempt=1)
    assert learner.train(1) is None
    if checkpoint:
        assert learner.checkpoint() == 2
    start_attempt(run, 2)
    group = group_of(run, config, iter([learner_of(run, config, attempt=2)]), attempt=2)
    assert group.bring_up() == 2 and group.restored == (2 if checkpoint else 0)
    record = group.train(2)
    assert record is not None and record.weights_digest == fold_claims(str(run.root), config)


class Dying(Learner):
    """Dies in step 2, before it has written anything."""

    def _after(self, step: int, *, write: bool) -> After:
        if step == 2:
            raise LearnerDead("learner/0 is dead")
        return super()._after(step, write=write)


def test_a_death_in_the_step_behind_a_voided_one_is_recovered_from(tmp_path: Path) -> None:
    config = settings()
    run = new_run(tmp_path, config, steps=3)
    dying = Dying(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
    group = group_of(run, config, iter([dying, learner_of(run, config)]))
    assert group.bring_up() == 0
    group.publish()
    group.train(0)
    void_step(run, 1, reason="test", attempt=1)
    assert group.train(1) is None
    record = group.train(2)
    assert group.restarts == 1
    assert record is not None and record.weights_digest == fold_claims(str(run.root), config)


def test_what_a_learner_held_is_gone_before_it_loads_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(kl={"use": "loss"}, recompute=True)
    run = new_run(tmp_path, config, steps=1)
    learner = started(run, config)
    learner.train(0)
    state = learner._fold.state
    held = [weakref.ref(part) for part in (state, state.policy, decoder_blocks(state.policy.model)[0], state.optimizer,
                                           state.roles.reference)]
    del state
    alive: list[int] = []
    made = fold.Roles

    def noted(*args: Any) -> fold.Roles:
        alive.append(sum(part() is not None for part in held))
        return made(*args)

    monkeypatch.setattr(fold, "Roles", noted)
    assert learner.restore() == 0
    assert alive == [0]


def test_a_learner_that_could_not_load_is_restored_before_it_goes_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings()
    learner = started(new_run(tmp_path, config, steps=1), config)

    def no_room(*args: Any, **options: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(fold, "TrainState", no_room)
        with pytest.raises(MemoryError):
            learner.restore()
    assert learner.next_step() == -1
    assert learner.restore() == 0 and learner.train(0) is not None
