"""The only module that imports ray: actors that are named, detached, fenced and adopted, and calls with deadlines.

Every role is an ordinary class; it becomes an actor here, inside the shell `Hosted`, which refuses calls of an attempt
that is over, keeps the time of the last owner call, and ends its process and its children when the owner has been
silent for `owner_timeout_s`. The owner's side is a `Handle`: every call has a deadline, a death is a typed error that
names who died and what was asked of it, and an exception raised by the role arrives as itself.

An actor asks Ray for no CPUs (its threads are a setting of its own), so that learner, workers and validator start on
any machine; it asks for GPUs where a device is given.
"""

from __future__ import annotations

import os

os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # a step sent ahead fails with the one before it, whose error is told
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # read when ray is imported: a late call must not start a new cluster

import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
import ray._private.worker as ray_worker
import ray.exceptions
import ray.util
import xxhash

# Compiled, without types.
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]
from ray.job_config import JobConfig

from rl_core.errors import CollectiveFailed, DeadlinePassed, DeadPart, LearnerDead, StaleAttempt, WorkerDead
from rl_core.types import Lease, WeightVersion, WorkerEvents
from tasks import services, signals
from tasks.hosted import Hosted, Identity, end_family
from tasks.waiting import waiting

if TYPE_CHECKING:
    from rl_core.rollout.engine import Loan
    from rl_core.rollout.pump import CancelAnswer, WorkerLink

NAMESPACE = "headway"
LOST_CHECK_S = 0.5
"""How often a waiting call looks whether the Ray head is still there."""
OWNER = "owner"
DEATH_S = 2.0
"""How long after a failed call the death of another actor may come to light and be its cause."""
KILL_S = 10.0
"""Longest wait for a killed actor to be gone."""
D = TypeVar("D", bound=DeadPart)
DEATHS: dict[str, type[DeadPart]] = {"rollout": WorkerDead, "learner": LearnerDead}


# -- the connection

TREE = str(Path(__file__).resolve().parent.parent)
"""Where Headway's packages are: a checkout, or site-packages."""


class _Job(JobConfig):
    """Ray puts the owner's working directory first on the path of every worker, where a person's own `tasks` would be
    taken for ours. This tree is put there instead."""

    def _get_proto_job_config(self) -> Any:
        self._py_driver_sys_path = [TREE]
        return super()._get_proto_job_config()


class _Connection:
    """This process's link to the cluster: its heartbeat, the handles it speaks for, and whether the head is lost."""

    def __init__(self, where: services.Services, beat_s: float) -> None:
        self.where, self.beat_s = where, beat_s
        self.handles: dict[str, Handle] = {}
        self.lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Tell the actors that the owner lives. Consumes nothing; waits for the clock; unblocked by `close`."""
        while True:
            if gone := services.dead(self.where):
                self.lost = f"{' and '.join(gone)} of this run died" if "ray" in gone else self.lost
            if self.lost is None:
                for handle in list(self.handles.values()):
                    handle.beat()
            if self._stop.wait(self.beat_s):
                return

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)


_connection: _Connection | None = None


def connect(where: services.Services, *, owner_timeout_s: float) -> None:
    """Join the cluster of these services, and keep the actors informed that this owner lives.

    Prefect's SIGTERM handler, which `ray.init` replaces, is put back. Raises DeadPart when there is no cluster.
    """
    global _connection
    disconnect()
    for name in where.unset:
        if name.startswith("RAY_"):
            os.environ.pop(name, None)
    os.environ.update({name: value for name, value in where.env.items()
                       if name.startswith("RAY_") or name == services.PRIVATE})
    # Every first failure is read by whoever waits for it; what was sent ahead of it fails too, with nobody waiting,
    # and Ray would print that on the user's terminal when the reference is dropped.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    # The authentication mode and the token are read when ray is imported; here they may have changed since.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=where.ray_address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR,
                 job_config=_Job())
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise DeadPart(f"no Ray cluster at {where.where['ray']}: {error}") from error
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
    ray_worker._worker_logs_enabled = False  # else Ray prints every worker's death on stdout, log_to_driver or not
    _connection = _Connection(where, services.beat_s(owner_timeout_s))


def disconnect() -> None:
    """Leave the cluster; detached actors stay. Idempotent."""
    global _connection
    if _connection is not None:
        _connection.close()
        _connection = None
    if ray.is_initialized():
        ray.shutdown()


def lost() -> str | None:
    """Why the cluster is lost, or None."""
    return None if _connection is None else _connection.lost


# -- actors

@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSpec:
    """What an actor is: a class of ours by import path, what it is made with, and how long it outlives its owner.

    Example: `ActorSpec(run_uuid="1f..", role="rollout", rank=0, attempt=1, owner_timeout_s=60.0,
    factory="rl_core.rollout.worker:RolloutWorker", kwargs={"name": "rollout-0", ...})`.
    """

    run_uuid: str
    role: str
    rank: int
    attempt: int
    factory: str
    """`module:Class`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    owner_timeout_s: float
    start_s: float = 180.0
    """Deadline from placement to the first answer, making the class included."""
    threads: int = 1
    nice: int = 0
    """Added to the process's niceness: work that shall yield to training."""
    gpus: float = 0.0
    log: Path | None = None
    """File for the actor's stdout and stderr."""
    concurrency: int = 8
    """Calls served at once, beside the heartbeat, which is always served."""

    @property
    def name(self) -> str:
        return f"{self.run_uuid}/{self.role}/{self.rank}"

    @property
    def digest(self) -> str:
        """What must be equal for an actor to be adopted: everything but what names one start."""
        kwargs = sorted((k, repr(v)) for k, v in self.kwargs.items() if k not in ("attempt", "rendezvous"))
        text = repr((self.factory, kwargs, self.threads, self.gpus))
        return xxhash.xxh3_64_hexdigest(text.encode())


