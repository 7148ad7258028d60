"""Training steps: claim, then one call to the learner group. The claim travels by name, never the data."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rl_core.config import Config
from rl_core.errors import FailureBudgetSpent, LearnerDead
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import EndOfData
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir
from rl_core.types import Claim, StepRecord, WeightVersion
from tasks.cluster import ActorSpec, Handle, Pending, start_all

if TYPE_CHECKING:
    from tasks.session import Session


class LearnerGroup:
    """The learner ranks as one: every call goes to all of them, rank 0 answers.

    A rank that died takes the group with it: `start` starts or adopts the actors, `bring_up` restores the newest whole
    checkpoint and replays the recorded steps after it. First start, restart and recovery are this one path.
    """

    def __init__(self, run: RunDir, config: Config, specs: Callable[[], Sequence[ActorSpec]]) -> None:
        self._run, self._config, self._specs = run, config, specs
        self._handles: list[Handle] = []
        self._restarts = 0
        self._sending = threading.Lock()
        self._sent: dict[int, list[Pending]] = {}

    def start(self) -> None:
        """Live actors: all adopted, or all new. A group of which one rank died cannot meet again."""
        handles = start_all(self._specs())
        if len({handle.adopted for handle in handles}) > 1:
            for handle in handles:
                handle.kill()
            handles = start_all(self._specs(), fresh=True)
        self._handles = handles

    def bring_up(self, on_replay: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Bring the group to the state after all recorded steps; returns the next step to train."""
        recorded = recorded_steps(self._run)
        first = len(recorded)
        assert recorded == list(range(first)), f"records of {self._run.root} have a hole: {recorded}"
        start = self.call("next_step", deadline_s=self._config.deadlines.step_s)
        if start != first:
            start = self.call("restore", deadline_s=self._config.deadlines.model_setup_s)
        for step in range(start, first):
            on_replay(step - start, first - start)
            self.call("train", step, deadline_s=self._config.deadlines.step_s)
        return first

    def send(self, step: int) -> None:
        """Let the group train `step`, whose claim exists, as soon as it is free: it need not wait for its owner between
        two steps. `train` takes the answer."""
        with self._sending:
            if step not in self._sent:
                self._sent[step] = self._send("train", step)

    def train(self, step: int) -> StepRecord | None:
        """Train the claimed step; a dead group is brought up again within its budget and trains the same claim.

        None for a voided step.
        """
        while True:
            try:
                self.send(step)
                with self._sending:
                    calls = self._sent.pop(step)
                return self._answer(calls, self._config.deadlines.step_s)
            except LearnerDead as death:
                self._restarts += 1
                if self._restarts > self._config.failure.learner_restarts:
                    raise FailureBudgetSpent(f"the learner died {self._restarts} times in this attempt "
                                             f"(failure.learner_restarts = {self._config.failure.learner_restarts}); "
                                             f"the last: {death}") from death
                self.close()
                self.start()
                if self.bring_up() > step:  # it died between its record and its answer
                    return read_record(self._run, step)

    def publish(self) -> WeightVersion:
        """Make the version of the weights after the recorded steps, if it is not there yet."""
        return self.call("publish_current", deadline_s=self._config.deadlines.step_s)

    def checkpoint(self) -> int:
        return self.call("checkpoint", deadline_s=self._config.deadlines.step_s)

    def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """All ranks at once: a collective needs them all. The first error wins."""
        return self._answer(self._send(method, *args), deadline_s)

    def _send(self, method: str, *args: Any) -> list[Pending]:
        return [handle.call_async(method, *args) for handle in self._handles]

    def _answer(self, calls: Sequence[Pending], deadline_s: float) -> Any:
        until = time.monotonic() + deadline_s
        answers = [call.result(max(0.0, until - time.monotonic())) for call in calls]
        return answers[0]

    def close(self) -> None:
        """End the actors."""
        handles, self._handles = self._handles, []
        with self._sending:
            self._sent.clear()
        for handle in handles:
            handle.kill()


class Claims:
    """Claims made one step ahead, on a thread: the learner finds the next one waiting.

    Moving a group from the eligible ones into a claim leaves capacity as it is (experience-store.md 3.5), so nothing
    runs further ahead for it.
    """

    def __init__(self, experience: Experience, config: Config) -> None:
        self._experience, self._config = experience, config
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="claims")
        self._ahead: tuple[int, Future[Claim | EndOfData]] | None = None
        self._lock = threading.Lock()

    def take(self, step: int) -> Claim | EndOfData:
        """The claim of `step`; waits for it. Raises what Experience.claim raises."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            return ahead[1].result()
        return self._experience.claim(step, self._config.deadlines.claim_s)

    def end(self) -> EndOfData:
        """Record that the steps are done."""
        ended = self.take(self._config.total_steps)
        assert isinstance(ended, EndOfData)
        return ended

    def ahead(self, step: int, then: Callable[[int], None]) -> None:
        """Start claiming `step` in the background; `then(step)` is called when it has its claim."""
        if step >= self._config.total_steps:
            return
        claim = self._pool.submit(self._experience.claim, step, self._config.deadlines.claim_s)
        with self._lock:
            self._ahead = (step, claim)

        def claimed(done: Future[Claim | EndOfData]) -> None:
            if not done.cancelled() and done.exception() is None and isinstance(done.result(), Claim):
                then(step)

        claim.add_done_callback(claimed)

    def close(self) -> None:
        self._experience.close()  # a claim that waits on the thread would outlive the run
        self._pool.shutdown(wait=False, cancel_futures=True)


@task(name="train-step", task_run_name="train-step-{step}", cache_policy=NO_CACHE, persist_result=False)
def train_step(session: Session, step: int) -> EndOfData | None:
    """Claim step k and train it. Returns how the source ended where it holds no full claim any more, else None."""
    claim = session.claims.take(step)
    if isinstance(claim, EndOfData):
        return claim
    session.learner.send(step)
    if session.config.staleness.policy != "wait":  # that policy's hold begins when the step before is done
        session.claims.ahead(step + 1, then=session.send_ahead)
    record = session.learner.train(step)
    if record is not None:  # a voided step trains nothing
        session.saw_step(record)
    return None
