"""The short form of `make test-services`: one set-up with the real servers, from `up` to `down`, and the faults that
cost no more than seconds. What takes minutes is in tests/services."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from rl_core.errors import DeadPart
from rl_core.nightly.nights import NightDir, read_outcome
from rl_core.records import recorded_steps
from rl_core.summary import stored_mlflow_run
from tasks import databases, servers, silent_runs
from tests.kept import NIGHT, SMALL, KeptHome, wait_until

STEPS = 300
"""Of a run that goes on while two servers are started again."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptHome]:
    kept_home = KeptHome.at(tmp_path_factory.mktemp("kept"))
    kept_home.up()
    yield kept_home
    kept_home.down()


def status_of(page: str, path: str, **headers: str) -> int:
    request = urllib.request.Request(page + path, b"{}", {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def test_a_run_of_a_deployment_completes_while_its_servers_are_killed(home: KeptHome) -> None:
    """Both come back at their addresses; an unknown preset fails with the names of those that exist."""
    deployed = home.call("deploy", "--cron", "0 2 * * *", "--json")
    assert deployed.process.returncode == 0, deployed.said
    assert {one["name"] for one in deployed.json["deployments"]} == {
        "train/adhoc", "nightly/nightly", "rerun/from-step", "replay/step"}
    unknown = home.submit("train/adhoc", preset="tiny-gpu")
    run = home.submit("train/adhoc", preset="tiny-cpu", run_key="short", overrides={**SMALL, "total_steps": STEPS})
    wait_until(lambda: home.run("short").record(2).exists(), 120, "step 2")
    home.kill("prefect", "mlflow")
    assert recorded_steps(home.run("short"))[-1] < STEPS - 20, "the servers were back before the run ended"
    assert home.wait_for_state(run, "COMPLETED")["run_count"] == 1
    message = home.wait_for_state(unknown, "FAILED")["state"]["message"]
    assert "tiny-gpu" in message and "tiny-cpu" in message
    mlflow_run = stored_mlflow_run(home.run("short"))
    assert mlflow_run is not None
    status, points = home.tracked(mlflow_run)
    assert status == "FINISHED" and set(points.values()) == {1}
    assert [step for name, step in sorted(points) if name == "reward/mean"] == list(range(STEPS))


def test_a_night_is_judged_and_a_second_one_beside_it_is_one_too_many(home: KeptHome) -> None:
    """One that is to be compared with a night that never was says so before it trains; it leaves the place to others.
    One without a validation is not promoted."""
    lost = home.submit("nightly/nightly", name="lost", baseline="nightly-1999-01-01", overrides=NIGHT)
    message = home.wait_for_state(lost, "FAILED")["state"]["message"]
    assert "baseline 'nightly-1999-01-01'" in message and "no such run" in message
    first = home.submit("nightly/nightly", name="short", overrides=NIGHT)
    wait_until(lambda: home.flow_run(first)["state_type"] == "RUNNING", 60, "the first night runs")
    second = home.submit("nightly/nightly", name="short", overrides=NIGHT)
    assert "concurrency limit" in home.wait_for_state(second, "CANCELLED")["state"]["message"]
    home.wait_for_state(first, "COMPLETED")
    blind = home.submit("nightly/nightly", name="short", overrides=NIGHT | {"data.validation": None})
    home.wait_for_state(blind, "COMPLETED")
    judged = {night.name: read_outcome(NightDir(night)) for night in (home.path / "nights").iterdir()}
    assert [one.verdict for _, one in sorted(judged.items())] == ["promote", "alarm"], judged
    version = mlflow(home, "registered-models/alias?name=short&alias=champion")["model_version"]
    assert (version["version"], {tag["key"]: tag["value"] for tag in version["tags"]}["headway.night"]) == (
        "1", min(judged))


def mlflow(home: KeptHome, path: str) -> Any:
    with urllib.request.urlopen(f"{home.mlflow_page}/api/2.0/mlflow/{path}", timeout=10) as answer:
        return json.loads(answer.read())


SILENT = {
    # flow, state, begun before the server's start, heard of before and since it, a process is here -> crashed
    "nobody heard of it since": ("train", "RUNNING", True, True, False, False, True),
    "not begun, and its worker is gone": ("nightly", "PENDING", True, False, False, False, True),
    "heard of since": ("train", "RUNNING", True, True, True, False, False),
    "its process is here": ("train", "RUNNING", True, True, False, True, False),
    "one that never says that it lives": ("train", "RUNNING", True, False, False, False, False),
    "begun since": ("train", "RUNNING", False, False, False, False, False),
    "a flow of others": ("theirs", "RUNNING", True, True, False, False, False),
    "of no worker's pool": ("train", "PENDING", True, False, False, False, False)}


def test_after_the_server_was_away_the_dead_are_crashed_and_the_living_are_not(home: KeptHome) -> None:
    def planted(case: str) -> str:
        flow, state, *_ = SILENT[case]
        return home.planted(flow, state, deployment="nightly/nightly" if flow == "nightly" else None)

    made = {case: planted(case) for case, row in SILENT.items() if row[2]}
    for case in [case for case, row in SILENT.items() if row[3]]:
        home.beat(made[case], datetime.now(UTC))
    since = datetime.now(UTC)
    made |= {case: planted(case) for case, row in SILENT.items() if not row[2]}
    for case in [case for case, row in SILENT.items() if row[4]]:
        home.beat(made[case], datetime.now(UTC))
    alive = {made[case] for case, row in SILENT.items() if row[5]}
    api, secret = f"{home.prefect_page}/api", servers.prefect_auth(home.path)
    crashed = silent_runs.crash_the_dead(api, secret, since, lambda run, name: run in alive)
    states = {case: home.flow_run(run)["state_type"] for case, run in made.items()}
    assert states == {case: "CRASHED" if row[6] else row[1] for case, row in SILENT.items()}
    assert len(crashed) == sum(row[6] for row in SILENT.values())
    assert "Retry goes on" in home.flow_run(made["nobody heard of it since"])["state"]["message"]


def test_a_server_that_does_not_answer_is_asked_again_later(home: KeptHome) -> None:
    """Silence of the server is no silence of a run: the supervisor looks again."""
    api = f"http://{servers.HOST}:{servers.free_port()}/api"
    with pytest.raises(DeadPart, match="did not answer"):
        silent_runs.crash_the_dead(api, "me:wrong", datetime.now(UTC), lambda run, name: False)
    with pytest.raises(DeadPart, match="answered 401"):
        silent_runs.crash_the_dead(f"{home.prefect_page}/api", "me:wrong", datetime.now(UTC), lambda run, name: False)


def test_a_server_that_starts_again_does_not_hold_its_own_absence_against_a_run(home: KeptHome) -> None:
    """What it would wait for is forgotten: the run has not been heard because nobody could hear it."""
    run = home.planted("train", "RUNNING")
    home.beat(run, datetime.now(UTC))
    wait_until(lambda: windows_of(home, run) > 0, 30, "the server waits for the next heartbeat")
    home.kill("prefect")
    assert windows_of(home, run) == 0


def windows_of(home: KeptHome, run: str) -> int:
    """Of the automations: until when the server wants to hear of the run."""
    with closing(sqlite3.connect(databases.file(home.path, "prefect"))) as database:
        return database.execute("select count(*) from automation_bucket where bucketing_key like ?",
                                (f"%{run}%",)).fetchone()[0]


def test_who_has_no_password_or_comes_from_another_page_is_refused(home: KeptHome) -> None:
    assert status_of(home.prefect_page, "/api/flow_runs/filter") == 401
    for path in ("/api/2.0/mlflow/experiments/search", "/v1/traces"):
        assert status_of(home.mlflow_page, path, Origin="http://evil.example") == 403


def test_what_a_killed_supervisor_leaves_is_named_and_taken_over(home: KeptHome) -> None:
    before = home.report()
    os.kill(before["supervisor"], signal.SIGKILL)
    wait_until(lambda: not home.report()["up"], 20, "the supervisor is gone")
    assert any("supervisor is gone" in text for text in home.call("services", "doctor", "--json").json["findings"])
    after = home.up()
    assert {name: one["pid"] for name, one in after["services"].items()} == {
        name: one["pid"] for name, one in before["services"].items()}
    assert databases.state(home.path, "prefect") == databases.state(home.path, "mlflow") == "current"


def test_what_is_ended_leaves_its_ports_and_one_that_others_take_is_named(home: KeptHome) -> None:
    home.down()
    assert not home.report()["up"]
    assert servers.is_free(home.prefect_port) and servers.is_free(home.mlflow_port)
    with closing(socket.create_server((servers.HOST, home.mlflow_port))):
        said = home.up(code=2)["err"]
    assert f"error: --mlflow-port {home.mlflow_port}: somebody else listens there" in said
    assert not home.report()["up"]
