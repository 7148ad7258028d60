"""A night whose MLflow was away while it trained, and is back when it is retried: what MLflow missed is made up for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_core.nightly.nights import Night, NightRun, put_night
from rl_core.run_dir import read_json, replace_file, to_json
from tasks.destination import destination_of
from tasks.inspection import read_result
from tasks.night_end import compare_night, register_night
from tasks.night_files import night_dir
from tasks.paths import run_dir
from tasks.tracking import TrackingFailed, versions
from tests.looking import small_run

pytestmark = pytest.mark.services

KEY, BASE = "away-2026-11-30", "monday"
AWAY = "http://127.0.0.1:9"


def test_a_run_that_mlflow_has_nothing_of_is_tracked_and_registered_when_it_is_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its baseline is a run, which is found without MLflow; the version of its model is not made without."""
    from mlflow import MlflowClient

    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", AWAY)
    monkeypatch.setattr("tasks.report.FLUSH_S", 3.0)
    night = Night(key=KEY, name="away", flow_run_id="f", scheduled_us=1, preset="tiny-cpu", baseline=BASE,
                  runs=(NightRun(run_key=KEY, overrides={}),))
    assert put_night(night_dir(KEY), night)
    small_run(run_dir(BASE).root, BASE)
    run = small_run(run_dir(KEY).root, KEY)
    replace_file(run.result, to_json({"status": "completed", "tracked": False, "summary": {"mlflow_run_id": None}}))
    replace_file(night_dir(KEY).model / "headway.json", to_json({
        "run_key": KEY, "run_uuid": "u", "step": 3, "weights_digest": "w3", "revision": 0, "config_digest": "c",
        "dtype": "float32", "best": None, "headway": "0"}))  # exported by the try before this one
    outcome = compare_night.fn(night)
    assert (outcome.verdict, str(outcome.baseline)) == ("keep", "monday (named)")
    with pytest.raises(TrackingFailed, match=f"MLflow at {AWAY}"):
        register_night.fn(night, outcome)
    assert not night_dir(KEY).version.exists() and not run.mlflow_run.exists()

    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the database of the home, which is made only now
    monkeypatch.setattr("tasks.report.FLUSH_S", 60.0)
    for _ in range(2):  # a flow that is tried again, and once more
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
