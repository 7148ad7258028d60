"""lite_ppo: the group's mean, the claim's deviation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import ClaimStdAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, alone, centred


def lite_ppo(reward_N: Floats, group_N: Ints, *, eps: float = 1e-6,
             group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """(S_i - mu_g) / (sigma + eps), sigma the sample deviation of all rewards of the claim.

    Liu et al., "Tricks or traps?" (arXiv 2508.08221). Groups of one as in `grpo`. Returns `[N]`.
    """
    centred_N, size_N = centred(reward_N, group_N)
    sigma = float(reward_N.std(ddof=1)) if len(reward_N) > 1 else 0.0
    return alone(centred_N / (sigma + eps), reward_N, size_N, group_of_one)


def estimate(answers: Answers, settings: ClaimStdAdvantage) -> NDArray[np.float32]:
    """`lite_ppo` by its settings."""
    return lite_ppo(answers.reward_N, answers.group_N, eps=settings.eps, group_of_one=settings.group_of_one)
