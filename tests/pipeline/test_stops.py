"""Runs that are stopped or killed: what they say, what they leave, and that they can go on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import numbered
from tests.chaos.stack import check_finished, check_kept, pid_of
from tests.runs import Command, Home, processes_of, wait_until_gone

STEPS = 24
SETTINGS = (f"total_steps={STEPS}", "validation.every=12", "checkpoint.every=8", "learner.decay=constant")


def test_killed_in_the_middle_the_same_command_goes_on(home: Home) -> None:
    """A rollout worker, the learner, the owner, the validation engine: the short form of chaos/test_full_stack.py."""
    first = home.train("killed", *SETTINGS)
    for step, victim in ((2, "rollout"), (6, "learner"), (10, "owner")):
        first.wait_for_step(step)
        if victim == "owner":
            assert not has_torch(pid_of(home, first, "owner")), "no answer and no file made the owner import torch"
        kill(home, first, victim)
    first.process.wait()
    alive = processes_of(home)
    assert any("raylet" in command for command in alive.values()), "services outlive their owner for a quick restart"
    second = home.train("killed", *SETTINGS)
    second.wait_for_step(13)
    kill(home, second, "validation")
    assert second.wait() == 0, second.said
    assert second.err == ""
    assert {read_record(second.run, step).attempt for step in range(STEPS)} == {1, 2}
    check_finished(home, second, STEPS)
    assert home.states("killed") == (["CRASHED", "COMPLETED"], ["FINISHED"])


def has_torch(pid: int | None) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def kill(home: Home, command: Command, victim: str) -> None:
    pid = pid_of(home, command, victim)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


STOPS = {"Ctrl-C": pytest.param(signal.SIGINT, 130, "SIGINT", 1),
         "SIGTERM": pytest.param(signal.SIGTERM, 143, "SIGTERM", 1),
         "SIGTERM after a take-over": pytest.param(signal.SIGTERM, 143, "SIGTERM", 2, marks=pytest.mark.slow)}


@pytest.mark.parametrize(("number", "code", "name", "starts"), STOPS.values(), ids=STOPS)
def test_a_stop_ends_everything_in_ten_seconds_and_says_how_to_go_on(home: Home, number: int, code: int, name: str,
                                                                     starts: int) -> None:
    key = f"stopped-{name.lower()}-{starts}"
    command = home.train(key, "total_steps=2000", "data.validation=null")
    command.wait_for_tracking()
    if name == "SIGTERM":
        a_second_start_is_refused_and_disturbs_nothing(home, command)
    if starts == 2:
        command = taken_over(home, command)
    os.killpg(command.process.pid, number)  # as a terminal does: to the whole foreground group
    begun = time.monotonic()
    assert command.wait(30) == code, command.said
    assert wait_until_gone(home, max(0.0, 10 - (time.monotonic() - begun))) == {}
    assert command.err == ""
    *said, last = [line for line in command.out[command.out.index("stopped by"):].splitlines() if line]
    assert json.loads(last)["status"] == "cancelled" and json.loads(last)["wall_s"] > 0
    assert "--json" not in said[1]
    assert said[0].startswith(f"stopped by {name} after ") and len(said) <= 5
    assert f"--run-key {key}" in said[1]
    flows, runs = home.states(key)
    assert (flows, runs) == (["CANCELLED"] * starts, ["KILLED"])
    assert steps_behind(command) <= 5, "a last checkpoint fits into the ten seconds (checkpoint.on_stop_after)"
    if starts == 2:
        done = recorded_steps(command.run)
        assert {read_record(command.run, step).attempt for step in done} == {1, 2}
        check_kept(home, command, len(done), "KILLED")


def steps_behind(command: Command) -> int:
    """Recorded steps that the newest checkpoint does not hold."""
    newest = max((n for n, _ in numbered(command.run.checkpoints, r"n-(\d{9})")), default=0)
    return len(recorded_steps(command.run)) - newest


def a_second_start_is_refused_and_disturbs_nothing(home: Home, first: Command) -> None:
    second = home.train(first.run.root.name, "total_steps=2000", "data.validation=null")
    assert second.wait(60) == 2
    assert second.err.startswith("error: RunIsAlive: ")
    assert f"the run is alive, owned by pid {first.process.pid}" in second.err
    first.wait_for_step(recorded_steps(first.run)[-1] + 3)  # it goes on, its services are still there


def taken_over(home: Home, first: Command) -> Command:
    """Another terminal with --take-over: the first start ends as by SIGTERM, the second goes on behind its steps."""
    key = first.run.root.name
    second = home.start("train", "--run-key", key, "--take-over", "--json", key=key)
    assert first.wait(60) == 143, first.said
    assert first.json["status"] == "cancelled" and "--take-over" not in first.out
    done = recorded_steps(first.run)
    second.wait_for_step(done[-1] + 3)
    assert recorded_steps(first.run)[:len(done)] == done == list(range(len(done)))
    second.wait_for_tracking()
    return second


@pytest.mark.slow
def test_max_wall_time_ends_a_run_in_order_and_a_doctor_mends_what_a_kill_leaves(home: Home) -> None:
    settings = ("total_steps=2000", "validation.every=1000", "checkpoint.every=1000", "checkpoint.on_stop_after=0")
    first = home.train("timed", *settings, "max_wall_time=15")
    begun = time.monotonic()
    assert first.wait(90) == 124, first.said
    assert time.monotonic() - begun < 15 + 25 and "stopped by max_wall_time after" in first.out
    assert (first.json["status"], first.err, steps_behind(first)) == ("cancelled", "", 0)
    assert wait_until_gone(home, 5) == {}
    assert home.call("doctor", "timed").process.returncode == 0
    done = recorded_steps(first.run)
    assert done

    second = home.start("train", "--run-key", "timed", "--set", "max_wall_time=null", "--json", key="timed")
    second.wait_for_step(done[-1] + 3)
    second.wait_for_tracking()
    before = processes_of(home)
    looked = home.call("doctor", "timed", "--json")
    assert looked.process.returncode == 0, looked.out
    report = looked.json["runs"][0]
    assert report["owner"]["pid"] == second.process.pid and report["alive"] and report["state"] == "training"
    assert {actor["actor"] for actor in report["actors"]} == {"learner/0", "rollout/0", "validation/0"}
    assert all(actor["alive"] for actor in report["actors"])
    known = {member["pid"] for member in report["processes"]}
    assert {actor["pid"] for actor in report["actors"]} <= known
    stayed = set(before) & set(processes_of(home))  # Ray ends some that it has no use for
    assert known >= stayed - {second.process.pid}
    assert second.process.pid not in known
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait()
    left = set(processes_of(home))
    assert {actor["pid"] for actor in report["actors"]} <= left <= known, "kept for a quick restart"
    wrong = home.call("doctor", "timed")
    assert wrong.process.returncode == 1
    assert "Prefect says RUNNING of attempt 2, which has no process; --fix mends it" in wrong.out
    mended = home.call("doctor", "timed", "--fix")
    assert mended.process.returncode == 0, mended.said
    assert "Prefect: flow run of attempt 2 is Crashed, was RUNNING" in mended.out
    assert processes_of(home) == {}
    assert home.states("timed") == (["CANCELLED", "CRASHED"], ["KILLED"])
