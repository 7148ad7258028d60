"""`make study`: the runs of order.py one after the other, by the real command, until they are done or the budget is.

    make study                     all of them; what is finished is not done again
    make study BUDGET=2h           the prefix that fits; a half-done run is gone on with
    python -m tests.study.study --budget 90s --name try --steps 20 --seeds 1,2
    make study STUDY='--name fast --set learner.lr=2e-4'    another study, with settings over those of order.py

One Prefect server and one Ray head serve all runs, which else would each wait for their own. A watchdog ends them
should this process be killed (tasks/services.py). Runs lie under HEADWAY_HOME as any others do, their rows in
`study/<name>` there; in MLflow they are children of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rl_core.config import Config, DeadlineConfig
from rl_core.run_dir import RunDir, read_json
from tasks import services
from tasks.destination import Destination, destination
from tasks.inspection import is_completed
from tasks.paths import headway_home, run_dir
from tests.study.measured import Point, RunRow, measured
from tests.study.order import PRESET, SEEDS, STEPS, StudyRun, expected_s, fits, left, ordered, seconds_of
from tests.study.report import write_both

GUESS_S = 40.0
"""Of a run, while none is finished."""
AROUND_S = 6.0
"""Of a command, before and after what its result calls `wall_s`."""
FAILURES = 3
"""In a row, after which the study ends itself."""
STOPPED = (130, 143)
TAG = "headway.study"


def study(name: str, runs: Sequence[StudyRun], *, steps: int, budget_s: float | None,
          train: Callable[[StudyRun], int], clock: Callable[[], float] = time.monotonic,
          say: Callable[[str], None] = print, ended: Callable[[StudyRun], None] = lambda run: None) -> dict[str, Any]:
    """Make what is left of `runs`, in order, as far as the budget goes. `train(run)` makes one, or goes on with it, and
    returns its exit code; `ended(run)` is told of each that came to its end. Returns what was done, as JSON."""
    begun, took = clock(), took_of(name, runs)
    failed, in_a_row = list[str](), 0
    say(f"{len(took)} of {len(runs)} runs are done")
    why = "all runs are done"
    for run in left(runs, took):
        spent = clock() - begun
        if budget_s is not None and not fits(run, took, left_s=budget_s - spent, guess_s=GUESS_S):
            why = f"the budget of {budget_s:.0f} s: {spent:.0f} s are over, the next run takes about " \
                  f"{expected_s(run, took, GUESS_S):.0f} s"
            break
        started = clock()
        code = train(run)
        say(f"{run.key(name)}: {'done' if code == 0 else f'exit code {code}'} in {clock() - started:.1f} s")
        if code == 0:
            took[run], in_a_row = clock() - started, 0
            ended(run)
            continue
        if code in STOPPED:
            why = "stopped"
            break
        failed.append(run.key(name))
        in_a_row += 1
        if in_a_row == FAILURES:
            why = f"{FAILURES} runs in a row failed"
            break
    return {"done": len(took), "of": len(runs), "failed": failed, "ended": why, "steps": steps,
            "seconds": round(clock() - begun, 1)}


def took_of(name: str, runs: Sequence[StudyRun]) -> dict[StudyRun, float]:
    """The finished runs, each with the seconds that its command took."""
    return {run: float(read_json(directory.result)["wall_s"]) + AROUND_S for run in runs
            if is_completed(directory := run_dir(run.key(name)))}


def collect(name: str, runs: Sequence[StudyRun]) -> tuple[list[RunRow], list[Point]]:
    """Rows of the finished runs, in order."""
    rows, points = list[RunRow](), list[Point]()
    for run in took_of(name, runs):
        row, curve = measured(run_dir(run.key(name)), run)
        rows.append(row)
        points += curve
    return rows, points


# -- the command


class Commands:
    """Runs `headway train`, one at a time, over services that are there."""

    def __init__(self, name: str, settings: Callable[[StudyRun], Sequence[str]], environ: Mapping[str, str],
                 logs: Path) -> None:
        self._name, self._settings, self._environ, self._logs = name, settings, environ, logs
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        logs.mkdir(parents=True, exist_ok=True)

    def train(self, run: StudyRun) -> int:
        """To its end. What it says is in the log of its key."""
        if self._stopped:
            return STOPPED[1]
        key = run.key(self._name)
        sets = [word for setting in self._settings(run) for word in ("--set", setting)]
        with (self._logs / f"{key}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "train", "--preset", PRESET, *sets, "--run-key", key, "--json"],
                env=dict(self._environ), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            return self._process.wait()

    def stop(self, number: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM: the run ends itself, resumable, and no other begins."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def environment(home: Path, shared: services.Services) -> dict[str, str]:
    """Of a command that uses these services by address, and nobody else's."""
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(("PREFECT_", "RAY_", "MLFLOW_", "HEADWAY_"))}
    given = {name: value for name, value in shared.env.items() if name != services.PRIVATE}
    return clean | given | {"HEADWAY_HOME": str(home), "PYTHONUNBUFFERED": "1"}


