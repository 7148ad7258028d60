"""The process that keeps a Prefect server, an MLflow server and a Prefect worker alive, for `headway services up`.

    down -> starting -> ready        and back to down when it ended, or answered nobody for too long
                     \\-> given up    one that never was ready, or ended too often

It is found again by kept.json, as is all that it watches: one that was killed leaves its services to the next.
Started as `python -P -m tasks.supervisor HOME`, in a session of its own; SIGTERM ends all of it. A worker's flow runs
are no part of the worker here: when it ends or is restarted, they go on.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rl_core.errors import DeadPart
from rl_core.run_dir import RunDir, owner_is_alive
from tasks import databases, keeper, kept, servers, silent_runs
from tasks.kept import Kept, Service, Settings
from tasks.servers import Process

LOOK_S = 0.25
ASK_S = 5.0
"""Between two questions to a service that is ready."""
START_S = 120.0
HANGS_S = 60.0
"""A ready service that answers nobody for so long is ended and started again."""
RESTARTS, RESTARTS_WITHIN_S = 5, 600.0
FIRST_TRIES = 2
"""Of a service that has never been ready."""
BACKOFF_S = (0.0, 2.0, 5.0, 15.0, 30.0)
"""Before the first, second ... restart within that time."""
END_S = 10.0
LOG_BYTES = 16 * 2**20
TRY_AGAIN = signal.SIGUSR1


@dataclass
class Watched:
    """What the supervisor knows of one service beside what it has noted."""

    name: str
    start: Callable[[], Process]
    answers: Callable[[], bool]
    needs: str | None = None
    """A service that must be ready first."""
    leaves_children: bool = False
    """Its children are not its own: they stay when it is ended."""
    asked_at: float = -ASK_S
    heard_at: float = 0.0
    started_at: float = 0.0
    not_before: float = 0.0
    was_ready: bool = False
    ends: deque[float] = field(default_factory=lambda: deque[float](maxlen=RESTARTS))


class Supervisor:
    """Watches the services of one home. Consumes: the list of processes, and their answers. Waits for: `stop`, LOOK_S
    at a time."""

    def __init__(self, home: Path, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._settings, self._clock = home, settings, clock
        self._auth = servers.prefect_auth(home)
        self._api = f"{settings.address('prefect')}/api"
        self.watched = [
            Watched("mlflow", self._start_mlflow, lambda: servers.mlflow_answers(settings.address("mlflow"))),
            Watched("prefect", self._start_prefect, lambda: servers.prefect_answers(self._api, self._auth)),
            Watched("worker", self._start_worker, self._worker_answers, needs="prefect", leaves_children=True)]
        started = keeper.start_time(os.getpid())
        assert started is not None
        self.kept = Kept(supervisor=Process(os.getpid(), started), since_us=time.time_ns() // 1000,
                         services={one.name: self._found(one) for one in self.watched})
        self._stop = threading.Event()
        self._up_since: datetime | None = None
        """When Prefect became ready, until runs from before have been looked for."""
        self._look_for_dead_at = 0.0
        self._unseen = False
        """Whether one of them could not be looked for."""
        end_strays(home, self.kept)

    def _found(self, one: Watched) -> Service:
        """A service that an earlier supervisor left alive is taken over."""
        address = None if one.name == "worker" else self._settings.address(one.name)
        before = kept.read(self._home)
        left = None if before is None else before.services.get(one.name)
        if left is None or not left.alive or left.address != address:
            return Service(name=one.name, address=address)
        one.started_at = one.heard_at = self._clock()
        return replace(left, state="starting", restarts=0, why=None)

    def run(self, stop: threading.Event, again: threading.Event) -> None:
        """Until `stop`; then the services are ended, the worker first. `again`: `try_again`."""
        self._stop = stop
        kept.write(self._home, self.kept)
        while not stop.wait(LOOK_S):
            if again.is_set():
                again.clear()
                self.try_again()
            self.look()
        self.end()

    def try_again(self) -> None:
        """What was given up gets another chance: somebody has asked for it, and may have mended something."""
        for one in self.watched:
            service = self.kept.services[one.name]
            if service.state == "given up":
                one.ends.clear()
                one.not_before, one.was_ready = 0.0, False
                self.kept = kept.changed(self.kept, replace(service, state="down", why=None))
        kept.write(self._home, self.kept)

    def look(self) -> None:
        """Look at each service once, and write down what has changed."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        before = self.kept
        for one in self.watched:
            service = self._step(one, self.kept.services[one.name])
            if service != self.kept.services[one.name]:
                self.kept = kept.changed(self.kept, service)
        if self.kept != before:
            kept.write(self._home, self.kept)
        self._look_for_the_dead()

    def _look_for_the_dead(self) -> None:
        """Once after each start of Prefect, until it has answered and each of them could be seen."""
        if self._up_since is None or self._clock() < self._look_for_dead_at:
            return
        self._unseen = False
        with suppress(DeadPart):
            silent_runs.crash_the_dead(self._api, self._auth, self._up_since, self._lives)
            self._up_since = self._up_since if self._unseen else None
        self._look_for_dead_at = self._clock() + ASK_S

    def _lives(self, flow_run: str, name: str) -> bool:
        """Whether a process of this flow run is here: a worker's, or who owns the run, or the night, of that name."""
        try:
            return flow_run in kept.flow_runs(self._home).values() or any(
                owner_is_alive(RunDir(self._home / kind / name)) for kind in ("runs", "nights"))
        except OSError:  # nothing is said of it this time
            self._unseen = True
            return True

    def _step(self, one: Watched, service: Service) -> Service:
        now = self._clock()
        if service.state == "given up":
            return service
        if service.state == "down":
            ready = one.needs is None or self.kept.services[one.needs].state == "ready"
            return self._begin(one, service) if ready and now >= one.not_before else service
        if not service.alive:
            return self._ended(one, service, f"ended by itself; the end of {kept.log(self._home, one.name)}:\n"
                                             f"{servers.tail(kept.log(self._home, one.name))}")
        if now - one.asked_at < (ASK_S if service.state == "ready" else LOOK_S):
            return service
        one.asked_at = now
        if one.answers():
            one.heard_at = self._clock()
            if service.state == "ready":
                return service
            one.was_ready = True
            return self._ready(one, service)
        limit = HANGS_S if service.state == "ready" else START_S
        since = one.heard_at if service.state == "ready" else one.started_at
        if one.needs is not None and self.kept.services[one.needs].state != "ready":
            one.heard_at = one.started_at = now  # it cannot be heard
        elif now - since > limit:
            self._kill(one, service)
            return self._ended(one, service, f"did not answer in {limit:.0f} s; the end of "
                                             f"{kept.log(self._home, one.name)}:\n"
                                             f"{servers.tail(kept.log(self._home, one.name))}")
        return service

    def _begin(self, one: Watched, service: Service) -> Service:
        if service.address is not None and not servers.is_free(self._settings.port(one.name)):
            return self._ended(one, service, f"port {self._settings.port(one.name)} is taken by somebody else")
        shorten(kept.log(self._home, one.name))
        try:
            process = one.start()
        except (DeadPart, OSError) as error:
            return self._ended(one, service, str(error))
        one.started_at = self._clock()
        one.asked_at = -ASK_S
        return replace(service, state="starting", process=process)

    def _ready(self, one: Watched, service: Service) -> Service:
        if one.name == "prefect":
            self._up_since, self._look_for_dead_at = datetime.now(UTC), self._clock() + silent_runs.HEARD_AGAIN_S
            with suppress(ProcessLookupError, PermissionError):  # it started at full speed; beside training it yields
                assert service.process is not None
                os.setpriority(os.PRIO_PROCESS, service.process.pid, servers.PREFECT_NICE)
            try:
                silent_runs.ensure(self._api, self._auth)
            except DeadPart as error:
                return replace(service, state="ready", why=str(error))
        return replace(service, state="ready")

    def _ended(self, one: Watched, service: Service, why: str) -> Service:
        """Down, to be started again after a while; or given up."""
        if service.process is not None and not one.leaves_children:
            keeper.end_sessions([service.process], 0.0)  # what its leader left would hold the port
        now = self._clock()
        recent = sum(now - at < RESTARTS_WITHIN_S for at in one.ends)
        one.ends.append(now)
        one.not_before = now + BACKOFF_S[min(recent, len(BACKOFF_S) - 1)]
        if recent < (RESTARTS if one.was_ready else FIRST_TRIES - 1):
            return replace(service, state="down", process=None, restarts=service.restarts + one.was_ready, why=why)
        often = f"ended {recent + 1} times in {RESTARTS_WITHIN_S:.0f} s: " if one.was_ready else ""
        return replace(service, state="given up", process=None, why=often + why)

    def _kill(self, one: Watched, service: Service) -> None:
        if service.process is None:
            return
        if one.leaves_children:
            end_process(service.process, END_S)
        else:
            keeper.end_sessions([service.process], END_S)

    def end(self) -> None:
        """End all services, and what is noted of them."""
        for one in reversed(self.watched):
            self._kill(one, self.kept.services[one.name])
        kept.forget(self._home)

    # -- starting

    def _start_prefect(self) -> Process:
        base = servers.for_owner_alone(self._home / "prefect")
        command = servers.prefect_command(self._settings.prefect_port)
        env = servers.prefect_env(self._home, self._settings.prefect_port, self._auth) | self._mark()
        silent_runs.forget_windows(self._home)
        log, first = kept.log(self._home, "prefect"), not servers.migrated(base)
        with servers.first_start(base, START_S, self._tick):
            process = servers.spawn(command, env, cwd=base, log=log)
            if first:  # nobody else may begin meanwhile
                servers.wait("Prefect server", process, log, START_S,
                             lambda: servers.prefect_answers(self._api, self._auth), self._tick, setting="")
        return process

    def _tick(self) -> None:
        if self._stop.is_set():
            raise DeadPart("the start was given up")

    def _start_mlflow(self) -> Process:
        servers.for_owner_alone(self._home / "mlflow")
        databases.copy_before_migration(self._home, "mlflow")
        return servers.spawn(servers.mlflow_command(self._home, self._settings.mlflow_port),
                             servers.mlflow_env(self._home) | self._mark(), cwd=self._home / "mlflow",
                             log=kept.log(self._home, "mlflow"))

    def _start_worker(self) -> Process:
        return servers.spawn(servers.worker_command(kept.POOL),
                             servers.worker_env(self._home, self._api, self._auth) | self._mark(),
                             cwd=kept.directory(self._home), log=kept.log(self._home, "worker"))

    def _mark(self) -> dict[str, str]:
        return {servers.MARK: str(kept.directory(self._home))}

    def _worker_answers(self) -> bool:
        found = servers.prefect_call(self._api, self._auth, "POST", f"/work_pools/{kept.POOL}/workers/filter", {})
        return any(worker["name"] == kept.POOL and worker["status"] == "ONLINE" for worker in found or ())


