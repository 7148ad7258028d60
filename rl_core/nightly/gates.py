"""Whether a night's weights become the ones to beat: promote, keep or alarm. Pure functions of differences.

    judge(compare(baseline, run), Thresholds(), baseline="nightly-2026-11-29").verdict        # "keep"

docs/nightly.md 4 has the rules as a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

from rl_core.estimates import Z95
from rl_core.looking.comparison import Difference

Verdict = Literal["promote", "keep", "alarm"]
ACCURACY, THROUGHPUT, STALENESS, WASTE = "held_out_accuracy", "samples_per_s", "staleness_mean", "wasted_share"
NO_VALIDATION = ("held-out accuracy is unknown: the run has no validation, or its reward does not say what is right "
                 "(data.validation, validation.every), so nothing says how good it is")


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """How much better is better, and how much worse is an alarm. An interval has to be beyond it as a whole."""

    accuracy_gain: float = 0.0
    """Share: promoted above it."""
    accuracy_loss: float = 0.02
    """Share of held-out prompts: an alarm below minus this."""
    throughput_loss: float = 0.25
    """Part of the baseline's answers per second: an alarm where more of them is gone."""
    staleness_rise: float = 1.0
    """Publications."""
    waste_rise: float = 0.1
    """Share of generated tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """`Judgement(verdict="keep", reasons=("held-out accuracy is 0.76 against 0.75 ...",))`. Reasons: the one that
    decided first."""

    verdict: Verdict
    reasons: tuple[str, ...]


def judge(differences: Iterable[Difference], thresholds: Thresholds, *, baseline: str | None) -> Judgement:
    """What becomes of a run that differs so from its baseline, and why.

    `baseline`: what it is called; None on the first night, whose differences have no baseline. A number without an
    interval (one step alone) is taken as it is for an alarm, and is no reason to promote.
    """
    of = {each.name: each for each in differences}
    accuracy = of.get(ACCURACY)
    if accuracy is None or math.isnan(accuracy.value):
        return Judgement(verdict="alarm", reasons=(NO_VALIDATION,))
    if baseline is None:
        return Judgement(verdict="promote", reasons=(
            f"first night: held-out accuracy is {accuracy.value:.4g}, and there is nothing to compare it with",))
    alarms = [reason for found in (_accuracy_fell(accuracy, thresholds, baseline), _slower(of, thresholds, baseline),
                                   _rose(of, STALENESS, thresholds.staleness_rise, "mean staleness", baseline),
                                   _rose(of, WASTE, thresholds.waste_rise, "the share of wasted tokens", baseline))
              if (reason := found) is not None]
    promoted, said = _gain(accuracy, thresholds, baseline)
    if alarms:
        return Judgement(verdict="alarm", reasons=(*alarms, said) if promoted else tuple(alarms))
    return Judgement(verdict="promote" if promoted else "keep", reasons=(said,))


def widened(difference: Difference, runs: int) -> Difference:
    """The interval for the best of so many runs: the chance that any of them is outside of its own is 5 % again
    (Bonferroni). The normal quantile at 1 - 0.025 / runs takes the place of 1.96.

    `widened(Difference("a", 0.5, 0.6, 0.1, 0.0, 0.2, "share", "more"), 2)` -> 0.1 [-0.0144, 0.2144].
    """
    if runs <= 1 or math.isnan(difference.low):
        return difference
    by = NormalDist().inv_cdf(1 - 0.025 / runs) / Z95
    return replace(difference, low=difference.difference - by * (difference.difference - difference.low),
                   high=difference.difference + by * (difference.high - difference.difference))


def best_of(differences: Mapping[str, Sequence[Difference]]) -> str:
    """Key of the run with the largest held-out accuracy, the first among equals; one that is unknown is the least.
    Raises ValueError where there is no run."""
    def accuracy(key: str) -> float:
        value = next((each.value for each in differences[key] if each.name == ACCURACY), math.nan)
        return -math.inf if math.isnan(value) else value

    return max(differences, key=accuracy)


def told(difference: Difference) -> str:
    """`0.31 against 0.76 of BASELINE's (-0.45 [-0.52, -0.37])` without the name: values and interval in words."""
    said = difference.said
    ends = f" [{said.low}, {said.high}]" if said.low else ""
    return f"{difference.value:.4g} against {difference.baseline:.4g} ({said.difference}{ends})"


# -- one rule each


def _gain(accuracy: Difference, thresholds: Thresholds, baseline: str) -> tuple[bool, str]:
    least = thresholds.accuracy_gain
    if math.isnan(accuracy.difference):
        return False, f"held-out accuracy is {accuracy.value:.4g}, and that of {baseline} is unknown: it stays"
    text = f"held-out accuracy is {told(accuracy)}, compared with {baseline}"
    if math.isnan(accuracy.low):
        return False, f"{text}: without an interval nothing says that it is better; {baseline} stays"
    if accuracy.low > least:
        return True, f"{text}: the whole interval is above {least:g}"
    if accuracy.low == accuracy.high == 0.0:
        return False, f"{text}: every held-out answer is as right as before; {baseline} stays"
    return False, f"{text}: its lower end is not above {least:g}; {baseline} stays"


def _accuracy_fell(accuracy: Difference, thresholds: Thresholds, baseline: str) -> str | None:
    most = thresholds.accuracy_loss
    if not _high(accuracy) < -most:
        return None
    return f"held-out accuracy fell: {told(accuracy)}, compared with {baseline}: the whole interval is below {-most:g}"


def _slower(of: Mapping[str, Difference], thresholds: Thresholds, baseline: str) -> str | None:
    speed, most = of.get(THROUGHPUT), thresholds.throughput_loss
    if speed is None or not speed.baseline > 0 or not _high(speed) < -most * speed.baseline:
        return None
    return f"throughput fell by {-speed.difference / speed.baseline:.0%}: {told(speed)} {speed.unit}, compared with " \
           f"{baseline}; {most:.0%} is allowed"


def _rose(of: Mapping[str, Difference], name: str, most: float, what: str, baseline: str) -> str | None:
    found = of.get(name)
    if found is None or not _low(found) > most:
        return None
    return f"{what} rose: {told(found)} {found.unit}, compared with {baseline}; {most:g} is allowed"


def _low(difference: Difference) -> float:
    return difference.difference if math.isnan(difference.low) else difference.low


def _high(difference: Difference) -> float:
    return difference.difference if math.isnan(difference.high) else difference.high
