"""Reading a run directory for people: what cannot be read is a gap that is named, and the rest is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rl_core.errors import BrokenFile, FormatTooNew

T = TypeVar("T")
Gaps = list[str]
"""What is missing, a line each. Functions that take `gaps: Gaps | None` raise where it is None."""


def merged(*gaps: Gaps) -> Gaps:
    """Each gap once, in order."""
    return list(dict.fromkeys(gap for each in gaps for gap in each))


def found(read: Callable[[], T], what: str, gaps: Gaps | None) -> T | None:
    """What `read()` returns; with `gaps`, None for a file that is absent or cannot be trusted, which is noted there.

    `what` names the file. A file of a newer Headway is no gap: FormatTooNew is always raised.
    """
    try:
        return read()
    except FormatTooNew:
        raise
    except (BrokenFile, OSError, KeyError, TypeError, ValueError) as error:  # JSON, but not what the file should hold
        if gaps is None:
            raise
        known = isinstance(error, BrokenFile) and what in str(error)
        gaps.append(str(error) if known else f"{what}: absent" if isinstance(error, FileNotFoundError)
                    else f"{what}: {type(error).__name__}: {error}")
        return None