class Pending:
    """A call on its way: `handle.call_async("train", 3).result(60.0)`."""

    def __init__(self, handle: Handle, method: str, ref: Any) -> None:
        self.handle, self.method, self.ref = handle, method, ref

    def result(self, deadline_s: float) -> Any:
        """The answer. Raises DeadlinePassed after `deadline_s`, the role's own exception, or that the actor is dead."""
        return gather([self], deadline_s)[0]

    def death(self, why: str) -> DeadPart:
        return self.handle.death(self.method, why)

    def answer(self) -> Any:
        """The answer of a call that has ended."""
        try:
            return ray.get(self.ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, BaseException) or isinstance(cause, ray.exceptions.RayError):
                raise self.death(str(error)) from None
            cause.add_note(f"raised in {self.handle.label} by `{self.method}`:\n{error}")
            raise self.handle.logged(cause) if isinstance(cause, DeadPart) else cause from None
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise self.death(str(error).strip().splitlines()[0]) from None


def gather(calls: Sequence[Pending], deadline_s: float, check: Callable[[], None] = signals.check) -> list[Any]:
    """The answers of calls that were sent together, in their order; the first one to fail raises, whichever it is.

    `check` is asked meanwhile, and raises what else shall end the wait. A call that fails because another one's actor
    died (a collective lost its peer) raises that death. Errors: see `Pending.result`.
    """
    if not calls:
        return []
    labels = " and ".join(call.handle.label for call in calls)
    with waiting(labels, f"`{calls[0].method}`", deadline_s):
        return _gather(calls, deadline_s, check)


def _gather(calls: Sequence[Pending], deadline_s: float, check: Callable[[], None]) -> list[Any]:
    left_over, answers, until = list(calls), dict[Pending, Any](), time.monotonic() + deadline_s
    while left_over:
        check()
        left = until - time.monotonic()
        if (why := lost()) is not None:
            raise left_over[0].death(why)
        ended = _ended(left_over, max(0.0, min(LOST_CHECK_S, left)))
        if not ended and left <= LOST_CHECK_S:
            silent = " and ".join(call.handle.label for call in left_over)
            raise left_over[0].handle.logged(
                DeadlinePassed(f"{silent}: `{left_over[0].method}` gave no answer in {deadline_s:g} s"))
        for call in ended:
            left_over.remove(call)
            try:
                answers[call] = call.answer()
            except CollectiveFailed as error:
                raise (_death(left_over) or _left_behind(error, left_over)) from None
            except DeadPart:
                raise
            except Exception as error:
                raise (_death(left_over) or error) from None
    return [answers[call] for call in calls]


def _ended(calls: Sequence[Pending], wait_s: float) -> list[Pending]:
    """At least one that has ended, or none after `wait_s`."""
    try:
        refs, _ = ray.wait([call.ref for call in calls], timeout=wait_s)
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise calls[0].death(str(error).strip().splitlines()[0]) from None
    return [call for call in calls if call.ref in refs]


