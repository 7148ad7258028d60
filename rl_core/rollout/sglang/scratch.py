"""Files that a server leaves outside a run directory: sockets in its TMPDIR, and names in shared memory.

Both outlive SIGKILL, which is how most servers end, with the worker that they belong to. So TMPDIR is a directory whose
name has the owner's pid, with links to the names in shared memory; whoever starts a server removes those of owners that
are gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

PREFIX = "headway-sglang-"
SHARED = re.compile(r"/dev/shm/(?:sem\.mp-\w+|sglang_loads_\w+\.shm)$", re.MULTILINE)


def make_scratch() -> Path:
    """A directory with a short name (a socket's has at most 107 bytes) for one server of this process."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        with contextlib.suppress(ValueError, PermissionError):  # of somebody else's
            try:
                os.kill(int(left.name.removeprefix(PREFIX).partition("-")[0]), 0)
            except ProcessLookupError:
                remove_scratch(left)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


def note_shared(scratch: Path, group: int) -> None:
    """Remember what the processes of this process group hold in shared memory. Linux alone tells."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            for name in set(SHARED.findall((process / "maps").read_text())):
                (scratch / f"shared-{Path(name).name}").symlink_to(name)


def remove_scratch(scratch: Path) -> None:
    """With what its links name."""
    for link in scratch.glob("shared-*"):
        with contextlib.suppress(OSError):
            link.readlink().unlink()
    shutil.rmtree(scratch, ignore_errors=True)
