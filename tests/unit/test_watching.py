"""`headway status --watch`: what it reads of a run directory, what it says of it, and how it ends."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.watching import watch, watch_status
from flows.watching_text import curve, stacked, wait_text, watch_line, watch_rows, who_waits
from rl_core.looking.watching import LAST_STEPS, Watch, trained_tokens_per_s
from rl_core.metrics import names
from rl_core.observations import put_observation
from rl_core.records import put_record
from rl_core.run_dir import OwnerLock, RunDir, replace_file, to_json
from tasks.paths import run_dir
from tasks.watching import Watcher
from tests.looking import T0, record, small_run

WAIT = {"who": "the flow", "on": "the rollout side", "what": "a full claim of step 3", "waited_s": 12.0,
        "since_us": 1, "deadline_s": 1800.0, "why": "Step 3 needs 2 usable groups"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    return small_run(run_dir("small").root)


@pytest.fixture
def owned(run: RunDir) -> Iterator[RunDir]:
    """As its owner leaves it while it trains."""
    lock = OwnerLock(run)
    replace_file(run.status, to_json({"run_key": "small", "state": "training", "stages": [["model", 1.5]],
                                      "live": {"binding": "staleness"}, "waits": [WAIT], "ts_us": 1}))
    yield run
    lock.release()


def test_a_look_reads_steps_ages_shares_and_accuracies(run: RunDir) -> None:
    seen = Watch(run).look()
    assert (seen.steps, seen.step_K, seen.reward_K) == (3, (0, 1, 2), (0.0, 0.25, 0.5))
    # Of steps 0, 1, 2: the oldest version of each group against the publication of its step (tests/looking.py).
    assert seen.ages == dict(Counter([0, 0, 1, 1, 1, 2]))
    assert seen.shares["rollout_busy"] == 0.5 and seen.shares["learner_busy"] == 0.0
    assert (seen.step_s, seen.accuracy_V) == (1.0, (0.25, 0.75, 0.5))
    assert seen.metrics["system/mfu"] == 0.125


def test_a_later_look_reads_what_is_new_and_nothing_twice(run: RunDir) -> None:
    looking = Watch(run)
    looking.look()
    for step in range(3):  # whoever read them again would miss them
        run.record(step).write_text("{")
        run.claim(step).unlink()
    put_record(run, record(3, **{"reward/mean": 0.75}))
    put_observation(run, 3, dict.fromkeys(names("owner"), 0.25), ts_us=(T0 + 3) * 1_000_000)
    seen = looking.look()
    assert (seen.steps, seen.reward_K) == (4, (0.0, 0.25, 0.5, 0.75))
    assert sum(seen.ages.values()) == 8 and seen.shares["rollout_waiting"] == 0.375
    assert seen.metrics["rollout/in_flight"] == 0.25


def test_what_cannot_be_read_is_left_out(run: RunDir) -> None:
    run.record(1).write_text("{")
    run.validation(2).write_text("not JSON")
    for shard in run.streams.rglob("*.arrow"):
        shard.write_bytes(b"rotten")
    seen = Watch(run).look()
    assert (seen.steps, seen.step_K, seen.ages) == (3, (0, 2), {})
    assert [repr(value) for value in seen.accuracy_V] == ["0.25", "nan", "0.5"]


def test_tokens_per_second_are_those_that_the_last_steps_trained(owned: RunDir) -> None:
    """Of 16 answers each: 400 tokens in 2 s, 400 tokens in 4 s. Workers have ended no answer in the last one."""
    quick = {"system/tokens_per_s": 200.0, "system/samples_per_s": 8.0}
    slow = {"system/tokens_per_s": 100.0, "system/samples_per_s": 4.0}
    for step, speed in ((3, quick), (4, slow)):
        put_record(owned, record(step, **speed))
    looking = Watcher("small")
    assert looking.look()["tokens_per_s"] == pytest.approx(800 / 6), "the record is there before the observation"
    idle = dict.fromkeys(names("owner"), 0.0)
    put_observation(owned, 4, idle, ts_us=(T0 + 4) * 1_000_000)
    report = looking.look()
    assert report["metrics"]["rollout/tokens_per_s"] == 0.0 and report["tokens_per_s"] == pytest.approx(800 / 6)
    assert "133 tokens/s" in watch_line(report) and any("133 tokens/s" in row for row in said(report))


def test_tokens_per_second_are_of_the_last_steps_alone(run: RunDir) -> None:
    for step in range(3, 3 + LAST_STEPS):
        put_record(run, record(step, **{"system/tokens_per_s": 50.0 if step > 3 else 900.0,
                                        "system/samples_per_s": 2.0}))
    assert Watch(run).look().tokens_per_s == (900.0 + 50.0 * (LAST_STEPS - 1)) / LAST_STEPS
    put_record(run, record(3 + LAST_STEPS, **{"system/tokens_per_s": 50.0, "system/samples_per_s": 2.0}))
    assert Watch(run).look().tokens_per_s == 50.0
    assert math.isnan(trained_tokens_per_s([])), "unknown, not 0"


def said(report: dict[str, Any]) -> list[str]:
    return ["".join(text for text, _ in row).rstrip() for row in watch_rows(report)]


def test_the_picture_of_a_run_that_trains(owned: RunDir) -> None:
    report = Watcher("small").look()
    assert said(report) == [
        "small  training, attempt 1",
        "training  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  3/180  2 min 57 s left",
        "reward 0.500  accuracy 0.500  staleness 1.0 max 2  - tokens/s",
        "",
        "reward  of trained answers, steps 0 to 2",
        "   0.500 ┤  █",
        "         ┤ ▁█",
        "         ┤ ██",
        "   0.000 ┤▁██",
        "",
        "staleness  of 6 trained groups, publications; bound 2",
        "       0 ┤██████████████ 33%",
        "       1 ┤████████████████████ 50%",
        "       2 ┤███████ 17%",
        "",
        "learner     busy 0%",
        "rollout   ████████████████████░░░░░░░░░░░░░░░░░░░░  busy 50%  waiting 50%  syncing 50%  paused 50%",
        "waits     the flow waits on the rollout side for a full claim of step 3, since 12 s, at most 30 min 00 s",
    ]


def test_a_run_that_failed_says_why(run: RunDir) -> None:
    replace_file(run.result, to_json({"status": "failed", "attempt": 1, "error": "RewardError",
                                      "message": "it raised\nthe end of rollout-0.log:\nNaN"}))
    report = Watcher("small").look()
    assert (report["state"], report["over"], report["left_s"]) == ("failed", True, None)
    assert said(report)[-1] == "cause     RewardError: it raised"
    assert watch_line(report) == ("failed  step   3/180  reward 0.500  accuracy 0.500  staleness 1.0 max 2  "
                                  "- tokens/s  learner waits 0%  rollout waits 50%  RewardError: it raised")


def test_a_run_without_a_step_is_shown(tmp_path: Path, owned: RunDir) -> None:
    for path in [*owned.records.iterdir(), *owned.validations.iterdir(), *owned.observations.iterdir()]:
        path.unlink()
    replace_file(owned.status, to_json({"run_key": "small", "state": "replaying", "stages": [["model", 1.5]],
                                        "replayed": [9, 10], "waits": []}))
    report = Watcher("small").look()
    assert said(report) == ["small  replaying, attempt 1", f"replaying {'━' * 40}  9/10"]
    assert watch_line(report) == "replaying  replaying 9/10"


def test_both_sides_are_told_apart() -> None:
    def shares(learner: float | None, rollout: float | None) -> dict[str, Any]:
        return {"utilization": {"learner_waiting": learner, "rollout_waiting": rollout},
                "live": {"binding": "staleness"}}

    assert who_waits(shares(0.3, 0.1)) == "the learner waits for rollouts, 30% of its time"
    assert who_waits(shares(0.1, 0.4)) == \
        "rollout workers wait for the learner, 40% of their time (capacity: staleness)"
    assert who_waits(shares(0.01, None)) == "neither side waits for the other"
    assert wait_text({**WAIT, "deadline_s": None}).endswith("for a full claim of step 3, since 12 s")


DRAWN = {
    "a curve": (curve([0, 1, 2], 3, 2), [" ▁█", "▁██"]),
    "more values than columns": (curve([0, 0, 4, 4], 2, 1), ["▁█"]),
    "flat": (curve([3, 3], 10, 1), ["▁▁"]),
    "what does not exist": (curve([float("nan"), 1.0], 10, 1), ["▁"]),
    "nothing": (curve([], 10, 2), ["", ""]),
    "a bar": (stacked([0.5, 0.25, 0.25], 8), [4, 2, 2]),
    "thirds fill it": (stacked([1 / 3] * 3, 10), [3, 4, 3]),
}


@pytest.mark.parametrize(("got", "expected"), DRAWN.values(), ids=DRAWN)
def test_bars_and_curves(got: list[Any], expected: list[Any]) -> None:
    assert got == expected


def reports(*states: str) -> Iterator[dict[str, Any]]:
    share = dict.fromkeys([f"{side}_{what}" for side in ("learner", "rollout")
                           for what in ("busy", "waiting", "syncing", "paused")], None)
    for i, state in enumerate(states):
        yield {"run_key": "k", "state": state, "over": state == "completed", "attempt": 1, "steps": i, "total_steps": 2,
               "left_s": None, "stages": [], "reward": {"steps": [], "mean": []}, "accuracy": [],
               "metrics": {"reward/mean": 0.5}, "tokens_per_s": 64.0, "staleness": {"limit": 2, "groups": {}},
               "utilization": share, "live": {}, "waits": [], "note": None, "cause": None}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_look_is_one_plain_line_and_the_last_is_the_end() -> None:
    stream, slept = io.StringIO(), list[float]()
    seen = reports("training", "training", "completed", "never looked at")
    watch(lambda: next(seen), stream, every_s=None, as_json=False, sleep=slept.append)
    assert stream.getvalue().splitlines() == [
        "training  step 0/2  reward 0.500  64 tokens/s", "training  step 1/2  reward 0.500  64 tokens/s",
        "completed  step 2/2  reward 0.500  64 tokens/s"]
    assert slept == [5.0, 5.0] and "\x1b" not in stream.getvalue()


def test_with_json_each_look_is_one_object() -> None:
    stream, seen = Terminal(), reports("training", "completed")
    watch(lambda: next(seen), stream, every_s=1.5, as_json=True, sleep=lambda s: None)
    assert [json.loads(line)["state"] for line in stream.getvalue().splitlines()] == ["training", "completed"]


def test_on_a_terminal_it_is_redrawn_in_place_and_the_cursor_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, seen, slept = Terminal(), reports("training", "training", "completed"), list[float]()
    watch(lambda: next(seen), stream, every_s=None, as_json=False, sleep=slept.append)
    text = stream.getvalue()
    assert slept == [0.5, 0.5] and "\x1b[2J" not in text, "the screen is never cleared: nothing flickers"
    assert text.count("  training, attempt 1") == 2 and text.count("  completed, attempt 1") >= 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_key_that_is_none_and_a_lone_interval_are_refused(run: RunDir, capsys: pytest.CaptureFixture[str],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    assert watch_status("nope", asked=True, every_s=None, as_json=False) == 2
    assert capsys.readouterr().err.startswith("error: run 'nope': there is no such run")
    assert watch_status("small", asked=False, every_s=2.0, as_json=False) == 2
    assert capsys.readouterr().err == "error: --every 2: says how often --watch looks; give both\n"
    assert watch_status("small", asked=True, every_s=None, as_json=False) == 0
    assert capsys.readouterr().out.startswith("stopped  step   3/180")


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_leaves_at_once_and_without_a_traceback(owned: RunDir) -> None:
    """In a real terminal, of a real command; then the end of the run ends another one."""
    parent, child = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    words = [sys.executable, "-m", "flows.cli", "status", "small", "--watch", "--every", "30"]
    with subprocess.Popen(words, env=env, stdin=child, stdout=child, stderr=child, start_new_session=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None) as command:
        os.close(child)
        text, until = "", time.monotonic() + 60
        while "at most 30 min" not in text and time.monotonic() < until:
            text += os.read(parent, 4096).decode(errors="replace")
        begun = time.monotonic()
        command.send_signal(signal.SIGINT)
        assert command.wait(10) == 130 and time.monotonic() - begun < 2.0
        try:
            while more := os.read(parent, 4096).decode(errors="replace"):
                text += more
        except OSError:  # the terminal is gone
            pass
    os.close(parent)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "small  training, attempt 1" in plain and "Traceback" not in plain
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
