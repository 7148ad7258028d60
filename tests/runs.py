"""Whole runs through the `headway` command, in processes of their own, with a home of their own."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.run_dir import RunDir
from tasks.servers import free_port
from tasks.services import PRIVATE, Services

DEADLINE_S = 240


@dataclass
class Command:
    """One `headway` process: its output so far, and how it ended."""

    process: subprocess.Popen[str]
    run: RunDir
    out: str = ""
    err: str = ""
    started: float = field(default_factory=time.monotonic)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        try:
            self.out, self.err = self.process.communicate(timeout=deadline_s)
        finally:
            self.process.kill()  # nothing where it has ended
        return self.process.returncode

    @property
    def said(self) -> str:
        """All of its output, for a failed assertion: pytest shortens what is not a text."""
        return f"stdout:\n{self.out}\nstderr:\n{self.err}"

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out.strip().splitlines()[-1])

    def wait_for_step(self, step: int, deadline_s: float = DEADLINE_S) -> None:
        """Until step k has a record."""
        until = time.monotonic() + deadline_s
        while not self.run.record(step).exists():
            assert self.process.poll() is None, f"ended before step {step}: {self.process.communicate()}"
            assert time.monotonic() < until, f"no record of step {step} after {deadline_s} s"
            time.sleep(0.02)

    def wait_for_tracking(self) -> None:
        """Until training is under way and MLflow knows the run: the middle of a run."""
        self.wait_for_step(3)
        until = time.monotonic() + DEADLINE_S
        while not self.run.mlflow_run.exists():
            assert self.process.poll() is None and time.monotonic() < until, "MLflow was not reached"
            time.sleep(0.05)


def ended(command: Command, code: int = 0) -> RunDir:
    """The run, once its command has ended with this code."""
    assert command.wait(600) == code, command.said
    return command.run


def _hear_interrupts() -> None:
    """As a terminal starts it: whoever runs the tests in the background of a script ignores SIGINT, and children do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Home:
    """A HEADWAY_HOME for the tests of one module: the tiny model is made once, and Prefect's database."""

    path: Path

    def run(self, key: str) -> RunDir:
        return RunDir(self.path / "runs" / key)

    @property
    def environ(self) -> dict[str, str]:
        """This environment with this home, and nobody's services."""
        clean = {name: value for name, value in os.environ.items()
                 if not name.startswith(("PREFECT_", "RAY_", "MLFLOW_", "HEADWAY_"))}
        return clean | {"HEADWAY_HOME": str(self.path), "PYTHONUNBUFFERED": "1"}

    def start(self, verb: str, *args: str, key: str = "", cwd: Path | None = None, **environ: str) -> Command:
        process = subprocess.Popen([sys.executable, "-m", "flows.cli", verb, *args], env=self.environ | environ,
                                   text=True, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   start_new_session=True, preexec_fn=_hear_interrupts)
        return Command(process, self.run(key))

    def train(self, key: str, *settings: str, cwd: Path | None = None) -> Command:
        sets = [word for setting in settings for word in ("--set", setting)]
        return self.start("train", "--preset", "tiny-cpu", *sets, "--run-key", key, "--json", key=key, cwd=cwd)

    def call(self, verb: str, *args: str, **environ: str) -> Command:
        command = self.start(verb, *args, **environ)
        command.wait()
        return command

    def tracked(self, run_id: str) -> tuple[str, Counter[tuple[str, int]]]:
        """What MLflow has of a run: its status, and how many points each metric has at each step."""
        with sqlite3.connect(self.path / "mlflow" / "mlflow.db") as database:
            [(status,)] = database.execute("select status from runs where run_uuid = ?", (run_id,))
            points = Counter(database.execute("select key, step from metrics where run_uuid = ?", (run_id,)))
        return status, points

    def states(self, key: str) -> tuple[list[str], list[str]]:
        """State types of a run's flow runs in Prefect, oldest first; statuses of its runs in MLflow."""
        with sqlite3.connect(self.path / "prefect" / "prefect.db") as database:
            flows = [row[0] for row in database.execute(
                "select state_type from flow_run where name = ? order by created", (key,))]
        with sqlite3.connect(self.path / "mlflow" / "mlflow.db") as database:
            runs = [row[0] for row in database.execute(
                "select status from runs join tags using (run_uuid) where key = 'mlflow.runName' and value = ?",
                (key,))]
        return flows, runs

    def causes(self, key: str) -> tuple[str, str]:
        """Why a run failed: the message of its newest flow run's state in Prefect; a tag of its run in MLflow."""
        with sqlite3.connect(self.path / "prefect" / "prefect.db") as database:
            [(told,)] = database.execute(
                "select message from flow_run_state join flow_run on flow_run.state_id = flow_run_state.id "
                "where flow_run.name = ? order by flow_run.created desc limit 1", (key,))
        with sqlite3.connect(self.path / "mlflow" / "mlflow.db") as database:
            [(tagged,)] = database.execute(
                "select value from tags where key = 'headway.cause' and run_uuid in "
                "(select run_uuid from tags where key = 'mlflow.runName' and value = ?)", (key,))
        return told, tagged


@dataclass
class SharedHome(Home):
    """A home whose runs use these services by address, with `isolated=false`: no start waits for its own."""

    services: Services

    @property
    def environ(self) -> dict[str, str]:
        return super().environ | {name: value for name, value in self.services.env.items() if name != PRIVATE}


@contextmanager
def prefect_server(home: Home) -> Iterator[dict[str, str]]:
    """A Prefect server over the home's database, that of `headway services up`: the environment of its clients."""
    ports = [word for name in ("prefect", "mlflow") for word in (f"--{name}-port", str(free_port()))]
    up = home.call("services", "up", *ports, "--json")
    try:
        assert up.process.returncode == 0, up.said
        address = up.json["services"]["prefect"]["address"]
        secret = (home.path / "secrets" / "prefect-auth").read_text().strip()
        yield home.environ | {"PREFECT_HOME": str(home.path / "client"), "PREFECT_API_URL": f"{address}/api",
                              "PREFECT_API_AUTH_STRING": secret}
    finally:
        home.call("services", "down", "--force")


def processes_of(home: Home) -> dict[int, str]:
    """Live processes that were told of this home: owners, services, watchdogs, actors. Pid -> command line."""
    needle = str(home.path).encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            told = command + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX" and needle in told:
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_until_gone(home: Home, deadline_s: float) -> dict[int, str]:
    """Wait for the last process of this home to end; returns what is left at the deadline."""
    until = time.monotonic() + deadline_s
    while (left := processes_of(home)) and time.monotonic() < until:
        time.sleep(0.1)
    return left
