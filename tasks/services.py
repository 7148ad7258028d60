"""The processes beside the flow: a Prefect server and a Ray head, given by address or started for one run alone.

Private services live in sessions of their own, so that Ctrl-C and a worker's group SIGTERM do not reach them, and are
found again by a quick restart of the run. They are ended last, by pid and start time; a watchdog (keeper.py) ends them
when no owner was heard for `owner_timeout_s`. Loopback is no fence: Prefect gets an auth string and takes requests of
its own page only, Ray wants a token from everybody. Telemetry is off. Imports neither Prefect nor Ray.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_core.config import DeadlineConfig
from rl_core.errors import ConfigError, DeadlinePassed, DeadPart
from rl_core.run_dir import RunDir, replace_file, to_json
from tasks import keeper, kept, leftovers, servers
from tasks.servers import HOST, Process
from tasks.turns import turn

START_TRIES = 3
"""A free port can be taken by somebody else before the service binds it: that, and only that, is tried again."""
RAY_LOG = "ray.log"
PRIVATE = "HEADWAY_PRIVATE_SERVICES"
"""Names, in a process that exported them, the services whose addresses are private: they are no ambient settings."""

OnStage = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """Where the services of a run are. `pids` holds only the private ones, which `stop` ends."""

    state_dir: Path
    prefect_api_url: str
    prefect_auth: str | None = field(repr=False)
    ray_address: str
    ray_token_path: Path | None
    pids: dict[str, Process]
    where: dict[str, str]
    """For people: `{"prefect": "http://127.0.0.1:4321/api (private, started for this run)", ...}`."""
    env: dict[str, str] = field(repr=False)
    """To be exported in the owner's process before prefect or ray are imported: `export`."""
    unset: tuple[str, ...] = ()
    """Ambient variables that `export` removes first."""
    adopted: bool = False
    """True when a service of an earlier owner was found alive."""


def ray_log(where: Services) -> Path | None:
    """What the Ray head that was started for this run wrote; None for one that is somebody else's."""
    return where.state_dir / RAY_LOG if "ray" in where.pids else None


def export(services: Services) -> None:
    """Make this process, and its children, use these services."""
    for name in services.unset:
        os.environ.pop(name, None)
    os.environ.update(services.env)


