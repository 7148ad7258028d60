"""How one server is started and asked: commands, environments, secrets, probes. Imports neither Prefect nor Ray.

Nothing of the caller's Prefect, Ray or MLflow settings reaches them; each is the leader of a session of its own.
"""

from __future__ import annotations

import base64
import http.client
import importlib.metadata
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rl_core.errors import DeadlinePassed, DeadPart
from tasks import databases, keeper
from tasks.turns import in_words, turn
from tasks.waiting import STALL_S, waiting_aloud

HOST = "127.0.0.1"
DATABASE = databases.FILES["prefect"]
PREFECT_NICE = 5
RAY_OBJECT_STORE_BYTES = 75 * 2**20
"""Ray's smallest. Claims and weights travel by file; the store carries only small arguments."""
RAY_START = """
import ray._private.services
ray._private.services.start_api_server = lambda *args, **kwargs: ("", None)
from ray.scripts.scripts import main
main()
"""
"""`ray start` without the process behind the dashboard, which it starts even when told not to have one, for usage
statistics that are off: 65 MB, and a second of every start."""
PREFECT_START = """
from sqlalchemy import event
from sqlalchemy.engine import Engine
@event.listens_for(Engine, "engine_connect")
def limit_page_cache(connection):
    known = connection.connection.info
    if connection.dialect.name == "sqlite" and not known.get("headway.limited"):
        known["headway.limited"] = True
        cursor = connection.connection.cursor()
        cursor.execute("PRAGMA cache_size = -500")
        cursor.close()
from uvicorn import main
main()
"""
"""Prefect's application on uvicorn. Prefect gives each connection to SQLite a page cache of 80 MB, which a long run
fills bit by bit; half a megabyte does as well: the operating system has these pages in its cache."""
MLFLOW_SERVE = """
import os
from uvicorn import main
from mlflow.server.fastapi_app import app
from tasks.own_pages import OwnPages
app.add_middleware(OwnPages, origins=os.environ["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"].split(","))
main()
"""
"""The process below `mlflow server`, which it starts as `python -m uvicorn`: MLflow refuses pages of other origins for
changes below /api/ and /ajax-api/ alone, and takes all pages of this machine for its own."""
MLFLOW_START = f"""
import os
import sys
from tasks.tracking import make_database, upgrade_database
uri = os.environ["MLFLOW_BACKEND_STORE_URI"]
make_database(uri)
upgrade_database(uri)
import mlflow.server
theirs = mlflow.server._build_uvicorn_command
def serve(*args, **options):
    return [sys.executable, "-P", "-c", {MLFLOW_SERVE!r}, *theirs(*args, **options)[3:]]
mlflow.server._build_uvicorn_command = serve
from mlflow.cli import cli
cli()
"""
"""`mlflow server` behind a database that is whole and of its schema; one process, so that MLflow is imported once."""
FOR_ONE_RUN = {"PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
               "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false"}
"""A server for one run has no automations and no page with a feed of events: three of them for each step would cost it
transactions, and memory, as long as the run is. Task runs, states, logs and artifacts are kept."""
TREE = Path(__file__).resolve().parent.parent
HEARTBEAT_S = 30
"""A flow run says that it lives this often (Prefect's least); by default 180 s."""
MARK = "HEADWAY_SERVICES_OF"
"""In the environment of a service, and of all that it starts: which state directory names it (tasks/leftovers.py)."""
FIRST_START_S = 120.0
"""What the first start of another Prefect server on a database may take, unless its caller says otherwise."""
RAY_CPUS = 2
"""Worker processes that Ray starts ahead for the first driver. Actors ask for none: their threads are settings."""


class Process(NamedTuple):
    """A process by pid and start time (clock ticks since boot)."""

    pid: int
    started: int


# -- processes

def spawn(command: list[str], env: dict[str, str], *, cwd: Path, log: Path) -> Process:
    """Start a process as the leader of a session of its own, its output appended to `log`."""
    with open(log, "ab") as out:
        child = subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=subprocess.STDOUT, start_new_session=True)
    started = keeper.start_time(child.pid)
    child.returncode = 0  # collected by keeper.end_sessions; Popen shall not warn or wait when it is dropped
    if started is None:
        raise DeadPart(f"{command[0]} ended at once\n{tail(log)}")
    return Process(child.pid, started)


