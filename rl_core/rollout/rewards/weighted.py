"""Several rewards of one answer, added with their weights (`scoring.parts`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rl_core.errors import RewardError
from rl_core.reward_settings import MAIN
from rl_core.types import Prompt, Score


class _Scorer(Protocol):
    def __call__(self, prompt: Prompt, text: str) -> Score: ...

    def close(self) -> None: ...


def add_up(main: Score, weight: float, more: Sequence[tuple[str, float, Score]]) -> Score:
    """sum of weight x reward; each reward is a part of its name, the first one `main`, beside the parts that it has.

    What is right, and the extracted answer, are those of the first. Example: main 1.0 at weight 1, `short` -20 at
    weight 0.01 -> reward 0.8, parts {"main": 1.0, "short": -20.0}. A part `p` of the reward `short` is `short.p`.
    Raises RewardError for a sum that float32 does not hold.
    """
    parts = {**main.parts, MAIN: main.reward}
    terms = [weight * main.reward]
    for name, factor, score in more:
        parts |= {name: score.reward} | {f"{name}.{part}": value for part, value in score.parts.items()}
        terms.append(factor * score.reward)
    total = math.fsum(terms)
    if not abs(total) <= float(np.finfo(np.float32).max):
        raise RewardError(f"the weighted sum of the rewards is {total}; it must be finite in float32 ({parts})")
    return Score(reward=total, parts=parts, correct=main.correct, extracted=main.extracted)


class WeightedScorer:
    """Asks every reward, one after the other. One that fails fails the answer: no sum is made without it."""

    def __init__(self, main: _Scorer, weight: float,
                 more: Sequence[tuple[str, float, _Scorer]]) -> None:
        self._main, self._weight, self._more = main, weight, list(more)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        first = self._main(prompt, text)
        return add_up(first, self._weight, [(name, weight, scorer(prompt, text))
                                            for name, weight, scorer in self._more])

    def close(self) -> None:
        """End every reward's processes. Idempotent."""
        for scorer in (self._main, *(scorer for _, _, scorer in self._more)):
            scorer.close()
