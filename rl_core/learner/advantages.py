"""Advantage estimators over the whole claim (algorithms.md section 3). Pure NumPy, no torch.

`_N` trajectories of the claim (all ranks), `_G` groups. Every rank computes all of them from the same facts, so no
collective is needed and all ranks have the same numbers. Sums run in float64, in claim order; results are float32.

Group statistics use every trajectory with a valid reward, also those whose tokens are masked by age or truncation.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rl_core.config import AdvantageConfig

GroupOfOne = Literal["zero", "raw"]


def group_sums(values_N: NDArray[np.float64], group_N: NDArray[np.int64], groups: int) -> NDArray[np.float64]:
    """Sum of the values of each group, `[G]`."""
    return np.bincount(group_N, weights=values_N, minlength=groups).astype(np.float64, copy=False)


def centred(reward_N: NDArray[np.float64], group_N: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`(S_i - mu_g [N], N_g of each trajectory's group [N])`."""
    groups = int(group_N.max(initial=-1)) + 1
    size_G = np.bincount(group_N, minlength=groups)
    mean_G = group_sums(reward_N, group_N, groups) / np.maximum(size_G, 1)
    return reward_N - mean_G[group_N], size_G[group_N]


def grpo(reward_N: NDArray[np.float64], group_N: NDArray[np.int64], *, eps: float = 1e-6,
         normalize_by_std: bool = True, group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """GRPO: (S_i - mu_g) / (sigma_g + eps), sigma_g the sample deviation (N_g - 1).

    DeepSeekMath (arXiv 2402.03300) section 4.1.2; `normalize_by_std=False` is Dr.GRPO (arXiv 2503.20783) section 3.2.
    A group of one has advantage 0, or its reward (`group_of_one="raw"`). Returns `[N]`.
    """
    centred_N, size_N = centred(reward_N, group_N)
    advantage_N = centred_N
    if normalize_by_std:
        groups = int(group_N.max(initial=-1)) + 1
        square_N = group_sums(centred_N**2, group_N, groups)[group_N]
        advantage_N = centred_N / (np.sqrt(square_N / np.maximum(size_N - 1, 1)) + eps)
    return _group_of_one(advantage_N, reward_N, size_N, group_of_one)


def rloo(reward_N: NDArray[np.float64], group_N: NDArray[np.int64], *,
         group_of_one: GroupOfOne = "zero") -> NDArray[np.float32]:
    """Leave-one-out: the reward minus the mean of the group's others, = N/(N-1) (S_i - mu_g).

    Ahmadian et al. (arXiv 2402.14740) section 2. Groups of one as in `grpo`. Returns `[N]`.
    """
    centred_N, size_N = centred(reward_N, group_N)
    return _group_of_one(centred_N * size_N / np.maximum(size_N - 1, 1), reward_N, size_N, group_of_one)


def _group_of_one(advantage_N: NDArray[np.float64], reward_N: NDArray[np.float64], size_N: NDArray[np.int64],
                  rule: GroupOfOne) -> NDArray[np.float32]:
    alone_N = reward_N if rule == "raw" else np.zeros_like(reward_N)
    return np.where(size_N > 1, advantage_N, alone_N).astype(np.float32)


def advantages(reward_N: NDArray[np.floating], group_N: NDArray[np.integer], config: AdvantageConfig, *,
               present_N: NDArray[np.bool_] | None = None) -> NDArray[np.float32]:
    """Advantage of every trajectory of the claim, `[N]` float32, by the configured estimator.

    `present_N` False = as if absent (`truncated: exclude`): outside the group's statistics, advantage 0.
    Raises ValueError for a reward that is not finite: a shard never holds one.
    """
    reward = reward_N.astype(np.float64)
    group = group_N.astype(np.int64)
    if not np.isfinite(reward).all():
        raise ValueError(f"reward of trajectory {int(np.flatnonzero(~np.isfinite(reward))[0])} is not finite")
    present = np.ones(len(reward), np.bool_) if present_N is None else present_N
    result = np.zeros(len(reward), np.float32)
    if config.name == "grpo":
        result[present] = grpo(reward[present], group[present], eps=config.eps,
                               normalize_by_std=config.normalize_by_std, group_of_one=config.group_of_one)
    else:
        result[present] = rloo(reward[present], group[present], group_of_one=config.group_of_one)
    return result
