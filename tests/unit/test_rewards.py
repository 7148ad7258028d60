"""Rewards: exact match in place, functions by path in a process of their own with a deadline."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.command import QUIET
from rl_core.config import Config
from rl_core.errors import ConfigError, RewardError, RewardTimeout
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.rewards.function import FunctionScorer, check_target
from rl_core.rollout.rewards.scoring import answer_text, check_reward, make_scorer
from rl_core.types import Completion, Prompt, Score, VersionRuns


def prompt(answer: str = "123", **columns: Any) -> Prompt:
    return Prompt(dataset_epoch=0, position=0, prompt_idx=0, token_ids_P=np.zeros(1, np.int32), answer=answer,
                  data_source="sort", columns=columns)


def scorer(directory: Path, source: str, *, name: str = "score", deadline_s: float = 5.0) -> FunctionScorer:
    (directory / "reward.py").write_text(source)
    return FunctionScorer(f"./reward.py:{name}", cwd=directory, deadline_s=deadline_s)


def failing_call(given: FunctionScorer, seen: list[RewardError]) -> None:
    try:
        given(prompt(), "1")
    except RewardError as error:
        seen.append(error)


@pytest.mark.parametrize(("text", "reward"), [("123", 1.0), (" 123\n", 1.0), ("1234", 0.0), ("", 0.0), ("321", 0.0)])
def test_exact_compares_without_blanks_around(text: str, reward: float) -> None:
    assert exact(prompt(" 123 "), text) == Score(reward=reward, correct=reward, extracted=text.strip())
    assert make_scorer(Config())(prompt("123"), text).reward == reward


def test_a_stop_string_is_trimmed_from_the_text() -> None:
    def completion(stop: str | None) -> Completion:
        runs = VersionRuns(end_R=np.ones(1, np.int32), version_R=np.zeros(1, np.int32))
        return Completion(request_id="r", token_ids_L=np.ones(1, np.int32), logprobs_L=np.zeros(1, np.float32),
                          version_runs=runs, finish_reason="stop", stop_text=stop)

    assert answer_text("12 END 3 END", completion("END")) == "12 END 3 "
    assert answer_text("12", completion(None)) == "12"
    assert answer_text("12", completion("END")) == "12"


GOOD = {
    "text and truth by place": ("def score(a, b): return 0.5 if (a, b) == ('12', '123') else 0", Score(reward=0.5)),
    "names of this system": ("def score(answer, truth): return len(answer) / len(truth)", Score(reward=2 / 3)),
    "names of other systems": ("def score(ground_truth, completion): return len(completion) - len(ground_truth)",
                               Score(reward=-1.0)),
    "keywords only": ("def score(*, truth, answer): return len(truth) * 10 + len(answer)", Score(reward=32.0)),
    "columns": ("def score(answer, truth, level, data_source, prompt, extra=7, **rest):\n"
                " return {'reward': level + extra, data_source: 2, 'rest': len(rest), 'asked': len(prompt)}",
                Score(reward=10.0, parts={"sort": 2.0, "rest": 1.0, "asked": 8.0})),
    "a truth value says correct": ("def score(answer, truth): return answer in truth", Score(reward=1.0, correct=1.0)),
    "a dict": ("def score(answer, truth):\n return {'reward': 1.5, 'correct': False, 'extracted': 12, 'length': 2}",
               Score(reward=1.5, correct=0.0, extracted="12", parts={"length": 2.0})),
    "a NumPy number": ("import numpy\ndef score(answer, truth): return numpy.float32(0.5)", Score(reward=0.5)),
    "what it prints goes elsewhere": ("def score(answer, truth):\n print('{}')\n return 1", Score(reward=1.0)),
}


@pytest.mark.parametrize(("source", "expected"), GOOD.values(), ids=GOOD)
def test_a_function_scores(source: str, expected: Score, tmp_path: Path) -> None:
    given = scorer(tmp_path, source)
    try:
        assert given(prompt(level=3, unused=1, prompt="sort 321"), "12") == expected
    finally:
        given.close()


BAD = {
    "raises": ("def score(a, b): raise OSError('no net')", r"reward ./reward.py:score: raised OSError: no net"),
    "exits": ("def score(a, b): raise SystemExit(3)", r"raised SystemExit: 3"),
    "kills itself": ("import os\ndef score(a, b): os._exit(9)", r"its process ended with exit code 9"),
    "NaN": ("def score(a, b): return float('nan')", r"the result is nan; it must be finite"),
    "infinite": ("def score(a, b): return float('inf')", r"the result is inf; it must be finite"),
    "infinite part": ("def score(a, b): return {'reward': 1, 'p': 1e999}", r"part 'p' is inf; it must be finite"),
    "a text": ("def score(a, b): return '1.0'", r"the result is '1.0' of type str; it must be a number"),
    "a list": ("def score(a, b): return [1.0]", r"the result is \[1.0\] of type list; it must be a number"),
    "nothing": ("def score(a, b): pass", r"the result is None of type NoneType"),
    "dict without reward": ("def score(a, b): return {'points': 1}", r"has no `reward` and no `score`: \{'points': 1"),
    "unknown column": ("def score(answer, truth, level): return 1",
                       r"'level' is no column of the row; it has \['answer', 'x'\]"),
}


@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD)
def test_a_failure_is_a_reward_error_and_the_next_call_works(source: str, message: str, tmp_path: Path) -> None:
    given = scorer(tmp_path, source)
    try:
        for _ in range(2):
            with pytest.raises(RewardError, match=message):
                given(prompt(x=1), "12")
    finally:
        given.close()


def test_a_call_that_hangs_is_ended_with_its_process_and_the_next_one_works(tmp_path: Path) -> None:
    given = scorer(tmp_path, "import time, os\ndef score(a, b):\n"
                   " open('pids', 'a').write(f'{os.getpid()} ')\n"
                   " while a == 'hang': time.sleep(0.01)\n return 1", deadline_s=0.5)
    try:
        assert given(prompt(), "fine").reward == 1.0, "the interpreter's start is not counted"
        start = time.monotonic()
        with pytest.raises(RewardTimeout, match=r"reward ./reward.py:score: no answer within 0.5 s"):
            given(prompt(), "hang")
        assert time.monotonic() - start < 1.0
        assert given(prompt(), "fine").reward == 1.0
    finally:
        given.close()
    first, hung, second = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    assert first == hung != second
    for pid in (hung, second):
        assert not os.path.exists(f"/proc/{pid}"), "no process is left"


def test_close_ends_a_call_in_the_middle(tmp_path: Path) -> None:
    given = scorer(tmp_path, "import time\ndef score(a, b): time.sleep(60)", deadline_s=60)
    given.start()
    seen: list[RewardError] = []
    thread = threading.Thread(target=failing_call, args=(given, seen))
    thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    given.close()
    thread.join(2)
    assert not thread.is_alive() and time.monotonic() - start < 1.0
    assert len(seen) == 1
    with pytest.raises(RewardError, match="closed"):
        given(prompt(), "1")


def test_a_rewards_subprocess_gets_an_empty_input_and_no_requests(tmp_path: Path) -> None:
    given = scorer(tmp_path, "import subprocess, sys\ndef score(answer, truth):\n"
                   " done = subprocess.run(['cat'], stdout=subprocess.PIPE, timeout=5)\n"
                   " return {'reward': 1, 'read': len(done.stdout), 'own': len(sys.stdin.read())}")
    try:
        for _ in range(2):
            assert given(prompt(), "12") == Score(reward=1.0, parts={"read": 0.0, "own": 0.0})
    finally:
        given.close()


ENVIRONMENTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "nothing set": ({"HEADWAY_HUB_OFFLINE": ""}, {}),
    "offline": ({"HEADWAY_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "1"}),
    "other values": ({"HEADWAY_HUB_OFFLINE": "", "PYTHONWARNINGS": "error"}, {"PYTHONWARNINGS": "error"}),
}


@pytest.mark.parametrize(("changes", "expected"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_a_reward_has_the_persons_settings_and_not_those_of_a_command(
        changes: dict[str, str], expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (QUIET | changes).items():
        monkeypatch.setenv(name, value)
    given = scorer(tmp_path, "import os\ndef score(answer, truth):\n"
                   " mine = ('HF_', 'HEADWAY_HUB', 'PYTHONWARNINGS', 'TRANSFORMERS_')\n"
                   " seen = sorted((k, v) for k, v in os.environ.items() if k.startswith(mine))\n"
                   " return {'reward': 1, 'pred': seen}")
    try:
        assert given(prompt(), "12").extracted == str(sorted(expected.items()))
    finally:
        given.close()


def test_a_reward_outside_of_a_command_has_the_environment_as_it_is(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    given = scorer(tmp_path, "import os\ndef score(answer, truth):\n"
                   " return {'reward': 1, 'pred': os.environ['PYTHONWARNINGS']}")
    try:
        assert given(prompt(), "12").extracted == "ignore"
    finally:
        given.close()


def test_calls_are_quick(tmp_path: Path) -> None:
    given = scorer(tmp_path, "def score(answer, truth): return 1")
    try:
        given.start()
        start = time.monotonic()
        for _ in range(200):
            given(prompt(), "12")
        assert (time.monotonic() - start) / 200 < 0.005
    finally:
        given.close()


REFUSED = {
    "no such file": ("./nothing.py:score", r"reward: no such file .*nothing.py"),
    "outside": ("../reward.py:score", r"reward: .*reward.py lies outside the working directory"),
    "absolute outside": ("/etc/reward.py:score", r"lies outside the working directory"),
    "not allowed": ("json:loads", r"reward: package 'json' may not be imported: .* HEADWAY_ALLOWED_IMPORTS \(empty\)"),
    "no name": ("./reward.py:", r"reward: './reward.py:' is no function path"),
    "no module": ("a-b:score", r"reward: 'a-b' is neither a `.py` file nor a module"),
    "no such function": ("./reward.py:other", r"cannot be loaded: ValueError: ./reward.py has no function 'other'"),
    "no function": ("./reward.py:number", r"cannot be loaded: ValueError: ./reward.py has no function 'number'"),
    "async": ("./reward.py:later", r"is async; a reward is an ordinary function"),
    "no argument": ("./reward.py:bare", r"the function takes no argument for the answer"),
    "raises at import": ("./broken.py:score", r"cannot be loaded: ZeroDivisionError: division by zero"),
    "syntax error": ("./syntax.py:score", r"cannot be loaded: SyntaxError"),
}


@pytest.mark.parametrize(("reward", "message"), REFUSED.values(), ids=REFUSED)
def test_a_function_that_cannot_work_is_refused_before_the_start(reward: str, message: str, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_ALLOWED_IMPORTS", raising=False)
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "reward.py").write_text("")
    (work / "reward.py").write_text("number = 1\nasync def later(a, b): pass\ndef bare(): pass\n")
    (work / "broken.py").write_text("1 / 0")
    (work / "syntax.py").write_text("def")
    with pytest.raises(ConfigError, match=message):
        check_reward(Config(reward=reward), cwd=work)


class OneRow:
    """Rows of a data set with one row."""

    def __init__(self, **columns: Any) -> None:
        self._prompt = prompt("42", **columns)

    def first(self) -> tuple[Prompt, str]:
        return self._prompt, "rows.jsonl:1"

    def without(self, column: str) -> str | None:
        return None if column in self._prompt.columns else "rows.jsonl:1"


TRIED: dict[str, tuple[str, str]] = {
    "wrong length": ("def score(prompts, completions, **columns): return [1.0] * 2",
                     r"the result has 2 rewards for 1 completion"),
    "no list": ("def score(completions, **columns): return 1.0", r"in TRL's signature it must be a list"),
    "NaN": ("def score(solution_str): return {'score': float('nan')}", r"`score` is nan; it must be finite"),
    "a text": ("def score(answer): return 'right'", r"the result is 'right' of type str"),
    "raises": ("def score(answer): return 1 / 0", r"raised ZeroDivisionError: division by zero"),
    "hangs": ("def score(answer):\n while True: pass", r"no answer within 0.3 s"),
}


@pytest.mark.parametrize(("source", "message"), TRIED.values(), ids=TRIED)
def test_a_reward_that_fails_on_the_first_row_is_refused_before_the_start(source: str, message: str,
                                                                          tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(source)
    config = Config.model_validate({"reward": "./reward.py:score", "deadlines": {"reward_s": 0.3}})
    with pytest.raises(ConfigError, match=rf"(?s){message}.*trial on rows.jsonl:1, with the row's own answer '42'; m"):
        check_reward(config, cwd=tmp_path, rows=OneRow())


POOL = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
def score(answer): return pool.submit(len, answer).result()
"""
LEAK = """
import threading
def score(answer):
 threading.Thread(target=threading.Event().wait, daemon=True, name='keeps-alive').start()
 return len(answer)
"""
WARNED: dict[str, tuple[str, list[str]]] = {
    "prints": ("def score(answer):\n print('looking at', answer)\n return 1",
               ["prints to standard output when it is called, as in 'looking at 42'; in a run that goes to"]),
    "prints at import": ("print('hello')\ndef score(answer): return 1",
                         ["prints to standard output while it is loaded, as in 'hello'"]),
    "leaks threads": (LEAK, ["leaves 2 threads alive after 2 calls, as in 'keeps-alive'; in a run they pile up"]),
    "prints and leaks": (LEAK.replace("return", "print(answer)\n return"),
                         ["prints to standard output in 2 of 2 calls", "leaves 2 threads alive after 2 calls"]),
    "a pool for all calls": (POOL, []),
    "a thread that has ended": ("import threading\ndef score(answer):\n"
                                " thread = threading.Thread(target=len, args=(answer,))\n thread.start()\n"
                                " thread.join()\n return 1", []),
    "nothing": ("import sys\ndef score(answer):\n print('seen', file=sys.stderr)\n return 1", []),
}


