"""What is right: the one rule of a validation, of a step's metrics and of its record. Pure NumPy, without torch.

`_N` answers. The rule is applied to each data source by itself, since a reward may say `correct` of one and not of
another (docs/validation.md 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

RIGHT = 0.5
"""An answer is right where its `correct` is over this."""


def known_correctness(reward_N: NDArray[Any], correct_N: NDArray[Any], source_N: NDArray[Any]) -> NDArray[np.float64]:
    """How right each answer is; NaN where that is not known.

    `correct_N` where the reward says it of any answer of that data source; else the reward itself, where it is 0 or 1
    for all answers of that source; else nothing is known: a shaped reward is no accuracy. NaN in `reward_N` is a reward
    that failed, in `correct_N` one that does not say; `source_N` tells data sources apart.

    Example: rewards 1, 0 of source 0 and 1, 0.1 of source 1, `correct` never said -> 1, 0, NaN, NaN.
    """
    known_N = np.full(len(reward_N), np.nan)
    for source in np.unique(source_N):
        mine_N = source_N == source
        rewards, said = reward_N[mine_N].astype(np.float64), correct_N[mine_N].astype(np.float64)
        if np.isfinite(said).any():
            known_N[mine_N] = said
        elif (np.isnan(rewards) | (rewards == 0.0) | (rewards == 1.0)).all():
            known_N[mine_N] = rewards
    return known_N


def is_known_everywhere(known_N: NDArray[np.float64], source_N: NDArray[Any]) -> bool:
    """Whether each data source has an answer of which it is known: else there is no accuracy of all sources together,
    as that of the others would pass for it."""
    return set(source_N[np.isfinite(known_N)].tolist()) == set(source_N.tolist())
