"""Violated invariants in words, from the metrics of a record: what people read where a step raised its alarm.

The bounds, and what is measured against them, are of the learner (learner/invariants.py). Importable without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

INVARIANTS = (
    ("mismatch", "train/mismatch_alarm", "train/mismatch_current_abs", "train/mismatch_bound"),
    ("drift", "train/drift_alarm", "train/ratio_drift", "train/drift_bound"),
)
"""What people call it, its alarm, what was measured, and the bound."""


def alarm_text(metrics: Mapping[str, float]) -> str | None:
    """`mismatch 0.012 over 0.005`, several joined by a comma; None where no invariant is violated.

    A record of a Headway of before knows no bound: `mismatch 0.012 over its bound`.
    """
    said = [f"{name} {metrics.get(measured, math.nan):.2g} over {_bound_text(metrics.get(bound, math.nan))}"
            for name, alarm, measured, bound in INVARIANTS if metrics.get(alarm, 0.0) > 0.0]
    return ", ".join(said) or None


def newest_alarm(steps: Iterable[tuple[int, Mapping[str, float]]]) -> str | None:
    """`step 12: mismatch 0.012 over 0.005`, of the first of these that has an alarm: give the newest step first."""
    return next((f"step {step}: {text}" for step, metrics in steps if (text := alarm_text(metrics)) is not None), None)


def _bound_text(bound: float) -> str:
    return f"{bound:.2g}" if math.isfinite(bound) else "its bound"
