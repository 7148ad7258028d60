"""Two runs compared: numbers, intervals, and what is said where they cannot be."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.answers import Answer, Mode, by_prompt_of, prompts_digest
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.estimates import paired_difference, wilson
from rl_core.looking.comparison import Difference, caveats, changed_settings, compare
from rl_core.run_dir import RunDir, read_json, to_json
from rl_core.run_identity import open_identity
from rl_core.run_numbers import difference, mean_of_steps, ratio_of_steps, student95
from rl_core.types import Score
from tests.builders import make_prompt
from tests.looking import small_run

NAN = math.nan


def validated(run: RunDir, greedy: Sequence[float | None], *, digest: str = "same",
              sampled: Sequence[float] | None = None, n: int = 4) -> None:
    """Have the last validation say which of its prompts were answered right."""
    path = run.validation(3)
    record = read_json(path)
    known = [each for each in greedy if each is not None]
    record |= {"n": len(greedy), "greedy_accuracy": sum(known) / len(known), "mean_at_n": None, "sampling": {"n": n},
               "by_prompt": {"digest": digest, "greedy": list(greedy)} | ({"sampled": sampled} if sampled else {})}
    path.write_bytes(to_json(record))


def by_name(found: tuple[Difference, ...]) -> dict[str, Difference]:
    return {each.name: each for each in found}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read by the tests, never changed."""
    home = tmp_path_factory.mktemp("compared")
    small_run(home / "monday", "monday")
    small_run(home / "tuesday", "tuesday", bonus=0.5)
    return home


@pytest.fixture
def two(made: Path, tmp_path: Path) -> tuple[RunDir, RunDir]:
    """To be changed."""
    monday, tuesday = (RunDir(shutil.copytree(made / name, tmp_path / name)) for name in ("monday", "tuesday"))
    return monday, tuesday


def table_of_four(both: int, mine: int, base: int, neither: int) -> tuple[list[float], list[float]]:
    return ([1.0] * (both + mine) + [0.0] * (base + neither),
            [1.0] * both + [0.0] * mine + [1.0] * base + [0.0] * neither)


PUBLISHED = {  # both right, mine alone, base alone, neither: difference and interval as published
    "Newcombe 1998, table II": ((36, 12, 2, 0), (0.2, 0.0569, 0.3404)),
    "Fagerland and others 2014, airways": ((1, 1, 7, 12), (-0.2857, -0.5069, -0.0256)),
}


