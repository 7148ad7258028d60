"""Reaching MLflow: quiet, with retries of ours, and a sqlite database that stands whole or not at all."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rl_core.errors import DeadPart
from rl_core.uris import redact_in
from tasks.destination import Destination
from tasks.waiting import waiting_aloud

if TYPE_CHECKING:
    from mlflow import MlflowClient

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1", "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with the password that is in it
    # Retries are ours: MLflow's own would hold the thread for minutes while a server is down.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "PGCONNECT_TIMEOUT": "10",
}
"""Set before mlflow is imported, unless the environment says otherwise."""
OPEN_TRIES = 2
"""Of MLflow, to open a database. It would try ten times, over 100 s, also where nobody listens."""

LOCKED_S, LOCKED_PAUSE_S = 120.0, 0.5
"""How long another writer of a sqlite database is waited for, and between two tries. Of each statement MLflow itself
waits up to 20 s for the lock."""
T = TypeVar("T")


class TrackingFailed(DeadPart):
    """MLflow could not be asked, or refused: says where, and what it answered."""


def open_client(uri: str) -> MlflowClient:
    """A client of the tracking store and model registry at `uri`, whose database is made where it is absent.

    Imports mlflow, which takes seconds. Raises what MLflow raises.
    """
    _hush(uri)
    from mlflow import MlflowClient

    make_database(uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _hush(uri: str) -> None:
    """Have MLflow say little and wait little. Before it is imported, when it reads its environment."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # It prints a traceback for each try that meets a lock: the error, which is told or tried again, holds all of it.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if not uri.startswith("http"):
        from mlflow.store.db import utils

        utils.MAX_RETRY_COUNT = OPEN_TRIES


def asked(where: Destination, work: Callable[[MlflowClient], T]) -> T:
    """What `work` returns: a few calls that somebody waits for. While another writer holds the sqlite database it is
    done again from its beginning, for up to LOCKED_S: once more must change nothing, wherever it was cut short.

    Raises TrackingFailed, without passwords.
    """
    until = time.monotonic() + LOCKED_S
    with waiting_aloud(f"MLflow at {where}", "an answer", LOCKED_S) as look:
        while True:
            look()
            try:
                return work(open_client(where.uri))
            except Exception as error:
                if is_locked(error):
                    if time.monotonic() < until:
                        time.sleep(LOCKED_PAUSE_S)
                        continue
                    raise TrackingFailed(f"MLflow at {where}: database is locked by another writer for {LOCKED_S:g} s "
                                         "now; end it, then the same command goes on") from error
                if not _is_trouble(error):
                    raise
                raise TrackingFailed(f"MLflow at {where}: {redact_in(str(error), where.uri)}") from error


def _is_trouble(error: Exception) -> bool:
    """Whether an error is of MLflow, or of what it reaches: it lets SQLAlchemy's through where a database cannot be
    opened, and ImportError where the driver of a database is not installed."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, MlflowException | SQLAlchemyError | ImportError | OSError)


def is_locked(error: BaseException) -> bool:
    """Whether a sqlite database, ours or that of a server, was held by another writer: nothing of that call is in it.
    """
    return "database is locked" in str(error) or "database table is locked" in str(error)


def make_database(uri: str) -> None:
    """Make a sqlite database that is not there yet beside its place, and link it there whole: MLflow builds one in many
    steps, and one that was killed in between can be opened by nobody again."""
    from mlflow import MlflowClient

    final = Path(uri.removeprefix("sqlite:///").partition("?")[0])
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
    _hush(uri)
    from mlflow import MlflowClient

    try:
        return str(MlflowClient(tracking_uri=uri).get_run(run_id).info.status)
    except Exception as error:
        if not _is_trouble(error) and not is_locked(error):
            raise
        return None
