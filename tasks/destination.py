"""Where a run is tracked, and its settings as MLflow shows them. Known before anything starts; imports no mlflow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rl_core.config import Config
from rl_core.errors import ConfigError, refuse
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import RunDir
from rl_core.uris import is_uri, redact
from tasks import databases, kept
from tasks.paths import headway_home


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a run is tracked, and why there."""

    uri: str
    artifacts: str | None
    """Artifact location of a new experiment; None leaves it to the server."""
    why: str
    page: str | None = None
    """Address of a server that shows what is tracked; None where none is known to be up."""

    def __str__(self) -> str:
        return f"{redact(self.uri)} ({self.why})"


def destination(config: Config, home: Path, environ: Mapping[str, str] = os.environ) -> Destination:
    """`tracking.uri`, else MLFLOW_TRACKING_URI unless the run is isolated, else the database of `home`. Starts nothing.

    An address of the server that `headway services up` keeps means its database: a run writes there whether the server
    is up or not, and finds its MLflow run again. `tracking.uri=env:NAME` is what the variable holds. Raises ConfigError
    for a variable that is not there, and for a bare path, which MLflow would take for its retired file store.
    """
    ambient = None if config.isolated else environ.get("MLFLOW_TRACKING_URI")
    uri, why = (config.tracking.uri, "tracking.uri") if config.tracking.uri else (ambient, "MLFLOW_TRACKING_URI")
    if uri and why == "tracking.uri" and uri.startswith("env:"):
        uri = _held(uri, environ)
    root = home.resolve() / "mlflow"
    if not uri or (why == "MLFLOW_TRACKING_URI" and uri.rstrip("/") == kept.address(home, "mlflow")):
        own = "default" if databases.is_sqlite(home, "mlflow") else "chosen by `headway services up`"
        return Destination(uri=databases.url(home, "mlflow"), artifacts=(root / "artifacts").as_uri(), why=own,
                           page=kept.address(home, "mlflow"))
    if "://" not in uri:
        raise ConfigError(f"{why} is {uri!r}; write sqlite:////path/mlflow.db or http://host:port")
    if uri.startswith("http"):
        return Destination(uri=uri, artifacts=None, why=why, page=redact(uri).rstrip("/"))
    return Destination(uri=uri, artifacts=(root / "artifacts").as_uri(), why=why)


def _held(named: str, environ: Mapping[str, str]) -> str:
    """The URI in the variable of `env:NAME`. Raises ConfigError, which says nothing of what the variable holds."""
    name = named.removeprefix("env:")
    uri = environ.get(name, "")
    if not uri:
        refuse("tracking.uri", named, f"there is no variable {name} in the environment, or it is empty")
    if not is_uri(uri):
        refuse("tracking.uri", named, f"the variable {name} holds no URI; write sqlite:////path/mlflow.db, "
               "http://user:password@host:port or postgresql://user:password@host:port/database into it, and what is "
               "special in the password as %2F")
    return uri


def destination_of(run: RunDir) -> Destination:
    """Where a run that exists is tracked."""
    return destination(config_of(run, current_revision(run)), headway_home())


def resolved(config: Config) -> dict[str, Any]:
    """All settings as plain values, without passwords."""
    tree = config.model_dump(mode="json")
    if tree["tracking"]["uri"]:
        tree["tracking"]["uri"] = redact(tree["tracking"]["uri"])
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as MLflow params: `{"learner": {"lr": 0.001}}` -> `{"learner.lr": "0.001"}`."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return flat
