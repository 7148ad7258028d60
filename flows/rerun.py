"""The `rerun` flow: finish a run or a night that failed or was stopped, or begin a fork of a run: `headway rerun` for
Prefect."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.nightly import finish_night
from flows.presets import base_of, nested
from flows.train import train_run
from rl_core.errors import ConfigError
from rl_core.plan import resolve
from tasks.forking import fork_of, make_fork
from tasks.inspection import open_run
from tasks.night_end import after_training, judged_again
from tasks.night_files import night_tags, night_to_finish
from tasks.paths import run_dir


def _flow_run_name() -> str:
    given = flow_run.parameters
    step = given.get("from_step")
    return f"{given.get('run_key')}" if step is None else f"{given.get('run_key')} from step {step}"


@flow(name="rerun", flow_run_name=_flow_run_name, log_prints=False, retries=0)
def rerun(run_key: str, from_step: int | None = None,
          overrides: dict[str, Any] | None = None) -> dict[str, Any] | State[Any]:
    """Go on with a run by its stored settings, or with a fork of it; returns the summary of what was finished. Behind
    the last run of a night its comparison goes on. A night is finished as a whole, and its verdict returned.

    Args:
        run_key: Key of a run that exists, or of a night. Recorded steps are not done again, a failed step gets the same
            data; of a night all runs are trained that are not, and then it is compared.
        from_step: Instead of going on, fork. A new run begins in this one's past, with this training step (from 0);
            a retry goes on with the fork that was made.
        overrides: Settings of the fork, as in {"learner.lr": 1e-5}, or as a tree.
    """  # in Google's form, which Prefect shows beside the fields of its form
    tree = nested(overrides or {})
    if from_step is None and tree:
        raise ConfigError("overrides: a rerun goes on with the stored settings; give from_step as well for a fork with "
                          "other ones")
    if from_step is None and (night := night_to_finish(run_key)) is not None:
        return finish_night(night)
    open_run(run_dir(run_key), run_key)
    if from_step is None:
        key = run_key
    else:
        key = fork_of(run_key, flow_run.get_id()) or make_fork(run_key, from_step, tree).key
    if (summary := judged_again(key)) is not None:
        return summary
    name, settings = base_of(None, key)
    return after_training(key, train_run(name, resolve(settings, {}), key, tags=night_tags(key)))
