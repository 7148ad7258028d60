"""Tokens chosen by the covariance of advantage and log-prob (clip_cov, kl_cov). `_K` tokens of a minibatch.

Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv 2505.22617).
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariance(policy_K: Tensor, advantage_K: Tensor) -> Tensor:
    """(A - mean A)(log pi - mean log pi) of every token, float64, no gradient."""
    logprob_K, advantage = policy_K.detach().double(), advantage_K.double()
    return (advantage - advantage.mean()) * (logprob_K - logprob_K.mean())


def at_least_one(share: float, tokens: int) -> int:
    """How many tokens a share of them is: rounded down, but one at least."""
    return max(1, int(share * tokens))


def first(order_K: Tensor, eligible_K: Tensor, count: int) -> Tensor:
    """bool `[K]`: the `count` eligible tokens of lowest `order_K`; ties go by position."""
    chosen_K = torch.zeros_like(eligible_K)
    places = eligible_K.nonzero()[:, 0]
    chosen_K[places[order_K[places].argsort(stable=True)[:count]]] = True
    return chosen_K
