"""`make study-report`: table, figure and page of docs/study, and the summary in docs/staleness.md, from the rows alone.

    python -m tests.study.report          takes over what `make study` has left, then makes them

Nothing of them is typed by hand; a test makes them again and compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tasks.paths import headway_home
from tests.study.compared import Compared, compared, interval, verdict
from tests.study.figures import draw
from tests.study.measured import Point, RunRow, read_rows, write_rows
from tests.study.order import GOAL, STALENESS, UNCORRECTED, Cell

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- made by make study-report -->", "<!-- end of what make study-report made -->"
NO_RUNS = "No run is in `docs/study/` yet: `make study`, then `make study-report`."
HEAD = """# Learning under staleness: what was measured

Made by `make study-report` from `runs.csv` and `points.csv` beside it; [staleness](../staleness.md) says what is
compared and how. One row is one cell over its seeds. Intervals are 95 %, over seeds; differences are to bound 0 of the
same seed.

"""
ACCURACY = ("correction", "staleness", "seeds", "update lag", "accuracy, equal samples", "against bound 0",
            "at equal wall time", "seconds")
WASTE = ("correction", "staleness", "learner waits", "wasted groups", "length bias", "answer length against bound 0")
NOTES = """
*Update lag*: optimizer updates between the weights that sampled a token and those at the start of its step; two a step.
*At equal wall time*: both at the moment at which the faster of the pair has made its last step. *Seconds*: from the
first lease to the last record. *Wasted groups*: finished and never trained. *Length bias*: tokens of a trained group
over those of a judged one, minus 1. *Answer length*: tokens of a held-out greedy answer at the end.
"""


def write_report(docs: Path) -> None:
    """Make `docs/study/` and the summary in `docs/staleness.md` from the rows in `docs/study/`."""
    runs, points = read_both(docs / "study")
    page = docs / "staleness.md"
    page.write_text(_between(page.read_text(), summary(runs, points)))
    if runs:
        (docs / "study" / "results.md").write_text(results(runs, points))
        draw(runs, points, docs / "study" / "learning-under-staleness.svg")


def read_both(directory: Path) -> tuple[list[RunRow], list[Point]]:
    """The rows of `runs.csv` and `points.csv`; none where they are not there."""
    if not (directory / "runs.csv").exists():
        return [], []
    return read_rows(directory / "runs.csv", RunRow), read_rows(directory / "points.csv", Point)


def write_both(directory: Path, runs: Sequence[RunRow], points: Sequence[Point]) -> None:
    """Write both files anew."""
    directory.mkdir(parents=True, exist_ok=True)
    write_rows(directory / "runs.csv", runs)
    write_rows(directory / "points.csv", points)


def results(runs: Sequence[RunRow], points: Sequence[Point]) -> str:
    """The page `docs/study/results.md`."""
    cells = compared(runs, points)
    return (f"{HEAD}{len(runs)} runs of {runs[0].steps} steps, {runs[0].samples} answers each.\n\n"
            f"![Held-out accuracy by update lag and by time](learning-under-staleness.svg)\n\n{_goal(runs, points)}\n"
            f"## Accuracy\n\n{_head(ACCURACY)}{''.join(_accuracy_line(cell) for cell in cells)}\n"
            f"## What was wasted, and lengths\n\n{_head(WASTE)}{''.join(_waste_line(cell) for cell in cells)}{NOTES}")


def summary(runs: Sequence[RunRow], points: Sequence[Point]) -> str:
    """What stands in `docs/staleness.md`: the goal, and corrections against staleness."""
    if not runs:
        return NO_RUNS + "\n"
    cells = {each.cell: each for each in compared(runs, points)}
    names = list(dict.fromkeys(cell.correction for cell in cells if cell.mode == "exact"))
    lines = list[str]()
    for name in names:
        found = [cells.get(Cell(name, "exact", staleness)) for staleness in STALENESS]
        shown = ["-" if each is None else interval(each.difference) for each in found]
        lines.append(f"| {name} | {' | '.join(shown)} |\n")
    head = _head(("correction", *(f"exactly {staleness}" for staleness in STALENESS)))
    return (f"{_goal(runs, points)}\nHeld-out accuracy after equally many samples, minus that of bound 0 of the same "
            f"seed, {len(runs)} runs:\n\n{head}{''.join(lines)}\nTimes, waste and lengths: "
            "[results](study/results.md).\n\n![Held-out accuracy by update lag and by time]"
            "(study/learning-under-staleness.svg)\n")


def _goal(runs: Sequence[RunRow], points: Sequence[Point]) -> str:
    found = verdict(runs, points)
    if found is None:
        return f"The goal compares `{GOAL.name}` with bound 0 and `{UNCORRECTED.name}`: these runs are not here.\n"
    return f"**The goal**, {found.seeds} seeds:\n\n" + "".join(f"* {each}\n" for each in found.sentences)


def _head(names: Sequence[str]) -> str:
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|\n"


def _named(cell: Compared) -> str:
    of = cell.cell
    if of.staleness == 0:
        return "| bound 0 | 0 "
    return f"| {of.correction} | {'exactly' if of.mode == 'exact' else f'`{of.mode}`, bound'} {of.staleness} "


def _accuracy_line(cell: Compared) -> str:
    return (f"{_named(cell)}| {cell.seeds} | {interval(cell.update_lag, '.2f')} | {interval(cell.accuracy, '.3f')} | "
            f"{interval(cell.difference)} | {interval(cell.time_difference)} | {interval(cell.seconds, '.1f')} |\n")


def _waste_line(cell: Compared) -> str:
    return (f"{_named(cell)}| {interval(cell.learner_waiting, '.2f')} | {interval(cell.wasted_groups, '.3f')} | "
            f"{interval(cell.length_bias)} | {interval(cell.length_difference, '+.2f')} |\n")


def _between(page: str, text: str) -> str:
    """The page with this text between the two marks. Raises ValueError where they are not there."""
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/staleness.md: {BEGIN} and {END} must stand in it")
    return f"{before}{BEGIN}\n\n{text}\n{END}{behind}"


def take(home: Path, docs: Path, name: str) -> str:
    """Take over the rows that `make study` has left under HEADWAY_HOME, unless there are more in `docs` already.

    Returns what was done, in words.
    """
    made, _ = fresh = read_both(home / "study" / name)
    there, _ = read_both(docs / "study")
    if len(made) < len(there) or not made:
        return f"{len(there)} runs in docs/study stay: {len(made)} are under {home / 'study' / name}"
    write_both(docs / "study", *fresh)
    return f"{len(made)} runs from {home / 'study' / name}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="make study-report", description=__doc__)
    parser.add_argument("--name", default="study", help="as given to make study")
    parser.add_argument("--docs", type=Path, default=DOCS)
    asked = parser.parse_args()
    print(take(headway_home(), asked.docs, asked.name))
    write_report(asked.docs)


if __name__ == "__main__":
    main()
