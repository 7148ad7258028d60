"""The numbers that a run is known by, from its frames: pure functions (docs/frames.md 6).

Estimates carry a 95 % interval where a spread is known, and NaN for its ends where none is.

Shape suffixes: `_K` training steps with a record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rl_core.estimates import Z95, Estimate
from rl_core.group_facts import GroupFacts
from rl_core.history import greedy_estimate
from rl_core.metrics import weighted_mean

if TYPE_CHECKING:
    import pandas as pd

NAN = math.nan
UNKNOWN = Estimate(NAN, NAN, NAN)
LAST_STEPS = 20
"""Steps at the end whose rewards are averaged."""


def student95(freedom: int) -> float:
    """The 97.5 % point of Student's t with that many degrees of freedom: `student95(9)` -> 2.2622.

    From the normal one by Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5); a table for 1 and 2,
    within 0.1 % from 3 on.
    """
    if freedom <= 2:
        return {1: 12.7062, 2: 4.3027}.get(freedom, math.inf)
    z, n = Z95, float(freedom)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
             (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160)
    return z + sum(term / n ** (i + 1) for i, term in enumerate(terms))


def mean_of_steps(values: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """Mean over steps and its t interval, steps taken as independent; NaN ends where there are fewer than two.

    `mean_of_steps([1, 2, 3])` -> 2 [-0.484, 4.484].
    """
    known = np.array(values, np.float64)
    known = known[np.isfinite(known)]
    if known.size == 0:
        return UNKNOWN
    mean = float(known.mean())
    if known.size == 1:
        return Estimate(mean, NAN, NAN)
    half = student95(known.size - 1) * float(known.std(ddof=1)) / math.sqrt(known.size)
    return Estimate(mean, mean - half, mean + half)


def ratio_of_steps(values: NDArray[np.float64], weights: NDArray[np.float64]) -> Estimate:
    """Mean over steps by weight, sum(w x) / sum(w), and its t interval, steps taken as independent; NaN ends where
    there are fewer than two.

    The standard error is that of a ratio, linearized (Cochran, Sampling Techniques, 1977, 6.3):
    sqrt(n / (n - 1) sum (w (x - ratio))^2) / sum w. With equal weights it is `mean_of_steps`.
    `ratio_of_steps([1, 3], [1, 3])` -> 2.5 [-7.03, 12.03].
    """
    known = np.isfinite(values) & np.isfinite(weights) & (weights > 0)
    x, w = values[known], weights[known]
    n, total = len(x), float(w.sum())
    if n == 0:
        return UNKNOWN
    ratio = float((w * x).sum()) / total
    if n == 1:
        return Estimate(ratio, NAN, NAN)
    half = student95(n - 1) * math.sqrt(n / (n - 1) * float(((w * (x - ratio)) ** 2).sum())) / total
    return Estimate(ratio, ratio - half, ratio + half)


def difference(one: Estimate, base: Estimate) -> Estimate:
    """`one - base` of two independent estimates, with the interval that follows from theirs.

    Ends at d - sqrt((one - one.lo)^2 + (base.hi - base)^2) and d + sqrt((one.hi - one)^2 + (base - base.lo)^2):
    Newcombe, Stat. Med. 17 (1998), method 10, for shares; Zou and Donner, Stat. Med. 27 (2008), for any. Where both
    answered the same prompts it is wider than need be.
    """
    d = one.value - base.value
    return Estimate(d, d - math.hypot(one.value - one.lo, base.hi - base.value),
                    d + math.hypot(one.hi - one.value, base.value - base.lo))


def metrics_of(steps: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """[K] by metric: the rows of `frames.steps` that have a record, as NumPy arrays; null is NaN."""
    trained = steps[steps["state"] == "trained"]
    return {name: trained[name].to_numpy(np.float64, na_value=NAN) for name in trained.columns
            if "/" in name and not name.startswith("seconds/")}


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy accuracy on all held-out prompts after `step` training steps: `Greedy(20, Estimate(0.75, 0.41, 0.93))`."""

    step: int
    accuracy: Estimate
    """NaN where the record does not say it."""


