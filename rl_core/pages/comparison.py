"""Runs compared, as one HTML page: learning curves and held-out accuracy of all, and the differences to the first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rl_core.gaps import Gaps
from rl_core.looking.comparison import Difference, caveats, changed_settings, check_comparable, compare
from rl_core.looking.curves import SMOOTH_STEPS, Curve, read_curve, smooth
from rl_core.looking.difference_text import DASH
from rl_core.pages.page import asset, page, text
from rl_core.run_dir import RunDir

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 260, 52, 30, 12
"""Of a plot, in pixels, and what its axes take of it."""
COLOURS = 6
"""Classes `c0` to `c5` of comparison.css; further runs begin again, dashed."""


def comparison_page(runs: Sequence[RunDir]) -> str:
    """The first run is what the others are compared with. Raises ConfigError (rl_core/looking/comparison.py)."""
    check_comparable(runs)
    gaps = Gaps()
    curves = [read_curve(run, gaps) for run in runs]
    last = max([1, *(int(done) for curve in curves for done in (*curve.done_K[-1:], *curve.done_V[-1:]))])
    title = " | ".join(curve.run_key for curve in curves)
    parts = [
        f"<h1>{text(title)}</h1>", _legend(curves),
        f"<h2>Reward of trained answers</h2><p>Mean of a step, and of {SMOOTH_STEPS} steps around it.</p>",
        _plot([_reward(i, curve) for i, curve in enumerate(curves)], last, _range([c.reward_K for c in curves])),
        "<h2>Held-out accuracy</h2><p>Of greedy answers, with 95 % intervals.</p>",
        _plot([_accuracy(i, curve) for i, curve in enumerate(curves)], last,
              _range([values for c in curves for values in (c.accuracy_V, c.low_V, c.high_V)])),
        *(_differences(runs[0], run) for run in runs[1:]),
        "".join(f"<p>{text(gap)}</p>" for gap in gaps)]
    return page(f"Compared: {title}", body="\n".join(parts), style=asset("comparison.css"))


# -- plots


class _Scale:
    """Training steps and values to places in the plot."""

    def __init__(self, last: int, low: float, high: float) -> None:
        self.last, self.low, self.high = last, low, high

    def x(self, step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 10) * step / self.last, 1)

    def y(self, value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low), 1)


_Drawing = tuple[str, list[tuple[str, NDArray[np.int64], NDArray[np.float64], NDArray[np.float64] | None]]]
"""Classes of a run, and its marks: kind (raw, line, dots, band), steps, values, and the upper ones of a band."""


def _class(i: int) -> str:
    return f"c{i % COLOURS}" + (" dashed" if i >= COLOURS else "")


def _reward(i: int, curve: Curve) -> _Drawing:
    return _class(i), [("raw", curve.done_K, curve.reward_K, None),
                       ("line", curve.done_K, smooth(curve.reward_K, SMOOTH_STEPS), None)]


def _accuracy(i: int, curve: Curve) -> _Drawing:
    return _class(i), [("band", curve.done_V, curve.low_V, curve.high_V),
                       ("line", curve.done_V, curve.accuracy_V, None), ("dots", curve.done_V, curve.accuracy_V, None)]


def _range(values: Iterable[NDArray[np.float64]]) -> tuple[float, float]:
    known = np.concatenate([np.zeros(0), *(each[np.isfinite(each)] for each in values)])
    if not known.size:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    pad = 0.05 * (high - low) or 0.5
    return low - pad, high + pad


def _plot(drawings: Iterable[_Drawing], last: int, limits: tuple[float, float]) -> str:
    scale = _Scale(last, *limits)
    marks = [_axes(scale)]
    for names, mine in drawings:
        marks.append(f'<g class="{names}">' + "".join(_mark(scale, *mark) for mark in mine) + "</g>")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}</svg>'


def _axes(scale: _Scale) -> str:
    marks: list[str] = []
    for value in _ticks(scale.low, scale.high, 5):
        y = scale.y(value)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>'
                     f'<text class="end" x="{LEFT - 6}" y="{y + 4}">{value:.4g}</text>')
    for step in _ticks(0, scale.last, 10):
        marks.append(f'<text class="middle" x="{scale.x(step)}" y="{HEIGHT - 10}">{step:.4g}</text>')
    return "".join(marks) + f'<text class="end" x="{WIDTH - 10}" y="{HEIGHT - 22}">training steps</text>'


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within [low, high], at most `most` and one."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _mark(scale: _Scale, kind: str, steps: NDArray[np.int64], values: NDArray[np.float64],
          upper: NDArray[np.float64] | None) -> str:
    known = np.isfinite(values) if upper is None else np.isfinite(values) & np.isfinite(upper)
    places = [(scale.x(step), scale.y(value)) for step, value in zip(steps[known], values[known], strict=True)]
    if not places:
        return ""
    if kind == "dots":
        return "".join(f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in places)
    if upper is not None:
        places += [(scale.x(step), scale.y(value)) for step, value in zip(steps[known][::-1], upper[known][::-1],
                                                                          strict=True)]
    shape = "polyline" if upper is None else "polygon"
    return f'<{shape} class="{kind}" points="{" ".join(f"{x},{y}" for x, y in places)}"/>'


def _legend(curves: Iterable[Curve]) -> str:
    return '<p class="legend">' + "".join(
        f'<span class="{_class(i)}"><svg viewBox="0 0 22 10"><line class="line" x1="0" x2="22" y1="5" y2="5"/></svg>'
        f"{text(curve.run_key)}</span>" for i, curve in enumerate(curves)) + "</p>"


# -- numbers


def _differences(baseline: RunDir, run: RunDir) -> str:
    told = [each for each in compare(baseline, run) if not (math.isnan(each.baseline) and math.isnan(each.value))]
    rows = "".join(map(_row, told))
    said = "".join(f"<li>{text(each)}</li>" for each in caveats(baseline, run))
    settings = "".join(f"<li><code>{text(name)}</code>: {text(before)} → {text(now)}</li>"
                       for name, (before, now) in changed_settings(baseline, run).items())
    return (f"<h2>{text(run.root.name)} against {text(baseline.root.name)}</h2><table><tr><th></th>"
            f"<th>{text(baseline.root.name)}</th><th>{text(run.root.name)}</th><th>difference</th>"
            f"<th>95 % interval</th><th></th><th></th></tr>{rows}</table>"
            + (f"<p>Settings that differ:</p><ul>{settings}</ul>" if settings else "")
            + (f"<ul>{said}</ul>" if said else ""))


def _row(of: Difference) -> str:
    values = [DASH if math.isnan(value) else f"{value:.4g}" for value in (of.baseline, of.value)]
    cells = [of.name.replace("_", " "), *values, of.said.difference, of.said.interval, of.unit]
    verdict = of.verdict
    return "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + f'<td class="{verdict}">{verdict}</td></tr>'
