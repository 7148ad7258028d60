"""Turns at the services of a directory: a real second process has the lock, lets it go, is stopped or killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_core.config import DeadlineConfig
from rl_core.errors import DeadlinePassed, DeadPart
from rl_core.run_dir import RunDir
from tasks import keeper, servers, services
from tasks.servers import Process
from tasks.services import Services
from tasks.turns import turn
from tasks.waiting import StallReport, waits

HOLDS = "import sys, time, pathlib, keeper\n" \
        "with keeper.locked(pathlib.Path(sys.argv[1])):\n" \
        "    print('has it', flush=True)\n" \
        "    sys.stdin.readline()\n"
"""With the standard library alone, as the watchdog is: until a line, or the end of its input."""


@contextmanager
def holder(state_dir: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", HOLDS, str(state_dir)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, env={"PYTHONPATH": str(Path(keeper.__file__).parent)})
    try:
        assert process.stdout is not None and process.stdout.readline() == "has it\n"
        yield process
    finally:
        process.kill()
        process.wait()


def is_stopped(pid: int) -> bool:
    until = time.monotonic() + 5
    while (seen := keeper.stat(pid)) is not None and seen.state != "T" and time.monotonic() < until:
        time.sleep(0.005)
    return seen is not None and seen.state == "T"


def timeless(text: str) -> list[str]:
    """Lines, without how long it took: a machine may be busy."""
    return re.sub(r"waits \d+ s", "waits _ s", text).splitlines()


def test_a_turn_that_nobody_else_has_is_had_at_once(tmp_path: Path) -> None:
    with turn(tmp_path, "the start of services", 0.0):
        assert keeper.lock_holder(tmp_path) == f"pid {os.getpid()}"
        with pytest.raises(keeper.LockTaken, match=rf"services\.lock: pid {os.getpid()} has it"), \
                keeper.locked(tmp_path):
            pass
    with turn(tmp_path, "the next", 0.0):
        pass


def test_who_waits_in_vain_says_for_which_lock_who_has_it_and_what_to_do(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        os.kill(other.pid, signal.SIGSTOP)
        assert is_stopped(other.pid)
        begun = time.monotonic()
        with pytest.raises(DeadlinePassed) as passed, \
                turn(tmp_path, "the start of services", 0.2, setting="deadlines.service_start_s"):
            raise AssertionError("two have it")
        assert 0.2 <= time.monotonic() - begun < 5.0
    assert str(passed.value) == (
        f"{tmp_path}/services.lock: pid {other.pid} (stopped by SIGSTOP) still has it after 0.2 s "
        "(deadlines.service_start_s); the start of services waits for it: let that process finish, or end it, then try "
        "again")


FREED: dict[str, Callable[[subprocess.Popen[str]], None]] = {
    "it lets it go": lambda other: print(file=other.stdin, flush=True),
    "it is killed": lambda other: other.kill(),
}


@pytest.mark.parametrize("free", FREED.values(), ids=FREED)
def test_a_turn_comes_when_the_other_is_done_or_dead(tmp_path: Path, free: Callable[[subprocess.Popen[str]], None],
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    with holder(tmp_path) as other:
        def tick() -> None:
            [wait] = waits(0.0)
            asked.append(str(wait))
            if len(asked) == 4:
                free(other)

        with turn(tmp_path, "the end of services", 10.0, tick=tick, every_s=0.06):
            assert keeper.lock_holder(tmp_path) == f"pid {os.getpid()}"
    said = timeless(capsys.readouterr().err)
    waits_for = f"waits _ s on {tmp_path}/services.lock for the end of services, at most 10 s: pid {other.pid} has it"
    assert timeless(asked[0]) == [f"the flow {waits_for}"]
    assert said and said[0] == f"stall: this process (pid {os.getpid()}) {waits_for}"
    assert len(said) <= len(asked) and waits(0.0) == []


def test_where_a_run_reports_its_waits_nothing_is_said_twice(tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    report, told = StallReport(0.06), list[str]()
    with holder(tmp_path) as other, pytest.raises(DeadlinePassed), \
            turn(tmp_path, "the start of services", 0.3, tick=lambda: told.extend(filter(None, [report.look()])),
                 every_s=0.06):
        pass
    assert 1 <= len(told) <= 5 and all(f"pid {other.pid} has it" in text for text in told)
    assert capsys.readouterr().err == ""


def test_a_wait_for_a_turn_can_be_given_up(tmp_path: Path) -> None:
    def tick() -> None:
        raise DeadPart("the start was given up")

    with holder(tmp_path), pytest.raises(DeadPart, match="given up"), turn(tmp_path, "a first start", 10.0, tick=tick):
        pass


def test_a_lock_whose_holder_left_no_name_is_said_to_have_none(tmp_path: Path) -> None:
    texts = {"": "a process that has not said who it is", "what?": "a process that has not said who it is",
             f"{2**22 - 1} 1\n": f"a process that cannot be seen from here (it calls itself pid {2**22 - 1})",
             f"{os.getpid()} 1\n": f"a process that cannot be seen from here (it calls itself pid {os.getpid()})"}
    assert keeper.lock_holder(tmp_path) in texts.values(), "no file"
    for text, told in texts.items():
        (tmp_path / keeper.LOCK).write_text(text)
        assert keeper.lock_holder(tmp_path) == told


# -- who takes turns

def ended(state_dir: Path) -> None:
    leader = Process(os.getpid(), 1)  # of another process: the lock is all that is reached
    services.stop(Services(state_dir=state_dir, prefect_api_url="", prefect_auth=None, ray_address="",
                           ray_token_path=None, pids={"ray": leader}, where={}, env={}), 0.1)


def first_started(state_dir: Path) -> None:
    with servers.first_start(state_dir, 0.1):
        pass


TURNS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a start": (lambda path: services.start(path, path.parent, isolated=True,
                                            deadlines=DeadlineConfig(service_start_s=0.1)),
                r"after 0\.1 s \(deadlines\.service_start_s\); the start of services waits"),
    "a stop": (ended, r"after 0\.1 s; the end of services waits"),
    "a start after a kill": (lambda path: services.end_abandoned(RunDir(path.parent), 0.1),
                             r"after 0\.1 s \(deadlines\.service_start_s\); the end of what was left behind waits"),
    "a first start of Prefect": (first_started, r"after 0\.1 s; the first start of Prefect on its database waits"),
}


@pytest.mark.parametrize(("work", "told"), TURNS.values(), ids=TURNS)
def test_all_that_touch_services_have_a_deadline_and_name_who_has_them(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], object], told: str) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    state_dir = RunDir(tmp_path).services
    state_dir.mkdir()
    with holder(state_dir) as other, pytest.raises(DeadlinePassed, match=told) as passed:
        work(state_dir)
    assert f"{state_dir}/services.lock: pid {other.pid} still has it" in str(passed.value)


def test_a_service_that_does_not_answer_is_reported_while_it_is_waited_for(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, looked = tmp_path / "ray.log", list[float]()
    process = servers.spawn([sys.executable, "-S", "-c", "import time; print('busy', flush=True); time.sleep(60)"], {},
                            cwd=tmp_path, log=log)

    def ready() -> bool:
        looked.append(time.monotonic())
        return False

    with pytest.raises(DeadlinePassed, match=r"^Ray head did not answer in \d s \(deadlines\.service_start_s\); the "
                                             r"end of .*ray\.log:\nbusy$"):
        servers.wait("Ray head", process, log, 0.5, ready, every_s=0.1)
    said = timeless(capsys.readouterr().err)
    assert 1 <= len(said) <= 5 and looked[-1] - looked[0] >= 0.5
    assert set(said) == {f"stall: this process (pid {os.getpid()}) waits _ s on Ray head (pid {process.pid}) for its "
                         f"first answer, at most 0.5 s: its log is {log}"}
    assert not keeper.is_alive(*process)


def test_the_watchdog_says_who_keeps_it_from_ending_services(tmp_path: Path) -> None:
    state = f'{{"boot_id": "{keeper.boot_id()}", "processes": {{}}, "scratch": null, "owner_timeout_s": 0.1, ' \
            '"starting": false, "keeper": {"name": "k"}}'
    (tmp_path / keeper.STATE).write_text(state)
    with holder(tmp_path) as other:
        watchdog = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__, str(tmp_path), "k"],
                                    stderr=subprocess.PIPE, text=True)
        assert watchdog.stderr is not None
        assert watchdog.stderr.readline() == (f"the services of {tmp_path} are not ended yet: "
                                              f"{tmp_path}/services.lock: pid {other.pid} has it\n")
        assert (tmp_path / keeper.STATE).exists()
    assert watchdog.wait(5) == 0 and not (tmp_path / keeper.STATE).exists()
    assert watchdog.stderr.read() == "", "once a minute"
