"""How functions of three signatures are called, and what their results become. In this process: no child, no file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_core.rollout.rewards.results import as_score, left_out
from rl_core.rollout.rewards.signatures import bind

CHAT = [{"role": "user", "content": "6 x 7"}]
REQUEST: dict[str, Any] = {"text": "is 42", "truth": "42", "prompt": "6 x 7", "data_source": "tables",
                           "columns": {"level": 3, "extra_info": {"index": 5}}}




def verl_as_documented(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Any:
    return [data_source, solution_str, ground_truth, extra_info]


def verl_with_rest(solution_str: Any, ground_truth: Any, **kwargs: Any) -> Any:
    return [solution_str, ground_truth, kwargs]


def verl_short(solution_str: Any, ground_truth: Any, method: str = "strict", format_score: float = 0.0) -> Any:
    return [solution_str, ground_truth, method, format_score]


def trl_full(prompts: Any, completions: Any, level: Any, answer: Any, **kwargs: Any) -> Any:
    return [prompts, completions, level, answer, kwargs]


def trl_rest(completions: Any, **kwargs: Any) -> Any:
    return [completions, kwargs]


def trl_truth(completions: Any, ground_truth: Any, nothing: Any = None) -> Any:
    return [completions, ground_truth, nothing]


def mine(answer: Any, truth: Any, level: Any, rate: float = 2.0) -> Any:
    return [answer, truth, level, rate]


def by_place(a: Any, b: Any) -> Any:
    return [a, b]


def both(completion: Any, answer: Any) -> Any:
    return [completion, answer]


def everything(**kwargs: Any) -> Any:
    return kwargs


FILLED: dict[str, tuple[Any, str, dict[str, Any], str, Any]] = {
    "verl": (verl_as_documented, "auto", {}, "verl", ["tables", "is 42", "42", {"index": 5}]),
    "verl without extra_info": (verl_as_documented, "auto", {"columns": {}}, "verl", ["tables", "is 42", "42", None]),
    "verl, a ground truth that is a list": (
        verl_as_documented, "auto", {"columns": {"reward_model": {"style": "rule", "ground_truth": [4, 2]}}}, "verl",
        ["tables", "is 42", [4, 2], None]),
    "verl with kwargs": (verl_with_rest, "auto", {}, "verl",
                         ["is 42", "42", {"data_source": "tables", "extra_info": {"index": 5}}]),
    "verl's own scorers": (verl_short, "auto", {}, "verl", ["is 42", "42", "strict", 0.0]),
    "verl, forced": (everything, "verl", {}, "verl", {"data_source": "tables", "solution_str": "is 42",
                                                      "ground_truth": "42", "extra_info": {"index": 5}}),
    "TRL, texts": (trl_full, "auto", {}, "trl",
                   [["6 x 7"], ["is 42"], [3], ["42"], {"extra_info": [{"index": 5}], "data_source": ["tables"]}]),
    "TRL, chats": (trl_rest, "auto", {"prompt": CHAT, "columns": {}}, "trl",
                   [[[{"role": "assistant", "content": "is 42"}]],
                    {"prompts": [CHAT], "answer": ["42"], "data_source": ["tables"]}]),
    "TRL, the column is not called answer": (trl_truth, "auto", {}, "trl", [["is 42"], ["42"], None]),
    "TRL, a column of that name": (trl_truth, "auto", {"columns": {"ground_truth": 7, "nothing": 1}}, "trl",
                                   [["is 42"], [7], [1]]),
    "TRL, forced": (everything, "trl", {"columns": {}}, "trl",
                    {"prompts": ["6 x 7"], "completions": ["is 42"], "answer": ["42"], "data_source": ["tables"]}),
    "mine": (mine, "auto", {}, "answer", ["is 42", "42", 3, 2.0]),
    "mine by place": (by_place, "auto", {}, "answer", ["is 42", "42"]),
    "prompt, response, ground_truth": (
        lambda prompt, response, ground_truth: [prompt, response, ground_truth], "auto", {}, "answer",
        ["6 x 7", "is 42", "42"]),
    "prompt and two places": (lambda prompt, a, b: [prompt, a, b], "auto", {}, "answer", ["6 x 7", "is 42", "42"]),
    "truth first": (lambda truth, response: [truth, response], "auto", {}, "answer", ["42", "is 42"]),
    "truth first, an unknown text": (lambda truth, reply: [truth, reply], "auto", {}, "answer", ["42", "is 42"]),
    "a column before the text": (lambda level, reply: [level, reply], "auto", {}, "answer", [3, "is 42"]),
    "a column after the text": (lambda reply, level: [reply, level], "auto", {}, "answer", ["is 42", 3]),
    "a column and two places": (lambda level, reply, gold: [level, reply, gold], "auto", {}, "answer",
                                [3, "is 42", "42"]),
    "a default is no place": (lambda reply, scale=2, gold=None: [reply, scale, gold], "auto", {}, "answer",
                              ["is 42", 2, None]),
    "solution": (lambda solution, truth: [solution, truth], "auto", {}, "answer", ["is 42", "42"]),
    "output": (lambda truth, output: [truth, output], "auto", {}, "answer", ["42", "is 42"]),
    "text": (lambda data_source, text, truth: [data_source, text, truth], "auto", {}, "answer",
             ["tables", "is 42", "42"]),
    "output that is a setting": (lambda a, b, output="json": [a, b, output], "auto", {}, "answer",
                                 ["is 42", "42", "json"]),
    "response and answer": (lambda response, answer: [response, answer], "auto", {}, "answer", ["is 42", "42"]),
    "response, also where the rows have one": (
        lambda response, truth: [response, truth], "auto", {"columns": {"response": "41"}}, "answer", ["is 42", "42"]),
    "answer before a column `text`": (lambda answer, text: [answer, text], "auto", {"columns": {"text": "6 x 7"}},
                                      "answer", ["is 42", "6 x 7"]),
    "completion and answer": (both, "auto", {}, "answer", ["is 42", "42"]),
    "verl's names, forced to be mine": (verl_short, "answer", {}, "answer", ["is 42", "42", "strict", 0.0]),
}


@pytest.mark.parametrize(("function", "signature", "change", "kind", "given"), FILLED.values(), ids=FILLED)
def test_a_request_fills_the_parameters(function: Any, signature: str, change: dict[str, Any], kind: str,
                                        given: Any) -> None:
    bound = bind(function, signature)
    assert bound.signature == kind
    assert bound.call(REQUEST | change) == given


def test_the_answer_column_has_the_name_of_the_data_set() -> None:
    def trl(completions: Any, solution: Any, **kwargs: Any) -> Any:
        return [solution, sorted(kwargs)]

    def own(answer: Any, solution: Any) -> Any:
        return [answer, solution]

    assert bind(trl, answer_key="solution").call(REQUEST) == [["42"], ["data_source", "extra_info", "level", "prompts"]]
    assert bind(own, answer_key="solution").call(REQUEST) == ["is 42", "42"]
    assert bind(own, answer_key="solution").needs == []
    assert bind(lambda solution, reply, prompt: [solution, reply, prompt], answer_key="label").call(REQUEST | {
        "columns": {"reply": 1}}) == ["is 42", 1, "6 x 7"]
    assert bind(lambda label, reply: [label, reply], answer_key="label").call(REQUEST) == ["42", "is 42"]
    assert bind(lambda reply, solution: [reply, solution], answer_key="solution").call(REQUEST) == ["is 42", "42"]
    assert bind(lambda solution, truth: [solution, truth], answer_key="solution").call(REQUEST) == ["is 42", "42"]
    with pytest.raises(ValueError, match="`solution` may be the model's text, and it is the data's answer key, too"):
        bind(lambda solution, reply: 1, answer_key="solution")


def both_marks(completions: Any, solution_str: Any) -> Any: ...


def of_the_trainer(completions: Any, completion_ids: Any) -> Any: ...


def with_columns(completions: Any, level: Any, hint: Any = None) -> Any: ...


MISFITS: dict[str, tuple[Any, str, str]] = {
    "no parameter": (lambda: 1, "auto", "takes no argument for the answer"),
    "nothing for the text": (lambda prompt, truth: 1, "auto",
                             r"none of the parameters \(prompt, truth\) is the model's text; call it `completion`"),
    "kwargs alone": (everything, "auto", "set scoring.signature"),
    "both systems": (both_marks, "auto", "has both `solution_str` .verl. and `completions` .TRL.; set scoring.sig"),
    "not verl's": (by_place, "verl", r"scoring.signature=verl calls compute_score\(data_source, .* the function has "
                   r"\(a, b\); name a parameter `solution_str`"),
    "not TRL's": (mine, "trl", r"calls f\(prompts, completions, .* name a parameter `completions`"),
    "what only TRL's trainer has": (of_the_trainer, "auto", "asks for `completion_ids`, which TRL's trainer has"),
}


@pytest.mark.parametrize(("function", "signature", "message"), MISFITS.values(), ids=MISFITS)
def test_a_wrong_signature_is_named(function: Any, signature: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bind(function, signature)


def test_columns_without_a_default_are_needed() -> None:
    assert bind(with_columns).needs == ["level"]
    assert bind(mine).needs == ["level"]
    with pytest.raises(KeyError, match=r"'level' is no column of the row; it has \['answer', 'other', 'prompt'\]"):
        bind(mine).call(REQUEST | {"columns": {"other": 1}})
    with pytest.raises(KeyError, match=r"it has \['gold', 'prompt'\]"):
        bind(mine, answer_key="gold").call(REQUEST | {"columns": {"gold": "42"}})


OPEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "more places than roles": (lambda a, b, c: 1, {}, "which parameter is the model's text. a, b, c are no columns"),
    "columns alone": (lambda a, b: 1, {"a": 1, "b": 2}, "text. a, b are all columns of the row; call the model's text"),
}


@pytest.mark.parametrize(("function", "columns", "message"), OPEN.values(), ids=OPEN)
def test_places_that_a_row_leaves_open_are_no_guess(function: Any, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bind(function).call(REQUEST | {"columns": columns})


def fields(reward: float, correct: float | None = None, extracted: str | None = None, /,
           **parts: float) -> dict[str, Any]:
    return {"reward": reward, "correct": correct, "extracted": extracted, "parts": parts}


RESULTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a number": (0.5, fields(0.5)),
    "a truth value": (True, fields(1.0, 1.0)),
    "NumPy": (np.float32(0.5), fields(0.5)),
    "a tensor of one number": (torch.tensor(0.5), fields(0.5)),
    "score": ({"score": 0.5}, fields(0.5)),
    "verl's keys": ({"score": -1, "acc": False, "pred": "41"}, fields(-1.0, 0.0, "41")),
    "nothing was extracted": ({"score": 0, "acc": 0, "pred": None}, fields(0.0, 0.0)),
    "parts": ({"reward": 1, "format": 0.25, "boxed": True, "length": np.int64(3)},
              fields(1.0, format=0.25, boxed=1.0, length=3.0)),
    "reward before score": ({"reward": 1, "score": 2}, fields(1.0, score=2.0)),
    "our names before theirs": ({"reward": 1, "correct": True, "acc": 0.25}, fields(1.0, 1.0, acc=0.25)),
    "lone surrogates": ({"score": 1, "pred": "a\ud800", "\udfffb": 2}, fields(1.0, None, "a?", **{"?b": 2.0})),
    "the largest of float32": (3.4e38, fields(3.4e38)),
    "texts and lists are left out": ({"score": 1, "feedback": "good", "steps": [1, 2], "none": None}, fields(1.0)),
}


@pytest.mark.parametrize(("value", "expected"), RESULTS.values(), ids=RESULTS)
def test_a_result_becomes_a_score(value: Any, expected: dict[str, Any]) -> None:
    assert as_score(value) == expected


def test_what_is_left_out_is_known() -> None:
    assert left_out({"score": 1, "pred": "x", "feedback": "good", "n": 2, "none": None}) == ["feedback", "none"]
    assert left_out(1.0) == []


def test_in_verls_signature_score_stands_before_reward() -> None:
    result = {"score": 0.5, "reward": 2}
    assert bind(verl_short).score(result) == fields(0.5, reward=2.0)
    assert bind(mine).score(result) == fields(2.0, score=0.5)


def test_trls_list_of_one_is_taken_apart() -> None:
    bound = bind(trl_rest)
    for value in ([0.5], (0.5,), np.array([0.5]), torch.tensor([0.5]), [{"score": 0.5}]):
        assert bound.score(value) == fields(0.5)
    assert bound.score([True]) == fields(1.0, 1.0)


NO_REWARDS: dict[str, tuple[Any, Any, str]] = {
    "too many": (trl_rest, [1.0, 2.0], r"the result has 2 rewards for 1 completion: \[1.0, 2.0\]"),
    "none": (trl_rest, [], r"the result has 0 rewards for 1 completion: \[\]"),
    "no list": (trl_rest, 1.0, r"the result is 1.0 of type float; in TRL's signature it must be a list"),
    "None in the list": (trl_rest, [None], r"the reward of the completion is None; TRL leaves such a completion out"),
    "a text in the list": (trl_rest, ["1"], r"the result is '1' of type str"),
    "a list where none is due": (mine, [1.0], r"the result is \[1.0\] of type list"),
    "NaN": (mine, float("nan"), r"the result is nan; it must be finite"),
    "NaN score": (verl_short, {"score": float("nan")}, r"`score` is nan; it must be finite"),
    "infinite": (mine, float("inf"), r"the result is inf; it must be finite"),
    "minus infinity": (verl_short, {"score": float("-inf")}, r"`score` is -inf; it must be finite"),
    "infinite part": (verl_short, {"score": 1, "p": float("inf")}, r"part 'p' is inf; it must be finite"),
    "beyond float32": (mine, 1e39, r"the result is 1e\+39; it must be finite in float32"),
    "a part beyond float32": (mine, {"reward": 1, "p": -1e300}, r"part 'p' is -1e\+300; it must be finite in float32"),
    "accuracy that is a text": (verl_short, {"score": 1, "acc": "yes"}, r"`correct` is 'yes' of type str"),
    "no reward": (verl_short, {"acc": 1}, r"the result has no `reward` and no `score`: \{'acc': 1\}"),
}


@pytest.mark.parametrize(("function", "value", "message"), NO_REWARDS.values(), ids=NO_REWARDS)
def test_a_result_that_is_no_reward_is_named(function: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bind(function).score(value)
