"""Scores of a task of the package reasoning-gym (extra `tasks`), for rows of environments/reasoning.py.

Runs in a process of its own.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any, cast

RIGHT = 1.0 - 1e-9
"""Tasks give parts of a point for parts of an answer; a whole point is a right one."""
OF_TUPLES = ("arc_agi", "rearc")
"""Tasks that compare with grids of tuples, which columns carry as lists. The others take their entries as JSON."""


def scorer_of(name: str) -> Callable[..., dict[str, Any]]:
    """The reward of one task: `scorer_of("leg_counting")(text, prompt=..., truth=..., metadata={...})`.

    What stands between the last `<answer>` and `</answer>` is scored, or the whole text where there are no such tags.
    Raises ValueError for a task that is not registered.
    """
    score_answer: Any = library_with(name).get_score_answer_fn(name)
    tagged: Any = importlib.import_module("reasoning_gym.utils").extract_answer

    def score(answer: str, truth: str, prompt: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        extracted = tagged(answer)
        extracted = answer.strip() if extracted is None else extracted
        facts = _as_tuples(metadata) if name in OF_TUPLES else metadata
        entry = {"question": prompt, "answer": truth or None, "metadata": facts}
        reward = float(score_answer(answer=extracted, entry=entry))
        return {"reward": reward, "correct": reward >= RIGHT, "extracted": extracted}

    return score


def library_with(name: str) -> Any:
    """The package. Raises ValueError, with the nearest names, where it has no such task."""
    library: Any = importlib.import_module("reasoning_gym")
    known: list[str] = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, 5, 0.4) or known[:5])
        raise ValueError(f"there is no task {name!r} among the {len(known)} of reasoning-gym; there are {near}, ...")
    return library


def _as_tuples(value: Any) -> Any:
    """Every list in it as a tuple."""
    if isinstance(value, dict):
        return {key: _as_tuples(item) for key, item in cast("dict[str, Any]", value).items()}
    return tuple(_as_tuples(item) for item in cast("list[Any]", value)) if isinstance(value, list) else value
