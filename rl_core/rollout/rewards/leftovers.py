"""What calls of a reward leave behind beside their numbers, in words (rewards.md 4, 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Notes = Mapping[str, Any]
"""What the child says of loading the reward or of one call, where it watches (child.py, Watch)."""


def leftovers(loading: Notes, calls: Sequence[Notes]) -> list[str]:
    """Sentences without a subject: that it prints, and that it leaks threads. `calls`: their notes, in order.

    Threads leak where a later call still adds some: those of loading or of the first call may be a pool for all.
    """
    told: list[str] = []
    printed = [note["printed"] for note in (loading, *calls) if note.get("printed")]
    if printed:
        when = "while it is loaded" if loading.get("printed") else \
            "when it is called" if len(calls) == 1 else f"in {len(printed)} of {len(calls)} calls"
        told.append(f"prints to standard output {when}, as in {printed[0].strip()[:60]!r}; in a run that goes to the "
                    "standard error of the rollout worker")
    if any(note.get("threads") for note in calls[1:]):
        threads = [name for note in calls for name in note.get("threads", ())]
        told.append(f"leaves {len(threads)} threads alive after {len(calls)} calls, as in {threads[0]!r}; in a run "
                    "they pile up")
    return told
