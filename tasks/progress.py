"""The status view of a run: `status.json`, rewritten by the owner about twice a second.

A view, not the truth: everything in it can be made again from the run directory. The console, `headway status` and
`headway doctor` read it; nothing decides by it. Beside it, each minute of a wait that lasts is reported in the view and
in the run's logs: who waits on whom (tasks/waiting.py).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any

from rl_core.run_dir import RunDir, replace_file, to_json
from rl_core.run_log import STORY
from tasks.artifacts import tell_stall
from tasks.waiting import StallReport, waits

INTERVAL_S = 0.5
TOLD = {"state": logging.INFO, "note": logging.WARNING, "trouble": logging.WARNING, "alarm": logging.WARNING}
"""Fields whose news are logged, each as this."""


class Progress:
    """What the owner is doing: stages of the start, then steps. Thread-safe; `close` writes the last state."""

    def __init__(self, run: RunDir, fields: dict[str, Any], live: Callable[[], dict[str, Any]] = dict,
                 stalls: StallReport | None = None) -> None:
        self._run = run
        self._fields: dict[str, Any] = {"pid": os.getpid(), "state": "starting", "stages": [],
                                        "since_us": time.time_ns() // 1000, **fields}
        """`since_us`: when the state began."""
        self._live = live
        self._actors: Callable[[], list[dict[str, Any]]] = list
        self._stalls = stalls or StallReport()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.view: dict[str, Any] = {}
        """As it was written last."""
        self._context = copy_context()
        """Of the flow run, whose artifact a stall report is."""
        self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)
        self._write()
        self._thread.start()

    def watch(self, live: Callable[[], dict[str, Any]]) -> None:
        """`live()` is asked for the fields that change by themselves (the pump's snapshot)."""
        self._live = live

    def watch_actors(self, actors: Callable[[], list[dict[str, Any]]]) -> None:
        """`actors()` is asked who they are: `headway doctor` looks whether they live."""
        self._actors = actors

    def set(self, **fields: Any) -> None:
        with self._lock:
            was = dict(self._fields)
            if fields.get("state", was["state"]) != was["state"]:
                fields["since_us"] = time.time_ns() // 1000
            self._fields.update(fields)
        for name, level in TOLD.items():
            if fields.get(name) is not None and fields[name] != was.get(name):
                STORY.log(level, "%s: %s", name, fields[name])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A named stage of the start, with its seconds; the stage that failed keeps no end."""
        started = time.monotonic()
        with self._lock:
            self._fields["stages"].append([name, None])
            mine = len(self._fields["stages"]) - 1
        self._write()
        yield
        with self._lock:
            self._fields["stages"][mine][1] = seconds = round(time.monotonic() - started, 3)
        STORY.info("stage %s: %.3f s", name, seconds)
        self._write()

    def close(self, **fields: Any) -> None:
        self.set(**fields)
        self._stop.set()
        self._thread.join(timeout=5)
        self._live, self._actors = dict, list
        self._stalls.look()
        self._write()

    def _loop(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            if (report := self._stalls.look()) is not None:
                self._log_stall(report)
            self._write()

    def _log_stall(self, report: str) -> None:
        STORY.warning("stall: %s", report)
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {report}\n"
        with suppress(OSError):
            self._run.logs.mkdir(parents=True, exist_ok=True)
            with open(self._run.stalls, "a") as log:
                log.write(line)
        threading.Thread(target=self._context.copy().run, args=(tell_stall, line), name="stall-artifact",
                         daemon=True).start()  # a server that hangs must not keep the view from being written

    def _write(self) -> None:
        with self._lock:
            fields = json.loads(json.dumps(self._fields))
        self.view = {**fields, "live": self._live(), "actors": self._actors(),
                     "waits": [wait.as_json() for wait in waits()], "stall": self._stalls.text,
                     "ts_us": time.time_ns() // 1000}
        with suppress(OSError):  # a full disk must not end the run through its status line
            replace_file(self._run.status, to_json(self.view))
