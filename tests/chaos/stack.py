"""Kills of a whole run: who is killed, at which moment, and what must hold afterwards.

A moment is told from files alone. The victim is stopped (SIGSTOP) as soon as the moment is seen, the files are looked
at again, and only what still holds is killed; a moment that passed meanwhile is waited for again. So what is counted as
hit was hit.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rl_core.experience.ledger import claimed_steps
from rl_core.learner.learner import fold_claims
from rl_core.metrics import tracked_names
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, newest_attempt
from rl_core.run_identity import read_identity
from tasks import keeper
from tests.chaos.mlflow_server import serving_pid
from tests.runs import Command, Home, processes_of, wait_until_gone

SWAP_S = 0.15
"""A version is being swapped to, or about to be, for this long after it was published."""
LOOK_S = 0.0005
PATIENCE_S = 45.0
"""Longest wait for a moment; then the victim is killed at whatever moment it is."""
ACTORS = ("learner", "rollout", "validation")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is being killed: where it is, and the start that is under way."""

    home: Home
    run: RunDir
    attempt: int
    """The newest attempt before this start."""


def state_of(run: RunDir) -> str:
    """What the owner says that it is doing."""
    try:
        return json.loads(run.status.read_text())["state"]
    except (OSError, ValueError):
        return ""


def starting(at: Run) -> bool:
    return newest_attempt(at.run) > at.attempt and state_of(at.run) not in ("training", "completed", "failed")


def in_step(at: Run) -> bool:
    claimed, recorded = claimed_steps(at.run), recorded_steps(at.run)
    return bool(claimed) and len(claimed) > len(recorded)


def idle(at: Run) -> bool:
    """The flow has said that it waits for the claim of step k, and step k has none: so it waits still, and every step
    that was claimed is recorded."""
    try:
        waits = json.loads(at.run.status.read_text())["waits"]
    except (OSError, ValueError, KeyError):
        return False
    claimed = claimed_steps(at.run)
    awaited = f"a full claim of step {len(claimed)}"
    return any(wait["what"] == awaited for wait in waits) and len(recorded_steps(at.run)) == len(claimed)


def in_publish(at: Run) -> bool:
    """Bytes of a version lie aside, or have their name and no manifest yet."""
    if any(at.run.weights_root.glob(".v-*.tmp")):
        return True
    there = [int(path.name[2:]) for path in at.run.weights_root.glob("v-*")]
    return bool(there) and not at.run.version(max(there)).exists()


def in_swap(at: Run) -> bool:
    """The newest version has become real a moment ago."""
    newest = max((path.stat().st_mtime for path in at.run.versions.glob("v-*.json")), default=0.0)
    return 0 <= time.time() - newest < SWAP_S


def in_checkpoint(at: Run) -> bool:
    return any(at.run.checkpoints.glob(".n-*.tmp"))


def in_tracking(at: Run) -> bool:
    """MLflow's database is in a transaction."""
    return any((at.home.path / "mlflow").glob("mlflow.db-*"))


MOMENTS: dict[str, Callable[[Run], bool]] = {
    "start": starting, "idle": idle, "step": in_step, "swap": in_swap, "publish": in_publish,
    "checkpoint": in_checkpoint, "tracking": in_tracking}


def pid_of_actor(home: Home, run: RunDir, role: str, rank: int = 0) -> int | None:
    """The process that writes the log of this actor; None while there is none."""
    log = str(run.logs / f"{role}-{rank}.log")
    for pid in processes_of(home):
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/1") == log:
                return pid
    return None


def pid_of(home: Home, command: Command, victim: str) -> int | None:
    """An actor by its role, `owner`, a service of the run by its name, or `mlflow`, the server that it tracks to."""
    if victim == "owner":
        return command.process.pid
    if victim == "mlflow":
        return serving_pid(home)
    if victim in ACTORS:
        return pid_of_actor(home, command.run, victim)
    state = keeper.read_state(command.run.services)
    held = None if state is None else state["processes"].get(victim)
    return held["pid"] if held is not None and keeper.is_alive(held["pid"], held["started"]) else None


def kill_at(at: Run, command: Command, victim: str, moment: str) -> bool | None:
    """Kill the victim at the moment; True if it was hit, False if it never came, None if the command ended first."""
    holds, until, pid = MOMENTS[moment], time.monotonic() + PATIENCE_S, None
    while command.process.poll() is None:
        pid = pid_of(at.home, command, victim) if pid is None else pid
        late = time.monotonic() > until
        if pid is None or not (late or holds(at)):
            time.sleep(LOOK_S)
            assert time.monotonic() < until + PATIENCE_S, f"there is no {victim} to be killed"
            continue
        try:
            os.kill(pid, signal.SIGSTOP)
            hit = holds(at)
            os.kill(pid, signal.SIGKILL if hit or late else signal.SIGCONT)
        except ProcessLookupError:
            pid = None
            continue
        if hit or late:
            return hit
    return None


def check_kept(home: Home, command: Command, steps: int, status: str) -> None:
    """Of a run that ended behind `steps` recorded steps, or was stopped there: lost 0, trained twice 0, the audit
    holds, MLflow has every step once and this status, the weights are the fold of the claims."""
    run = command.run
    assert recorded_steps(run) == list(range(steps))
    assert list(run.records.glob("*divergent*")) == []
    assert fold_claims(str(run.root), read_identity(run).config) == read_record(run, steps - 1).weights_digest
    audit = home.call("audit", run.root.name, "--json")
    assert audit.process.returncode == 0, audit.said
    assert audit.json["positions"]["lost"] == 0
    groups, rows, positions = read_identity(run).config.groups_per_step, audit.json["rows"], audit.json["positions"]
    assert rows["claimed"] == positions["trained"] == len(claimed_steps(run)) * groups, "trained twice or not"
    said, points = home.tracked(command.json["mlflow_run_id"])
    assert said == status
    assert {name: count for name, count in points.items() if count != 1} == {}, "doubled in MLflow"
    missing = {(name, k) for name in tracked_names("learner") for k in range(steps)} - set(points)
    assert not missing, f"missing in MLflow: {sorted(missing)[:5]}"


def check_finished(home: Home, command: Command, steps: int) -> None:
    """The run has done all its steps, `check_kept` holds, Prefect has nothing left running, and no process is left."""
    key = command.run.root.name
    assert command.json["status"] == "completed" and command.json["steps"] == steps
    assert claimed_steps(command.run) == list(range(steps))
    check_kept(home, command, steps, "FINISHED")
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        flows = [row[0] for row in database.execute(
            "select state_type from flow_run where name = ? order by created", (key,))]
    assert flows[-1] == "COMPLETED" and "RUNNING" not in flows, flows
    assert wait_until_gone(home, 20) == {}
