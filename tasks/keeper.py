"""The watchdog of private services, and the few things about processes that it needs. Standard library only.

Run as a file, not as a module (`python -I -S keeper.py STATE_DIR NAME`): a few megabytes, in a session of its own. A
process is named by its pid and its start time, so that a pid used again by somebody else is never signalled. A service
and all that it starts share one session (`setsid`); the kernel gives its number to nobody else while it has members.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

PROC = os.path.exists("/proc/self/stat")
"""Linux. Elsewhere processes are asked of `ps`."""
STATE = "services.json"
HEARTBEAT = "heartbeat"
LOCK = "services.lock"
GRACE_S = 5.0
"""After SIGTERM, before SIGKILL, when the watchdog ends services."""
SAY_S = 60.0
"""How often the watchdog says, in its log, that somebody keeps it from ending them."""


class Stat(NamedTuple):
    """What the system says of a process."""

    state: str
    parent: int
    group: int
    session: int
    started: int
    """Clock ticks since boot; seconds since 1970 where `ps` says it."""

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def stat(pid: int) -> Stat | None:
    """None if there is no such process; a zombie has one that is not alive."""
    if not PROC:
        return ps("-p", str(pid)).get(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def processes() -> dict[int, Stat]:
    """All live processes of this machine (of this pid namespace)."""
    found = {int(name): stat(int(name)) for name in os.listdir("/proc") if name.isdigit()} if PROC else ps("-A")
    return {pid: known for pid, known in found.items() if known is not None and known.alive}


def ps(*which: str) -> dict[int, Stat]:
    """The same by `ps`, which every Unix has (macOS has no /proc): `ps("-A")`, `ps("-p", "123")`."""
    import calendar
    import subprocess  # here, since the watchdog on Linux does without

    columns = [word for name in ("pid", "ppid", "pgid", "stat", "lstart") for word in ("-o", f"{name}=")]
    done = subprocess.run(["ps", *which, *columns], capture_output=True, text=True, timeout=30,
                          env={"PATH": "/bin:/usr/bin", "LC_ALL": "C", "TZ": "UTC"})
    found: dict[int, Stat] = {}
    for line in done.stdout.splitlines():
        pid, parent, group, state, *started = line.split()
        with suppress(OSError):  # gone meanwhile, or somebody else's whose session is not told
            at = calendar.timegm(time.strptime(" ".join(started), "%a %b %d %H:%M:%S %Y"))
            found[int(pid)] = Stat(state[0], int(parent), int(group), os.getsid(int(pid)), at)
    return found


def start_time(pid: int) -> int | None:
    """Start time of a live process (`Stat.started`); None for a dead one or a zombie."""
    known = stat(pid)
    return known.started if known is not None and known.alive else None


def is_alive(pid: int, started: int) -> bool:
    return start_time(pid) == started


def session_members(leader: int, started: int) -> list[tuple[int, int]]:
    """`(pid, start time)` of the live processes in the session that `leader` made at `started`, the leader included."""
    held = stat(leader)
    if held is not None and held.started != started:
        return []  # the number belongs to somebody else now: the session has ended
    return [(pid, p.started) for pid, p in processes().items() if p.session == leader and p.started >= started]


def signal_process(pid: int, started: int, signum: int) -> None:
    """Signal exactly this process, if it is still there."""
    if is_alive(pid, started):
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def end_sessions(leaders: Sequence[tuple[int, int]], grace_s: float) -> list[int]:
    """SIGTERM to each leader, then SIGKILL to what is left of its session after `grace_s`. Returns pids that stayed.

    What a leader left that is dead already has nobody to end it, and gets SIGKILL at once.
    """
    for leader in leaders:
        if is_alive(*leader):
            signal_process(*leader, signal.SIGTERM)
        else:
            for member in session_members(*leader):
                signal_process(*member, signal.SIGKILL)
    until = time.monotonic() + grace_s
    while (left := _left(leaders)) and time.monotonic() < until:
        _reap(leaders)
        time.sleep(0.05)
    for pid, started in left:
        signal_process(pid, started, signal.SIGKILL)
    until = time.monotonic() + 2.0
    while (left := _left(leaders)) and time.monotonic() < until:
        _reap(leaders)
        time.sleep(0.05)
    _reap(leaders)
    return [pid for pid, _ in left]


def _left(leaders: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [member for pid, started in leaders for member in session_members(pid, started)]


def _reap(leaders: Sequence[tuple[int, int]]) -> None:
    """Collect dead leaders that are children of this process."""
    for pid, _ in leaders:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


class LockTaken(Exception):
    """Another process finds, starts or ends these services now. The message names the lock and the process."""


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """One at a time: whoever finds, starts or ends the services of `state_dir`. Never waits: tasks/turns.py does.

    Raises LockTaken.
    """
    with open(state_dir / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockTaken(f"{state_dir / LOCK}: {lock_holder(state_dir)} has it") from None
        file.truncate(0)
        file.write(f"{os.getpid()} {start_time(os.getpid())}\n")
        file.flush()
        yield


def lock_holder(state_dir: Path) -> str:
    """Who has the lock, for people: `pid 12`, and whether it is stopped."""
    try:
        pid, started = map(int, (state_dir / LOCK).read_text().split())
    except (OSError, ValueError):
        return "a process that has not said who it is"  # between two holders, or it died as it took it
    known = stat(pid)
    if known is None or known.started != started or not known.alive:
        return f"a process that cannot be seen from here (it calls itself pid {pid})"
    return f"pid {pid}" + (" (stopped by SIGSTOP)" if known.state == "T" else "")


def read_state(state_dir: Path) -> dict[str, Any] | None:
    try:
        return json.loads((state_dir / STATE).read_text())
    except (FileNotFoundError, ValueError):
        return None


def leaders_of(state: dict[str, Any]) -> list[tuple[int, int]]:
    """`(pid, start time)` of the service processes named by a state file of this boot."""
    if state["boot_id"] != boot_id():
        return []
    return [(p["pid"], p["started"]) for p in state["processes"].values()]


def end_services(state_dir: Path, state: dict[str, Any], grace_s: float) -> list[int]:
    """End what a state file names, keep Ray's logs, remove its scratch directory and the state file."""
    left = end_sessions(leaders_of(state), grace_s)
    clear_scratch(state_dir, state)
    (state_dir / STATE).unlink(missing_ok=True)
    return left


