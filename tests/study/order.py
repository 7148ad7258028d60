"""What `make study` runs, and in which order: pure data and functions (docs/staleness.md, "Measured").

A cell is one way to treat old samples; a run is a cell with a seed. Runs of one seed are paired: they have the same
model, prompts and held-out prompts. The order is fixed, and what any budget buys is a prefix of it:

    1. what the goal is about, all seeds: bound 0, decoupled at staleness 8, no correction at staleness 8
    2. every other cell with seed 1, then every other cell with seed 2, and so on
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Mode = Literal["exact", "keep", "drop", "mask"]
"""`staleness.exact`, or a bound with that policy."""

SEEDS = (1, 2, 3, 4, 5)
STALENESS = (1, 2, 4, 8, 16)
BOUNDS = (4, 16)
"""Of drop and mask, and of keep beside them."""
STEPS = 100

CORRECTIONS: Mapping[str, tuple[str, ...]] = {
    "none": ("learner.loss.name=ppo_clip",),
    "truncated": ("learner.loss.name=ppo_clip", "learner.correction.weights=token_truncate"),
    "decoupled": ("learner.loss.name=decoupled_ppo",),
    "loglinear": ("learner.loss.name=decoupled_ppo", "learner.loss.proximal=loglinear"),
    "cispo": ("learner.loss.name=cispo", "learner.correction.mode=bypass"),
    "gspo": ("learner.loss.name=gspo", "learner.correction.mode=bypass"),
}
"""Settings by name. In bypass mode the ratio of cispo and gspo is policy/behavior, which is all they do about age."""

COMMON = (
    "isolated=false", "checkpoint.every=1000", "checkpoint.keep=1", "validation.sampled=false", "validation.table=0",
    "data.validation_size=512", "validation.every=10", "learner.lr=1e-4", "learner.decay=constant",
    "learner.minibatch_groups=8")
"""Over the preset tiny-cpu. Two updates a step, so that the proximal policy is not the policy; a constant learning
rate, so that a run can be looked at at any time: of 1e-4, 2e-4, 5e-4 and 1e-3 the one at which bound 0 ended highest
(0.98, 0.95, 0.90, 0.44; seed 1, 160 steps for the first two and 80), whatever the others did; services by address
(study.py)."""
PRESET = "tiny-cpu"


@dataclass(frozen=True, slots=True)
class Cell:
    """`Cell("decoupled", "exact", 8)`; bound 0 is `Cell("none", "keep", 0)`."""

    correction: str
    mode: Mode
    staleness: int
    """Publications: of every group (exact), or the bound."""

    @property
    def name(self) -> str:
        """`decoupled-exact-8`, `bound-0`: part of run keys, and a row of the table."""
        return "bound-0" if self == BOUND_0 else f"{self.correction}-{self.mode}-{self.staleness}"

    @property
    def settings(self) -> tuple[str, ...]:
        """What it sets over the preset, and over what all cells have."""
        policy = "keep" if self.mode == "exact" else self.mode
        exact = (f"staleness.exact={self.staleness}", f"weights.keep={self.staleness + 4}")
        return (*CORRECTIONS[self.correction], f"staleness.bound={self.staleness}", f"staleness.policy={policy}",
                *(exact if self.mode == "exact" else ()))


BOUND_0 = Cell("none", "keep", 0)
"""On-policy but for the second update of a step. What all others are compared with."""
GOAL = Cell("decoupled", "exact", 8)
UNCORRECTED = Cell("none", "exact", 8)
FIRST = (BOUND_0, GOAL, UNCORRECTED)
CELLS = (*FIRST, *(cell for staleness in (8, 4, 16, 2, 1) for name in CORRECTIONS
                   if (cell := Cell(name, "exact", staleness)) not in FIRST),
         *(Cell("decoupled", mode, bound) for bound in BOUNDS for mode in ("keep", "drop", "mask")))
"""In the order in which each seed takes them."""


@dataclass(frozen=True, slots=True)
class StudyRun:
    """`StudyRun(GOAL, 3).key("study")` -> `study-decoupled-exact-8-s3`."""

    cell: Cell
    seed: int

    def key(self, study: str) -> str:
        return f"{study}-{self.cell.name}-s{self.seed}"

    def settings(self, steps: int) -> tuple[str, ...]:
        return (*COMMON, *self.cell.settings, f"seed={self.seed}", f"total_steps={steps}")


def ordered(seeds: Sequence[int] = SEEDS) -> tuple[StudyRun, ...]:
    """All runs, in the order in which they are made."""
    first = [StudyRun(cell, seed) for seed in seeds for cell in FIRST]
    return (*first, *(StudyRun(cell, seed) for seed in seeds for cell in CELLS if cell not in FIRST))


def left(runs: Sequence[StudyRun], done: Container[StudyRun]) -> tuple[StudyRun, ...]:
    """Those that are not done, in order."""
    return tuple(run for run in runs if run not in done)


def expected_s(run: StudyRun, took: Mapping[StudyRun, float], guess_s: float) -> float:
    """Seconds that a run will take: the median of the finished ones of its cell, else of all, else the guess."""
    of_cell = [seconds for other, seconds in took.items() if other.cell == run.cell]
    return median(of_cell or list(took.values()) or [guess_s])


def fits(run: StudyRun, took: Mapping[StudyRun, float], *, left_s: float, guess_s: float) -> bool:
    """Whether a run is expected to end within what is left of the budget."""
    return expected_s(run, took, guess_s) <= left_s


def seconds_of(text: str) -> float:
    """`2h`, `90m`, `45s`, `1.5h` or plain seconds. Raises ValueError."""
    unit = {"h": 3600.0, "m": 60.0, "s": 1.0}.get(text[-1:])
    seconds = float(text if unit is None else text[:-1]) * (unit or 1.0)
    if not seconds > 0:
        raise ValueError(f"a budget is above 0 (got {text!r})")
    return seconds
