"""What a start does about the start before it: a flow run that was killed says Running until somebody ends it."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import httpx
from prefect import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from rl_core.run_dir import RunDir, numbered, read_json

LOOK_BACK = 10
"""Attempts: one that met a dead server could not see to the one before it."""


def end_flow_run_before(run: RunDir, attempt: int) -> str | None:
    """Set the flow runs of the attempts before this one to Crashed, where Prefect still believes that they run.

    A retry is a new attempt within the same flow run, which does run. A Prefect server that does not answer is no
    reason to train nothing: returns what could not be done, for people; the next start, and `headway doctor --fix`, do
    it then. None: all is done.
    """
    earlier = [stored for a, stored in numbered(run.attempts, r"attempt-(\d{6})\.json") if a < attempt][-LOOK_BACK:]
    ids = {read_json(stored)["prefect_run_id"] for stored in earlier} - {None, flow_run.get_id()}
    try:
        _crash(sorted(ids), attempt)
    except (httpx.HTTPError, OSError) as error:
        return f"Prefect did not answer ({type(error).__name__}: {error}): flow runs of attempts before this one may " \
               "say Running until the next start, or until `headway doctor --fix`"
    return None


def _crash(ids: Sequence[str], attempt: int) -> None:
    """Set those of these flow runs that are not over to Crashed."""
    if not ids:
        return
    with get_client(sync_client=True) as client:
        for before in ids:
            try:
                state = client.read_flow_run(UUID(before)).state
            except ObjectNotFound:
                continue
            if state is not None and not state.is_final():
                client.set_flow_run_state(
                    UUID(before), Crashed(message=f"its process ended without a word; attempt {attempt} goes on"),
                    force=True)
