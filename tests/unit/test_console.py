"""The console: stages, plain lines, the live display, the summary. What is asserted is what a person reads."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.console import (
    Console,
    Pace,
    clean,
    duration,
    facts,
    failed_lines,
    next_lines,
    number,
    sparkline,
    stopped_lines,
    summary_lines,
    view_of,
)

METRICS = {"reward/mean": 0.6123, "staleness/mean": 1.25, "staleness/max": 2.0, "rollout/tokens_per_s": 0.0,
           "utilization/learner_busy": 0.914, "utilization/rollout_busy": 0.736}
STATUS: dict[str, Any] = {"run_key": "k", "state": "training", "stages": [["services", 2.13], ["model", 7.7]],
                          "total_steps": 180}
SUMMARY = {"run_key": "tiny", "status": "completed", "steps": 180, "accuracy_start": 0.42, "accuracy_end": 0.8711,
           "wall_s": 112.4, "groups_trained": 2880, "groups_dropped": 12, "staleness_max": 3, "staleness_mean": 1.224,
           "update_lag_mean": 1.3, "samples_per_s": 411.7, "mlflow_run_id": "m"}


def trained(step: int, **fields: Any) -> dict[str, Any]:
    return {**STATUS, "step": step, "metrics": METRICS, "tokens_per_s": 3012.4, "accuracy": 0.58, **fields}


class Clock:
    """A clock that the test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return Console(stream, live=False, clock=clock), stream, clock


def test_plain_output_is_stages_once_and_a_line_every_five_seconds() -> None:
    console, stream, clock = plain()
    console.line("headway 0.1.0  train tiny-cpu")
    console.show(view_of({**STATUS, "state": "starting", "stages": [["services", 2.13], ["model", None]]}))
    for _ in range(3):
        console.show(view_of({**STATUS, "state": "replaying", "replayed": [9, 10]}))
    for second in range(13):
        clock.now = 5.0 + second
        console.show(view_of(trained(10 + second)))
    clock.now += 0.1
    console.show(view_of(trained(180)))
    console.show(view_of(trained(180)))
    assert stream.getvalue().splitlines() == [
        "headway 0.1.0  train tiny-cpu",
        "  services        2.1 s",
        "  model           7.7 s",
        "  replaying 9/10",
        "step  10/180  reward 0.612  accuracy 0.580  staleness 1.2 max 2  3 012 tokens/s",
        "step  15/180  reward 0.612  accuracy 0.580  staleness 1.2 max 2  3 012 tokens/s  2 min 45 s left",
        "step  20/180  reward 0.612  accuracy 0.580  staleness 1.2 max 2  3 012 tokens/s  2 min 40 s left",
        "step 180/180  reward 0.612  accuracy 0.580  staleness 1.2 max 2  3 012 tokens/s",
    ]


SPEEDS = {"many": (3012.4, "3 012 tokens/s"), "few": (0.25, "0.25 tokens/s"), "none known": (None, "- tokens/s"),
          "none": (0.0, "- tokens/s")}


@pytest.mark.parametrize(("speed", "said"), SPEEDS.values(), ids=SPEEDS)
def test_a_run_that_trains_is_never_said_to_make_no_tokens(speed: float | None, said: str) -> None:
    assert facts(view_of(trained(3, tokens_per_s=speed)))[-1] == said
    assert facts(view_of(STATUS)) == ["- tokens/s"], "before the first record"
    assert facts(view_of({**STATUS, "state": "replaying"})) == []


def test_an_alarm_is_said_from_then_on_with_its_step() -> None:
    view = view_of(trained(14, alarm="step 12: mismatch 0.012 over 0.005"))
    assert facts(view)[-1] == "alarm at step 12: mismatch 0.012 over 0.005"
    assert not any("alarm" in word for word in facts(view_of(trained(14))))


def test_a_long_part_of_the_start_is_said_every_five_seconds() -> None:
    console, stream, clock = plain()
    for second in range(11):
        clock.now = float(second)
        console.show(view_of({"state": "warming up", "warmed_up": [second * 10, 250]}))
    assert stream.getvalue().splitlines() == ["  warming up 0/250", "  warming up 50/250", "  warming up 100/250"]


def test_a_stall_is_said_once_for_each_report() -> None:
    console, stream, _ = plain()
    for stall in (None, "the flow waits 60 s", "the flow waits 60 s", "the flow waits 120 s", None):
        console.show(view_of({**STATUS, "step": 0, "metrics": {}, "note": "MLflow is away", "stall": stall}))
    stalls = [line for line in stream.getvalue().splitlines() if "waits" in line]
    assert stalls == ["  the flow waits 60 s", "  the flow waits 120 s"]


