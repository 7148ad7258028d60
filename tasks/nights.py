"""A night before and while it trains: its key, what it shall be compared with, its runs in MLflow. What comes after
training is in night_end.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.nightly.gates import Thresholds as Thresholds
from rl_core.nightly.nights import (
    Baseline,
    Night,
    NightRun,
    good_before,
    keys_for,
    matrix_of,
    nights_in,
    put_night,
    run_keys,
)
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import put_if_absent, read_json, to_json
from tasks.destination import Destination, destination, destination_of
from tasks.night_files import TAG_NIGHT, night_dir
from tasks.notifying import check_address
from tasks.paths import headway_home, run_dir
from tasks.tracking import Status, TrackingFailed, adopt, champion, close_parent, open_parent

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$"
"""Of nights: part of run keys, and name of a registered model."""
CHAMPION, LAST_GOOD = "champion", "last-good-night"


# -- before it trains

def asked_for(*, name: str, preset: str, overrides: dict[str, Any], seeds: Sequence[int],
              matrix: Sequence[dict[str, Any]], **settings: Any) -> Night:
    """What the parameters of a flow run ask for, without keys. Raises ConfigError."""
    if re.fullmatch(NAME, name) is None:
        raise ConfigError(f"name: use at most 40 letters, digits, _ and -, a letter or digit first (got {name!r})")
    runs = matrix_of(overrides, seeds, matrix)
    return Night(key="", name=name, flow_run_id=flow_run.get_id(), preset=preset,
                 scheduled_us=int(flow_run.get_scheduled_start_time().timestamp() * 1e6),
                 runs=tuple(NightRun(run_key="", overrides=each) for each in runs), **settings)


def begun_night() -> Night | None:
    """The night that this flow run has begun already, as a Retry finds it; None at its first try."""
    mine = flow_run.get_id()
    return next((night for _, night in nights_in(headway_home() / "nights") if night.flow_run_id == mine is not None),
                None)


def begin_night(wanted: Night, config: Config) -> Night:
    """A new night, under a key of its own.

    `wanted` has no keys: they follow from the time it is due, and from what is taken. Raises ConfigError for a baseline
    that is named and not there, and for an address that is not: before anything is trained.
    """
    keys = keys_for(wanted.name, _due(wanted), wanted.flow_run_id or "by-hand")
    check_address(wanted.notify)
    _check_baseline(wanted, config)
    for key in keys:
        night = replace(wanted, key=key, runs=tuple(
            replace(run, run_key=run_key)
            for run_key, run in zip(run_keys(key, len(wanted.runs)), wanted.runs, strict=True)))
        if night_dir(key).night.exists() or any(run_dir(run.run_key).root.exists() for run in night.runs):
            continue  # of another flow run, or runs of no night
        if put_night(night_dir(key), night):
            return night
    raise ConfigError(f"name: the nights {', '.join(keys)} are taken under {headway_home() / 'nights'}; give another "
                      "name")


def _due(night: Night) -> datetime:
    """In the time of this machine, as people there call the night."""
    return datetime.fromtimestamp(night.scheduled_us / 1e6)


# -- what it is compared with

def baseline_of(night: Night, where: Destination) -> tuple[Baseline | None, tuple[str, ...]]:
    """The run that a night is compared with, None on the first night; and what is to be said of the choice.

    Raises ConfigError for one that is named and not there, TrackingFailed where MLflow does not say which it is.
    """
    named, notes = night.baseline, list[str]()
    if named not in (None, CHAMPION, LAST_GOOD):
        if not run_dir(named).run_json.exists():
            raise ConfigError(f"baseline {named!r}: there is no such run under {headway_home() / 'runs'}; name a run "
                              f"that is there, {CHAMPION!r}, {LAST_GOOD!r}, or none")
        return Baseline(kind="named", run_key=named), ()
    if named != LAST_GOOD:
        version = champion(where, night.name)
        if version is not None and run_dir(version.run_key).run_json.exists():
            return Baseline(kind="champion", run_key=version.run_key, version=version.version), ()
        missing = f"no version of the registered model {night.name!r} has the alias {CHAMPION!r}" if version is None \
            else f"version {version.version} of the registered model {night.name!r} has the alias {CHAMPION!r}, and " \
                 f"its run {version.run_key} is gone"
        if named == CHAMPION:
            raise ConfigError(f"baseline {CHAMPION!r}: {missing}; leave baseline empty, then a first night becomes it")
        notes += [] if version is None else [f"{missing}: the last good night takes its place"]
    for run_key in good_before(nights_in(headway_home() / "nights"), night):
        if run_dir(run_key).run_json.exists():
            return Baseline(kind="last good night", run_key=run_key), tuple(notes)
    if named == LAST_GOOD:
        raise ConfigError(f"baseline {LAST_GOOD!r}: no night {night.name!r} before this one was promoted or kept; "
                          "leave baseline empty for the first night")
    return None, tuple(notes)


def _check_baseline(night: Night, config: Config) -> None:
    """Say at once that what is named is not there. An MLflow that does not answer now may do so in the morning."""
    if night.baseline is not None:
        with suppress(TrackingFailed):
            baseline_of(night, destination(config, headway_home()))


# -- the runs of a matrix in MLflow

@task(name="open-matrix", task_run_name="open-matrix", cache_policy=NO_CACHE, persist_result=False)
def open_matrix(night: Night, config: Config) -> None:
    """The MLflow run that the runs of a matrix are children of. Without MLflow training goes on: it is made later."""
    try:
        _parent(night, destination(config, headway_home()), config.tracking.experiment)
    except TrackingFailed as error:
        get_run_logger().warning(f"{error}; the parent run of {night.key} is made when its runs are trained")


def _parent(night: Night, where: Destination, experiment: str) -> str:
    """Id of that MLflow run, running. Raises TrackingFailed."""
    rows = {run.run_key: run.overrides for run in night.runs}
    parent = open_parent(where, experiment=experiment, key=night.key, tags={TAG_NIGHT: night.key}, settings=rows)
    put_if_absent(night_dir(night.key).parent, to_json({"run_id": parent}))
    return parent


def adopt_runs(night: Night) -> str:
    """Every run of a matrix is a child of its parent, whatever kept MLflow from hearing of it before; returns the
    parent's id. Raises TrackingFailed."""
    first = run_dir(night.runs[0].run_key)
    where = destination_of(first)
    parent = _parent(night, where, config_of(first, current_revision(first)).tracking.experiment)
    for run in night.runs:
        adopt(where, parent, run_dir(run.run_key))
    return parent


def close_matrix(night: Night, status: Status, summary: dict[str, float] | None = None) -> None:
    """Tell MLflow how a matrix ended. Raises TrackingFailed; nothing where it never heard of it."""
    with suppress(FileNotFoundError):
        parent = str(read_json(night_dir(night.key).parent)["run_id"])
        close_parent(destination_of(run_dir(night.runs[0].run_key)), parent, status, summary)