def clear_scratch(state_dir: Path, state: dict[str, Any]) -> None:
    """Keep the logs of a Ray head that is gone and remove its scratch directory."""
    scratch, state["scratch"] = state.get("scratch"), None
    if scratch is None:
        return
    with suppress(OSError, shutil.Error):
        shutil.copytree(Path(scratch) / "session_latest" / "logs", state_dir / "ray-logs", dirs_exist_ok=True,
                        symlinks=True)
    shutil.rmtree(scratch, ignore_errors=True)


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _heartbeat(state_dir: Path) -> int:
    try:
        return (state_dir / HEARTBEAT).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def watch(state_dir: Path, name: str) -> None:
    """End the services when their owner has not been heard for `owner_timeout_s`; return when they are gone.

    Consumes: the heartbeat file's time of change (any change counts, so a clock that jumps does no harm).
    Waits for: silence. Unblocked by: the end of the services, or a state file that names another watchdog than `name`.
    """
    heard, at = _heartbeat(state_dir), time.monotonic()
    say_at = 0.0
    while (state := _mine(state_dir, name)) is not None:
        beat = _heartbeat(state_dir)
        if beat != heard:
            heard, at = beat, time.monotonic()
        timeout_s = float(state["owner_timeout_s"])
        silent = time.monotonic() - at > timeout_s
        if silent or _all_dead(state):
            try:
                with locked(state_dir):  # an owner that starts now holds it, and is heard, or starts from nothing
                    state = _mine(state_dir, name)
                    if state is not None and (_heartbeat(state_dir) == heard if silent else _all_dead(state)):
                        end_services(state_dir, state, GRACE_S)
                        return
            except LockTaken as taken:
                if time.monotonic() >= say_at:
                    print(f"the services of {state_dir} are not ended yet: {taken}", file=sys.stderr, flush=True)
                    say_at = time.monotonic() + SAY_S
        time.sleep(min(1.0, timeout_s / 10))


def _mine(state_dir: Path, name: str) -> dict[str, Any] | None:
    state = read_state(state_dir)
    return state if state is not None and state["keeper"]["name"] == name else None


def _all_dead(state: dict[str, Any]) -> bool:
    return not state["starting"] and not any(is_alive(pid, started) for pid, started in leaders_of(state))


if __name__ == "__main__":
    watch(Path(sys.argv[1]), sys.argv[2])
