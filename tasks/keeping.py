"""`headway services up`, `down`, `status`: the supervisor started, asked and ended. Words are in flows/serving.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_core.errors import BrokenFile, ConfigError, DeadlinePassed, DeadPart
from rl_core.run_dir import json_values
from tasks import databases, keeper, kept, servers, silent_runs, supervisor
from tasks.kept import Kept, Service, Settings
from tasks.servers import Process
from tasks.turns import turn
from tasks.waiting import waiting_aloud

UP_S = 150.0
DOWN_S = 40.0
FLOWS_S = 30.0
"""What flow runs have to stop in order: all of a run is gone 10 s after a signal."""
BEGIN_S = 30.0
"""What a supervisor has to note that it is there, what it has to end first included."""
TURN_S = 90.0
"""What another `up` or `down` may take before this one gives up: the longest of them ends flow runs and services."""
LOOK_S = 0.1


def up(home: Path, *, prefect_port: int | None = None, mlflow_port: int | None = None,
       prefect_database: str | None = None, mlflow_database: str | None = None,
       on_ready: Callable[[str, float], None] = lambda name, seconds: None) -> Kept:
    """Have all services up and watched; returns what is noted of them. `on_ready(name, seconds)` as each gets ready.

    What is said is kept for the next time. Where one does not get ready, those that this has started are ended; where
    services were up before, they go on. Raises ConfigError for a port that is taken, a database that cannot be one,
    and for other settings than those of services that are up; DeadPart with the end of a log; DeadlinePassed.
    """
    for place in kept.directories(home):
        servers.for_owner_alone(place)
    servers.prefect_auth(home)
    with turn(kept.directory(home), "`headway services up`", TURN_S):
        found = kept.read(home)
        running = found is not None and found.watched
        lived = found is not None and any(service.alive for service in found.services.values())
        settings = _settled(home, prefect_port, mlflow_port, running=running)
        _choose_databases(home, {"prefect": prefect_database, "mlflow": mlflow_database}, running=running)
        if not running:
            _check_ports(home, settings, found, asked={"prefect": prefect_port, "mlflow": mlflow_port})
            kept.write_settings(home, settings)
            _spawn(home)
        elif found is not None:
            _try_again(home, found)
    with waiting_aloud("the supervisor", "all services to get ready", UP_S,
                       lambda: f"logs are in {kept.directory(home)}") as look:
        found = _wait(home, on_ready, look, lived=lived)
    silent_runs.ensure(f"{found.services['prefect'].address}/api", servers.prefect_auth(home))
    return found


def _settled(home: Path, prefect_port: int | None, mlflow_port: int | None, *, running: bool) -> Settings:
    """What was said, else what was said before, else the usual ports, or free ones where these are taken."""
    before = kept.read_settings(home)
    ports = {"prefect": prefect_port, "mlflow": mlflow_port}
    if running and before is not None:
        for name, port in ports.items():
            if port is not None and port != before.port(name):
                raise ConfigError(f"--{name}-port {port}: services are up, {name} at port {before.port(name)}; "
                                  "`headway services down` first")
        return before
    for name, port in ports.items():
        if port is None:
            usual = kept.DEFAULT_PORTS[name]
            ports[name] = before.port(name) if before else usual if servers.is_free(usual) else servers.free_port()
    wanted = Settings(prefect_port=ports["prefect"] or 0, mlflow_port=ports["mlflow"] or 0)
    if wanted.prefect_port == wanted.mlflow_port:
        raise ConfigError(f"--mlflow-port {wanted.mlflow_port}: Prefect has the same; give two ports")
    return wanted


def _choose_databases(home: Path, given: dict[str, str | None], *, running: bool) -> None:
    for name, said in given.items():
        if said is None:
            continue
        wanted = databases.checked(name, said)
        if running and wanted != databases.chosen(home, name):
            raise ConfigError(f"--{name}-database: services are up with another one; `headway services down` first")
        databases.choose(home, name, wanted)


def _check_ports(home: Path, settings: Settings, found: Kept | None, asked: dict[str, int | None]) -> None:
    """Raises ConfigError for a port that somebody else has; one of ours that lives on is none."""
    for name in ("prefect", "mlflow"):
        ours = found is not None and name in found.services and found.services[name].alive \
            and found.services[name].address == settings.address(name)
        if not ours and not servers.is_free(settings.port(name)) and not _stray_holds(home):
            how = "" if asked[name] else f" (it had it before; --{name}-port takes another one)"
            raise ConfigError(f"--{name}-port {settings.port(name)}: somebody else listens there{how}; end that "
                              "process, or give another port")


def _stray_holds(home: Path) -> bool:
    """Whether a service that no note names is left of a killed supervisor: the new one ends it first."""
    return any(kept.is_of(home, pid) for pid in keeper.processes())


def _spawn(home: Path) -> None:
    env = servers.clean_environ() | servers.own_path() | {"HEADWAY_HOME": str(home)}
    servers.spawn([sys.executable, "-P", "-m", "tasks.supervisor", str(home)], env, cwd=kept.directory(home),
                  log=kept.log(home, "supervisor"))


def _try_again(home: Path, found: Kept | None) -> None:
    """Give what was given up another chance."""
    until = time.monotonic() + 5.0
    if found is not None and found.supervisor is not None and _lost(found):
        keeper.signal_process(*found.supervisor, supervisor.TRY_AGAIN)
        while (found := kept.read(home)) is not None and _lost(found) and time.monotonic() < until:
            time.sleep(LOOK_S)


def _lost(found: Kept) -> list[Service]:
    return [service for service in found.services.values() if service.state == "given up"]


def _wait(home: Path, on_ready: Callable[[str, float], None], look: Callable[[], None], *, lived: bool) -> Kept:
    """Until all are ready; `look` is called meanwhile. One that was given up ends the others, too: half a set-up is
    none. But not where services `lived` before: somebody may be at work with them."""
    begun, said = time.monotonic(), set[str]()
    while True:
        look()
        found = kept.read(home)
        services = {} if found is None or not found.watched else found.services
        for name, service in services.items():
            if service.state == "ready" and name not in said:
                said.add(name)
                on_ready(name, time.monotonic() - begun)
        if found is not None and found.ready:
            return found
        lost = _lost(found) if found is not None and found.watched else []
        late = time.monotonic() - begun > UP_S
        if lost or late:
            if not lived:
                with turn(kept.directory(home), "the end of services that did not get ready", TURN_S):
                    _end_all(home)
            rest = _go_on(services.values()) if lived else ""
            if lost:
                raise DeadPart(f"{lost[0].name}: {lost[0].why}{rest}")
            waits = [name for name in kept.NAMES if name not in said]
            raise DeadlinePassed(f"{', '.join(waits)} did not get ready in {UP_S:.0f} s; logs in {kept.directory(home)}"
                                 f"\n{servers.tail(kept.log(home, waits[0]))}{rest}")
        if (found is None or not found.watched) and time.monotonic() - begun > BEGIN_S:
            raise DeadPart(f"the supervisor did not begin; the end of {kept.log(home, 'supervisor')}:\n"
                           f"{servers.tail(kept.log(home, 'supervisor'))}")
        time.sleep(LOOK_S)


def _go_on(services: Iterable[Service]) -> str:
    """What is said of those that were up before another one did not get ready."""
    ready = [service.name for service in services if service.state == "ready" and service.alive]
    return f"\nservices that were up go on ({', '.join(ready) or 'none is ready'}); mend the cause, then `headway " \
           "services up` tries again; `headway services down` ends all"


def down(home: Path, *, force: bool = False) -> list[str]:
    """End the services; returns the names of those that lived. Flow runs of the worker refuse it, or are stopped first
    with `force`: they end in order and can be resumed. Raises ConfigError, DeadlinePassed."""
    if not kept.directory(home).is_dir():
        return []
    with turn(kept.directory(home), "`headway services down`", TURN_S):
        runs = kept.flow_runs(home)
        if runs and not force:
            raise ConfigError(f"{len(runs)} flow runs of the worker go on ({', '.join(sorted(runs.values()))}): wait "
                              "for them, cancel them, or --force, which stops them as SIGTERM does")
        _end_flow_runs(runs)
        return _end_all(home)


def _end_all(home: Path) -> list[str]:
    """End supervisor and services, also those that nobody watches; returns the names of those that lived."""
    try:
        found = kept.read(home)
    except BrokenFile:
        found = None
    lived = [] if found is None else [name for name, service in found.services.items() if service.alive]
    if found is not None and found.watched and found.supervisor is not None:
        _end(found.supervisor)
    supervisor.end_strays(home, Kept(supervisor=None, since_us=0))  # of a supervisor that was killed
    kept.forget(home)
    return lived


def _end(process: Process) -> None:
    keeper.signal_process(*process, signal.SIGTERM)
    until = time.monotonic() + DOWN_S
    while keeper.is_alive(*process):
        if time.monotonic() > until:
            raise DeadlinePassed(f"the supervisor (pid {process.pid}) did not end its services in {DOWN_S:.0f} s")
        time.sleep(LOOK_S)


def _end_flow_runs(runs: Iterable[int]) -> None:
    """SIGTERM to each, SIGKILL to what is left after FLOWS_S."""
    found = [(pid, started) for pid in runs if (started := keeper.start_time(pid)) is not None]
    for process in found:
        keeper.signal_process(*process, signal.SIGTERM)
    until = time.monotonic() + FLOWS_S
    while any(keeper.is_alive(*process) for process in found) and time.monotonic() < until:
        time.sleep(LOOK_S)
    for process in found:
        keeper.signal_process(*process, signal.SIGKILL)


def status(home: Path) -> dict[str, Any]:
    """What is kept, as one JSON object; `up` if all of it is ready and watched."""
    found = kept.read(home)
    services = {} if found is None else found.services
    return json_values({
        "up": found is not None and found.ready, "home": str(home),
        "supervisor": None if found is None or not found.watched or found.supervisor is None
        else found.supervisor.pid,
        "supervisor_memory_bytes": _memory(found.supervisor) if found is not None and found.watched else 0,
        "since_us": None if found is None else found.since_us,
        "services": {name: _seen(home, one) for name, one in services.items()},
        "databases": {name: _redacted(home, name) for name in databases.NAMES},
        "secret": str(home / "secrets" / "prefect-auth"), "flow_runs": sorted(kept.flow_runs(home).values())})


def _seen(home: Path, one: Service) -> dict[str, Any]:
    return {**asdict(one), "process": None, "pid": one.process.pid if one.process and one.alive else None,
            "alive": one.alive, "log": str(kept.log(home, one.name)),
            "memory_bytes": _memory(one.process) if one.alive else 0}


def _redacted(home: Path, name: str) -> str:
    from rl_core.uris import redact

    return redact(databases.url(home, name))


def _memory(process: Process | None) -> int:
    """Resident bytes of all that a service has started, what they share counted once where the system tells."""
    total = 0
    for pid, _ in keeper.session_members(*process) if process is not None else ():
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        except OSError:
            continue
    return total


def environment(home: Path) -> dict[str, str]:
    """What `headway env` exports. Raises ConfigError where nothing is kept."""
    env = kept.client_env(home)
    if "PREFECT_API_URL" not in env and "MLFLOW_TRACKING_URI" not in env:
        raise ConfigError(f"no services are kept under {home}: `headway services up`")
    return env


def unset_names() -> list[str]:
    """Variables of this shell that would reach past the kept servers."""
    return [name for name in ("PREFECT_API_KEY", "PREFECT_PROFILE", "MLFLOW_TRACKING_USERNAME",
                              "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN") if name in os.environ]
