"""remax: the reward minus that of a greedy answer to the same prompt. Refused in the plan: nothing samples it yet."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.learner.advantages.answers import Floats


def remax(reward_N: Floats, greedy_N: Floats) -> NDArray[np.float32]:
    """S_i - S of the greedy answer, for all tokens: the reward to go is the answer's. ReMax (arXiv 2310.10505).

    `greedy_N`: reward of the greedy answer to each answer's prompt. Returns `[N]`.
    """
    return (reward_N - greedy_N).astype(np.float32)
