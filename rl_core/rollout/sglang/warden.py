"""The parent of a server's process: ends it, and all that it started, when its owner is gone. Standard library only.

Run as a file (`python -I -S warden.py OWNER_PID REPORT_FD COMMAND...`): a few megabytes, leader of a process group that
it shares with the server. A process that dies with SIGKILL tells nobody, so the warden looks for its owner's end; a
warden that is killed itself takes the server along (Linux: PR_SET_PDEATHSIG), and the server its own children.

    consumes: SIGTERM (end it, with grace), SIGUSR1 (end it now), the end of the server, the end of the owner
    waits for: any of them
    unblocked by: the clock, LOOK_S at most
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

LOOK_S = 0.1
GRACE_S = 8.0
"""After SIGTERM, before SIGKILL: a server that is idle needs 4 to 8 s."""
PR_SET_PDEATHSIG = 1


class Warden:
    """One server, from its start to its end."""

    def __init__(self, owner: int, command: list[str]) -> None:
        self._owner = owner
        self._ends_at: float | None = None
        self._killed = False
        libc = ctypes.CDLL(None)
        signal.signal(signal.SIGTERM, self._asked_to_end)
        signal.signal(signal.SIGUSR1, self._asked_to_end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who says what is to end

        def die_with_the_warden() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if sys.platform == "linux":
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_the_warden)

    @property
    def pid(self) -> int:
        return self._server.pid

    def watch(self) -> str:
        """Until the server has ended. Returns how: `exit code 1`, `signal 9`, `killed by its warden`."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = self._server.wait(LOOK_S)
                if self._killed:
                    return "killed by its warden"
                return f"exit code {code}" if code >= 0 else f"signal {-code}"
            if os.getppid() != self._owner:
                self._end(0.0)
            if self._ends_at is not None and time.monotonic() >= self._ends_at and self._server.poll() is None:
                self._killed = True
                self._server.kill()

    def _asked_to_end(self, number: int, _frame: object) -> None:
        self._end(GRACE_S if number == signal.SIGTERM else 0.0)

    def _end(self, grace_s: float) -> None:
        if self._ends_at is None and grace_s:
            self._server.terminate()
        self._ends_at = min(self._ends_at or float("inf"), time.monotonic() + grace_s)


def main() -> None:
    """Start the server, report its pid, watch it to its end, and end what it left, this process included."""
    owner, report = int(sys.argv[1]), int(sys.argv[2])
    warden = Warden(owner, sys.argv[3:])
    with suppress(OSError):  # an owner that is gone already reads nothing
        os.write(report, f"{warden.pid}\n".encode())
    os.close(report)
    how = warden.watch()
    print(f"warden: the server (pid {warden.pid}) ended: {how}", file=sys.stderr, flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # what the server left, and this process


if __name__ == "__main__":
    main()