def shorten(log: Path) -> None:
    """Begin a log anew that has grown long; the one before it is kept."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


def end_strays(home: Path, known: Kept) -> None:
    """End services of this home that no note names: of a supervisor that was killed before it wrote them down."""
    noted = {service.process.pid for service in known.services.values() if service.process is not None}
    strays = [Process(pid, stat.started) for pid, stat in keeper.processes().items()
              if stat.session == pid and pid not in noted and pid != os.getpid() and kept.is_of(home, pid)]
    keeper.end_sessions(strays, END_S)


def end_process(process: Process, grace_s: float) -> None:
    """SIGTERM, after `grace_s` SIGKILL, to one process alone."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        keeper.signal_process(*process, number)
        until = time.monotonic() + wait_s
        while keeper.is_alive(*process) and time.monotonic() < until:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
            time.sleep(0.05)


def main(home: Path) -> int:
    """Watch the services of a home until SIGTERM; at once 1 where somebody else does."""
    servers.for_owner_alone(kept.directory(home))
    settings = kept.read_settings(home) or Settings()
    with open(kept.directory(home) / "supervisor.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 1
        stop, again = threading.Event(), threading.Event()

        def hear(number: int, frame: FrameType | None) -> None:
            (again if number == TRY_AGAIN else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT, TRY_AGAIN):
            signal.signal(number, hear)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        Supervisor(home, settings).run(stop, again)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
