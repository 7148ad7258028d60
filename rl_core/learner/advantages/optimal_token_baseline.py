"""optimal_token_baseline: the reward minus, token by token, the baseline of least variance of its group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import TokenBaselineAdvantage
from rl_core.learner.advantages.answers import Answers, Floats, Ints
from rl_core.learner.advantages.reinforce_plus_plus import token_rewards_to_go

TINY = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyFacts:
    """What the proximal policy says of every loss token of the claim, `[K]`."""

    logprob_K: Floats
    """Of the token, nats."""
    squares_K: Floats
    """Sum over the vocabulary of p^2."""
    weight_K: Floats
    """Its correction weight; 1 where there is none."""
    position_K: Ints
    """Its place in the answer, from 0."""

    def only(self, chosen_K: NDArray[np.bool_]) -> PolicyFacts:
        """These tokens alone."""
        return PolicyFacts(logprob_K=self.logprob_K[chosen_K], squares_K=self.squares_K[chosen_K],
                           weight_K=self.weight_K[chosen_K], position_K=self.position_K[chosen_K])


def optimal_token_baseline(answers: Answers, policy: PolicyFacts, position_K: Ints,
                           length_N: Ints) -> NDArray[np.float32]:
    """A_t = G_t - B_t, B_t = sum_i G_{i,t} W_{i,t} / (sum_i W_{i,t} + 1e-8) over the group's answers at position t.

    W_t = sum_{j <= t} (1 - 2 p_j + sum_v p_v^2) w_j^2 over the loss tokens of the answer: the squared norm of its score
    so far, which an answer that has ended keeps. G_t is what is left of the answer's reward, 0 behind its end. Where
    one answer is strictly longest, positions past the second-longest have baseline 0, as has a group of one.

    `position_K`: where each loss token counts as standing, below the `length_N` of its answer. Returns `[K]`.
    Li et al., "The optimal token baseline" (2025).
    """
    row_K = np.repeat(np.arange(len(answers.tokens_N)), answers.tokens_N)
    energy_K = (1.0 - 2.0 * np.exp(policy.logprob_K) + policy.squares_K) * policy.weight_K**2
    baseline_K = np.zeros(len(row_K))
    for group in np.unique(answers.group_N):
        members = np.flatnonzero(answers.group_N == group)
        mine_K = np.isin(row_K, members)
        if len(members) > 1 and mine_K.any():
            at = np.searchsorted(members, row_K[mine_K]), position_K[mine_K]
            lengths, rewards = length_N[members], answers.reward_N[members]
            norm = np.zeros((len(members), int(lengths.max())))
            norm[at] = energy_K[mine_K]
            norm = norm.cumsum(axis=1)
            open_to = np.arange(int(lengths.max()))[None, :] < lengths[:, None]
            to_go: Floats = np.where(open_to, rewards[:, None], 0.0)
            if answers.token_reward_K is not None:
                own = np.zeros_like(norm)
                own[at] = answers.token_reward_K[mine_K]
                to_go = own[:, ::-1].cumsum(axis=1)[:, ::-1]
            baseline = (to_go * norm).sum(axis=0) / (norm.sum(axis=0) + TINY)
            baseline[np.sort(lengths)[-2]:] = 0.0
            baseline_K[mine_K] = baseline[at[1]]
    if answers.token_reward_K is not None:
        return (token_rewards_to_go(answers.token_reward_K, answers.tokens_N, 1.0) - baseline_K).astype(np.float32)
    return (answers.reward_N[row_K] - baseline_K).astype(np.float32)


def estimate_from_policy(answers: Answers, policy: PolicyFacts,
                         settings: TokenBaselineAdvantage) -> NDArray[np.float32]:
    """`optimal_token_baseline` at the tokens' places in their answers."""
    return optimal_token_baseline(answers, policy, policy.position_K, answers.length_N)
