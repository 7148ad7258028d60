"""Extraction by a pattern (`scoring.pattern`), then exact match. Runs in a process of its own: a pattern can hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def scorer_of(pattern: str) -> Callable[[str, str], dict[str, Any]]:
    """A reward by this pattern: `scorer_of(r"<answer>(.*?)</answer>")(text, truth)`.

    The last match counts; its first group is the answer, or the whole match where the pattern has no group or that one
    took no part. Blanks around are left aside, as `exact` does. Without a match the reward is 0 and nothing extracted.
    """
    compiled = re.compile(pattern)

    def score(answer: str, truth: str) -> dict[str, Any]:
        last = None
        for match in compiled.finditer(answer):
            last = match
        if last is None:
            return {"reward": 0.0, "correct": False, "extracted": None}
        group = last[1] if compiled.groups else None
        extracted = (last[0] if group is None else group).strip()
        right = extracted == truth.strip()
        return {"reward": float(right), "correct": right, "extracted": extracted}

    return score
