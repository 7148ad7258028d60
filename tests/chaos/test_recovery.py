"""Whole runs whose recovery is killed, twice, and whose disk quota is used up: both complete."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress

import pytest

from rl_core.experience.discovery import RESERVE_BYTES
from rl_core.experience.ledger import retired_below
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import newest_attempt, numbered
from tests.chaos.stack import check_finished
from tests.runs import Command, Home, processes_of, wait_until_gone

pytestmark = pytest.mark.slow
"""Six starts. `make chaos` runs it."""

SETTINGS = ("groups_per_step=4", "group_size=4", "validation.every=1000", "data.size=4096", "data.validation=null",
            "model.warmup_steps=0", "learner.loss.entropy_coef=0.05", "learner.decay=constant")


def kill_all(home: Home, command: Command) -> None:
    """SIGKILL to owner, actors and services, as when a machine goes down."""
    while left := processes_of(home):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until_gone(home, 1)
    command.wait()


def wait_for_replay(command: Command, steps: int) -> None:
    """Until this start has trained so many recorded steps again, and is still about it."""
    until = time.monotonic() + 120
    while True:
        status = json.loads(command.run.status.read_text())
        ours = status["pid"] == command.process.pid  # else that of the start before it
        if ours and status["state"] == "replaying" and status["replayed"][0] >= steps:
            return
        assert command.process.poll() is None, command.process.communicate()
        assert time.monotonic() < until and not (ours and status["state"] == "training"), status
        time.sleep(0.01)


def test_a_recovery_that_is_killed_twice_is_begun_again_and_loses_nothing(home: Home) -> None:
    steps, settings = 160, (*SETTINGS, "total_steps=160", "checkpoint.every=1000")
    command = home.train("again", *settings)
    command.wait_for_step(100)  # no checkpoint: all of them are trained again by a start
    kill_all(home, command)
    run, records = command.run, {}
    for step in recorded_steps(run):
        records[step] = run.record(step).read_bytes()
    for crash in (1, 2):
        command = home.train("again", *settings)
        wait_for_replay(command, 5)
        kill_all(home, command)
        assert json.loads(run.status.read_text())["state"] == "replaying", "killed in the middle of it"
        assert (newest_attempt(run), recorded_steps(run)) == (1 + crash, sorted(records))
    command = home.train("again", *settings)
    assert command.wait() == 0, command.said
    assert {step: run.record(step).read_bytes() for step in records} == records
    assert {read_record(run, step).attempt for step in range(len(records), steps)} == {4}
    check_finished(home, command, steps)


def smallest_quota(home: Home, settings: tuple[str, ...]) -> int:
    """What the plan asks for at least."""
    quota = 1
    while True:
        sets = [word for one in (*settings, f"storage.bytes_quota={quota}") for word in ("--set", one)]
        planned = home.call("plan", "--preset", "tiny-cpu", *sets)
        if planned.process.returncode == 0:
            return quota
        asked = re.search(r"use at least (\d+)", planned.err)
        assert asked is not None and int(asked[1]) > quota, planned.err
        quota = int(asked[1])


def test_a_quota_that_is_used_up_makes_a_checkpoint_at_once_and_the_run_completes(home: Home) -> None:
    """Shards of one group each take several times what the plan reckons with, and nothing is retired by schedule."""
    steps, every = 150, 16
    settings = (*SETTINGS, f"total_steps={steps}", f"checkpoint.every={every}", "storage.shard_groups=1",
                "model.hidden=32", "model.layers=1", "retention.replay=all")
    quota = smallest_quota(home, settings)
    command, most, forced = home.train("full-quota", *settings, f"storage.bytes_quota={quota}"), 0, set[int]()
    run, notes = command.run, set[str]()
    while command.process.poll() is None:
        most = max(most, sum(size_of(path) for path in run.streams.glob("*/*.arrow")))
        forced |= {n for n, _ in numbered(run.checkpoints, r"n-(\d{9})") if n % every and n != steps}
        with suppress(OSError, ValueError):
            notes.add(json.loads(run.status.read_text()).get("note") or "")
        time.sleep(0.05)
    assert command.wait() == 0, command.said
    landed = sum(len(list(stream.glob("*.arrow"))) for stream in run.streams.iterdir())
    print(f"quota {quota}, for shards {quota - RESERVE_BYTES}; most in shards {most}; forced checkpoints {forced}; "
          f"{landed} shards at the end, steps before {retired_below(run)} retired")
    assert forced, "a checkpoint that no schedule asks for"
    assert most <= quota - RESERVE_BYTES
    assert any(re.fullmatch(r"storage\.bytes_quota is used up: \d+ shards of steps before \d+ are retired; these steps "
                            r"cannot be trained again", note) for note in notes), notes
    first = retired_below(run)
    assert every <= first < steps
    outside = home.call("replay", "full-quota", "--step", "0")
    assert outside.process.returncode == 2 and outside.err.startswith("error: ReplayUnavailable: step 0"), outside.err
    assert recorded_steps(run) == list(range(steps)) and list(run.records.glob("*divergent*")) == []
    inside = home.call("replay", "full-quota", "--steps", f"{steps - 2}:{steps}", "--json")
    assert inside.process.returncode == 0 and inside.json["identical"] == 2, inside.said
    audit = home.call("audit", "full-quota", "--json")
    assert audit.process.returncode == 0 and audit.json["positions"]["lost"] == 0, audit.out
    assert audit.json["positions"]["trained"] == steps * 4
    assert wait_until_gone(home, 10) == {}


def size_of(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:  # retired meanwhile
        return 0
