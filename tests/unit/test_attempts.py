"""A start looks after the flow runs of the attempts before it, as far as a Prefect server answers."""

from __future__ import annotations

import socket
import time
import uuid
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from rl_core.run_dir import OwnerLock, RunDir
from tasks.attempts import end_flow_run_before


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Of two attempts, the first of which a flow run of Prefect had begun."""
    made = RunDir(tmp_path / "run")
    for flow_run in (uuid.uuid4(), None):
        lock = OwnerLock(made)
        lock.next_attempt(0, None if flow_run is None else str(flow_run))
        lock.release()
    return made


def test_a_server_that_is_gone_keeps_no_start_from_its_run(run: RunDir) -> None:
    with socket.socket() as probe:  # nobody listens there, now or later
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}/api"
        begun = time.monotonic()
        with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
            told = end_flow_run_before(run, 2)
    assert told is not None and told.startswith("Prefect did not answer (ConnectError: ")
    assert "headway doctor --fix" in told
    assert time.monotonic() - begun < 5


def test_a_first_attempt_asks_nobody(run: RunDir) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        assert end_flow_run_before(run, 1) is None
