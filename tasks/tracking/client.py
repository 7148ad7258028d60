"""Reaching MLflow: quiet, with retries of ours, and a sqlite database that stands whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.destination import Destination, redact_in

if TYPE_CHECKING:
    from mlflow import MlflowClient

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1", "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Retries are ours: MLflow's own would hold the thread for minutes while a server is down.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Set before mlflow is imported, unless the environment says otherwise."""


class TrackingFailed(RuntimeError):
    """MLflow could not be asked, or refused: says where, and what it answered."""


def open_client(uri: str) -> MlflowClient:
    """A client of the tracking store and model registry at `uri`, whose database is made where it is absent.

    Imports mlflow, which takes seconds. Raises what MLflow raises.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    make_database(uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def asked(where: Destination) -> Generator[MlflowClient]:
    """A client for a few calls that somebody waits for. Raises TrackingFailed, without passwords."""
    try:
        yield open_client(where.uri)
    except Exception as error:
        from mlflow.exceptions import MlflowException

        if not isinstance(error, MlflowException | OSError):
            raise
        raise TrackingFailed(f"MLflow at {where}: {redact_in(str(error), where.uri)}") from error


def make_database(uri: str) -> None:
    """Make a sqlite database that is not there yet beside its place, and link it there whole: MLflow builds one in many
    steps, and one that was killed in between can be opened by nobody again."""
    from mlflow import MlflowClient

    final = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or final.exists():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another run was quicker
            os.link(aside, final)
    finally:
        aside.unlink(missing_ok=True)


def upgrade_database(uri: str) -> None:
    """Bring a database of an older MLflow to the schema of this one; nothing where it is that already, or is empty."""
    from mlflow.store.db import utils

    engine = utils.create_sqlalchemy_engine_with_retry(uri)
    if not utils._is_empty_database(engine) \
            and utils._get_schema_version(engine) != utils._get_latest_schema_revision():
        utils._upgrade_db(engine)


def tracked_status(uri: str, run_id: str) -> str | None:
    """What MLflow says of a run: `RUNNING`, `FINISHED` ...; None where it cannot be asked, or does not know it."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        return str(MlflowClient(tracking_uri=uri).get_run(run_id).info.status)
    except (MlflowException, OSError):
        return None
