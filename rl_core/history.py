"""A run's steps and validations as its directory tells them, as NumPy arrays: what the frames and the figures are made
of.

Everything here is derived and can be read while the run goes on. Shape suffixes: `_K` training steps with a record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rl_core.estimates import Estimate, wilson
from rl_core.gaps import Gaps, found
from rl_core.metrics import BY_NAME, is_part, names
from rl_core.observations import seen_observation
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, numbered, read_json
from rl_core.types import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """What was measured after `step` trained steps; NaN where that was not asked for, or cannot be known."""

    step: int
    greedy: Estimate
    """Accuracy of greedy answers with its 95 % interval, which is NaN where the record does not say of how many."""
    sampled_accuracy: float
    mean_length: float
    record: Mapping[str, Any]
    """All of its file."""

    @property
    def greedy_accuracy(self) -> float:
        return self.greedy.value


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What was recorded. `history.metrics["reward/mean"][i]` belongs to step `history.step_K[i]`."""

    step_K: NDArray[np.int64]
    time_K: NDArray[np.float64]
    """When the step was recorded, seconds since 1970."""
    metrics: dict[str, NDArray[np.float64]]
    """[K] by the names of learner and owner, then reward parts; NaN where the file or the name is absent."""
    validations: tuple[Validation, ...]
    records: tuple[StepRecord, ...]
    """[K]"""


def read_history(run: RunDir, *, last: int | None = None, gaps: Gaps | None = None) -> History:
    """Records, observations and validations of the run so far; of the `last` recorded steps only, where given.

    With `gaps`, a record or validation that cannot be read is left out and noted; else it raises. An observation that
    is absent or cannot be read is no gap.
    """
    records = read_steps(run, last=last, gaps=gaps)
    seen = [record.metrics | _observed(run, record.step) for record in records]
    parts = sorted({name for metrics in seen for name in metrics if is_part(name)})
    columns = {name: np.array([metrics.get(name, math.nan) for metrics in seen], np.float64)
               for name in (*names("learner"), *names("owner"), *parts)}
    return History(step_K=np.array([record.step for record in records], np.int64),
                   time_K=np.array([record.ts_us / 1e6 for record in records], np.float64), metrics=columns,
                   validations=read_validations(run, gaps=gaps), records=records)


def read_steps(run: RunDir, *, last: int | None = None, gaps: Gaps | None = None) -> tuple[StepRecord, ...]:
    """The records of `read_history` alone."""
    records: list[StepRecord] = []
    for step in recorded_steps(run)[-last if last else None:]:
        record = found(partial(read_record, run, step), str(run.record(step)), gaps)
        records += [] if record is None else [record]
    return tuple(records)


def _observed(run: RunDir, step: int) -> dict[str, float]:
    observation = seen_observation(run, step)
    return {} if observation is None else {name: x for name, x in observation.metrics.items() if name in BY_NAME}


def read_validations(run: RunDir, *, gaps: Gaps | None = None) -> tuple[Validation, ...]:
    """All validations, by step; with `gaps`, one that cannot be read is left out and noted."""
    validations: list[Validation] = []
    for _, path in numbered(run.validations, r"step-(\d{9})\.json"):
        record = found(partial(read_json, path), str(path), gaps)
        validations += [] if record is None else [_validation(record)]
    return tuple(validations)


def _validation(record: Mapping[str, Any]) -> Validation:
    def number(name: str) -> float:
        value = record.get(name)
        return math.nan if value is None else float(value)

    interval = cast(list[float] | None, record.get("greedy_interval"))
    return Validation(step=int(record["step"]), record=record, mean_length=number("mean_length"),
                      greedy=greedy_estimate(number("greedy_accuracy"), number("n"), interval),
                      sampled_accuracy=number("sampled_accuracy"))


def greedy_estimate(share: float, n: float, interval: Sequence[float] | None) -> Estimate:
    """Greedy accuracy with the interval of the record, else Wilson's over its n prompts; NaN where neither is known."""
    if interval is not None:
        lo, hi = interval
        return Estimate(share, lo, hi)
    return wilson(share, n) if 0.0 <= share <= 1.0 and n > 0 else Estimate(share, math.nan, math.nan)
