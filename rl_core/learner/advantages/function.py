"""An estimator of a user's: `learner.advantage.path` (docs/hooks.md 4). Pure NumPy, no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.advantage_settings import FunctionAdvantage
from rl_core.errors import HookFailed
from rl_core.hooks.loading import call
from rl_core.learner.advantages.answers import Answers

FIELD = "learner.advantage.path"


def estimate(answers: Answers, config: FunctionAdvantage) -> NDArray[np.float32]:
    """What the function says of every answer, `[N]`. Raises HookFailed for another shape, or for what is not finite."""
    return checked(call("advantage", FIELD, config.path, answers), len(answers.reward_N), config.path)


def checked(value: Any, count: int, name: str) -> NDArray[np.float32]:
    """One finite number an answer. Raises HookFailed naming the function and what it returned."""
    try:
        found = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise HookFailed(f"{FIELD} {name}: the result is {type(value).__name__}, no array of numbers") from error
    if found.shape != (count,):
        raise HookFailed(f"{FIELD} {name}: the result has the shape {found.shape}; it must be ({count},), an advantage "
                         "for every answer")
    if not np.isfinite(found).all():
        where = int(np.flatnonzero(~np.isfinite(found))[0])
        raise HookFailed(f"{FIELD} {name}: the advantage of answer {where} is {found[where]}; it must be finite")
    return found.astype(np.float32)
