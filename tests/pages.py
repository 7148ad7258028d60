"""Pages of kept servers, opened in a browser and waited for until they show what they are for.

Shared by the tests of the pages and by `make screenshots` (tests/screenshots.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.browser import open_prefect
from tests.kept import KeptHome, wait_until

ASSISTANT_CLOSED = """if (window === top && location.protocol !== "about:") {
  localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
  localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
}"""


@dataclass(frozen=True, slots=True)
class Shown:
    """A run, as its pages name it."""

    home: KeptHome
    key: str
    flow_run: str

    def wait(self) -> None:
        """Until it is completed."""
        self.home.wait_for_state(self.flow_run, "COMPLETED", deadline_s=600)

    @property
    def mlflow_run(self) -> str:
        return str(json.loads(self.home.run(self.key).mlflow_run.read_text())["run_id"])

    @property
    def experiment(self) -> str:
        return str(json.loads(self.home.run(self.key).mlflow_run.read_text())["experiment_id"])

    @property
    def mlflow(self) -> str:
        """Address of its MLflow page."""
        return f"{self.home.mlflow_page}/#/experiments/{self.experiment}/runs/{self.mlflow_run}"


def run_to_show(home: KeptHome, key: str, **overrides: Any) -> Shown:
    """A run of the deployment train/adhoc, at its end."""
    shown = Shown(home, key, home.submit("train/adhoc", preset="tiny-cpu", run_key=key, overrides=overrides))
    shown.wait()
    return shown


def night_to_show(home: KeptHome, **parameters: Any) -> Shown:
    """The run of a night that has begun."""
    flow_run = home.submit("nightly/nightly", **parameters)
    wait_until(lambda: keys_of(home, flow_run) != [], 180, "the night has begun")
    return Shown(home, keys_of(home, flow_run)[0], flow_run)


def keys_of(home: KeptHome, flow_run: str) -> list[str]:
    """The night of a flow run, where it has begun."""
    return [place.parent.name for place in (home.path / "nights").glob("*/night.json")
            if json.loads(place.read_text())["flow_run_id"] == flow_run]


def mlflow_metrics(page: Any, shown: Shown) -> None:
    """The run's charts, a section for each group of names; those of `system/` have a tab of their own."""
    _open_mlflow(page, f"{shown.mlflow}/model-metrics")
    page.get_by_text("(reward/mean)").first.wait_for()


def mlflow_system_metrics(page: Any, shown: Shown) -> None:
    _open_mlflow(page, f"{shown.mlflow}/system-metrics")
    page.get_by_text("(system/step_s)").first.wait_for()


def mlflow_charts(page: Any, *shown: Shown) -> None:
    """The curves of all runs of the experiment, laid over each other."""
    first = shown[0]
    _open_mlflow(page, f"{first.home.mlflow_page}/#/experiments/{first.experiment}/runs?compareRunsMode=CHART")
    for one in shown:
        page.get_by_text(f"{one.key} (reward/mean)").first.wait_for()
    page.locator(".js-plotly-plot path.js-line").nth(len(shown) - 1).wait_for(state="attached")


def mlflow_artifact(page: Any, shown: Shown, path: str) -> Any:
    """One artifact that is a page, on the page of its run; returns the frame that it runs in."""
    _open_mlflow(page, f"{shown.mlflow}/artifacts/{path}")
    frame = page.frame_locator("iframe").first
    frame.locator("h1").first.wait_for()
    return frame


def mlflow_traces(page: Any, shown: Shown) -> None:
    """The list of the run's traces: answers of its validations and of training, with what they got."""
    _open_mlflow(page, f"{shown.mlflow}/traces")
    page.get_by_text("tr-").first.wait_for()


def mlflow_model(page: Any, home: KeptHome, name: str, version: int) -> None:
    """The page of one version of a registered model: how to serve it, and where it comes from."""
    _open_mlflow(page, f"{home.mlflow_page}/#/models/{name}/versions/{version}")
    page.get_by_text("headway.serve").first.wait_for()


def _open_mlflow(page: Any, address: str) -> None:
    """Open a page of MLflow as somebody has left it who trains models, and has closed the panel of its assistant."""
    page.add_init_script(ASSISTANT_CLOSED)
    page.goto("about:blank")  # an address that differs behind the # alone would load nothing
    page.goto(f"{address}{'&' if '?' in address else '?'}workflowType=machine_learning")


def prefect_artifacts(page: Any, shown: Shown) -> None:
    open_prefect(page, shown.home, f"/runs/flow-run/{shown.flow_run}?tab=Artifacts")
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("mlflow-run").first.wait_for()


def prefect_report(page: Any, shown: Shown) -> None:
    """The report of a night, as an artifact of its flow run."""
    found = shown.home.ask("POST", "/artifacts/filter", {"artifacts": {
        "flow_run_id": {"any_": [shown.flow_run]}, "key": {"any_": ["night-report"]}}})
    open_prefect(page, shown.home, f"/artifacts/artifact/{found[0]['id']}")
    page.get_by_text("held_out_accuracy").first.wait_for()


def prefect_form(page: Any, home: KeptHome, deployment: str) -> None:
    """The form that a run of a deployment is begun with: `prefect_form(page, home, "train/adhoc")`."""
    found = home.ask("GET", f"/deployments/name/{deployment}")
    open_prefect(page, home, f"/deployments/deployment/{found['id']}/run")
    page.get_by_text("overrides").first.wait_for()


def local_page(page: Any, path: Path) -> None:
    page.goto(path.as_uri())
    page.locator("body").wait_for()
