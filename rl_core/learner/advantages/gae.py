"""gae: generalised advantages from a critic's values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import CriticAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, whiten


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValueFacts:
    """What the critic says of the claim at the start of the step."""

    value_K: Floats
    """Before every loss token."""
    behind_N: Floats
    """Behind the last loss token of every answer; read of those that were cut."""
    cut_N: NDArray[np.bool_]
    """Answers cut at the limit: what would have followed is worth V, where of a finished one it is worth 0."""


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


def estimate_from_values(answers: Answers, values: ValueFacts,
                         settings: CriticAdvantage) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Advantages, whitened over all loss tokens of the claim, and the returns that the critic learns, both `[K]`."""
    reward_K = answers.rewards_of_tokens()
    advantage_K, return_K, begin = np.zeros(len(reward_K)), np.zeros(len(reward_K)), 0
    for i in range(len(answers.tokens_N)):
        tokens = int(answers.tokens_N[i])
        mine = slice(begin, begin + tokens)
        advantage_K[mine], return_K[mine] = gae(
            reward_K[mine], values.value_K[mine], np.ones(tokens, np.bool_), gamma=settings.gamma, lam=settings.lam,
            last_value=float(values.behind_N[i]) if values.cut_N[i] else 0.0)
        begin += tokens
    whitened_K = whiten(advantage_K, np.ones(len(advantage_K), np.int64))
    return whitened_K.astype(np.float32), return_K.astype(np.float32)
