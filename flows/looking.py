"""The commands that look: status, audit, inspect, ui. They read run directories and change nothing."""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Any

from flows.console import Console
from rl_core.errors import BrokenFile, ConfigError, DeadPart

REFUSED = 2


def show_status(run_key: str, *, as_json: bool) -> int:
    """What the run is doing, or how it ended."""
    from tasks.inspection import run_status

    return _show(run_status, run_key, as_json=as_json, lines=_status_lines)


def show_audit(run_key: str, *, as_json: bool) -> int:
    """The partition of prompts and rows; 1 if it does not hold."""
    from tasks.inspection import run_audit

    return _show(run_audit, run_key, as_json=as_json, lines=_audit_lines,
                 code=lambda report: 0 if report["holds"] else 1)


def show_step(run_key: str, step: int, *, as_json: bool) -> int:
    """Prompts, answers, rewards and versions of one training step."""
    from tasks.inspection import run_step

    return _show(lambda key: run_step(key, step), run_key, as_json=as_json, lines=_step_lines)


def _show(read: Any, run_key: str, *, as_json: bool, lines: Any, code: Any = lambda report: 0) -> int:
    try:
        report = read(run_key)
    except (ConfigError, BrokenFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    if as_json:
        print(json.dumps(report, allow_nan=False), file=sys.stdout)
    else:
        Console().lines(lines(report))
    return code(report)


def _status_lines(report: dict[str, Any]) -> list[str]:
    rows = [("run", report["run_key"]), ("state", report["state"]),
            ("steps", f"{report['steps']} of {report['total_steps']}")]
    rows += [(name, f"{report['metrics'][key]:.4g}") for name, key in (
        ("reward", "reward/mean"), ("staleness", "staleness/mean"), ("tokens/s", "rollout/tokens_per_s"))
        if report["metrics"].get(key) is not None]
    rows += [("accuracy", f"{report['accuracy']:.3f}")] if report["accuracy"] is not None else []
    rows += [("waiting", report["waiting"])] if report["waiting"] else []
    rows += [("cause", report["cause"])] if report["cause"] else []
    rows += [("directory", report["directory"])]
    return [f"{name:<12}{value}" for name, value in rows]


def _audit_lines(report: dict[str, Any]) -> list[str]:
    epoch, position = report["frontier"]
    lines = [f"{report['run_key']}: {report['claims']} claims, {report['recorded']} records, {report['shards']} "
             f"shards; prompts up to position {position} of dataset epoch {epoch}"]
    for what in ("positions", "rows"):
        counts = {state: n for state, n in report[what].items() if n}
        listed = ", ".join(f"{n} {state}" for state, n in counts.items())
        lines.append(f"{what:<10}{sum(counts.values()):>8}  {listed}")
    if report["holds"]:
        return [*lines, "holds: every prompt and every landed group is in exactly one state"]
    return [*lines, f"DOES NOT HOLD: {len(report['violations'])} violations", *report["violations"][:20]]


def _step_lines(report: dict[str, Any]) -> list[str]:
    lines = [f"step {report['step']} of {report['run_key']}: {len(report['groups'])} groups, publication "
             f"{report['idx']}, reward {report['reward_mean']:.3f}"]
    for group in report["groups"]:
        lines += ["", f"{group['group_id']}  {group['prompt']!r}  age {group['age']}"]
        lines += [f"  {answer['reward']:+.3f}  v{'-'.join(map(str, answer['versions']))}  {answer['finish']:<7} "
                  f"{answer['text']!r}" for answer in group["answers"]]
    return lines


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
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """Leave by way of `serve`, which ends both servers; a second signal does not disturb it."""
    for again in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)
    raise SystemExit(128 + number)
