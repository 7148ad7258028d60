"""Structured logs: fields, rotation, nothing lost at a kill, no secrets, and where a line shall not be heard."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.run_dir import RunDir
from rl_core.run_log import MASK, OLDER_FILES, STORY, RunLog, at_step, masked, secrets_of
from tasks.hosted import Hosted
from tasks.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ["time", "level", "run_key", "attempt", "step", "component", "message"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    run = RunDir(tmp_path / "sort-2")
    open_log = RunLog(run.component_log("owner"), run_key="sort-2", component="owner", attempt=lambda: 3)
    yield run.component_log("owner")
    open_log.close()


def test_a_line_says_when_where_and_what(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    STORY.info("attempt %d begins", 3)
    with at_step(42):
        STORY.warning("a wait\nof two lines")
    STORY.info("trained", extra={"step": 7})
    found = lines(log)
    assert [list(line) for line in found] == [FIELDS] * 3
    assert [(line["level"], line["attempt"], line["step"], line["message"]) for line in found] == [
        ("INFO", 3, None, "attempt 3 begins"), ("WARNING", 3, 42, "a wait\nof two lines"), ("INFO", 3, 7, "trained")]
    assert {line["run_key"] for line in found} == {"sort-2"} and {line["component"] for line in found} == {"owner"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"]) for line in found)
    assert capfd.readouterr() == ("", ""), "the console has words of its own"


def test_what_parts_warn_of_and_tracebacks_are_lines_too(log: Path) -> None:
    try:
        raise ValueError("of the reward")
    except ValueError as error:
        logging.getLogger("headway.learner").warning("damaged checkpoint", exc_info=error)
    logging.getLogger("somebody.else").warning("not ours")
    [line] = lines(log)
    assert (line["level"], line["message"]) == ("WARNING", "damaged checkpoint")
    assert line["traceback"].endswith("ValueError: of the reward")


def test_after_its_end_nothing_is_written(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "a.jsonl", run_key="k", component="a", attempt=lambda: 1)
    log.close()
    log.close()
    STORY.error("late")
    assert (tmp_path / "a.jsonl").read_text() == ""


def test_a_file_that_is_full_makes_room_and_the_oldest_goes(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "a.jsonl", run_key="k", component="a", attempt=lambda: 1, max_bytes=1000)
    for i in range(100):
        STORY.info("line %d", i)
    log.close()
    files = [tmp_path / "a.jsonl", *(tmp_path / f"a.jsonl.{n}" for n in range(1, OLDER_FILES + 1))]
    assert sorted(tmp_path.iterdir()) == sorted(files) and all(path.stat().st_size <= 1000 for path in files)
    kept = [line["message"] for path in reversed(files) for line in lines(path)]
    assert kept == [f"line {i}" for i in range(100 - len(kept), 100)] and len(kept) > 25


def test_a_kill_loses_no_line(tmp_path: Path) -> None:
    code = ("import os, signal, sys; from pathlib import Path; from rl_core.run_log import STORY, RunLog\n"
            "RunLog(Path(sys.argv[1]), run_key='k', component='a', attempt=lambda: 1)\n"
            "for i in range(500): STORY.info('line %d', i)\n"
            "os.kill(os.getpid(), signal.SIGKILL)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.jsonl")], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [line["message"] for line in lines(tmp_path / "a.jsonl")] == [f"line {i}" for i in range(500)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path / "a.jsonl", run_key="k", component="a", attempt=lambda: 1)
    STORY.info("lost")
    log.close()
    assert capfd.readouterr() == ("", "")


MASKED = {
    "a database": ("at postgresql+asyncpg://me:c0rrect@host:5432/db", f"at postgresql+asyncpg://me:{MASK}@host:5432/db"),
    "an address without a password": ("http://127.0.0.1:5000/a@b", "http://127.0.0.1:5000/a@b"),
    "a variable": ("sent correct-horse!", f"sent {MASK}!"),
}


@pytest.mark.parametrize(("text", "expected"), MASKED.values(), ids=MASKED)
def test_secrets_are_masked(text: str, expected: str) -> None:
    assert masked(text, secrets_of({"MY_API_KEY": "correct-horse"})) == expected


def test_which_variables_hold_secrets() -> None:
    environ = {"PREFECT_API_AUTH_STRING": "headway:abcdef", "SLACK_TOKEN": "xoxb-12345", "HOME": "/home/somebody",
               "RAY_AUTH_TOKEN_PATH": "/run/token", "TOKENIZERS_PARALLELISM": "false"}
    assert secrets_of(environ) == ("headway:abcdef", "xoxb-12345")


def test_a_secret_of_the_environment_reaches_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOK_SECRET", "correct-horse-battery")
    log = RunLog(tmp_path / "a.jsonl", run_key="k", component="a", attempt=lambda: 1)
    try:
        raise OSError("no answer from https://hooks.example/correct-horse-battery")
    except OSError as error:
        STORY.error("webhook: %s", error, exc_info=error)
    log.close()
    assert "correct-horse" not in (tmp_path / "a.jsonl").read_text() and MASK in (tmp_path / "a.jsonl").read_text()


# -- who logs


def test_the_owner_tells_states_stages_and_notes(log: Path, tmp_path: Path) -> None:
    progress = Progress(RunDir(tmp_path / "sort-2"), {"run_key": "sort-2", "total_steps": 9})
    with progress.stage("model"):
        progress.set(state="training")
    for _ in range(3):
        progress.set(note="MLflow is away")
    progress.close(state="completed")
    told = [(line["level"], re.sub(r"[\d.]+ s", "_ s", line["message"])) for line in lines(log)]
    assert told == [("INFO", "state: training"), ("INFO", "stage model: _ s"), ("WARNING", "note: MLflow is away"),
                    ("INFO", "state: completed")]
    assert progress.view["state"] == "completed"


class Role:
    def train(self, step: int, attempt: int | None = None) -> int:
        if step == 4:
            raise RuntimeError("of step 4")
        return step

    def events(self, timeout_s: float) -> list[int]:
        return []


def test_an_actor_tells_its_steps_and_failures_and_not_each_poll(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.hosted._redirect", lambda log: None)
    monkeypatch.setattr(os, "nice", lambda more: 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    run = RunDir(tmp_path / "sort-2")
    run.logs.mkdir(parents=True)
    hosted = Hosted(label="learner/0", attempt=1, digest="", owner_timeout_s=3600.0, threads=1, nice=0, environ={},
                    cwd=str(Path.cwd()), paths=[], log=str(run.logs / "learner-0.log"))
    hosted._hosted = Role()
    hosted.call(1, "train", (3,), {})
    hosted.call(1, "events", (0.5,), {})
    with pytest.raises(RuntimeError):
        hosted.call(2, "train", (4,), {})  # of the owner that has adopted it
    hosted.close_log()
    found = lines(run.component_log("learner-0"))
    assert [(line["level"], line["run_key"], line["attempt"], line["step"], line["component"]) for line in found] == [
        ("INFO", "sort-2", 1, None, "learner-0"), ("INFO", "sort-2", 1, 3, "learner-0"),
        ("ERROR", "sort-2", 2, 4, "learner-0")]
    assert found[1]["message"].startswith("train: 0.") and "RuntimeError: of step 4" in found[2]["message"]
    assert "in train" in found[2]["traceback"]
