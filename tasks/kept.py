"""Which services `headway services up` keeps under a home: what the supervisor has noted of them, and whether they
answer. They are Headway's own, as private services are: a run uses them whatever the ambient settings say.

Reads files and asks servers; imports neither Prefect nor MLflow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import BrokenFile, FormatTooNew
from rl_core.run_dir import replace_file, to_json
from tasks import keeper, servers
from tasks.leftovers import environ_of
from tasks.servers import Process

FORMAT = 1
POOL = "headway"
"""Work pool of the deployments, and name of the worker."""
NAMES = ("prefect", "mlflow", "worker")
WHY = "kept by `headway services up`"
DEFAULT_PORTS = {"prefect": 4200, "mlflow": 5000}

FLOW_RUN = b"PREFECT__FLOW_RUN_ID="

State = Literal["down", "starting", "ready", "given up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One kept service, as its supervisor has noted it last."""

    name: str
    state: State = "down"
    process: Process | None = None
    address: str | None = None
    """`http://127.0.0.1:4200`: of the page; Prefect's API is below it at `/api`. None for the worker."""
    restarts: int = 0
    """Since the supervisor began."""
    why: str | None = None
    """How it ended the last time, with the end of its log."""

    @property
    def alive(self) -> bool:
        return self.process is not None and keeper.is_alive(*self.process)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """All of them, and who watches them."""

    supervisor: Process | None
    since_us: int
    services: Mapping[str, Service] = field(default_factory=dict[str, Service])

    @property
    def watched(self) -> bool:
        return self.supervisor is not None and keeper.is_alive(*self.supervisor)

    @property
    def ready(self) -> bool:
        return self.watched and all(name in self.services and self.services[name].state == "ready" for name in NAMES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What `services up` was asked for, and is again when nothing is said. Databases stand with the secrets."""

    prefect_port: int = DEFAULT_PORTS["prefect"]
    mlflow_port: int = DEFAULT_PORTS["mlflow"]

    def port(self, name: str) -> int:
        return self.prefect_port if name == "prefect" else self.mlflow_port

    def address(self, name: str) -> str:
        return f"http://{servers.HOST}:{self.port(name)}"


def directory(home: Path) -> Path:
    return home / "services"


def directories(home: Path) -> tuple[Path, ...]:
    """Those of the services, for their owner alone: Prefect encrypts what blocks hold with a key that lies in the same
    database, and files have the mode that the umask gives them."""
    return home / "prefect", home / "mlflow", directory(home)


def log(home: Path, name: str) -> Path:
    return directory(home) / f"{name}.log"


def read_settings(home: Path) -> Settings | None:
    """None where services were never up. Raises BrokenFile, FormatTooNew."""
    stored = _read(directory(home) / "settings.json")
    return None if stored is None else Settings(prefect_port=int(stored["prefect_port"]),
                                                mlflow_port=int(stored["mlflow_port"]))


def write_settings(home: Path, settings: Settings) -> None:
    replace_file(directory(home) / "settings.json", to_json({"format": FORMAT, **asdict(settings)}))


def read(home: Path) -> Kept | None:
    """What the last supervisor of this boot has noted; None where there was none. Raises BrokenFile, FormatTooNew."""
    stored = _read(directory(home) / "kept.json")
    if stored is None or stored["boot_id"] != keeper.boot_id():
        return None
    services = {name: Service(**{**one, "process": None if one["process"] is None else Process(*one["process"])})
                for name, one in stored["services"].items()}
    supervisor = stored["supervisor"]
    return Kept(supervisor=None if supervisor is None else Process(*supervisor), since_us=stored["since_us"],
                services=services)


def write(home: Path, kept: Kept) -> None:
    replace_file(directory(home) / "kept.json", to_json({
        "format": FORMAT, "boot_id": keeper.boot_id(), "supervisor": kept.supervisor, "since_us": kept.since_us,
        "services": {name: asdict(service) for name, service in kept.services.items()}}))


def forget(home: Path) -> None:
    (directory(home) / "kept.json").unlink(missing_ok=True)


def changed(kept: Kept, service: Service) -> Kept:
    return replace(kept, services={**kept.services, service.name: service})


def is_of(home: Path, pid: int) -> bool:
    """Whether a process was started as a kept service of this home, or by one; flow runs of the worker are none."""
    words = environ_of(pid)
    return _mark(home) in words and not any(word.startswith(FLOW_RUN) for word in words)


def flow_runs(home: Path) -> dict[int, str]:
    """Processes of flow runs that the kept worker, or one before it, has started: pid -> id of the flow run."""
    found: dict[int, str] = {}
    for pid, stat in keeper.processes().items() if keeper.PROC else ():
        words = environ_of(pid)
        ids = [word.removeprefix(FLOW_RUN).decode() for word in words if word.startswith(FLOW_RUN)]
        parent = environ_of(stat.parent) if ids else []
        if ids and _mark(home) in words and not any(word.startswith(FLOW_RUN) for word in parent):
            found[pid] = ids[0]
    return found


def _mark(home: Path) -> bytes:
    return f"{servers.MARK}={directory(home)}".encode()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads(path.read_text())
        found = int(stored["format"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenFile(f"{path}: {type(error).__name__}: {error}; `headway services down` removes it") from error
    if found > FORMAT:
        raise FormatTooNew(f"{path}: format {found}, this Headway reads up to {FORMAT}: upgrade it")
    return stored


# -- for those who use them

def address(home: Path, name: str) -> str | None:
    """Where a kept server is, if its process lives, whether it answers or not; None if it is not kept."""
    try:
        kept = read(home)
    except BrokenFile:
        return None
    service = None if kept is None else kept.services.get(name)
    return service.address if service is not None and service.alive else None


def prefect_api(home: Path) -> str | None:
    """API address of the kept Prefect server, if it answers to our password; None if there is none or it does not."""
    page = address(home, "prefect")
    api = None if page is None else f"{page}/api"
    return api if api is not None and servers.prefect_answers(api, servers.prefect_auth(home)) else None


def client_env(home: Path) -> dict[str, str]:
    """What a plain shell exports so that `prefect` and `mlflow` find the kept servers. Addresses of those that live."""
    env = {"HEADWAY_HOME": str(home), "MLFLOW_DISABLE_TELEMETRY": "true", **servers.not_proxied(os.environ)}
    if (page := address(home, "prefect")) is not None:
        env |= servers.prefect_client_env(home, f"{page}/api", servers.prefect_auth(home))
    if (page := address(home, "mlflow")) is not None:
        env["MLFLOW_TRACKING_URI"] = page
    return env
