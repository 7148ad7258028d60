"""Mathematical equality by the package math-verify (extra `tasks`): `1/2`, `0.5` and `\\frac{1}{2}` are one answer.

Runs in the main thread of a process of its own: the package limits itself by alarms, and its parser keeps state.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

LIMIT_S = 5
"""Alarm of one parse or one comparison, seconds."""
WORDS_LIMIT_S = 2
"""Alarm of writing an expression down."""
ENVIRONMENTS = ("\\boxed", "$", "\\(", "\\[")
"""What marks mathematics inside a text."""


def scorer() -> Callable[[str, str], dict[str, Any]]:
    """The reward, with the package loaded. The ground truth is an expression, or a text that holds one in LaTeX."""
    library: Any = importlib.import_module("math_verify")
    passed: Any = importlib.import_module("math_verify.errors").TimeoutException
    limited: Any = importlib.import_module("math_verify.utils").timeout

    def parse(text: str) -> list[Any]:
        return library.parse(text, parsing_timeout=LIMIT_S)

    def words(parsed: list[Any]) -> str | None:
        """The answer as it is counted in votes: in one form for equal expressions, if that is quick."""
        if not parsed:
            return None
        try:
            return limited(WORDS_LIMIT_S)(str)(parsed[0])
        except passed:
            return str(parsed[-1])

    def score(answer: str, truth: str) -> dict[str, Any]:
        marked = truth if any(mark in truth for mark in ENVIRONMENTS) else f"\\boxed{{{truth}}}"
        gold = parse(marked)
        if not gold:
            raise ValueError(f"the ground truth {truth[:80]!r} is no expression that math-verify can read")
        given = parse(answer)
        right = bool(given) and bool(library.verify(gold, given, timeout_seconds=LIMIT_S))
        return {"reward": float(right), "correct": right, "extracted": words(given), "parsed": bool(given)}

    return score
