"""Waits of the owner while they last: who waits on whom, and a report each minute, here each tenth of a second."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from flows.console import view_of
from rl_core.run_dir import RunDir
from tasks.progress import Progress
from tasks.waiting import StallReport, waiting, waits


def test_a_wait_is_known_while_it_lasts_with_who_on_whom_and_why() -> None:
    with waiting("learner/0 (pid 7)", "`train`", 60.0, lambda: "a reason"):
        assert waits() == [], "too young for people"
        [wait] = waits(0.0)
        assert (wait.who, wait.on, wait.what, wait.deadline_s) == ("the flow", "learner/0 (pid 7)", "`train`", 60.0)
        assert str(wait) == "the flow waits 0 s on learner/0 (pid 7) for `train`, at most 60 s: a reason"
        assert wait.as_json()["why"] == "a reason"
        inner = threading.Thread(target=lambda: look(seen), name="pump-swap")
        seen: list[str] = []
        inner.start()
        inner.join()
        assert seen == ["the flow", "pump-swap"], "the oldest first"
    assert waits(0.0) == []
    with pytest.raises(KeyError), waiting("a", "b", None):
        raise KeyError
    assert waits(0.0) == []


def look(seen: list[str]) -> None:
    with waiting("rollout/0", "`swap`", 60.0):
        seen += [wait.who for wait in waits(0.0)]


def test_a_report_comes_each_time_and_ends_with_the_wait() -> None:
    report = StallReport(0.1)
    reports: list[str] = []
    with waiting("the rollout side", "a full claim of step 3", 1800.0):
        until = time.monotonic() + 0.35
        while time.monotonic() < until:
            if (text := report.look()) is not None:
                reports.append(text)
            time.sleep(0.005)
    assert len(reports) == 3 and report.text == reports[-1]
    assert reports[0].startswith("the flow waits 0 s on the rollout side for a full claim of step 3, at most 1800 s")
    assert report.look() is None and report.text is None


def test_the_status_view_and_the_log_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.progress.INTERVAL_S", 0.05)
    run = RunDir(tmp_path)
    progress = Progress(run, {}, stalls=StallReport(0.1))
    began = json.loads(run.status.read_text())["since_us"]
    with waiting("validation/0", "validations of steps [4]", 900.0):
        time.sleep(1.2)
        status = json.loads(run.status.read_text())
    assert status["waits"][0]["on"] == "validation/0" and status["waits"][0]["waited_s"] >= 1.0
    assert "waits 1 s on validation/0" in status["stall"] and view_of(status).note == status["stall"]
    assert 5 <= len(run.stalls.read_text().splitlines()) <= 12
    progress.set(state="training")
    progress.close()
    status = json.loads(run.status.read_text())
    assert (status["waits"], status["stall"]) == ([], None) and status["since_us"] > began
