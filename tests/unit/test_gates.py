"""Which night is promoted, kept or an alarm: a table of cases, the reasons in words."""

from __future__ import annotations

import math

import pytest

from rl_core.looking.comparison import Better, Difference
from rl_core.nightly.gates import NO_VALIDATION, Thresholds, best_of, judge, widened

NAN = math.nan
BASE = "nightly-2026-11-29"
UNITS: dict[str, tuple[str, Better]] = {
    "held_out_accuracy": ("share", "more"), "samples_per_s": ("answers/s", "more"),
    "staleness_mean": ("publications", "less"), "wasted_share": ("share", "less")}


def differ(name: str, baseline: float, value: float, half: float = 0.02) -> Difference:
    unit, better = UNITS[name]
    apart = value - baseline
    return Difference(name, baseline, value, apart, apart - half, apart + half, unit, better)


def accuracy(baseline: float, value: float, half: float = 0.02) -> Difference:
    return differ("held_out_accuracy", baseline, value, half)


SAME_SPEED = differ("samples_per_s", 100.0, 99.0, 3.0)
SLOW = differ("samples_per_s", 100.0, 60.0, 10.0)
PERHAPS_SLOW = differ("samples_per_s", 100.0, 70.0, 10.0)
STALE = differ("staleness_mean", 0.5, 2.5, 0.5)
WASTED = differ("wasted_share", 0.05, 0.3, 0.1)

CASES: dict[str, tuple[tuple[Difference, ...], str | None, str, tuple[str, ...]]] = {
    "better": ((accuracy(0.7, 0.8), SAME_SPEED), BASE, "promote", ("the whole interval is above 0",)),
    "better, perhaps": ((accuracy(0.7, 0.71),), BASE, "keep", ("its lower end is not above 0", f"{BASE} stays")),
    "just as good": ((accuracy(0.7, 0.7, 0.0),), BASE, "keep", ("every held-out answer is as right as before",)),
    "worse, perhaps": ((accuracy(0.7, 0.67),), BASE, "keep", ("not above 0",)),
    "worse": ((accuracy(0.7, 0.2),), BASE, "alarm", ("held-out accuracy fell: 0.2 against 0.7", "below -0.02")),
    "worse within what is allowed": ((accuracy(0.7, 0.685, 0.001),), BASE, "keep", ("not above 0",)),
    "the first night": ((accuracy(NAN, 0.7),), None, "promote", ("first night: held-out accuracy is 0.7",)),
    "the first night, without validation": ((accuracy(NAN, NAN),), None, "alarm", (NO_VALIDATION,)),
    "no validation": ((accuracy(0.7, NAN), SAME_SPEED), BASE, "alarm", (NO_VALIDATION,)),
    "nothing at all": ((), BASE, "alarm", (NO_VALIDATION,)),
    "a baseline without validation": ((accuracy(NAN, 0.7),), BASE, "keep", (f"that of {BASE} is unknown: it stays",)),
    "no interval": ((accuracy(0.7, 0.9, NAN),), BASE, "keep", ("without an interval",)),
    "worse without an interval": ((accuracy(0.7, 0.5, NAN),), BASE, "alarm", ("held-out accuracy fell",)),
    "better but slow": ((accuracy(0.7, 0.8), SLOW), BASE, "alarm",
                        ("throughput fell by 40%: 60 against 100 (-40 [-50, -30]) answers/s", "above 0")),
    "slow, perhaps": ((accuracy(0.7, 0.8), PERHAPS_SLOW), BASE, "promote", ("above 0",)),
    "no throughput of the baseline": ((accuracy(0.7, 0.8), differ("samples_per_s", NAN, 60.0)), BASE, "promote",
                                      ("above 0",)),
    "stale": ((accuracy(0.7, 0.8), STALE), BASE, "alarm", ("mean staleness rose", "1 is allowed", "above 0")),
    "wasteful": ((accuracy(0.7, 0.7), WASTED), BASE, "alarm", ("the share of wasted tokens rose", "0.1 is allowed")),
    "worse in all": ((accuracy(0.7, 0.1), SLOW, STALE, WASTED), BASE, "alarm",
                     ("accuracy fell", "throughput fell", "staleness rose", "wasted tokens rose")),
}


@pytest.mark.parametrize(("differences", "baseline", "verdict", "reasons"), CASES.values(), ids=CASES)
def test_a_night_is_judged_by_thresholds_with_its_reasons(
        differences: tuple[Difference, ...], baseline: str | None, verdict: str, reasons: tuple[str, ...]) -> None:
    found = judge(differences, Thresholds(), baseline=baseline)
    said = "\n".join(found.reasons)
    assert found.verdict == verdict, said
    places = [said.index(reason) for reason in reasons]
    assert places == sorted(places), "the reason that decided comes first"


def test_thresholds_move_the_gate() -> None:
    better = (accuracy(0.7, 0.8),)
    assert judge(better, Thresholds(accuracy_gain=0.1), baseline=BASE).verdict == "keep"
    assert judge((accuracy(0.7, 0.2),), Thresholds(accuracy_loss=0.6), baseline=BASE).verdict == "keep"
    assert judge((*better, SLOW), Thresholds(throughput_loss=0.5), baseline=BASE).verdict == "promote"


def test_the_best_of_several_has_a_wider_interval() -> None:
    one = Difference("held_out_accuracy", 0.5, 0.6, 0.1, 0.0, 0.2, "share", "more")
    assert widened(one, 1) == one
    wide = widened(one, 2)
    assert (round(wide.low, 4), round(wide.high, 4)) == (-0.0144, 0.2144)  # 2.2414 / 1.96 of 0.1
    unknown = Difference("held_out_accuracy", NAN, 0.6, NAN, NAN, NAN, "share", "more")
    assert math.isnan(widened(unknown, 5).low)


def test_the_best_run_is_the_first_with_the_largest_accuracy() -> None:
    runs = {"a": (accuracy(0.5, NAN),), "b": (accuracy(0.5, 0.6),), "c": (SAME_SPEED, accuracy(0.5, 0.6)), "d": ()}
    assert best_of(runs) == "b"
    assert best_of({"a": (), "b": (accuracy(0.5, NAN),)}) == "a"
