"""Which live processes belong to a run, and the end of those whose owner is gone. Imports neither Prefect nor Ray.

A process belongs to a run if it, or the leader of its session, or an ancestor of it,

* is a service or the watchdog that `services.json` of the run names, by pid and start time, or
* was started as one: MARK in its environment names the run's services, or
* is an actor, or a server that one runs: its stdout and stderr are its log in the run's `logs/`.

That a command line or an open file names the run is not enough: it may be a person who looks at it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.run_dir import Holder, RunDir
from tasks import keeper
from tasks.servers import MARK

SERVICE = "service"
ACTOR_LOG = re.compile(r"((?:learner|rollout|validation)-\d+(?:-server-\d+)?)\.log")


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A live process of a run: `Member(pid=12, started=3456, what="rollout-0", stopped=False, command="ray::Hosted")`.
    """

    pid: int
    started: int
    what: str
    """`ray`, `prefect`, `watchdog`, `rollout-0`, `rollout-0-server-1`, `part of ray`, or `service` for one that
    services.json has lost."""
    stopped: bool
    """By SIGSTOP, or by a debugger."""
    command: str


def members(run: RunDir, *, without: Collection[int] = ()) -> list[Member]:
    """The live processes of a run, by pid; its owner, this process and the `without` are none. Linux tells all of
    them, other systems only what services.json names."""
    live = keeper.processes()
    named = _named(run.services, live) | _marked(run, live)
    found = {pid: what for pid, what in named.items() if pid not in without and pid != os.getpid()}
    grown = True
    while grown:
        heads = dict(found)
        for pid, known in live.items():
            if pid in found or pid in without or pid == os.getpid():
                continue
            leader = known.session if _leads(known.session, heads, live, known.started) else known.parent
            if leader in heads and leader != 1:
                what = heads[leader]
                found[pid] = what if what.startswith("part of ") else f"part of {what}"
        grown = len(found) > len(heads)
    return [Member(pid=pid, started=live[pid].started, what=found[pid], stopped=live[pid].state in "Tt",
                   command=_command(pid)) for pid in sorted(found)]


def members_but_owner(run: RunDir, owner: Holder | None) -> list[Member]:
    return members(run, without=() if owner is None or not owner.here else (owner.pid,))


def homeless(runs: Path) -> dict[str, list[int]]:
    """Marked processes of runs whose directory was removed under them, by that directory."""
    found: dict[str, list[int]] = {}
    for pid in sorted(keeper.processes()) if keeper.PROC else ():
        for word in environ_of(pid):
            name, _, place = word.decode(errors="replace").partition("=")
            if name == MARK and Path(place).is_relative_to(runs) and not Path(place).exists():
                found.setdefault(str(Path(place).parent), []).append(pid)
    return found


def environ_of(pid: int) -> list[bytes]:
    """`[b"HOME=/root", ...]` as the process was started; empty where it cannot be told."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or somebody else's
        return []


def _leads(session: int, heads: Collection[int], live: dict[int, keeper.Stat], started: int) -> bool:
    """Whether one of these leads this session, whose number nobody else has had since."""
    return session in heads and session in live and live[session].session == session \
        and started >= live[session].started


def _named(state_dir: Path, live: dict[int, keeper.Stat]) -> dict[int, str]:
    """What the state file names, also what a dead leader has left in its session."""
    state = keeper.read_state(state_dir)
    if state is None or state["boot_id"] != keeper.boot_id():
        return {}
    leaders = {name: (p["pid"], p["started"]) for name, p in state["processes"].items()}
    if (watchdog := state.get("keeper")) is not None and watchdog["pid"]:
        leaders["watchdog"] = (watchdog["pid"], watchdog["started"])
    found: dict[int, str] = {}
    for name, (pid, started) in leaders.items():
        for member, _ in keeper.session_members(pid, started):
            if member in live:
                found[member] = name if member == pid else f"part of {name}"
    return found


def _marked(run: RunDir, live: dict[int, keeper.Stat]) -> dict[int, str]:
    """What carries the mark of this run's services, or writes the log of one of its actors."""
    if not keeper.PROC:
        return {}
    mark, logs = f"{MARK}={run.services}".encode(), str(run.logs)
    found: dict[int, str] = {}
    for pid in live:
        try:
            out, err = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2))
        except OSError:  # gone meanwhile, or somebody else's
            continue
        place, _, name = out.rpartition("/")
        if out == err and place == logs and (actor := ACTOR_LOG.fullmatch(name)) is not None:
            found[pid] = actor[1]
        elif mark in environ_of(pid):
            found[pid] = SERVICE
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return ""


def end(found: Sequence[Member], grace_s: float = keeper.GRACE_S) -> list[Member]:
    """SIGTERM to each, SIGKILL to what is left after `grace_s`, by pid and start time. Returns those that stayed."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        for member in _alive(found):
            keeper.signal_process(member.pid, member.started, number)
        until = time.monotonic() + wait_s
        while _alive(found) and time.monotonic() < until:
            time.sleep(0.05)
    return _alive(found)


def _alive(found: Sequence[Member]) -> list[Member]:
    return [member for member in found if keeper.is_alive(member.pid, member.started)]
