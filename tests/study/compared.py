"""Cells against bound 0, paired by seed: pure functions of the rows.

Every interval is Student's, over seeds: a seed is one draw of model, prompts and samples. Two runs of one seed share
model, prompts and held-out prompts, so what is compared is the difference within a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.estimates import Estimate
from rl_core.run_numbers import UNKNOWN, mean_of_steps
from tests.study.measured import Point, RunRow, by_cell
from tests.study.order import BOUND_0, GOAL, UNCORRECTED, Cell

MARGIN = 0.03
"""Of the goal: accuracy that old samples may cost."""


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean over seeds with its 95 % interval; NaN ends for a single one."""
    return mean_of_steps(values)


def accuracy_at(curve: Sequence[Point], seconds: float) -> float:
    """Held-out accuracy after so many seconds: between two validations on the straight line, behind the last one the
    last. NaN where the seconds of the run are not known."""
    points = sorted(curve, key=lambda point: point.step)
    if not points or not all(math.isfinite(point.seconds) for point in points) or not math.isfinite(seconds):
        return math.nan
    return float(np.interp(seconds, [point.seconds for point in points], [point.accuracy for point in points]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A cell over its seeds, and against bound 0 over the seeds that both have."""

    cell: Cell
    seeds: int
    accuracy: Estimate
    """Greedy, held out, behind the last step: at equal samples."""
    difference: Estimate
    """Of that to bound 0 of the same seed."""
    time_difference: Estimate
    """The same at equal wall time: when the faster of the two has made its last step."""
    seconds: Estimate
    update_lag: Estimate
    staleness: Estimate
    wasted_groups: Estimate
    length_bias: Estimate
    length_difference: Estimate
    """Tokens of a held-out greedy answer, against bound 0."""
    learner_waiting: Estimate


def compared(runs: Sequence[RunRow], points: Sequence[Point], base: Cell = BOUND_0) -> list[Compared]:
    """One for each cell that has a run. Differences are to `base`."""
    cells, curves = by_cell(runs), _curves(points)
    first = {row.seed: row for row in cells.get(base, [])}
    return [_compared(cell, rows, first, curves) for cell, rows in cells.items()]


Curves = Mapping[tuple[Cell, int], list[Point]]


def _curves(points: Sequence[Point]) -> Curves:
    found: dict[tuple[Cell, int], list[Point]] = {}
    for point in points:
        found.setdefault((point.cell, point.seed), []).append(point)
    return found


def _compared(cell: Cell, rows: Sequence[RunRow], first: Mapping[int, RunRow], curves: Curves) -> Compared:
    pairs = [(row, first[row.seed]) for row in rows if row.seed in first and row.steps == first[row.seed].steps]
    return Compared(
        cell=cell, seeds=len(rows), accuracy=over_seeds([row.accuracy for row in rows]),
        difference=_difference(cell, [row.accuracy - other.accuracy for row, other in pairs], pairs),
        time_difference=_difference(cell, [_at_equal_time(row, other, curves) for row, other in pairs], pairs),
        seconds=over_seeds([row.seconds for row in rows]), update_lag=over_seeds([row.update_lag for row in rows]),
        staleness=over_seeds([row.staleness_mean for row in rows]),
        wasted_groups=over_seeds([row.wasted_groups for row in rows]),
        length_bias=over_seeds([row.length_bias for row in rows]),
        length_difference=_difference(cell, [row.length_end - other.length_end for row, other in pairs], pairs),
        learner_waiting=over_seeds([row.learner_waiting for row in rows]))


def _difference(cell: Cell, values: Sequence[float], pairs: Sequence[tuple[RunRow, RunRow]]) -> Estimate:
    """Nothing differs from itself."""
    return UNKNOWN if any(row is other for row, other in pairs) else over_seeds(values)


def _at_equal_time(row: RunRow, other: RunRow, curves: Curves) -> float:
    until = min(row.seconds, other.seconds) if math.isfinite(row.seconds + other.seconds) else math.nan
    mine, base = (accuracy_at(curves.get((each.cell, each.seed), []), until) for each in (row, other))
    return mine - base


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether learning holds under staleness 8, as numbers and as a sentence each."""

    seeds: int
    difference: Estimate
    """Decoupled at 8 against bound 0, equal samples."""
    time_difference: Estimate
    uncorrected: Estimate
    """No correction at 8 against decoupled at 8, equal samples."""

    @property
    def sentences(self) -> tuple[str, str, str]:
        return (_held(self.difference), _ahead(self.time_difference), _worse(self.uncorrected))

    @property
    def met(self) -> bool:
        """By the means."""
        return self.difference.value > -MARGIN and self.time_difference.value > 0


def verdict(runs: Sequence[RunRow], points: Sequence[Point]) -> Verdict | None:
    """None while there is no pair of runs."""
    of = {each.cell: each for each in compared(runs, points)}
    if GOAL not in of or BOUND_0 not in of or not math.isfinite(of[GOAL].difference.value):
        return None
    against = {each.cell: each for each in compared(runs, points, base=GOAL)}
    seeds = {row.seed for row in runs if row.cell == GOAL} & {row.seed for row in runs if row.cell == BOUND_0}
    return Verdict(seeds=len(seeds), difference=of[GOAL].difference, time_difference=of[GOAL].time_difference,
                   uncorrected=against[UNCORRECTED].difference if UNCORRECTED in against else UNKNOWN)


def interval(estimate: Estimate, form: str = "+.3f") -> str:
    """`-0.010 [-0.030, +0.010]`; `-` where it is not known, the value alone where its interval is not."""
    if not math.isfinite(estimate.value):
        return "-"
    if not math.isfinite(estimate.lo):
        return f"{estimate.value:{form}}"
    return f"{estimate.value:{form}} [{estimate.lo:{form}}, {estimate.hi:{form}}]"


def _held(difference: Estimate) -> str:
    said = f"Equal samples: decoupled at staleness 8 minus bound 0 is {interval(difference)}; the goal is above " \
           f"-{MARGIN}: "
    if difference.value <= -MARGIN:
        return said + "**not met**."
    if not difference.lo > -MARGIN:
        return said + "**met by the mean**, and its interval reaches below."
    return said + "**met**, with the whole interval."


def _ahead(difference: Estimate) -> str:
    said = f"Equal wall time: the difference is {interval(difference)}; the goal is above 0: "
    if not math.isfinite(difference.value):
        return said + "**not measured**."
    if difference.value <= 0:
        return said + "**not met**."
    return said + ("**met**, with the whole interval." if difference.lo > 0 else
                   "**met by the mean**, and its interval reaches below.")


def _worse(difference: Estimate) -> str:
    said = f"No correction minus decoupled, both at staleness 8, is {interval(difference)}: "
    if not math.isfinite(difference.value):
        return said + "**not measured**."
    if difference.hi < 0:
        return said + "**no correction is visibly worse**."
    if difference.lo > 0:
        return said + "**no correction is visibly better**, which is not what was expected."
    return said + "**no visible difference**, where no correction was expected to be worse."
