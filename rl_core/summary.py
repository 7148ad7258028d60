"""The numbers of a run that `headway train --json` prints, from its frames."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rl_core import frames
from rl_core.errors import BrokenFile
from rl_core.gaps import merged
from rl_core.group_facts import read_group_facts
from rl_core.run_dir import RunDir, read_json
from rl_core.run_numbers import run_numbers


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
    facts = read_group_facts(run, outcomes=False)
    steps, validations = frames.steps(run), frames.validations(run)
    if gaps := merged(steps.attrs["gaps"], validations.attrs["gaps"]):
        raise BrokenFile("\n".join(gaps))
    of = run_numbers(steps, validations, facts)
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
