"""A difference of two runs in words, the same wherever it is shown: terminal, pages, report of a night. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

DASH = "-"
"""What is not known."""
NOISE = 1e-12
"""A difference below it comes of adding floats in another order."""


@dataclass(frozen=True, slots=True)
class DifferenceText:
    """`DifferenceText("+0.1", "+0.05", "+0.15")`. Ends are empty where there is no interval."""

    difference: str
    low: str
    high: str

    @property
    def interval(self) -> str:
        """`-0.02 to +0.08`; a dash where there is none."""
        return f"{self.low} to {self.high}" if self.low else DASH


def say_difference(difference: float, low: float, high: float) -> DifferenceText:
    """A difference and its 95 % interval; NaN is what is unknown.

    A 0 has no sign. An interval that vanishes, as of numbers that are the same in every step, is none: of 0 that is `no
    difference`, where a 0 whose spread is unknown is `0`.
    """
    if math.isnan(difference):
        return DifferenceText(DASH, "", "")
    if math.isnan(low) or math.isnan(high):
        return DifferenceText(_signed(difference), "", "")
    if high - low < NOISE:
        return DifferenceText(_signed(difference) if abs(difference) >= NOISE else "no difference", "", "")
    return DifferenceText(_signed(difference), _signed(low), _signed(high))


def _signed(value: float) -> str:
    return "0" if abs(value) < NOISE else f"{value:+.4g}"
