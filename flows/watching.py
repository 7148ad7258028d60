"""`headway status --watch`: a run shown until it ends, redrawn in place on a terminal, else a line for each look."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from flows.command import guarded, leave_on_sigterm
from flows.watching_text import picture, watch_line
from rl_core.errors import ConfigError

TERMINAL_EVERY_S, PLAIN_EVERY_S = 0.5, 5.0
"""The owner rewrites its status view twice a second."""


def watch_status(run_key: str, *, asked: bool, every_s: float | None, as_json: bool) -> int:
    """Run `headway status --watch`; returns its exit code, that of `headway status`, or 130 for Ctrl-C.

    `asked`: whether --watch was given. With `as_json` each look is one line of JSON.
    """
    leave_on_sigterm()

    def work() -> int:
        if not asked:
            raise ConfigError(f"--every {every_s:g}: says how often --watch looks; give both")
        from tasks.watching import Watcher

        watch(Watcher(run_key).look, sys.stdout, every_s=every_s, as_json=as_json)
        return 0

    return guarded(work)


def watch(look: Callable[[], Mapping[str, Any]], stream: TextIO, *, every_s: float | None, as_json: bool,
          sleep: Callable[[float], None] = time.sleep) -> None:
    """Show `look()` every so many seconds, until it says that the run is over.

    Consumes reports; waits for the clock; unblocked by the end of the run, or by Ctrl-C.
    """
    live = stream.isatty() and not as_json
    every_s = every_s if every_s is not None else TERMINAL_EVERY_S if live else PLAIN_EVERY_S
    with (_redrawn(stream) if live else _line_by_line(stream, as_json=as_json)) as show:
        while True:
            report = look()
            show(report)
            if report["over"]:
                return
            sleep(every_s)


@contextmanager
def _line_by_line(stream: TextIO, *, as_json: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    def show(report: Mapping[str, Any]) -> None:
        stream.write((json.dumps(report, allow_nan=False) if as_json else watch_line(report)) + "\n")
        stream.flush()

    yield show


@contextmanager
def _redrawn(stream: TextIO) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """In place: every picture is written over the last one at once, and the last one stays."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, highlight=False, markup=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda report: live.update(picture(report), refresh=True)