def greedy_accuracies(validations: pd.DataFrame) -> list[Greedy]:
    """One of each validation in `frames.validations`, by step."""
    overall = validations[validations["data_source"].isna()]

    def column(name: str) -> list[float]:
        if name not in overall.columns:
            return [NAN] * len(overall)
        return overall[name].to_numpy(np.float64, na_value=NAN).tolist()

    return [Greedy(int(step), greedy_estimate(share, n, (lo, hi) if math.isfinite(lo) else None))
            for step, share, n, lo, hi in zip(overall["step"].tolist(), column("greedy_accuracy"), column("n"),
                                              column("greedy_lo"), column("greedy_hi"), strict=True)]


def best_greedy(validations: Sequence[Greedy]) -> Greedy | None:
    """The one of the largest greedy accuracy, the first among equals; None where none is known.

    Whatever `checkpoint.best` goes by: that is `best_by_field` of rl_core/best.py.
    """
    known = [each for each in validations if math.isfinite(each.accuracy.value)]
    return max(known, key=lambda each: (each.accuracy.value, -each.step), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNumbers:
    """What a run came to so far."""

    steps: int
    """With a record."""
    accuracy_start: Estimate
    """Greedy accuracy of the first validation, which is before training."""
    accuracy_end: Estimate
    accuracy_best: Estimate
    best_step: int | None
    """Steps behind the best accuracy, the first among equals."""
    reward_last: Estimate
    """Mean reward of the trained answers over the last steps."""
    samples_per_s: Estimate
    """Answers trained per second while training. Steps hold equally many answers: the harmonic mean over them."""
    staleness_mean: float
    """Publications, over trained groups."""
    staleness_max: float
    update_lag_mean: float
    """Optimizer updates, over trained tokens."""
    groups_trained: int
    groups_dropped: int
    wasted: float
    """Share of the generated tokens that never landed."""

    @property
    def dropped_share(self) -> float:
        """Of all groups that were trained or dropped."""
        total = self.groups_trained + self.groups_dropped
        return self.groups_dropped / total if total else NAN


def run_numbers(steps: pd.DataFrame, validations: pd.DataFrame, facts: GroupFacts, *,
                last: int = LAST_STEPS) -> RunNumbers:
    """Add up `frames.steps` and `frames.validations` of a run.

    Groups are counted from claims and drops: `frames.groups` would open every shard of the run for two numbers.
    """
    column, greedy = metrics_of(steps), greedy_accuracies(validations)
    best, count = best_greedy(greedy), len(column["reward/mean"])
    oldest = column["staleness/max"][np.isfinite(column["staleness/max"])]
    return RunNumbers(
        steps=count, accuracy_start=greedy[0].accuracy if greedy else UNKNOWN,
        accuracy_end=greedy[-1].accuracy if greedy else UNKNOWN, accuracy_best=best.accuracy if best else UNKNOWN,
        best_step=best.step if best else None, reward_last=mean_of_steps(column["reward/mean"][-last:]),
        samples_per_s=rate_of_steps(column["system/samples_per_s"]), groups_trained=facts.trained_groups,
        groups_dropped=len(facts.drops),
        staleness_mean=float(weighted_mean(column["staleness/mean"], np.ones(count))),
        staleness_max=float(oldest.max()) if oldest.size else NAN,
        update_lag_mean=float(weighted_mean(column["staleness/update_lag_mean"], column["train/loss_tokens"])),
        wasted=float(weighted_mean(column["rollout/wasted"], column["rollout/tokens_per_s"])))


def rate_of_steps(rate_K: NDArray[np.float64]) -> Estimate:
    """Answers per second over steps that hold equally many: the harmonic mean, and the interval of the mean time per
    answer (`mean_of_steps`). `rate_of_steps([1, 2, 4])` -> 1.714 [0.653, inf]."""
    seconds = mean_of_steps(1 / rate_K[rate_K > 0])
    if not seconds.value > 0:
        return UNKNOWN
    return Estimate(1 / seconds.value, 1 / seconds.hi, 1 / seconds.lo if seconds.lo > 0 else math.inf)
