"""The pages of a run as artifacts of its MLflow run, on sqlite: each once, whatever is started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.looking import show_answers
from rl_core.config import Config
from rl_core.run_dir import RunDir, replace_file, to_json
from tasks.destination import destination
from tasks.screens import Screens
from tasks.tracking import Tracker
from tests.looking import small_run

DEADLINE_S = 60.0
CONFIG = Config.model_validate({"isolated": True, "data": {"validation": None}})
VIEWER = ["step-000000001.html", "step-000000002.html", "validation-000000000.html", "validation-000000002.html",
          "validation-000000003.html"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the module: making it costs seconds."""
    return tmp_path_factory.mktemp("home")


def start(run: RunDir, home: Path, told: list[str]) -> tuple[Tracker, Screens]:
    tracker = Tracker(run, CONFIG, destination(CONFIG, home, {}), run_uuid=run.root.parent.name, run_key="small")
    tracker.start()
    screens = Screens(run, tracker, told=told.append)
    screens.start()
    return tracker, screens


def pages(home: Path, tracker: Tracker, folder: str) -> dict[str, int]:
    """Name of each page, and when it was written."""
    place = home / "mlflow" / "artifacts" / str(tracker.run_id) / "artifacts" / folder
    return {path.name: path.stat().st_mtime_ns for path in sorted(place.iterdir())}


def test_a_run_has_each_page_once_and_its_last_timeline_also_after_a_restart(tmp_path: Path, home: Path) -> None:
    run, told = small_run(tmp_path / "run"), list[str]()
    tracker, screens = start(run, home, told)
    screens.wake()
    assert screens.finish(DEADLINE_S) and tracker.finish("KILLED", DEADLINE_S)
    assert told == [tracker.link] and not run.screens.exists()
    first, timeline = pages(home, tracker, "viewer"), pages(home, tracker, "timeline")
    assert list(first) == VIEWER and list(timeline) == ["timeline.html", "trace.json"]
    root = home / "mlflow" / "artifacts" / str(tracker.run_id) / "artifacts"
    for page in (root / "viewer" / VIEWER[1], root / "viewer" / VIEWER[4], root / "timeline" / "timeline.html"):
        assert page.read_text().startswith("<!doctype html>"), page
    assert json.loads((root / "timeline" / "trace.json").read_text())["traceEvents"]

    again, screens = start(run, home, told)
    assert screens.finish(DEADLINE_S) and again.finish("FINISHED", DEADLINE_S)
    assert again.run_id == tracker.run_id
    second = pages(home, again, "viewer")
    assert list(second) == VIEWER
    assert [name for name in VIEWER if second[name] != first[name]] == VIEWER[-1:], "the last may have been cut"
    assert all(then < now for then, now in zip(timeline.values(), pages(home, again, "timeline").values(), strict=True))


def test_the_page_of_any_step_becomes_an_artifact_when_asked_for(
        home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    run = small_run(home / "runs" / "small")
    tracker = Tracker(run, CONFIG, destination(CONFIG, home, {}), run_uuid="inspected", run_key="small")
    tracker.start()
    assert tracker.finish("FINISHED", DEADLINE_S)
    for step in (0, 0):  # once more is the same artifact
        assert show_answers("small", step=step, mlflow=True, as_json=True) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (report["mlflow_run_id"], report["artifact"]) == (tracker.run_id, "viewer/step-000000000.html")
    assert show_answers("small", validation=0, mlflow=True, as_json=False) == 0
    said = capsys.readouterr().out
    assert said.startswith("viewer/validation-000000000.html: ") and str(tracker.run_id) in said
    assert list(pages(home, tracker, "viewer")) == ["step-000000000.html", "validation-000000000.html"]


def test_a_page_for_an_mlflow_that_is_away_ends_in_an_error_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    away = "http://127.0.0.1:9"
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", away)
    run = small_run(tmp_path / "runs" / "small")
    replace_file(run.mlflow_run, to_json({"uri": away, "run_id": "4f", "experiment_id": "1"}))
    for asked in ({"step": 0}, {"validation": 0}):
        assert show_answers("small", mlflow=True, as_json=False, **asked) == 1
        out, err = capsys.readouterr()
        assert err.startswith(f"error: MLflow at {away} (MLFLOW_TRACKING_URI): ") and "Traceback" not in err + out


def test_a_page_that_cannot_be_made_is_a_line_of_the_log_and_the_others_are_there(tmp_path: Path, home: Path) -> None:
    run, told = small_run(tmp_path / "run"), list[str]()
    run.claim(1).write_text("{")
    tracker, screens = start(run, home, told)
    assert screens.finish(DEADLINE_S) and tracker.finish("FINISHED", DEADLINE_S)
    assert tracker.trouble is None
    assert set(VIEWER) - set(pages(home, tracker, "viewer")) == {"step-000000001.html"}
    lines = run.screens.read_text().splitlines()
    assert any("viewer/step-000000001.html: BrokenFile: " in line and "not JSON" in line for line in lines)
    assert not any("step-000000002" in line or "validation" in line for line in lines)


def test_without_mlflow_the_pages_wait_for_the_next_start(tmp_path: Path) -> None:
    run, told = small_run(tmp_path / "run"), list[str]()
    away = Tracker(run, CONFIG, destination(Config.model_validate({"tracking": {"uri": "http://127.0.0.1:9"}}),
                                            tmp_path, {}), run_uuid="u", run_key="k", report=lambda text: None)
    screens = Screens(run, away, told=told.append)
    away.start()
    screens.start()
    assert not screens.finish(1.0) and told == [] and not run.screens.exists()
    assert not away.finish("FAILED", 1.0)
