"""Starting a run from a terminal: plan, services, the flow, what the person sees meanwhile, and how it ends.

Imports prefect only when the services are there: it reads its settings when it is imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from flows.console import Console, failed_lines, next_lines, stopped_lines, summary_lines, view_of
from flows.presets import load_preset
from rl_core.config import Config
from rl_core.errors import BrokenFile, ConfigError, DataError, DeadPart, NoExclusiveCreate, RunIsAlive
from rl_core.plan import Plan, describe, make_plan, parse_overrides, resolve

REFUSED, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
"""Exit codes; 0 is completed. REFUSED: nothing was started."""
USERS_TO_MEND = (ConfigError, DataError, RunIsAlive, NoExclusiveCreate, BrokenFile)
LOOK_EVERY_S = 0.25
QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Set before they are imported. The console belongs to Headway; what the others say is in Prefect's log and in the
run's logs."""


class Terminated(BaseException):
    """SIGTERM outside the flow, where Prefect does not handle it."""


def launch(preset: str, overrides: Sequence[str], run_key: str | None, *, as_json: bool, verbose: bool) -> int:
    """Run `headway train`; returns its exit code."""
    console = Console()
    console.line(f"headway {version('headway')}: train {preset}")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return _launch(console, preset, overrides, run_key, as_json=as_json, verbose=verbose)
    except USERS_TO_MEND as error:
        return _refused(console, str(error))
    except (DeadPart, OSError) as error:
        console.lines(["", f"failed: {error}"])
        return FAILED
    except KeyboardInterrupt:
        console.lines(["", "stopped by SIGINT before training began"])
        return INTERRUPTED
    except Terminated:
        console.lines(["", "stopped by SIGTERM before training began"])
        return TERMINATED
    finally:
        console.close()


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _refused(console: Console, why: str) -> int:
    console.close()
    for line in why.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return REFUSED


def _launch(console: Console, preset: str, overrides: Sequence[str], run_key: str | None, *, as_json: bool,
            verbose: bool) -> int:
    os.environ.update(QUIET if not verbose else {})
    with stage(console, "plan"):
        changes, config, run_key, plan = _prepare(preset, overrides, run_key)
    from rl_core.run_dir import refuse_if_alive, self_test
    from tasks.inspection import is_completed, read_result
    from tasks.paths import headway_home, run_dir

    run = run_dir(run_key)
    if is_completed(run):
        return _completed(console, read_result(run), str(run.figures), as_json=as_json)
    refuse_if_alive(run)
    self_test(run.root.parent)  # before anything starts; every directory of the run is tested again in the set-up
    console.lines([f"  {what:<18} {value}" for what, value in describe(config, plan)])
    from tasks import services

    where = services.start(run.services, headway_home(), isolated=config.isolated, deadlines=config.deadlines,
                           on_stage=lambda name, seconds: console.line(f"  {name:<12} {seconds:6.1f} s"))
    ours = True
    try:
        services.export(where)
        os.environ.update(QUIET if not verbose else {})
        state = _run_flow(console, run.status, preset, changes, run_key)
        ours = not (state.is_failed() and isinstance(_cause(state), RunIsAlive))  # else another start was quicker
        return _ended(console, state, config, run_key, as_json=as_json)
    finally:
        console.close()
        if ours:
            services.stop(where)


def _prepare(preset: str, overrides: Sequence[str], run_key: str | None) -> tuple[dict[str, Any], Config, str, Plan]:
    """Overrides, settings, run key and plan of a command: all that can be known before a start. Writes nothing.

    Raises what refuses it: ConfigError, DataError, BrokenFile.
    """
    changes = parse_overrides(overrides)
    config = resolve(load_preset(preset), changes)
    make_plan(config)  # what is wrong whatever the inputs is said before anything heavy is imported
    from rl_core.preflight import inspect_inputs
    from rl_core.run_identity import check_inputs, check_same_run
    from tasks.destination import destination
    from tasks.inspection import stored_identity
    from tasks.paths import headway_home, new_run_key, run_dir

    key = new_run_key(preset) if run_key is None else run_key
    run = run_dir(key)
    try:
        identity = stored_identity(run)
    except OSError as error:
        raise ConfigError(f"{run.root}: cannot be read ({error.strerror}); set HEADWAY_HOME to a directory that can be "
                          "used") from error
    if identity is not None:
        check_same_run(key, identity.config, config)
    destination(config, headway_home())
    inputs = inspect_inputs(config)
    if run.inputs.exists():
        check_inputs(run, {"data": inputs.prompts.digest})
    return changes, config, key, make_plan(config, inputs.facts)


def _cause(state: Any) -> Any:
    """What the flow raised."""
    return state.result(raise_on_failure=False)


