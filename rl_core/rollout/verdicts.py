"""The verdict of a group filter of a user's: what the function is given, and what it may return (docs/hooks.md 2).

Knows no process and no file: the function runs in a child of the rollout worker (rewards/child.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the child that imports this needs no NumPy
    from rl_core.types import TrajectoryGroup

REASON = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""A reason is a short name: it is counted, and shown beside those of Headway."""
UNNAMED = "rejected"
"""The reason of a filter that only says no."""


def facts_of(group: TrajectoryGroup) -> dict[str, Any]:
    """What a filter is given, plain JSON values: `{"rewards": [1.0, 0.0], "lengths": [12, 40], ...}`, one entry per
    landed answer in order of the answers; of a session the sum of the lengths, and how its last trajectory ended."""
    prompt = group.lease.prompt
    sessions = [list(of_it) for _, of_it in groupby(enumerate(group.trajectories), key=lambda each: each[0]
                                                    if each[1].session is None else (each[1].session,))]
    answers = [of_it[-1][1] for of_it in sessions]
    parts = sorted({name for t in answers for name in t.score.parts})
    return {
        "group_id": group.lease.group_id, "data_source": prompt.data_source, "truth": prompt.answer,
        "columns": dict(prompt.columns), "n_expected": group.lease.n_expected,
        "rewards": [t.score.reward for t in answers], "correct": [t.score.correct for t in answers],
        "extracted": [t.score.extracted for t in answers],
        "parts": {name: [t.score.parts.get(name) for t in answers] for name in parts},
        "lengths": [sum(len(t.token_ids_L) for _, t in of_it) for of_it in sessions],
        "finish_reasons": [t.finish_reason for t in answers]}


def reason_of(value: Any) -> str | None:
    """Why a group is left out; None = it is kept. `True` keeps, `False` leaves out as `rejected`, a text is the reason.

    Raises ValueError for anything else, `None` included: a function that forgets to return says nothing.
    """
    plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if isinstance(plain, bool):
        return None if plain else UNNAMED
    if isinstance(plain, str) and REASON.fullmatch(plain):
        return plain
    raise ValueError(f"the verdict is {repr(value)[:80]}; return True to keep the group, False or a short name "
                     "([A-Za-z0-9_.-], at most 64 characters) to leave it out")


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A filter that takes requests, in the form of `Bound` of rewards/signatures.py."""

    function: Callable[[Any], Any]
    signature: str = "group_filter"

    @property
    def needs(self) -> list[str]:
        """No column of a row is needed to call it."""
        return []

    def call(self, request: dict[str, Any]) -> Any:
        return self.function(request["group"])

    def score(self, value: Any) -> dict[str, Any]:
        return {"reason": reason_of(value)}
