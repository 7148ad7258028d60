"""Training steps: claim, then one call to the learner group. The claim travels by name, never the data."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from rl_core.config import Config
from rl_core.errors import BrokenFile, DeadlinePassed, FailureBudgetSpent, LearnerDead
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import EndOfData, voided_steps
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir
from rl_core.run_log import STORY
from rl_core.types import Claim, StepRecord, WeightVersion
from tasks.cluster import ActorSpec, Handle, Pending, gather, start_all
from tasks.waiting import waiting

if TYPE_CHECKING:
    from tasks.owner import Owner


T = TypeVar("T")
MEETING = "rendezvous-"
LOOK_S = 0.5
"""How often a wait for a claim looks whether something else has ended it."""


def first_step(run: RunDir) -> int:
    """The first step that is neither recorded nor voided, where training goes on.

    Raises BrokenFile where a step behind it has a record.
    """
    recorded = recorded_steps(run)
    done = {*recorded, *voided_steps(run)}  # a voided one behind the last record, too: a checkpoint may lie behind it
    first = next(step for step in itertools.count() if step not in done)
    if recorded and recorded[-1] > first:
        raise BrokenFile(f"{run.record(first)}: absent, but step {recorded[-1]} has a record; the records have a hole")
    return first


class LearnerGroup:
    """The learner ranks as one: every call goes to all of them, rank 0 answers.

    A rank that died takes the group with it: `start` starts or adopts the actors, `bring_up` restores the newest whole
    checkpoint and replays the recorded steps after it. First start, restart and recovery are this one path.
    """

    def __init__(self, run: RunDir, config: Config, specs: Callable[[Path], Sequence[ActorSpec]],
                 check: Callable[[], None]) -> None:
        """`specs(meeting)`: the ranks, which meet at a file that does not exist yet. `check` raises what shall end a
        call from outside."""
        self._run, self._config, self._specs, self._check = run, config, specs, check
        self._handles: list[Handle] = []
        self.restarts = 0
        """Of this attempt."""
        self._first = self._unsent = 0
        self._sending = threading.Lock()
        self._sent: dict[int, list[Pending]] = {}
        self._training: list[Pending] = []
        """Calls of the step that `train` waits for."""
        self._up = False
        self.checkpoint_s = 0.0
        """What the last checkpoint of this start took."""
        self.restored = 0
        """The step from which `bring_up` went on: where the checkpoint lies that it took, or the last record."""

    def start(self) -> None:
        """Live actors: all adopted, or all new. A group of which one rank died cannot meet again."""
        handles = start_all(self._specs(self._meeting()))
        if len({handle.adopted for handle in handles}) > 1:
            for handle in handles:
                handle.kill()
            handles = start_all(self._specs(self._meeting()), fresh=True)
        self._handles = handles

    def _meeting(self) -> Path:
        return self._run.services / f"{MEETING}{secrets.token_hex(6)}"

    def bring_up(self, on_replay: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Bring the group, which `start` has started, to the state after all recorded steps; returns the next step to
        train. A group that dies meanwhile is started again within its budget."""
        while True:
            try:
                return self._bring_up(on_replay)
            except LearnerDead as death:
                self._note_death(death)
                self.close()
                self.start()

    def _bring_up(self, on_replay: Callable[[int, int], None] = lambda done, total: None) -> int:
        steps = self._answers(self._send("next_step"), self._config.deadlines.step_s)
        self._first = first_step(self._run)  # now: adopted learners answer when the step is recorded that they were at
        if set(steps) != {self._first}:
            steps = self._answers(self._send("restore"), self._config.deadlines.model_setup_s)
        self.restored = steps[0]
        for meeting in self._run.services.glob(f"{MEETING}*"):  # the ranks have met
            meeting.unlink(missing_ok=True)
        for step in range(steps[0], self._first):
            on_replay(step - steps[0], self._first - steps[0])
            self.call("train", step, deadline_s=self._config.deadlines.step_s)
        with self._sending:
            self._up, self._unsent = True, self._first
        return self._first

    def send(self, step: int) -> None:
        """Let the group train `step`, whose claim exists, as soon as it is free: it need not wait for its owner between
        two steps. `train` takes the answer. A group that is not up is sent nothing: `train` brings it up."""
        with self._sending:
            if self._up and step >= self._unsent:  # once, whoever is first: its claim's thread or `train`
                self._sent[step], self._unsent = self._send("train", step), step + 1

    def train(self, step: int) -> StepRecord | None:
        """Train the claimed step; a dead group is brought up again within its budget and trains the same claim.

        None for a voided step.
        """
        def trained() -> StepRecord | None:
            if step < self._first:  # it died between its record and its answer
                return read_record(self._run, step) if self._run.record(step).exists() else None
            self.send(step)
            with self._sending:
                calls = self._training = self._sent.pop(step)
            return self._answers(calls, self._config.deadlines.step_s)[0]

        return self._outlasting(trained)

    def publish(self) -> WeightVersion:
        """Make the version of the weights after the recorded steps, if it is not there yet."""
        return self._outlasting(lambda: self.call("publish_current", deadline_s=self._config.deadlines.step_s))

    def checkpoint(self) -> int:
        """Save the state after the recorded steps; returns how many they are."""
        begun = time.monotonic()
        saved: int = self._outlasting(lambda: self.call("checkpoint", deadline_s=self._config.deadlines.step_s))
        self.checkpoint_s = time.monotonic() - begun
        return saved

    def _outlasting(self, work: Callable[[], T]) -> T:
        """What `work` asks of the group. One that dies under it is brought up again within its budget, and asked again.
        """
        while True:
            try:
                if not self._up:
                    self.close()
                    self.start()
                    self._bring_up()
                return work()
            except LearnerDead as death:
                self._note_death(death)

    def _note_death(self, death: LearnerDead) -> None:
        """Raises FailureBudgetSpent for one too many."""
        self._go_down()
        self.restarts += 1
        STORY.warning("the learner died and is started again (%d of %d): %s", self.restarts,
                      self._config.failure.learner_restarts, death)
        if self.restarts > self._config.failure.learner_restarts:
            raise FailureBudgetSpent(f"the learner died {self.restarts} times in this attempt "
                                     f"(failure.learner_restarts = {self._config.failure.learner_restarts}); "
                                     f"the last: {death}") from death

    def last_checkpoint(self, deadline_s: float) -> int:
        """Before an end: let the steps finish that the ranks have been sent, then save; nothing more is sent.

        Asks nobody meanwhile whether to go on. Raises DeadlinePassed where that does not fit into `deadline_s`, or what
        the ranks raise.
        """
        begun = time.monotonic()
        with self._sending:
            up, self._up = self._up, False
            calls = [*self._training, *(call for sent in self._sent.values() for call in sent)]
        if not up or self.checkpoint_s > deadline_s:
            raise DeadlinePassed(f"no time for a checkpoint: {deadline_s:.0f} s are left, the last one took "
                                 f"{self.checkpoint_s:.0f} s" if up else "the learner is not up")
        gather(calls, deadline_s, lambda: None)
        left_s = deadline_s - (time.monotonic() - begun)
        return gather(self._send("checkpoint"), left_s, lambda: None)[0]

    def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """All ranks at once: a collective needs them all. Rank 0's answer; the first error wins, whichever rank's."""
        return self._answers(self._send(method, *args), deadline_s)[0]

    def _send(self, method: str, *args: Any) -> list[Pending]:
        return [handle.call_async(method, *args) for handle in self._handles]

    def _answers(self, calls: Sequence[Pending], deadline_s: float) -> list[Any]:
        return gather(calls, deadline_s, self._check)

    def _go_down(self) -> None:
        with self._sending:
            self._up = False
            self._sent.clear()

    def close(self) -> None:
        """End the actors."""
        self._go_down()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.kill()


