"""What `headway status` and `headway inspect` show of a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.looking import show_answers, show_status
from rl_core.experience.ledger import read_claim
from rl_core.looking.watching import Watch
from rl_core.records import put_record
from rl_core.run_dir import RunDir, newest_attempt, replace_file, to_json
from tasks.paths import run_dir
from tests.looking import record, small_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    return small_run(run_dir("small").root)


def asked(capsys: pytest.CaptureFixture[str], *, code: int = 0, **options: Any) -> dict[str, Any]:
    """What `headway inspect small --json` answers."""
    assert show_answers("small", **options, as_json=True) == code
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    assert show_answers("small", **options, as_json=False) == 0
    return capsys.readouterr().out


def test_a_step_is_shown_with_its_groups_in_training_order(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    step = asked(capsys, step=2)
    assert (step["step"], step["idx"], step["recorded"], step["reward_mean"]) == (2, 2, True, 0.1875)
    assert [(group["group_id"], group["age"], group["data_source"]) for group in step["groups"]] == [
        ("e0-p4-t0", 1, "sort"), ("e0-p5-t0", 2, "chat")]
    assert step["groups"][0]["prompt"] == "user\nsort 31\nassistant\n"
    assert step["groups"][0]["answers"][3] == {
        "text": "311", "reward": -0.5, "parts": {"digits": 1.5}, "correct": 0.0, "extracted": "311",
        "finish": "length", "versions": [1, 2], "age": 1, "tokens": 3}
    assert step["by_source"]["sort"]["reward_mean"] == 0.5 and step["gaps"] == []
    assert step["metrics"]["reward/mean"] == 0.5 and step["metrics"]["rollout/length_right"] is None


def test_without_options_the_newest_claimed_step_is_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert (asked(capsys)["step"], asked(capsys)["recorded"]) == (3, False)
    out = said(capsys)
    assert out.startswith("step 3 of small: 2 groups, publication 3, reward 0.188\n\ne0-p6-t0  'user\\nsort 31")
    assert "  -0.500 digits 1.5  v2-3  length  '311' = '311'\n" in out


def test_a_group_is_shown_whatever_became_of_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    twice = asked(capsys, group="e0-p0-t0")["groups"]
    assert [(row["state"], row["step"], len(row["answers"])) for row in twice] == [("trained", 0, 4),
                                                                                 ("duplicate", None, 4)]
    [dropped] = asked(capsys, group="e0-p9-t0")["groups"]
    assert (dropped["state"], dropped["reason"], dropped["answers"][0]["text"]) == ("dropped", "stale", "13")
    [failed] = asked(capsys, group="e0-p10-t0")["groups"]
    assert (failed["state"], failed["reason"], failed["answers"]) == ("failed", "reward_error", [])
    assert said(capsys, group="e0-p9-t0").startswith(
        "e0-p9-t0: dropped (stale), position 9 of dataset epoch 0\n'user\\nsort 31")


def test_the_best_and_worst_answers_of_a_run_or_a_step(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    worst = asked(capsys, worst=3)["answers"]
    assert [(answer["group_id"], answer["reward"], answer["text"]) for answer in worst] == [
        (f"e0-p{i}-t0", -0.5, "311") for i in (0, 1, 2)]
    best = asked(capsys, best=50)["answers"]
    assert len(best) == 40, "a group that landed twice is asked once"
    assert [answer["reward"] for answer in best] == [1.0] * 10 + [0.25] * 10 + [0.0] * 10 + [-0.5] * 10
    of_step = asked(capsys, best=1, step=2)["answers"]
    assert [(answer["group_id"], answer["step"], answer["text"]) for answer in of_step] == [("e0-p4-t0", 2, "13")]
    assert said(capsys, best=1, step=2).startswith("best answers of step 2 in small, by reward\n\ne0-p4-t0  'user")


REFUSED = {
    "two orders": ({"best": 1, "worst": 2}, "--best and --worst ask for different things"),
    "a group of a step": ({"group": "e0-p0-t0", "step": 1}, "and --step ask for different things"),
    "a validation of a step": ({"validation": 3, "step": 1}, "--validation and --step ask for different things"),
    "an artifact of a group": ({"group": "e0-p0-t0", "mlflow": True}, "--mlflow writes the page of a step or a valid"),
    "an artifact of a run that is not tracked": ({"step": 2, "mlflow": True}, "so the run is not in MLflow"),
    "a page of a group": ({"group": "e0-p0-t0", "html": "g.html"}, "--html writes the page of a step or a validation"),
    "log-probs without a page": ({"step": 2, "logprobs": True}, "--logprobs computes what the learner says"),
    "log-probs of a step that cannot be trained again": (
        {"step": 3, "logprobs": True, "html": "p.html"}, "step 3: no record: nothing to compare with"),
    "no such validation": ({"validation": 1}, "--validation 1: small was not validated after 1 training steps; it was "
                                              "after 0, 2, 3"),
    "a page of no such step": ({"step": 9, "html": "g.html"}, "--step 9: step 9 of small has no claim"),
    "no such step": ({"step": 9}, "--step 9: step 9 of small has no claim; steps 0 to 3 have one"),
    "no such group": ({"group": "e0-p77-t0"}, "--group e0-p77-t0: small has no such group; group ids look like"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shown_is_refused(run: RunDir, capsys: pytest.CaptureFixture[str], options: dict[str, Any],
                                         message: str) -> None:
    assert show_answers("small", **options, as_json=False) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err


def test_a_validation_is_shown_by_prompt(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    report = asked(capsys, validation=3)
    assert (report["v"], report["greedy_accuracy"], len(report["answers"]), report["gaps"]) == (3, 0.5, 1, [])
    assert said(capsys, validation=3).splitlines() == [
        "validation of small after 3 steps: version 3, greedy accuracy 0.500 of 8 prompts", "",
        "'sort 31'  truth '13'", "  +1.000  greedy   stop    '13'"]
    assert asked(capsys, validation=2)["gaps"] == [f"{run.validation_table(2)}: absent"]


@pytest.mark.parametrize("options", [{"step": 2}, {}, {"validation": 3}], ids=["step", "newest step", "validation"])
def test_answers_are_written_as_a_page_and_nothing_is_overwritten(
        run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, int]) -> None:
    out = tmp_path / "pages" / "answers.html"
    report = asked(capsys, html=str(out), **options)
    assert report == {"run_key": "small", **(options or {"step": 3}), "html": str(out),
                      "bytes": out.stat().st_size}
    page = out.read_text()
    assert page.startswith("<!doctype html>") and "answers of" in page
    asked_again = show_answers("small", html=str(out), as_json=False, **options)
    assert asked_again == 2 and "nothing is overwritten" in capsys.readouterr().err
    assert out.read_text() == page


def test_what_is_gone_is_named_and_the_rest_is_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    group = read_claim(run, 2).groups[0]
    run.shard(group.stream, group.seq).unlink()
    step = asked(capsys, step=2)
    assert (step["groups"], step["reward_mean"]) == ([], None)
    assert step["gaps"] == [f"{run.shard(group.stream, group.seq)}: absent"]
    assert len(asked(capsys, worst=99)["answers"]) == 32
    assert "gap " in said(capsys, step=2)


def test_the_status_shows_the_newest_alarm_also_behind_steps_without_one(
        run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"train/mismatch_alarm": 1.0, "train/mismatch_current_abs": 0.012, "train/mismatch_bound": 0.005}
    run.record(1).unlink()
    put_record(run, record(1, **metrics))
    assert show_status("small", as_json=False) == 0
    assert "\nalarm       step 1: mismatch 0.012 over 0.005\n" in capsys.readouterr().out
    assert Watch(run).look().alarm == "step 1: mismatch 0.012 over 0.005"


def test_the_status_shows_the_numbers_that_people_look_at_first(
        run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_status("small", as_json=True) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["steps"], status["accuracy"], status["accuracy_best"]) == ("stopped", 3, 0.5, 0.75)
    assert (status["metrics"]["reward/mean"], status["recent"]["reward/mean"]) == (0.5, 0.25)
    assert status["metrics"]["rollout/length_right"] is None
    assert show_status("small", as_json=False) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["accuracy"] == "0.250 -> 0.500, best greedy accuracy 0.750 after 2 steps"
    assert lines["reward"] == "0.500, std 0.000, right 25.0%, no spread 0%, all right 0%, some wrong 0%, lately 0.250"
    assert lines["staleness"].startswith("mean 1.00, p95 0, max 2, lag 2.00 updates")
    assert lines["tokens/s"] == "0 trained, 400.0 answers/s, MFU 12.5%"
    assert lines["sort"] == "0.500, right 25.0%, length 2.0, 4 answers"
    assert status["alarm"] is None and "alarm" not in lines
    run.record(2).write_text("{")
    assert show_status("small", as_json=False) == 0
    assert f"gap         {run.record(2)}: not JSON" in capsys.readouterr().out


def test_the_status_of_a_failed_run_says_the_cause_and_below_it_what_the_dead_part_wrote_last(
        run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    replace_file(run.result, to_json({"status": "failed", "attempt": newest_attempt(run), "error": "LearnerDead",
                                      "message": "gone\nthe end of learner-0.log:\nout of memory"}))
    assert show_status("small", as_json=False) == 0
    said = capsys.readouterr().out.splitlines()
    at = said.index("cause       LearnerDead: gone")
    assert [line.strip() for line in said[at + 1:at + 3]] == ["the end of learner-0.log:", "out of memory"]
