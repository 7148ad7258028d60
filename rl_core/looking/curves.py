"""What a run's learning curve is drawn from: reward by training step, and accuracy on held-out prompts.

Shape suffixes: `_K` training steps with a record, `_V` validations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.gaps import Gaps
from rl_core.history import read_history
from rl_core.run_dir import RunDir

SMOOTH_STEPS = 9


@dataclass(frozen=True, slots=True)
class Curve:
    """One run. A record is of a step, a validation behind so many steps: both are placed by the steps done."""

    run_key: str
    done_K: NDArray[np.int64]
    """Steps that are done with this one: 1, 2, ..."""
    reward_K: NDArray[np.float64]
    """Mean reward of the trained answers; NaN where a record has none."""
    done_V: NDArray[np.int64]
    accuracy_V: NDArray[np.float64]
    """Greedy, with its 95 % interval; NaN where it is not known."""
    low_V: NDArray[np.float64]
    high_V: NDArray[np.float64]


def read_curve(run: RunDir, gaps: Gaps | None = None) -> Curve:
    """As far as the run has come. With `gaps`, what cannot be read is left out and noted there."""
    history = read_history(run, gaps=gaps)

    def of(values: list[float]) -> NDArray[np.float64]:
        return np.array(values, np.float64)

    greedy = [validation.greedy for validation in history.validations]
    return Curve(run.root.name, history.step_K + 1, history.metrics["reward/mean"],
                 np.array([validation.step for validation in history.validations], np.int64),
                 of([each.value for each in greedy]), of([each.lo for each in greedy]),
                 of([each.hi for each in greedy]))


def smooth(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Centred moving mean over the finite values; shorter at both ends. NaN where the window has none."""
    finite = np.isfinite(values)
    masked = (np.where(finite, values, 0.0), finite.astype(float))
    sums, counts = (np.concatenate([[0.0], np.cumsum(x)]) for x in masked)
    at = np.arange(len(values))
    lo, hi = np.maximum(at - width // 2, 0), np.minimum(at + width // 2 + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[hi] - sums[lo]) / (counts[hi] - counts[lo])
