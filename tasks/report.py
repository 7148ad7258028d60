"""The end of a run: final figures, summary, Prefect artifacts, MLflow status. All derived from the run directory."""

from __future__ import annotations

import threading
import time
from contextvars import copy_context
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rl_core.config import Config
from rl_core.run_dir import OwnerLock, RunDir, read_json, replace_file, to_json
from rl_core.run_identity import read_identity
from rl_core.summary import summarize
from tasks.artifacts import tell_summary
from tasks.figures import draw_figures
from tasks.night_files import night_tags
from tasks.paths import headway_home
from tasks.screens import Screens
from tasks.tracking import Tracker, destination

if TYPE_CHECKING:
    from tasks.owner import Owner

FLUSH_S = 30.0
"""Longest that a finished run waits for MLflow; what is missing then is replayed by the next start of the run."""

TELL_S = 10.0
"""Longest that it waits for Prefect to take its artifacts."""


@task(name="report", task_run_name="report", cache_policy=NO_CACHE, persist_result=False)
def publish_report(owner: Owner) -> dict[str, Any]:
    """Write what a finished run leaves behind and return its summary (the keys of `headway train --json`)."""
    run, config, identity = owner.run, owner.config, owner.identity
    owner.screens.end()  # the last pages are made beside the figures
    figures = draw_figures(run, title=identity.run_key, limit=config.staleness.limit)
    # So that the summary can name the MLflow run, also of a very short run.
    answers = owner.tracker.flush(deadline_s=FLUSH_S)
    summary = summarize(run, run_key=identity.run_key, status="completed",
                        wall_s=time.monotonic() - owner.started_s, mlflow_run_id=owner.tracker.run_id).as_json()
    ended = None if owner.ended is None else asdict(owner.ended)  # None: validation.only, a later start goes on
    telling = threading.Thread(target=copy_context().run, args=(tell_summary, summary),
                               name="prefect-artifacts", daemon=True)
    telling.start()  # beside the end of everything else, and no longer: a server may hang
    owner.finish("completed", figures=figures, mlflow_answers=answers, summary=summary, ended=ended,
                 gathered=owner.gathered)
    telling.join(TELL_S)
    return summary


def track_again(run: RunDir, config: Config) -> dict[str, Any]:
    """Replay a completed run to MLflow, which was away at its end. Returns the result as it is stored now.

    Raises RunIsAlive while its owner, or another replay, is still at it.
    """
    lock = OwnerLock(run)
    try:
        identity, result = read_identity(run), read_json(run.result)
        tracker = Tracker(run, config, destination(config, headway_home()), run_uuid=identity.run_uuid,
                          run_key=identity.run_key, tags=night_tags(identity.run_key))
        tracker.start()
        screens = Screens(run, tracker)
        screens.start()
        screens.finish(FLUSH_S)
        result["tracked"] = tracker.finish("FINISHED", deadline_s=FLUSH_S, artifacts=sorted(run.figures.glob("*.png")))
        result["tracking_trouble"] = tracker.trouble
        result["summary"]["mlflow_run_id"] = tracker.run_id or result["summary"]["mlflow_run_id"]
        replace_file(run.result, to_json({key: value for key, value in result.items() if key != "format"}))
        return result
    finally:
        lock.release()
