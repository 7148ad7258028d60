"""The reward `code`: the program of an answer, the tests of a row, and what becomes of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError, RewardError
from rl_core.plan import check
from rl_core.rollout.rewards import sandbox
from rl_core.rollout.rewards.code import OUTCOMES, CodeLimits, Trial, program_of, read_tests, same_output, scorer_of
from rl_core.rollout.rewards.scoring import Scorer, make_scorer
from rl_core.types import Prompt

LIMITS = CodeLimits(time_s=1.0, total_s=3.0, memory_bytes=256 << 20, output_bytes=1 << 16, partial=False)
SUMS = json.dumps({"inputs": ["1\n", "5\n", "7\n"], "outputs": ["2\n", "6", "8\n\n"]})
ASSERTS = json.dumps(["assert f(1) == 2", "assert f(2) == 3"])

PROGRAMS: dict[str, tuple[str, str | None]] = {
    "a block": ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
    "the last block": ("```py\nprint(1)\n```\nno:\n```\nprint(2)\n```", "print(2)\n"),
    "another language after it": ("```python\nprint(1)\n```\n```text\n1\n```", "print(1)\n"),
    "cut at the limit": ("```python\nprint(1", "print(1"),
    "a language in capitals": ("```Python 3\nprint(1)\n```", "print(1)\n"),
    "no fence": ("print(1)", "print(1)"),
    "nothing": ("  \n", None),
    "another language": ("```js\nx\n```", None),
    "an empty block": ("```python\n\n```", None),
}


@pytest.mark.parametrize(("answer", "program"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_program_of_an_answer(answer: str, program: str | None) -> None:
    assert program_of(answer) == program


def test_reading_the_tests_of_a_row() -> None:
    assert read_tests(SUMS) == [Trial("1\n", "2\n"), Trial("5\n", "6"), Trial("7\n", "8\n\n")]
    assert read_tests('{"inputs": [["1", "2"]], "outputs": [[3]]}') == [Trial("1\n2", "3")], "lists of lines"
    assert read_tests(ASSERTS) == [Trial(statements="assert f(1) == 2"), Trial(statements="assert f(2) == 3")]
    assert read_tests("assert f(1) == 2\nassert f(2)") == [Trial(statements="assert f(1) == 2\nassert f(2)")]


NO_TESTS = {
    "empty": ("", "holds no tests"), "an empty list": ("[]", "holds no tests"), "numbers": ("[1]", "holds no tests"),
    "other keys": ('{"tests": []}', r"this one has \['tests'\]"), 
    "none": ('{"inputs": [], "outputs": []}', "at least one"),
    "unequal": ('{"inputs": ["1"], "outputs": []}', "there are 1 and 0"), "words": ("it will be 42", "is not Python"),
    "a number": ("42", "asserts nothing"), "an expression in a list": ('["f"]', "asserts nothing"),
    "calls": ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}', 'tests with "fn_name"'),
}


@pytest.mark.parametrize(("truth", "words"), NO_TESTS.values(), ids=NO_TESTS)
def test_a_row_without_tests_is_an_error_and_no_reward_of_0(truth: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tests(truth)


@pytest.mark.parametrize(("printed", "expected", "same"), [
    ("1\n2\n", "1\n2", True), ("1  \n2\n\n\n", "1\n2\n", True), ("", "\n", True), ("1\n\n2", "1\n2", False),
    (" 1", "1", False), ("1 2", "1  2", False), ("12", "1\n2", False), ("1\r\n", "1\n", True)])
def test_outputs_are_compared_line_by_line(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) == same


SCORES: dict[str, tuple[str, str, bool, float, float, str]] = {
    # program, tests, partial, reward, share of passed tests, outcome
    "all right": ("print(int(input()) + 1)", SUMS, False, 1.0, 1.0, "right"),
    "all right, by share": ("print(int(input()) + 1)", SUMS, True, 1.0, 1.0, "right"),
    "one of three": ("input()\nprint(6)", SUMS, True, 1 / 3, 1 / 3, "wrong"),
    "the first is wrong": ("input()\nprint(6)", SUMS, False, 0.0, 0.0, "wrong"),
    "asserts": ("def f(x): return x + 1", ASSERTS, False, 1.0, 1.0, "right"),
    "one assert of two": ("def f(x): return 2", ASSERTS, True, 0.5, 0.5, "error"),
    "no code": ("```sql\nselect 1\n```", SUMS, True, 0.0, 0.0, "no_code"),
    "leaves before the tests": ("import sys\nsys.exit(0)", ASSERTS, True, 0.0, 0.0, "error"),
    "forks": ("import os\nwhile True: os.fork()", ASSERTS, True, 0.0, 0.0, "processes"),
    "fills the disk": ("f = open('x', 'wb')\nwhile True: f.write(b'x' * 10 ** 6)", ASSERTS, True, 0.0, 0.0, "files"),
    "prints gigabytes": ("while True: print('x' * 10 ** 4)", ASSERTS, True, 0.0, 0.0, "output"),
}


@pytest.mark.parametrize(("program", "truth", "partial", "reward", "passed", "outcome"), SCORES.values(), ids=SCORES)
def test_the_score_of_a_program(program: str, truth: str, partial: bool, reward: float, passed: float,
                                outcome: str) -> None:
    found = scorer_of(CodeLimits(**{**LIMITS, "partial": partial}))(program, truth)
    assert (found["reward"], found["passed"]) == pytest.approx((reward, passed))
    assert found["correct"] == (outcome == "right")
    assert {name: found[f"ended_{name}"] for name in OUTCOMES} == {name: float(name == outcome) for name in OUTCOMES}


def test_a_program_that_never_ends_is_not_run_for_every_test() -> None:
    begun = time.monotonic()
    found = scorer_of(CodeLimits(**{**LIMITS, "time_s": 0.3, "partial": True}))("while True: pass", SUMS)
    assert found["ended_time"] == 1.0 and time.monotonic() - begun < 4.0


def test_starts_of_the_interpreter_are_none_of_an_answers_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "child.py"
    slow.write_text("import runpy, time\ntime.sleep(0.5)\n"
                    f"runpy.run_path({str(sandbox.CHILD)!r}, run_name='__main__')\n")
    monkeypatch.setattr(sandbox, "CHILD", slow)
    score = scorer_of(CodeLimits(**{**LIMITS, "total_s": 1.2}))
    assert score("print(int(input()) + 1)", SUMS)["correct"], "three starts take longer than that"
    assert score("import time\ntime.sleep(0.6)\nprint(int(input()) + 1)", SUMS)["ended_time"] == 1.0


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    made = make_scorer(Config.model_validate({"reward": "code", "scoring": {"code": {"partial": True}}}))
    yield made
    made.close()


def prompt(answer: str) -> Prompt:
    return Prompt(dataset_epoch=0, position=0, prompt_idx=0, token_ids_P=np.zeros(1, np.int32), answer=answer,
                  data_source="s", columns={})


def test_it_scores_in_a_run_and_its_ends_are_parts(scorer: Scorer) -> None:
    score = scorer(prompt(ASSERTS), "```python\ndef f(x): return 2\n```")
    assert score.reward == 0.5 and score.correct == 0.0 and score.parts["passed"] == 0.5
    assert [name for name, value in score.parts.items() if value == 1.0] == ["ended_error"]
    with pytest.raises(RewardError, match=r"reward code: raised ValueError: the ground truth '' holds no tests"):
        scorer(prompt(""), "print(1)")
    assert scorer(prompt(ASSERTS), "def f(x): return x + 1").correct == 1.0, "the next answer is scored all the same"


def test_limits_that_the_deadline_of_a_reward_would_cut_are_refused() -> None:
    settings: dict[str, Any] = {"reward": "code", "scoring": {"code": {"total_s": 12.0}}}
    with pytest.raises(ConfigError, match=r"scoring.code.total_s: .*scoring.code.time_s = 4 not below "
                                          r"deadlines.reward_s = 15.*\(got 12.0\)"):
        check(Config.model_validate(settings))
    check(Config.model_validate(settings | {"deadlines": {"reward_s": 20}}))
    check(Config.model_validate(settings | {"reward": "exact"}))


def test_code_of_a_working_directory_is_not_seen_by_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert scorer_of(LIMITS)("import json\ndef f(x): return x + 1", ASSERTS)["correct"]
