"""Taking a trained model away: the run by its key, and which of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rl_core.errors import ConfigError
from rl_core.export import DTYPES, Dtype, export
from rl_core.revisions import config_of, current_revision
from tasks.inspection import open_run
from tasks.paths import run_dir


def export_run(run_key: str, out: str, *, step: int | None = None, best: bool = False, by: str | None = None,
               dtype: str = "float32") -> dict[str, Any]:
    """Write weights of the run `run_key` as a Hugging Face directory; returns what was written (export.md 2).

    `best`: by the field `by`, else by the run's own `checkpoint.best`. Raises ConfigError, BrokenFile, OSError.
    """
    if step is not None and best:
        raise ConfigError(f"--step {step}: and --best exclude each other; give one of them")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r}: use {' or '.join(DTYPES)}")
    if not out:
        raise ConfigError("--out: must be a directory (got '')")
    run = run_dir(run_key)
    open_run(run, run_key)
    field = None
    if best:
        field = by or config_of(run, current_revision(run)).checkpoint.best
        if field is None:
            raise ConfigError("--best: the run has checkpoint.best=null; name a field, as in --by greedy_accuracy")
    return export(run, Path(out), step=step, best=field, dtype=cast(Dtype, dtype)).as_json()
