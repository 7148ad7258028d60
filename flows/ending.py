"""How a start from a terminal ends, for the person who waits for it: refused, completed, stopped or failed, with the
exit code. What a start is, and what came of its flow."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flows.command import INTERRUPTED, OUT_OF_TIME, TERMINATED, failed
from flows.console import Console, next_lines, summary_lines
from rl_core.errors import ConfigError, DataError
from tasks import signals

STOPPED_BY = {"SIGINT": INTERRUPTED, "SIGTERM": TERMINATED, "max_wall_time": OUT_OF_TIME}


@dataclass
class Start:
    """What one command says, and how."""

    console: Console
    preset: str | None
    as_json: bool
    verbose: bool
    amend: bool = False
    verb: str = "train"
    groups: int | None = None
    """Of a start that trains nothing: groups that shall wait."""
    take_over: bool = False
    """A live owner of the run is ended first."""
    shards_from: str | None = None
    """Run whose shards are trained on; None: as the run has stored."""
    begun: float = field(default_factory=time.monotonic)
    run_key: str | None = None
    """None until the plan stands."""
    prefect_away: bool = False


@dataclass(frozen=True)
class Flow:
    """How the flow ended: what it returned or raised, also where Prefect could not take note of it."""

    name: str
    """Prefect's state, `COMPLETED`; empty where the call itself raised."""
    summary: Any = None
    error: BaseException | None = None


def refused(console: Console, error: BaseException) -> int:
    """Say why nothing was started. What is wrong with settings and data begins with their place, all else with the name
    of the error, under which docs/operations.md has it."""
    console.close()
    if isinstance(error, (ConfigError, DataError)):
        return failed(error)
    return failed("\n".join(f"{type(error).__name__}: {line}" for line in str(error).splitlines()))


def said(start: Start, lines: Sequence[str], status: str, code: int, wall_s: float | None = None) -> int:
    """Say how a start ended that did not complete, with `--json` also as the last line. Returns the exit code."""
    start.console.close()
    start.console.lines(lines)
    if start.as_json and start.run_key is not None:
        wall_s = time.monotonic() - start.begun if wall_s is None else wall_s
        from tasks.inspection import summary_so_far

        start.console.line(json.dumps(summary_so_far(start.run_key, status, wall_s), allow_nan=False))
    return code


def stopped_behind(start: Start, resume: str) -> int:
    """Say of a night whose runs are trained that what comes behind was stopped, and what goes on with it. Returns the
    exit code."""
    name = signals.received() or "SIGINT"
    lines = ["", f"stopped by {name} before the night was told; its runs are trained", f"  go on    {resume}"]
    return said(start, lines, "completed", STOPPED_BY[name])


def brief(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"


def completed(start: Start, result: dict[str, Any], figures: str) -> int:
    console, summary, ended = start.console, result["summary"], result.get("ended")
    console.lines(summary_lines(summary))
    from tasks.night_files import verdict_lines

    console.lines([f"  {line}" for line in verdict_lines(summary["run_key"])])
    if (groups := result.get("gathered")) is not None:
        console.line(f"  {groups} groups wait to be trained: headway train --run-key {summary['run_key']}")
    elif "ended" in result and ended is None:
        console.line("  validation.only: this start trained nothing; the same command without it goes on")
    elif ended is not None and ended["reason"] == "data":
        console.line(f"  the data ended after {ended['step']} steps; {ended['left_over']} groups are left over, "
                     "too few for a step")
    if not result.get("tracked"):
        trouble = result.get("tracking_trouble") or "MLflow did not take everything in time"
        console.line(f"  {trouble}; the same command with --run-key {summary['run_key']} replays what is missing")
    console.lines(next_lines(summary, figures))
    if start.as_json:
        console.line(json.dumps(summary, allow_nan=False))
    return 0
