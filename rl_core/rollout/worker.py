"""A rollout worker: leases in, landed groups out. It owns one engine, one scorer and one stream of shards.

An answer goes engine -> (callback) -> settling thread: checked, decoded, scored -> group -> landing thread -> shard.
There are as many settling threads as calls of the reward that may run side by side (`scoring.workers`). The engine's
thread only counts and hands over, and never takes the worker's lock: the worker calls its engine under it.

An ordinary class: a Ray actor hosts it, a test calls it. Every method may be called from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_core.config import Config
from rl_core.errors import (
    DataError,
    DeadlinePassed,
    DeadPart,
    FailureBudgetSpent,
    FilterError,
    FilterTimeout,
    RewardError,
    SessionError,
    SessionTimeout,
    WorkerDead,
)
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.shards import GroupCommit, ShardWriter
from rl_core.metrics import MAX_SPANS, IntervalLedger
from rl_core.rollout.assembly import GREEDY, SampleRefused, Turn, check_completion, sampling_seed
from rl_core.rollout.canary import check_adapter_served
from rl_core.rollout.engine import Engine, Lender, Loan
from rl_core.rollout.group import GroupInFlight, Verdict
from rl_core.rollout.group_filter import GroupFilter
from rl_core.rollout.prompts import Tokenizer
from rl_core.rollout.rewards.scoring import Scorer, answer_text
from rl_core.rollout.sessions import Next, Said, SessionFunction
from rl_core.run_dir import RunDir
from rl_core.spans import SPANS, as_rows
from rl_core.types import (
    Completion,
    Landed,
    Lease,
    Outcome,
    OutcomeKind,
    Span,
    TrajectoryGroup,
    WeightVersion,
    WorkerEvents,
    WorkerStatus,
)

LANDING_DEADLINE_S = 30.0
"""A disk that refuses shards for so long (full, read-only) ends the run with its own error."""
CLOSE_DEADLINE_S = 1.0
"""Landing what is finished when the worker closes; the rest is leased again."""
REMEMBERED = 1 << 16
"""Landed group ids that `cancel` still answers for."""

SAME = -1
"""Of a swap: goes on as before."""

CancelAnswer = Literal["cancelled", "landed", "unknown"]


@dataclass(frozen=True, slots=True)
class _Result:
    """What the engine answered to one request."""

    group_id: str
    request_id: str
    future: Future[Completion]
    at_us: int


class RolloutWorker:
    """Lands the groups it is leased (architecture.md section 4, experience-store.md 3.3 and 3.6).

        worker = open_worker(root="runs/k", config=config, name="rollout-0", attempt=1)
        worker.swap(version)           # before the first lease
        worker.lease([lease, ...])
        worker.events(timeout_s=5)     # WorkerEvents(landed=(Landed(...),), ...)

    `digests` go into every shard's footer. Each worker object is a new incarnation with a stream of its own. A failed
    trajectory is tried again (`failure.trajectory_tries`) while its finished siblings are kept; the group lands whole,
    or as partial when tries or `deadlines.group_s` are used up and at least `min_group` answers are there, else it ends
    with an Outcome in the run directory. Where the estimator needs it, one greedy answer is asked for beside them: its
    reward lands with the group (`baseline_reward`), and a group without one does not land.
    """

    def __init__(self, run: RunDir, config: Config, *, name: str, attempt: int, engine: Engine, tokenizer: Tokenizer,
                 scorer: Scorer, digests: Mapping[str, str], group_filter: GroupFilter | None = None,
                 session: SessionFunction | None = None) -> None:
        self._run, self._config, self._name = run, config, name
        self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer
        self._filter, self._session = group_filter, session
        self._ledger = IntervalLedger()
        self._changed = threading.Condition(threading.RLock())  # guards all below
        self._groups: dict[str, GroupInFlight] = {}
        self._serials = itertools.count()
        self._versions: dict[int, WeightVersion] = {}
        self._landed_ids: dict[str, None] = {}
        self._landed: list[Landed] = []
        self._outcomes: list[Outcome] = []
        self._cancelled: list[str] = []
        self._fatal: Exception | None = None
        self._closed = False
        self._tokens_wasted = 0
        self._tokens_greedy = 0
        self._reward_failures = 0
        self._landing_fails_since: float | None = None
        self._swaps = threading.Lock()
        self._counts = threading.Lock()  # guards the next three, for the engine's thread
        self._running = 0
        self._swapping: int | None = None
        self._tokens_generated = 0
        self._results: queue.SimpleQueue[_Result | None] = queue.SimpleQueue()
        self._writer = ShardWriter(run, name, attempt, digests, config.storage.fsync)
        self._spans: list[Span] = []
        self._landing_since_us = 0
        self._writer.stated = self._begin_landing
        self._commit = GroupCommit(self._writer, on_landed=self._on_landed, on_refused=self._on_refused,
                                   on_error=self._on_landing_error, cap_groups=config.storage.shard_groups)
        self._looks = threading.Lock()  # whoever looks at group deadlines
        self._settlers = [threading.Thread(target=self._settle_all, name=f"settling-{name}-{i}", daemon=True)
                          for i in range(config.scoring.workers)]
        for settler in self._settlers:
            settler.start()

    # -- called by the pump

    def lease(self, leases: Sequence[Lease]) -> None:
        """Start these groups. A group that is in flight or has landed already is left alone (a call that is repeated).

        Raises the error that ended this worker; WorkerDead after `close`; ValueError before the first `swap`.
        """
        with self._changed:
            self._raise_if_over()
            if self._engine.served is None:
                raise ValueError(f"worker {self._name} serves no weight version yet; swap one in before leasing")
            for lease in leases:
                if lease.group_id in self._groups or lease.group_id in self._landed_ids:
                    continue
                group = self._groups[lease.group_id] = GroupInFlight(
                    lease=lease, serial=next(self._serials), run_seed=self._config.seed,
                    max_tries=self._config.failure.trajectory_tries, started=time.monotonic(),
                    dispatched_at_us=time.time_ns() // 1000, greedy=self._config.greedy_baseline,
                    extra=self._config.rollout.over_sampling)
                for response in [*range(lease.n_expected + group.extra), *([GREEDY] if group.greedy else [])]:
                    self._sample(group, response)

    def events(self, timeout_s: float) -> WorkerEvents:
        """Long poll: what happened since the last call, at once if something did, else after `timeout_s`.

        Raises the error that ended this worker: WorkerDead (engine), FailureBudgetSpent (rewards), OSError (a disk that
        takes no shard), WorkerDead after `close`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (self._landed or self._outcomes or self._cancelled):
                self._raise_if_over()
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            events = WorkerEvents(status=self.status(), landed=tuple(self._landed), outcomes=tuple(self._outcomes),
                                  cancelled=tuple(self._cancelled))
            self._landed, self._outcomes, self._cancelled = [], [], []
            return events

    def cancel(self, group_ids: Sequence[str]) -> dict[str, CancelAnswer]:
        """End these groups unlanded. A group that is complete is not ended any more: it answers "landed".

        "unknown": never leased here, or it ended with an outcome.
        """
        with self._changed:
            return {group_id: self._cancel(group_id) for group_id in group_ids}

    def swap(self, version: WeightVersion) -> str:
        """Serve `version` from now on; answers in flight go on. Returns the digest of the weights as served.

        Raises WeightsDamaged when the bytes do not match the version's digest (the old weights stay), WorkerDead,
        AdapterNotServed and EngineMismatch where the engine does not answer as the learner says of its adapter.
        """
        with self._swaps:
            with self._changed:
                self._raise_if_over()
                self._versions = self._versions | {version.v: version}
            self._mark(swapping=version.v)
            try:
                directory = self._run.weights(version.v)
                digest = self._engine.swap(version, directory)
                check_adapter_served(self._engine, version, directory, self._config)
                return digest
            except DeadPart as error:
                self._end_worker(WorkerDead(f"engine of worker {self._name}: {error}"))
                raise WorkerDead(f"engine of worker {self._name}: {error}") from error
            finally:
                self._mark(swapping=None)

    def lend(self, version: WeightVersion, wait_s: float, for_s: float) -> Loan:
        """One server of the engine leaves rollout and serves `version` (engine.Lender): for a validation.

        Raises ValueError for an engine without servers, DeadlinePassed where none can be spared in `wait_s`, DeadPart
        where it dies meanwhile, WeightsDamaged, WorkerDead."""
        with self._changed:
            self._raise_if_over()
        if not isinstance(self._engine, Lender):
            raise ValueError(f"worker {self._name}: its engine has no servers to lend")
        return self._engine.lend(version, self._run.weights(version.v), wait_s=wait_s, for_s=for_s)

    def take_back(self, loan_id: str) -> None:
        """The server of this loan serves rollout again."""
        if isinstance(self._engine, Lender):
            self._engine.take_back(loan_id)

    def status(self) -> WorkerStatus:
        with self._changed:
            return WorkerStatus(
                worker=self._name, stream=self._writer.stream, served=self._engine.served,
                in_flight=tuple(self._groups), running=self._running, tokens_generated=self._tokens_generated,
                tokens_wasted=self._tokens_wasted, seconds=self._ledger.seconds(), servers=self._engine.counters(),
                tokens_greedy=self._tokens_greedy)

    def close(self) -> None:
        """Cancel what runs, land what is complete, free everything, within 2 s. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for group in self._groups.values():
                if group.phase == "running":
                    self._drop_pending(group)
            self._changed.notify_all()
        for _ in self._settlers:
            self._results.put(None)
        self._scorer.close()
        for function in (self._filter, self._session):
            if function is not None:
                function.close()
        deadline = time.monotonic() + CLOSE_DEADLINE_S / 2
        for settler in self._settlers:
            settler.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(DeadlinePassed):  # what has not landed by then is leased again
            self._commit.close(CLOSE_DEADLINE_S / 2)
        self._engine.close()

    # -- sampling

    def _sample(self, group: GroupInFlight, response: int) -> None:
        """Begin the next try of one response (lock held)."""
        request = group.begin(response)
        self._mark(running=1)
        future = self._engine.submit(request)
        future.add_done_callback(lambda f: self._answered(group.lease.group_id, request.request_id, f))

    def _answered(self, group_id: str, request_id: str, future: Future[Completion]) -> None:
        """On the engine's thread: count and hand over, nothing that takes long."""
        tokens = 0
        if not future.cancelled() and future.exception() is None:
            tokens = len(future.result().token_ids_L)
        self._mark(running=-1, tokens=tokens)
        self._results.put(_Result(group_id, request_id, future, time.time_ns() // 1000))

    def _mark(self, *, running: int = 0, tokens: int = 0, swapping: int | None = SAME) -> None:
        """Count, and book the time from now on. `swapping`: the version that is being taken up; None: none is any more.
        """
        with self._counts:
            self._running += running
            self._tokens_generated += tokens
            self._swapping = self._swapping if swapping == SAME else swapping
            if self._swapping is not None:
                self._ledger.enter("syncing", self._swapping)
            else:
                self._ledger.enter("busy" if self._running else "waiting")

    # -- settling: each answer is decided by one thread, each group under the lock by the thread of its last answer

    def _settle_all(self) -> None:
        """consumes: engine answers
        waits for: an answer, or the next look at group deadlines
        unblocked by: the engine's callback, `close`
        """
        try:
            period = min(1.0, self._config.deadlines.group_s / 10)
            next_look = time.monotonic() + period
            while not self._closed:
                with contextlib.suppress(queue.Empty):
                    result = self._results.get(timeout=max(0.0, next_look - time.monotonic()))
                    if result is None:
                        return
                    self._settle(result)
                if time.monotonic() >= next_look:
                    if self._looks.acquire(blocking=False):
                        try:
                            self._end_overdue()
                        finally:
                            self._looks.release()
                    next_look = time.monotonic() + period
        except Exception as error:  # the thread's edge: without it every group would wait for its deadline
            self._end_worker(WorkerDead(f"settling thread of worker {self._name} died of {error!r}"))
            raise

    def _settle(self, result: _Result) -> None:
        group = self._awaited_by(result)
        if group is None:
            return
        dropped = DeadPart("the engine dropped a request")
        error = dropped if result.future.cancelled() else result.future.exception()
        if isinstance(error, DeadPart):
            self._end_worker(WorkerDead(f"engine of worker {self._name}: {error}"))
        elif isinstance(error, ValueError):
            self._end_group(group, "poison", "prompt_refused", str(error))
        elif error is not None:
            self._failed(group, result.request_id, "engine_error", f"{type(error).__name__}: {error}", 0)
        else:
            self._settle_completion(group, result, result.future.result())

    def _awaited_by(self, result: _Result) -> GroupInFlight | None:
        """The group that waits for this result; a result that nobody waits for is wasted."""
        with self._changed:
            group = self._groups.get(result.group_id)
            if group is not None and group.phase == "running" and result.request_id in group.pending:
                return group
            if not result.future.cancelled() and result.future.exception() is None:
                self._tokens_wasted += len(result.future.result().token_ids_L)
            return None

    def _settle_completion(self, group: GroupInFlight, result: _Result, completion: Completion) -> None:
        tokens, request_id = len(completion.token_ids_L), result.request_id
        try:
            span = check_completion(completion, self._versions)
            decoded = str(self._tokenizer.decode(completion.token_ids_L, skip_special_tokens=True))
            text = answer_text(decoded, completion)
            following = self._next(group, request_id, text, completion)
            score = self._scorer(group.lease.prompt, text) if following is None else None
        except SessionError as error:
            if not self._closed:
                kind = "session_timeout" if isinstance(error, SessionTimeout) else "session_error"
                self._failed(group, request_id, kind, str(error), tokens)
            return
        except SampleRefused as error:
            self._failed(group, request_id, "sample_refused", str(error), tokens)
            return
        except RewardError as error:
            if not self._closed:
                self._count_reward_failure(error)
                self._failed(group, request_id, error.reason, str(error), tokens)
            return
        with self._changed:
            self._reward_failures = self._reward_failures if score is None else 0
            response = group.pending.get(request_id)
            if response is None:  # cancelled meanwhile
                self._tokens_wasted += tokens
                return
            seed = sampling_seed(self._config.seed, group.lease.group_id, response, group.tries[response] - 1)
            turn = Turn(completion=completion, span=span, seed=seed, prompt=group.asked(response), text=text,
                        prompt_ids_P=group.contexts.get(response),
                        following=None if following is None else following.prompt)
            self._tokens_greedy += tokens if response == GREEDY else 0
            if following is not None:
                self._sample(group, group.go_on(request_id, turn, following.token_ids_P, result.at_us))
                return
            assert score is not None  # no session ends without
            self._tokens_wasted += group.finish(request_id, turn, score, result.at_us)
            verdict = group.verdict
        self._end_if_over(group, verdict)

    def _next(self, group: GroupInFlight, request_id: str, text: str, completion: Completion) -> Next | None:
        """What the session of this answer goes on with; None: it is over, as each is without `rollout.session`."""
        if self._session is None:
            return None
        with self._changed:
            response = group.pending.get(request_id, GREEDY)
            turns = list(group.turns.get(response, ()))
            said = [*(Said(turn.prompt, turn.text, turn.completion.finish_reason) for turn in turns),
                    Said(group.asked(response), text, completion.finish_reason)]
        if len(said) >= self._config.rollout.session_answers:
            return None
        return self._session.go_on(group.lease, response, said)

    def _count_reward_failure(self, error: RewardError) -> None:
        with self._changed:
            self._reward_failures += 1
            failures = self._reward_failures
        if failures >= self._config.failure.reward_failures:
            self._end_worker(FailureBudgetSpent(f"{failures} reward calls failed in a row (failure.reward_failures); "
                                                f"the last one: {error}"))

    def _failed(self, group: GroupInFlight, request_id: str, reason: str, error: str, tokens: int) -> None:
        """One try of one response failed: try it again, or give the response up."""
        with self._changed:
            self._tokens_wasted += tokens
            response = group.pending.get(request_id)
            if response is None or self._closed or self._fatal is not None:
                return
            if group.fail(request_id, reason, error, tokens):
                self._sample(group, response)
                return
            verdict = group.verdict
        self._end_if_over(group, verdict)

    def _end_if_over(self, group: GroupInFlight, verdict: Verdict) -> None:
        """`verdict` as it was when the answer was booked: another thread may have ended the group since."""
        if verdict == "complete":
            self._land(group)
        elif verdict == "lost":
            self._end_group(group, "failed", *group.failures[0])

    def _end_overdue(self) -> None:
        """Groups past `deadlines.group_s` land with what they have, or end with an outcome."""
        limit, now = self._config.deadlines.group_s, time.monotonic()
        with self._changed:
            overdue = [group for group in self._groups.values() if now - group.started > limit]
            stuck = [group for group in overdue
                     if group.phase == "landing" and now - group.started > limit + LANDING_DEADLINE_S]
            overdue = [group for group in overdue if group.phase == "running"]
            for group in overdue:
                missing, asked = group.missing, group.lease.n_expected + group.greedy
                self._drop_pending(group)
                group.failures.append(("group_deadline", f"{missing} of {asked} answers were not "
                                       f"there after {limit:g} s (deadlines.group_s)"))
        for group in overdue:
            if group.may_land:
                self._land(group)
            else:
                self._end_group(group, "failed", *group.failures[-1])
        if stuck:
            self._end_worker(WorkerDead(f"worker {self._name}: {stuck[0].lease.group_id} is complete and has not "
                                        f"landed {limit + LANDING_DEADLINE_S:g} s after its lease"))

    # -- how a group ends

    def _land(self, group: GroupInFlight) -> None:
        with self._changed:
            if group.phase != "running" or self._groups.get(group.lease.group_id) is not group:
                return
            group.phase = "landing"
            self._drop_pending(group)  # of more than were asked for
            self._tokens_wasted += group.abandon()
        whole = group.whole(time.time_ns() // 1000)
        if self._filter is not None and not self._passes(group, whole, self._filter):
            return
        try:
            self._commit.put(whole)
        except DeadPart as error:
            self._end_worker(WorkerDead(f"worker {self._name}: {error}: {error.__cause__}"))

    def _passes(self, group: GroupInFlight, whole: TrajectoryGroup, group_filter: GroupFilter) -> bool:
        """Ask the filter; a group that it leaves out, or of which it says nothing, ends here."""
        try:
            reason = group_filter(whole)
        except FilterError as error:
            if not self._closed:
                kind = "filter_timeout" if isinstance(error, FilterTimeout) else "filter_error"
                self._end_group(group, "failed", kind, str(error))
            return False
        if reason is not None:
            self._end_group(group, "filtered", reason, f"left out by {self._config.rollout.group_filter}")
        return reason is None

    def _end_group(self, group: GroupInFlight, kind: OutcomeKind, reason: str, error: str) -> None:
        """Write the outcome, then let the group go: until the outcome is durable the lease is still in flight."""
        with self._changed:
            if group.phase == "ending" or self._groups.get(group.lease.group_id) is not group:
                return
            group.phase = "ending"
            self._drop_pending(group)
            self._tokens_wasted += group.tokens
        outcome = group.outcome(kind, reason, error)
        try:
            put_outcome(self._run, outcome)
        except OSError as broken:
            self._end_worker(broken)
            return
        with self._changed:
            self._groups.pop(outcome.group_id, None)
            self._outcomes.append(outcome)
            self._changed.notify_all()

    def _drop_pending(self, group: GroupInFlight) -> None:
        """Tell the engine to end what the group still samples (lock held); its tokens come back as wasted."""
        for request_id in group.pending:
            self._engine.cancel(request_id)
        group.pending.clear()

    def _cancel(self, group_id: str) -> CancelAnswer:
        group = self._groups.get(group_id)
        if group is None or group.phase == "ending":
            return "landed" if group_id in self._landed_ids else "unknown"
        if group.phase == "landing":
            return "landed"
        self._drop_pending(group)
        self._tokens_wasted += group.tokens
        del self._groups[group_id]
        self._cancelled.append(group_id)
        self._changed.notify_all()
        return "cancelled"

    # -- on the landing thread

    def _begin_landing(self) -> dict[str, str]:
        """What the next shard says of this worker: where its time went since the shard before."""
        self._landing_since_us = self._ledger.now_us()
        self._spans = [*self._spans, *self._ledger.take_spans()][-MAX_SPANS:]  # those of a landing that failed, too
        return {SPANS: json.dumps(as_rows(self._spans))}

    def _on_landed(self, hint: Landed) -> None:
        self._spans = [Span("landing", self._landing_since_us, self._ledger.now_us(), hint.seq)]
        with self._changed:
            self._landing_fails_since = None
            for group_id in hint.group_ids:
                self._groups.pop(group_id, None)
                self._landed_ids[group_id] = None
            while len(self._landed_ids) > REMEMBERED:
                del self._landed_ids[next(iter(self._landed_ids))]
            self._landed.append(hint)
            self._changed.notify_all()

    def _on_refused(self, group: TrajectoryGroup, error: DataError) -> None:
        with self._changed:
            known = self._groups.get(group.lease.group_id)
        if known is not None:
            self._end_group(known, "failed", "unlandable", str(error))

    def _on_landing_error(self, error: OSError) -> None:
        with self._changed:
            now = time.monotonic()
            since = self._landing_fails_since = self._landing_fails_since or now
        if now - since >= LANDING_DEADLINE_S:
            told = f"{error.strerror}: no shard has landed for {now - since:.0f} s; make room, then the same command " \
                   "goes on"
            self._end_worker(OSError(error.errno, told, str(self._run.stream(self._writer.stream))))

    # -- how the worker ends

    def _end_worker(self, error: Exception) -> None:
        """The first cause stands; every later call raises it."""
        with self._changed:
            self._fatal = self._fatal or error
            self._changed.notify_all()

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closed:
            raise WorkerDead(f"worker {self._name} is closed")


def open_worker(*, root: str, config: Config, name: str, attempt: int, cwd: str | None = None,
                allowed_imports: Sequence[str] | None = None) -> RolloutWorker:
    """A worker with the engine that the config names, the run's tokenizer and its reward: what an actor starts.

    `cwd` is the working directory of the command, in which a reward function lies. Loads torch and the model.
    """
    from rl_core.model_setup import model_digests
    from rl_core.rollout.engines import open_engine
    from rl_core.rollout.group_filter import make_group_filter
    from rl_core.rollout.prompts import load_tokenizer, read_vocab_size
    from rl_core.rollout.rewards.scoring import make_training_scorer
    from rl_core.rollout.sessions import make_session

    run = RunDir(Path(root))
    scorer = make_training_scorer(config, cwd=Path(cwd) if cwd else None, allowed=allowed_imports)
    group_filter = make_group_filter(config, cwd=Path(cwd) if cwd else None, allowed=allowed_imports)
    tokenizer = load_tokenizer(run.model)
    session = make_session(config, tokenizer, vocab_size=read_vocab_size(run.model), cwd=Path(cwd) if cwd else None,
                           allowed=allowed_imports)
    settings = config.rollout.engine
    digests = {**model_digests(run.model), "engine": settings.type, "dtype": settings.dtype}
    logs = [run.server_log(name, i) for i in range(config.servers_started)]
    engine = open_engine(config, run.model, logs, run)
    return RolloutWorker(run, config, name=name, attempt=attempt, engine=engine, tokenizer=tokenizer,
                         scorer=scorer, digests=digests, group_filter=group_filter, session=session)
