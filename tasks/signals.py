"""Signals end a run at a place of its own choosing: raised anywhere, they break what they meet.

An exception out of a signal handler can be swallowed, turned into another one, or leave a lock held, inside code that
does not expect it (Prefect's engine does all three). So `noted` only keeps a note of the first SIGINT or SIGTERM of the
flow; the main thread asks `check` wherever it waits and before every step, which raises it there. A main thread that
has not asked after GRACE_S, and a second signal, get the handler that was in place, wherever they are.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

GRACE_S = 3.0

_received: list[int] = []
_raised = threading.Event()


@contextmanager
def noted() -> Iterator[None]:
    """Note signals for `check`. Outside the main thread: nothing."""
    _received.clear()
    _raised.clear()
    main = threading.current_thread()
    if main is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        handler = before[signal.Signals(number)]
        if len(_received) == 1:
            threading.Thread(target=insist, args=(number,), name="signal", daemon=True).start()
        elif callable(handler):
            cast(Callable[[int, FrameType | None], Any], handler)(number, frame)

    def insist(number: int) -> None:
        if not _raised.wait(GRACE_S) and main.ident is not None:
            signal.pthread_kill(main.ident, number)

    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, note)
    try:
        yield
    finally:
        _raised.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def received() -> str | None:
    """Name of the first signal of this flow, `SIGINT` or `SIGTERM`; None if there was none."""
    return signal.Signals(_received[0]).name if _received else None


def check() -> None:
    """Raise KeyboardInterrupt if a signal came, in the main thread: every time, since it may be swallowed."""
    if _received and threading.current_thread() is threading.main_thread():
        _raised.set()
        raise KeyboardInterrupt(received())
