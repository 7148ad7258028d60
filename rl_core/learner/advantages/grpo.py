"""grpo: the reward against the mean of its group, in deviations of the group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import GroupAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, alone, centred, deviation


def grpo(reward_N: Floats, group_N: Ints, *, eps: float = 1e-6, normalize_by_std: bool = True,
         group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """GRPO: (S_i - mu_g) / (sigma_g + eps), sigma_g the sample deviation (N_g - 1).

    DeepSeekMath (arXiv 2402.03300) section 4.1.2; `normalize_by_std=False` is Dr.GRPO (arXiv 2503.20783) section 3.2.
    A group of one has advantage 0, or its reward (`group_of_one="raw"`). Returns `[N]`.
    """
    centred_N, size_N = centred(reward_N, group_N)
    advantage_N = centred_N / (deviation(centred_N, group_N, size_N) + eps) if normalize_by_std else centred_N
    return alone(advantage_N, reward_N, size_N, group_of_one)


def estimate(answers: Answers, settings: GroupAdvantage) -> NDArray[np.float32]:
    """`grpo` by its settings."""
    return grpo(answers.reward_N, answers.group_N, eps=settings.eps, normalize_by_std=settings.normalize_by_std,
                group_of_one=settings.group_of_one)
