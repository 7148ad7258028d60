"""reinforce_plus_plus_baseline: the reward against the mean of its group, whitened over the claim's tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import PlainAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, whiten
from rl_core.learner.advantages.grpo import grpo


def reinforce_plus_plus_baseline(reward_N: Floats, group_N: Ints, tokens_N: Ints, *,
                                 group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """S_i - mu_g, whitened. REINFORCE++-baseline (arXiv 2501.03262). Groups of one as in `grpo`. Returns `[N]`."""
    centred_N = grpo(reward_N, group_N, normalize_by_std=False, group_of_one=group_of_one)
    return whiten(centred_N.astype(np.float64), tokens_N).astype(np.float32)


def estimate(answers: Answers, settings: PlainAdvantage) -> NDArray[np.float32]:
    """`reinforce_plus_plus_baseline` by its settings."""
    return reinforce_plus_plus_baseline(answers.reward_N, answers.group_N, answers.tokens_N,
                                        group_of_one=settings.group_of_one)
