"""The status view of a run: `status.json`, rewritten by the owner about twice a second.

A view, not the truth: everything in it can be made again from the run directory. The console, `headway status` and
`headway doctor` read it; nothing decides by it. Beside it, each minute of a wait that lasts is reported in the view and
in the run's logs: who waits on whom (tasks/waiting.py).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from rl_core.run_dir import RunDir, replace_file, to_json
from tasks.waiting import StallReport, waits

INTERVAL_S = 0.5

# `_sync=True` asks for the form that blocks, whatever the context; Prefect's types do not show this argument.
_create = cast(Callable[..., UUID], create_progress_artifact)
_update = cast(Callable[..., UUID], update_progress_artifact)


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
            if fields.get("state", self._fields["state"]) != self._fields["state"]:
                fields["since_us"] = time.time_ns() // 1000
            self._fields.update(fields)

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
            self._fields["stages"][mine][1] = round(time.monotonic() - started, 3)
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
        with suppress(OSError):
            self._run.logs.mkdir(parents=True, exist_ok=True)
            with open(self._run.stalls, "a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {report}\n")

    def _write(self) -> None:
        with self._lock:
            fields = json.loads(json.dumps(self._fields))
        with suppress(OSError):  # a full disk must not end the run through its status line
            replace_file(self._run.status, to_json({
                **fields, "live": self._live(), "actors": self._actors(), "waits": [wait.as_json() for wait in waits()],
                "stall": self._stalls.text, "ts_us": time.time_ns() // 1000}))


class ProgressArtifact:
    """The bar of the flow run in Prefect's UI, moved on a thread of its own: a training step never waits for it."""

    PARTS = 50
    """Updates over the whole run, at most."""

    def __init__(self, total: int) -> None:
        self._total = max(1, total)
        self._id: UUID | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="progress-artifact")
        self._shown = -1

    def done(self, steps: int) -> None:
        """Show that `steps` training steps are done. To be called inside the flow run."""
        part = self.PARTS * steps // self._total
        if part != self._shown:
            self._shown = part
            self._pool.submit(copy_context().run, self._show, 100.0 * steps / self._total)

    def _show(self, percent: float) -> None:
        with suppress(Exception):  # a view: Prefect being away is no reason to stop
            if self._id is None:
                self._id = _create(percent, key="progress", description="Training steps", _sync=True)
            else:
                _update(self._id, percent, _sync=True)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
