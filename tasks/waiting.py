"""What the owner's threads wait for now, on whom, since when, until when: for the status view and the stall report.

Every wait of the owner that can last is noted here while it lasts: `with waiting("rollout-0", "swap", 60.0): ...`.
Notes decide nothing; the waits keep their own deadlines. A wait that can come where no owner reports what is noted, in
a command that starts or ends something, says it itself: `waiting_aloud`.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

SHOWN_S = 1.0
"""A wait that is younger is none to people."""
STALL_S = 60.0
"""How often a wait that lasts is reported."""
MAIN = "the flow"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """`Wait(who="the flow", on="learner/0 (pid 12)", what="train", ...)`: who waits on whom, for what."""

    who: str
    on: str
    what: str
    since: float
    """Clock of time.monotonic."""
    deadline_s: float | None
    why: Callable[[], str]

    def waited_s(self) -> float:
        return time.monotonic() - self.since

    def as_json(self) -> dict[str, Any]:
        """For the status view: `since_us` is the time of day, microseconds."""
        waited_s = self.waited_s()
        return {"who": self.who, "on": self.on, "what": self.what, "waited_s": round(waited_s, 1),
                "since_us": round((time.time() - waited_s) * 1e6), "deadline_s": self.deadline_s, "why": self.why()}

    def __str__(self) -> str:
        """`the flow waits 120 s on learner/0 (pid 12) for train, at most 3600 s`, and why."""
        limit = "" if self.deadline_s is None else f", at most {self.deadline_s:g} s"
        why = self.why()
        return f"{self.who} waits {self.waited_s():.0f} s on {self.on} for {self.what}{limit}" + (f": {why}" if why
                                                                                                 else "")


_numbers = itertools.count()
_now: dict[int, Wait] = {}
_lock = threading.Lock()
_looked_at = -math.inf
"""When a StallReport of this process looked last, clock of time.monotonic."""


@contextmanager
def waiting(on: str, what: str, deadline_s: float | None, why: Callable[[], str] = lambda: "") -> Iterator[Wait]:
    """Note that this thread waits on somebody for something, until the block ends; `why()` is asked when one looks."""
    thread = threading.current_thread()
    who = MAIN if thread is threading.main_thread() else thread.name
    wait = Wait(who=who, on=on, what=what, since=time.monotonic(), deadline_s=deadline_s, why=why)
    number = next(_numbers)
    with _lock:
        _now[number] = wait
    try:
        yield wait
    finally:
        with _lock:
            del _now[number]


@contextmanager
def waiting_aloud(on: str, what: str, deadline_s: float | None, why: Callable[[], str] = lambda: "",
                  every_s: float = STALL_S) -> Iterator[Callable[[], None]]:
    """The same for a loop that looks again and again: it calls what it gets each time, `with ... as look: look()`.

    Says on stderr who waits on whom each `every_s` seconds of the wait, unless a StallReport does.
    """
    said = 0
    with waiting(on, what, deadline_s, why) as wait:
        def look() -> None:
            nonlocal said
            due = int(wait.waited_s() / every_s)
            if due > said and time.monotonic() - _looked_at > every_s:
                told = replace(wait, who=f"this process (pid {os.getpid()})") if wait.who == MAIN else wait
                print(f"stall: {told}", file=sys.stderr, flush=True)
            said = due

        yield look


def waits(at_least_s: float = SHOWN_S) -> list[Wait]:
    """Those that last for so long already, the oldest first."""
    with _lock:
        found = list(_now.values())
    return sorted((wait for wait in found if wait.waited_s() >= at_least_s), key=lambda wait: wait.since)


class StallReport:
    """Says who waits on whom, each minute of a wait that lasts: `report.look()` is the text, None while nothing stalls.

    `every_s`: seconds of a wait before its first report, and between two of them.
    """

    def __init__(self, every_s: float = STALL_S) -> None:
        self._every_s = every_s
        self._said: dict[Wait, int] = {}
        self.text: str | None = None
        """The newest report, while one of its waits lasts."""

    def look(self) -> str | None:
        """A new report if one is due, else None."""
        global _looked_at
        _looked_at = time.monotonic()
        stalled = waits(self._every_s)
        due = {wait: int(wait.waited_s() / self._every_s) for wait in stalled}
        news = any(count > self._said.get(wait, 0) for wait, count in due.items())
        if not stalled:
            self.text = None
        elif news:
            self.text = "; ".join(map(str, stalled))
        self._said = due
        return self.text if news else None