def wait(name: str, process: Process, log: Path, deadline_s: float, ready: Callable[[], bool],
         tick: Callable[[], None] = lambda: None, *, setting: str = "deadlines.service_start_s",
         every_s: float = STALL_S) -> None:
    """Wait until `ready`; `tick` is called meanwhile, a wait that lasts is reported each `every_s`.

    Raises DeadPart when the process ends first, DeadlinePassed. `setting`: what the deadline is called.
    """
    begun = time.monotonic()
    with waiting_aloud(f"{name} (pid {process.pid})", "its first answer", deadline_s, lambda: f"its log is {log}",
                       every_s) as look:
        while not ready():
            tick()
            look()
            if not keeper.is_alive(*process):
                raise DeadPart(f"{name} ended while it started; the end of {log}:\n{tail(log)}")
            if time.monotonic() - begun > deadline_s:
                keeper.end_sessions([process], 2.0)
                raise DeadlinePassed(f"{name} did not answer in {time.monotonic() - begun:.0f} s{in_words(setting)}; "
                                     f"the end of {log}:\n{tail(log)}")
            time.sleep(0.05)


def tail(log: Path, lines: int = 15) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of loopback, or of all interfaces."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def not_proxied(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """NO_PROXY as it is, and loopback."""
    hosts = {host for name in ("NO_PROXY", "no_proxy") for host in environ.get(name, "").split(",") if host}
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(sorted(hosts | {HOST, "localhost"})))


def own_path() -> dict[str, str]:
    """PYTHONPATH with Headway's packages first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(TREE), os.environ.get("PYTHONPATH"))))}


def clean_environ() -> dict[str, str]:
    """This environment without anybody's Prefect, Ray and MLflow settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RAY_", "MLFLOW_"))}


# -- secrets

def for_owner_alone(directory: Path) -> Path:
    """A directory that nobody else looks into, made where there is none."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