def start(state_dir: Path, home: Path, *, isolated: bool, deadlines: DeadlineConfig,
          on_stage: OnStage = lambda name, seconds: None) -> Services:
    """Services of one run: given by address, alive from an earlier owner, or started now, both at once.

    `state_dir` holds their addresses, pids, logs and heartbeat; databases and secrets lie under `home`. `isolated`
    ignores ambient addresses, except the server of a flow that Prefect itself started. `on_stage(name, seconds)` is
    called, from a thread, as each gets ready. From then on the watchdog hears this process, until `stop`. Raises
    DeadlinePassed after `deadlines.service_start_s`, of a service or of waiting for another start, which is named;
    DeadPart (with the end of its log) for a service that cannot start.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    given = ambient(isolated=isolated, kept_api=kept.prefect_api(home))
    with turn(state_dir, "the start of services", deadlines.service_start_s, setting="deadlines.service_start_s"):
        state = _usable(state_dir, home) or _nothing()
        heartbeat(state_dir)
        _end_strays(state_dir, state, given)
        adopted = bool(state["processes"])
        wanted = [name for name in ("prefect", "ray") if name not in given and name not in state["processes"]]
        state |= {"owner_timeout_s": deadlines.owner_timeout_s, "starting": bool(wanted)}
        if wanted or adopted:
            _watch(state_dir, state)
        try:
            _start_all(wanted, _Start(state_dir, home, state, deadlines.service_start_s), on_stage)
        except BaseException:
            keeper.end_services(state_dir, state, keeper.GRACE_S)
            _end_keeper(state)
            raise
        if wanted:
            state["starting"] = False
            _write(state_dir, state)
    if state["processes"]:
        _Beat.start(state_dir, deadlines.owner_timeout_s)
    return _services(state_dir, home, state, given, adopted=adopted, isolated=isolated)


def _nothing() -> dict[str, Any]:
    return {"boot_id": keeper.boot_id(), "processes": {}, "addresses": {}, "scratch": None}


class _Beat:
    """Tells the watchdogs of `state_dir` that this process, their owner, lives: one thread from `start` to `stop`."""

    _beats: ClassVar[dict[Path, threading.Event]] = {}

    @classmethod
    def start(cls, state_dir: Path, owner_timeout_s: float) -> None:
        cls.stop(state_dir)
        end = cls._beats[state_dir] = threading.Event()
        threading.Thread(target=cls._run, args=(state_dir, beat_s(owner_timeout_s), end), name="services-heartbeat",
                         daemon=True).start()

    @classmethod
    def stop(cls, state_dir: Path) -> None:
        if (end := cls._beats.pop(state_dir, None)) is not None:
            end.set()

    @staticmethod
    def _run(state_dir: Path, every_s: float, end: threading.Event) -> None:
        while not end.wait(every_s):
            with suppress(FileNotFoundError):  # the run directory was removed under a live owner
                heartbeat(state_dir)


def beat_s(owner_timeout_s: float) -> float:
    """How often an owner makes itself heard: six times within its timeout, so that a slow machine does no harm."""
    return min(2.0, owner_timeout_s / 6)


def heartbeat(state_dir: Path) -> None:
    """Tell the watchdog once that the owner lives. `start` does this all the time, until `stop`."""
    path = state_dir / keeper.HEARTBEAT
    path.touch()
    os.utime(path)


def dead(services: Services) -> list[str]:
    """Names of private services that are gone."""
    return [name for name, p in services.pids.items() if not keeper.is_alive(p.pid, p.started)]


def stop(services: Services, deadline_s: float = 10.0) -> None:
    """End the private services and their watchdog. Services given by address are left alone.

    Raises DeadlinePassed naming the pids that outlive SIGKILL, or who starts or ends them for longer than `deadline_s`:
    then the watchdog ends them, which hears this process no more.
    """
    if not services.pids:
        return
    _Beat.stop(services.state_dir)
    with turn(services.state_dir, "the end of services", deadline_s):
        state = keeper.read_state(services.state_dir)
        if state is None:
            return
        left = keeper.end_services(services.state_dir, state, deadline_s)
    _end_keeper(state)
    if left:
        raise DeadlinePassed(f"services of {services.state_dir}: pids {left} are still there after SIGKILL")


def join_prefect(home: Path, *, isolated: bool) -> tuple[str, str]:
    """Make this process a client of the Prefect server that is kept, or given by address; returns its API address and
    why it is this one. For a flow of several runs: each of them starts a Ray head of its own.

    Raises ConfigError where there is no such server.
    """
    given = ambient(isolated=isolated, kept_api=kept.prefect_api(home))
    if "prefect" not in given:
        raise ConfigError(f"no Prefect server is kept under {home}: `headway services up`, then the same command")
    api, why = given["prefect"]
    for name in _ambient_names(given, isolated=isolated):
        os.environ.pop(name, None)
    os.environ.update(_owner_env(home, {"prefect": api}, _auth(home, given), None, {}, given))
    return api, why


# -- what is there already

def ambient(*, isolated: bool, environ: Mapping[str, str] = os.environ,
            kept_api: str | None = None) -> dict[str, tuple[str, str]]:
    """Services given by address: `{"ray": ("10.0.0.1:6379", "RAY_ADDRESS")}`, name -> (address, why).

    A flow that Prefect's worker started stays with that server, also when isolated. `kept_api`: the server that
    `headway services up` keeps, which is Headway's own: it goes before a profile, and isolated runs use it as well.
    """
    given: dict[str, tuple[str, str]] = {}
    private = environ.get(PRIVATE, "").split(",")
    api = environ.get("PREFECT_API_URL")
    if api and "PREFECT__FLOW_RUN_ID" in environ:
        given["prefect"] = (api, "the server that started this flow run")
    elif not isolated and "prefect" not in private and api and api != kept_api:
        given["prefect"] = (api, "PREFECT_API_URL")
    elif kept_api:
        given["prefect"] = (kept_api, kept.WHY)
    elif isolated and api and PRIVATE in environ and "prefect" not in private:
        given["prefect"] = (api, kept.WHY)  # as the command found it, also while it is restarted
    elif not isolated and "prefect" not in private and (profile := _profile_url(environ)):
        given["prefect"] = profile
    if not isolated and "ray" not in private and environ.get("RAY_ADDRESS"):
        given["ray"] = (environ["RAY_ADDRESS"], "RAY_ADDRESS")
    return given


def _profile_url(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """API address of the active Prefect profile, if it names one."""
    home = Path(environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    path = Path(environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return None
    name = environ.get("PREFECT_PROFILE") or profiles.get("active")
    url = profiles.get("profiles", {}).get(name, {}).get("PREFECT_API_URL")
    return (url, f"Prefect profile {name!r}") if url else None


def _usable(state_dir: Path, home: Path) -> dict[str, Any] | None:
    """The state file if its services live and answer; dead ones, and leftovers of them, are cleared away."""
    state = keeper.read_state(state_dir)
    if state is None:
        return None
    for name, process in list(state["processes"].items()):
        alive = state["boot_id"] == keeper.boot_id() and keeper.is_alive(process["pid"], process["started"])
        if not (alive and _answers(name, state, home)):
            keeper.end_sessions([(p, s) for p, s in keeper.leaders_of(state) if p == process["pid"]], 2.0)
            del state["processes"][name], state["addresses"][name]
            if name == "ray":
                keeper.clear_scratch(state_dir, state)
    if state["processes"]:
        return state
    keeper.end_services(state_dir, state, 0.0)
    _end_keeper(state)
    return None


def _end_strays(state_dir: Path, state: dict[str, Any], given: Mapping[str, tuple[str, str]]) -> None:
    """End what an earlier start of this run left and no usable service holds: its head died without it, or was never
    noted. Actors of a Ray given by address are left to be adopted."""
    run = RunDir(state_dir.parent)
    if run.services != state_dir:
        return
    watchdog = state.get("keeper")
    held = {pid for leader in keeper.leaders_of(state) for pid, _ in keeper.session_members(*leader)}
    held |= {watchdog["pid"]} if watchdog is not None else set()
    strays = [member for member in leftovers.members(run) if member.pid not in held
              and ("ray" not in given or member.what.endswith(leftovers.SERVICE))]
    if stayed := leftovers.end(strays, 1.0):
        raise DeadPart(f"{state_dir}: what an earlier start left is still there after SIGKILL: "
                       + ", ".join(f"{member.what} (pid {member.pid})" for member in stayed))


def _answers(name: str, state: dict[str, Any], home: Path) -> bool:
    address = state["addresses"][name]
    if name == "prefect":
        return servers.prefect_answers(address, servers.prefect_auth(home))
    return servers.ray_answers(address, state["scratch"])


# -- starting

@dataclass(frozen=True, slots=True)
class _Start:
    """What the threads of one start share."""

    state_dir: Path
    home: Path
    state: dict[str, Any]
    deadline_s: float
    """Of each service by itself, from its process to its first answer."""
    given_up: threading.Event = field(default_factory=threading.Event)

    def note(self, name: str, process: Process, address: str) -> None:
        """Record a process the moment it exists, so that the watchdog knows it if this owner dies during the start."""
        with _WRITING:
            self.state["processes"][name] = {"pid": process.pid, "started": process.started}
            self.state["addresses"][name] = address
            replace_file(self.state_dir / keeper.STATE, to_json(self.state))

    def tick(self) -> None:
        heartbeat(self.state_dir)
        if self.given_up.is_set():
            raise DeadlinePassed("the start was given up")


_WRITING = threading.Lock()


def _write(state_dir: Path, state: dict[str, Any]) -> None:
    with _WRITING:
        replace_file(state_dir / keeper.STATE, to_json(state))


def _start_all(names: list[str], start: _Start, on_stage: OnStage) -> None:
    """All at once. The first failure, or a Ctrl-C, makes the others give up before it is raised."""
    pool = ThreadPoolExecutor(2, thread_name_prefix="services")
    try:
        launches = [pool.submit(_launch, name, start, on_stage) for name in names]
        for launch in wait_for(launches, return_when=FIRST_EXCEPTION).done:
            launch.result()
    finally:
        start.given_up.set()
        pool.shutdown(wait=True)


def _launch(name: str, start: _Start, on_stage: OnStage) -> None:
    """Start one service and wait until it answers."""
    begun = time.monotonic()
    for attempt in range(1, START_TRIES + 1):
        try:
            (_start_prefect if name == "prefect" else _start_ray)(start)
            break
        except DeadlinePassed:
            raise
        except DeadPart as error:
            if attempt == START_TRIES or "in use" not in str(error).lower():
                raise
    on_stage(name, time.monotonic() - begun)


def _start_prefect(start: _Start) -> None:
    auth, port = servers.prefect_auth(start.home), servers.free_port()
    address = f"http://{HOST}:{port}/api"
    base, log = servers.for_owner_alone(start.home / "prefect"), start.state_dir / "prefect.log"
    env = servers.prefect_env(start.home, port, auth) | servers.FOR_ONE_RUN | _mark(start.state_dir)
    with servers.first_start(base, start.deadline_s, start.tick, setting="deadlines.service_start_s"):
        process = servers.spawn(servers.prefect_command(port), env, cwd=base, log=log)
        start.note("prefect", process, address)
        servers.wait("Prefect server", process, log, start.deadline_s, lambda: servers.prefect_answers(address, auth),
                     start.tick)
    with suppress(ProcessLookupError):  # it started at full speed; beside training it yields
        os.setpriority(os.PRIO_PROCESS, process.pid, servers.PREFECT_NICE)


def _start_ray(start: _Start) -> None:
    keeper.clear_scratch(start.state_dir, start.state)  # of a try before this one
    token, port = servers.ray_token(start.home), servers.free_port()
    address, log = f"{HOST}:{port}", start.state_dir / RAY_LOG
    scratch = start.state["scratch"] = tempfile.mkdtemp(prefix="headway-", dir=servers.short_tmp())
    process = servers.spawn(servers.ray_command(port, scratch), servers.ray_env(token) | _mark(start.state_dir),
                            cwd=Path(scratch), log=log)
    start.note("ray", process, address)
    servers.wait("Ray head", process, log, start.deadline_s, lambda: servers.ray_answers(address, scratch),
                 start.tick)


def _mark(state_dir: Path) -> dict[str, str]:
    return {servers.MARK: str(state_dir)}


def _watch(state_dir: Path, state: dict[str, Any]) -> None:
    """Have a live watchdog that the state file names, before there is anything to watch."""
    old = state.get("keeper")
    if old is not None and keeper.is_alive(old["pid"], old["started"]):
        _write(state_dir, state)
        return
    name = secrets.token_hex(8)
    state["keeper"] = {"name": name, "pid": 0, "started": 0}
    _write(state_dir, state)
    command = [sys.executable, "-I", "-S", keeper.__file__, str(state_dir), name]
    state["keeper"]["pid"], state["keeper"]["started"] = servers.spawn(
        command, _mark(state_dir), cwd=state_dir, log=state_dir / "keeper.log")
    _write(state_dir, state)


def end_abandoned(run: RunDir, deadline_s: float) -> list[leftovers.Member]:
    """End all that belongs to a run whose owner is gone; the caller owns its lock. Returns what was ended.

    Raises DeadPart naming what outlives SIGKILL, DeadlinePassed naming who is at its services for `deadline_s`
    (deadlines.service_start_s).
    """
    if not run.services.is_dir():
        return []
    with turn(run.services, "the end of what was left behind", deadline_s, setting="deadlines.service_start_s"):
        found, state = leftovers.members(run), keeper.read_state(run.services)
        if state is not None:
            keeper.end_services(run.services, state, keeper.GRACE_S)
            _end_keeper(state)
        if stayed := leftovers.end(found, 1.0):
            raise DeadPart(f"{run.root}: still there after SIGKILL: "
                           + ", ".join(f"{member.what} (pid {member.pid})" for member in stayed))
        return found


def heard_s(state_dir: Path) -> float | None:
    """Seconds since an owner made itself heard there; None if none ever did."""
    try:
        return max(0.0, time.time() - (state_dir / keeper.HEARTBEAT).stat().st_mtime)
    except FileNotFoundError:
        return None


def prefect_of(state_dir: Path, home: Path, *, isolated: bool) -> tuple[str, str | None] | None:
    """API address and auth string of the Prefect server that knows a run: its private one, if that lives, else the one
    that is kept or given by address; None if there is none."""
    state = keeper.read_state(state_dir) or _nothing()
    process = state["processes"].get("prefect")
    if process is not None and state["boot_id"] == keeper.boot_id() \
            and keeper.is_alive(process["pid"], process["started"]):
        return state["addresses"]["prefect"], servers.prefect_auth(home)
    given = ambient(isolated=isolated, kept_api=kept.prefect_api(home))
    return (given["prefect"][0], _auth(home, given)) if "prefect" in given else None


def _auth(home: Path, given: Mapping[str, tuple[str, str]]) -> str | None:
    """Auth string of the Prefect server: ours for a private and for the kept one."""
    own = "prefect" not in given or given["prefect"][1] == kept.WHY
    return servers.prefect_auth(home) if own else os.environ.get("PREFECT_API_AUTH_STRING")


def _end_keeper(state: dict[str, Any]) -> None:
    watchdog = state.get("keeper")
    if watchdog is not None and watchdog["pid"] and state["boot_id"] == keeper.boot_id():
        keeper.end_sessions([(watchdog["pid"], watchdog["started"])], 2.0)


def _services(state_dir: Path, home: Path, state: dict[str, Any], given: dict[str, tuple[str, str]], *, adopted: bool,
              isolated: bool) -> Services:
    private = {name: address for name, address in state["addresses"].items() if name not in given}
    address = {name: given[name][0] if name in given else private[name] for name in ("prefect", "ray")}
    auth = _auth(home, given)
    token = servers.ray_token(home) if "ray" in private else None
    how = "private, of the start before this one" if adopted else "private, for this run alone"
    return Services(
        state_dir=state_dir, prefect_api_url=address["prefect"], prefect_auth=auth, ray_address=address["ray"],
        ray_token_path=token, adopted=adopted,
        pids={name: Process(p["pid"], p["started"]) for name, p in state["processes"].items()},
        where={name: f"{address[name]} ({given[name][1] if name in given else how})" for name in ("prefect", "ray")},
        env=_owner_env(home, address, auth, token, private, given), unset=_ambient_names(given, isolated=isolated))


def _ambient_names(given: dict[str, tuple[str, str]], *, isolated: bool) -> tuple[str, ...]:
    """Ambient settings that would reach past the private services."""
    foreign = {name for name, (_, why) in given.items() if why != kept.WHY}
    prefixes = tuple(prefix for name, prefix in (("prefect", "PREFECT_"), ("ray", "RAY_")) if name not in foreign)
    always = () if "prefect" in foreign else ("PREFECT_API_KEY",)  # goes before the auth string
    return tuple(name for name in os.environ if name in always or (isolated and name.startswith(prefixes)))


def _owner_env(home: Path, address: dict[str, str], auth: str | None, token: Path | None,
               private: Mapping[str, str], given: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """What the owner's process exports: addresses, secrets, quiet logs (the API keeps them), no telemetry."""
    own = "prefect" in private or given["prefect"][1] == kept.WHY
    env = {
        "PREFECT_API_URL": address["prefect"], "RAY_ENABLE_AUTO_CONNECT": "0", "RAY_USAGE_STATS_ENABLED": "0",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false", "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR", "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
    }
    if auth is not None:
        env["PREFECT_API_AUTH_STRING"] = auth
    if own and auth is not None:
        env |= servers.prefect_client_env(home, address["prefect"], auth)
    if token is not None:
        env |= {"RAY_ADDRESS": address["ray"], "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token),
                # Ray ends a driver (exit code 1, no `finally`) this long after its head died. cluster.py sees the death
                # itself, and the run shall fail with that cause.
                "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
                "RAY_task_events_report_interval_ms": "0"}  # as the head has it: servers.py
    if private:
        env[PRIVATE] = ",".join(sorted(private))
    if private or own:
        env |= servers.not_proxied()
    return env
