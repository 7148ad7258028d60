"""What `headway doctor` finds and mends: real processes, real locks, real databases."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.doctoring import show_diagnosis
from rl_core.config import Config
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent, replace_file, to_json
from rl_core.run_identity import open_identity
from tasks import databases, keeper, mending
from tasks.diagnosis import database_trouble, diagnose, used_bytes
from tasks.hosted import here
from tasks.paths import run_dir
from tasks.servers import MARK, free_port
from tests.answering import answering

pytestmark = pytest.mark.skipif(not keeper.PROC, reason="elsewhere only services.json tells")
ROOT = Path(__file__).resolve().parents[2]
OWNS = """
import sys, time
from pathlib import Path
from rl_core.run_dir import OwnerLock, RunDir
lock = OwnerLock(RunDir(Path(sys.argv[1])))
print("owns", flush=True)
for _ in range(600):
    time.sleep(0.1)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose first attempt ended as it should."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    made = run_dir("k")
    open_identity(made, "k", "tiny-cpu", Config.model_validate({"isolated": True}))
    made.services.mkdir()
    put_if_absent(made.attempt(1), to_json({"attempt": 1, "prefect_run_id": None}))
    replace_file(made.result, to_json({"status": "completed", "attempt": 1}))
    return made


@pytest.fixture
def owner(run: RunDir) -> Iterator[subprocess.Popen[str]]:
    """A live process that owns the run."""
    with subprocess.Popen([sys.executable, "-c", OWNS, str(run.root)], cwd=ROOT, stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "owns\n"
        yield process
        process.kill()


@pytest.fixture
def left(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries the mark of the run's services."""
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: str(run.services)}) as process:
        yield process
        process.kill()


def heard(run: RunDir, ago_s: float) -> None:
    beat = run.services / keeper.HEARTBEAT
    beat.touch()
    os.utime(beat, (time.time() - ago_s,) * 2)


