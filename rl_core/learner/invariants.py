"""The invariants of algorithms.md section 9, by precision: from where on each is an alarm, and where it ends the run.

(a) Drift: before the first update policy and proximal policy are the same weights, asked twice: |pi/prox - 1| is what
two passes differ by. It holds where the proximal log-probs are recomputed, in decoupled mode. (b) Mismatch: tokens that
these very weights sampled, mean |log prox - log mu|: what engine and learner differ by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.config import Config
from rl_core.errors import EngineMismatch, ProximalDrift

FIRST_STEPS = 5
FLOAT32_BOUND = 1e-3
ALARM_FACTOR = 4.0
MISMATCH_ERROR = 0.1
"""Nats per token between proximal and behavior on tokens of the very same weights: engine and learner disagree."""
HIGHEST_BOUND = MISMATCH_ERROR / 2
"""Of the mismatch, whatever was measured first: the alarm comes before the error."""
DRIFT_BOUND = {"float32": 1e-6, "bfloat16": 0.05}
"""By the learner's dtype. bfloat16: a logit of 8 to 16 is rounded to 0.03 either way."""
DRIFT_ERROR = {"float32": 1e-2, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True)
class AlarmBounds:
    """What a step may measure without an alarm: `AlarmBounds(mismatch=1e-3, drift=1e-6)`."""

    mismatch: float
    """Nats per token, mean over the current tokens."""
    drift: float
    """|pi/prox - 1|, largest of the first micro-batch."""


def alarm_bounds(config: Config, first: Mapping[int, float]) -> AlarmBounds:
    """Those of a step that is trained by these settings; `first`: as of mismatch_bound."""
    float32 = config.learner.dtype == config.rollout.engine.dtype == "float32"
    return AlarmBounds(mismatch_bound(first, float32=float32), DRIFT_BOUND[config.learner.dtype])


def mismatch_bound(first: Mapping[int, float], *, float32: bool) -> float:
    """Bound on the mean |log proximal - log behavior| of current tokens, nats, above which the step raises its alarm.

    float32 on both sides: 1e-3. Otherwise 4 times the mean of what the first steps (step -> value) measured, at most
    half of what ends the run; that half while nothing has been measured.
    """
    if float32:
        return FLOAT32_BOUND
    measured = [value for step, value in first.items() if step < FIRST_STEPS and math.isfinite(value)]
    return min(ALARM_FACTOR * sum(measured) / len(measured), HIGHEST_BOUND) if measured else HIGHEST_BOUND


def invariant_metrics(mismatch: float, drift: float, bounds: AlarmBounds) -> dict[str, float]:
    """Bounds and alarms of a step. What was not measured is NaN, and no alarm."""
    return {"train/mismatch_bound": bounds.mismatch, "train/mismatch_alarm": float(mismatch > bounds.mismatch),
            "train/drift_bound": bounds.drift, "train/drift_alarm": float(drift > bounds.drift)}


def check_mismatch(step: int, total: float, tokens: float) -> None:
    """Raises EngineMismatch where the tokens of these very weights were sampled by another distribution.

    `total`: nats, the sum of |log prox - log mu| over these `tokens`.
    """
    if tokens and total / tokens > MISMATCH_ERROR:
        raise EngineMismatch(
            f"step {step}: mean |log proximal - log behavior| is {total / tokens:.3f} nats over {int(tokens)} tokens "
            f"that the engine sampled with the very weights of this step (limit {MISMATCH_ERROR}); engine and learner "
            "disagree about the model, its dtype, or the sampling settings")


def check_drift(step: int, drift: float, dtype: str) -> None:
    """Raises ProximalDrift where two passes over the very same weights do not agree."""
    if drift > DRIFT_ERROR[dtype]:
        raise ProximalDrift(
            f"step {step}: |policy/proximal - 1| is {drift:.3g} before the first update (limit {DRIFT_ERROR[dtype]} in "
            f"{dtype}): the learner's two passes over the same tokens with the same weights do not agree; look for "
            "layers that behave otherwise under gradient, as dropout does, or that change between two passes")
