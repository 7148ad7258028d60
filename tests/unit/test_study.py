"""`make study`: its order, what a budget buys, going on, the rows of recorded runs, table, figure and verdict."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.estimates import Estimate
from rl_core.plan import make_plan, parse_overrides, resolve
from rl_core.run_dir import put_if_absent, to_json
from tasks.paths import run_dir
from tests.looking import small_run
from tests.study.compared import accuracy_at, compared, interval, verdict
from tests.study.figures import draw
from tests.study.measured import Point, RunRow, measured, read_rows, write_rows
from tests.study.order import (
    BOUND_0,
    CELLS,
    COMMON,
    GOAL,
    SEEDS,
    UNCORRECTED,
    Cell,
    StudyRun,
    expected_s,
    fits,
    left,
    ordered,
    seconds_of,
)
from tests.study.report import BEGIN, DOCS, END, NO_RUNS, read_both, results, summary, take, write_both, write_report
from tests.study.study import collect, study, took_of

RUNS = ordered()


# -- the order


def test_the_goal_comes_first_and_then_each_seed_takes_every_other_cell() -> None:
    assert [(run.cell, run.seed) for run in RUNS[:15]] == [
        (cell, seed) for seed in SEEDS for cell in (BOUND_0, GOAL, UNCORRECTED)]
    rest = RUNS[15:]
    assert [run.seed for run in rest] == sorted(run.seed for run in rest)
    assert Counter(run.cell for run in RUNS) == dict.fromkeys(CELLS, 5)
    assert len(CELLS) == 1 + 5 * 6 + 2 * 3 and len({run.key("study") for run in RUNS}) == len(RUNS) == 185


def test_any_prefix_behind_the_goal_has_every_cell_equally_often_but_for_one() -> None:
    for end in range(15, len(RUNS) + 1):
        count = Counter(run.cell for run in RUNS[15:end])
        of = [count[cell] for cell in CELLS if cell not in (BOUND_0, GOAL, UNCORRECTED)]
        assert max(of) - min(of) <= 1


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_settings_of_a_cell_can_be_planned(cell: Cell) -> None:
    from flows.presets import load_preset

    config = resolve(load_preset("tiny-cpu"), parse_overrides(list(StudyRun(cell, 3).settings(40))))
    make_plan(config)
    assert (config.seed, config.total_steps, config.staleness.bound) == (3, 40, cell.staleness)
    assert config.staleness.exact == (cell.staleness if cell.mode == "exact" else None)
    assert config.updates_per_step == 2 and config.learner.decay == "constant"


def test_runs_of_a_seed_differ_in_nothing_but_their_cell() -> None:
    assert {run.settings(40)[:len(COMMON)] for run in RUNS} == {COMMON}
    assert StudyRun(BOUND_0, 2).key("study") == "study-bound-0-s2"
    assert StudyRun(GOAL, 3).key("study") == "study-decoupled-exact-8-s3"


# -- the budget


def test_a_run_is_expected_to_take_what_others_took() -> None:
    took = {StudyRun(GOAL, 1): 30.0, StudyRun(GOAL, 2): 40.0, StudyRun(BOUND_0, 1): 90.0}
    assert expected_s(StudyRun(GOAL, 3), took, 50) == 35.0
    assert expected_s(StudyRun(UNCORRECTED, 1), took, 50) == 40.0
    assert expected_s(StudyRun(UNCORRECTED, 1), {}, 50) == 50
    assert fits(StudyRun(GOAL, 3), took, left_s=35, guess_s=50) and not fits(StudyRun(GOAL, 3), took, left_s=34,
                                                                              guess_s=50)


def test_a_budget_is_read() -> None:
    assert [seconds_of(text) for text in ("2h", "1.5h", "90m", "45s", "30")] == [7200, 5400, 5400, 45, 30]
    for text in ("0s", "-1h", "two"):
        with pytest.raises(ValueError):
            seconds_of(text)


class Machine:
    """Trains by writing what a run's end leaves, in ten seconds of its clock; some runs are stopped or fail."""

    def __init__(self, codes: dict[StudyRun, int] | None = None) -> None:
        self.now, self.begun, self.codes = 0.0, list[StudyRun](), codes or {}

    def train(self, run: StudyRun) -> int:
        self.begun.append(run)
        self.now += 10.0
        if code := self.codes.get(run, 0):
            return code
        put_if_absent(run_dir(run.key("study")).result, to_json(
            {"status": "completed", "ended": "steps", "wall_s": 4.0}))
        return 0

    def go(self, runs: tuple[StudyRun, ...] = RUNS[:6], budget_s: float | None = None) -> dict[str, object]:
        return study("study", runs, steps=40, budget_s=budget_s, train=self.train, clock=lambda: self.now,
                     say=lambda text: None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("home")
def test_a_budget_buys_a_prefix_and_the_next_call_goes_on_behind_it() -> None:
    machine = Machine()
    assert machine.go(budget_s=39)["done"] == 0, "40 are guessed for the first run"
    report = machine.go(budget_s=45)
    assert machine.begun == list(RUNS[:4]), "each took 10, so that a fifth does not fit"
    assert report["done"] == 4 and "the budget of 45 s" in str(report["ended"])
    assert left(RUNS[:6], took_of("study", RUNS)) == RUNS[4:6]
    machine = Machine()
    assert machine.go()["ended"] == "all runs are done" and machine.begun == list(RUNS[4:6])
    assert Machine().go()["done"] == 6


@pytest.mark.usefixtures("home")
def test_a_run_that_was_stopped_ends_the_study_and_is_gone_on_with_first() -> None:
    report = Machine({RUNS[1]: 130}).go()
    assert (report["done"], report["ended"]) == (1, "stopped")
    machine = Machine()
    machine.go()
    assert machine.begun[0] == RUNS[1]


@pytest.mark.usefixtures("home")
def test_a_run_that_fails_is_passed_over_and_three_in_a_row_end_the_study() -> None:
    report = Machine({RUNS[1]: 1}).go()
    assert report["failed"] == [RUNS[1].key("study")] and report["done"] == 5
    machine = Machine(dict.fromkeys(RUNS, 1))
    assert machine.go(RUNS[:15])["ended"] == "3 runs in a row failed" and len(machine.begun) == 3


# -- rows of recorded runs


def test_a_recorded_run_becomes_a_row_and_its_points(tmp_path: Path) -> None:
    row, points = measured(small_run(tmp_path / "small"), StudyRun(GOAL, 2))
    assert (row.cell, row.seed, row.steps, row.samples, row.attempts) == (GOAL, 2, 3, 24, 1)
    assert (row.accuracy_start, row.accuracy, row.staleness_mean, row.update_lag) == (0.25, 0.5, 0.5, 1.0)
    assert (row.groups_trained, row.groups_dropped, row.groups_failed) == (6, 1, 1)
    assert row.wasted_groups == 2 / 8
    assert [(point.step, point.accuracy) for point in points] == [(0, 0.25), (2, 0.75), (3, 0.5)]
    assert points[0].seconds == 0 and points[2].seconds - points[1].seconds == 1 and row.seconds == points[2].seconds


def test_the_seconds_of_a_run_with_two_starts_are_not_known(tmp_path: Path) -> None:
    run = small_run(tmp_path / "small")
    put_if_absent(run.attempt(2), to_json({"attempt": 2}))
    row, points = measured(run, StudyRun(GOAL, 2))
    assert row.attempts == 2 and math.isnan(row.seconds) and all(math.isnan(point.seconds) for point in points)
    assert row.accuracy == 0.5


def test_rows_survive_their_file(tmp_path: Path) -> None:
    row, points = measured(small_run(tmp_path / "small"), StudyRun(GOAL, 2))
    write_rows(tmp_path / "runs.csv", [replace(row, wasted_tokens=math.nan)])
    write_rows(tmp_path / "points.csv", points)
    [again] = read_rows(tmp_path / "runs.csv", RunRow)
    assert math.isnan(again.wasted_tokens) and replace(again, wasted_tokens=0.5).cell == GOAL
    assert (again.accuracy, again.samples) == (row.accuracy, row.samples)
    assert [point.accuracy for point in read_rows(tmp_path / "points.csv", Point)] == [0.25, 0.75, 0.5]


def test_finished_runs_are_collected_in_order(home: Path) -> None:
    for run in (RUNS[1], RUNS[0]):
        put_if_absent(small_run(home / "runs" / run.key("study"), run.key("study")).result, to_json(
            {"status": "completed", "ended": "steps", "wall_s": 4.0}))
    small_run(home / "runs" / RUNS[2].key("study"))  # has no end yet
    rows, points = collect("study", RUNS)
    assert [row.cell for row in rows] == [BOUND_0, GOAL] and len(points) == 6
    assert verdict(rows, points) is not None


# -- what is made of them


def row_of(cell: Cell, seed: int, accuracy: float, seconds: float, lag: float = 0.0) -> RunRow:
    return RunRow(cell.correction, cell.mode, cell.staleness, seed, steps=40, samples=5120, attempts=1,
                  accuracy_start=0.3, accuracy=accuracy, staleness_mean=lag / 2, update_lag=lag, seconds=seconds,
                  learner_waiting=0.1, groups_trained=640, groups_dropped=0, groups_failed=0, tokens_masked=0,
                  wasted_tokens=0.0, length_trained=20.0, length_judged=20.0, length_end=5.0)


def curve_of(row: RunRow) -> list[Point]:
    """A straight line."""
    return [Point(row.correction, row.mode, row.staleness, row.seed, step, step / 40 * row.seconds,
                  row.accuracy_start + (row.accuracy - row.accuracy_start) * step / 40) for step in (0, 20, 40)]


def made_up(loss: float = 0.01, seconds: float = 10.0) -> tuple[list[RunRow], list[Point]]:
    """Three seeds: bound 0 ends at 0.8 and a bit after 20 s, decoupled lower by `loss` after `seconds`, uncorrected by
    0.2."""
    rows = [row_of(cell, seed, 0.8 + 0.01 * seed - less - 0.001 * seed * (less > 0), took, lag)
            for seed in (1, 2, 3) for cell, less, took, lag in
            ((BOUND_0, 0.0, 20.0, 0.5), (GOAL, loss, seconds, 16.0), (UNCORRECTED, 0.2, seconds, 16.0))]
    return rows, [point for row in rows for point in curve_of(row)]


def test_accuracy_at_a_moment_lies_on_the_line_between_validations() -> None:
    curve = curve_of(row_of(GOAL, 1, 0.7, 10.0))
    assert [accuracy_at(curve, seconds) for seconds in (0.0, 2.5, 10.0, 99.0)] == pytest.approx([0.3, 0.4, 0.7, 0.7])
    assert math.isnan(accuracy_at([replace(point, seconds=math.nan) for point in curve], 1.0))
    assert math.isnan(accuracy_at([], 1.0))


def test_differences_are_paired_by_seed() -> None:
    rows, points = made_up()
    of = {each.cell: each for each in compared(rows, points)}
    assert of[GOAL].difference.value == pytest.approx(-0.012)
    assert of[GOAL].difference.hi - of[GOAL].difference.lo == pytest.approx(2 * 4.3027 * 0.001 / math.sqrt(3)), (
        "the seeds' own spread of 0.01 is not in it")
    assert of[GOAL].time_difference.value == pytest.approx(0.808 - (0.3 + 0.82) / 2), "bound 0 is half way after 10 s"
    assert math.isnan(of[BOUND_0].difference.value) and of[BOUND_0].seeds == 3


def test_a_seed_without_its_pair_or_of_another_length_is_not_compared() -> None:
    rows, points = made_up()
    without = [row for row in rows if not (row.cell == BOUND_0 and row.seed == 1)]
    longer = [replace(row, steps=41) if row.cell == BOUND_0 and row.seed == 2 else row for row in without]
    of = {each.cell: each for each in compared(longer, points)}
    assert of[GOAL].seeds == 3 and of[GOAL].difference.value == pytest.approx(-0.013)
    assert math.isnan(of[GOAL].difference.lo), "one pair has no interval"


VERDICTS = {
    "met": (0.01, 10.0, (True, "**met**, with the whole interval", "**met**, with the whole interval")),
    "by the mean": (0.0275, 10.0, (True, "**met by the mean**", "**met**")),
    "not": (0.05, 10.0, (False, "**not met**", "**met**")),
    "slower": (0.01, 40.0, (False, "**met**", "**not met**")),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_goal_is_said_plainly_whichever_way_it_comes_out(name: str) -> None:
    loss, seconds, (met, *words) = VERDICTS[name]
    found = verdict(*made_up(loss, seconds))
    assert found is not None and found.met == met and found.seeds == 3
    for sentence, word in zip(found.sentences, words, strict=False):
        assert word in sentence, sentence
    assert "**no correction is visibly worse**" in found.sentences[2]


def test_without_the_runs_of_the_goal_there_is_no_verdict() -> None:
    rows, points = made_up()
    assert verdict([row for row in rows if row.cell != GOAL], points) is None
    found = verdict([row for row in rows if row.cell != UNCORRECTED], points)
    assert found is not None and "**not measured**" in found.sentences[2]


def test_an_interval_is_shown() -> None:
    assert interval(Estimate(-0.01, -0.03, 0.01)) == "-0.010 [-0.030, +0.010]"
    assert interval(Estimate(0.5, math.nan, math.nan), ".1f") == "0.5"
    assert interval(Estimate(math.nan, math.nan, math.nan)) == "-"


# -- page and figure


def test_the_page_is_made_from_the_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "staleness.md").write_text(f"before\n{BEGIN}\nanything\n{END}\nbehind\n")
    write_report(tmp_path)
    assert NO_RUNS in (tmp_path / "staleness.md").read_text() and not (tmp_path / "study").exists()
    write_both(tmp_path / "study", *made_up())
    write_report(tmp_path)
    page = (tmp_path / "staleness.md").read_text()
    assert page.startswith("before\n") and page.endswith("behind\n") and NO_RUNS not in page
    assert "decoupled at staleness 8 minus bound 0 is -0.012" in page
    assert "| decoupled | - | - | - | -0.012 [" in page
    table = (tmp_path / "study" / "results.md").read_text()
    assert "9 runs of 40 steps, 5120 answers each" in table and "| bound 0 | 0 | 3 |" in table
    assert "| decoupled | exactly 8 | 3 | 16.00 [16.00, 16.00] |" in table
    again = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_report(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == again


def test_the_figure_has_every_correction_and_the_curves_of_the_goal(tmp_path: Path) -> None:
    draw(*made_up(), tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    for word in ("realised update lag, optimizer updates", "decoupled, exactly 8", "no correction, exactly 8",
                 "bound 0", "seconds since the first lease"):
        assert f">{word}<" in text, word


def test_fewer_runs_do_not_take_the_place_of_more(tmp_path: Path) -> None:
    rows, points = made_up()
    home, docs = tmp_path / "home", tmp_path / "docs"
    assert "0 runs in docs/study stay" in take(home, docs, "study")
    write_both(home / "study" / "study", rows, points)
    assert "9 runs from" in take(home, docs, "study")
    write_both(home / "study" / "study", rows[:3], points)
    assert "9 runs in docs/study stay" in take(home, docs, "study")
    assert len(read_both(docs / "study")[0]) == 9


def test_what_is_committed_is_what_the_rows_make() -> None:
    runs, points = read_both(DOCS / "study")
    assert summary(runs, points) in (DOCS / "staleness.md").read_text()
    if runs:
        assert (DOCS / "study" / "results.md").read_text() == results(runs, points)
