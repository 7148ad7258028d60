"""What all commands share: exit codes, error lines, the report as words or as JSON, quiet libraries, SIGTERM.

The contract is in docs/cli.md: which error is which exit code is said here, in one place, by `guarded`. Imports nothing
heavy: the first line of a command is out before anything is loaded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from flows.console import Console
from rl_core.errors import (
    BrokenFile,
    ConfigError,
    DataError,
    DeadPart,
    NoExclusiveCreate,
    ReplayUnavailable,
    RewardError,
    RunEnded,
    RunIsAlive,
)

REFUSED, FAILED, INTERRUPTED, TERMINATED, OUT_OF_TIME = 2, 1, 130, 143, 124
"""Exit codes; 0 is completed. REFUSED: nothing was started. OUT_OF_TIME: max_wall_time, as timeout(1) has it."""
USERS_TO_MEND = (ConfigError, DataError, RunIsAlive, NoExclusiveCreate, BrokenFile, ReplayUnavailable)
"""REFUSED: the message says what to do."""
WENT_WRONG = (DeadPart, RewardError, RunEnded, OSError)
"""FAILED: something did not do its part."""
LEAVE_S = 5.0
"""What a process has to be gone once its command has ended."""
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


def show(report: Mapping[str, Any], lines: Callable[[Any], Sequence[str]], *, as_json: bool,
         both: bool = False) -> None:
    """A report for people, or as one line of JSON. `both`: with JSON the words come before it."""
    if both or not as_json:
        Console().lines(lines(report))
    if as_json:
        print(json.dumps(report, allow_nan=False), file=sys.stdout, flush=True)


def guarded(work: Callable[[], int], *, stopped: str = "") -> int:
    """Do the work of a command; returns its exit code. What keeps it from its own end is an `error:` line and a code;
    `stopped`: what to say of Ctrl-C."""
    try:
        return work()
    except USERS_TO_MEND as error:
        return failed(error)
    except WENT_WRONG as error:
        return failed(error, FAILED)
    except KeyboardInterrupt:
        return failed(stopped, INTERRUPTED)


def answer(read: Callable[[], Mapping[str, Any]], lines: Callable[[Any], Sequence[str]], *, as_json: bool,
           both: bool = False, holds: Callable[[Any], bool] = lambda report: True, stopped: str = "") -> int:
    """A command that asks and shows: `guarded`, the report of `read`, and FAILED where it does not hold."""
    def work() -> int:
        report = read()
        show(report, lines, as_json=as_json, both=both)
        return 0 if holds(report) else FAILED

    return guarded(work, stopped=stopped)


def leave(code: int) -> None:
    """Have the process gone LEAVE_S from now, whatever still runs in it: all is said, written and ended by now, but at
    exit Python waits for threads without a deadline, such as one that asks a Ray head that is dead, or Prefect's, that
    has last lines for a server that is."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    end = threading.Timer(LEAVE_S, os._exit, (code,))
    end.daemon = True
    end.start()


def leave_on_sigterm() -> None:
    """Let SIGTERM end the command by way of its `finally`, with TERMINATED."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)
