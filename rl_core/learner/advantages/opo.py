"""opo: the reward against the mean of its group, weighted by length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import PlainAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, alone, centred, group_sums


def opo(reward_N: Floats, group_N: Ints, length_N: Ints, *, group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """S_i - b, b = sum(len_j S_j) / sum(len_j) over the group; a group of empty answers has b = 0.

    On-policy RL with optimal reward baseline (arXiv 2505.23585). Groups of one as in `grpo`. Returns `[N]`.
    """
    groups = int(group_N.max(initial=-1)) + 1
    weight_N = length_N.astype(np.float64)
    total_G = group_sums(weight_N, group_N, groups)
    baseline_G = group_sums(weight_N * reward_N, group_N, groups) / np.where(total_G > 0, total_G, 1.0)
    return alone(reward_N - baseline_G[group_N], reward_N, centred(reward_N, group_N)[1], group_of_one)


def estimate(answers: Answers, settings: PlainAdvantage) -> NDArray[np.float32]:
    """`opo` by its settings."""
    return opo(answers.reward_N, answers.group_N, answers.length_N, group_of_one=settings.group_of_one)
