"""A fork before its first start: all that a start would refuse is found out before there is anything to start."""

from __future__ import annotations

from typing import Any

from rl_core import fork
from rl_core.plan import make_plan, resolve
from rl_core.preflight import inspect_inputs
from rl_core.run_dir import RunDir, numbered, read_json, self_test
from rl_core.run_identity import check_inputs
from tasks.destination import destination
from tasks.paths import headway_home, run_dir


def fork_of(run_key: str, flow_run_id: str | None) -> str | None:
    """Key of the fork that this flow run has begun already, before it failed; None if it has begun none."""
    for place in sorted(run_dir(run_key).root.parent.glob(f"{run_key}~*")) if flow_run_id is not None else ():
        attempts = numbered(RunDir(place).attempts, r"attempt-(\d{6})\.json")
        if any(read_json(stored)["prefect_run_id"] == flow_run_id for _, stored in attempts):
            return place.name
    return None


def make_fork(run_key: str, step: int, overrides: dict[str, Any]) -> fork.Fork:
    """Make a fork of the run from training step N with the settings that step had, and the overrides on top.

    Raises ConfigError, DataError, BrokenFile, NoExclusiveCreate; then there is no fork.
    """
    parent = run_dir(run_key)
    _, stored = fork.settings_at(parent, step)
    settings = stored.model_dump(mode="json")
    settings["validation"]["only"] = False  # of the one start that asks for it
    wanted = resolve(settings, overrides)
    run_dir(f"{run_key}~1")  # a key that is too long to have forks
    fork.check_fork(parent, run_key, step, wanted)
    make_plan(wanted)
    destination(wanted, headway_home())
    inputs = inspect_inputs(wanted, headway_home() / "models", parent.model)
    if parent.inputs.exists():
        check_inputs(parent, {"data": inputs.prompts.digest})
    make_plan(wanted, inputs.facts)
    self_test(parent.root.parent)
    return fork.make_fork(parent, run_key, step, wanted)
