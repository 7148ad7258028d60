"""How figures are taken: repeated, interleaved with what they are compared with, and reported as they came."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Wall seconds of one call, or seconds of another clock."""
    start = clock()
    run()
    return clock() - start


def side_by_side(*runs: Callable[[], Any], rounds: int,
                 clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Median wall seconds of each, taken in turn, so that a busy moment meets all of them.

    With `clock=time.process_time` processor seconds: for work of one thread on memory, which waits for nothing, and so
    is measured without the time that other processes take.
    """
    taken = [[timed(run, clock) for run in runs] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def figure(name: str, value: float | None, unit: str, bar: str | None = None, **more: Any) -> dict[str, Any]:
    """One line of `make bench`. `bar` is `">= 0.3"` or `"<= 20"`; without a bar the figure only informs."""
    ok = None
    if bar is not None and value is not None:
        sign, limit = bar.split()
        ok = value >= float(limit) if sign == ">=" else value <= float(limit)
    return {"name": name, "value": None if value is None else float(f"{value:.4g}"), "unit": unit, "bar": bar, "ok": ok,
            **more}
