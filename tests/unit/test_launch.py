"""What the command says at the end of a flow, and with which exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from flows.command import FAILED, INTERRUPTED, REFUSED, TERMINATED
from flows.console import Console
from flows.ending import Flow, Start
from flows.launch import _ended, _guarded, _same_command
from rl_core.config import Config
from rl_core.errors import RunIsAlive
from tasks.paths import new_run_key

SUMMARY = {"run_key": "k", "status": "completed", "steps": 3, "accuracy_start": None, "accuracy_end": None,
           "wall_s": 1.0, "groups_trained": 48, "groups_dropped": 0, "staleness_max": 1, "staleness_mean": 0.5,
           "update_lag_mean": 1.0, "samples_per_s": 5.0, "mlflow_run_id": None}
DONE = {"status": "completed", "summary": SUMMARY, "ended": {"step": 3, "reason": "steps", "left_over": 0},
        "tracked": True}
BROKE = {"status": "failed", "error": "BrokenFile", "message": "v.json", "wall_s": 7.0}
ENDS: dict[str, tuple[Flow, dict[str, Any], int, str]] = {
    "completed": (Flow("COMPLETED", SUMMARY), DONE, 0, "completed in"),
    "completed, MLflow behind": (Flow("COMPLETED", SUMMARY), DONE | {"tracked": False, "tracking_trouble": "MLflow at "
                                 "x: down"}, 0, "MLflow at x: down; the same command with --run-key k replays"),
    "trained, Prefect away": (Flow("", error=OSError("refused")), DONE, 0, "Prefect could not be told"),
    "completed, nothing could be written": (Flow("COMPLETED", SUMMARY), {}, 0, "completed in"),
    "failed": (Flow("FAILED", error=ValueError("x")), BROKE, FAILED, "failed: BrokenFile: v.json"),
    "failed before it wrote anything": (Flow("", error=RuntimeError("Failed to reach API\nmore")), {}, FAILED,
                                        "failed: RuntimeError: Failed to reach API\n"),
    "SIGINT": (Flow("CANCELLED"), {"status": "cancelled", "signal": "SIGINT"}, INTERRUPTED, "stopped by SIGINT"),
    "SIGTERM": (Flow("CANCELLED"), {"status": "cancelled", "signal": "SIGTERM"}, TERMINATED, "stopped by SIGTERM"),
}


@pytest.mark.parametrize(("flow", "result", "code", "said"), ENDS.values(), ids=ENDS)
def test_the_exit_code_and_the_last_line_agree_with_the_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: Flow, result: dict[str, Any], code: int,
        said: str) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    out = io.StringIO()
    start = Start(Console(out), "tiny-cpu", True, False, run_key="k")
    assert _ended(start, flow, result, Config()) == code
    assert said in out.getvalue()
    last = json.loads(out.getvalue().splitlines()[-1])
    assert list(last) == list(SUMMARY)
    assert last["status"] == {0: "completed", FAILED: "failed"}.get(code, "cancelled")
    assert last["wall_s"] >= 0 and (result is not BROKE or last["wall_s"] == 7.0)


def test_a_run_that_is_alive_is_refused_whatever_an_earlier_start_wrote(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    start = Start(Console(io.StringIO()), "tiny-cpu", True, False, run_key="k")
    assert _ended(start, Flow("FAILED", error=RunIsAlive("pid 7 owns it")), BROKE, Config()) == REFUSED
    assert capsys.readouterr().err == "error: RunIsAlive: pid 7 owns it\n"


def test_a_night_that_is_stopped_behind_its_run_is_no_completed_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    out = io.StringIO()
    start = Start(Console(out), None, True, False, verb="rerun", run_key="k")
    assert _ended(start, Flow("CANCELLED"), DONE, Config()) == INTERRUPTED
    assert "stopped by SIGINT before the night was told" in out.getvalue() and "headway rerun k\n" in out.getvalue()


def test_what_fails_before_there_is_a_run_is_an_error_on_stderr_and_later_the_end_of_the_story(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))

    def full() -> int:
        raise OSError(28, "No space left on device", "/x")

    out = io.StringIO()
    assert _guarded(Start(Console(out), "tiny-cpu", True, False), full) == FAILED
    assert (out.getvalue(), capsys.readouterr().err) == ("", "error: [Errno 28] No space left on device: '/x'\n")
    assert _guarded(Start(Console(out), "tiny-cpu", True, False, run_key="k"), full) == FAILED
    _, story, last = out.getvalue().splitlines()
    assert (story, capsys.readouterr().err) == ("failed: [Errno 28] No space left on device: '/x'", "")
    assert json.loads(last)["status"] == "failed"


def test_the_command_is_given_again_without_its_key_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["headway", "train", "--json", "--set", "reward=./a b.py:f", "--run-key", "k",
                                     "--preset=x", "--run-key=k"])
    assert _same_command() == ["--set", "reward=./a b.py:f", "--preset=x"]


def test_a_rerun_and_a_rollout_are_given_again_by_their_own_verbs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["headway", "rollout", "--groups", "8", "--json"])
    for verb, again in (("rerun", "headway rerun k\n"), ("rollout", "headway rollout --run-key k --groups 8\n")):
        out = io.StringIO()
        start = Start(Console(out), None, False, False, verb=verb, run_key="k")
        assert _ended(start, Flow("FAILED", error=ValueError("x")), BROKE, Config()) == FAILED
        assert again in out.getvalue()


def test_a_rollout_says_what_waits_and_who_trains_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    out = io.StringIO()
    start = Start(Console(out), None, False, False, verb="rollout", run_key="k")
    assert _ended(start, Flow("COMPLETED", SUMMARY), DONE | {"ended": None, "gathered": 7}, Config()) == 0
    assert "7 groups wait to be trained: headway train --run-key k\n" in out.getvalue()
    assert "validation.only" not in out.getvalue()


def test_the_key_of_a_flow_without_one_is_that_of_its_flow_run() -> None:
    flow_run = "019ad2f4-7c11-7d3e-9a52-0f1e2d3c4b5a"
    assert new_run_key("deployments/my preset.yaml", flow_run) == "my-preset-0f1e2d3c4b5a"
    assert new_run_key("tiny-cpu", flow_run) == new_run_key("tiny-cpu", flow_run) != new_run_key("tiny-cpu")
