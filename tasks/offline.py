"""`headway train --shards-from K0`: what is known before the start, and taking the shards up in it (offline.md)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import Config, LocalModel, TinyModel
from rl_core.errors import ConfigError, ShardsSpent
from rl_core.model_setup import check_model, model_digests, tiny_settings
from rl_core.offline import (
    Taken,
    check_agreement,
    check_same_inputs,
    check_scored_by,
    check_steps,
    is_scored_alike,
    landed_places,
    note_what_is_not_taken,
    read_taken,
    take_shards,
)
from rl_core.plan import InputFacts
from rl_core.revisions import config_of, current_revision
from rl_core.roles.models import place_roles
from rl_core.run_dir import RunDir
from rl_core.run_identity import check_inputs
from tasks.inspection import open_run
from tasks.paths import run_dir
from tasks.settings import settings_in

if TYPE_CHECKING:
    from rl_core.rollout.prompts import PromptSource
    from tasks.owner import Owner


def base_settings(shards_from: str, overrides: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Preset and settings that a run on these shards begins with, if it names no preset: those of that run, but for as
    many steps as the shards make. Raises ConfigError where there is no such run."""
    parent = run_dir(shards_from)
    open_run(parent, shards_from)
    stored = settings_in(parent)
    assert stored is not None
    settings = stored.config.model_dump(mode="json")
    settings["validation"]["only"] = False  # of the one start that asks for it
    settings["data"] |= {"rescore": False}
    size = overrides.get("groups_per_step", stored.config.groups_per_step)
    if "total_steps" not in overrides and isinstance(size, int) and size > 0:
        settings["total_steps"] = max(1, min(stored.config.total_steps, landed_places(parent) // size))
    return stored.preset, settings


def check_shards(run: RunDir, run_key: str, config: Config) -> str | None:
    """What the plan says of the shards; None for a run that samples its own. Reads small columns only.

    Raises ConfigError where settings and shards do not agree, or the shards are too few.
    """
    key = config.data.shards_from
    if key is None:
        return None
    if (taken := read_taken(run)) is not None:
        check_agreement(run.origin, key, config)
        check_scored_by(taken, config)
        check_steps(config, taken.groups)
        return _words(taken.groups, config, rescored=taken.rescored)
    if key == run_key:
        raise ConfigError(f"data.shards_from: is {key!r}, this very run; use another --run-key")
    parent = run_dir(key)
    open_run(parent, key)
    check_agreement(parent, key, config)
    groups = landed_places(parent)
    check_steps(config, groups)
    return _words(groups, config, rescored=not is_scored_alike(parent, config))


def _words(groups: int, config: Config, *, rescored: bool) -> str:
    rewards = f"scored anew by {config.reward}" if rescored else "rewards kept"
    most = groups // config.groups_per_step
    return f"of run {config.data.shards_from}: {groups} groups, at most {most} steps; {rewards}"


def refuse_to_sample(config: Config, groups: int | None) -> None:
    """Raises ConfigError for a rollout alone in a run that samples nothing."""
    if groups is not None and config.offline:
        raise ConfigError(f"rollout: the run trains on shards of run {config.data.shards_from} (data.shards_from) and "
                          "samples nothing; use another --run-key")


def check_new(run: RunDir, config: Config, data_digest: str, facts: InputFacts) -> None:
    """Raises ConfigError where data or vocabulary are not those of the shards' run. Of a run that has taken its shards
    this was found before."""
    key = config.data.shards_from
    if key is None or run.taken.exists():
        return
    parent = run_dir(key)
    made_with = parent.origin if parent.taken.exists() else parent
    check_same_inputs(made_with, key, {"data": data_digest})
    theirs = check_model(parent.model).vocabulary if parent.model.is_dir() else facts.vocabulary
    if facts.vocabulary != theirs:
        raise ConfigError(f"model: has a vocabulary of {facts.vocabulary}, that of run {key}, whose shards hold its "
                          f"token ids, has {theirs}; use a model with the same tokenizer")


def placed_model(run: RunDir, config: Config) -> Path:
    """Where a copy of the model lies that a start of these settings takes, if one does: that of the run, or of the run
    whose shards it trains on where the model settings are the same."""
    key = config.data.shards_from
    if key is None or run.model.exists():
        return run.model
    parent = run_dir(key)
    same = parent.model.is_dir() and _model_of(config_of(parent, current_revision(parent))) == _model_of(config)
    return parent.model if same else run.model


def _model_of(config: Config) -> dict[str, Any]:
    """All that decides the initial weights."""
    if isinstance(config.model, TinyModel):
        return tiny_settings(config, config.model)
    assert isinstance(config.model, LocalModel)
    return config.model.model_dump(mode="json")


def take_up(owner: Owner, prompts: PromptSource) -> Taken:
    """The shards in the run directory, scored by its reward, and what the ledger says of them. Idempotent.

    Raises ConfigError, BrokenFile, FailureBudgetSpent, and what stops the owner.
    """
    run, config, progress = owner.run, owner.config, owner.progress
    key = config.data.shards_from
    assert key is not None
    taken = read_taken(run)
    if taken is None:
        parent = run_dir(key)
        open_run(parent, key)
        taken = take_shards(parent, run, config)
    digests = {**model_digests(run.model), "data": prompts.digest}
    check_same_inputs(run.origin, key, digests)
    check_inputs(run, {**digests, **place_roles(run, config), "shards": taken.digest}, rows=len(prompts))
    if taken.rescored and not run.rescored.exists():
        _rescore(owner, taken, prompts)
    note_what_is_not_taken(run, taken, owner.attempt)
    progress.set(note=f"trains on {taken.groups} groups of run {taken.run_key}, "
                      + ("scored anew" if taken.rescored else "with their rewards"))
    return taken


def _rescore(owner: Owner, taken: Taken, prompts: PromptSource) -> None:
    from rl_core.rescoring import Rescoring
    from rl_core.rollout.prompts import load_tokenizer
    from rl_core.rollout.rewards.scoring import make_training_scorer

    progress = owner.progress
    with closing(make_training_scorer(owner.config)) as scorer:
        Rescoring(run=owner.run, config=owner.config, taken=taken, attempt=owner.attempt, prompts=prompts,
                  tokenizer=load_tokenizer(owner.run.model), scorer=scorer, check=owner.check,
                  progress=lambda done, total: progress.set(state="scoring anew", rescored=[done, total])).finish()
    progress.set(state="starting")


def check_enough(owner: Owner) -> None:
    """Raises ShardsSpent before anything is trained where the usable groups are fewer than the steps left need: the
    filter, or answers that could not be scored, took out the others."""
    experience, config, run_key = owner.experience, owner.config, owner.identity.run_key
    experience.discover(full=True)
    need = config.groups_per_step * (config.total_steps - experience.next_step)
    if need > experience.L:
        if (unread := next(iter(experience.discovery.unread.values()), None)) is not None:
            raise OSError(f"not all shards of run {config.data.shards_from} can be read now: {unread}")
        most = experience.next_step + experience.L // config.groups_per_step
        raise ShardsSpent(f"total_steps is {config.total_steps}, but the usable groups of run {config.data.shards_from}"
                          f" make {most} steps ({experience.L} wait, {need} are needed): headway train --run-key "
                          f"{run_key} --amend --set total_steps={most}")


def origin_tag(run: RunDir) -> dict[str, Any] | None:
    """Where the shards are from, for MLflow and the status; None for a run that samples its own."""
    taken = read_taken(run)
    return None if taken is None else {"run_key": taken.run_key, "run_uuid": taken.run_uuid, "digest": taken.digest,
                                       "rescored": taken.rescored}
