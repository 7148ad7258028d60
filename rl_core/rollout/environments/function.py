"""Rows that a function of a user's makes: `data.train=./mine.py:rows` (docs/hooks.md 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.hooks.loading import hook


def made_rows(path: str, field: str, config: Config, size: int, *, held_out: bool, cwd: Path) -> list[dict[str, Any]]:
    """`rows(size, seed, held_out)`: at most `size` rows, held out or not. Raises DataError naming the function,
    ConfigError for one that may not be run."""
    function = hook("environment", field, path, cwd)
    try:
        found = function(size=size, seed=config.seed, held_out=held_out)
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"{field}: {path} raised {type(error).__name__}: {error}") from error
    return checked(found, size, f"{field}: {path}")


def checked(found: Any, size: int, name: str) -> list[dict[str, Any]]:
    """Rows as objects, at most `size` and at least one. Raises DataError naming the function and what it returned."""
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise DataError(f"{name}: the result is {type(found).__name__}; it must be a list of rows")
    rows = cast("Sequence[Any]", found)
    if not rows or len(rows) > size:
        raise DataError(f"{name}: {len(rows)} rows; there must be 1 to {size}")
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in cast("Mapping[Any, Any]", row)):
            shown = repr(cast(Any, row))[:80]
            raise DataError(f"{name}: row {i} is {shown}; a row is a dict, with `prompt` and `answer`")
    return [dict(cast("Mapping[str, Any]", row)) for row in rows]
