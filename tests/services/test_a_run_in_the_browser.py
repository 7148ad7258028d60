"""What the pages of MLflow and Prefect show of a run that has ended, in a real browser: charts, artifacts, the form."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rl_core.config import Config
from tasks.destination import destination
from tasks.screens import Screens
from tasks.tracking import Tracker, champion, promote, register_version
from tasks.tracking.sampled import SHOWN
from tests.browser import chromium, pictured
from tests.kept import SMALL, KeptHome
from tests.looking import small_run
from tests.pages import (
    Shown,
    mlflow_artifact,
    mlflow_charts,
    mlflow_metrics,
    mlflow_system_metrics,
    mlflow_traces,
    prefect_artifacts,
    prefect_form,
    run_to_show,
)

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.browser]

STEPS = 6
SHORT = {**SMALL, "total_steps": STEPS, "data.validation": "sort", "data.validation_size": 32, "validation.every": 3}
STALLS = """
import sys, time
from pathlib import Path
from prefect import flow
from rl_core.run_dir import RunDir
from tasks.progress import Progress
from tasks.waiting import StallReport, waiting

@flow(name="stalls", flow_run_name="stalls")
def stalls(root: str) -> None:
    progress = Progress(RunDir(Path(root)), {"run_key": "stalls"}, stalls=StallReport(every_s=0.5))
    with waiting("rollout-0", "a group that never lands", 30.0):
        time.sleep(4)
    progress.close()