class Parent:
    """The MLflow run that all runs are children of. Without MLflow the study goes on: it is made later."""

    def __init__(self, where: Destination, name: str, settings: Mapping[str, Any]) -> None:
        self._where, self._name, self._settings = where, name, settings
        self._id: str | None = None

    def adopt(self, runs: Sequence[RunDir]) -> None:
        from tasks.tracking import TrackingFailed, adopt, open_parent

        try:
            self._id = self._id or open_parent(self._where, experiment=Config().tracking.experiment, key=self._name,
                                               tags={TAG: self._name}, settings=self._settings)
            for run in runs:
                adopt(self._where, self._id, run)
        except (TrackingFailed, FileNotFoundError) as error:
            print(f"MLflow: {error}")

    def close(self, done: int, of: int) -> None:
        from tasks.tracking import TrackingFailed, close_parent

        try:
            if self._id is not None:
                close_parent(self._where, self._id, "FINISHED" if done == of else "KILLED", {"study/runs": float(done)})
        except TrackingFailed as error:
            print(f"MLflow: {error}")


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make study", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=seconds_of, default=None, help="as 2h, 90m or 45s; without it, all runs")
    parser.add_argument("--name", default="study", help="begins every run key")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of every run")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="NAME=VALUE", help="in every run")
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=SEEDS, help="as 1,2,3")
    return parser.parse_args()


def main() -> int:
    """Exit code 0 where everything that fitted was made, 1 where a run failed, 130 where it was stopped."""
    args, home = asked(), headway_home()
    runs, place = ordered(args.seeds), home / "study" / args.name

    def settings(run: StudyRun) -> tuple[str, ...]:
        return (*run.settings(args.steps), *args.sets)

    shared = services.start(place / "services", home, isolated=True, deadlines=DeadlineConfig())
    commands = Commands(args.name, settings, environment(home, shared), place / "logs")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, commands.stop)
    parent = Parent(destination(Config(isolated=True), home), args.name,
                    {run.key(args.name): list(settings(run)) for run in runs})
    try:
        parent.adopt([run_dir(run.key(args.name)) for run in took_of(args.name, runs)])
        report = study(args.name, runs, steps=args.steps, budget_s=args.budget, train=commands.train,
                       say=lambda text: print(text, flush=True),
                       ended=lambda run: parent.adopt([run_dir(run.key(args.name))]))
    finally:
        services.stop(shared)
    write_both(place, *collect(args.name, runs))
    parent.close(report["done"], len(runs))
    print(f"rows: {place}; `make study-report` makes table and figure of them")
    print(json.dumps(report))
    return 130 if report["ended"] == "stopped" else int(bool(report["failed"]))


if __name__ == "__main__":
    sys.exit(main())
