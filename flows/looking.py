"""The commands that look: status, audit, inspect, ui. They read run directories and change nothing."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from flows.command import FAILED, failed, show
from flows.console import Console
from flows.looking_text import extreme_lines, group_lines, status_lines, step_lines
from rl_core.errors import BrokenFile, ConfigError, DeadPart


def show_status(run_key: str, *, as_json: bool) -> int:
    """What the run is doing, or how it ended."""
    from tasks.inspection import run_status

    return _show(run_status, run_key, as_json=as_json, lines=status_lines)


def show_audit(run_key: str, *, as_json: bool) -> int:
    """The partition of prompts and rows; 1 if it does not hold."""
    from tasks.inspection import run_audit

    return _show(run_audit, run_key, as_json=as_json, lines=_audit_lines,
                 code=lambda report: 0 if report["holds"] else FAILED)


def show_answers(run_key: str, *, step: int | None, group: str | None, best: int | None, worst: int | None,
                 as_json: bool) -> int:
    """Prompts, answers, rewards and versions: of one training step (by default the newest), of one group, or the best
    or worst answers of a step or of the run."""
    given = [name for name, value in (("--group", group), ("--best", best), ("--worst", worst)) if value is not None]
    if len(given) > 1 or (group is not None and step is not None):
        named = [*given, *(["--step"] if step is not None and group else [])]
        return failed(f"{' and '.join(named)} ask for different things; give --group alone, or one of --best and "
                      "--worst, with --step or without")
    from tasks.answers import run_extremes, run_group, run_step

    if group is not None:
        return _show(lambda key: run_group(key, group), run_key, as_json=as_json, lines=group_lines)
    if best is not None or worst is not None:
        count = best if best is not None else worst
        return _show(lambda key: run_extremes(key, "best" if worst is None else "worst", count or 0, step), run_key,
                     as_json=as_json, lines=extreme_lines)
    return _show(lambda key: run_step(key, step), run_key, as_json=as_json, lines=step_lines)


def _show(read: Any, run_key: str, *, as_json: bool, lines: Any, code: Any = lambda report: 0) -> int:
    try:
        report = read(run_key)
    except (ConfigError, BrokenFile) as error:
        return failed(error)
    show(report, lines, as_json=as_json)
    return code(report)


def _audit_lines(report: dict[str, Any]) -> list[str]:
    epoch, position = report["frontier"]
    lines = [f"{report['run_key']}: {report['claims']} claims, {report['recorded']} records, {report['shards']} "
             f"shards; prompts up to position {position} of dataset epoch {epoch}"]
    for what, key in (("positions", "positions"), ("rows", "rows"), ("shards", "shard_states")):
        counts = {state: n for state, n in report[key].items() if n}
        listed = ", ".join(f"{n} {state}" for state, n in counts.items())
        lines.append(f"{what:<10}{sum(counts.values()):>8}  {listed}")
    if report["holds"]:
        return [*lines, "holds: every prompt and every landed group is in exactly one state"]
    return [*lines, f"DOES NOT HOLD: {len(report['violations'])} violations", *report["violations"][:20]]


def serve_ui() -> int:
    """Serve MLflow's and Prefect's pages on loopback until Ctrl-C, SIGTERM, or the end of the terminal."""
    from tasks.paths import headway_home
    from tasks.ui import serve

    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        with serve(headway_home()) as pages:
            console.lines([f"MLflow   {pages.mlflow}", f"Prefect  {pages.prefect}",
                           f"         asks for user:password, which stands in {pages.secret}", "Ctrl-C ends both"])
            pages.wait()
    except DeadPart as error:
        return failed(error, FAILED)
    except KeyboardInterrupt:
        return 0
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """Leave by way of `serve`, which ends both servers; a second signal does not disturb it."""
    for again in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)
    raise SystemExit(128 + number)
