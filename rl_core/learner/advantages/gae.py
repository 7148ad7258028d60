"""gae: generalised advantages from a critic's values. Refused in the plan: there is no critic yet."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.learner.advantages.answers import Floats


def gae(reward_L: Floats, value_L: Floats, mask_L: NDArray[np.bool_], *, gamma: float = 1.0, lam: float = 1.0,
        last_value: float = 0.0) -> tuple[Floats, Floats]:
    """Advantages and returns of one answer's tokens, `[L]`; 0 where the mask is.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}; masked tokens are skipped, so that the next
    value carries through them. `last_value`: V behind the last token, of an answer that was cut; 0 of a finished one.
    Returns A, which a claim then whitens over all its loss tokens, and A + V. Schulman et al. (arXiv 1506.02438).
    """
    advantage_L, return_L = np.zeros(len(reward_L)), np.zeros(len(reward_L))
    following, advantage = last_value, 0.0
    for t in reversed(np.flatnonzero(mask_L).tolist()):
        advantage = reward_L[t] + gamma * following - value_L[t] + gamma * lam * advantage
        advantage_L[t], return_L[t], following = advantage, advantage + value_L[t], value_L[t]
    return advantage_L, return_L
