"""A small role that the tests of tasks/cluster.py run as an actor; they put this directory on the actors' path."""

from __future__ import annotations

import os
import subprocess
import time

from rl_core.errors import CollectiveFailed


class Counter:
    """Counts; can fail, hang, die and have a child process, as real roles do."""

    def __init__(self, *, start: int = 0, fail: str | None = None, child: bool = False, attempt: int = 0) -> None:
        if fail is not None:
            raise ValueError(fail)
        self.count, self.made_by = start, attempt
        self.child = subprocess.Popen(["sleep", "1000"]) if child else None
        print(f"counter from {start}", flush=True)

    def add(self, n: int) -> int:
        self.count += n
        return self.count

    def child_pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def calling_attempt(self, text: str, attempt: int | None = None) -> tuple[str, int | None]:
        return text, attempt

    def surroundings(self) -> tuple[str, str, str]:
        return os.getcwd(), os.environ["OMP_NUM_THREADS"], os.environ["HEADWAY_ALLOWED_IMPORTS"]

    def fail(self, message: str) -> None:
        raise KeyError(message)

    def lose_peer(self, after_s: float) -> None:
        time.sleep(after_s)
        raise CollectiveFailed("rank 0: a collective ended without one of the other ranks")

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def die(self) -> None:
        os._exit(3)

    # what the pump asks of a rollout worker
    def lease(self, leases: list[object]) -> None:
        self.count += len(leases)

    def events(self, timeout_s: float) -> int:
        return self.count

    def cancel(self, ids: list[str]) -> dict[str, str]:
        return dict.fromkeys(ids, "unknown")

    def swap(self, version: object) -> str:
        return "digest"
