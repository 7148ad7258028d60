"""The `rerun` flow: finish a run that failed or was stopped, or begin a fork of it: `headway rerun` for Prefect."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.presets import base_of, nested
from flows.train import train_run
from rl_core.errors import ConfigError
from rl_core.plan import resolve
from tasks.forking import fork_of, make_fork
from tasks.inspection import open_run
from tasks.night_end import after_training, judged_again
from tasks.night_files import night_tags
from tasks.paths import run_dir


def _flow_run_name() -> str:
    given = flow_run.parameters
    step = given.get("from_step")
    return f"{given.get('run_key')}" if step is None else f"{given.get('run_key')} from step {step}"


@flow(name="rerun", flow_run_name=_flow_run_name, log_prints=False, retries=0)
def rerun(run_key: str, from_step: int | None = None,
          overrides: dict[str, Any] | None = None) -> dict[str, Any] | State[Any]:
    """Go on with a run by its stored settings, or with a fork of it; returns the summary of what was finished. Of a
    night's run the comparison goes on behind it.

    Args:
        run_key: Key of a run that exists. Recorded steps are not done again, a failed step gets the same data.
        from_step: Instead of going on, fork. A new run begins in this one's past, with this training step (from 0);
            a retry goes on with the fork that was made.
        overrides: Settings of the fork, as in {"learner.lr": 1e-5}, or as a tree.
    """  # in Google's form, which Prefect shows beside the fields of its form
    open_run(run_dir(run_key), run_key)
    tree = nested(overrides or {})
    if from_step is None:
        if tree:
            raise ConfigError("overrides: a rerun goes on with the stored settings; give from_step as well for a fork "
                              "with other ones")
        key = run_key
    else:
        key = fork_of(run_key, flow_run.get_id()) or make_fork(run_key, from_step, tree).key
    if (summary := judged_again(key)) is not None:
        return summary
    name, settings = base_of(None, key)
    return after_training(key, train_run(name, resolve(settings, {}), key, tags=night_tags(key)))
