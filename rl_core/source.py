"""Which source this is: imported where a run is named, so it needs no torch."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


@cache
def source_commit() -> str:
    """Commit of the source tree this package is imported from, with `+` if it was changed; `unknown` outside git."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # not merely installed inside somebody's repository
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--untracked-files=no", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    here = str(Path(__file__).resolve().parent)
    return subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, timeout=10,
                          check=True).stdout.strip()
