"""Runs that are stopped, killed, or broken from outside: what they say, what they leave, and that they can go on."""

from __future__ import annotations

import collections
import json
import os
import signal
import sqlite3
import time

import pytest

from rl_core.experience.ledger import claimed_steps, read_claim
from rl_core.learner.learner import fold_claims
from rl_core.records import read_record, recorded_steps
from rl_core.run_identity import read_identity
from tests.runs import Command, Home, processes_of, wait_until_gone

STEPS = 24
SETTINGS = (f"total_steps={STEPS}", "validation.every=12", "checkpoint.every=8", "learner.decay=constant")


def states(home: Home, key: str) -> tuple[list[str], list[str]]:
    """State types of the run's flow runs in Prefect, oldest first; statuses of its runs in MLflow."""
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        flows = [row[0] for row in database.execute(
            "select state_type from flow_run where name = ? order by created", (key,))]
    with sqlite3.connect(home.path / "mlflow" / "mlflow.db") as database:
        runs = [row[0] for row in database.execute(
            "select status from runs join tags using (run_uuid) where key = 'mlflow.runName' and value = ?", (key,))]
    return flows, runs


def test_killed_in_the_middle_the_same_command_goes_on(home: Home) -> None:
    first = home.train("killed", *SETTINGS)
    first.wait_for_step(10)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    alive = processes_of(home)
    assert any("raylet" in command for command in alive.values()), "services outlive their owner for a quick restart"
    second = home.train("killed", *SETTINGS)
    assert second.wait() == 0, (second.out, second.err)
    assert (second.json["status"], second.json["steps"], second.err) == ("completed", STEPS, "")
    run = second.run
    assert recorded_steps(run) == list(range(STEPS))
    assert list(run.records.glob("*divergent*")) == []
    digest = read_record(run, STEPS - 1).weights_digest
    assert fold_claims(str(run.root), read_identity(run).config) == digest
    assert home.call("audit", "killed").process.returncode == 0
    flows, runs = states(home, "killed")
    assert flows == ["CRASHED", "COMPLETED"]
    assert runs == ["FINISHED"]
    with sqlite3.connect(home.path / "mlflow" / "mlflow.db") as database:
        points = collections.Counter(database.execute(
            "select key, step from metrics where run_uuid = ?", (second.json["mlflow_run_id"],)))
    assert set(points.values()) == {1}
    assert {step for key, step in points if key == "reward/mean"} == set(range(STEPS))
    assert wait_until_gone(home, 10) == {}


STOPS = {"Ctrl-C": (signal.SIGINT, 130, "SIGINT"), "SIGTERM": (signal.SIGTERM, 143, "SIGTERM")}


@pytest.mark.parametrize(("number", "code", "name"), STOPS.values(), ids=STOPS)
def test_a_stop_ends_everything_in_ten_seconds_and_says_how_to_go_on(home: Home, number: int, code: int,
                                                                     name: str) -> None:
    key = f"stopped-{name.lower()}"
    command = home.train(key, "total_steps=2000", "validation.every=1000")
    command.wait_for_tracking()
    a_second_start_is_refused_and_disturbs_nothing(home, command)
    os.killpg(command.process.pid, number)  # as a terminal does: to the whole foreground group
    begun = time.monotonic()
    assert command.wait(30) == code, (command.out, command.err)
    assert wait_until_gone(home, max(0.0, 10 - (time.monotonic() - begun))) == {}
    assert command.err == ""
    *said, last = [line for line in command.out[command.out.index("stopped by"):].splitlines() if line]
    assert json.loads(last)["status"] == "cancelled" and json.loads(last)["wall_s"] > 0
    assert "--json" not in said[1]
    assert said[0].startswith(f"stopped by {name} after ") and len(said) <= 5
    assert f"--run-key {key}" in said[1]
    flows, runs = states(home, key)
    assert (flows, runs) == (["CANCELLED"], ["KILLED"])


def a_second_start_is_refused_and_disturbs_nothing(home: Home, first: Command) -> None:
    second = home.train(first.run.root.name, "total_steps=2000", "validation.every=1000")
    assert second.wait(60) == 2
    assert f"the run is alive, owned by pid {first.process.pid}" in second.err
    first.wait_for_step(recorded_steps(first.run)[-1] + 3)  # it goes on, its services are still there


def break_step(command: Command) -> str:
    """A byte flipped in the shards of every claim that has no record yet, until the learner reads one of them."""
    run, spoiled, until = command.run, set[str](), time.monotonic() + 30
    while not run.result.exists() and time.monotonic() < until:
        step = claimed_steps(run)[-1]
        if run.record(step).exists():
            continue
        for group in read_claim(run, step).groups:
            path = run.shard(group.stream, group.seq)
            if str(path) not in spoiled:
                spoiled.add(str(path))
                raw = bytearray(path.read_bytes())
                raw[len(raw) // 2] ^= 1
                path.write_bytes(raw)
    return "ClaimedShardCorrupt"


def break_pump(command: Command) -> str:
    """An outcome that is not JSON: the pump's listing raises."""
    command.run.outcomes.joinpath("e0-p0-t0.json").write_text("not JSON")
    return "BrokenFile"


BREAKS = {"step": break_step, "pump": break_pump}


@pytest.mark.parametrize("where", BREAKS)
def test_an_exception_ends_the_run_failed_with_its_first_cause(home: Home, where: str) -> None:
    key = f"broken-{where}"
    command = home.train(key, "total_steps=2000", "validation.every=1000")
    command.wait_for_tracking()
    cause = BREAKS[where](command)
    begun = time.monotonic()
    assert command.wait(60) == 1, (command.out, command.err)
    assert time.monotonic() - begun <= 10 + 4, "Failed within 10 s of the exception, which comes within 2 s of listing"
    assert f"failed: {cause}" in command.out
    assert command.err == ""
    assert command.json["status"] == "failed"
    flows, runs = states(home, key)
    assert (flows, runs) == (["FAILED"], ["FAILED"])
    assert home.call("status", key, "--json").json["cause"].startswith(cause)
    assert wait_until_gone(home, 10) == {}