@contextmanager
def stage(console: Console, name: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    console.line(f"  {name:<12} {time.monotonic() - begun:6.1f} s")


def _run_flow(console: Console, status: Path, preset: str, changes: dict[str, Any], run_key: str) -> Any:
    """Run the flow in this thread, where signals arrive, while another one shows its status view."""
    before = status.stat().st_mtime_ns if status.exists() else 0
    over = threading.Event()

    def show() -> None:
        while not over.wait(LOOK_EVERY_S):
            _show(console, status, before)

    shower = threading.Thread(target=show, name="console", daemon=True)
    shower.start()
    from flows.train import train  # imports prefect and ray, with the services' addresses in place

    try:
        return train(preset=preset, overrides=changes, run_key=run_key, return_state=True)
    finally:
        over.set()
        shower.join(timeout=5)
        _show(console, status, before)
        console.close()
        _drain_logs()


def _drain_logs() -> None:
    """Let Prefect send its last logs and events while its server is still there."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=5)


def _show(console: Console, status: Path, before: int) -> None:
    """Show the status view, once this start has written it."""
    try:
        if status.stat().st_mtime_ns > before:
            console.show(view_of(json.loads(status.read_text())))
    except FileNotFoundError:
        return


def _ended(console: Console, state: Any, config: Config, run_key: str, *, as_json: bool) -> int:
    """Say how it ended; the exit code agrees with Prefect's state."""
    from tasks.inspection import read_result
    from tasks.paths import run_dir

    run = run_dir(run_key)
    result = read_result(run)
    resume = f"headway train --run-key {run_key} {' '.join(_same_command())}".rstrip()
    if state.is_completed():
        return _completed(console, result, str(run.figures), as_json=as_json)
    if state.is_cancelled() or result.get("status") == "cancelled":
        name = result.get("signal", "SIGINT")
        from tasks.inspection import steps_done

        console.lines(stopped_lines(run_key=run_key, signal=name, step=steps_done(run), total=config.total_steps,
                                    resume=resume))
        return TERMINATED if name == "SIGTERM" else INTERRUPTED
    cause = _cause(state)
    if isinstance(cause, ConfigError | DataError | RunIsAlive | NoExclusiveCreate):
        return _refused(console, str(cause))
    text = f"{result['error']}: {result['message']}" if result.get("status") == "failed" else f"{cause}"
    console.lines(failed_lines(run_key=run_key, cause=text, logs=str(run.logs), resume=resume))
    if as_json:
        from rl_core.history import summarize

        print(json.dumps(summarize(run, run_key=run_key, status="failed", wall_s=0.0).as_json()), file=sys.stdout)
    return FAILED


def _same_command() -> list[str]:
    """The options of this command but the run key, to be given again."""
    words, skip = [], False
    for word in sys.argv[2:]:
        if skip or word == "--run-key":
            skip = not skip
        elif not word.startswith("--run-key="):
            words.append(word)
    return words


def _completed(console: Console, result: dict[str, Any], figures: str, *, as_json: bool) -> int:
    summary, ended = result["summary"], result["ended"]
    console.lines(summary_lines(summary))
    if ended["reason"] == "data":
        console.line(f"  the data ended after {ended['step']} steps; {ended['left_over']} groups are left over, "
                     "too few for a step")
    console.lines(next_lines(summary, figures))
    if as_json:
        console.line(json.dumps(summary))
    return 0


def show_plan(preset: str, overrides: Sequence[str], run_key: str | None, *, as_json: bool) -> int:
    """Run `headway plan`: resolved settings, totals, where each service would be. Starts nothing."""
    console = Console()
    try:
        _, config, _, made = _prepare(preset, overrides, run_key)
    except USERS_TO_MEND as error:
        return _refused(console, str(error))
    from rl_core.plan import flatten
    from tasks.destination import destination
    from tasks.paths import headway_home
    from tasks.services import ambient

    tracked = destination(config, headway_home())
    given = ambient(isolated=config.isolated)
    places = {name: f"{given[name][0]} ({given[name][1]})" if name in given else "started for this run alone"
              for name in ("prefect", "ray")} | {"mlflow": str(tracked)}
    if as_json:
        print(json.dumps({"config": config.model_dump(mode="json"), "plan": made.as_json(), "services": places}),
              file=sys.stdout)
        return 0
    console.lines(["settings", *(f"  {name:<36} {json.dumps(value)}" for name, value in flatten(config).items())])
    console.lines(["", "plan", *(f"  {what:<18} {value}" for what, value in describe(config, made))])
    console.lines(["", "services", *(f"  {name:<18} {place}" for name, place in places.items())])
    return 0
