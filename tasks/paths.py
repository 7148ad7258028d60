"""Where runs lie and what they are called."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from rl_core.errors import ConfigError
from rl_core.run_dir import RunDir

KEY_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-~")

KEY_LENGTH = 100


def headway_home() -> Path:
    """Where runs, caches and databases lie: HEADWAY_HOME, else ~/.headway."""
    return Path(os.environ.get("HEADWAY_HOME") or Path.home() / ".headway").expanduser().resolve()


def run_dir(run_key: str) -> RunDir:
    """The directory of a run by its key. Raises ConfigError for a key that is no plain name."""
    if not run_key or run_key[0] in ".-" or any(c not in KEY_LETTERS for c in run_key) or len(run_key) > KEY_LENGTH:
        raise ConfigError(f"--run-key {run_key!r}: use at most {KEY_LENGTH} letters, digits and . _ - ~, a letter or "
                          "digit first")
    return RunDir(headway_home() / "runs" / run_key)


def new_run_key(preset: str, flow_run_id: str | None = None) -> str:
    """`tiny-cpu-20260131-074512`: the preset and the time; of a flow run the last digits of its id, which a retry of it
    has again."""
    name = "".join(c if c in KEY_LETTERS else "-" for c in Path(preset).stem).lstrip(".-")[:60] or "run"
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}" if flow_run_id is None else f"{name}-{flow_run_id[-12:]}"