@pytest.mark.parametrize(("source", "warnings"), WARNED.values(), ids=WARNED)
def test_what_a_reward_leaves_behind_is_a_warning_before_the_start(source: str, warnings: list[str],
                                                                   tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(source)
    found = check_reward(Config(reward="./reward.py:score"), cwd=tmp_path, rows=OneRow())
    assert len(found) == len(warnings), found
    for line, begin in zip(found, warnings, strict=True):
        assert line.startswith(f"reward: ./reward.py:score {begin}"), line


def test_a_column_that_rows_lack_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(completions, level, **columns): return [level[0]]")
    config = Config(reward="./reward.py:score")
    with pytest.raises(ConfigError, match=r"asks for the column 'level', and rows.jsonl:1 has none; give the"):
        check_reward(config, cwd=tmp_path, rows=OneRow())
    check_reward(config, cwd=tmp_path, rows=OneRow(level=3))


def test_a_ground_truth_without_a_number_is_refused_before_the_start() -> None:
    rows = OneRow()
    check_reward(Config(reward="gsm8k"), rows=rows)
    rows._prompt = prompt("many")
    with pytest.raises(ConfigError, match=r"(?s)'many' holds no number.*trial on rows.jsonl:1.*give the row another"):
        check_reward(Config(reward="gsm8k"), rows=rows)


def test_modules_come_from_the_working_directory_or_allowed_packages(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine" / "deep"
    package.mkdir(parents=True)
    (package / "rewards.py").write_text("def score(answer, truth): return answer == truth")
    given = FunctionScorer("mine.deep.rewards:score", cwd=tmp_path, deadline_s=5)
    try:
        assert given(prompt("1"), "1") == Score(reward=1.0, correct=1.0)
    finally:
        given.close()
    check_target("json:loads", tmp_path, ("json",))
    check_target("rl_core.rollout.rewards.exact:exact", tmp_path, ())
    monkeypatch.setenv("HEADWAY_ALLOWED_IMPORTS", "numpy, operator")
    check_reward(Config(reward="operator:eq"), cwd=tmp_path)


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Also in the middle of a call: the child watches its input, whoever held the other end."""
    given = scorer(tmp_path, "import os, time\ndef score(a, b):\n open('pid', 'w').write(str(os.getpid()))\n"
                   " while True: time.sleep(0.01)", deadline_s=30)
    given.start()
    child = given._child  # the process itself is the subject here
    assert child is not None and child.stdin is not None
    caller = threading.Thread(target=failing_call, args=(given, []))
    caller.start()
    deadline = time.monotonic() + 5
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.stdin.close()
    assert child.wait(5) == 0
    caller.join(5)
    given.close()
