"""rloo: the reward minus the mean of the group's others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import GroupAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, alone, centred


def rloo(reward_N: Floats, group_N: Ints, *, group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """Leave-one-out: the reward minus the mean of the group's others, = N/(N-1) (S_i - mu_g).

    Ahmadian et al. (arXiv 2402.14740) section 2. Groups of one as in `grpo`. Returns `[N]`.
    """
    centred_N, size_N = centred(reward_N, group_N)
    return alone(centred_N * size_N / np.maximum(size_N - 1, 1), reward_N, size_N, group_of_one)


def estimate(answers: Answers, settings: GroupAdvantage) -> NDArray[np.float32]:
    """`rloo` by its settings."""
    return rloo(answers.reward_N, answers.group_N, group_of_one=settings.group_of_one)
