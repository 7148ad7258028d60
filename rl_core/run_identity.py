"""run.json: what makes this run this run. Written once; every later start is checked against it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from rl_core.config import Config, field_kinds
from rl_core.errors import BrokenFile, ConfigError
from rl_core.plan import differing
from rl_core.run_dir import RunDir, put_if_absent, read_json, to_json

CONSUMERS = ("learner",)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    run_uuid: str
    run_key: str
    preset: str
    config: Config
    """As the run was created: identity and training fields of every later start are these."""
    created_us: int


def read_identity(run: RunDir) -> RunIdentity:
    """Raises FileNotFoundError where there is no run, BrokenFile for one that this Headway cannot read."""
    payload = read_json(run.run_json)
    try:
        return RunIdentity(run_uuid=payload["run_uuid"], run_key=payload["run_key"], preset=payload["preset"],
                           config=Config.model_validate(payload["config"]), created_us=payload["created_us"])
    except (KeyError, ValueError) as error:
        raise BrokenFile(f"{run.run_json}: not the settings of a run of this Headway ({error}); use another "
                         "--run-key") from error


def check_same_run(run_key: str, stored: Config, wanted: Config) -> None:
    """Raises ConfigError naming every identity field, then every training field, in which a resume differs."""
    for kind, remedy in (("identity", "another run needs another --run-key"),
                         ("training", "take the run's own value, or another --run-key")):
        fields = differing(stored, wanted, kind)
        if fields:
            listed = "; ".join(f"{name} is {was!r}, asked for {now!r}" for name, (was, now) in fields.items())
            raise ConfigError(f"run {run_key} exists with other {kind} fields: {listed}. "
                              f"{remedy[0].upper()}{remedy[1:]}.")


def open_identity(run: RunDir, run_key: str, preset: str, config: Config) -> RunIdentity:
    """Create the run, or check that this start belongs to it. Raises ConfigError (check_same_run)."""
    payload: dict[str, Any] = {"run_uuid": uuid.uuid4().hex, "run_key": run_key, "preset": preset,
                               "config": config.model_dump(mode="json"), "kinds": field_kinds(),
                               "consumers": list(CONSUMERS), "created_us": time.time_ns() // 1000}
    put_if_absent(run.run_json, to_json(payload))
    stored = read_identity(run)
    check_same_run(run_key, stored.config, config)
    return stored


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
