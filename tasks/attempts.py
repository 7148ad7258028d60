"""What a start does about the start before it: a flow run that was killed says Running until somebody ends it."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

from prefect import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from rl_core.run_dir import RunDir, read_json


def end_flow_run_before(run: RunDir, attempt: int) -> None:
    """Set the flow run of the attempt before this one to Crashed, if Prefect still believes that it runs."""
    with suppress(FileNotFoundError, ObjectNotFound):
        before = read_json(run.attempt(attempt - 1))["prefect_run_id"]
        if before is None:
            return
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(before)).state
            if state is not None and not state.is_final():
                client.set_flow_run_state(
                    UUID(before), Crashed(message=f"its process ended without a word; attempt {attempt} goes on"),
                    force=True)
