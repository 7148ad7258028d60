"""Differences and their intervals in words: terminal, pages and reports say the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from flows.comparing import comparison_lines
from rl_core.looking.comparison import Difference
from rl_core.looking.difference_text import say_difference
from rl_core.nightly.gates import told
from rl_core.nightly.text import night_markdown
from rl_core.pages.comparison import comparison_page
from rl_core.pages.report import night_page
from tasks.comparing import compare_runs
from tests.looking import small_run
from tests.unit.test_nights import night, outcome

NAN = math.nan
TIGHT = 0.1 + 0.2 - 0.3
"""5.6e-17: what is left of a difference of 0."""
CASES = {
    "ordinary": ((0.1, 0.05, 0.15), ("+0.1", "+0.05 to +0.15")),
    "to both sides": ((-0.01, -0.04, 0.02), ("-0.01", "-0.04 to +0.02")),
    "an end at 0": ((0.05, 0.0, 0.1), ("+0.05", "0 to +0.1")),
    "no spread is known": ((0.1, NAN, NAN), ("+0.1", "-")),
    "0 with its interval": ((0.0, -0.03, 0.03), ("0", "-0.03 to +0.03")),
    "0 without one": ((0.0, NAN, NAN), ("0", "-")),
    "the same in every step": ((0.0, 0.0, 0.0), ("no difference", "-")),
    "minus 0": ((-0.0, -0.0, 0.0), ("no difference", "-")),
    "the noise of floats": ((TIGHT, -TIGHT, TIGHT), ("no difference", "-")),
    "apart by the same in every step": ((1.0, 1.0, 1.0), ("+1", "-")),
    "unknown": ((NAN, NAN, NAN), ("-", "-")),
}


@pytest.mark.parametrize(("numbers", "expected"), CASES.values(), ids=CASES)
def test_a_difference_is_said_as_a_person_would(numbers: tuple[float, float, float], expected: tuple[str, str]) -> None:
    said = say_difference(*numbers)
    assert (said.difference, said.interval) == expected


def same(low: float, high: float) -> Difference:
    return Difference("staleness_mean", 1.0, 1.0, 0.0, low, high, "publications", "less")


def test_reasons_of_a_verdict_say_it_alike() -> None:
    assert told(same(0.0, 0.0)) == "1 against 1 (no difference)"
    assert told(same(-0.5, 0.5)) == "1 against 1 (0 [-0.5, +0.5])"
    assert told(same(NAN, NAN)) == "1 against 1 (0)"
    assert not same(-TIGHT, TIGHT).verdict and not same(TIGHT, TIGHT).verdict


def test_the_report_of_a_night_says_it_alike() -> None:
    came = outcome("n")
    came = replace(came, compared=(replace(came.compared[0], differences=(same(0.0, 0.0), same(-0.5, 0.5))),))
    assert "| staleness_mean | 1 | 1 | no difference | - | publications |" in night_markdown(night("n"), came, {})
    assert "| staleness_mean | 1 | 1 | 0 | -0.5 to +0.5 | publications |" in night_markdown(night("n"), came, {})
    page = night_page(night("n"), came, {})
    assert '<td class="same">no difference</td><td>-</td><td></td>' in page and ">0</td><td>-0.5 to +0.5<" in page
    assert page.count("<svg") == 1


def test_two_equal_runs_have_no_plus_0_in_the_terminal_or_on_the_page(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    runs = [small_run(tmp_path / "runs" / key, key) for key in ("monday", "tuesday")]
    lines = comparison_lines(compare_runs(["monday", "tuesday"]))
    [tokens] = [line for line in lines if line.startswith("  tokens per s")]
    assert tokens.split() == ["tokens", "per", "s", "0", "0", "no", "difference", "-", "tokens/s"]
    [reward] = [line for line in lines if line.startswith("  reward last")]
    assert reward.split()[4:6] == ["0", "-0.8783"], "an interval is shown with its 0"
    page = comparison_page(runs)
    assert "<td>no difference</td><td>-</td><td>tokens/s</td>" in page
    assert not [text for text in (*lines, page) if "+0 " in text or "+0<" in text or "nan" in text]
