"""A flow run in this thread, and its status view on the screen meanwhile.

Imports prefect only when its address is there: it reads its settings when it is imported.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.command import QUIET
from flows.console import Console, view_of
from flows.ending import Flow, Start

LOOK_EVERY_S = 0.25


def set_client(start: Start) -> None:
    """How this process asks Prefect's server, set before prefect is imported."""
    os.environ.update(QUIET if not start.verbose else {})
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "2")  # 6 s for a call; its default tries for a minute
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "10")  # of a server that hangs; its default is a minute


def run_flow(start: Start, views: Sequence[Path], call: Callable[[], Any]) -> Flow:
    """Run the flow in this thread, where signals arrive, while another one shows the status view of its run; of
    several, which go one after the other, that of the last one that has begun."""
    console = start.console
    before = {status: status.stat().st_mtime_ns if status.exists() else 0 for status in views}
    over = threading.Event()

    def show() -> None:
        while not over.wait(LOOK_EVERY_S):
            _show(console, before)

    shower = threading.Thread(target=show, name="console", daemon=True)
    shower.start()
    try:
        state = call()
        ended = state.result(raise_on_failure=False)
        return Flow(state.type.value, ended, ended if isinstance(ended, BaseException) else None)
    except ImportError:  # of the flow's own modules
        raise
    except Exception as error:  # whatever Prefect's engine raises without its server
        return Flow("", error=error)
    finally:
        over.set()
        shower.join(timeout=5)
        _show(console, before)
        console.close()
        _drain_logs()


def _drain_logs() -> None:
    """Let Prefect send its last logs and events while its server is still there."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=5)


def _show(console: Console, before: Mapping[Path, int]) -> None:
    """Show the status view, once this start has written it. `before`: each view -> when it was written before."""
    for status, written in reversed(list(before.items())):
        with suppress(FileNotFoundError):
            if status.stat().st_mtime_ns > written:
                console.show(view_of(json.loads(status.read_text())))
                return
