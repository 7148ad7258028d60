"""A run as its directory tells it: metrics by step as arrays, ages of the trained groups, and the summary.

Everything here is derived and can be read while the run goes on. Shape suffixes: `_K` training steps with a record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.experience.ledger import claims, drop_files, read_drops
from rl_core.experience.verify import map_shard
from rl_core.metrics import BY_NAME, names, validation_metrics, weighted_mean
from rl_core.observations import read_observation
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, numbered, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Accuracy after `step` trained steps; NaN where that kind was not asked for."""

    step: int
    greedy_accuracy: float
    sampled_accuracy: float
    mean_length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What was recorded. `history.metrics["reward/mean"][i]` belongs to step `history.step_K[i]`."""

    step_K: NDArray[np.int64]
    time_K: NDArray[np.float64]
    """When the step was recorded, seconds since 1970."""
    metrics: dict[str, NDArray[np.float64]]
    """[K] by the names of learner and owner; NaN where the file or the name is absent."""
    validations: tuple[Validation, ...]


def read_validations(run: RunDir) -> tuple[Validation, ...]:
    """All validations, by step."""
    found: list[Validation] = []
    for step, path in numbered(run.validations, r"step-(\d{9})\.json"):
        values = {name.split("/")[1]: value for name, value in validation_metrics(read_json(path)).items()}
        found.append(Validation(step=step, greedy_accuracy=values["greedy_accuracy"], mean_length=values["mean_length"],
                                sampled_accuracy=values["sampled_accuracy"]))
    return tuple(found)


def read_history(run: RunDir) -> History:
    """Records, observations and validations of the run so far."""
    steps = recorded_steps(run)
    columns = {name: np.full(len(steps), math.nan) for name in (*names("learner"), *names("owner"))}
    time_K = np.zeros(len(steps))
    for i, step in enumerate(steps):
        record = read_record(run, step)
        time_K[i] = record.ts_us / 1e6
        for name, value in (record.metrics | _observed(run, step)).items():
            if name in BY_NAME:
                columns[name][i] = value
    return History(step_K=np.array(steps, np.int64), time_K=time_K, metrics=columns, validations=read_validations(run))


def _observed(run: RunDir, step: int) -> dict[str, float]:
    try:
        return read_observation(run, step).metrics
    except FileNotFoundError:
        return {}


def trained_ages(run: RunDir) -> NDArray[np.int64]:
    """Age of every trained group at its step, publications, in training order (experience-store.md 3.6).

    From claims and shards. Groups whose shard is not there any more are left out.
    """
    known: dict[tuple[str, int], NDArray[np.int32] | None] = {}
    ages: list[int] = []
    recorded = set(recorded_steps(run))
    for claim in claims(run):
        if claim.step not in recorded:
            continue
        for group in claim.groups:
            key = (group.stream, group.seq)
            if key not in known:
                known[key] = _oldest_versions(run, *key)
            idx_min = known[key]
            if idx_min is not None:
                ages.append(claim.idx - int(idx_min[group.row]))
    return np.array(ages, np.int64)


def _oldest_versions(run: RunDir, stream: str, seq: int) -> NDArray[np.int32] | None:
    try:
        batch, _ = map_shard(run.shard(stream, seq))
    except FileNotFoundError:
        return None
    return np.array(batch.column("idx_min").to_numpy(zero_copy_only=False), np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The numbers of a run that `headway train --json` prints, with these names in this order."""

    run_key: str
    status: str
    steps: int
    accuracy_start: float | None
    """Greedy accuracy of the first validation, which is before training; None without validation."""
    accuracy_end: float | None
    wall_s: float
    groups_trained: int
    groups_dropped: int
    staleness_max: int | None
    staleness_mean: float | None
    """Publications, over trained groups."""
    update_lag_mean: float | None
    """Optimizer updates, over trained tokens."""
    samples_per_s: float | None
    """Answers trained per second, while training."""
    mlflow_run_id: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(run: RunDir, *, run_key: str, status: str, wall_s: float, mlflow_run_id: str | None = None) -> Summary:
    """Add up the run directory. `wall_s` is the caller's; without `mlflow_run_id` the stored one is taken."""
    history = read_history(run)
    recorded = set(history.step_K.tolist())
    trained, dropped = 0, set(_dropped_ids(run))
    for claim in claims(run):
        trained += len(claim.groups) if claim.step in recorded else 0
        dropped.update(drop.group_id for drop in claim.dropped)
    column = history.metrics
    rates = [rate for rate in column["system/samples_per_s"].tolist() if rate > 0]
    accuracy = [v.greedy_accuracy for v in history.validations]
    oldest = [age for age in column["staleness/max"].tolist() if math.isfinite(age)]
    return Summary(
        run_key=run_key, status=status, steps=len(recorded), wall_s=round(wall_s, 3),
        accuracy_start=_number(accuracy[0]) if accuracy else None,
        accuracy_end=_number(accuracy[-1]) if accuracy else None,
        groups_trained=trained, groups_dropped=len(dropped),
        staleness_max=int(max(oldest)) if oldest else None,
        staleness_mean=_number(weighted_mean(column["staleness/mean"].tolist(), [1.0] * len(recorded))),
        update_lag_mean=_number(weighted_mean(column["staleness/update_lag_mean"].tolist(),
                                              column["train/loss_tokens"].tolist())),
        # Steps hold equally many answers: the rate over all of them is the harmonic mean.
        samples_per_s=_number(len(rates) / sum(1 / rate for rate in rates)) if rates else None,
        mlflow_run_id=mlflow_run_id or stored_mlflow_run(run))


def stored_mlflow_run(run: RunDir) -> str | None:
    """The id of the MLflow run that mirrors this run; None before tracking has made one."""
    try:
        return str(read_json(run.mlflow_run)["run_id"])
    except FileNotFoundError:
        return None


def _dropped_ids(run: RunDir) -> Iterator[str]:
    for path in drop_files(run):
        for drop in read_drops(path):
            yield drop.group_id


def _number(value: float) -> float | None:
    """JSON has no NaN: what does not exist is null."""
    return round(value, 6) if math.isfinite(value) else None
