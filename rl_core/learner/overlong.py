"""The penalty on answers that come close to the limit (DAPO, arXiv 2503.14476, section 3.4). Pure NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(length_N: NDArray[np.integer], *, longest: int, buffer: int,
                     factor: float = 1.0) -> NDArray[np.float64]:
    """min(-(len - (longest - buffer)) / buffer * factor, 0): what an answer's reward loses, `[N]`; 0 to -factor.

    `overlong_penalty(array([6, 8, 10]), longest=10, buffer=4)` -> `[0.0, -0.5, -1.0]`.
    """
    beyond_N = length_N.astype(np.float64) - (longest - buffer)
    return np.minimum(-beyond_N / buffer * factor, 0.0)
