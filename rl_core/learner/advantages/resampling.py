"""PF-PPO: answers of a minibatch drawn again, by how much their rewards say. Pure NumPy."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rl_core.learner.advantages.answers import Floats, Ints

Resampling = Literal["pow", "max_min", "max_random"]


def resampling_weights(reward_N: Floats, method: Resampling, *, power: float = 2.0) -> Floats:
    """Weight of each answer in the draw, `[N]`.

    pow: |S|^power. max_min: 1 for answers of the largest and of the smallest reward, else 0. max_random: 0.4 for
    answers of the largest reward, 0.1 for others. Shen et al., "Policy filtration" (arXiv 2409.06957).
    """
    if method == "pow":
        return np.abs(reward_N) ** power
    best_N = reward_N == reward_N.max(initial=-np.inf)
    if method == "max_min":
        return (best_N | (reward_N == reward_N.min(initial=np.inf))).astype(np.float64)
    return np.where(best_N, 0.4, 0.1)


def resampled(weight_N: Floats, seed: int) -> Ints:
    """How often each answer is drawn when as many as there are are drawn with replacement, `[N]`; once each where all
    weights are 0."""
    count, total = len(weight_N), float(weight_N.sum())
    if not total:
        return np.ones(count, np.int64)
    drawn = np.random.default_rng(seed).choice(count, size=count, p=weight_N / total)
    return np.bincount(drawn, minlength=count)
