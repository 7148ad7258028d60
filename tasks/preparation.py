"""What a command finds out before it starts anything: the run it means, its inputs, and whether it may start."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.plan import Plan, make_plan
from rl_core.preflight import inspect_inputs
from rl_core.run_dir import RunDir, refuse_if_alive, self_test
from rl_core.run_identity import check_inputs, check_same_run
from tasks.destination import destination
from tasks.inspection import stored_identity
from tasks.paths import headway_home, new_run_key, run_dir


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that could start: `Prepared(run_key="sort-2", run=..., plan=...)`."""

    run_key: str
    run: RunDir
    plan: Plan


def prepare(config: Config, preset: str, run_key: str | None) -> Prepared:
    """The run of these settings and its plan, checked against what an earlier start wrote. Writes nothing.

    `run_key` None: a new one, after the preset. Raises what refuses it: ConfigError, DataError, BrokenFile.
    """
    key = new_run_key(preset) if run_key is None else run_key
    run = run_dir(key)
    try:
        identity = stored_identity(run)
    except OSError as error:
        raise ConfigError(f"{run.root}: cannot be read ({error.strerror}); set HEADWAY_HOME to a directory that can be "
                          "used") from error
    if identity is not None:
        check_same_run(key, identity.config, config)
    destination(config, headway_home())
    inputs = inspect_inputs(config)
    if run.inputs.exists():
        check_inputs(run, {"data": inputs.prompts.digest})
    return Prepared(run_key=key, run=run, plan=make_plan(config, inputs.facts))


def check_free(run: RunDir) -> None:
    """Raises RunIsAlive while a live process owns the run, NoExclusiveCreate for a file system that cannot hold it.

    Every directory of the run is tested again in the set-up.
    """
    refuse_if_alive(run)
    self_test(run.root.parent)
