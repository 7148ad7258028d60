"""gdpo: every reward part normalised by itself, then summed and whitened."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import PartsAdvantage
from rl_core.errors import ConfigError
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, whiten
from rl_core.learner.advantages.grpo import grpo


def gdpo(parts: Mapping[str, Floats], weights: Mapping[str, float], group_N: Ints, tokens_N: Ints, *,
         eps: float = 1e-6, group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """sum over parts k of w_k grpo(part k), whitened over the claim's loss tokens.

    An answer without a part (NaN) is outside that part's groups, and has no advantage of it. GDPO (arXiv 2601.05242).
    Returns `[N]`.
    """
    total_N = np.zeros(len(group_N))
    for name, weight in weights.items():
        there_N = ~np.isnan(parts[name])
        total_N[there_N] += weight * grpo(parts[name][there_N], group_N[there_N], eps=eps,
                                          group_of_one=group_of_one).astype(np.float64)
    return whiten(total_N, tokens_N).astype(np.float32)


def estimate(answers: Answers, settings: PartsAdvantage) -> NDArray[np.float32]:
    """`gdpo` by its settings. Raises ConfigError for a part that no answer of the claim has."""
    weights = {one.part: one.weight for one in settings.parts} or dict.fromkeys(sorted(answers.parts), 1.0)
    absent = sorted(set(weights) - set(answers.parts))
    if absent or not weights:
        raise ConfigError(f"learner.advantage.parts: gdpo adds up reward parts, and the claim has "
                          f"{sorted(answers.parts) or 'none'}{f', not {absent}' if absent else ''}; name parts that "
                          "the reward returns, or use grpo")
    return gdpo(answers.parts, weights, answers.group_N, answers.tokens_N, eps=settings.eps,
                group_of_one=settings.group_of_one)
