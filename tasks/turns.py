"""Turns at the services of one state directory: who finds, starts or ends them waits until nobody else does.

The lock, and who holds it, are of tasks/keeper.py. A holder may hang or be stopped: a turn is waited for up to a
deadline, and whoever waits for longer than a minute says on whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rl_core.errors import DeadlinePassed
from tasks import keeper
from tasks.waiting import STALL_S, waiting_aloud

LOOK_S = 0.05


@contextmanager
def turn(state_dir: Path, what: str, deadline_s: float, *, setting: str = "",
         tick: Callable[[], None] = lambda: None, every_s: float = STALL_S) -> Iterator[None]:
    """Have the lock of `state_dir` for the block: `with turn(path, "the start of services", 120.0): ...`.

    `what` is the turn for people, `setting` what its deadline is called, if it is one. `tick` is called while it waits,
    and may raise. `every_s`: between two reports of a wait that lasts. Raises DeadlinePassed naming lock and holder.
    """
    with ExitStack() as held:
        if not _taken(held, state_dir):
            _wait(held, state_dir, what, deadline_s, setting, tick, every_s)
        yield


def _wait(held: ExitStack, state_dir: Path, what: str, deadline_s: float, setting: str, tick: Callable[[], None],
          every_s: float) -> None:
    lock, until = state_dir / keeper.LOCK, time.monotonic() + deadline_s
    with waiting_aloud(str(lock), what, deadline_s, lambda: f"{keeper.lock_holder(state_dir)} has it",
                       every_s) as look:
        while not _taken(held, state_dir):
            tick()
            look()
            if time.monotonic() > until:
                raise DeadlinePassed(f"{lock}: {keeper.lock_holder(state_dir)} still has it after {deadline_s:g} s"
                                     f"{in_words(setting)}; {what} waits for it: let that process finish, or end it, "
                                     "then try again")
            time.sleep(LOOK_S)


def in_words(setting: str) -> str:
    """` (deadlines.service_start_s)`, what a deadline is called; nothing for one that is no setting."""
    return f" ({setting})" if setting else ""


def _taken(held: ExitStack, state_dir: Path) -> bool:
    try:
        held.enter_context(keeper.locked(state_dir))
    except keeper.LockTaken:
        return False
    return True
