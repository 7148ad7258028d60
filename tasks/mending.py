"""`headway doctor --fix`: what a dead owner left is ended, and Prefect and MLflow are told. Never a live owner's.

The run is owned while this is done, so that no start comes in between.
"""

from __future__ import annotations

import time

from rl_core.config import Config
from rl_core.errors import DeadPart, RunIsAlive
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import OwnerLock, RunDir, newest_attempt
from rl_core.run_identity import read_identity
from tasks import servers, services
from tasks.destination import destination
from tasks.diagnosis import FINAL, STARTING_S, flow_run_of, flow_run_state, prefect_is_away, tracked_as
from tasks.inspection import open_run, read_result
from tasks.paths import headway_home, run_dir

MLFLOW_S = 20.0
LOOK_S = 0.2


def mend(run_key: str) -> list[str]:
    """Mend what may be mended of one run; returns what was done, or why nothing was, a line each."""
    run = run_dir(run_key)
    open_run(run, run_key)
    if not _is_silent(run):
        return ["nothing: an owner makes itself heard"]
    try:
        lock = OwnerLock(run)
    except RunIsAlive as error:
        return [f"nothing: {error}"]
    try:
        if (heard := services.heard_s(run.services)) is not None and heard <= STARTING_S:
            return ["nothing: an owner makes itself heard"]  # one that was starting before this owned the run
        return _mend(run, config_of(run, current_revision(run)))
    finally:
        lock.release()


def _is_silent(run: RunDir) -> bool:
    """Whether nobody is heard of for longer than a live owner is silent; waits for that where it is not long ago."""
    first = services.heard_s(run.services)
    if first is None:
        return True
    until = time.monotonic() + STARTING_S - first + 1.0
    while (heard := services.heard_s(run.services)) is not None and heard <= STARTING_S:
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    return True


def _mend(run: RunDir, config: Config) -> list[str]:
    done: list[str] = []
    attempt = newest_attempt(run)
    killed = attempt > 0 and read_result(run).get("attempt") != attempt
    if killed and (said := _crash_flow_run(run, config, attempt)) is not None:
        done.append(said)  # first: its server may be among what is ended
    elif killed and (said := prefect_is_away(run, config, attempt)) is not None:
        done.append(f"not done: {said}")
    try:
        if ended := services.end_abandoned(run, config.deadlines.service_start_s):
            done.append(f"ended {len(ended)} processes: "
                        + ", ".join(f"{member.what} (pid {member.pid})" for member in ended))
    except DeadPart as error:
        done.append(f"not done: {error}")
    if killed and tracked_as(run, config) == "RUNNING":
        done.append(_end_tracked(run, config))
    return done


def _crash_flow_run(run: RunDir, config: Config, attempt: int) -> str | None:
    """Set the flow run of a killed attempt to Crashed, if Prefect still believes that it runs."""
    state, flow_run = flow_run_state(run, config, attempt), flow_run_of(run, attempt)
    if state is None or state in FINAL:
        return None
    server = services.prefect_of(run.services, headway_home(), isolated=config.isolated)
    assert server is not None and flow_run is not None
    answer = servers.prefect_call(*server, "POST", f"/flow_runs/{flow_run}/set_state", {"force": True, "state": {
        "type": "CRASHED", "name": "Crashed", "message": "its process ended without a word; found by headway doctor"}})
    if answer is None or answer.get("status") != "ACCEPT":
        return f"not done: Prefect did not take Crashed for flow run {flow_run}"
    return f"Prefect: flow run of attempt {attempt} is Crashed, was {state}"


def _end_tracked(run: RunDir, config: Config) -> str:
    """What MLflow misses is replayed, and the run is KILLED there."""
    from tasks.tracking import Tracker

    identity = read_identity(run)
    tracker = Tracker(run, config, destination(config, headway_home()), run_uuid=identity.run_uuid,
                      run_key=identity.run_key)
    tracker.start()
    if tracker.finish("KILLED", deadline_s=MLFLOW_S):
        return "MLflow: the run is KILLED, was RUNNING; what it missed was replayed"
    return f"not done: {tracker.trouble or 'MLflow did not answer in time'}"
