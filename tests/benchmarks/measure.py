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


def side_by_side(*runs: Callable[[], Any], rounds: int, tidy: Callable[[], Any] = lambda: None) -> list[float]:
    """Median wall seconds of each, taken in turn, so that a busy moment meets all of them. `tidy` follows each call."""
    return [statistics.median(column) for column in _in_turn(runs, rounds, time.perf_counter, tidy)]


def processor_side_by_side(*runs: Callable[[], Any], rounds: int,
                           tidy: Callable[[], Any] = lambda: None) -> list[float]:
    """Least processor seconds of each, taken in turn: for work of one thread on memory, which waits for nothing.

    Time that other processes take is not counted, and the fastest round is the one that was disturbed least.
    """
    return [min(column) for column in _in_turn(runs, rounds, time.process_time, tidy)]


def _in_turn(runs: tuple[Callable[[], Any], ...], rounds: int, clock: Callable[[], float],
             tidy: Callable[[], Any]) -> list[tuple[float, ...]]:
    taken: list[list[float]] = []
    for _ in range(rounds):
        taken.append([])
        for run in runs:
            taken[-1].append(timed(run, clock))
            tidy()
    return list(zip(*taken, strict=True))


def figure(name: str, value: float | None, unit: str, bar: str | None = None, **more: Any) -> dict[str, Any]:
    """One line of `make bench`. `bar` is `">= 0.3"` or `"<= 20"`; without a bar the figure only informs."""
    ok = None
    if bar is not None and value is not None:
        sign, limit = bar.split()
        ok = value >= float(limit) if sign == ">=" else value <= float(limit)
    return {"name": name, "value": None if value is None else float(f"{value:.4g}"), "unit": unit, "bar": bar, "ok": ok,
            **more}