class Claims:
    """Claims made one step ahead, on a thread: the learner finds the next one waiting.

    Moving a group from the eligible ones into a claim leaves capacity as it is (experience-store.md 3.5), so nothing
    runs further ahead for it.
    """

    def __init__(self, experience: Experience, config: Config, check: Callable[[], None],
                 make_room: Callable[[int], int] | None = None) -> None:
        """`check` raises what shall end a wait from outside. `make_room(steps)` frees bytes, behind so many trained
        steps, and returns how many; None: a lack of disk ends the wait."""
        self._experience, self._config, self._check, self._make_room = experience, config, check, make_room
        if make_room is not None:
            experience.makes_room = True
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="claims")
        self._ahead: tuple[int, Future[Claim | EndOfData]] | None = None

    def take(self, step: int) -> Claim | EndOfData:
        """The claim of `step`; waits for it. Raises what Experience.claim raises, and what `check` does."""
        self._check()  # before a claim made ahead: the pump may have failed since
        ahead, self._ahead = self._ahead, None
        claim = ahead[1] if ahead is not None and ahead[0] == step else self._submit(step)
        with waiting("the rollout side", f"a full claim of step {step}", self._config.deadlines.claim_s,
                     lambda: self._experience.stall_report(step)):
            while not wait([claim], LOOK_S).done:
                self._check()
                if self._make_room is not None and self._experience.short_of_room == step:
                    self._experience.made_room(self._make_room(step))
        return claim.result()

    def _submit(self, step: int, more_s: float = 0.0) -> Future[Claim | EndOfData]:
        return self._pool.submit(self._experience.claim, step, self._config.deadlines.claim_s + more_s)

    def ready(self, step: int) -> bool:
        """Whether `step` was claimed ahead and waits to be trained."""
        ahead = self._ahead
        return ahead is not None and ahead[0] == step and ahead[1].done() and ahead[1].exception() is None \
            and isinstance(ahead[1].result(), Claim)

    def end(self) -> EndOfData:
        """Record that the steps are done."""
        ended = self.take(self._config.total_steps)
        assert isinstance(ended, EndOfData)
        return ended

    def ahead(self, step: int, then: Callable[[int], None]) -> None:
        """Start claiming `step` in the background; `then(step)` is called when it has its claim.

        The step that is trained meanwhile does not count as waiting: its deadline comes on top.
        """
        if step >= self._config.total_steps:
            return
        claim = self._submit(step, self._config.deadlines.step_s)
        self._ahead = step, claim

        def claimed(done: Future[Claim | EndOfData]) -> None:
            if not done.cancelled() and done.exception() is None and isinstance(done.result(), Claim):
                then(step)

        claim.add_done_callback(claimed)

    def close(self) -> None:
        self._experience.close()  # a claim that waits on the thread would outlive the run
        self._pool.shutdown(wait=False, cancel_futures=True)


@task(name="train-step", task_run_name="train-step-{step}", cache_policy=NO_CACHE, persist_result=False)
def train_step(owner: Owner, step: int) -> EndOfData | None:
    """Claim step k and train it. Returns how the source ended where it holds no full claim any more, else None."""
    claim = owner.claims.take(step)
    if isinstance(claim, EndOfData):
        return claim
    owner.learner.send(step)
    if owner.config.staleness.policy != "wait":  # that policy's hold begins when the step before is done
        owner.claims.ahead(step + 1, then=owner.send_ahead)
    record = owner.learner.train(step)
    if record is not None:  # a voided step trains nothing
        owner.saw_step(record)
    return None