def secret(home: Path, name: str, make: Callable[[], str]) -> str:
    """The secret `home/secrets/<name>`, made (mode 0600, before its bytes) where there is none."""
    path = for_owner_alone(home / "secrets") / name
    if not path.exists():
        aside = path.with_name(f".{name}.{os.getpid()}-{secrets.token_hex(4)}")
        with open(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(make())
        with suppress(FileExistsError):  # another start was quicker: its secret stands
            os.link(aside, path)
        aside.unlink()
    return path.read_text()


def prefect_auth(home: Path) -> str:
    return secret(home, "prefect-auth", lambda: f"headway:{secrets.token_urlsafe(32)}")


def ray_token(home: Path) -> Path:
    """Path of the token file; Ray takes the path, and the file must be there first."""
    secret(home, "ray-token", lambda: secrets.token_hex(32))
    return home / "secrets" / "ray-token"


# -- Prefect

def prefect_command(port: int) -> list[str]:
    """Prefect's application on uvicorn, as `prefect server start` runs it; without the CLI it is up a third sooner."""
    return [sys.executable, "-P", "-c", PREFECT_START, "--factory", "prefect.server.api.server:create_app",
            "--host", HOST, "--port", str(port), "--log-level", "warning", "--timeout-keep-alive", "60",
            "--lifespan", "on"]


def own_origins(port: int) -> str:
    """The origins of a server's own pages: through a tunnel a person calls this machine by either name."""
    return f"http://{HOST}:{port},http://localhost:{port}"


def prefect_env(home: Path, port: int, auth: str) -> dict[str, str]:
    return clean_environ() | {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_PROFILES_PATH": str(home / "prefect" / "profiles.toml"),
        "PREFECT_API_DATABASE_CONNECTION_URL": databases.prefect_url(home),
        "PREFECT_SERVER_API_HOST": HOST, "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": own_origins(port),
        "PREFECT_UI_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1",
        # In memory, a restart of the server crashes every limited run at its next lease renewal.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # By default each event of a task run is a transaction of its own: a tenth of a core where steps are short.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "50",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }


@contextmanager
def first_start(base: Path, deadline_s: float = FIRST_START_S, tick: Callable[[], None] = lambda: None, *,
                setting: str = "") -> Iterator[None]:
    """Servers of one home take turns while the database is made or migrated, which is not made for two at once; what is
    there already is copied first. `tick` is called while it waits for its turn. Raises DeadlinePassed."""
    if migrated(base):
        yield
        return
    with turn(base, "the first start of Prefect on its database", deadline_s, setting=setting, tick=tick):
        if not migrated(base) and databases.is_sqlite(base.parent, "prefect"):
            databases.copy_before_migration(base.parent, "prefect")
            if not (base / DATABASE).exists() and template().exists():
                shutil.copyfile(template(), base / DATABASE)
        yield
    _migrated(base).touch()


def migrated(base: Path) -> bool:
    """Whether the database has the schema of the installed Prefect for certain: by the mark of a start that made it so,
    unless the file says otherwise, as one that was put back from a copy does."""
    home = base.parent
    return _migrated(base).exists() and databases.state(home, "prefect") not in ("older", "absent")


def _migrated(base: Path) -> Path:
    """The mark of sqlite and that of PostgreSQL are two: one does not stand for the other."""
    where = "" if databases.is_sqlite(base.parent, "prefect") else "-elsewhere"
    return base / f"migrated-{importlib.metadata.version('prefect')}{where}"


def template() -> Path:
    """An empty migrated Prefect database of this environment: making one takes five seconds, which `prepare` spends."""
    return Path(sys.prefix) / "share" / "headway" / f"prefect-{importlib.metadata.version('prefect')}.db"


def prepare() -> None:
    """Make the template database, once for an environment. Without it the first start of every home is slower."""
    if template().exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        env = clean_environ() | {
            "PREFECT_HOME": scratch, "DO_NOT_TRACK": "1",
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{scratch}/{DATABASE}"}
        subprocess.run([sys.executable, "-P", "-m", "prefect", "server", "database", "upgrade", "-y"], env=env,
                       cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        template().parent.mkdir(parents=True, exist_ok=True)
        aside = template().with_suffix(f".{os.getpid()}")
        shutil.copyfile(Path(scratch) / DATABASE, aside)
        aside.rename(template())


def prefect_answers(api_url: str, auth: str | None) -> bool:
    """Whether the server is healthy and knows our secret (any server would answer /health, also a stranger's)."""
    return prefect_call(api_url, auth, "GET", "/admin/version") is not None


def prefect_call(api_url: str, auth: str | None, method: str, path: str,
                 body: dict[str, Any] | list[Any] | None = None, timeout_s: float = 2.0) -> Any:
    """What a Prefect server answers, parsed; None where it does not, refuses, or does not know what is asked for."""
    try:
        status, answer = _asked(api_url, auth, method, path, body, timeout_s)
        return json.loads(answer) if status in (200, 201) else None
    except (OSError, http.client.HTTPException, ValueError):
        return None


def prefect_ask(api_url: str, auth: str | None, method: str, path: str,
                body: dict[str, Any] | list[Any] | None = None, timeout_s: float = 10.0) -> Any:
    """The same where silence must not be taken for a no: None is what the server does not have (404), or has nothing to
    say of. Raises DeadPart for every other answer, and for none."""
    try:
        status, answer = _asked(api_url, auth, method, path, body, timeout_s)
        if status == 404 or (not answer and status < 300):
            return None
        if status < 300:
            return json.loads(answer)
        said = f"answered {status}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        said = f"did not answer in {timeout_s:g} s ({type(error).__name__})"
    raise DeadPart(f"the Prefect server at {api_url} {said} to {method} {path}")


def _asked(api_url: str, auth: str | None, method: str, path: str, body: dict[str, Any] | list[Any] | None,
           timeout_s: float) -> tuple[int, bytes]:
    where = urlsplit(api_url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = kind(where.netloc.rpartition("@")[2], timeout=timeout_s)
    try:
        headers = {"Content-Type": "application/json"}
        if auth:
            headers["Authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
        connection.request(method, where.path + path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# -- MLflow

def mlflow_command(home: Path, port: int) -> list[str]:
    """MLflow's server for its own page and for requests to this address; the database stands in its environment."""
    own = f"{HOST}:{port},localhost:{port}"
    return [sys.executable, "-P", "-c", MLFLOW_START, "server", "--host", HOST, "--port", str(port), "--workers", "1",
            "--artifacts-destination", (home / "mlflow" / "artifacts").as_uri(), "--allowed-hosts", own,
            "--cors-allowed-origins", own_origins(port),
            "--uvicorn-opts", "--log-level warning"]


def mlflow_env(home: Path) -> dict[str, str]:
    return clean_environ() | own_path() | {
        "MLFLOW_BACKEND_STORE_URI": databases.url(home, "mlflow"),
        # Its job runner is four times the memory of the rest.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}


def mlflow_answers(url: str) -> bool:
    """Whether a healthy MLflow server takes requests to this address (`/health` would answer to any)."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=2.0)
    try:
        connection.request("GET", "/version")
        answer = connection.getresponse()
        return answer.status == 200 and answer.read().decode() == importlib.metadata.version("mlflow")
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return False
    finally:
        connection.close()


# -- Prefect's worker

def worker_command(pool: str) -> list[str]:
    """A worker that starts each flow run as a process of this machine; it makes its pool where there is none."""
    return [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process",
            "--name", pool]


def worker_env(home: Path, api_url: str, auth: str) -> dict[str, str]:
    """The worker's, and by it that of every flow run it starts."""
    env = clean_environ() | own_path() | not_proxied() | prefect_client_env(home, api_url, auth) | {
        "HEADWAY_HOME": str(home),
        "PYTHONSAFEPATH": "1",  # a directory with packages of our names shall not be taken for ours
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
        "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    env.pop("HEADWAY_PRIVATE_SERVICES", None)  # of a run whose process starts services
    return env


def prefect_client_env(home: Path, api_url: str, auth: str | None) -> dict[str, str]:
    """What makes a process a client of this Prefect server, whatever profiles a person has."""
    return {"PREFECT_API_URL": api_url, **({"PREFECT_API_AUTH_STRING": auth} if auth else {}),
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_PROFILES_PATH": str(home / "prefect" / "profiles.toml"),
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false", "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S), "DO_NOT_TRACK": "1"}


# -- Ray

def ray_command(port: int, scratch: str) -> list[str]:
    """A head without dashboard, monitor, log monitor. It listens on all interfaces: the token is what protects it."""
    command = [sys.executable, "-P", "-c", RAY_START, "start", "--head", "--block", f"--node-ip-address={HOST}",
               f"--port={port}", f"--temp-dir={scratch}", f"--num-cpus={RAY_CPUS}",
               f"--object-store-memory={RAY_OBJECT_STORE_BYTES}", "--include-dashboard=false", "--no-monitor",
               "--include-log-monitor=false", "--disable-usage-stats", "--dashboard-agent-listen-port=0",
               # Workers take ports that the system gives them. By default each head hands out 10002, 10003, ... and
               # looks whether one is free long before a worker has it: runs that start together would share one.
               "--min-worker-port=0", "--max-worker-port=0"]
    if importlib.util.find_spec("grpc") is not None:  # only then does Ray open its client port, else at a fixed number
        command.append(f"--ray-client-server-port={free_port()}")
    return command


def ray_env(token: Path) -> dict[str, str]:
    return clean_environ() | own_path() | {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_AUTO_CONNECT": "0", "RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "1",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_process_group_cleanup_enabled": "1",  # a worker that crashes takes its children along
        "RAY_worker_niceness": "0",  # Ray's 15 would let any other process starve learner and engines
        "RAY_worker_maximum_startup_concurrency": str(os.cpu_count() or 1),
        "RAY_task_events_report_interval_ms": "0",  # no page shows them, and the head would grow with every call
        # Calls of an actor run on one thread or another. With an arena of malloc's for each of them, each would keep
        # the room that a training step takes: the learner of smollm-cpu grew by 1 GB a step.
        "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1"),
    }


def ray_answers(address: str, scratch: str) -> bool:
    """Whether the head takes connections and its scheduler is there."""
    host, _, port = address.rpartition(":")
    return accepts_unix(Path(scratch) / "session_latest" / "sockets" / "raylet") and accepts(host, int(port))


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def accepts_unix(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def short_tmp() -> str:
    """Ray's sockets lie below it, and a socket's path has at most 107 bytes."""
    tmp = tempfile.gettempdir()
    return tmp if len(tmp) <= 32 else "/tmp"


if __name__ == "__main__":
    prepare()
