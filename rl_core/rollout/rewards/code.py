"""Code that is run: the last program of an answer against the row's tests, in a sandbox (sandbox.py, rewards.md 7).

Runs in a process of its own, which starts one more for every test. Programs are Python.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast, get_args

from rl_core.rollout.rewards.sandbox import Ended, Limits, check_sandbox, run_program

FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("", "python", "python3", "py")
Outcome = Literal["right", "wrong", "no_code"] | Ended
OUTCOMES: tuple[str, ...] = ("right", "wrong", "no_code", *(name for name in get_args(Ended) if name != "finished"))
"""How the tests of an answer came out: every one passed, another output, nothing to run, or how the first program that
did not come to its end has ended."""


class CodeLimits(TypedDict):
    """The settings `scoring.code`."""

    time_s: float
    total_s: float
    memory_bytes: int
    output_bytes: int
    partial: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """What a program is given, and what it must print; or statements that must run behind it without an error."""

    stdin: str = ""
    expected: str | None = None
    statements: str = ""


def program_of(answer: str) -> str | None:
    """The last fenced block that is Python or says no language; without a fence the whole text. None: nothing to run.

    A block that the limit of tokens has cut is a program, too: it fails by itself.
    """
    blocks = [(language.lower(), body) for language, body in FENCE.findall(answer)]
    if not blocks:
        return answer if answer.strip() else None
    programs = [body for language, body in blocks if language in PYTHON and body.strip()]
    return programs[-1] if programs else None


def read_tests(truth: str) -> list[Trial]:
    """The tests that a row's ground truth holds. Raises ValueError for one that holds none.

    JSON `{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}`: a run for each input, and what it must print. JSON list of
    texts: each statements that are run behind the program, as `assert f(1) == 2`. Any other text: such statements, one
    test.
    """
    try:
        found: Any = json.loads(truth)
    except ValueError:
        found = [truth]
    if isinstance(found, Mapping):
        cases = cast("Mapping[str, Any]", found)
        inputs, outputs = cases.get("inputs"), cases.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError('tests as an object have the lists "inputs" and "outputs"; this one has '
                             f"{sorted(cases)}")
        if cases.get("fn_name"):
            raise ValueError('tests with "fn_name" call a function; write them as statements, as in '
                             '["assert f(1) == 2"]')
        pairs = list(zip(cast("list[Any]", inputs), cast("list[Any]", outputs), strict=False))
        if not pairs or len(cast("list[Any]", inputs)) != len(cast("list[Any]", outputs)):
            raise ValueError(f'tests need as many "outputs" as "inputs", at least one; there are '
                             f"{len(cast('list[Any]', inputs))} and {len(cast('list[Any]', outputs))}")
        return [Trial(stdin=_text(given), expected=_text(wanted)) for given, wanted in pairs]
    listed = cast("list[Any]", found) if isinstance(found, list) else [truth]
    statements = [each for each in listed if isinstance(each, str) and each.strip()]
    if not statements or len(statements) != len(listed):
        raise ValueError(f"the ground truth {truth[:80]!r} holds no tests: write Python statements, a JSON list of "
                         'them, or {"inputs": [...], "outputs": [...]}')
    for each in statements:
        try:
            nodes = list(ast.walk(ast.parse(each, "tests")))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the test {each[:80]!r} is not Python: {error}") from error
        if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in nodes):
            raise ValueError(f"the test {each[:80]!r} asserts nothing and calls nothing: every program would pass it")
    return [Trial(statements=each) for each in statements]


def _text(value: Any) -> str:
    """Data sets have an input as one text, or as a list of lines."""
    return "\n".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def same_output(printed: str, expected: str) -> bool:
    """Line by line, without blanks at the ends of lines and empty lines at the end."""
    one, two = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return one == two


def scorer_of(limits: CodeLimits) -> Callable[[str, str], dict[str, Any]]:
    """The reward. Raises SandboxMissing where programs cannot be confined."""
    check_sandbox()
    each = Limits(time_s=limits["time_s"], memory_bytes=limits["memory_bytes"], output_bytes=limits["output_bytes"])

    def score(answer: str, truth: str) -> dict[str, Any]:
        tests, program = read_tests(truth), program_of(answer)
        passed, outcome = (0, "no_code") if program is None else \
            run_tests(program, tests, each, limits["total_s"], every=limits["partial"])
        right = outcome == "right"
        share = passed / len(tests)
        return {"reward": share if limits["partial"] else float(right), "correct": right, "passed": share,
                **{f"ended_{name}": float(name == outcome) for name in OUTCOMES}}

    return score


def run_tests(program: str, tests: list[Trial], limits: Limits, total_s: float, *, every: bool) -> tuple[int, str]:
    """`(passed tests, outcome)`: until the first that fails, or of `every` one. The outcome is of the first that fails.

    A program over its time is not run again, and none is after `total_s` of their own time: the tests that are left
    have failed.
    """
    spent_s, passed, outcome = 0.0, 0, "right"
    for test in tests:
        ended, seconds = _run_test(program, test, limits, total_s - spent_s) if spent_s < total_s else ("time", 0.0)
        spent_s += seconds
        passed += ended == "right"
        outcome = ended if outcome == "right" else outcome
        if ended == "time" or (ended != "right" and not every):
            break
    return passed, outcome


def _run_test(program: str, test: Trial, limits: Limits, left_s: float) -> tuple[str, float]:
    """`(how it ended, seconds)`"""
    within = Limits(time_s=min(limits.time_s, left_s), memory_bytes=limits.memory_bytes,
                    output_bytes=limits.output_bytes)
    done = run_program(program, limits=within, stdin=test.stdin, tests=test.statements)
    if done.ended != "finished":
        return done.ended, done.seconds
    passed = test.expected is None or same_output(done.output, test.expected)
    return "right" if passed else "wrong", done.seconds