def view(run: RunDir, **fields: Any) -> None:
    """The owner's status view, just written."""
    replace_file(run.status, to_json({"state": "training", "since_us": time.time_ns() // 1000 - 5_000_000,
                                      "ts_us": time.time_ns() // 1000, **fields}))


def found() -> tuple[list[str], list[str]]:
    """Kinds of what is wrong with the run, and its notes."""
    report = diagnose("k")
    return [finding["kind"] for finding in report["runs"][0]["findings"]], report["runs"][0]["notes"]


def test_a_run_that_ended_and_left_nothing_is_healthy(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_diagnosis("k", fix=False, as_json=False) == 0
    out = capsys.readouterr().out
    assert "state       completed, 0 of 180 steps" in out and out.endswith("healthy\n")
    assert show_diagnosis(None, fix=True, as_json=False) == 0
    assert "1 other run: nothing runs, nothing is wrong" in capsys.readouterr().out
    assert show_diagnosis("unknown", fix=False, as_json=False) == 2
    assert "there is no such run" in capsys.readouterr().err


def test_what_a_dead_owner_left_waits_for_a_restart_then_is_leaked_then_is_ended(
        run: RunDir, left: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    heard(run, 1.0)
    assert found() == ([], ["somebody is starting or ending it: heard 1 s ago"])
    heard(run, 20.0)
    kinds, notes = found()
    assert kinds == [] and "1 processes wait for a quick restart" in notes[0]
    heard(run, 100.0)
    assert found()[0] == ["leaked"]
    assert show_diagnosis("k", fix=False, as_json=False) == 1
    assert f"service (pid {left.pid}); --fix mends it" in capsys.readouterr().out
    assert left.poll() is None, "a look ends nothing"
    assert show_diagnosis("k", fix=True, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mended"] == {"k": [f"ended 1 processes: service (pid {left.pid})"]}
    assert left.wait(1) == -signal.SIGTERM and report["runs"][0]["processes"] == []


def test_nothing_of_a_live_owner_is_ended(run: RunDir, owner: subprocess.Popen[str], left: subprocess.Popen[bytes],
                                          capsys: pytest.CaptureFixture[str]) -> None:
    heard(run, 1000.0)
    view(run)
    assert show_diagnosis("k", fix=True, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mended"] == {} and report["runs"][0]["owner"]["pid"] == owner.pid
    assert [member["pid"] for member in report["runs"][0]["processes"]] == [left.pid]
    assert "the run is alive" in mending.mend("k")[0]
    assert (owner.poll(), left.poll()) == (None, None)


def test_an_owner_that_is_starting_is_left_alone(run: RunDir, left: subprocess.Popen[bytes]) -> None:
    """It beats before it owns the lock."""
    with subprocess.Popen(["sh", "-c", f"while :; do touch {run.services / keeper.HEARTBEAT}; sleep 0.2; done"],
                          start_new_session=True) as starting:
        try:
            heard(run, 5.5)
            assert mending.mend("k") == ["nothing: an owner makes itself heard"]
        finally:
            os.killpg(starting.pid, signal.SIGKILL)
    assert left.poll() is None
    OwnerLock(run).release()


def test_who_waits_for_whom_and_what_is_dead_or_stopped_is_said(
        run: RunDir, owner: subprocess.Popen[str], left: subprocess.Popen[bytes],
        capsys: pytest.CaptureFixture[str]) -> None:
    started = keeper.start_time(left.pid)
    actors = [{"actor": "learner/0", "pid": left.pid, "started": started, "place": here()},
              {"actor": "rollout/0", "pid": left.pid, "started": 1, "place": here()},
              {"actor": "rollout/1", "pid": left.pid, "started": 1, "place": "elsewhere"}]
    os.kill(left.pid, signal.SIGSTOP)
    view(run, actors=actors, waits=[{"who": "the flow", "on": "the rollout side", "what": "a full claim of step 7",
                                     "waited_s": 75.0, "since_us": 1, "deadline_s": 1800.0, "why": "nothing landed"}],
         live={"workers": {"rollout-0": {"alive": True, "served_idx": 3, "in_flight": 4, "oldest_lease_s": 700.0}}})
    assert show_diagnosis("k", fix=False, as_json=False) == 1
    out = capsys.readouterr().out
    assert "state       training for 5 s" in out
    assert "waits       the flow on the rollout side for a full claim of step 7, since 1 min 15 s, at most " \
           "30 min 00 s; nothing landed" in out
    assert f"rollout/1 (pid {left.pid}, on another machine)" in out
    assert found()[0] == ["actor-dead", "actor-stopped", "stale-lease"]
    os.kill(left.pid, signal.SIGCONT)


def test_an_owner_that_is_stopped_or_says_nothing_is_named(run: RunDir, owner: subprocess.Popen[str]) -> None:
    view(run, ts_us=time.time_ns() // 1000 - 40_000_000)
    assert found()[0] == ["owner-silent"]
    os.kill(owner.pid, signal.SIGSTOP)
    until = time.monotonic() + 5
    while found()[0] != ["owner-stopped"] and time.monotonic() < until:
        time.sleep(0.02)
    assert found()[0] == ["owner-stopped"]


def test_a_killed_attempt_is_a_note_and_a_quota_that_is_used_up_is_wrong(run: RunDir) -> None:
    put_if_absent(run.attempt(2), to_json({"attempt": 2, "prefect_run_id": None}))
    assert found() == ([], ["attempt 2 ended without a word after 0 steps; `headway rerun k` goes on"])
    before = used_bytes(run.root)
    (run.root / "large").write_bytes(b"0" * 5000)
    os.link(run.root / "large", run.root / "again")
    assert used_bytes(run.root) == before + 5000, "a file with two names lies there once"


def test_that_prefect_cannot_be_asked_about_a_killed_attempt_is_said(run: RunDir,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    put_if_absent(run.attempt(2), to_json({"attempt": 2, "prefect_run_id": "1c2d"}))
    _, notes = found()
    assert "the Prefect server that has flow run 1c2d of attempt 2 does not run" in notes[1]
    assert show_diagnosis("k", fix=True, as_json=True) == 0
    [said] = json.loads(capsys.readouterr().out)["mended"]["k"]
    assert said.startswith("not done: the Prefect server that has flow run 1c2d of attempt 2 does not run")
    assert "The next start of the run sets it to Crashed" in said


def test_a_run_whose_identity_cannot_be_read_is_wrong_and_hides_no_other(run: RunDir) -> None:
    other = run_dir("k2")
    other.root.mkdir()
    other.run_json.write_text("not JSON")
    report = diagnose(None)
    assert [(one["run_key"], [finding["kind"] for finding in one["findings"]]) for one in report["runs"]] == [
        ("k", []), ("k2", ["broken"])]
    assert not report["healthy"] and str(other.run_json) in report["runs"][1]["findings"][0]["text"]


def test_no_password_of_mlflow_is_told_and_it_is_asked_all_the_same(run: RunDir, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a run that cannot be read, and of one whose variable this environment does not have."""
    port = free_port()
    databases.choose(tmp_path, "mlflow", f"postgresql://me:pa-ss_word@127.0.0.1:{port}/mlflow")
    run_dir("k2").root.mkdir()
    run_dir("k2").run_json.write_text("not JSON")
    open_identity(run_dir("k3"), "k3", "tiny-cpu", Config.model_validate({"tracking": {"uri": "env:HEADWAY_TRACKING"}}))
    default = f"postgresql://me:***@127.0.0.1:{port}/mlflow"

    def doctor() -> dict[str, Any]:
        assert show_diagnosis(None, fix=False, as_json=True) == 1
        out = capsys.readouterr().out
        assert "pa-ss_word" not in out
        return json.loads(out)

    with answering({"GET /health": (200, "OK")}) as mlflow:
        monkeypatch.setenv("HEADWAY_TRACKING", mlflow.page.replace("://", "://me:pa-ss_word@"))
        report = doctor()
    server = mlflow.page.replace("://", "://me:***@")
    assert [one["tracking"] for one in report["runs"]] == [default, default, server]
    assert {one["where"]: one["trouble"] is None for one in report["home"]["databases"] if one["name"] == "MLflow"} == {
        default: False, server: True}
    monkeypatch.delenv("HEADWAY_TRACKING")
    report = doctor()
    assert (report["runs"][2]["tracking"], report["runs"][2]["notes"]) == (
        "env:HEADWAY_TRACKING", ["tracking.uri is env:HEADWAY_TRACKING: no address here, so that MLflow is not asked"])


def test_databases_are_asked_and_a_silent_one_does_not_hold_the_doctor(tmp_path: Path) -> None:
    there, broken = tmp_path / "there.db", tmp_path / "broken.db"
    with sqlite3.connect(there) as database:
        database.execute("create table t (x)")
    broken.write_bytes(b"not a database, but long enough to be read as one" * 100)
    assert database_trouble(f"sqlite:///{there}") is None
    assert database_trouble(f"sqlite:///{tmp_path / 'not made yet.db'}") is None
    assert "file is not a database" in str(database_trouble(f"sqlite:///{broken}"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        assert "timed out" in str(database_trouble(uri))
        assert time.monotonic() - begun < 5
    assert "refused" in str(database_trouble(uri))
