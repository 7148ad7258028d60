"""What a validation's record, its table and its metrics say of scored answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl_core.answers import TABLE_SAMPLES, Answer, Mode, fields_of, table_details, table_prompts, table_rows
from rl_core.estimates import wilson
from rl_core.metrics import (
    MAX_PARTS,
    MAX_SCALARS,
    MAX_SOURCES,
    is_tracked,
    source_metrics,
    tracked_names,
    validation_metrics,
)
from rl_core.types import Prompt, Score


def answer(prompt: int, correct: float | None, mode: Mode = "sampled", extracted: str | None = None,
           finish: str = "stop") -> Answer:
    """One answer of 4 tokens; None: its reward failed."""
    score = None if correct is None else Score(reward=correct - 0.5, correct=correct, extracted=extracted)
    return Answer(prompt=prompt, mode=mode, data_source="s", score=score, length=4, finish_reason=finish)


def test_the_fields_of_a_small_validation_by_hand() -> None:
    greedy = [answer(0, 1.0, "greedy"), answer(1, 0.0, "greedy", finish="length"), answer(2, 1.0, "greedy")]
    sampled = [answer(0, 1.0, extracted="7"), answer(0, 1.0, extracted="7"), answer(0, 0.0, extracted="9"),
               answer(1, 0.0, extracted="1"), answer(1, 0.0, extracted="2"), answer(1, 1.0, extracted="3"),
               answer(2, None), answer(2, 1.0, extracted="5"), answer(2, 1.0, extracted="5")]
    found = fields_of([*greedy, *sampled], (1, 2, 3))
    assert found["n"] == 3
    assert found["greedy_accuracy"] == pytest.approx(2 / 3)
    assert found["greedy_interval"] == pytest.approx([wilson(2 / 3, 3).lo, wilson(2 / 3, 3).hi])
    assert found["greedy_reward"] == pytest.approx(1 / 6) and found["greedy_truncated"] == pytest.approx(1 / 3)
    assert found["sampled_accuracy"] == pytest.approx(5 / 8), "over answers"
    assert found["mean_at_n"] == pytest.approx((2 / 3 + 1 / 3 + 1) / 3), "over prompts"
    assert found["sampled_failed"] == 1 and found["greedy_failed"] == 0
    assert found["pass_at_k"]["1"] == pytest.approx(found["mean_at_n"])
    assert found["pass_at_k"]["2"] == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert found["pass_at_k"]["3"] == 1.0, "the prompt with two scored answers says nothing of three"
    assert found["maj_at_n"] == pytest.approx((1 + 1 / 3 + 1) / 3), "a tie of three shares"
    assert found["maj_at_k"] == pytest.approx({"1": (2 / 3 + 1 / 3 + 1) / 3, "2": (2 / 3 + 1 / 3 + 1) / 3,
                                               "3": (1 + 1 / 3) / 2}), "of the prompts with k scored answers"
    assert found["best_at_k"] == pytest.approx({k: value - 0.5 for k, value in found["pass_at_k"].items()})
    assert found["worst_at_k"] == pytest.approx({"1": 1 / 6, "2": (-1 / 6 - 1 / 2 + 1 / 2) / 3, "3": -0.5}), "rewards"
    assert found["sampled_std"] == found["sampled_accuracy_std"] == pytest.approx(2 * math.sqrt(2) / 9)
    assert all(lo <= found["best_at_k"][k] <= hi for k, (lo, hi) in found["best_at_k_interval"].items())
    assert all(lo <= found["maj_at_k"][k] <= hi for k, (lo, hi) in found["maj_at_k_interval"].items())
    assert all(lo <= found["pass_at_k"][k] <= hi for k, (lo, hi) in found["pass_at_k_interval"].items())


def test_numbers_that_nothing_is_known_of_are_none() -> None:
    failed = fields_of([answer(0, 1.0, "greedy"), answer(0, None), answer(0, None)], (1, 2))
    assert (failed["mean_at_n"], failed["mean_at_n_interval"], failed["maj_at_n"]) == (None, None, None)
    assert failed["maj_at_k"] == failed["maj_at_k_interval"] == {"1": None, "2": None}
    assert failed["pass_at_k"] == {"1": None, "2": None} and failed["sampled_failed"] == 2
    assert failed["sampled_std"] is None and failed["sampled_accuracy_std"] is None
    unextracted = fields_of([answer(0, 1.0, "greedy"), answer(0, 1.0), answer(0, 0.0)], (1,))
    assert unextracted["maj_at_n"] is None and unextracted["mean_at_n"] == 0.5
    assert unextracted["maj_at_k"] == {"1": None}


def of_source(source: str, mode: Mode, prompt: int, reward: float, correct: float | None = None) -> Answer:
    return Answer(prompt=prompt, mode=mode, data_source=source, score=Score(reward=reward, correct=correct), length=4,
                  finish_reason="stop")


def test_each_data_source_says_in_its_own_way_what_is_right() -> None:
    modes: tuple[Mode, ...] = ("greedy", "sampled")
    math_ = [of_source("math", mode, 2 + i, 0.9, correct) for mode in modes for i, correct in enumerate((1.0, 1.0))]
    plain = [of_source("gsm8k", mode, i, reward) for mode in modes for i, reward in enumerate((1.0, 0.0))]
    found = fields_of([*math_, *plain], (1,))
    assert (found["greedy_accuracy"], found["sampled_accuracy"], found["mean_at_n"]) == (0.75, 0.75, 0.75)
    assert found["pass_at_k"] == {"1": 0.75} and found["greedy_interval"] == pytest.approx([
        wilson(0.75, 4).lo, wilson(0.75, 4).hi])
    shaped = [of_source("gsm8k", mode, i, reward) for mode in modes for i, reward in enumerate((1.0, 0.1))]
    found = fields_of([*math_, *shaped], (1,))
    assert fields_of(math_, (1,))["greedy_accuracy"] == 1.0 and fields_of(shaped, (1,))["greedy_accuracy"] is None
    assert (found["greedy_accuracy"], found["greedy_interval"], found["sampled_accuracy"]) == (None, None, None)
    assert (found["mean_at_n"], found["pass_at_k"], found["maj_at_n"]) == (None, {"1": None}, None)
    assert found["greedy_reward"] == pytest.approx(0.725), "rewards are known of all"
    several = [of_source(source, "sampled", prompt, reward) for source, prompt, rewards in (
        ("a", 0, (0.0, 1.0)), ("b", 1, (0.1, 0.5)), ("b", 2, (3.0, 3.0))) for reward in rewards]
    greedy = [of_source("a", "greedy", 0, 1.0), of_source("b", "greedy", 1, 0.1), of_source("b", "greedy", 2, 0.1)]
    found = fields_of([*greedy, *several], (1,))
    assert found["sampled_std"] == pytest.approx((0.5 + 0.2 + 0.0) / 3) and found["sampled_accuracy_std"] is None
    assert fields_of([greedy[0], *several[:2]], (1,))["sampled_accuracy_std"] == 0.5, "of one source it is known"
    assert fields_of([*greedy[1:], *several[2:]], (1,))["sampled_std"] == pytest.approx(0.1)


def test_a_shaped_reward_is_no_accuracy_of_greedy_answers_that_all_got_0() -> None:
    found = fields_of([*(of_source("s", "greedy", i, 0.0) for i in range(2)),
                       *(of_source("s", "sampled", i, reward) for i, reward in enumerate((0.0, 0.1)))], (1,))
    assert (found["greedy_accuracy"], found["greedy_interval"], found["mean_at_n"]) == (None, None, None)
    alone = fields_of([of_source("s", "greedy", i, 0.0) for i in range(2)], ())
    assert alone["greedy_accuracy"] == 0.0


def prompts_of(*sources: str) -> list[Prompt]:
    return [Prompt(dataset_epoch=0, position=i, prompt_idx=i, token_ids_P=np.zeros(1, np.int32), answer=str(i),
                   data_source=source) for i, source in enumerate(sources)]


TABLES: dict[str, tuple[list[str], int, set[int]]] = {
    "evenly over one source": (["a"] * 8, 4, {0, 2, 4, 6}),
    "as many of each source": (["a"] * 6 + ["b"] * 6, 4, {0, 3, 6, 9}),
    "a small source leaves its part": (["a", "a", "a", "a", "b"], 3, {0, 2, 4}),
    "more than there are": (["a", "b"], 16, {0, 1}),
    "none": (["a", "b"], 0, set()),
    "fewer than sources": (["a", "b", "c"], 2, {0, 1}),
}


@pytest.mark.parametrize(("sources", "size", "expected"), TABLES.values(), ids=TABLES)
def test_the_table_shows_every_source_evenly(sources: list[str], size: int, expected: set[int]) -> None:
    assert table_prompts(prompts_of(*sources), size) == expected


def test_a_row_of_the_table_has_what_a_person_asks() -> None:
    prompts = prompts_of("a", "b")
    answers = [Answer(prompt=1, mode="greedy", data_source="b", score=None, length=9, finish_reason="length", text="x"),
               *(answer(1, 1.0, extracted="7") for _ in range(TABLE_SAMPLES + 3)), answer(0, 0.0, "greedy")]
    rows = table_rows(answers, prompts, {1: "what is b?"})
    assert len(rows) == 1 + TABLE_SAMPLES
    assert rows[0] == {"data_source": "b", "prompt": "what is b?", "answer": "1", "mode": "greedy", "text": "x",
                       "reward": None, "correct": None, "extracted": None, "length": 9, "finish": "length"}
    assert (rows[1]["mode"], rows[1]["reward"], rows[1]["correct"], rows[1]["extracted"]) == ("sampled", 0.5, 1.0, "7")


def test_beside_each_row_of_the_table_stand_its_tokens_and_reward_parts() -> None:
    answers = [Answer(prompt=1, mode="greedy", data_source="b", score=None, length=2, finish_reason="length", text="x",
                      token_ids=(5, 9), logprobs=(-0.250004, -1.5)),
               Answer(prompt=1, mode="sampled", data_source="b", score=Score(reward=1.0, parts={"format": 0.5}),
                      length=1, finish_reason="stop", token_ids=(7,), logprobs=(-2.0,)), answer(0, 0.0, "greedy")]
    assert table_details(answers, {1: "what is b?"}) == [
        {"prompt": 1, "parts": {}, "ids": [5, 9], "logprobs": [-0.25, -1.5]},
        {"prompt": 1, "parts": {"format": 0.5}, "ids": [7], "logprobs": [-2.0]}]


def test_sources_become_metrics_of_which_none_begins_another() -> None:
    names = ["math", "math_500", "math-500", "math_accuracy_x", "sort"]
    found = source_metrics({name: {"greedy_accuracy": i / 8} for i, name in enumerate(names)})
    assert found == {"validation/source_math_accuracy": 0.0, "validation/source_math-500_accuracy": 0.125,
                     "validation/source_math-500-2_accuracy": 0.25, "validation/source_math-accuracy-x_accuracy": 0.375}
    every = [*found, *tracked_names("validator")]
    assert [(a, b) for a in every for b in every if a != b and b.startswith(a)] == []
    assert all(map(is_tracked, every))
    assert source_metrics({"sort": {"greedy_accuracy": 0.5}}) == {}, "one alone is the total"
    assert math.isnan(source_metrics({"a": {"greedy_accuracy": None}, "b": {}})["validation/source_a_accuracy"])


def test_a_step_with_a_validation_has_at_most_the_scalars_that_a_tracker_takes() -> None:
    fixed = sum(len(tracked_names(writer)) for writer in ("learner", "owner", "validator"))
    assert fixed + MAX_PARTS + MAX_SOURCES <= MAX_SCALARS


def test_the_metric_of_pass_at_k_is_that_of_the_largest_k() -> None:
    metrics = validation_metrics({"pass_at_k": {"1": 0.25, "4": 0.5, "16": 0.75}, "maj_at_n": 0.5})
    assert (metrics["validation/pass_at_k"], metrics["validation/maj_at_n"]) == (0.75, 0.5)
    assert not is_tracked("validation/maj_at_n")
