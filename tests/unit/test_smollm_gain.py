"""How the gain of a run over its steps is judged (tests/benchmarks/smollm.py)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.smollm import ends, gain_in_errors


def test_the_gain_is_in_standard_errors_of_the_difference() -> None:
    first, last = np.array([0.2, 0.4, 0.2, 0.4]), np.array([0.3, 0.5, 0.3, 0.5])
    # Variance of each: 4 x 0.01 / 3; of each mean a quarter of it; of the difference twice that.
    assert gain_in_errors(first, last) == pytest.approx(0.1 / (2 * 0.04 / 3 / 4) ** 0.5)


def test_the_two_ends_of_a_run_do_not_meet() -> None:
    steps = [np.full(2, float(step)) for step in range(11)]
    first, last = ends(steps)
    assert sorted(set(first)) == [0, 1, 2, 3, 4] and sorted(set(last)) == [6, 7, 8, 9, 10]
    with pytest.raises(AssertionError, match="9 steps have no two ends of 5"):
        ends(steps[:9])
