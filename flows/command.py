"""What all commands share: exit codes, error lines, the report as words or as JSON, quiet libraries, SIGTERM.

Imports nothing heavy: the first line of a command is out before anything is loaded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from flows.console import Console

REFUSED, FAILED, INTERRUPTED, TERMINATED, OUT_OF_TIME = 2, 1, 130, 143, 124
"""Exit codes; 0 is completed. REFUSED: nothing was started. OUT_OF_TIME: max_wall_time, as timeout(1) has it."""
QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
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


def hush() -> None:
    """Keep the libraries quiet, and note what the person has said on reaching the hub."""
    os.environ.setdefault("HEADWAY_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", ""))
    os.environ.update(QUIET)


def failed(why: str | BaseException, code: int = REFUSED) -> int:
    """Say on stderr why a command did not do what it was asked, line by line; returns the exit code."""
    for line in str(why).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


def show(report: Mapping[str, Any], lines: Callable[[Any], Sequence[str]], *, as_json: bool) -> None:
    """A report for people, or as one line of JSON."""
    if as_json:
        print(json.dumps(report, allow_nan=False), file=sys.stdout)
    else:
        Console().lines(lines(report))


def leave_on_sigterm() -> None:
    """Let SIGTERM end the command by way of its `finally`, with TERMINATED."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)
