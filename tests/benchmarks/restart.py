"""How soon a run that was killed trains again, by the real command on the preset `tiny-cpu` with a checkpoint every ten
steps.

`after_all`: owner, actors, Ray and Prefect are killed with SIGKILL; from the moment that the new ones are up to the
first new record (what is before that, plan, imports, Prefect and Ray, is `before_set_up`). `after_owner`: the owner
alone is killed; from the command to the first new record, with services and actors alive. ROUNDS of each, in one run;
the median counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, newest_attempt
from tests.benchmarks.measure import figure
from tests.runs import Command, Home, processes_of

ROUNDS = 3
STEPS = 2000
FIRST = 25
"""Steps before the first kill. After each restart as many again, and a few: checkpoints lie at many distances."""
LOOK_S = 0.01
WAIT_S = 120.0


def figures() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        home = Home(Path(name))
        command = start(home)
        command.wait_for_step(FIRST)
        whole: list[dict[str, float]] = []
        owner: list[dict[str, float]] = []
        for _ in range(ROUNDS):
            end(command.process.pid)
            command.process.wait()
            command, taken = restarted(home)
            owner.append(taken)
            for pid in processes_of(home):
                end(pid)
            command.process.wait()
            command, taken = restarted(home)
            whole.append(taken)
        os.kill(command.process.pid, signal.SIGTERM)
        command.wait(60)
    yield figure("restart/after_all", middle(whole, "after_actors"), "s", "<= 10",
                 **{part: middle(whole, part) for part in ("before_set_up", "actors", "learner", "command")},
                 replayed=middle(whole, "replayed"))
    yield figure("restart/after_owner", middle(owner, "command"), "s", "<= 6",
                 **{part: middle(owner, part) for part in ("before_set_up", "actors", "learner")})


def middle(rounds: list[dict[str, float]], part: str) -> float:
    return round(statistics.median(taken[part] for taken in rounds), 2)


def start(home: Home) -> Command:
    return home.train("restart", f"total_steps={STEPS}", "checkpoint.every=10", "data.validation=null",
                      "learner.lr=1e-6")


def restarted(home: Home) -> tuple[Command, dict[str, float]]:
    """The same command again, until it has trained a step that had no record, and then some more."""
    attempt = newest_attempt(home.run("restart")) + 1
    status_was = home.run("restart").status.stat().st_mtime_ns
    begun = time.monotonic()
    command = start(home)
    until(command, lambda: stages(command.run, status_was).get("actors"))
    up = time.monotonic()
    first = until(command, lambda: trained_by(command.run, attempt))
    trained = time.monotonic()
    parts = stages(command.run, status_was)
    command.wait_for_step(first + FIRST + 3)
    own = sum(parts[part] for part in ("model", "actors") if parts.get(part) is not None)
    return command, {"command": trained - begun, "after_actors": trained - up, "actors": parts["actors"],
                     "learner": parts["learner"], "before_set_up": up - begun - own,
                     "replayed": first % 10}


def trained_by(run: RunDir, attempt: int) -> int | None:
    """The first step that this attempt trained: what an actor goes on with after its owner's death is not its own."""
    mine = [step for step in recorded_steps(run)[-3 * FIRST:] if read_record(run, step).attempt == attempt]
    return mine[0] if mine else None


def stages(run: RunDir, was: int) -> dict[str, Any]:
    """Seconds of the stages of this start so far; empty while the status view is that of the start before."""
    try:
        return dict(json.loads(run.status.read_text())["stages"]) if run.status.stat().st_mtime_ns > was else {}
    except FileNotFoundError:
        return {}


def until(command: Command, look: Callable[[], Any]) -> Any:
    """Wait for something to be there; returns it."""
    deadline = time.monotonic() + WAIT_S
    while (found := look()) is None or found is False:
        assert command.process.poll() is None, command.process.communicate()
        assert time.monotonic() < deadline, "nothing came in time"
        time.sleep(LOOK_S)
    return found


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