def test_the_live_display_shows_everything_and_gives_the_cursor_back() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, live=True, clock=clock)
    console.show(view_of({**STATUS, "state": "starting", "stages": [["services", 2.13], ["model", None]]}))
    for second in range(4):
        clock.now = float(second)
        console.show(view_of(trained(second, note="waiting for 3 groups \x1b]0;title\x07 [bold]")))
    console.line("a line above [red]")
    console.close()
    console.close()
    text = stream.getvalue()
    for expected in ("  services        2.1 s", "3/180", "2 min 57 s left", "reward 0.612", "accuracy 0.580",
                     "staleness 1.2 max 2", "3 012 tokens/s", "learner 91 % busy", "rollout 74 % busy",
                     "waiting for 3 groups  ]0;title  [bold]", "a line above [red]"):
        assert expected in text, expected
    assert "\x1b]0" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_time_left_is_that_of_the_last_steps_less_what_has_passed_since() -> None:
    pace = Pace(steps=4)
    assert pace.left_s(0.0, 10) is None
    for now, step in ((0.0, 0), (100.0, 1), (102.0, 2), (104.0, 3), (106.0, 4)):
        pace.saw(now, step)
    assert pace.left_s(106.0, 10) == 12.0
    assert pace.left_s(107.5, 10) == 10.5
    assert pace.left_s(999.0, 10) == 0.0


def test_summary_and_where_to_look_next() -> None:
    assert summary_lines(SUMMARY) == [
        "",
        "completed in 1 min 52 s",
        "  run         tiny",
        "  steps       180",
        "  accuracy    0.420 -> 0.871",
        "  groups      2 880 trained, 12 dropped",
        "  staleness   mean 1.22, max 3 publications",
        "  update lag  mean 1.30 updates",
        "  speed       412 answers/s while training",
    ]
    assert next_lines(SUMMARY, "figures") == [
        "",
        "where to look next",
        "  headway ui                       MLflow and Prefect in the browser",
        "  headway inspect tiny --step 179  prompts, answers, rewards of a step",
        "  headway audit tiny               where every prompt and every answer went",
        "  figures                          learning curve, staleness, timeline",
    ]


def test_a_summary_without_validation_or_steps_shows_dashes() -> None:
    empty = dict.fromkeys(SUMMARY) | {"run_key": "k", "status": "failed", "steps": 0, "wall_s": 1.0,
                                      "groups_trained": 0, "groups_dropped": 0}
    assert summary_lines(empty)[4:] == [
        "  accuracy    - -> -", "  groups      0 trained, 0 dropped", "  staleness   mean -, max - publications",
        "  update lag  mean - updates", "  speed       - answers/s while training"]
    assert not any("inspect" in line for line in next_lines(empty))


def test_the_end_of_a_stopped_or_failed_run_is_at_most_five_lines() -> None:
    stopped = stopped_lines(run_key="k", signal="Ctrl-C", step=42, total=180, resume="headway train --run-key k")
    failed = failed_lines(run_key="k", cause="RewardError: score() returned nan", logs="/r", resume="headway train")
    assert len(stopped) <= 5 and len(failed) <= 5
    assert "stopped by Ctrl-C after 42 of 180 steps; what has landed is kept" in stopped
    assert "failed: RewardError: score() returned nan" in failed


def test_what_a_dead_part_wrote_last_stands_below_the_cause() -> None:
    lines = failed_lines(run_key="k", cause="LearnerDead: gone\nthe end of learner-0.log:\nout of memory", logs="/r",
                         resume="headway train")
    assert lines[1:5] == ["failed: LearnerDead: gone", "    the end of learner-0.log:", "    out of memory",
                          "  logs     /r"]


TEXTS = {
    "seconds": (duration(38.4), "38 s"),
    "minutes": (duration(112), "1 min 52 s"),
    "hours": (duration(7500), "2 h 05 min"),
    "thousands": (number(1234567.4), "1 234 567"),
    "sparks": (sparkline([0.0, 0.5, 1.0]), "▁▅█"),
    "flat": (sparkline([2.0, 2.0]), "▁▁"),
    "none": (sparkline([]), ""),
    "escape": (clean("a\x1b[31mb\r\nc"), "a [31mb  c"),
}


@pytest.mark.parametrize(("got", "expected"), TEXTS.values(), ids=TEXTS)
def test_texts(got: str, expected: str) -> None:
    assert got == expected


def test_the_first_line_is_out_before_anything_heavy_is_imported() -> None:
    code = """
import sys, time
started = time.perf_counter()
from flows.console import Console
Console(live=False).line("headway")
took = time.perf_counter() - started
heavy = {"rich", "torch", "numpy", "pyarrow", "prefect", "ray", "mlflow", "pydantic"} & set(sys.modules)
assert not heavy, heavy
assert took < 0.3, took
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "headway\n", "")
