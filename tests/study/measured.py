"""What a finished run of the study came to: two kinds of rows, from its directory alone, kept as CSV in docs/study.

`RunRow` is one run, `Point` one validation of it. Seconds count from the first lease to the record behind which the
weights were made: starting, validating and ending are not in them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_core import frames
from rl_core.group_facts import read_group_facts
from rl_core.run_dir import RunDir, file_numbers
from rl_core.run_numbers import run_numbers
from tests.study.order import BOUND_0, Cell, StudyRun

NAN = math.nan


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. Shares are within [0, 1]; NaN where a number does not exist."""

    correction: str
    mode: str
    staleness: int
    """Of the cell: asked for. What came of it is in `staleness_mean` and `update_lag`."""
    seed: int
    steps: int
    samples: int
    """Answers trained."""
    attempts: int
    """Starts; with more than one the seconds are not known."""
    accuracy_start: float
    accuracy: float
    """Greedy, on held-out prompts, behind the last step."""
    staleness_mean: float
    """Publications, over trained groups."""
    update_lag: float
    """Optimizer updates between the weights that sampled a token and those at the start of its step, over tokens."""
    seconds: float
    learner_waiting: float
    """Share of the time in which the learner waited for experience."""
    groups_trained: int
    groups_dropped: int
    groups_failed: int
    tokens_masked: int
    wasted_tokens: float
    """Share of the generated tokens that never landed."""
    length_trained: float
    """Tokens of a trained group, its prompt included."""
    length_judged: float
    """Tokens of a group that was trained or dropped."""
    length_end: float
    """Tokens of a held-out greedy answer behind the last step."""

    @property
    def cell(self) -> Cell:
        return Cell(self.correction, self.mode, self.staleness)  # type: ignore[arg-type]

    @property
    def wasted_groups(self) -> float:
        """Share of all finished groups that nothing was learned from."""
        ended = self.groups_trained + self.groups_dropped + self.groups_failed
        return (self.groups_dropped + self.groups_failed) / ended if ended else NAN

    @property
    def length_bias(self) -> float:
        """How much longer trained groups are than judged ones, a share; below 0 where dropping favours short ones."""
        return self.length_trained / self.length_judged - 1 if self.length_judged else NAN


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out accuracy behind `step` steps of a run."""

    correction: str
    mode: str
    staleness: int
    seed: int
    step: int
    seconds: float
    accuracy: float

    @property
    def cell(self) -> Cell:
        return Cell(self.correction, self.mode, self.staleness)  # type: ignore[arg-type]


def measured(run: RunDir, of: StudyRun) -> tuple[RunRow, tuple[Point, ...]]:
    """Read a run. Raises what the frames raise."""
    steps, validations = frames.steps(run), frames.validations(run)
    numbers = run_numbers(steps, validations, read_group_facts(run))
    trained = steps[steps["state"] == "trained"]
    groups = frames.groups(run)
    attempts = len(file_numbers(run.attempts, r"attempt-(\d{6})\.json"))
    begun = groups["dispatched_at"].min()
    ends = {int(step) + 1: (time - begun).total_seconds() for step, time in trained["time"].items()}
    known = attempts == 1
    place = (of.cell.correction, of.cell.mode, of.cell.staleness, of.seed)
    overall = validations[validations["data_source"].isna()].sort_values("step")
    points = tuple(Point(*place, int(row["step"]), ends.get(int(row["step"]), 0.0) if known else NAN,
                         float(row["greedy_accuracy"])) for _, row in overall.iterrows())
    judged = groups[groups["state"].isin(["trained", "dropped"])]
    return RunRow(
        *place, steps=len(trained), samples=int(groups[groups["state"] == "trained"]["n_responses"].sum()),
        attempts=attempts, accuracy_start=numbers.accuracy_start.value, accuracy=numbers.accuracy_end.value,
        staleness_mean=numbers.staleness_mean, update_lag=numbers.update_lag_mean,
        seconds=max(ends.values(), default=NAN) if known else NAN,
        learner_waiting=_mean(trained, "utilization/learner_waiting"), groups_trained=numbers.groups_trained,
        groups_dropped=numbers.groups_dropped,
        groups_failed=int(groups["state"].isin(["failed", "poison", "given_up"]).sum()),
        tokens_masked=int(np.nansum(_column(trained, "staleness/masked_tokens"))), wasted_tokens=numbers.wasted,
        length_trained=_mean(judged[judged["state"] == "trained"], "n_tokens"), length_judged=_mean(judged, "n_tokens"),
        length_end=float(overall.iloc[-1]["mean_length"]) if len(overall) else NAN), points


def _column(frame: Any, name: str) -> Any:
    return frame[name].to_numpy(np.float64, na_value=NAN) if name in frame.columns else np.full(len(frame), NAN)


def _mean(frame: Any, name: str) -> float:
    values = _column(frame, name)
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else NAN


# -- as CSV


def write_rows(path: Path, rows: Sequence[RunRow] | Sequence[Point]) -> None:
    """One line a row, numbers with 6 digits; an empty field is NaN."""
    names = [field.name for field in fields(rows[0])] if rows else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_text(value) for value in astuple(row)] for row in rows)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


Row = TypeVar("Row", RunRow, Point)


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """What `write_rows` has written. Raises FileNotFoundError, KeyError for a column that is missing."""
    casts = {"int": int, "float": lambda text: float(text) if text else NAN, "str": str}
    with path.open(newline="") as file:
        return [kind(**{field.name: casts[str(field.type)](line[field.name]) for field in fields(kind)})
                for line in csv.DictReader(file)]


def by_cell(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    """Rows of each cell, bound 0 first, then by correction, mode and staleness."""
    found: dict[Cell, list[Row]] = {}
    for row in rows:
        found.setdefault(row.cell, []).append(row)
    return dict(sorted(found.items(), key=lambda item: (item[0] != BOUND_0, item[0].correction, item[0].mode,
                                                        item[0].staleness)))
