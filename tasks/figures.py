"""The figures of a run, drawn from its directory alone: learning curve, staleness histogram, timeline of both sides.

Drawn with matplotlib's Figure objects on the Agg canvas: no pyplot, no global state, safe on any thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rl_core.history import History, read_history
from rl_core.landed_groups import trained_ages
from rl_core.looking.curves import SMOOTH_STEPS, Curve, smooth
from rl_core.metrics import STATES
from rl_core.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#1f2937", "#d1d5db"
BLUE, ORANGE, TEAL = "#2563eb", "#ea580c", "#0d9488"
RUN_COLORS = (BLUE, ORANGE, TEAL, "#7c3aed", "#be185d", "#a16207")
"""Of runs that are compared."""
STATE_COLORS = {"busy": "#2563eb", "waiting": "#e5e7eb", "syncing": "#f59e0b", "paused": "#9ca3af"}
SOURCE_STYLES = ("dashed", "dotted", "dashdot", (0, (5, 1)))
"""Lines of the first data sources."""
TIMELINE_CELLS = 240


def draw_figures(run: RunDir, *, title: str, limit: int) -> list[Path]:
    """Write `figures/{learning-curve,staleness,timeline}.png` of what is recorded so far; returns the files written.

    limit: ceil(eta), drawn into the histogram. A run without a recorded step gives no figure.
    """
    history = read_history(run)
    if len(history.step_K) == 0:
        return []
    run.figures.mkdir(parents=True, exist_ok=True)
    drawn = {
        "learning-curve": learning_curve(history, title),
        "staleness": staleness_histogram(trained_ages(run), limit, title),
        "timeline": timeline(history, title),
    }
    paths: list[Path] = []
    for name, figure in drawn.items():
        path = run.figures / f"{name}.png"
        figure.savefig(path, dpi=144, facecolor="white")
        paths.append(path)
    return paths


def _canvas(rows: int, title: str, *, height: float) -> tuple[Figure, list[Axes]]:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns on stderr while it builds its font cache
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, parse_math=False)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(FAINT)
        ax.tick_params(colors=INK, labelsize=9)
    return figure, axes


def learning_curve(history: History, title: str) -> Figure:
    """Reward of the trained answers by step, and accuracy on held-out prompts: greedy with its 95 % interval, sampled,
    and greedy of the first data sources if there are several."""
    figure, (ax,) = _canvas(1, title, height=4.2)
    reward_K = history.metrics["reward/mean"]
    after_K = history.step_K + 1  # a record is what the step did; validations count steps done
    ax.plot(after_K, reward_K, color=BLUE, alpha=0.25, linewidth=1)
    ax.plot(after_K, smooth(reward_K, SMOOTH_STEPS), color=BLUE, linewidth=1.8,
            label=f"reward of trained answers (mean of {SMOOTH_STEPS} steps)")
    steps = [v.step for v in history.validations]
    series = (("greedy_accuracy", "validation, greedy", ORANGE), ("sampled_accuracy", "validation, sampled", TEAL))
    for field, label, color in series:
        values = np.array([getattr(v, field) for v in history.validations], float)
        if np.isfinite(values).any():
            ax.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1.4, label=label)
    ax.fill_between(steps, [v.greedy.lo for v in history.validations], [v.greedy.hi for v in history.validations],
                    color=ORANGE, alpha=0.15, linewidth=0)
    for style, (source, values) in zip(SOURCE_STYLES, sources_of(history).items(), strict=False):
        ax.plot(steps, values, color=ORANGE, alpha=0.7, linestyle=style, linewidth=1, label=f"greedy, {source}")
    ax.set_xlabel("training steps", color=INK)
    ax.set_ylabel("reward, accuracy", color=INK)
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.legend(frameon=False, fontsize=9, loc="best")
    return figure


def compared_curves(curves: Sequence[Curve]) -> Figure:
    """Reward of the trained answers of several runs by step, and below it their greedy accuracy with its 95 % interval.
    """
    figure, (above, below) = _canvas(2, " | ".join(curve.run_key for curve in curves), height=6.4)
    for curve, color in zip(curves, cycle(RUN_COLORS), strict=False):
        above.plot(curve.done_K, curve.reward_K, color=color, alpha=0.25, linewidth=1)
        above.plot(curve.done_K, smooth(curve.reward_K, SMOOTH_STEPS), color=color, linewidth=1.8, label=curve.run_key)
        below.fill_between(curve.done_V, curve.low_V, curve.high_V, color=color, alpha=0.13, linewidth=0)
        below.plot(curve.done_V, curve.accuracy_V, color=color, marker="o", markersize=4, linewidth=1.4)
    above.set_ylabel(f"reward (mean of {SMOOTH_STEPS} steps)", color=INK)
    below.set_ylabel("held-out accuracy, greedy", color=INK)
    below.set_xlabel("training steps", color=INK)
    for ax in (above, below):
        ax.grid(axis="y", color=FAINT, linewidth=0.6)
        ax.set_axisbelow(True)
    above.legend(frameon=False, fontsize=9, loc="best")
    return figure


def sources_of(history: History) -> dict[str, list[float]]:
    """Greedy accuracy of each data source by validation, NaN where it has none; empty for one source."""
    names = dict.fromkeys(source for v in history.validations for source in v.record.get("by_source", {}))
    if len(names) < 2:
        return {}
    found = {name: [v.record.get("by_source", {}).get(name, {}).get("greedy_accuracy") for v in history.validations]
             for name in names}
    return {name: [math.nan if value is None else value for value in values] for name, values in found.items()}


def staleness_histogram(ages: NDArray[np.int64], limit: int, title: str) -> Figure:
    """Trained groups by age at their step; the limit is the right edge of the last age within the bound."""
    figure, (ax,) = _canvas(1, title, height=3.4)
    counts = np.bincount(ages, minlength=limit + 1) if len(ages) else np.zeros(limit + 1)
    at = np.arange(len(counts))
    share = 100 * counts / max(1, counts.sum())
    bars = ax.bar(at, share, width=0.8, color=[BLUE if age <= limit else ORANGE for age in at])
    ax.bar_label(bars, [f"{s:.1f} %" if c else "" for s, c in zip(share, counts, strict=True)], fontsize=9, color=INK)
    ax.axvline(limit + 0.5, color=INK, linewidth=1, linestyle="--")
    over = share[at > limit].sum()
    ax.annotate(f"limit {limit}: {over:.1f} % older", (limit + 0.5, 1), xycoords=("data", "axes fraction"),
                xytext=(5, -4), textcoords="offset points", va="top", fontsize=9, color=INK)
    ax.set_xlim(-0.6, max(len(counts), limit + 2) - 0.4)
    ax.set_xticks(at)
    ax.set_xlabel("staleness of a group when it was trained, publications", color=INK)
    ax.set_ylabel("% of trained groups", color=INK)
    return figure


def timeline(history: History, title: str) -> Figure:
    """What each side did with its time, stacked to 100 %. Stops between attempts are cut out: a dashed line each."""
    figure, axes = _canvas(2, title, height=4.6)
    edges, cuts = step_edges(history)
    for ax, side in zip(axes, ("learner", "rollout"), strict=True):
        shares = np.stack([history.metrics[f"utilization/{side}_{state}"] for state in STATES])
        left, width, cells = merge_cells(edges, shares, TIMELINE_CELLS)
        bottom = np.zeros(len(left))
        for state, share in zip(STATES, cells, strict=True):
            ax.bar(left, 100 * share, width, bottom, align="edge", color=STATE_COLORS[state], label=state, linewidth=0)
            bottom = bottom + 100 * share
        for cut in cuts:
            ax.axvline(cut, color=INK, linewidth=1, linestyle="--")
        busy = 100 * float(cells[0] @ width) / max(1e-9, float(width.sum()))
        ax.set_title(f"{side}: {busy:.0f} % busy", loc="left", fontsize=10, color=INK)
        ax.set_ylim(0, 100)
        ax.set_xlim(0, edges[-1, 1])
        ax.set_ylabel("% of time", color=INK)
    axes[-1].set_xlabel("seconds of running", color=INK)
    axes[0].legend(frameon=False, fontsize=9, ncols=len(STATES), loc="lower right", bbox_to_anchor=(1, 0.98))
    return figure


def step_edges(history: History) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`([K, 2] begin and end, cuts)` of the intervals that the steps' shares stand for, seconds of running time.

    An interval runs from the record before to the step's own record. Where the run stood still far longer than a step
    takes (it was stopped), it runs from the step's begin, and the stop is cut out at the times in `cuts`.
    """
    gap = np.diff(history.time_K, prepend=history.time_K[:1])
    step_s = np.nan_to_num(history.metrics["system/step_s"], nan=0.0)
    stopped = gap > 20 * max(1.0, float(np.median(gap)))
    stopped[0] = True  # what was before the first step is not known
    length = np.where(stopped, step_s, np.maximum(gap, 0.0))
    end = np.cumsum(length)
    begin = end - length
    return np.stack([begin, end], axis=1), begin[stopped][1:]


def merge_cells(edges: NDArray[np.float64], shares: NDArray[np.float64],
                cells: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Merge neighbouring intervals into at most `cells`, time-weighted: `(left [C], width [C], shares [S, C])`."""
    weight = np.maximum(edges[:, 1] - edges[:, 0], 1e-9)
    weight = np.where(np.isfinite(shares).all(axis=0), weight, 0.0)
    starts = np.unique(np.linspace(0, len(edges), min(cells, len(edges)), endpoint=False).astype(int))
    total = np.add.reduceat(weight, starts)
    merged = np.add.reduceat(np.nan_to_num(shares) * weight, starts, axis=1) / np.maximum(total, 1e-9)
    ends = np.append(starts[1:], len(edges)) - 1
    left = edges[starts, 0]
    return left, np.minimum(total, edges[ends, 1] - left), merged