stalls(sys.argv[1])
"""


@pytest.fixture(scope="module")
def shown(kept_home: KeptHome) -> Shown:
    return run_to_show(kept_home, "shown", **SHORT)


@pytest.fixture(scope="module")
def other(kept_home: KeptHome, shown: Shown) -> Shown:
    return run_to_show(kept_home, "other", **SHORT, seed=2)


def test_the_run_page_of_mlflow_charts_its_scalars_by_group(shown: Shown, tmp_path: Path) -> None:
    with chromium() as page, pictured(page, tmp_path / "metrics.png"):
        mlflow_metrics(page, shown)
        for group in ("reward", "rollout", "staleness", "train", "utilization", "validation", "weights"):
            page.get_by_text(group, exact=True).first.wait_for()
        mlflow_system_metrics(page, shown)


def test_two_runs_lie_over_each_other(shown: Shown, other: Shown, tmp_path: Path) -> None:
    with chromium() as page, pictured(page, tmp_path / "charts.png"):
        mlflow_charts(page, shown, other)


def test_the_pages_of_a_run_open_as_its_artifacts_and_their_scripts_run(shown: Shown, tmp_path: Path) -> None:
    errors: list[str] = []
    with chromium() as page, pictured(page, tmp_path / "artifacts.png"):
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if "Content Security" in line.text else None)
        for path in (f"viewer/validation-{STEPS:09d}.html", f"viewer/step-{STEPS - 1:09d}.html",
                     "timeline/timeline.html"):
            frame = mlflow_artifact(page, shown, path)
            assert frame.locator("h1").inner_text().startswith("shown: "), path
    assert errors == []
    assert not shown.home.run(shown.key).screens.exists(), "no page failed"


def test_answers_of_validations_are_traces_of_the_run(shown: Shown, tmp_path: Path) -> None:
    with chromium() as page, pictured(page, tmp_path / "traces.png"):
        mlflow_traces(page, shown)
        for text in ("correct", "reward", "sort "):
            page.get_by_text(text).first.wait_for()


def test_the_flow_run_page_of_prefect_shows_its_artifacts(shown: Shown, tmp_path: Path) -> None:
    found = shown.home.ask("POST", "/artifacts/filter", {
        "artifacts": {"flow_run_id": {"any_": [shown.flow_run]}}})
    assert sorted(one["key"] for one in found) == ["mlflow-run", "progress", "summary"], "each once"
    by_key = {one["key"]: one for one in found}
    assert {key: one["type"] for key, one in by_key.items()} == {
        "mlflow-run": "markdown", "progress": "progress", "summary": "table"}
    assert float(by_key["progress"]["data"]) == 100.0
    assert f"({shown.mlflow})" in by_key["mlflow-run"]["data"]
    rows = {row["what"]: row["value"] for row in json.loads(by_key["summary"]["data"])}
    assert (rows["run_key"], rows["status"], rows["mlflow_run_id"]) == ("shown", "completed", shown.mlflow_run)
    with chromium() as page, pictured(page, tmp_path / "prefect.png"):
        prefect_artifacts(page, shown)
        for text in ("progress", "summary", "mlflow-run"):
            page.get_by_text(text).first.wait_for()


@pytest.mark.parametrize(("deployment", "fields"), [
    ("train/adhoc", ("preset", "overrides", "run_key", "amend", "groups", "shards_from")),
    ("nightly/nightly", ("preset", "overrides", "baseline")),
])
def test_the_form_of_a_deployment_has_its_parameters_with_their_descriptions(
        kept_home: KeptHome, tmp_path: Path, deployment: str, fields: tuple[str, ...]) -> None:
    found = kept_home.ask("GET", f"/deployments/name/{deployment}")
    assert found is not None, f"no deployment {deployment}"
    with chromium() as page, pictured(page, tmp_path / "form.png"):
        prefect_form(page, kept_home, deployment)
        for field in fields:
            page.get_by_text(field).first.wait_for()
        described = found["parameter_openapi_schema"]["properties"]["preset"]["description"]
        page.get_by_text(described[:40]).first.wait_for()


def test_the_form_refuses_a_number_out_of_range(kept_home: KeptHome, tmp_path: Path) -> None:
    found = kept_home.ask("GET", "/deployments/name/nightly/nightly")
    with chromium() as page, pictured(page, tmp_path / "refused.png"):
        prefect_form(page, kept_home, "nightly/nightly")
        field = page.get_by_label("accuracy_gain").first
        field.fill("2")
        page.get_by_role("button", name="Submit").click()
        assert field.evaluate("field => field.validity.rangeOverflow"), "it is a share"
        assert page.url.endswith(f"{found['id']}/run"), "the form is still there"
    assert kept_home.ask("POST", "/flow_runs/filter", {"flow_runs": {
        "deployment_id": {"any_": [found["id"]]}}}) == []


def test_a_wait_that_lasts_is_an_artifact_of_the_flow_run(kept_home: KeptHome, tmp_path: Path) -> None:
    script = tmp_path / "stalls.py"
    script.write_text(STALLS)
    done = kept_home.shell(f"python {script} {tmp_path / 'run'}", cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    [run] = kept_home.ask("POST", "/flow_runs/filter", {"flow_runs": {"name": {"any_": ["stalls"]}}})
    reports = kept_home.ask("POST", "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert {report["key"] for report in reports} == {"stall"} and len(reports) >= 2
    assert all("waits" in report["data"] and "on rollout-0 for a group that never lands" in report["data"]
               for report in reports)


def test_all_of_it_goes_through_a_tracking_server_as_well(kept_home: KeptHome, tmp_path: Path) -> None:
    """By HTTP, as where the server is elsewhere: points, tables, traces, pages, and a model version; none twice."""
    from mlflow import MlflowClient

    run, config = small_run(tmp_path / "run"), Config.model_validate({
        "tracking": {"uri": kept_home.mlflow_page}, "data": {"validation": None}})
    where = destination(config, tmp_path, {})
    exported = {"run_key": "by-http", "run_uuid": "by-http", "step": 3, "weights_digest": "w", "revision": 0,
                "config_digest": "c", "dtype": "float32", "best": None, "headway": "0", "directory": str(tmp_path)}
    for _ in range(2):
        tracker = Tracker(run, config, where, run_uuid="by-http", run_key="by-http")
        tracker.start()
        screens = Screens(run, tracker)
        screens.start()
        assert screens.finish(60.0) and tracker.finish("FINISHED", 60.0), tracker.trouble
        version = register_version(run, where, exported, name="by-http")
        promote(where, version, why="test")
    best = champion(where, "by-http")
    assert best is not None and (best.version, best.model_id) == (1, version.model_id)
    client, run_id = MlflowClient(where.uri), str(tracker.run_id)
    assert len(client.get_run(run_id).outputs.model_outputs) == 1
    assert [point.step for point in client.get_metric_history(run_id, "reward/mean")] == [0, 1, 2]
    assert {file.path for file in client.list_artifacts(run_id)} >= {"viewer", "timeline", "validations"}
    traces = client.search_traces(locations=[json.loads(run.mlflow_run.read_text())["experiment_id"]],
                                  filter_string=f"metadata.`mlflow.sourceRun` = '{run_id}'")
    assert Counter(tuple(span.name for span in trace.data.spans) for trace in traces) == {
        ("validation 3: greedy", "turn 1"): 1, ("training 1", "turn 1"): SHOWN, ("training 2", "turn 1"): SHOWN}
