"""The `train` flow: set up, rollout beside training steps, validate and checkpoint, report.

    prefect: train(run_key)
      set-up                     owner lock, attempt, model, actors, restored learner, offered weights
      continuous-rollout         one long task: the pump leases prompts, groups land as shards
      train-step-0 .. n-1        claim k, train k, record k
      validate-k, checkpoint-k   beside and between them; with validation.only one validation, and no training
      report                     figures, summary, artifacts

A retry of the flow, a restart after a kill and a first start are one path: what is done is read from the run directory.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Prefect reads its settings when it is imported; the command starts or finds the services first.
    os.execv(sys.executable, [sys.executable, "-m", "flows.cli", "train", *sys.argv[1:]])

from collections.abc import Mapping
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.presets import DEFAULT, base_of, nested
from rl_core.config import Config
from rl_core.errors import WallTimeReached
from rl_core.plan import make_plan, resolve
from tasks import signals
from tasks.checkpoint import checkpoint, checkpoint_due
from tasks.destination import destination
from tasks.night_end import after_training, judged_again
from tasks.night_files import night_tags
from tasks.offline import check_shards
from tasks.owner import MAX_WALL_TIME, Owner, own_run, set_up
from tasks.paths import headway_home, new_run_key, run_dir
from tasks.report import publish_report
from tasks.rollout import continuous_rollout, gather
from tasks.training import train_step
from tasks.validation import (
    validate_beside,
    validate_newest,
    validate_unfinished,
    validation_due,
    wait_for_validations,
)


def _flow_run_name() -> str:
    parameters = flow_run.parameters
    return parameters.get("run_key") or parameters.get("preset") or DEFAULT


@flow(name="train", flow_run_name=_flow_run_name, log_prints=False, retries=0)
def train(preset: str | None = None, overrides: dict[str, Any] | None = None, run_key: str | None = None,
          amend: bool = False, groups: int | None = None, shards_from: str | None = None
          ) -> dict[str, Any] | State[Any]:
    """Train one run to its end and return its summary.

    Args:
        preset: A name of deployments/presets, or the path of a YAML file. Without one the stored settings of the run
            are taken, or tiny-cpu for a new one.
        overrides: Settings on top of it, as in {"seed": 3, "learner.lr": 1e-4}, or as a tree.
        run_key: Names the run and its directory; the same key goes on with the same run. Without one it is made from
            the id of the flow run, so that a retry goes on with its run.
        amend: Training settings that differ from the run's hold from its next step on; else they are refused.
        groups: No training, answers are generated until so many groups wait to be trained. Without it, training.
        shards_from: Key of another run whose landed shards are trained on, without rollout workers. Without it, what
            the run has stored; a new one samples its own.
    """  # in Google's form, which Prefect shows beside the fields of its form
    tree = nested(overrides or {})
    name, settings = base_of(preset, run_key, shards_from, tree)
    key = run_key or new_run_key(name, flow_run.get_id())
    if not amend and groups is None and (summary := judged_again(key)) is not None:
        return summary
    return after_training(key, train_run(name, resolve(settings, tree), key, amend=amend, groups=groups,
                                         tags=night_tags(key)))


def train_run(preset: str, config: Config, key: str, *, amend: bool = False, groups: int | None = None,
              tags: Mapping[str, str] | None = None) -> dict[str, Any] | State[Any]:
    """What a flow does that begins a run, or goes on with it: bring it to its end. `tags`: of its MLflow run."""
    make_plan(config)  # the command has done this and more; a flow that Prefect starts has not
    destination(config, headway_home())
    check_shards(run_dir(key), key, config)
    owner = own_run(preset, config, key, amend=amend, groups=groups, tags=tags)
    with signals.noted():
        try:
            set_up(owner)
            if groups is not None:
                gather(owner)
            elif config.validation.only:
                validate_newest(owner)
            else:
                train_steps(owner)
            return publish_report(owner)
        except BaseException as error:
            # Whatever is raised after a signal comes of it: code that a signal meets may turn it into an error.
            if isinstance(error, KeyboardInterrupt | TerminationSignal) or signals.received() is not None:
                return Cancelled(message=owner.cancelled(signals.received() or "SIGINT"))
            if isinstance(error, WallTimeReached):
                return Cancelled(message=owner.cancelled(MAX_WALL_TIME))
            owner.failed(error)
            raise
        finally:
            owner.close()


def train_steps(owner: Owner) -> None:
    """The visible loop: rollout beside training (none on another run's shards), until the steps or the data end."""
    with owner.progress.stage("training"):
        if not owner.config.offline:
            owner.rollout = continuous_rollout.submit(owner)
        validate_unfinished(owner)
        done = owner.first_step
        if validation_due(owner, done):
            validate_beside(owner, done)
        for step in owner.remaining_steps:
            owner.check_time()
            owner.ended = train_step(owner, step)
            if owner.ended is not None:
                break
            done = step + 1
            if checkpoint_due(owner, done):
                checkpoint(owner, done)
            if validation_due(owner, done):
                validate_beside(owner, done)
        owner.end_rollout()
        owner.ended = owner.ended or owner.claims.end()
        validate_beside(owner, done)
        if checkpoint_due(owner, done, last=True):
            checkpoint(owner, done)
        wait_for_validations(owner)
