"""What an estimator reads, and the statistics that several of them share. Pure NumPy, no torch.

`_N` trajectories of the claim (all ranks), `_G` groups, `_K` loss tokens of the claim in claim order. Every rank
computes all of them from the same facts, so all ranks have the same numbers. Sums run in float64, in claim order;
results are float32.

Group statistics use every trajectory with a valid reward, also those whose tokens are masked by age or truncation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

GroupOfOne = Literal["zero", "raw"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answers:
    """The answers of a claim, a session of several trajectories as one (`by_session`):
    `Answers(reward_N=[1, 0], group_N=[0, 0], length_N=[3, 2], tokens_N=[3, 2])`."""

    reward_N: Floats
    group_N: Ints
    length_N: Ints
    """Tokens of the answer."""
    tokens_N: Ints
    """Those of them in the loss, after masks."""
    parts: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """Reward parts by name; NaN where an answer has no such part."""
    baseline_N: Floats | None = None
    """Reward of a greedy answer to the same prompt; NaN where there is none."""
    token_reward_K: Floats | None = None
    """Reward of every loss token, which sum to `reward_N`; None where all of it stands behind the last one."""

    def only(self, chosen_N: NDArray[np.bool_]) -> Answers:
        """These answers alone."""
        tokens_K = self.token_reward_K
        return Answers(reward_N=self.reward_N[chosen_N], group_N=self.group_N[chosen_N],
                       length_N=self.length_N[chosen_N], tokens_N=self.tokens_N[chosen_N],
                       parts={name: values[chosen_N] for name, values in self.parts.items()},
                       baseline_N=None if self.baseline_N is None else self.baseline_N[chosen_N],
                       token_reward_K=None if tokens_K is None else tokens_K[np.repeat(chosen_N, self.tokens_N)])

    def by_session(self, session_N: Ints) -> Answers:
        """One answer for each session, whose trajectories lie one behind the other: its reward once, all its tokens.
        What stands at a loss token stands there as before, since their order is the same.

        Raises ValueError for a session whose trajectories have other rewards.
        """
        first_N = np.diff(session_N, prepend=-1) != 0
        if first_N.all():
            return self
        if (self.reward_N != self.reward_N[first_N][session_N]).any():
            bad = int(session_N[np.argmax(self.reward_N != self.reward_N[first_N][session_N])])
            raise ValueError(f"trajectories of session {bad} of the claim have other rewards; a session has one")
        sessions = int(first_N.sum())
        return Answers(reward_N=self.reward_N[first_N], group_N=self.group_N[first_N],
                       length_N=summed(self.length_N, session_N, sessions),
                       tokens_N=summed(self.tokens_N, session_N, sessions),
                       parts={name: values[first_N] for name, values in self.parts.items()},
                       baseline_N=None if self.baseline_N is None else self.baseline_N[first_N],
                       token_reward_K=self.token_reward_K)

    def rewards_of_tokens(self) -> Floats:
        """`token_reward_K`, or 0 at all tokens but the last one of each answer."""
        if self.token_reward_K is not None:
            return self.token_reward_K
        rewards_K = np.zeros(int(self.tokens_N.sum()))
        there_N = self.tokens_N > 0
        rewards_K[(np.cumsum(self.tokens_N) - 1)[there_N]] = self.reward_N[there_N]
        return rewards_K

    def with_token_rewards(self, more_K: Floats) -> Answers:
        """The answers with `more_K` added to the rewards of their loss tokens: the answer's reward is their sum, S_i.
        An answer without a loss token keeps its reward."""
        row_K = np.repeat(np.arange(len(self.tokens_N)), self.tokens_N)
        added_N = np.bincount(row_K, weights=more_K, minlength=len(self.tokens_N))
        return replace(self, reward_N=self.reward_N + added_N, token_reward_K=self.rewards_of_tokens() + more_K)


def summed(values_N: Ints, session_N: Ints, sessions: int) -> Ints:
    """Sums over the trajectories of each session."""
    out = np.zeros(sessions, np.int64)
    np.add.at(out, session_N, values_N)
    return out


def group_sums(values_N: Floats, group_N: Ints, groups: int) -> Floats:
    """Sum of the values of each group, `[G]`."""
    return np.bincount(group_N, weights=values_N, minlength=groups).astype(np.float64, copy=False)


def centred(reward_N: Floats, group_N: Ints) -> tuple[Floats, Ints]:
    """`(S_i - mu_g [N], N_g of each trajectory's group [N])`."""
    groups = int(group_N.max(initial=-1)) + 1
    size_G = np.bincount(group_N, minlength=groups)
    mean_G = group_sums(reward_N, group_N, groups) / np.maximum(size_G, 1)
    return reward_N - mean_G[group_N], size_G[group_N]


def deviation(centred_N: Floats, group_N: Ints, size_N: Ints) -> Floats:
    """Sample standard deviation (N_g - 1) of each trajectory's group, `[N]`; 0 for a group of one."""
    groups = int(group_N.max(initial=-1)) + 1
    square_N = group_sums(centred_N**2, group_N, groups)[group_N]
    return np.sqrt(square_N / np.maximum(size_N - 1, 1))


def alone(advantage_N: Floats, reward_N: Floats, size_N: Ints, rule: GroupOfOne) -> NDArray[np.float32]:
    """The advantages, but of a group of one 0, or its reward (`raw`)."""
    alone_N = reward_N if rule == "raw" else np.zeros_like(reward_N)
    return np.where(size_N > 1, advantage_N, alone_N).astype(np.float32)


def whiten(values: Floats, tokens: Ints) -> Floats:
    """(x - mean) rsqrt(var + 1e-8), mean and unbiased variance over tokens, of which `tokens` have each value.

    Fewer than two tokens in all: unchanged.
    """
    count = int(tokens.sum())
    if count < 2:
        return values
    mean = float((values * tokens).sum()) / count
    variance = float(((values - mean) ** 2 * tokens).sum()) / (count - 1)
    return (values - mean) / np.sqrt(variance + 1e-8)