def _death(calls: list[Pending]) -> DeadPart | None:
    """The first death among these calls, as far as it is known soon."""
    until = time.monotonic() + DEATH_S
    while calls and time.monotonic() < until:
        for call in _ended(calls, LOST_CHECK_S):
            calls.remove(call)
            try:
                call.answer()
            except CollectiveFailed:
                continue
            except DeadPart as death:
                return death
            except Exception:  # its own view of the same trouble
                continue
    return None


def _left_behind(error: CollectiveFailed, silent: Sequence[Pending]) -> CollectiveFailed:
    """A collective that failed without a death, with the names of those that have not said anything."""
    if not silent:
        return error
    return silent[0].handle.logged(CollectiveFailed(
        f"{' and '.join(call.handle.label for call in silent)} left the collective of `{silent[0].method}` and says "
        f"nothing; {error}"))


class Handle:
    """The owner's end of one actor."""

    def __init__(self, spec: ActorSpec, actor: Any, identity: Identity, *, adopted: bool) -> None:
        self._spec, self._actor, self.identity = spec, actor, identity
        self.adopted = adopted
        """True for an actor that an earlier attempt started: its state is what that attempt left."""
        self._beating: Any = None

    @property
    def role(self) -> str:
        return self._spec.role

    @property
    def rank(self) -> int:
        return self._spec.rank

    @property
    def label(self) -> str:
        """`rollout/0 (pid 123)`."""
        return f"{self.role}/{self.rank} (pid {self.identity.pid})"

    def call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Call a method of the role and wait. Errors: see `Pending.result`, and StaleAttempt for an owner that is over.

        A method with a parameter `attempt` gets this owner's attempt when the caller does not give one.
        """
        return self.call_async(method, *args, **kwargs).result(deadline_s)

    def call_async(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        if (why := lost()) is not None or not ray.is_initialized():
            raise self.death(method, why or "this process has left the cluster")
        return Pending(self, method, self._actor.call.remote(self._spec.attempt, method, args, kwargs))

    def death(self, method: str, why: str) -> DeadPart:
        """The typed error for a dead actor: WorkerDead, LearnerDead, or DeadPart."""
        return self.logged(DEATHS.get(self.role, DeadPart)(f"{self.label} is dead, asked for `{method}`: {why}"))

    def logged(self, error: D) -> D:
        """`error`, which speaks of this actor, with its log; where the Ray head is lost, with that of the head."""
        error.log = self._spec.log if lost() is None or _connection is None else services.ray_log(_connection.where)
        return error

    def beat(self) -> None:
        """Tell the actor that its owner lives; does not wait, an answer is not needed."""
        if ray.is_initialized():
            with suppress(ray.exceptions.RayError):
                self._beating = self._actor.beat.options(concurrency_group=OWNER).remote(self._spec.attempt)

    def kill(self) -> None:
        """End the actor and its children now, and wait until it is gone. Idempotent.

        Raises DeadlinePassed when it is still there after 10 s.
        """
        _forget(self)
        family = self.identity.family()  # before the death: then the children have another parent
        if ray.is_initialized() and lost() is None:
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(self._actor, no_restart=True)
        end_family(family)
        if ray.is_initialized() and lost() is None:
            _wait_gone(self._spec)


def start_or_adopt(spec: ActorSpec, *, fresh: bool = False) -> Handle:
    """The live actor of this name, if an earlier attempt left one that was made with the same settings; else a new one.

    `fresh` ends a live one first. Raises the role's own exception when its constructor raises, DeadlinePassed (with
    what Ray has to give) when it cannot be placed in `spec.start_s`, StaleAttempt when a newer attempt owns it.
    """
    assert _connection is not None, "connect first"
    if _connection.lost is not None:
        raise DeadPart(f"{spec.role}/{spec.rank} cannot be started: {_connection.lost}; start the run again")
    until = time.monotonic() + spec.start_s
    handle = None if fresh else _adopt(spec, until)
    if handle is None:
        _end_named(spec)
        handle = _start(spec, until)
    _connection.handles[spec.name] = handle
    return handle


def start_all(specs: Sequence[ActorSpec], *, fresh: bool = False) -> list[Handle]:
    """`start_or_adopt` for several at once; the first error wins, after all have ended their attempt."""
    with ThreadPoolExecutor(max(1, len(specs)), thread_name_prefix="start-actor") as pool:
        starts = [pool.submit(start_or_adopt, spec, fresh=fresh) for spec in specs]
    return [start.result() for start in starts]


def actors() -> list[dict[str, Any]]:
    """The actors that this owner speaks for: `[{"actor": "rollout/0", "pid": 12, "started": 3456, "place": "..."}]`."""
    handles = [] if _connection is None else list(_connection.handles.values())
    return [{"actor": f"{handle.role}/{handle.rank}", "pid": handle.identity.pid, "started": handle.identity.started,
             "place": handle.identity.place} for handle in handles]


def end_unwanted(run_uuid: str, wanted: Collection[str]) -> list[str]:
    """End the actors of this run that an earlier attempt left and that this one has no use for (another number of
    workers or ranks, no validation). `wanted`: names of specs. Returns the names of those that were ended."""
    named = cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True))
    ended: list[str] = []
    for name in sorted(actor["name"] for actor in named if actor["namespace"] == NAMESPACE):
        parts = re.fullmatch(rf"{re.escape(run_uuid)}/(.+)/(\d+)", name)
        if parts is not None and name not in wanted:
            _end_named(ActorSpec(run_uuid=run_uuid, role=parts[1], rank=int(parts[2]), attempt=0, factory="",
                                 owner_timeout_s=0.0))
            ended.append(name)
    return ended


def _adopt(spec: ActorSpec, until: float) -> Handle | None:
    actor = _named(spec)
    if actor is None:
        return None
    try:
        wait_s = max(0.1, min(10.0, until - time.monotonic()))
        identity = cast(Identity, ray.get(_adoption(actor, spec), timeout=wait_s))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StaleAttempt):
            raise error.cause from None
        return None
    except (ray.exceptions.RayError, TimeoutError):
        return None  # dead, hung, or half made: ended and started anew
    return Handle(spec, actor, identity, adopted=True) if identity.same else None


def _start(spec: ActorSpec, until: float) -> Handle:
    # A group of threads for the owner's heartbeat: an actor whose other threads are all busy still hears it.
    shell = cast(Any, ray.remote)(concurrency_groups={OWNER: 2})(Hosted)
    actor = shell.options(name=spec.name, namespace=NAMESPACE, lifetime="detached", num_cpus=0, num_gpus=spec.gpus,
                          max_restarts=0, max_task_retries=0, max_concurrency=spec.concurrency).remote(
        label=f"{spec.role}/{spec.rank}", attempt=spec.attempt, digest=spec.digest,
        owner_timeout_s=spec.owner_timeout_s, threads=spec.threads, nice=spec.nice, environ=_forwarded(),
        cwd=os.getcwd(), paths=[path for path in sys.path if path],
        log=None if spec.log is None else str(spec.log.resolve()))
    handle = Handle(spec, actor, Identity.unknown(), adopted=False)
    try:
        handle.identity = Pending(handle, "start", _adoption(actor, spec)).result(until - time.monotonic())
    except DeadlinePassed:
        handle.kill()
        raise handle.logged(DeadlinePassed(
            f"{spec.role}/{spec.rank} did not start in {spec.start_s:g} s (deadlines.actor_start_s): it asks for "
            f"{spec.gpus:g} GPUs, the cluster has {_resources()}")) from None
    if _connection is not None:
        _connection.handles[spec.name] = handle  # it hears its owner while it is made, too, which may take minutes
    made = Pending(handle, "start", actor.make.remote(spec.attempt, spec.factory, dict(spec.kwargs)))
    try:
        made.result(until - time.monotonic())
    except BaseException:
        handle.kill()
        raise
    return handle


def _adoption(actor: Any, spec: ActorSpec) -> Any:
    return actor.adopt.options(concurrency_group=OWNER).remote(spec.attempt, spec.digest)


def _named(spec: ActorSpec) -> Any | None:
    try:
        return ray.get_actor(spec.name, NAMESPACE)
    except ValueError:
        return None
    except ray.exceptions.GetTimeoutError as error:
        raise DeadPart(f"{spec.role}/{spec.rank} cannot be looked for: {lost() or 'the Ray head does not answer'}; "
                       "start the run again") from error


def _end_named(spec: ActorSpec) -> None:
    actor = _named(spec)
    if actor is None:
        return
    identity = Identity.unknown()
    with suppress(ray.exceptions.RayError, TimeoutError):
        identity = cast(Identity, ray.get(actor.identity.options(concurrency_group=OWNER).remote(), timeout=2.0))
    Handle(spec, actor, identity, adopted=True).kill()


def _wait_gone(spec: ActorSpec) -> None:
    """A name is free again only when Ray has noticed the death."""
    until = time.monotonic() + KILL_S
    while _named(spec) is not None:
        if time.monotonic() > until:
            raise DeadlinePassed(f"{spec.role}/{spec.rank} is still there {KILL_S:g} s after it was killed")
        time.sleep(0.02)


def _forget(handle: Handle) -> None:
    if _connection is not None and _connection.handles.get(handle._spec.name) is handle:
        del _connection.handles[handle._spec.name]


def _forwarded() -> dict[str, str]:
    """Settings of the owner that an actor needs, whatever the Ray head was started with."""
    return {name: value for name, value in os.environ.items()
            if name.startswith("HEADWAY_") and name != services.PRIVATE}


def _resources() -> str:
    have = {name: value for name, value in ray.cluster_resources().items() if name in ("CPU", "GPU")}
    return ", ".join(f"{value:g} {name}" for name, value in sorted(have.items())) or "nothing"


# -- rollout workers, as the pump sees them

class RemoteWorker:
    """A rollout worker behind a handle: the pump's WorkerLink."""

    def __init__(self, name: str, handle: Handle, *, call_s: float, swap_s: float) -> None:
        self.name, self.handle = name, handle
        self._call_s, self._swap_s = call_s, swap_s

    def lease(self, leases: list[Lease]) -> None:
        self.handle.call("lease", leases, deadline_s=self._call_s)

    def events(self, timeout_s: float) -> WorkerEvents:
        return cast(WorkerEvents, self.handle.call("events", timeout_s, deadline_s=timeout_s + self._call_s))

    def cancel(self, group_ids: list[str]) -> dict[str, CancelAnswer]:
        return self.handle.call("cancel", group_ids, deadline_s=self._call_s)

    def swap(self, version: WeightVersion) -> str:
        return self.handle.call("swap", version, deadline_s=self._swap_s)

    def lend(self, version: WeightVersion, wait_s: float, for_s: float) -> Loan:
        """Raises DeadlinePassed where no server can be spared in `wait_s`; else as RolloutWorker.lend."""
        return self.handle.call("lend", version, wait_s, for_s, deadline_s=wait_s + self._swap_s)

    def take_back(self, loan_id: str) -> None:
        self.handle.call("take_back", loan_id, deadline_s=self._swap_s)

    def kill(self) -> None:
        self.handle.kill()


