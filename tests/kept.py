"""A HEADWAY_HOME with kept services: its servers asked by HTTP, `prefect` and `mlflow` run as a plain shell would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from uuid import uuid4

from tasks import kept, servers, silent_runs
from tests.runs import Home

SMALL: dict[str, Any] = {
    "groups_per_step": 4, "group_size": 4, "validation.every": 50, "checkpoint.every": 4, "checkpoint.keep": 20,
    "data.size": 256, "data.validation": None, "model.warmup_steps": 0, "learner.loss.entropy_coef": 0.05}
"""A model without warm-up, which no reward moves: its entropy does."""
NIGHT: dict[str, Any] = {
    "groups_per_step": 4, "group_size": 4, "total_steps": 2, "validation.every": 50, "checkpoint.every": 4,
    "data.size": 256, "data.validation_size": 64}
"""A night of two steps: it is validated, and so can be judged."""
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass
class KeptHome(Home):
    """A home whose services have ports of their own, beside those of a person on this machine."""

    prefect_port: int = 0
    mlflow_port: int = 0

    @staticmethod
    def at(path: Path) -> KeptHome:
        return KeptHome(path, prefect_port=servers.free_port(), mlflow_port=servers.free_port())

    @property
    def prefect_page(self) -> str:
        return f"http://{servers.HOST}:{self.prefect_port}"

    @property
    def mlflow_page(self) -> str:
        return f"http://{servers.HOST}:{self.mlflow_port}"

    def up(self, *args: str, code: int = 0) -> dict[str, Any]:
        """`headway services up` at its ports; the report where that succeeds."""
        command = self.call("services", "up", "--prefect-port", str(self.prefect_port), "--mlflow-port",
                            str(self.mlflow_port), *args, "--json")
        assert command.process.returncode == code, command.said
        return {"err": command.err} if code else command.json

    def down(self) -> None:
        command = self.call("services", "down", "--force")
        assert command.process.returncode == 0, command.said

    def kill(self, *names: str) -> None:
        """Kill services, and wait until their supervisor has each of them up again, at its address, and all are ready.
        """
        before = self._noted().services
        for name in names:
            process = before[name].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)

        def again() -> bool:
            now = self._noted()
            return now.ready and all(now.services[name].restarts == before[name].restarts + 1 for name in names)

        wait_until(again, 120, f"{', '.join(names)}: started again")
        after = self._noted().services
        assert [after[name].address for name in names] == [before[name].address for name in names]

    def _noted(self) -> kept.Kept:
        """The services as their supervisor has noted them; `report` asks the same of a process of its own."""
        found = kept.read(self.path)
        assert found is not None
        return found

    def report(self) -> dict[str, Any]:
        return self.call("services", "status", "--json").json

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the Prefect server answers to its owner; None where it does not, or refuses. One whose database is
        locked is asked again, as any client of it does."""
        auth = servers.prefect_auth(self.path)
        for _ in range(5):
            try:
                status, answer = servers._asked(f"{self.prefect_page}/api", auth, method, path, body, 30)
            except (OSError, HTTPException):
                return None
            if status != HTTPStatus.SERVICE_UNAVAILABLE:
                return json.loads(answer) if status in (200, 201) else None
            time.sleep(1)
        return None

    def shell(self, script: str, timeout_s: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A script of a plain shell that has `headway`, `prefect` and `mlflow` of this environment on its path."""
        env = {name: value for name, value in os.environ.items()
               if not name.startswith(("PREFECT_", "RAY_", "MLFLOW_", "HEADWAY_"))}
        env |= {"HEADWAY_HOME": str(self.path), "NO_COLOR": "1",
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(["bash", "-c", f'eval "$(headway env)" && {script}'], env=env, text=True, cwd=cwd,
                              capture_output=True, timeout=timeout_s)

    def submit(self, deployment: str, **parameters: Any) -> str:
        """Id of a new flow run of a deployment."""
        found = self.ask("GET", f"/deployments/name/{deployment}")
        assert found is not None, deployment
        return self.made(f"/deployments/{found['id']}/create_flow_run", {
            "parameters": parameters, "state": {"type": "SCHEDULED"}, "idempotency_key": uuid4().hex})["id"]

    def made(self, path: str, asked: dict[str, Any]) -> Any:
        """What a POST has made."""
        made = self.ask("POST", path, asked)
        assert made is not None, (path, asked)
        return made

    def planted(self, flow: str, state: str, *, deployment: str | None = None) -> str:
        """Id of a flow run in this state from now on, whose process never was."""
        where = f"/deployments/{self.ask('GET', f'/deployments/name/{deployment}')['id']}/create_flow_run" \
            if deployment else "/flow_runs/"
        made = self.made(where, {"name": f"{flow}-{uuid4().hex[:8]}", "state": {"type": "PENDING"}} | (
            {} if deployment else {"flow_id": self.made("/flows/", {"name": flow})["id"]}))["id"]
        self.made(f"/flow_runs/{made}/set_state", {"force": True, "state": {"type": state, "name": state.title()}})
        return made

    def beat(self, flow_run: str, at: datetime) -> None:
        """Say for a flow run that it lives, and wait until the server has it."""
        event = {"id": str(uuid4()), "event": silent_runs.HEARTBEAT, "occurred": at.isoformat(), "payload": {},
                 "resource": {"prefect.resource.id": f"prefect.flow-run.{flow_run}", "prefect.resource.name": "x"},
                 "related": [{"prefect.resource.id": f"prefect.flow.{uuid4()}", "prefect.resource.role": "flow",
                              "prefect.resource.name": "train"}]}
        asked = {"filter": {"event": {"name": [silent_runs.HEARTBEAT]}, "occurred": {"since": at.isoformat()},
                            "resource": {"id": [f"prefect.flow-run.{flow_run}"]}}}
        self.ask("POST", "/events", [event])
        wait_until(lambda: bool(self.ask("POST", "/events/filter", asked)["events"]), 30, "the heartbeat is heard")

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        return self.ask("GET", f"/flow_runs/{flow_run}")

    def wait_for_state(self, flow_run: str, *states: str, deadline_s: float = 240) -> dict[str, Any]:
        """Until the flow run is in one of these states; a final one that is none of them fails at once."""
        until = time.monotonic() + deadline_s
        while True:
            run = self.flow_run(flow_run)
            if run is not None and run["state_type"] in states:
                return run
            assert run is None or run["state_type"] not in FINAL or set(states) & set(FINAL) == set(), self.story(run)
            assert time.monotonic() < until, self.story(run)
            time.sleep(0.25)

    def story(self, run: dict[str, Any] | None) -> str:
        """State and last log lines of a flow run, for the message of a test that fails."""
        if run is None:
            return "no answer"
        logs = self.ask("POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 100}) or []
        return json.dumps(run["state"])[:1500] + "\n" + "\n".join(line["message"][:300] for line in logs[-15:])


def wait_until(true: Callable[[], bool], deadline_s: float, what: str) -> None:
    until = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < until, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.1)
