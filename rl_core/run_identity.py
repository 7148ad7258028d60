"""run.json: what makes this run this run. Written once; every later start is checked against it, and against the
settings of the run's current revision (revisions.py)."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from rl_core.config import Config, field_kinds
from rl_core.errors import BrokenFile, ConfigError
from rl_core.plan import differing
from rl_core.revisions import (
    check_amendment,
    check_same_identity,
    check_same_training,
    config_of,
    current_revision,
    put_revision,
)
from rl_core.run_dir import RunDir, put_if_absent, read_json, to_json

CONSUMERS = ("learner",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedFrom:
    """Where a fork comes from: `ForkedFrom(run_key="sort", run_uuid="4f...", step=10)`."""

    run_key: str
    run_uuid: str
    step: int
    """First step that the fork does not have of that run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    run_uuid: str
    run_key: str
    preset: str
    config: Config
    """As the run was created: its revision 0. What holds now is `config_of(run, current_revision(run))`."""
    created_us: int
    forked_from: ForkedFrom | None = None


def read_identity(run: RunDir) -> RunIdentity:
    """Raises FileNotFoundError where there is no run, BrokenFile for one that this Headway cannot read."""
    payload = read_json(run.run_json)
    try:
        return RunIdentity(run_uuid=payload["run_uuid"], run_key=payload["run_key"], preset=payload["preset"],
                           config=Config.model_validate(payload["config"]), created_us=payload["created_us"],
                           forked_from=ForkedFrom(**payload["forked_from"]) if payload.get("forked_from") else None)
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFile(f"{run.run_json}: not the settings of a run of this Headway ({error}); use another "
                         "--run-key") from error


def check_same_run(run: RunDir, run_key: str, wanted: Config, *, amend: bool) -> Config:
    """The settings of the run's current revision, once a start of these settings may go on with them, or amend them.

    Raises ConfigError naming every identity field in which the start differs; then every training field, or with
    `amend` what keeps these from being amended.
    """
    revision = current_revision(run)
    stored = config_of(run, revision)
    check_same_identity(run_key, stored, wanted)
    if not amend:
        check_same_training(run_key, stored, wanted, revision)
    elif differing(stored, wanted, "training"):
        check_amendment(run, run_key, stored, wanted)
    return stored


def refuse_to_amend_nothing(run: RunDir, run_key: str) -> None:
    """Raises ConfigError where there is no run to amend."""
    if not run.run_json.exists():
        raise ConfigError(f"--amend: there is no run {run_key} yet under {run.root.parent}; without --amend the same "
                          "command begins it")


def identity_payload(run_key: str, preset: str, config: Config, forked_from: ForkedFrom | None = None
                     ) -> dict[str, Any]:
    """What run.json of a new run holds, with a run uuid of its own."""
    lineage = {} if forked_from is None else {"forked_from": asdict(forked_from)}
    return {"run_uuid": uuid.uuid4().hex, "run_key": run_key, "preset": preset, **lineage,
            "config": config.model_dump(mode="json"), "kinds": field_kinds(), "consumers": list(CONSUMERS),
            "created_us": time.time_ns() // 1000}


def open_identity(run: RunDir, run_key: str, preset: str, config: Config, *, amend: bool = False) -> RunIdentity:
    """Create the run, or check that this start belongs to it, and record its amendment before anything else changes.

    Raises ConfigError (check_same_run, refuse_to_amend_nothing).
    """
    if amend:
        refuse_to_amend_nothing(run, run_key)
    put_if_absent(run.run_json, to_json(identity_payload(run_key, preset, config)))
    identity = read_identity(run)
    stored = check_same_run(run, run_key, config, amend=amend)
    if amend:
        put_revision(run, stored, config)
    return identity


def check_inputs(run: RunDir, digests: dict[str, str], rows: int | None = None) -> None:
    """Digests of model, tokenizer, chat template and data: written by the first start, equal at every later one.

    `rows`: prompts of the data, which the digest of the data covers; stored beside the digests for the audit. Raises
    ConfigError naming what changed under its path.
    """
    put_if_absent(run.inputs, to_json({"digests": digests, "rows": rows}))
    stored: dict[str, str] = read_json(run.inputs)["digests"]
    changed = [name for name in digests if stored.get(name) != digests[name]]
    if changed:
        raise ConfigError(f"{run.root}: {', '.join(changed)} changed since the run began (by digest); a run trains on "
                          "what it began with: put it back, or use another --run-key")


def prompt_rows(run: RunDir) -> int | None:
    """Prompts of the run's data, as the first start counted them; None before it, and where it did not say."""
    try:
        return read_json(run.inputs).get("rows")
    except FileNotFoundError:
        return None
