"""`--take-over`: end the process that owns a run, so that this start can go on with it.

The holder is named by pid and start time, as it wrote itself into owner.lock, and is signalled on its own machine, boot
and pid namespace only. What it holds in memory is lost, nothing else: a start and a restart are one path.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from rl_core.errors import DeadlinePassed, RunIsAlive
from rl_core.run_dir import Holder, RunDir, holder, owner_is_alive
from tasks import keeper

GRACE_S = 15.0
"""From SIGTERM to SIGKILL. A start that is told to stop is gone within 10 s."""
GONE_S = 5.0
"""From SIGKILL until the process is gone and the lock is free."""
LOOK_S = 0.05
SAYS_S = 1.0
"""How long a holder may take to write who it is, after it has the lock."""


def take_over(run: RunDir, *, grace_s: float = GRACE_S,
              say: Callable[[str], None] = lambda text: None) -> Holder | None:
    """End the live owner of this run and wait until it is gone; None where nobody owned it. `say` tells people.

    Raises RunIsAlive for an owner that cannot be signalled from here, DeadlinePassed for one that outlives SIGKILL.
    """
    found = _holder(run)
    if found is None:
        return None
    if not found.here:
        raise RunIsAlive(f"{run.root}: owned by {found}, which is another machine, boot or container than this one: "
                         f"--take-over can only end a process that it can signal. Stop it there (`kill -TERM "
                         f"{found.pid}`), or use another --run-key")
    started = found.started if found.started is not None else keeper.start_time(found.pid)
    if found.pid == os.getpid() or started is None:
        raise RunIsAlive(f"{run.root}: owned by {found}, which cannot be ended from here; stop it first")
    say(f"ending {found}, which owns the run")
    if not _ended(found.pid, started, signal.SIGTERM, grace_s):
        say(f"{found} is still there {grace_s:g} s after SIGTERM; SIGKILL")
        if not _ended(found.pid, started, signal.SIGKILL, GONE_S):
            raise DeadlinePassed(f"{run.root}: {found} is still there {GONE_S:g} s after SIGKILL; it waits in the "
                                 "kernel (a file system that does not answer?)")
    until = time.monotonic() + min(grace_s, GONE_S)
    while owner_is_alive(run):
        if time.monotonic() > until:  # forked with it, or somebody else was quicker
            raise RunIsAlive(f"{run.root}: {found} is gone, but a process still holds the lock: one that it had "
                             "started, or another start; see `headway doctor`")
        time.sleep(LOOK_S)
    return found


def _holder(run: RunDir) -> Holder | None:
    """Who owns the run, given the moment between taking the lock and writing it down."""
    until = time.monotonic() + SAYS_S
    while True:
        try:
            return holder(run)
        except RunIsAlive:
            if time.monotonic() > until:
                raise
            time.sleep(LOOK_S)


def _ended(pid: int, started: int, number: int, wait_s: float) -> bool:
    """Signal exactly this process and wait until it is gone. SIGTERM also wakes one that is stopped (SIGSTOP)."""
    try:
        keeper.signal_process(pid, started, number)
        if number == signal.SIGTERM:
            keeper.signal_process(pid, started, signal.SIGCONT)
    except PermissionError:
        raise RunIsAlive(f"pid {pid} owns the run and belongs to another user: it cannot be signalled; have it stopped "
                         "first") from None
    until = time.monotonic() + wait_s
    while keeper.is_alive(pid, started):
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    return True
