"""The parent run of a matrix: its children are the runs of one night, in MLflow one tree that opens and closes.

    parent = open_parent(where, experiment="headway", key="night-2026-11-30", tags={"headway.night": "2026-11-30"})
    train_run(preset, config, key, tags={TAG_PARENT: parent, "headway.night": "2026-11-30"})     # each child
    close_parent(where, parent, "FINISHED")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_core.run_dir import RunDir, read_json
from tasks.destination import Destination
from tasks.tracking.client import asked
from tasks.tracking.mirror import TAG_RUN_KEY, Status, experiment_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG_PARENT = "mlflow.parentRunId"
"""Of a child: id of its parent. MLflow's pages make a tree of it."""
TAG_MATRIX = "headway.matrix"
"""Of a parent: the key that its matrix is found by."""


def open_parent(where: Destination, *, experiment: str, key: str, tags: Mapping[str, str] | None = None,
                settings: Mapping[str, Any] | None = None) -> str:
    """Id of the MLflow run that is the parent of matrix `key`: the one that there is, running again, or a new one.

    `settings`, what the matrix varies, is its artifact `matrix.json`. Raises TrackingFailed.
    """
    def opened(client: MlflowClient) -> str:
        place = experiment_of(client, experiment, where.artifacts)
        hits = client.search_runs([place], f"tags.`{TAG_MATRIX}` = '{key}'", order_by=["attributes.start_time ASC"],
                                  max_results=1)
        run = hits[0] if hits else client.create_run(place, tags={TAG_MATRIX: key, TAG_RUN_KEY: key}, run_name=key)
        run_id = str(run.info.run_id)
        client.update_run(run_id, status="RUNNING")
        for name, value in (tags or {}).items():
            client.set_tag(run_id, name, value)
        if settings is not None:
            client.log_text(run_id, json.dumps(dict(settings), indent=1), "matrix.json")
        return run_id

    return asked(where, opened)


def adopt(where: Destination, parent: str, run: RunDir) -> None:
    """Make the MLflow run of `run`, which exists, a child of `parent`. Again changes nothing. Raises TrackingFailed,
    FileNotFoundError for a run that was never tracked."""
    run_id = read_json(run.mlflow_run)["run_id"]
    asked(where, lambda client: client.set_tag(run_id, TAG_PARENT, parent))


def close_parent(where: Destination, parent: str, status: Status, summary: Mapping[str, float] | None = None) -> None:
    """Set how the matrix ended. `summary`: a few numbers over all children, shown in the list of runs. Once more with
    the same numbers is no second point. Raises TrackingFailed."""
    from mlflow.entities import Metric

    def closed(client: MlflowClient) -> None:
        begun = int(client.get_run(parent).info.start_time)
        points = [Metric(name, float(value), begun, 0) for name, value in (summary or {}).items()]
        if points:
            client.log_batch(parent, metrics=points)
        client.set_terminated(parent, status=status)

    asked(where, closed)


def log_page(where: Destination, run_id: str, text: str, name: str) -> None:
    """Put a page or another text, `name` as in `report/night.html`, to the artifacts of an MLflow run; the same name
    again is overwritten. Raises TrackingFailed."""
    asked(where, lambda client: client.log_text(run_id, text, name))


def tag_run(where: Destination, run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags of an MLflow run that is there. Raises TrackingFailed."""
    def tagged(client: MlflowClient) -> None:
        for name, value in tags.items():
            client.set_tag(run_id, name, value)

    asked(where, tagged)
