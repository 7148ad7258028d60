"""What a command finds out before it starts anything: the run it means, its inputs, and whether it may start."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_core.config import Config
from rl_core.engine_plan import missing_programs
from rl_core.errors import ConfigError, DataError
from rl_core.experience.archive import try_archive
from rl_core.experience.ledger import claimed_steps
from rl_core.plan import Plan, differing, make_plan, toy_words
from rl_core.preflight import devices, inspect_inputs, left_to_set, missing_devices, not_fetched
from rl_core.revisions import Changed, Revision
from rl_core.run_dir import RunDir, refuse_if_alive, self_test
from rl_core.run_identity import check_inputs, check_same_run, refuse_to_amend_nothing
from tasks.destination import destination
from tasks.offline import check_new, check_shards, placed_model
from tasks.paths import headway_home, new_run_key, run_dir
from tasks.settings import settings_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that could start: `Prepared(run_key="sort-2", run=..., plan=...)`."""

    run_key: str
    run: RunDir
    plan: Plan
    revision: int = 0
    """Config revision that the run has now."""
    amendment: Revision | None = None
    """The newest one; None for a run that was never amended."""
    amends: Changed = field(default_factory=Changed)
    """Training fields that this start would amend, as revision + 1."""
    from_step: int = 0
    """First step that has no claim: what is amended now begins there."""
    shards: str | None = None
    """Of a run on another run's shards: how many there are, in words."""
    warnings: tuple[str, ...] = ()
    """Of a plan alone: why these settings could not start here and now."""


def prepare(config: Config, preset: str, run_key: str | None, *, amend: bool = False,
            planned: bool = False) -> Prepared:
    """The run of these settings and its plan, checked against what an earlier start wrote. Writes nothing, but for the
    directory of `retention.archive`, which a start creates.

    `run_key` None: a new one, after the preset. Raises what refuses it: ConfigError, DataError, BrokenFile. `planned`
    warns of what a start is refused for and a plan can do without: devices of another machine, values that the preset
    leaves to be set, and a model that is not fetched yet.
    """
    if amend and run_key is None:
        raise ConfigError("--amend: say which run, by --run-key")
    key = new_run_key(preset) if run_key is None else run_key
    run = run_dir(key)
    stored = settings_in(run)
    if amend:
        refuse_to_amend_nothing(run, key)
    if stored is not None:
        check_same_run(run, key, config, amend=amend)
    destination(config, headway_home())
    if config.retention.archive is not None:
        try_archive(config.retention.archive, make=not planned)
    models = headway_home() / "models"
    empty = [*left_to_set(config), *not_fetched(config, models, run.model)] if planned else []
    warnings = (*empty, *((*missing_devices(devices(config)), *missing_programs(config)) if planned else ()))
    if empty:  # no model or no prompts to look at: totals of the settings alone
        return Prepared(run_key=key, run=run, plan=make_plan(config), warnings=warnings)
    shards = check_shards(run, key, config)
    try:
        inputs = inspect_inputs(config, models, placed_model(run, config), planned=planned)
    except DataError as error:
        raise DataError("\n".join([str(error), *toy_words(config, str(error))])) from error
    check_new(run, config, inputs.prompts.digest, inputs.facts)
    if run.inputs.exists():
        check_inputs(run, {"data": inputs.prompts.digest})
    plan = make_plan(config, inputs.facts)
    if stored is None:
        return Prepared(run_key=key, run=run, plan=plan, shards=shards, warnings=warnings)
    return Prepared(run_key=key, run=run, plan=plan, shards=shards, warnings=warnings, revision=stored.revision,
                    amendment=stored.amendment, amends=differing(stored.config, config, "training"),
                    from_step=len(claimed_steps(run)))


def check_free(run: RunDir) -> None:
    """Raises RunIsAlive while a live process owns the run, NoExclusiveCreate for a file system that cannot hold it.

    Every directory of the run is tested again in the set-up.
    """
    refuse_if_alive(run)
    self_test(run.root.parent)
