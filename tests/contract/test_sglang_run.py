"""Whole runs on real servers that Headway starts: learning goes on over swaps in flight, and over a server's death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from rl_core.records import read_record, recorded_steps
from rl_core.validation import read_validation, validated_steps
from rl_core.versions import read_versions
from tests.runs import Command, Home, processes_of, wait_until_gone
from tests.serving import ENGINE, PYTHON, ROOT

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
STEPS = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON}: no environment for a server; `make sglang` makes it, `make test-sglang` runs these")
    home = Home(tmp_path_factory.mktemp("sglang") / "home")
    yield home
    assert wait_until_gone(home, 10) == {}


def train(home: Home, key: str, *settings: str) -> Command:
    sets = [word for setting in settings for word in ("--set", setting)]
    return home.start("train", "--preset", "tiny-sglang-cpu", *sets, "--run-key", key, "--json", key=key, cwd=ROOT)


def servers_of(home: Home) -> list[int]:
    """Main processes of live servers."""
    return [pid for pid, command in processes_of(home).items()
            if "--served-model-name" in command and "warden.py" not in command]


def check_completed(home: Home, command: Command, steps: int) -> None:
    """Completed, every group trained once, log-probs those of the learner, answers by more than one version."""
    assert command.json["status"] == "completed" and command.json["steps"] == steps
    records = [read_record(command.run, step).metrics for step in recorded_steps(command.run)]
    assert max(record["train/mismatch_current_abs"] for record in records
               if record["train/mismatch_current_abs"] == record["train/mismatch_current_abs"]) < 1e-3
    assert sum(record["staleness/mixed"] > 0 for record in records) >= steps // 3
    assert len(read_versions(command.run)) == steps + 1
    audit = home.call("audit", command.run.root.name, "--json")
    assert audit.process.returncode == 0, audit.out


def test_a_run_learns_over_swaps_in_flight_and_over_the_death_of_its_server(home: Home) -> None:
    command = train(home, "one", f"total_steps={STEPS}", "model.warmup_steps=20", "validation.every=100",
                    "data.validation_size=32")
    command.wait_for_step(3)
    [server] = servers_of(home)
    os.kill(server, signal.SIGKILL)
    assert command.wait() == 0, command.said
    check_completed(home, command, STEPS)
    assert wait_until_gone(home, 5) == {}
    assert "ended: signal 9" in command.run.server_log("rollout-0", 0).read_text()


@pytest.mark.slow
def test_a_run_whose_weights_go_over_a_process_group_learns_as_any_other(home: Home) -> None:
    """Two learner ranks, gloo: the server reads no published file."""
    command = train(home, "group", f"total_steps={STEPS}", "model.warmup_steps=20", "validation.every=100",
                    "data.validation_size=32", "rollout.engine.transport=collective", "learner.ranks=2",
                    f"rollout.engine.server_args={[*ENGINE['server_args'], '--log-level-http', 'info']}")
    assert command.wait(600) == 0, command.said
    check_completed(home, command, STEPS)
    said = command.run.server_log("rollout-0", 0).read_text()
    assert said.count("POST /update_weights_from_distributed HTTP/1.1\" 200") >= STEPS
    assert "/update_weights_from_disk" not in said
    assert wait_until_gone(home, 5) == {}


@pytest.mark.slow
def test_a_run_validates_by_a_server_that_rollout_lends(home: Home) -> None:
    """Before, between and behind the steps."""
    command = train(home, "lent", f"total_steps={STEPS}", "model.warmup_steps=20", "validation.every=4",
                    "data.validation_size=64", "rollout.engine.replicas=2", "validation.engine=replica")
    assert command.wait(600) == 0, command.said
    check_completed(home, command, STEPS)
    records = [read_validation(command.run, step) for step in validated_steps(command.run)]
    versions = read_versions(command.run)
    assert len(records) >= 4 and {records[0]["step"], records[-1]["step"]} == {0, STEPS}
    assert all(versions[record["v"]].digest == record["digest"] and record["step"] == versions[record["v"]].step
               for record in records)
    assert command.json["accuracy_end"] == records[-1]["greedy_accuracy"]
    assert wait_until_gone(home, 5) == {}


KILLS = 10


@pytest.mark.slow
def test_ten_deaths_of_its_server_cost_a_run_nothing(home: Home) -> None:
    """While it starts, while it generates and while it swaps: at moments that are no multiples of anything."""
    command = train(home, "ten", "total_steps=60", "model.warmup_steps=20", "validation.every=100",
                    "data.validation_size=32", f"rollout.engine.restarts={KILLS}")
    command.wait_for_step(2)
    until = time.monotonic() + 900
    killed: set[int] = set()
    while len(killed) < KILLS and command.process.poll() is None and time.monotonic() < until:
        for server in set(servers_of(home)) - killed:
            time.sleep((0.3, 31.0, 24.7, 5.1, 28.9)[len(killed) % 5])
            os.kill(server, signal.SIGKILL)
            killed.add(server)
        time.sleep(0.2)
    assert command.wait(600) == 0, command.said
    assert len(killed) == KILLS
    check_completed(home, command, 60)
    assert wait_until_gone(home, 5) == {}
