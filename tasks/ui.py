"""MLflow's and Prefect's pages on loopback, over the databases under HEADWAY_HOME, until the caller ends them."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import DeadPart
from tasks import keeper, servers

START_S = 120.0
LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """Addresses of the two pages, and the processes behind them."""

    mlflow: str
    prefect: str
    secret: Path
    """File with Prefect's `user:password`, which its page asks for."""
    processes: tuple[servers.Process, ...]

    def wait(self) -> None:
        """Until one of the servers ends, which is a DeadPart, or the caller is interrupted."""
        while all(keeper.is_alive(*process) for process in self.processes):
            time.sleep(LOOK_S)
        raise DeadPart("a server of `headway ui` ended by itself; its log is in ui/ under HEADWAY_HOME")


@contextmanager
def serve(home: Path) -> Iterator[Pages]:
    """Start both servers at once, yield their addresses, end them. Raises DeadPart or DeadlinePassed with the log."""
    base = home / "ui"
    base.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + START_S
    started: list[servers.Process] = []
    pool = ThreadPoolExecutor(2)
    try:
        mlflow = pool.submit(_start_mlflow, home, base, until, started)
        prefect = pool.submit(_start_prefect, home, base, until, started)
        yield Pages(mlflow=mlflow.result(), prefect=prefect.result(), secret=home / "secrets" / "prefect-auth",
                    processes=tuple(started))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        keeper.end_sessions(started, 5.0)  # a start that still waits for its server ends with it
        pool.shutdown(wait=True)
        keeper.end_sessions(started, 5.0)


def _start_mlflow(home: Path, base: Path, until: float, started: list[servers.Process]) -> str:
    port, root = servers.free_port(), home / "mlflow"
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host", servers.HOST, "--port", str(port),
               "--workers", "1", "--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}", "--artifacts-destination",
               (root / "artifacts").as_uri(), "--allowed-hosts", f"{servers.HOST}:{port},localhost:{port}",
               "--cors-allowed-origins", f"http://{servers.HOST}:{port}"]
    env = servers.clean_environ() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true",
                                     "DO_NOT_TRACK": "1"}
    log = base / "mlflow.log"
    process = servers.spawn(command, env, cwd=base, log=log)
    started.append(process)
    servers.wait("MLflow server", process, log, until, lambda: _healthy(port))
    return f"http://{servers.HOST}:{port}"


def _start_prefect(home: Path, base: Path, until: float, started: list[servers.Process]) -> str:
    port, auth = servers.free_port(), servers.prefect_auth(home)
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    page, log = f"http://{servers.HOST}:{port}", base / "prefect.log"
    with servers.first_start(home / "prefect"):
        process = servers.spawn(servers.prefect_command(port), servers.prefect_env(home, port, auth),
                                cwd=home / "prefect", log=log)
        started.append(process)
        servers.wait("Prefect server", process, log, until, lambda: servers.prefect_answers(f"{page}/api", auth))
    return page


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(servers.HOST, port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
