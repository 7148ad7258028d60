"""Nights whose MLflow was away while they trained, and is back when they are retried: what it missed is made up for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config
from rl_core.errors import NightFailed
from rl_core.nightly.nights import Night, NightRun, put_night, run_keys
from rl_core.run_dir import RunDir, read_json, replace_file, to_json
from rl_core.run_identity import read_identity
from tasks import night_end
from tasks.destination import destination_of
from tasks.inspection import read_result
from tasks.night_end import compare_night, end_night, register_night, track_missed
from tasks.night_files import TAG_NIGHT, TAG_PARENT, has_ended, night_dir
from tasks.paths import run_dir
from tasks.tracking import Tracker, TrackingFailed, versions
from tests.looking import small_run

pytestmark = pytest.mark.services

KEY, BASE = "away-2026-11-30", "monday"
AWAY = "http://127.0.0.1:9"


def untracked(key: str) -> RunDir:
    """A run that has ended while MLflow was away."""
    run = small_run(run_dir(key).root, key)
    replace_file(run.result, to_json({"status": "completed", "tracked": False, "summary": {"mlflow_run_id": None}}))
    return run


def night_of_runs(runs: int, **asked: Any) -> Night:
    """A night on disk whose baseline is a run, which is found without MLflow."""
    small_run(run_dir(BASE).root, BASE)
    night = Night(key=KEY, name="away", flow_run_id="f", scheduled_us=1, preset="tiny-cpu", baseline=BASE,
                  runs=tuple(NightRun(run_key=key, overrides={}) for key in run_keys(KEY, runs)), **asked)
    assert put_night(night_dir(KEY), night)
    return night


def test_a_run_that_mlflow_has_nothing_of_is_tracked_and_registered_when_it_is_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of its model is not made without MLflow."""
    from mlflow import MlflowClient

    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", AWAY)
    monkeypatch.setattr("tasks.report.FLUSH_S", 3.0)
    night = night_of_runs(1)
    run = untracked(KEY)
    replace_file(night_dir(KEY).model / "headway.json", to_json({
        "run_key": KEY, "run_uuid": "u", "step": 3, "weights_digest": "w3", "revision": 0, "config_digest": "c",
        "dtype": "float32", "best": None, "headway": "0"}))  # exported by the try before this one
    outcome = compare_night.fn(night)
    assert (outcome.verdict, str(outcome.baseline)) == ("keep", "monday (named)")
    with pytest.raises(TrackingFailed, match=f"MLflow at {AWAY}"):
        track_missed(night)
    assert not run.mlflow_run.exists()

    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the database of the home, which is made only now
    monkeypatch.setattr("tasks.report.FLUSH_S", 60.0)
    for _ in range(2):  # a flow that is tried again, and once more
        track_missed(night)
        version = register_night.fn(night, compare_night.fn(night))
        assert version is not None and (version.version, version.run_key) == (1, KEY)
    where = destination_of(run)
    [made] = versions(where, "away")
    assert (made.version, made.directory, made.tags["headway.verdict"]) == (1, str(night_dir(KEY).model), "kept")
    client, run_id = MlflowClient(where.uri, where.uri), read_json(run.mlflow_run)["run_id"]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run_id, "reward/mean")] == [0, 1, 2]
    result = read_result(run)
    assert result["tracked"] is True and result["summary"]["mlflow_run_id"] == run_id
    assert {file.path for file in client.list_artifacts(run_id)} >= {"viewer", "timeline"}


@pytest.fixture
def by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a night without Prefect's engine, which would start a server."""
    for name in ("compare_night", "register_night", "report_night", "notify_night"):
        monkeypatch.setattr(night_end, name, getattr(night_end, name).fn)
    monkeypatch.setattr(night_end, "tell_night", lambda markdown, what: None)


def test_a_matrix_of_which_mlflow_missed_a_run_and_the_end_of_another_is_finished_when_it_is_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: None) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    night = night_of_runs(2, register_version="never")
    missed, begun = (untracked(run.run_key) for run in night.runs)
    last = begun.record(2).read_bytes()
    begun.record(2).unlink()
    where = destination_of(begun)
    tracker = Tracker(begun, Config(), where, run_uuid=read_identity(begun).run_uuid, run_key=night.runs[1].run_key)
    tracker.start()
    assert tracker.finish("FAILED", deadline_s=60)
    begun.record(2).write_bytes(last)  # trained when MLflow was away

    monkeypatch.setenv("MLFLOW_TRACKING_URI", AWAY)
    monkeypatch.setattr("tasks.report.FLUSH_S", 3.0)
    with pytest.raises(NightFailed, match=f"night {KEY}: tracking, MLflow: TrackingFailed: MLflow at {AWAY}"):
        end_night(night)
    assert not has_ended(night) and not missed.mlflow_run.exists()

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setattr("tasks.report.FLUSH_S", 60.0)
    told = end_night(night)
    assert isinstance(told, dict) and told["verdict"] == "keep" and has_ended(night)
    client, parent = MlflowClient(where.uri, where.uri), read_json(night_dir(KEY).parent)["run_id"]
    assert client.get_run(parent).info.status == "FINISHED"
    for run in (missed, begun):
        found = client.get_run(read_json(run.mlflow_run)["run_id"])
        assert found.info.status == "FINISHED" and read_result(run)["tracked"] is True
        assert (found.data.tags[TAG_NIGHT], found.data.tags[TAG_PARENT]) == (KEY, parent)
        assert [point.step for point in client.get_metric_history(found.info.run_id, "reward/mean")] == [0, 1, 2]


def test_a_night_that_is_not_registered_has_its_run_and_its_report_in_mlflow_when_it_is_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_itself: None) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    night = night_of_runs(1, register_version="never")
    run = untracked(KEY)
    end_night(night)
    where = destination_of(run)
    client, run_id = MlflowClient(where.uri, where.uri), read_json(run.mlflow_run)["run_id"]
    assert [file.path for file in client.list_artifacts(run_id, "night")] == ["night/report.html"]
    assert client.get_run(run_id).data.tags[TAG_NIGHT] == KEY
