"""`headway reward test`: what it finds out about a reward before a run is built on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rl_core.errors import DeadlinePassed

ROWS = [{"prompt": f"{i} + 1", "answer": str(i + 1), "level": i, "completion": f"it is {i + 1}"} for i in range(30)]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_ALLOWED_IMPORTS", raising=False)
    return tmp_path


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["reward", "test", *arguments])


def report(source: str, *arguments: str, code: int = 0, target: str = "reward.py") -> dict[str, Any]:
    Path("reward.py").write_text(source)
    done = command(target, "--data", "rows.jsonl", "--json", *arguments)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout.splitlines()[-1])


GOOD = """
def score(answer, truth):
    right = truth in answer.split()
    return {"reward": right, "length": len(answer), "correct": right, "extracted": answer[-2:]}
"""


def test_a_good_reward_is_shown_row_by_row() -> None:
    Path("reward.py").write_text(GOOD)
    done = command("reward.py", "--data", "rows.jsonl", "--rows", "3")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "reward.py:score, called in the signature `answer`"
    assert lines[2].split() == ["row", "of", "answer", "reward", "correct", "extracted", "ms", "parts"]
    first = lines[3].split("  ")
    assert [cell.strip() for cell in first if cell.strip()][:6] == ["rows.jsonl:1", "ground truth", "1", "1", "1", "1"]
    assert lines[3].endswith("length=1") and len(lines[3:11]) == 8
    assert [line.split()[1] for line in lines[3:11]] == [
        "ground", "completion", "ground", "completion", "ground", "completion", "another", "empty"]
    assert lines[-1] == "works"


def test_twenty_rows_are_scored_with_their_completions() -> None:
    found = report(GOOD)
    assert (found["reward"], found["signature"], found["holds"]) == ("reward.py:score", "answer", True)
    assert [row["of"] for row in found["rows"]].count("ground truth") == 20
    assert [row["of"] for row in found["rows"]].count("completion") == 20
    row = found["rows"][3]
    assert (row["row"], row["of"], row["answer"], row["reward"]) == ("rows.jsonl:2", "completion", "it is 2", 1.0)
    assert row["parts"] == {"length": 7.0} and row["extracted"] == " 2" and row["correct"] == 1.0
    assert found["problems"] == found["notes"] == []


PROBLEMS: dict[str, tuple[str, str, str]] = {
    "not importable": ("import nowhere\ndef score(answer): return 1",
                       "cannot be loaded: ModuleNotFoundError: No module named 'nowhere' (reward.py:1)", ""),
    "wrong signature": ("def score(*, answer, truth, difficulty): return 1",
                        "42 of 42 answers (rows.jsonl:1, ground truth): reward reward.py:score: raised KeyError: "
                        "\"parameter 'difficulty' is no column of the row; it has ['answer', 'completion', 'level', "
                        "'prompt']\"", ""),
    "a column that no row has": ("def score(answer, truth, difficulty): return answer == truth",
                                 "asks for the column 'difficulty', and rows.jsonl:1 has none; give the parameter", ""),
    "always the same": ("def score(answer, truth): return 0.5", "gives every answer the reward 0.5", ""),
    "blind to the text": ("def score(answer, truth): return len(truth) > 5", "does it get the model's text", ""),
    "more places than roles": ("def score(first, second, third): return 1",
                               "which parameter is the model's text? first, second, third are no columns of the row; "
                               "call the model's text `completion` and the ground truth `truth`", ""),
    "beyond float32": ("def score(answer): return 1e39", "the result is 1e+39; it must be finite in float32", ""),
    "no parameter": ("def score(): return 1", "the function takes no argument for the answer", ""),
    "not the forced one": ("def score(a, b): return 1", "scoring.signature=verl calls compute_score(", "verl"),
    "wrong length": ("def reward(prompts, completions, **kwargs): return [1.0, 2.0]",
                     "the result has 2 rewards for 1 completion: [1.0, 2.0]", ""),
    "no list": ("def reward(completions, **kwargs): return 1.0",
                "the result is 1.0 of type float; in TRL's signature it must be a list", ""),
    "a chat reward for texts": ("def reward(completions, **kwargs): return [len(completions[0][0]['content'])]",
                                "write prompts as chats for messages", ""),
    "NaN": ("def score(answer): return float('nan')", "the result is nan; it must be finite", ""),
    "infinite": ("def score(answer): return float('inf')", "the result is inf; it must be finite", ""),
    "NaN at times": ("def score(answer): return 1.0 if answer else float('nan')",
                     "1 of 42 answers (rows.jsonl:1, empty): reward reward.py:score: the result is nan", ""),
    "a text": ("def score(answer): return '1'", "the result is '1' of type str; it must be a number", ""),
    "raises": ("def score(answer): raise OSError('no net')", "raised OSError: no net (reward.py:1)", ""),
    "ends": ("import os\ndef score(answer): os._exit(7)", "its process ended with exit code 7", ""),
}


@pytest.mark.parametrize(("source", "problem", "signature"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_would_fail_a_run_is_named(source: str, problem: str, signature: str) -> None:
    found = report(source, *(["--set", f"scoring.signature={signature}"] if signature else []),
                   *(["--rows", "2"] if "_exit" in source else []), code=1)
    assert not found["holds"] and any(problem in each for each in found["problems"]), found["problems"]


def test_a_reward_that_hangs_is_named_before_all_rows_have_hung() -> None:
    found = report("import time\ndef score(answer): time.sleep(60)", "--set", "deadlines.reward_s=0.2", code=1)
    assert len(found["rows"]) == 2
    assert "2 of 2 answers (rows.jsonl:1, ground truth): reward reward.py:score: no answer within 0.2 s" in \
        found["problems"][0]


NOTES: dict[str, tuple[str, str]] = {
    "prints": ("def score(answer, truth):\n print('looking at', answer)\n return answer == truth",
               "prints to standard output in 42 of 42 calls, as in 'looking at 1'"),
    "prints at import": ("print('hello')\ndef score(answer, truth): return answer == truth",
                         "prints to standard output while it is loaded, as in 'hello'"),
    "leaks threads": ("import threading, time\ndef score(answer, truth):\n"
                      " threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n return answer == truth",
                      "leaves 42 threads alive after 42 calls, as in 'Thread-"),
    "the ground truth is in another form": ("def score(answer, truth):\n"
                                            " return {'reward': len(answer), 'acc': answer == f'<{truth}>'}",
                                            "calls no row's own ground truth right"),
    "texts in its dict": ("def score(answer, truth): return {'score': answer == truth, 'feedback': 'fine', 'n': 1}",
                          "entries of its dict that are no numbers are left out: feedback"),
}


@pytest.mark.parametrize(("source", "note"), NOTES.values(), ids=NOTES)
def test_what_a_run_would_survive_is_noted(source: str, note: str) -> None:
    rows = [{key: value for key, value in row.items() if key != "completion"} for row in ROWS]
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 2))
    found = report(source, "--rows", "40")
    assert found["holds"] and any(note in each for each in found["notes"]), found["notes"]


CHOSEN: dict[str, tuple[str, str]] = {
    "compute_score goes before others": ("def helper(x): ...\ndef score(answer): return 1\n"
                                         "def compute_score(solution_str, ground_truth): return 2 * bool(solution_str)",
                                         "compute_score"),
    "the only public function": ("def _helper(x): ...\ndef judge(answer): return 2 * bool(answer)", "judge"),
}


@pytest.mark.parametrize(("source", "name"), CHOSEN.values(), ids=CHOSEN)
def test_a_file_alone_means_its_reward(source: str, name: str) -> None:
    found = report(source, "--rows", "1")
    assert found["reward"] == f"reward.py:{name}" and found["rows"][0]["reward"] == 2.0


REFUSED: dict[str, tuple[list[str], str]] = {
    "no such file": (["nothing.py"], "error: reward: nothing.py cannot be read (No such file or directory)"),
    "no Python": (["rows.py"], "error: reward: rows.py is not Python"),
    "which one": (["many.py"], "error: reward: many.py: which function? there are one, two; write many.py:NAME"),
    "no function at all": (["empty.py"], "error: reward: empty.py: which function? there is none"),
    "no name": (["gsm9k"], "error: reward: write one of exact, regex, gsm8k"),
    "not allowed": (["json:loads"], "error: reward: package 'json' may not be imported"),
    "no rows": (["exact", "--data", "nothing.jsonl"], "error: nothing.jsonl"),
    "no rows in the preset": (["exact", "--preset", "local-model-cpu"], "error: data.train: must be set (got '')"),
    "a pattern of the preset's reward": (["exact", "--preset", "longtail-cpu"],
                                         "add --set scoring.pattern=null"),
    "no pattern": (["regex"], "error: scoring.pattern: reward=regex needs a pattern"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_tried_is_refused(arguments: list[str], message: str) -> None:
    Path("rows.py").write_text("def")
    Path("many.py").write_text("def one(a): ...\ndef two(a): ...")
    Path("empty.py").write_text("")
    done = command(*arguments)
    assert done.exit_code == 2 and message in done.stderr, done.output


def test_rewards_by_name_are_tried_too() -> None:
    done = command("gsm8k", "--data", "rows.jsonl", "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0 and found["holds"] and found["signature"] is None
    assert [row["reward"] for row in found["rows"]] == [1.0] * 40 + [0.0, 0.0]
    assert command("exact").exit_code == 0, "the preset's task"


def test_a_column_that_a_later_row_lacks_is_named_as_a_start_does() -> None:
    rows = [*ROWS[:25], {"prompt": "1 + 1", "answer": "2", "completion": "it is 2"}]
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = report("def score(answer, truth, level): return answer == truth", "--rows", "3", code=1)
    assert found["problems"] == [
        "reward: reward.py:score asks for the column 'level', and rows.jsonl:26 has none; give the parameter a "
        "default, or the rows the column; if it is the model's text, call it `completion`"]
    assert len(found["rows"]) == 8, "the rows that have it are tried"


def test_rows_that_do_not_come_in_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(config: Any) -> Any:
        raise DeadlinePassed("data.train: the download took longer than 1 s")

    monkeypatch.setattr("tasks.reward_trial.training_data", slow)
    done = command("exact", "--data", "hf:owner/name")
    assert done.exit_code == 2 and "error: data.train: the download took longer than 1 s" in done.stderr
