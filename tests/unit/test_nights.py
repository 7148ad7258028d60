"""What a night is on disk: its key, its runs, what it was asked for and what came out, good nights before it."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

import pytest

from rl_core.errors import BrokenFile, ConfigError, EngineMismatch, LearnerDead, RewardTimeout
from rl_core.looking.comparison import Difference
from rl_core.looking.failures import component_of, place_of
from rl_core.nightly.gates import Judgement, Thresholds, Verdict
from rl_core.nightly.nights import (
    MOST_RUNS,
    Baseline,
    Compared,
    Night,
    NightDir,
    NightRun,
    Outcome,
    good_before,
    is_later,
    keys_for,
    matrix_of,
    nights_in,
    put_night,
    put_outcome,
    read_night,
    read_outcome,
    run_keys,
    told_outcome,
)
from rl_core.run_dir import RunDir, put_if_absent, replace_file, to_json

DUE = datetime(2026, 11, 30, 2, 0, 7)
NUMBER = Difference("held_out_accuracy", 0.7, 0.8, 0.1, 0.05, 0.15, "share", "more")
UNKNOWN = Difference("samples_per_s", math.nan, 80.0, math.nan, math.nan, math.nan, "answers/s", "more")


def night(key: str, *, name: str = "nightly", due: int = 1, runs: int = 1) -> Night:
    return Night(key=key, name=name, flow_run_id="f" * 36, scheduled_us=due, preset="tiny-cpu",
                 runs=tuple(NightRun(run_key=each, overrides={"seed": 2}) for each in run_keys(key, runs)),
                 thresholds=Thresholds(accuracy_gain=0.01), notify="env:HOOK")


def outcome(key: str, verdict: Verdict = "promote") -> Outcome:
    judgement = Judgement(verdict=verdict, reasons=("so it is",))
    return Outcome(verdict=verdict, reasons=judgement.reasons, run_key=key, ts_us=5, notes=("a note",),
                   baseline=Baseline(kind="champion", run_key="nightly-2026-11-29", version=3),
                   compared=(Compared(run_key=key, differences=(NUMBER, UNKNOWN), judgement=judgement),),
                   changed={"learner.lr": (1e-4, 1e-2)})


def test_a_night_is_called_by_its_date_and_by_its_time_where_that_is_taken() -> None:
    assert keys_for("nightly", DUE, "0f" * 12 + "-0123456789ab") == (
        "nightly-2026-11-30", "nightly-2026-11-30-0200", "nightly-2026-11-30-020007",
        "nightly-2026-11-30-0123456789ab")


def test_a_matrix_numbers_its_runs() -> None:
    assert run_keys("nightly-2026-11-30", 1) == ("nightly-2026-11-30",)
    assert run_keys("n", 3) == ("n.1", "n.2", "n.3")


MATRICES = {
    "nothing": ([], [], [{"a": 1}]),
    "seeds": ([1, 2], [], [{"a": 1, "seed": 1}, {"a": 1, "seed": 2}]),
    "rows": ([], [{"b": 2}, {"a": 3}], [{"a": 1, "b": 2}, {"a": 3}]),
    "both": ([1, 2], [{"b": 2}, {"b": 3}], [{"a": 1, "b": b, "seed": seed} for b in (2, 3) for seed in (1, 2)]),
}


@pytest.mark.parametrize(("seeds", "rows", "expected"), MATRICES.values(), ids=MATRICES)
def test_a_matrix_is_every_row_with_every_seed(seeds: list[int], rows: list[dict[str, int]],
                                               expected: list[dict[str, int]]) -> None:
    assert list(matrix_of({"a": 1}, seeds, rows)) == expected


def test_a_matrix_with_a_run_twice_or_too_many_is_refused() -> None:
    with pytest.raises(ConfigError, match="runs 1 and 3 have the same settings"):
        matrix_of({}, [1, 2, 1], [])
    with pytest.raises(ConfigError, match=f"use at most {MOST_RUNS}"):
        matrix_of({}, range(MOST_RUNS + 1), [])


def test_what_was_asked_for_and_what_came_out_are_written_once(tmp_path: Path) -> None:
    place = NightDir(tmp_path / "nightly-2026-11-30")
    asked, came = night("nightly-2026-11-30", runs=2), outcome("nightly-2026-11-30.1")
    assert put_night(place, asked) and read_night(place) == asked and asked.is_matrix
    assert not put_night(place, night("nightly-2026-11-30"))
    with pytest.raises(FileNotFoundError):
        read_outcome(place)
    stored = put_outcome(place, came)
    assert str(stored) == str(came), "NaN included"
    assert put_outcome(place, outcome("other", "alarm")).verdict == "promote", "the first one stands"
    assert stored.differences[0] == NUMBER and str(stored.baseline) == "nightly-2026-11-29 (champion, version 3)"


def test_a_broken_night_is_named(tmp_path: Path) -> None:
    place = NightDir(tmp_path)
    put_if_absent(place.night, to_json({"key": "x"}))
    with pytest.raises(BrokenFile, match=r"night\.json"):
        read_night(place)


def test_good_nights_are_those_before_that_were_promoted_or_kept(tmp_path: Path) -> None:
    """The newest first; of the same name; an alarm and a night without a verdict are none."""
    verdicts: dict[str, tuple[str, int, Verdict | None]] = {
        "a": ("nightly", 1, "promote"), "b": ("nightly", 2, "alarm"), "c": ("nightly", 3, "keep"),
        "d": ("other", 4, "keep"), "e": ("nightly", 5, None), "later": ("nightly", 9, "promote")}
    for key, (name, due, verdict) in verdicts.items():
        put_night(NightDir(tmp_path / key), night(key, name=name, due=due))
        if verdict is not None:
            put_outcome(NightDir(tmp_path / key), outcome(key, verdict))
    (tmp_path / "stray").mkdir()
    found = list(good_before(nights_in(tmp_path), night("now", due=6)))
    assert found == ["c", "a"]
    assert list(good_before(nights_in(tmp_path / "nowhere"), night("now", due=6))) == []


LATER: dict[str, tuple[tuple[Night | None, int], int, bool]] = {
    "a later night, registered before": ((night("tuesday", due=2), 5), 6, True),
    "a later night, registered after": ((night("tuesday", due=2), 7), 6, True),
    "an earlier night": ((night("sunday", due=0), 5), 6, False),
    "an earlier night, finished still later": ((night("sunday", due=0), 7), 6, False),
    "itself": ((night("monday", due=1), 6), 6, False),
    "of the same moment, registered after": ((night("other", due=1), 7), 6, True),
    "a night that is gone, registered before": ((None, 5), 6, False),
    "a night that is gone, registered after": ((None, 7), 6, True)}


@pytest.mark.parametrize(("champion", "version", "expected"), LATER.values(), ids=LATER)
def test_a_champion_of_a_later_night_is_told_by_when_it_was_due(champion: tuple[Night | None, int], version: int,
                                                                expected: bool) -> None:
    assert is_later(champion, (night("monday", due=1), version)) is expected


def test_people_are_told_that_a_promotion_came_too_late(tmp_path: Path) -> None:
    place = NightDir(tmp_path)
    put_outcome(place, outcome("monday"))
    assert told_outcome(place).verdict == "promote"
    put_if_absent(place.version, to_json({"name": "nightly", "version": 6, "directory": "/m", "stays": "5 stays"}))
    told = told_outcome(place)
    assert (told.verdict, told.reasons) == ("keep", ("5 stays", "so it is"))
    assert read_outcome(place).verdict == "promote", "what came out is recorded as it was"


COMPONENTS = {
    "learner": LearnerDead("rank 0"), "rollout": EngineMismatch("x"), "reward": RewardTimeout("x"),
    "experience store": BrokenFile("x"), "settings": ConfigError("x"), "disk": OSError(28, "full"),
    "flow": ZeroDivisionError("x")}


@pytest.mark.parametrize(("component", "error"), COMPONENTS.items(), ids=COMPONENTS)
def test_a_failure_names_its_component(component: str, error: BaseException) -> None:
    assert component_of(error) == component


def test_a_failure_names_the_first_step_without_a_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert place_of(run) == "set-up"
    replace_file(run.attempt(1), b"{}")
    assert place_of(run) == "training step 0"
    replace_file(run.record(6), b"{}")
    assert place_of(run) == "training step 7"
