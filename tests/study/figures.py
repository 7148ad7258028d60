"""The figure of the study: accuracy against bound 0 over the realised update lag, and accuracy over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.study.compared import Compared, accuracy_at, compared, over_seeds
from tests.study.measured import Point, RunRow, by_cell
from tests.study.order import BOUND_0, GOAL, UNCORRECTED, Cell

INK, FAINT = "#1f2937", "#d1d5db"
COLORS = {"none": "#6b7280", "truncated": "#0d9488", "decoupled": "#2563eb", "loglinear": "#7c3aed",
          "cispo": "#ea580c", "gspo": "#be185d"}
CURVES: tuple[tuple[Cell, str, str], ...] = (
    (BOUND_0, "bound 0", INK), (GOAL, "decoupled, exactly 8", COLORS["decoupled"]),
    (UNCORRECTED, "no correction, exactly 8", COLORS["none"]))
MARKS = {"exact": "o", "keep": "s", "drop": "v", "mask": "D"}
MOMENTS = 60


def draw(runs: Sequence[RunRow], points: Sequence[Point], path: Path) -> None:
    """Write the figure; the same rows make the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "headway", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for ax in (left, right):
            ax.spines[["top", "right"]].set_visible(False)
            ax.spines[["left", "bottom"]].set_color(FAINT)
            ax.tick_params(colors=INK, labelsize=9)
            ax.grid(axis="y", color=FAINT, linewidth=0.6)
            ax.set_axisbelow(True)
        _by_lag(left, compared(runs, points))
        _by_time(right, points)
        figure.savefig(path, facecolor="white", metadata={"Date": None})


def _by_lag(ax: Any, cells: Sequence[Compared]) -> None:
    ax.axhline(0.0, color=INK, linewidth=0.8)
    named = set[str]()
    for mode, mark in MARKS.items():
        for name, color in COLORS.items():
            of = sorted((each for each in cells if (each.cell.correction, each.cell.mode) == (name, mode)
                         and each.cell != BOUND_0 and math.isfinite(each.difference.value)),
                        key=lambda each: each.update_lag.value)
            if not of:
                continue
            label = name if mode == "exact" else f"{name}, {mode}"
            lag = [each.update_lag.value for each in of]
            value = [each.difference.value for each in of]
            known = [each for each in of if math.isfinite(each.difference.lo)]
            ax.plot(lag, value, color=color, marker=mark, markersize=4, linewidth=1.4 if mode == "exact" else 0,
                    label=None if label in named else label)
            ax.vlines([each.update_lag.value for each in known], [each.difference.lo for each in known],
                      [each.difference.hi for each in known], color=color, alpha=0.5, linewidth=1)
            named.add(label)
    ax.set_xlabel("realised update lag, optimizer updates", color=INK)
    ax.set_ylabel("held-out accuracy minus bound 0, equal samples", color=INK)
    if named:
        ax.legend(frameon=False, fontsize=8, loc="best")


def _by_time(ax: Any, points: Sequence[Point]) -> None:
    cells = by_cell(points)
    for cell, label, color in CURVES:
        seeds: dict[int, list[Point]] = {}
        for point in cells.get(cell, []):
            seeds.setdefault(point.seed, []).append(point)
        curves = [curve for curve in seeds.values() if all(math.isfinite(point.seconds) for point in curve)]
        if not curves:
            continue
        until = min(max(point.seconds for point in curve) for curve in curves)
        moments = np.linspace(0.0, until, MOMENTS)
        means = [over_seeds([accuracy_at(curve, moment) for curve in curves]) for moment in moments.tolist()]
        ax.plot(moments, [mean.value for mean in means], color=color, linewidth=1.6, label=label)
        ax.fill_between(moments, [mean.lo for mean in means], [mean.hi for mean in means], color=color, alpha=0.13,
                        linewidth=0)
    ax.set_xlabel("seconds since the first lease", color=INK)
    ax.set_ylabel("held-out accuracy, greedy", color=INK)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8, loc="best")
