"""One start of a run: owner lock, attempt, model, actors, restored learner, offered weights.

A start and a restart are one path; all that differs is what the run directory already holds.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run

from rl_core.alarms import newest_alarm
from rl_core.config import Config, EngineConfig, LearnerConfig, SglangEngineConfig
from rl_core.errors import DeadPart, RunEnded, WallTimeReached
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import EndOfData
from rl_core.looking.failures import tell_last_lines
from rl_core.looking.watching import LAST_STEPS, trained_tokens_per_s
from rl_core.metrics import PoolReading, pool_metrics, read_pool
from rl_core.model_setup import copy_model, model_digests, set_up_model
from rl_core.observations import make_up_observations
from rl_core.records import recorded_steps
from rl_core.revisions import current_revision
from rl_core.roles.models import place_roles
from rl_core.rollout.orders import Orders, seen
from rl_core.rollout.prompts import PromptSource
from rl_core.rollout.pump import Pump
from rl_core.run_dir import OwnerLock, RunDir, file_numbers, replace_file, self_test, to_json
from rl_core.run_identity import RunIdentity, check_inputs, open_identity, refuse_to_amend_nothing
from rl_core.run_log import STORY, RunLog, masked, secrets_of
from rl_core.schedules import is_scheduled_checkpoint
from rl_core.source import source_commit
from rl_core.types import StepRecord, WeightVersion
from tasks import cluster, services, signals
from tasks.artifacts import ProgressArtifact, tell_link
from tasks.attempts import end_flow_run_before
from tasks.checkpoint import make_room
from tasks.exposing import Endpoint, expose
from tasks.inspection import cause_of
from tasks.offline import check_enough, origin_tag, placed_model, refuse_to_sample, take_up
from tasks.paths import headway_home, run_dir
from tasks.progress import Progress
from tasks.screens import Screens
from tasks.tracking import Status, Tracker, destination
from tasks.training import Claims, LearnerGroup, first_step
from tasks.validation import ValidatorDeaths

ACTORS_END_S = 10.0
"""What all actors get to end, together."""
SERVICES_STOP_S = 5.0
CLOSE_S = 20.0
"""What an MLflow that answers gets for figures and status of a completed run."""
LAST_WORDS_S = 5.0
"""What it gets to hear how a start ended else."""
LAST_PAGES_S = {"completed": 15.0, "failed": 2.0, "cancelled": 0.0}
"""What the last pages of the run get, by how it ended; the next start makes what is missing."""
MAX_WALL_TIME = "max_wall_time"
"""What stopped a run that was not stopped by a signal."""
ROLLOUT_NICE = 5
"""Where processors are short, a training step goes before what rollout workers do ahead of it, which is bounded."""
STOP_CHECKPOINT_S = 3.0
"""What a signal leaves for a last checkpoint, the running step included: all is gone 10 s after it."""
RECENT_STEPS = 8
"""The longest of them is what the next step is thought to take."""
VALIDATION_NICE = 10
"""Validation takes the processor time that training and rollout leave."""


class Owner:
    """Owns a run for one start of it, and all that it needs. `own_run` makes it, `set_up` fills it, `close` ends it."""

    learner: LearnerGroup
    pool: cluster.RemotePool
    validator: cluster.Handle
    experience: Experience
    claims: Claims
    pump: Pump
    tracker: Tracker
    screens: Screens
    rollout: PrefectFuture[None]

    def __init__(self, run: RunDir, identity: RunIdentity, config: Config, lock: OwnerLock, progress: Progress,
                 groups: int | None = None, tags: Mapping[str, str] | None = None) -> None:
        self.run, self.identity, self.config, self.lock, self.progress = run, identity, config, lock, progress
        self.revision = current_revision(run)
        """Config revision that `config` is of: what this start claims is trained by it."""
        self.groups = groups
        """Of a start that trains nothing: usable groups that shall wait at its end."""
        self.gathered: int | None = None
        """How many do, then."""
        self.tags = dict(tags or {})
        """Of its MLflow run, beside those that say what it is."""
        self.attempt = 0
        self.first_step = 0
        self.published_idx = 0
        self.started_s = time.monotonic()
        self.ends_at = self.started_s + (config.max_wall_time or math.inf)
        """Clock at which this start ends itself."""
        self._step_ends = deque[float](maxlen=RECENT_STEPS + 1)
        self._last_steps = deque[Mapping[str, float]](maxlen=LAST_STEPS)
        """Their metrics, of this start."""
        self.stop = threading.Event()
        self.validations: list[Any] = []
        self.validations_left: set[int] = set()
        """Steps whose validation waits or runs."""
        self.validated: set[int] = set()
        self.versions: dict[int, WeightVersion] = {}
        """Those of the run, as far as this start has read them."""
        self.whole_checkpoints: set[int] = set()
        """Those that this start has seen to be whole."""
        self.ended: EndOfData | None = None
        self.validating = threading.Lock()
        self.validator_deaths = ValidatorDeaths(config.failure.validation_restarts)
        self.services: services.Services | None = None
        """Those that this start has to end, as no command does."""
        self.log: RunLog | None = None
        self.endpoint: Endpoint | None = None
        self.ended_as: str | None = None
        """`completed`, `failed` or `cancelled`, once that is known."""
        self._ending = threading.Event()
        self._seen: PoolReading | None = None
        self._artifact = ProgressArtifact(config.total_steps)

    @property
    def remaining_steps(self) -> range:
        """From the first step without a record; from the run directory, not from a cache."""
        return range(self.first_step, self.config.total_steps)

    def check(self) -> None:
        """To be asked by whoever waits: raises KeyboardInterrupt for a signal, WallTimeReached, and the error of a pump
        or of a validation that failed meanwhile."""
        signals.check()
        if time.monotonic() >= self.ends_at:
            raise WallTimeReached(f"max_wall_time: {self.config.max_wall_time:g} s are over")
        if hasattr(self, "experience") and self.experience.failure is not None:
            raise self.experience.failure

    def check_time(self) -> None:
        """Raises WallTimeReached where another step, as long as the longest of the last ones, and a checkpoint behind
        it do not fit into max_wall_time."""
        ends = list(self._step_ends)
        step_s = max((later - sooner for sooner, later in itertools.pairwise(ends)), default=0.0)
        left_s = self.ends_at - time.monotonic()
        if left_s < step_s + self.learner.checkpoint_s:
            raise WallTimeReached(f"max_wall_time: {left_s:.1f} s are left, a step takes {step_s:.1f} s")

    def send_ahead(self, step: int) -> None:
        """Let the learner go on with a claimed step by itself, unless a checkpoint of those before is due first."""
        if not is_scheduled_checkpoint(step, self.config.checkpoint):
            with suppress(DeadPart):  # `train` says it
                self.learner.send(step)

    def restart_validator(self, death: DeadPart) -> None:
        """A fresh validation engine in place of one that died. Raises RunEnded if it was ended with this start,
        FailureBudgetSpent for one death too many."""
        if not self._ending.is_set():
            self.validator_deaths.note(death)
            self.validator = cluster.start_or_adopt(_validator_spec(self), fresh=True)
        if self._ending.is_set():  # also when that came meanwhile: then nobody else ends the new one
            self.validator.kill()
            raise RunEnded("nothing more is validated: this start has ended")

    def saw_step(self, record: StepRecord) -> None:
        """Note a trained step: what the rollout side did meanwhile, tracking, status line."""
        self.experience.wake()  # a version may have been published
        self._step_ends.append(time.monotonic())
        self._seen = read_pool(self.pump.statuses(), time.monotonic(), self._seen)
        if record.published is not None:
            self.published_idx = record.published.idx
        metrics = pool_metrics(self._seen, in_flight=self.experience.F, published_idx=self.published_idx,
                               sampled=self.experience.take_sampled(), filtered=self.experience.take_filtered())
        self.tracker.observe(record.step, metrics)
        self._last_steps.append(record.metrics)
        alarm = newest_alarm([(record.step, record.metrics)])
        self.progress.set(state="training", step=record.step + 1, metrics=record.metrics | metrics,
                          tokens_per_s=trained_tokens_per_s(self._last_steps),
                          **({} if alarm is None else {"alarm": alarm}))  # the newest one stays
        STORY.info("trained in %.3f s, reward %.4g", record.metrics["system/step_s"], record.metrics["reward/mean"],
                   extra={"step": record.step})
        self._artifact.done(record.step + 1)

    def saw_validation(self, record: dict[str, Any]) -> None:
        """Note a finished validation: tracking and status line."""
        self.tracker.wake()
        self.screens.wake()
        STORY.info("validated, greedy accuracy %s", record["greedy_accuracy"], extra={"step": record["step"]})
        first = {"accuracy_start": record["greedy_accuracy"]} if record["step"] == 0 else {}
        self.progress.set(accuracy=record["greedy_accuracy"], **first)

    def end_rollout(self) -> None:
        """Let the pump go and end the workers: nothing more is claimed. Workers whose servers validate stay as long as
        the owner, with nothing to do. Raises what the pump raised."""
        self.stop.set()
        if hasattr(self, "rollout"):  # none where the groups are another run's
            self.rollout.result(timeout=5)
        self.check()
        if self.config.validates_lent and self.groups is None:
            self.pool.cancel_all()
        else:
            self.pool.kill()

    def finish(self, status: str, figures: Sequence[Path] = (), *, mlflow_answers: bool = False,
               **result: Any) -> None:
        """Write how this attempt ended; MLflow, the status line and the exit code agree with it. `mlflow_answers`:
        MLflow is up to date, and gets the time for the figures, too."""
        payload = {"status": status, "attempt": self.attempt, "revision": self.revision,
                   "run_key": self.identity.run_key,
                   "wall_s": round(time.monotonic() - self.started_s, 3), "ts_us": time.time_ns() // 1000,
                   "tracked": False, "tracking_trouble": None, **result}
        self.ended_as = status
        self.progress.set(state=status)
        self._put_result(payload)
        ending = threading.Thread(target=self._end_actors, name="end-actors")
        ending.start()  # beside MLflow's last words, which may take their time
        if hasattr(self, "screens"):
            self.screens.finish(LAST_PAGES_S[status] if mlflow_answers or status != "completed" else 0.0)
        if hasattr(self, "tracker"):
            ends: dict[str, Status] = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
            why = masked(cause_of(payload), secrets_of(os.environ)) if status == "failed" else None
            tracked = self.tracker.finish(ends[status], deadline_s=CLOSE_S if mlflow_answers else LAST_WORDS_S,
                                          artifacts=figures, why=why)
            self._put_result({**payload, "tracked": tracked, "tracking_trouble": self.tracker.trouble})
        ending.join()

    def _put_result(self, payload: dict[str, Any]) -> None:
        try:
            replace_file(self.run.result, to_json(payload))
        except OSError as error:  # a full disk: the console still says it
            self.progress.set(trouble=f"{self.run.result}: {error}")

    def failed(self, error: BaseException) -> None:
        """Note a failure by its first cause (a claim that a dead pump starved raises the pump's error itself), and let
        the error say what a dead part wrote last."""
        tell_last_lines(error)
        STORY.error("failed: %s: %s", type(error).__name__, error, exc_info=error)
        with suppress(OSError):  # a full disk may be the cause itself, and is what shall be said
            self.run.logs.mkdir(parents=True, exist_ok=True)
            (self.run.logs / f"failure-{self.attempt:06d}.txt").write_text("".join(traceback.format_exception(error)))
        self.stop.set()
        self.finish("failed", error=type(error).__name__, message=str(error))

    def cancelled(self, signal: str) -> str:
        """Note a stop from outside, by `SIGINT`, `SIGTERM` or `max_wall_time`, with a last checkpoint if one is due and
        fits; returns the state's message with how to go on."""
        STORY.warning("stopped by %s", signal)
        self.stop.set()
        self._last_checkpoint(max(STOP_CHECKPOINT_S, self.ends_at - time.monotonic() if signal == MAX_WALL_TIME else 0))
        self.finish("cancelled", signal=signal)
        return f"{signal} after {len(recorded_steps(self.run))} steps; the same command with " \
               f"--run-key {self.identity.run_key} goes on"

    def _last_checkpoint(self, deadline_s: float) -> None:
        """If the newest is older than `checkpoint.on_stop_after` steps. What does not fit is trained again."""
        after, done = self.config.checkpoint.on_stop_after, recorded_steps(self.run)
        newest = max(file_numbers(self.run.checkpoints, r"n-(\d{9})"), default=0)
        if after is None or not done or not hasattr(self, "learner") or done[-1] + 1 - newest <= after:
            return
        self.progress.set(state="stopping")
        try:
            self.learner.last_checkpoint(deadline_s)
        except BaseException as error:  # also a second signal: then it ends at once
            self.progress.set(note=f"stopped without a checkpoint: {error}")

    def close(self) -> None:
        """End what this start began, in order; nothing here waits longer than its own deadline. Actors need no goodbye:
        checkpoint, claims and records bring everything back."""
        self.stop.set()
        self._end_actors()
        cluster.disconnect()
        if self.services is not None:
            with suppress(DeadPart):
                services.stop(self.services, SERVICES_STOP_S)
        self._artifact.close()
        self.progress.close()
        if self.endpoint is not None:  # one that failed is missed by Prometheus: an alert is made of it
            self.endpoint.close(forget=self.ended_as in ("completed", "cancelled"))
        self.lock.release()
        if self.log is not None:
            self.log.close()

    def _end_actors(self) -> None:
        """End all actors at once. Idempotent."""
        self._ending.set()
        if hasattr(self, "claims"):
            self.claims.close()
        ends: list[Callable[[], None]] = []
        if hasattr(self, "pool"):
            ends.append(self.pool.kill)
        if hasattr(self, "learner"):
            ends.append(self.learner.close)
        if hasattr(self, "validator"):
            ends.append(self.validator.kill)
        failed: list[BaseException] = []
        threads = [threading.Thread(target=_end, args=(end, failed), name="end-actor", daemon=True) for end in ends]
        until = time.monotonic() + ACTORS_END_S
        for thread in threads:
            thread.start()
        for thread in threads:  # one that hangs in a dead Ray is left to it: services end, and silence ends actors
            thread.join(max(0.0, until - time.monotonic()))
        if failed:
            raise failed[0]


def _end(end: Callable[[], None], failed: list[BaseException]) -> None:
    """End one kind of actors; what that raises is of another thread."""
    try:
        end()
    except DeadPart:
        pass
    except BaseException as error:
        failed.append(error)


def own_run(preset: str, config: Config, run_key: str, *, amend: bool = False, groups: int | None = None,
            tags: Mapping[str, str] | None = None) -> Owner:
    """Own the run: lock, identity, status view. With `amend` the settings that differ are recorded first of all.

    Raises RunIsAlive, or ConfigError for other identity fields, and for other training fields that cannot be amended or
    shall not be.
    """
    run = run_dir(run_key)
    refuse_to_sample(config, groups)
    if amend:
        refuse_to_amend_nothing(run, run_key)  # before the lock makes a directory of it
    lock = OwnerLock(run)
    try:
        identity = open_identity(run, run_key, preset, config, amend=amend)
        progress = Progress(run, {"run_key": run_key, "total_steps": config.total_steps})
        owner = Owner(run, identity, config, lock, progress, groups, tags)
        with suppress(OSError):  # a full disk: it is said by what cannot do without it
            owner.log = RunLog(run.component_log("owner"), run_key=run_key, component="owner",
                               attempt=lambda: owner.attempt)
        owner.endpoint = expose(run, config, run_key, lambda: progress.view, lambda text: progress.set(note=text))
        return owner
    except BaseException:
        lock.release()
        raise


@task(name="set-up", task_run_name="set-up", cache_policy=NO_CACHE, persist_result=False)
def set_up(owner: Owner) -> None:
    """Everything from an empty or half-done run directory to weights that workers can be offered.

    Raises NoExclusiveCreate, ConfigError (inputs that changed), CheckpointDamaged, DeadPart.
    """
    run, config, progress = owner.run, owner.config, owner.progress
    for directory in (run.ledger(), run.records, run.versions, run.attempts, run.outcomes, run.streams,
                      run.validations):
        self_test(directory)
    owner.attempt = owner.lock.next_attempt(first_step(run), flow_run.get_id())
    STORY.info("attempt %d of pid %d begins, %d steps are recorded", owner.attempt, os.getpid(),
               len(recorded_steps(run)))
    if (untold := end_flow_run_before(run, owner.attempt)) is not None:
        progress.set(note=untold)
    with progress.stage("model"):
        _place_model(owner)
        roles = place_roles(run, config)
        prompts = PromptSource.of_model(config, run.model)
        if not config.offline:
            check_inputs(run, {**model_digests(run.model), **roles, "data": prompts.digest}, rows=len(prompts))
    if config.offline:
        with progress.stage("shards"):
            take_up(owner, prompts)
    with progress.stage("actors"):
        _start_actors(owner)
    with progress.stage("learner" if owner.groups is None else "weights"):
        _bring_up(owner)
    make_up_observations(run)  # now: an adopted learner has recorded the step that it was at
    with progress.stage("experience"):
        owner.experience = Experience(run, config, owner.attempt, owner.revision, goal=owner.groups)
        for text in owner.experience.passed_over:
            progress.set(note=f"snapshot passed over, the claims are read instead: {text}")
        owner.claims = Claims(owner.experience, config, owner.check, partial(make_room, owner))
        if config.data.sampler is not None:
            experience = owner.experience
            prompts.sampled = Orders(run, config, lambda: seen(experience.landed_groups())).order
        owner.pump = Pump(run, config, prompts, owner.experience, owner.pool, owner.attempt)
        progress.watch(partial(_live, owner))
        if config.offline:
            check_enough(owner)
    owner.tracker = Tracker(run, config, destination(config, headway_home()), run_uuid=owner.identity.run_uuid,
                            run_key=owner.identity.run_key, tags=_tags(owner),
                            report=lambda text: progress.set(note=text))
    owner.tracker.start()  # here, since its imports would slow down the actors' start
    owner.screens = Screens(run, owner.tracker, told=partial(tell_link, owner.identity.run_key))
    owner.screens.start()
    progress.set(state="training", step=owner.first_step)


def _live(owner: Owner) -> dict[str, Any]:
    """What changes by itself: the pump's snapshot, with the budgets of learner and validation beside its own."""
    snapshot = owner.pump.snapshot()
    restarts = owner.learner.restarts if hasattr(owner, "learner") else 0
    snapshot["budgets"]["learner_restarts"] = (restarts, owner.config.failure.learner_restarts)
    snapshot["budgets"]["validation_restarts"] = owner.validator_deaths.budget
    return snapshot


def _bring_up(owner: Owner) -> None:
    """The learner behind the recorded steps, and the weights that workers are offered; without training only these."""
    run, progress = owner.run, owner.progress
    if owner.groups is not None:
        from rl_core.offered_weights import offered_version  # imports torch

        owner.first_step = first_step(run)
        owner.published_idx = offered_version(run, owner.config, owner.attempt).idx
        return

    def replaying(done: int, total: int) -> None:
        if done == 0:  # before what may take hours
            _note_damage(owner)
        progress.set(state="replaying", replayed=[done, total])

    owner.first_step = owner.learner.bring_up(replaying)
    if owner.identity.forked_from is not None:
        from rl_core.fork import check_replayed  # imports torch

        check_replayed(run, owner.identity.forked_from, first=owner.learner.restored, attempt=owner.attempt)
    owner.published_idx = owner.learner.publish().idx


def _note_damage(owner: Owner) -> None:
    """A checkpoint that was passed over is said where people look; the learner's log says what is wrong with it."""
    run, restored = owner.run, owner.learner.restored
    newest = max(file_numbers(run.checkpoints, r"n-(\d{9})"), default=0)
    if newest > restored:
        what = f"checkpoint {newest} is damaged: trained again from step {restored}" if restored \
            else "no checkpoint is whole: trained again from the initial weights (retention.replay: all)"
        owner.progress.set(note=f"{what}, see {run.logs / 'learner-0.log'}")


def _place_model(owner: Owner) -> None:
    """The initial model in the run directory, so that a replay finds it whatever happens to the original."""
    run, config, progress = owner.run, owner.config, owner.progress
    if run.model.exists():
        return
    source = placed_model(run, config)
    if not source.exists():
        source = set_up_model(config, headway_home() / "models",
                              lambda done, total: progress.set(state="warming up", warmed_up=[done, total]))
    progress.set(state="starting")
    copy_model(source, run.model)


def _start_actors(owner: Owner) -> None:
    """Learner ranks, rollout workers and the validation engine: alive from an earlier start, or new, all at once."""
    config, deadlines = owner.config, owner.config.deadlines
    commanded = services.PRIVATE in os.environ  # the command started them, and ends them
    where = services.start(owner.run.services, headway_home(), isolated=config.isolated, deadlines=deadlines)
    if not (commanded and where.adopted):
        owner.services = where
    cluster.connect(where, owner_timeout_s=deadlines.owner_timeout_s)
    owner.progress.watch_actors(cluster.actors)
    trains = owner.groups is None
    rolls = not (trains and config.validation.only) and not config.offline
    validates = config.data.validation is not None and trains
    _end_unwanted(owner, trains=trains, rolls=rolls, validates=validates)
    if trains:
        owner.learner = LearnerGroup(owner.run, config, lambda meeting: _learner_specs(owner, meeting),
                                     owner.check)
    owner.pool = cluster.RemotePool(_worker_specs(owner), call_s=deadlines.call_s, swap_s=deadlines.swap_s)
    with ThreadPoolExecutor(3, thread_name_prefix="set-up") as pool:
        starts: list[Future[Any]] = [pool.submit(owner.learner.start)] if trains else []
        if rolls:
            starts.append(pool.submit(owner.pool.links))
        if validates:
            starts.append(pool.submit(cluster.start_or_adopt, _validator_spec(owner)))
    for start in starts:
        start.result()
    if validates:
        owner.validator = starts[-1].result()


def _end_unwanted(owner: Owner, *, trains: bool, rolls: bool, validates: bool) -> None:
    """Actors that an earlier attempt left and that this start has no use for hold memory, and devices."""
    wanted = [*(_learner_specs(owner, Path()) if trains else ()), *(_worker_specs(owner) if rolls else ()),
              *([_validator_spec(owner)] if validates else ())]
    cluster.end_unwanted(owner.identity.run_uuid, {spec.name for spec in wanted})


def _spec(owner: Owner, role: str, index: int, factory: str, threads: int, gpus: float,
          **kwargs: Any) -> cluster.ActorSpec:
    deadlines = owner.config.deadlines
    return cluster.ActorSpec(
        run_uuid=owner.identity.run_uuid, role=role, rank=index, attempt=owner.attempt, factory=factory,
        kwargs={"root": str(owner.run.root), "config": owner.config, **kwargs},
        owner_timeout_s=deadlines.owner_timeout_s, start_s=deadlines.actor_start_s, threads=threads, gpus=gpus,
        log=owner.run.logs / f"{role}-{index}.log")


def _gpus(settings: LearnerConfig | EngineConfig) -> float:
    """What an actor with these settings asks Ray for."""
    return settings.gpus if settings.device == "cuda" else 0.0


def _learner_specs(owner: Owner, meeting: Path) -> list[cluster.ActorSpec]:
    settings = owner.config.learner
    return [_spec(owner, "learner", rank, "rl_core.learner.learner:Learner", settings.threads,
                  _gpus(settings), attempt=owner.attempt, rank=rank, ranks=settings.ranks,
                  rendezvous=f"file://{meeting}", revision=owner.revision) for rank in range(settings.ranks)]


def _worker_specs(owner: Owner) -> list[cluster.ActorSpec]:
    engine = owner.config.rollout.engine
    specs = [_spec(owner, "rollout", rank, "rl_core.rollout.worker:open_worker", engine.threads,
                   _gpus(engine), name=f"rollout-{rank}", attempt=owner.attempt, cwd=os.getcwd())
             for rank in range(owner.config.rollout.workers)]
    return [replace(spec, nice=ROLLOUT_NICE, start_s=spec.start_s + _servers_start_s(engine)) for spec in specs]


def _servers_start_s(engine: EngineConfig) -> float:
    """What an actor that starts servers has more time for: they start beside each other, the checks come behind."""
    return engine.start_s if isinstance(engine, SglangEngineConfig) else 0.0


def _validator_spec(owner: Owner) -> cluster.ActorSpec:
    engine = owner.config.validation_engine
    spec = _spec(owner, "validation", 0, "rl_core.validation:open_validator", engine.threads,
                 0.0 if owner.config.validates_lent else _gpus(engine), cwd=os.getcwd())
    return replace(spec, nice=VALIDATION_NICE)


def _tags(owner: Owner) -> dict[str, str]:
    """Facts of this start for MLflow: what may change from attempt to attempt is a tag, never a param."""
    found = {"headway.preset": owner.identity.preset, "headway.attempt": str(owner.attempt),
             "prefect.flow_run_id": str(flow_run.get_id() or ""), "headway.commit": source_commit()}
    if owner.identity.forked_from is not None:
        found["headway.forked_from"] = json.dumps(asdict(owner.identity.forked_from))
    if (origin := origin_tag(owner.run)) is not None:
        found["headway.shards_from"] = json.dumps(origin)
    return {name: value for name, value in {**found, **owner.tags}.items() if value}
