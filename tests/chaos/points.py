"""Points of the store's protocol, and how a process is made to kill itself at one of them.

A point is a call of `os` on certain paths, before or after it: the code under test runs as it is, and knows nothing of
this. A process that is armed dies by SIGKILL at the first such call; whether it did is told by how it ended.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NEVER, ANY_TIME = "never", "any time"


@dataclass(frozen=True, slots=True)
class Point:
    """`os.<call>` on a path that matches; of `link` and `rename` on `<source> -> <target>`."""

    call: str
    path: str
    before: bool = False


WRITER: dict[str, Point] = {
    "tmp created": Point("open", r"/\.tmp/"),
    "tmp half written": Point("writev", "half"),
    "tmp written": Point("writev", "whole"),
    "tmp synced": Point("fsync", r"/\.tmp/"),
    "before the link": Point("link", r"\.arrow$", before=True),
    "linked": Point("link", r"\.arrow$"),
    "tmp removed": Point("unlink", r"/\.tmp/"),
    "before the hint": Point("write", r"^pipe:", before=True),
    "after the hint": Point("write", r"^pipe:"),
}
CLAIMANT: dict[str, Point] = {
    "before the claim": Point("link", r"/ledger/learner/step-\d+\.json$", before=True),
    "after the claim": Point("link", r"/ledger/learner/step-\d+\.json$"),
}
OWNER: dict[str, Point] = CLAIMANT | {
    "before the version's name": Point("rename", r"-> .*/weights/v-\d+$", before=True),
    "version's bytes without manifest": Point("rename", r"-> .*/weights/v-\d+$"),
    "version published": Point("link", r"/versions/v-\d+\.json$"),
    "before the record": Point("link", r"/records/step-\d+\.json$", before=True),
    "after the record": Point("link", r"/records/step-\d+\.json$"),
    "checkpoint without manifest": Point("link", r"/checkpoints/.*/manifest\.json$", before=True),
    "between manifest and rename": Point("rename", r"-> .*/checkpoints/n-\d+$", before=True),
    "checkpoint renamed": Point("rename", r"-> .*/checkpoints/n-\d+$"),
    "old checkpoint half removed": Point("rename", r"/checkpoints/n-\d+ ->"),
    "before the snapshot": Point("link", r"/snap-\d+\.arrow$", before=True),
    "snapshot written": Point("link", r"/snap-\d+\.arrow$"),
    "before the retirement's record": Point("link", r"/retired-[\d-]+\.json$", before=True),
    "retirement recorded": Point("link", r"/retired-[\d-]+\.json$"),
    "retired shards half removed": Point("unlink", r"/\d+\.arrow$"),
}
FORKER: dict[str, Point] = {
    "fork's ledger half linked": Point("link", r"-> .*/\.run~.*/ledger/"),
    "fork's shards half linked": Point("link", r"-> .*/\.run~.*/streams/"),
    "before the fork's name": Point("rename", r"-> .*/run~\d+$", before=True),
    "fork named": Point("rename", r"-> .*/run~\d+$"),
}


def die() -> None:
    """SIGKILL to this process: no `finally`, no flush, no goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(name: str, points: dict[str, Point]) -> None:
    """Make this process kill itself at a point; a name that is none of `points` leaves it as it is."""
    if (point := points.get(name)) is None:
        return
    if point.call == "writev":
        _arm_writev(half=point.path == "half")
        return
    real: Callable[..., Any] = getattr(os, point.call)
    pattern = re.compile(point.path)

    def call(*args: Any, **kwargs: Any) -> Any:
        met = pattern.search(_path(point.call, args)) is not None
        if met and point.before:
            die()
        result = real(*args, **kwargs)
        if met:
            die()
        return result

    setattr(os, point.call, call)


def _arm_writev(*, half: bool) -> None:
    real = os.writev

    def writev(fd: int, pieces: list[memoryview]) -> int:
        real(fd, pieces[:len(pieces) // 2] if half else pieces)
        die()
        return 0

    os.writev = writev


def _path(call: str, args: tuple[Any, ...]) -> str:
    if call in ("fsync", "write"):
        return os.readlink(f"/proc/self/fd/{args[0]}")
    return f"{args[0]} -> {args[1]}" if call in ("link", "rename") else str(args[0])
