"""gpg: the centred reward, scaled up by the share of answers with a reward."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import GpgAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, GroupOfOne, Ints, alone, centred


def gpg(reward_N: Floats, group_N: Ints, *, f_norm: float = 1.0,
        group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """alpha (S_i - mu_g) / f_norm, alpha = answers of the claim / count of non-zero S (of none: 1).

    Chu et al. (arXiv 2504.02546). Groups of one as in `grpo`. Returns `[N]`.
    """
    centred_N, size_N = centred(reward_N, group_N)
    alpha = len(reward_N) / max(1, np.count_nonzero(reward_N))
    return alone(alpha * centred_N / f_norm, reward_N, size_N, group_of_one)


def estimate(answers: Answers, settings: GpgAdvantage) -> NDArray[np.float32]:
    """`gpg` by its settings."""
    return gpg(answers.reward_N, answers.group_N, f_norm=settings.f_norm, group_of_one=settings.group_of_one)