class RemotePool:
    """The run's rollout workers: the pump's WorkerPool. Made with one spec for each worker, `rollout-<rank>`."""

    def __init__(self, specs: Sequence[ActorSpec], *, call_s: float, swap_s: float) -> None:
        self._specs = {f"{spec.role}-{spec.rank}": spec for spec in specs}
        self._call_s, self._swap_s = call_s, swap_s
        self._workers: dict[str, RemoteWorker] = {}
        self._ended = False
        self._lock = threading.Lock()

    def links(self) -> list[WorkerLink]:
        """All workers, started or adopted at the first call, together."""
        with self._lock:
            missing = [name for name in self._specs if name not in self._workers]
            for name, handle in zip(missing, start_all([self._specs[name] for name in missing]), strict=True):
                self._workers[name] = self._link(name, handle)
            return [self._workers[name] for name in self._specs]

    def restart(self, name: str) -> WorkerLink:
        """A fresh incarnation under the same name; what the old one had in flight is lost. Raises DeadPart where all
        were ended meanwhile."""
        # Without the lock: where the head dies, too, Ray waits for it for ever, and `kill` would wait with it.
        fresh = self._link(name, start_or_adopt(self._specs[name], fresh=True))
        with self._lock:
            if not self._ended:
                self._workers[name] = fresh
                return fresh
        fresh.kill()
        raise DeadPart(f"worker {name}: has been ended while it was started")

    def lender(self) -> RemoteWorker:
        """The worker whose servers are lent, in its newest incarnation: the first one. Raises DeadPart when it has been
        ended."""
        with self._lock:
            name = next(iter(self._specs))
            if name not in self._workers:
                raise DeadPart(f"worker {name}: has been ended, and lends no server")
            return self._workers[name]

    def cancel_all(self) -> None:
        """End what the workers generate; they stay, and their servers."""
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            with suppress(DeadPart):  # what it generates has ended with it
                worker.cancel(list(worker.events(0.0).status.in_flight))

    def kill(self) -> None:
        """End all workers, together."""
        with self._lock:
            workers, self._workers, self._ended = list(self._workers.values()), {}, True
        if workers:
            with ThreadPoolExecutor(len(workers), thread_name_prefix="end-worker") as pool:
                ends = [pool.submit(worker.kill) for worker in workers]
            for end in ends:
                end.result()

    def _link(self, name: str, handle: Handle) -> RemoteWorker:
        return RemoteWorker(name, handle, call_s=self._call_s, swap_s=self._swap_s)
