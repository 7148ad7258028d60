"""What a start does about the start before it: a flow run that was killed says Running until somebody ends it."""

from __future__ import annotations

from uuid import UUID

from prefect import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from rl_core.run_dir import RunDir, numbered, read_json

LOOK_BACK = 10
"""Attempts: one that met a dead server could not see to the one before it."""


def end_flow_run_before(run: RunDir, attempt: int) -> None:
    """Set the flow runs of the attempts before this one to Crashed, where Prefect still believes that they run.

    A retry is a new attempt within the same flow run, which does run.
    """
    earlier = [stored for a, stored in numbered(run.attempts, r"attempt-(\d{6})\.json") if a < attempt][-LOOK_BACK:]
    ids = {read_json(stored)["prefect_run_id"] for stored in earlier} - {None, flow_run.get_id()}
    if not ids:
        return
    with get_client(sync_client=True) as client:
        for before in sorted(ids):
            try:
                state = client.read_flow_run(UUID(before)).state
            except ObjectNotFound:
                continue
            if state is not None and not state.is_final():
                client.set_flow_run_state(
                    UUID(before), Crashed(message=f"its process ended without a word; attempt {attempt} goes on"),
                    force=True)
