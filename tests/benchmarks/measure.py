"""How figures are taken: repeated, interleaved with what they are compared with, and reported as they came."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def timed(run: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def side_by_side(*runs: Callable[[], Any], rounds: int, best: bool = False) -> list[float]:
    """Wall seconds of each, taken in turn, so that a busy moment meets all of them.

    The median of the rounds; with `best` the fastest one, for work of memory and processor alone, where whatever is
    slower was somebody else's doing.
    """
    taken = [[timed(run) for run in runs] for _ in range(rounds)]
    return [min(column) if best else statistics.median(column) for column in zip(*taken, strict=True)]


def figure(name: str, value: float | None, unit: str, bar: str | None = None, **more: Any) -> dict[str, Any]:
    """One line of `make bench`. `bar` is `">= 0.3"` or `"<= 20"`; without a bar the figure only informs."""
    ok = None
    if bar is not None and value is not None:
        sign, limit = bar.split()
        ok = value >= float(limit) if sign == ">=" else value <= float(limit)
    return {"name": name, "value": None if value is None else float(f"{value:.4g}"), "unit": unit, "bar": bar, "ok": ok,
            **more}
