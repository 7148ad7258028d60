"""Rewards by name: exact, regex, gsm8k in this repository; math_verify and reasoning_gym by packages of the extra."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError, RewardError, RewardTimeout
from rl_core.plan import check, resolve
from rl_core.rollout.environments.reasoning import order_of, reasoning_rows, rows_of
from rl_core.rollout.rewards.gsm8k import final_number, gsm8k
from rl_core.rollout.rewards.reasoning_gym import scorer_of as scorer_of_task
from rl_core.rollout.rewards.regex import scorer_of
from rl_core.rollout.rewards.scoring import Scorer, check_reward, make_scorer
from rl_core.types import Prompt, Score

needs_tasks = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("math_verify", "reasoning_gym")),
    reason="the extra `tasks` is not installed")


def prompt(answer: str, **columns: Any) -> Prompt:
    return Prompt(dataset_epoch=0, position=0, prompt_idx=0, token_ids_P=np.zeros(1, np.int32), answer=answer,
                  data_source="s", columns=columns)


# -- gsm8k

NUMBERS: dict[str, tuple[str, str | None]] = {
    "marked": ("20 + 22 = 42\n#### 42", "42"),
    "marked, then more": ("#### 42\nI am 99 % sure", "42"),
    "the last mark": ("#### 41\nno: #### 42", "42"),
    "marked with words": ("#### it is $42.", "42"),
    "a mark without a number": ("so 42 ####", "42"),
    "last of the text": ("20 and 22 make 42.", "42"),
    "commas": ("#### 1,234,567", "1234567"),
    "dollars": ("she earns $1,000.50 a month", "1000.5"),
    "zeros at the ends": ("007.10 and 007.00", "7"),
    "minus nothing": ("-0.0", "0"),
    "below zero": ("x = -5", "-5"),
    "below zero in dollars": ("-$5", "-5"),
    "dollars below zero": ("$-5", "-5"),
    "a difference is not below zero": ("47-5", "5"),
    "a list of numbers": ("1, 2, 3", "3"),
    "an odd comma": ("12,34", "34"),
    "a point at the end": ("The answer is 42.", "42"),
    "a fraction of one": ("it is .5", "0.5"),
    "none": ("I do not know", None),
    "empty": ("", None),
}


@pytest.mark.parametrize(("text", "number"), NUMBERS.values(), ids=NUMBERS)
def test_gsm8k_finds_the_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_gsm8k_compares_numbers_with_a_number_or_a_whole_solution() -> None:
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"
    right = Score(reward=1.0, correct=1.0, extracted="72")
    for truth, text in (("72", "#### 72"), (solution, "#### 72"), ("$72.00", "72"), ("72", "it is 72.0")):
        assert gsm8k(prompt(truth), text) == right
    assert gsm8k(prompt("72"), "24") == Score(reward=0.0, correct=0.0, extracted="24")
    assert gsm8k(prompt("72"), "") == Score(reward=0.0, correct=0.0, extracted=None)
    with pytest.raises(RewardError, match="reward gsm8k: the ground truth 'many' holds no number"):
        make_scorer(Config(reward="gsm8k"))(prompt("many"), "72")


def test_gsm8k_takes_no_quadratic_time_on_long_texts() -> None:
    """Which would be minutes."""
    start = time.process_time()
    for text in ("1" * 20_000, "1," * 10_000, "-$" * 10_000, "#" * 20_000, "1.1." * 5_000):
        final_number(text)
    assert time.process_time() - start < 1.0


# -- regex

PATTERNS: dict[str, tuple[str, str, str | None, float]] = {
    "first group": (r"<answer>(.*?)</answer>", "<answer> 42 </answer>", "42", 1.0),
    "last match": (r"answer is (\d+)", "answer is 41, no, answer is 42", "42", 1.0),
    "whole match": (r"\d+", "between 41 and 42", "42", 1.0),
    "the first of two groups": (r"(\d+) (\w+)", "42 apples", "42", 1.0),
    "a group that took no part": (r"(a)|\d+", "42", "42", 1.0),
    "no match": (r"\d+", "none", None, 0.0),
    "another answer": (r"\d+", "41", "41", 0.0),
}


@pytest.mark.parametrize(("pattern", "text", "extracted", "reward"), PATTERNS.values(), ids=PATTERNS)
def test_regex_extracts_and_compares(pattern: str, text: str, extracted: str | None, reward: float) -> None:
    assert scorer_of(pattern)(text, " 42") == {"reward": reward, "correct": bool(reward), "extracted": extracted}


def test_a_pattern_that_hangs_is_ended_by_the_deadline(tmp_path: Path) -> None:
    config = resolve({}, {"reward": "regex", "scoring": {"pattern": "^(a+)+$"}, "deadlines": {"reward_s": 0.3}})
    scorer = make_scorer(config, cwd=tmp_path)
    try:
        assert scorer(prompt("aa"), "aa") == Score(reward=1.0, correct=1.0, extracted="aa")
        with pytest.raises(RewardTimeout, match=r"reward regex: no answer within 0.3 s"):
            scorer(prompt("aa"), "a" * 40 + "b")
    finally:
        scorer.close()


INCOMPLETE: dict[str, tuple[dict[str, Any], str]] = {
    "no pattern": ({"reward": "regex"}, r"scoring.pattern: reward=regex needs a pattern.*got None"),
    "a bad pattern": ({"reward": "regex", "scoring": {"pattern": "(a"}},
                      r"scoring.pattern: is no regular expression: missing \), .*got '\(a'"),
    "a pattern of no use": ({"scoring": {"pattern": "a"}},
                            r"scoring.pattern: belongs to reward=regex, and reward is exact \(got 'a'\); "
                            "add --set scoring.pattern=null"),
    "a signature of no use": ({"reward": "gsm8k", "scoring": {"signature": "verl"}},
                              r"scoring.signature: belongs to a function of yours, and reward is gsm8k \(got 'verl'\)"),
    "no such name": ({"reward": "gsm9k"}, r"reward: write one of exact, regex, gsm8k, math_verify, code, .*_gym:"),
}


@pytest.mark.parametrize(("settings", "message"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_the_plan_refuses_a_reward_that_is_not_whole(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(resolve({}, settings))


# -- data and reward in one

TASK = "reasoning_gym:leg_counting"
IN_ONE: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, list[str], list[str] | None]]] = {
    "a reward brings its data": ({}, {"reward": TASK}, (TASK, [TASK], [TASK])),
    "data brings its reward": ({}, {"data": {"train": TASK}}, (TASK, [TASK], [TASK])),
    "data as a list": ({}, {"data": {"train": [{"path": TASK, "weight": 2}]}}, (TASK, [TASK], [TASK])),
    "over a preset": ({"reward": "gsm8k", "data": {"train": "a.jsonl", "validation": "b.jsonl"}}, {"reward": TASK},
                      (TASK, [TASK], [TASK])),
    "in the preset": ({"reward": TASK}, {}, (TASK, [TASK], [TASK])),
    "both are set": ({}, {"reward": TASK, "data": {"train": "a.jsonl"}}, (TASK, ["a.jsonl"], ["sort"])),
    "validation is set": ({}, {"reward": TASK, "data": {"validation": None}}, (TASK, [TASK], None)),
    "another reward is set": ({}, {"reward": "exact", "data": {"train": TASK}}, ("exact", [TASK], ["sort"])),
    "two tasks": ({}, {"data": {"train": [TASK, "reasoning_gym:basic_arithmetic"]}},
                  ("exact", [TASK, "reasoning_gym:basic_arithmetic"], ["sort"])),
}


@pytest.mark.parametrize(("preset", "overrides", "expected"), IN_ONE.values(), ids=IN_ONE)
def test_a_task_is_data_and_reward_in_one(preset: dict[str, Any], overrides: dict[str, Any], expected: Any) -> None:
    config = resolve(preset, overrides)
    held_out = None if config.data.validation is None else [source.path for source in config.data.validation]
    assert (config.reward, [source.path for source in config.data.train], held_out) == expected


@pytest.mark.parametrize("reward", ["math_verify", TASK])
def test_without_the_extra_it_is_named(reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the packages: nothing else finds modules of these names."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *rest: None if name in ("math_verify", "reasoning_gym") else found(name, *rest))
    config = Config(reward=reward)
    for attempt in (lambda: check_reward(config, cwd=tmp_path), lambda: make_scorer(config)):
        with pytest.raises(ConfigError, match=r"which is not installed; pip install 'headway\[tasks\]'"):
            attempt()


# -- math_verify


@pytest.fixture(scope="module")
def mathematics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    scorer = make_scorer(Config(reward="math_verify"), cwd=tmp_path_factory.mktemp("mathematics"))
    yield scorer
    scorer.close()


EQUAL: dict[str, tuple[str, str, float]] = {
    "a fraction and a decimal": (r"\frac{1}{2}", "The answer is $0.5$.", 1.0),
    "boxed": ("42", r"so we get \boxed{42}", 1.0),
    "a number in words": ("42", "The final answer is 42.", 1.0),
    "a set in another order": (r"\{1, 2\}", r"$\{2, 1\}$", 1.0),
    "an equation is read from its right side": ("7", "$x = 7$", 1.0),
    "terms in another order": ("x + 1", "$1 + x$", 1.0),
    "a whole solution": (r"Adding gives \boxed{\frac{3}{4}}.", "$3/4$", 1.0),
    "wrong": ("42", "$41$", 0.0),
    "nothing to read": ("42", "I do not know", 0.0),
    "empty": ("42", "", 0.0),
}


@needs_tasks
@pytest.mark.parametrize(("truth", "text", "reward"), EQUAL.values(), ids=EQUAL)
def test_math_verify_compares_expressions(truth: str, text: str, reward: float, mathematics: Scorer) -> None:
    score = mathematics(prompt(truth), text)
    assert (score.reward, score.correct) == (reward, reward)
    assert score.parts == {"parsed": 0.0 if "know" in text or not text else 1.0}


@needs_tasks
def test_equal_expressions_have_one_vote(mathematics: Scorer) -> None:
    for text in ("$1/2$", r"$\frac{1}{2}$", r"\boxed{\frac12}"):
        assert mathematics(prompt("1/2"), text).extracted == "1/2"


@needs_tasks
def test_a_ground_truth_that_is_no_expression_is_an_error_not_a_zero(mathematics: Scorer) -> None:
    with pytest.raises(RewardError, match="the ground truth '' is no expression"):
        mathematics(prompt(""), "$1$")


# -- reasoning_gym


@needs_tasks
def test_a_task_of_reasoning_gym_scores_its_own_rows() -> None:
    rows = rows_of(order_of("leg_counting", 6, 1, False))
    scorer = make_scorer(Config(reward=TASK))
    try:
        for row in rows:
            given = prompt(row["answer"], prompt=row["prompt"], metadata=row["metadata"])
            assert scorer(given, f"I count.\n<answer>{row['answer']}</answer>") == \
                Score(reward=1.0, correct=1.0, extracted=row["answer"])
            assert scorer(given, f" {row['answer']}\n").reward == 1.0
            assert scorer(given, "no legs").correct == 0.0
    finally:
        scorer.close()


@needs_tasks
def test_training_and_held_out_rows_do_not_meet_and_are_the_same_everywhere() -> None:
    def rows_for(size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
        return rows_of(order_of("basic_arithmetic", size, seed, held_out))

    train, other, held = rows_for(60, 1, False), rows_for(60, 2, False), rows_for(20, 1, True)
    assert [len(rows) for rows in (train, other, held)] == [60, 60, 20]
    questions = [{row["prompt"] for row in rows} for rows in (train, other, held)]
    assert [len(each) for each in questions] == [60, 60, 20], "no question twice"
    assert not questions[2] & (questions[0] | questions[1])
    assert questions[0] != questions[1]
    assert rows_for(20, 7, True) == held
    assert rows_for(15, 1, False) == train[:15]


@needs_tasks
def test_rows_are_the_same_in_every_process() -> None:
    """This task walks through a set of texts: without a fixed hash seed its rows change with the process."""
    rows = reasoning_rows("ransom_note", 3, seed=1, held_out=False)
    assert reasoning_rows("ransom_note", 3, seed=1, held_out=False) == rows


@needs_tasks
@pytest.mark.parametrize("name", ["countdown", "rearc"])
def test_entries_score_as_json(name: str) -> None:
    """`rearc` compares with tuples, which JSON has not."""
    rows = json.loads(json.dumps(rows_of(order_of(name, 3, 1, False))))
    score = scorer_of_task(name)
    scores = [score(row["answer"], row["answer"], row["prompt"], row["metadata"]) for row in rows]
    assert [each["reward"] for each in scores] == [1.0] * 3


@needs_tasks
def test_a_task_that_cannot_give_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task reasoning_gym:leg_count: there is no task 'leg_count' .* leg_count"):
        reasoning_rows("leg_count", 4, seed=1, held_out=False)
    with pytest.raises(ValueError, match=r"there is no task 'x-y' among the \d+ of reasoning-gym; there are "):
        scorer_of_task("x-y")
    with pytest.raises(ValueError, match=r"400 different questions asked for \(data.size\), and it gave \d+; set data"):
        rows_of(order_of("coin_flip", 400, 1, False))
