"""Signals that must not get lost: a KeyboardInterrupt can be raised inside code that swallows it.

`noted` keeps a note of SIGINT and SIGTERM while the flow runs; the main thread asks `check` wherever it waits for an
actor and before every step, which raises again what was swallowed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

_received: list[int] = []


@contextmanager
def noted() -> Iterator[None]:
    """Note signals on their way to the handlers that are in place. Outside the main thread: nothing."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        handler = before[signal.Signals(number)]
        if callable(handler):
            cast(Callable[[int, FrameType | None], Any], handler)(number, frame)

    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def received() -> str | None:
    """Name of the first signal of this flow, `SIGINT` or `SIGTERM`; None if there was none."""
    return signal.Signals(_received[0]).name if _received else None


def check() -> None:
    """Raise KeyboardInterrupt if a signal came, in the main thread: whoever swallowed it is not asked again."""
    if _received and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt(received())
