"""What Prefect's page of a flow run shows of a run: a progress bar, the link to MLflow, its summary, a wait that lasts.

Views: a server that is away, or hangs, neither stops a run nor holds it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.runtime import flow_run

from tasks import kept
from tasks.paths import headway_home

# `_sync=True` asks for the form that blocks, whatever the context; Prefect's types do not show this argument.
_create = cast(Callable[..., UUID], create_progress_artifact)
_update = cast(Callable[..., UUID], update_progress_artifact)
_create_link = cast(Callable[..., UUID], create_link_artifact)
_create_markdown = cast(Callable[..., UUID], create_markdown_artifact)
_create_table = cast(Callable[..., UUID], create_table_artifact)


class ProgressArtifact:
    """The bar of the flow run in Prefect's UI, moved on a thread of its own: a training step never waits for it."""

    PARTS = 50
    """Updates over the whole run, at most."""

    def __init__(self, total: int) -> None:
        self._total = max(1, total)
        self._id: UUID | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="progress-artifact")
        self._shown = -1

    def done(self, steps: int) -> None:
        """Show that `steps` training steps are done. To be called inside the flow run."""
        part = self.PARTS * steps // self._total
        if part != self._shown:
            self._shown = part
            self._pool.submit(copy_context().run, self._show, 100.0 * steps / self._total)

    def _show(self, percent: float) -> None:
        with suppress(Exception):  # a view: Prefect being away is no reason to stop
            if self._id is None:
                self._id = _create(percent, key="progress", description="Training steps", _sync=True)
            else:
                _update(self._id, percent, _sync=True)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def tell_link(run_key: str, link: str) -> None:
    """The run in MLflow, as an artifact of the flow run: `tell_link("sort", "/#/experiments/1/runs/4f")`."""
    if not link.startswith("http"):  # no server is up: where `headway services up` will have one
        link = (kept.read_settings(headway_home()) or kept.Settings()).address("mlflow") + link
    _create_link(link=link, link_text=f"MLflow run {run_key}", key="mlflow-run", _sync=True,
                 description="Metrics, figures and pages of this run; `headway ui` says where MLflow's pages are")


def tell_summary(summary: Mapping[str, Any]) -> None:
    """The summary of a run as a table of the flow run; a value that does not exist is a dash."""
    rows = [{"what": key, "value": "-" if value is None else str(value)} for key, value in summary.items()]
    with suppress(Exception):  # a view: Prefect being away does not make a trained run fail
        _create_table(table=rows, key="summary", description="Summary of the run", _sync=True)


def tell_stall(report: str) -> None:
    """Who waits on whom, as an artifact of the flow run; each report is a newer version of it. Nothing outside of one.
    """
    if flow_run.get_id() is None:
        return
    with suppress(Exception):
        _create_markdown(markdown=f"Waits that last:\n\n    {report}\n`headway status` shows what holds now.",
                         key="stall", description="A wait has lasted for a minute or more", _sync=True)


def tell_night(markdown: str, what: str) -> None:
    """The report of a night, or why it has no verdict, as an artifact of the flow run."""
    with suppress(Exception):  # a view: Prefect being away does not make a judged night fail
        _create_markdown(markdown=markdown, key="night-report", description=what, _sync=True)
