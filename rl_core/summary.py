"""The numbers that a run is known by: what `headway train --json` prints, and what runs are compared by.

Estimates carry a 95 % interval where a spread is known, and NaN for its ends where none is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.estimates import Z95, Estimate
from rl_core.gaps import Gaps
from rl_core.group_facts import read_group_facts
from rl_core.history import History, Validation, read_history
from rl_core.metrics import weighted_mean
from rl_core.run_dir import RunDir, read_json

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


def difference(one: Estimate, base: Estimate) -> Estimate:
    """`one - base` of two independent estimates, with the interval that follows from theirs.

    Ends at d - sqrt((one - one.lo)^2 + (base.hi - base)^2) and d + sqrt((one.hi - one)^2 + (base - base.lo)^2):
    Newcombe, Stat. Med. 17 (1998), method 10, for shares; Zou and Donner, Stat. Med. 27 (2008), for any. Where both
    answered the same prompts it is wider than need be.
    """
    d = one.value - base.value
    return Estimate(d, d - math.hypot(one.value - one.lo, base.hi - base.value),
                    d + math.hypot(one.hi - one.value, base.value - base.lo))


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


def run_numbers(run: RunDir, *, last: int = LAST_STEPS, gaps: Gaps | None = None) -> RunNumbers:
    """Add up the run directory. Without `gaps`, a file that cannot be read raises."""
    facts = read_group_facts(run, outcomes=False, gaps=gaps)
    history = read_history(run, gaps=gaps)
    column = history.metrics
    best = best_greedy_validation(history.validations)
    oldest = column["staleness/max"][np.isfinite(column["staleness/max"])]
    return RunNumbers(
        steps=len(history.step_K), accuracy_start=_accuracy(history.validations[:1]),
        accuracy_end=_accuracy(history.validations[-1:]), accuracy_best=best.greedy if best else UNKNOWN,
        best_step=best.step if best else None, reward_last=mean_of_steps(column["reward/mean"][-last:]),
        samples_per_s=_rate(history), groups_trained=facts.trained_groups, groups_dropped=len(facts.drops),
        staleness_mean=float(weighted_mean(column["staleness/mean"], np.ones(len(history.step_K)))),
        staleness_max=float(oldest.max()) if oldest.size else NAN,
        update_lag_mean=float(weighted_mean(column["staleness/update_lag_mean"], column["train/loss_tokens"])),
        wasted=float(weighted_mean(column["rollout/wasted"], column["rollout/tokens_per_s"])))


def best_greedy_validation(validations: Sequence[Validation]) -> Validation | None:
    """The one of the largest greedy accuracy, the first among equals; None where none is known.

    Whatever `checkpoint.best` goes by: that is `best_by_field` of rl_core/best.py.
    """
    known = [v for v in validations if math.isfinite(v.greedy.value)]
    return max(known, key=lambda v: (v.greedy.value, -v.step), default=None)


def _accuracy(validations: Sequence[Validation]) -> Estimate:
    return validations[0].greedy if validations else UNKNOWN


def _rate(history: History) -> Estimate:
    rate_K = history.metrics["system/samples_per_s"]
    seconds = mean_of_steps(1 / rate_K[rate_K > 0])
    if not seconds.value > 0:
        return UNKNOWN
    return Estimate(1 / seconds.value, 1 / seconds.hi, 1 / seconds.lo if seconds.lo > 0 else math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The numbers of a run that `headway train --json` prints, with these names in this order."""

    run_key: str
    status: str
    steps: int
    accuracy_start: float | None
    """None without validation."""
    accuracy_end: float | None
    wall_s: float
    groups_trained: int
    groups_dropped: int
    staleness_max: int | None
    staleness_mean: float | None
    update_lag_mean: float | None
    samples_per_s: float | None
    mlflow_run_id: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(run: RunDir, *, run_key: str, status: str, wall_s: float, mlflow_run_id: str | None = None) -> Summary:
    """The summary of a run directory of which nothing is missing. `wall_s` is the caller's; without `mlflow_run_id` the
    stored one is taken. Raises BrokenFile."""
    of = run_numbers(run)
    return Summary(
        run_key=run_key, status=status, steps=of.steps, wall_s=round(wall_s, 3),
        accuracy_start=_number(of.accuracy_start.value), accuracy_end=_number(of.accuracy_end.value),
        groups_trained=of.groups_trained, groups_dropped=of.groups_dropped,
        staleness_max=int(of.staleness_max) if math.isfinite(of.staleness_max) else None,
        staleness_mean=_number(of.staleness_mean), update_lag_mean=_number(of.update_lag_mean),
        samples_per_s=_number(of.samples_per_s.value), mlflow_run_id=mlflow_run_id or stored_mlflow_run(run))


def stored_mlflow_run(run: RunDir) -> str | None:
    """The id of the MLflow run that mirrors this run; None before tracking has made one."""
    try:
        return str(read_json(run.mlflow_run)["run_id"])
    except FileNotFoundError:
        return None


def _number(value: float) -> float | None:
    """JSON has no NaN: what does not exist is null."""
    return round(value, 6) if math.isfinite(value) else None
