"""grpo_passk: only the best answer of a group has an advantage."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import BestOfGroupAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, alone, centred, deviation


def grpo_passk(reward_N: Floats, group_N: Ints, *, eps: float = 1e-6, normalize_by_std: bool = True,
               group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """max - second max of the group for its best answer, / (sigma_g + eps) if normalising; 0 for the others.

    Of several best answers the lead is 0. Groups of one as in `grpo`. arXiv 2503.19595. Returns `[N]`.
    """
    centred_N, size_N = centred(reward_N, group_N)
    order = np.lexsort((reward_N, group_N))  # by group, then by reward
    last = np.flatnonzero(np.diff(group_N[order], append=-1))  # the best of each group
    several = last[size_N[order[last]] > 1]
    lead_N = np.zeros_like(reward_N)
    lead_N[order[several]] = reward_N[order[several]] - reward_N[order[several - 1]]
    if normalize_by_std:
        lead_N = lead_N / (deviation(centred_N, group_N, size_N) + eps)
    return alone(lead_N, reward_N, size_N, group_of_one)


def estimate(answers: Answers, settings: BestOfGroupAdvantage) -> NDArray[np.float32]:
    """`grpo_passk` by its settings."""
    return grpo_passk(answers.reward_N, answers.group_N, eps=settings.eps, normalize_by_std=settings.normalize_by_std,
                      group_of_one=settings.group_of_one)
