"""reinforce_plus_plus: the discounted reward to go, whitened over the claim's tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import ReturnAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, Ints, whiten


def rewards_to_go(reward_N: Floats, tokens_N: Ints, gamma: float) -> Floats:
    """G_t = r_t + gamma G_{t+1} over the loss tokens of each answer, `[K]`: the reward stands behind the last one, and
    masked spans pass through undiscounted."""
    end_N = np.cumsum(tokens_N)
    behind_K = np.repeat(end_N, tokens_N) - 1 - np.arange(int(tokens_N.sum()))  # loss tokens that follow
    return np.repeat(reward_N, tokens_N) * gamma ** behind_K.astype(np.float64)


def token_rewards_to_go(reward_K: Floats, tokens_N: Ints, gamma: float) -> Floats:
    """The same where every loss token has a reward of its own, `[K]`."""
    to_go_K, at = np.zeros(len(reward_K)), len(reward_K) - 1
    for tokens in reversed(tokens_N.tolist()):
        total = 0.0
        for _ in range(tokens):
            total = reward_K[at] + gamma * total
            to_go_K[at] = total
            at -= 1
    return to_go_K


def reinforce_plus_plus(reward_N: Floats, tokens_N: Ints, *, gamma: float = 1.0) -> NDArray[np.float32]:
    """The rewards to go, whitened over all of them. REINFORCE++ (arXiv 2501.03262). Returns `[K]`."""
    returns_K = rewards_to_go(reward_N, tokens_N, gamma)
    return whiten(returns_K, np.ones(len(returns_K), np.int64)).astype(np.float32)


def estimate_tokens(answers: Answers, settings: ReturnAdvantage) -> NDArray[np.float32]:
    """`reinforce_plus_plus` by its settings."""
    if answers.token_reward_K is None:
        return reinforce_plus_plus(answers.reward_N, answers.tokens_N, gamma=settings.gamma)
    to_go_K = token_rewards_to_go(answers.token_reward_K, answers.tokens_N, settings.gamma)
    return whiten(to_go_K, np.ones(len(to_go_K), np.int64)).astype(np.float32)
