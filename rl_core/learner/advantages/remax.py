"""remax: the reward to go minus the reward of a greedy answer to the same prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import GreedyBaselineAdvantage
from rl_core.errors import ConfigError
from rl_core.learner.advantages.answers import Answers, Floats, Ints
from rl_core.learner.advantages.reinforce_plus_plus import token_rewards_to_go


def remax(token_reward_K: Floats, tokens_N: Ints, greedy_N: Floats) -> NDArray[np.float32]:
    """G_t minus S of the greedy answer, G_t = r_t + G_{t+1} over the loss tokens of each answer. ReMax
    (arXiv 2310.10505) section 4.

    `greedy_N`: reward of the greedy answer to each answer's prompt. Returns `[K]`.
    """
    return (token_rewards_to_go(token_reward_K, tokens_N, 1.0) - np.repeat(greedy_N, tokens_N)).astype(np.float32)


def estimate_tokens(answers: Answers, settings: GreedyBaselineAdvantage) -> NDArray[np.float32]:
    """`remax` of a claim. Raises ConfigError for groups that were sampled without a greedy answer."""
    greedy_N = np.full(len(answers.reward_N), np.nan) if answers.baseline_N is None else answers.baseline_N
    if np.isnan(greedy_N).any():
        absent = np.unique(answers.group_N[np.isnan(greedy_N)])
        raise ConfigError(f"learner.advantage.name: remax needs the reward of a greedy answer to each prompt, and "
                          f"{len(absent)} groups of the claim have none, the first of them group {absent[0]}: they "
                          "were sampled for another estimator; use that one, or grpo")
    return remax(answers.rewards_of_tokens(), answers.tokens_N, greedy_N)
