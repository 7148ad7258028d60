"""A real MLflow server over a home's database, as `headway services up` starts it, but with nobody who starts it again:
the test does, so that it is known how long it was away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasks import keeper, servers
from tests.kept import wait_until
from tests.runs import Home, processes_of

START_S = 90.0
SERVING = "mlflow.server.fastapi_app:app"
"""In the command line of the process that takes requests and writes the database; the one above it only waits for it.
"""


@dataclass
class MlflowServer:
    """The server at one port of loopback, over all its lives."""

    home: Home
    port: int
    process: servers.Process | None = None

    @property
    def address(self) -> str:
        return f"http://{servers.HOST}:{self.port}"

    @property
    def log(self) -> Path:
        return self.home.path / "mlflow-server.log"

    def start(self) -> None:
        """Until it answers. What is left of the life before it is ended first."""
        self.end()
        self.begin()
        self.wait()

    def begin(self) -> None:
        (self.home.path / "mlflow").mkdir(parents=True, exist_ok=True)
        self.process = servers.spawn(servers.mlflow_command(self.home.path, self.port),
                                     servers.mlflow_env(self.home.path), cwd=self.home.path / "mlflow", log=self.log)

    def wait(self) -> None:
        wait_until(lambda: servers.mlflow_answers(self.address), START_S, f"MLflow answers; its log is {self.log}")

    def end(self) -> None:
        if self.process is not None:
            keeper.end_sessions([self.process], 2.0)


@contextmanager
def mlflow_server(home: Home) -> Iterator[MlflowServer]:
    """One that has begun, beside the start of the run that is tracked to it; ended behind the test."""
    server = MlflowServer(home, servers.free_port())
    try:
        server.begin()
        yield server
    finally:
        server.end()


def serving_pid(home: Home) -> int | None:
    """The process that takes requests; None while there is none."""
    return next((pid for pid, command in processes_of(home).items() if SERVING in command), None)