@pytest.mark.parametrize("cells, expected", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_paired_difference_is_that_of_the_papers(cells: tuple[int, int, int, int],
                                                   expected: tuple[float, float, float]) -> None:
    mine, base = table_of_four(*cells)
    found = paired_difference(mine, base, len(mine))
    assert found is not None and (found.value, found.lo, found.hi) == pytest.approx(expected, abs=1e-4)


def test_weights_that_did_the_same_are_not_known_to_be_the_same() -> None:
    half_right = [1.0] * 32 + [0.0] * 32
    same = paired_difference(half_right, half_right, 64)
    assert same is not None and (same.value, same.lo, same.hi) == pytest.approx((0.0, -0.0297, 0.0297), abs=1e-4)
    all_right = paired_difference([1.0] * 8, [1.0] * 8, 8)
    assert all_right is not None and all_right.hi == pytest.approx(1 - wilson(1.0, 8).lo), "no correlation is known"
    assert paired_difference([], [], 0) is None


def test_a_paired_interval_of_means_holds_in_nineteen_of_twenty() -> None:
    rng, held, rounds, prompts, n = np.random.default_rng(3), 0, 60, 48, 8
    for _ in range(rounds):
        hard = rng.beta(0.8, 0.8, prompts)
        better = np.clip(hard + 0.1, 0, 1)
        base, mine = rng.binomial(n, hard) / n, rng.binomial(n, better) / n
        truth = float((better - hard).mean())
        found = paired_difference(mine.tolist(), base.tolist(), prompts * n)
        assert found is not None
        held += found.lo <= truth <= found.hi
    assert held / rounds >= 0.92


def test_a_ratio_of_steps_weighs_and_has_the_interval_of_a_ratio() -> None:
    found = ratio_of_steps(np.array([1.0, 3.0, NAN, 7.0]), np.array([1.0, 3.0, 5.0, 0.0]))
    half = student95(1) * math.sqrt(2 / 1 * (1.5**2 + 1.5**2)) / 4
    assert (found.value, found.lo, found.hi) == pytest.approx((2.5, 2.5 - half, 2.5 + half))
    even = ratio_of_steps(np.array([1.0, 2.0, 3.0]), np.full(3, 7.0))
    plain = mean_of_steps([1, 2, 3])
    assert (even.value, even.lo, even.hi) == pytest.approx((plain.value, plain.lo, plain.hi))


def test_the_numbers_of_two_runs_stand_side_by_side(two: tuple[RunDir, RunDir]) -> None:
    found = compare(*two)
    assert [(each.name, each.unit, each.better) for each in found] == [
        ("held_out_accuracy", "share", "more"), ("held_out_mean_at_n", "share", "more"),
        ("samples_per_s", "answers/s", "more"), ("tokens_per_s", "tokens/s", "more"),
        ("staleness_mean", "publications", "less"), ("update_lag_mean", "updates", "less"),
        ("wasted_share", "share", "less"), ("reward_last", "reward", "more")]
    named = by_name(found)
    reward = named["reward_last"]
    half = math.sqrt(2) * student95(2) * 0.25 / math.sqrt(3)
    assert (reward.baseline, reward.value, reward.difference) == pytest.approx((0.25, 0.75, 0.5))
    assert (reward.low, reward.high) == pytest.approx((0.5 - half, 0.5 + half)) and not reward.certain
    lag = named["update_lag_mean"]
    assert (lag.baseline, lag.difference) == (1.0, 0.0) and lag.low < 0 < lag.high
    speed = named["samples_per_s"]
    assert (speed.baseline, speed.difference) == (pytest.approx(1 / np.mean([1 / 100, 1 / 200, 1 / 400])), 0.0)
    assert math.isnan(speed.low), "the interval of three such steps has no upper end"
    assert named["wasted_share"].baseline == 0.5 and math.isnan(named["wasted_share"].low), "one observation"


def test_accuracy_is_paired_where_the_same_prompts_were_asked(two: tuple[RunDir, RunDir]) -> None:
    mine, base = table_of_four(36, 12, 2, 0)
    validated(two[0], base, sampled=[0.25] * 50)
    validated(two[1], mine, sampled=[0.5] * 50)
    named = by_name(compare(*two))
    found = named["held_out_accuracy"]
    assert (found.baseline, found.value, found.low, found.high) == pytest.approx((0.76, 0.96, 0.0569, 0.3404), abs=1e-4)
    assert found.certain
    sampled = named["held_out_mean_at_n"]
    expected = paired_difference([0.5] * 50, [0.25] * 50, 200)
    assert expected is not None and (sampled.difference, sampled.low) == pytest.approx((0.25, expected.lo))
    assert not any("independent" in each or "different" in each for each in caveats(*two))


def test_accuracy_of_other_prompts_is_that_of_independent_runs(two: tuple[RunDir, RunDir]) -> None:
    mine, base = table_of_four(36, 12, 2, 0)
    validated(two[0], base, digest="monday's")
    validated(two[1], mine, digest="tuesday's")
    found = by_name(compare(*two))["held_out_accuracy"]
    expected = difference(wilson(0.96, 50), wilson(0.76, 50))
    assert (found.difference, found.low, found.high) == pytest.approx((0.2, expected.lo, expected.hi))
    assert any("monday and tuesday were validated on different prompts" in each for each in caveats(*two))


def test_prompts_that_one_run_could_not_score_are_left_out_of_both(two: tuple[RunDir, RunDir]) -> None:
    validated(two[0], [1.0, 1.0, 0.0, 0.0, 0.0])
    validated(two[1], [None, 1.0, 1.0, 1.0, 0.0])
    found = by_name(compare(*two))["held_out_accuracy"]
    assert (found.baseline, found.value, found.difference) == (0.25, 0.75, 0.5)


def test_what_is_not_comparable_is_said(tmp_path: Path, two: tuple[RunDir, RunDir]) -> None:
    assert caveats(*two) == ("the validations of monday and tuesday do not say which prompt was answered right: the "
                             "interval of held-out accuracy takes both as independent, and is wider than need be on "
                             "the same prompts",)
    empty = RunDir(tmp_path / "empty")
    other = Config.model_validate({"reward": "gsm8k", "learner": {"lr": 0.01}})
    open_identity(empty, "empty", "tiny-cpu", other)
    for run, data in ((two[0], "aa"), (empty, "bb")):
        run.inputs.write_bytes(to_json({"digests": {"model": "m", "chat_template": "c", "data": data}}))
    said = caveats(two[0], empty)
    assert [each.split(":")[0] for each in said] == [
        "empty has no trained step yet", "empty has no validation",
        "monday and empty began with different inputs (by digest)",
        "monday and empty are scored by different rewards (`reward`)"]
    assert said[2].endswith(": data")
    found = by_name(compare(two[0], empty))
    assert all(math.isnan(each.value) and math.isnan(each.difference) for each in found.values())
    assert found["held_out_accuracy"].baseline == 0.5
    assert changed_settings(two[0], empty)["learner.lr"] == (Config().learner.lr, 0.01)


def test_a_run_that_is_absent_or_given_twice_is_refused(tmp_path: Path, two: tuple[RunDir, RunDir]) -> None:
    with pytest.raises(ConfigError, match="there is no run nobody under"):
        compare(two[0], RunDir(tmp_path / "nobody"))
    with pytest.raises(ConfigError, match="monday is given twice"):
        compare(two[0], RunDir(tmp_path / "." / "monday"))


def test_a_record_says_how_right_each_prompt_was_answered() -> None:
    def answer(prompt: int, mode: Mode, correct: float | None) -> Answer:
        score = None if correct is None else Score(reward=0.5, correct=correct)
        return Answer(prompt=prompt, mode=mode, data_source="s", score=score, length=4, finish_reason="stop")

    prompts = [make_prompt(i) for i in range(3)]
    answers = [answer(0, "greedy", 1.0), answer(1, "greedy", None), answer(2, "greedy", 0.0),
               answer(0, "sampled", 1.0), answer(0, "sampled", 0.0), answer(1, "sampled", None),
               answer(2, "sampled", 1.0)]
    found: dict[str, Any] = by_prompt_of(answers, prompts)
    assert json.loads(json.dumps(found)) == {"digest": prompts_digest(prompts), "greedy": [1.0, None, 0.0],
                                             "sampled": [0.5, None, 1.0]}
    assert by_prompt_of(answers[:3], prompts).keys() == {"digest", "greedy"}
    assert prompts_digest(prompts) != prompts_digest(prompts[::-1])
