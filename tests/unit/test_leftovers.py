"""Which processes belong to a run: real processes that carry its mark, write its actors' logs, or merely look at it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.config import DeadlineConfig
from rl_core.run_dir import RunDir
from tasks import keeper, leftovers, services
from tasks.leftovers import members
from tasks.servers import MARK

pytestmark = pytest.mark.skipif(not keeper.PROC, reason="elsewhere only services.json tells")
PARENT = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"


class Processes:
    """Started by a test, ended with it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.started: list[subprocess.Popen[str]] = []

    def sleep(self, *, mark: Path | None = None, log: Path | None = None, session: bool = False) -> int:
        env = dict(os.environ) | ({MARK: str(mark)} if mark is not None else {})
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with open(log or os.devnull, "a") as out:
            self.started.append(subprocess.Popen(["sleep", "60"], env=env, stdout=out, stderr=out, text=True,
                                                 start_new_session=session))
        return self.started[-1].pid

    def parent(self) -> tuple[int, int]:
        """A marked leader of a session, and its child, which is not marked any more."""
        code = f"import os; os.environ.pop('{MARK}'); {PARENT}"
        self.started.append(subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: str(
            self.run.services)}, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert self.started[-1].stdout is not None
        return self.started[-1].pid, int(self.started[-1].stdout.readline())

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "k")
    made.services.mkdir(parents=True)
    return made


@pytest.fixture
def processes(run: RunDir) -> Iterator[Processes]:
    made = Processes(run)
    yield made
    made.end()


def whats(run: RunDir) -> dict[int, str]:
    return {member.pid: member.what for member in members(run)}


def test_marked_ones_and_their_children_belong_to_the_run_and_others_do_not(run: RunDir, processes: Processes,
                                                                            tmp_path: Path) -> None:
    marked = processes.sleep(mark=run.services)
    leader, child = processes.parent()
    actor = processes.sleep(log=run.logs / "rollout-1.log")
    server = processes.sleep(log=run.server_log("rollout-1", 2))
    processes.sleep(mark=tmp_path / "runs" / "k2" / "services")
    processes.sleep(log=run.logs / "mine.log")  # a person keeps notes beside the logs
    with subprocess.Popen(["tail", "-f", str(run.logs / "rollout-1.log")], stdout=subprocess.DEVNULL) as reader:
        found = whats(run)
        reader.kill()
    assert found == {marked: "service", leader: "service", child: "part of service", actor: "rollout-1",
                     server: "rollout-1-server-2"}
    assert members(run, without=[marked, leader, child, actor, server]) == []


def test_processes_of_a_run_that_was_removed_are_found_by_its_place(run: RunDir, processes: Processes) -> None:
    pid = processes.sleep(mark=run.services)
    assert leftovers.homeless(run.root.parent) == {}
    run.services.rmdir()
    assert leftovers.homeless(run.root.parent) == {str(run.root): [pid]}


def test_the_state_file_names_services_by_pid_and_start_time(run: RunDir, processes: Processes) -> None:
    ray, prefect, other = (processes.sleep(session=True) for _ in range(3))
    state = {"boot_id": keeper.boot_id(), "scratch": None, "addresses": {}, "processes": {
        "ray": {"pid": ray, "started": keeper.start_time(ray)},
        "prefect": {"pid": prefect, "started": keeper.start_time(prefect)},
        "else": {"pid": other, "started": 1}}}
    run.services.joinpath(keeper.STATE).write_text(json.dumps(state))
    assert whats(run) == {ray: "ray", prefect: "prefect"}
    run.services.joinpath(keeper.STATE).write_text(json.dumps(state | {"boot_id": "another"}))
    assert whats(run) == {}


def test_all_of_them_are_ended_also_a_stopped_one(run: RunDir, processes: Processes) -> None:
    leader, child = processes.parent()
    stopped = processes.sleep(mark=run.services)
    os.kill(stopped, signal.SIGSTOP)
    until = time.monotonic() + 5
    while not any(member.stopped for member in members(run)) and time.monotonic() < until:
        time.sleep(0.01)
    found = members(run)
    assert [member.pid for member in found if member.stopped] == [stopped]
    assert leftovers.end(found, 0.3) == [] and whats(run) == {}
    assert {leader, child, stopped} == {member.pid for member in found}


def test_the_next_start_ends_what_no_usable_service_holds(run: RunDir, processes: Processes, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Both services are given by address, so that none is started; an actor of a given Ray is left to be adopted."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    leader, child = processes.parent()
    actor = processes.sleep(log=run.logs / "learner-0.log")
    other = processes.sleep(mark=tmp_path / "runs" / "k2" / "services")
    services.start(run.services, tmp_path, isolated=False, deadlines=DeadlineConfig())
    assert not keeper.start_time(leader) and not keeper.start_time(child)
    assert keeper.start_time(actor) and keeper.start_time(other)
