"""maxrl: the reward relative to the mean of its group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import PlainAdvantage
from rl_core.errors import ConfigError
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, alone, centred


def maxrl(reward_N: Floats, group_N: Ints, *, group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """(S_i - mu_g) / mu_g; 0 for the whole group where mu_g is 0. Groups of one as in `grpo`. Returns `[N]`.

    Maximum-likelihood reinforcement learning. Raises ConfigError for a negative reward.
    """
    if len(reward_N) and reward_N.min() < 0:
        raise ConfigError(f"learner.advantage.name: maxrl divides by the mean reward, and answer "
                          f"{int(reward_N.argmin())} of the claim has reward {reward_N.min():g}; use rewards of at "
                          "least 0, or grpo")
    centred_N, size_N = centred(reward_N, group_N)
    mean_N = reward_N - centred_N
    return alone(np.where(mean_N > 0, centred_N / np.where(mean_N > 0, mean_N, 1.0), 0.0), reward_N, size_N,
                 group_of_one)


def estimate(answers: Answers, settings: PlainAdvantage) -> NDArray[np.float32]:
    """`maxrl` by its settings."""
    return maxrl(answers.reward_N, answers.group_N, group_of_one=settings.group_of_one)
