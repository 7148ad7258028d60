"""What is said of a failure that a dead part has caused: its cause, and below it what the part wrote last."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rl_core.errors import DeadlinePassed, FailureBudgetSpent, LearnerDead
from rl_core.looking.failures import tell_last_lines
from rl_core.run_log import LAST_LINES, LINE_CHARACTERS, TAIL_BYTES, last_lines

WRITTEN: dict[str, tuple[str, list[str]]] = {
    "nothing": ("", []),
    "less than is shown": ("Traceback\n\n  KeyError: 3  \n", ["Traceback", "  KeyError: 3"]),
    "more than is shown": ("".join(f"line {i}\n" for i in range(50)), [f"line {i}" for i in range(40, 50)]),
    "no end of line": ("one\ntwo", ["one", "two"]),
    "a long line": ("x" * 1000, ["x" * LINE_CHARACTERS]),
    "more than is read": ("y" * TAIL_BYTES + "\nlast", ["y" * LINE_CHARACTERS, "last"]),
    "secrets": ("key correct-horse-battery at postgresql://me:word@host/db", ["key *** at postgresql://me:***@host/db"]),
    "no text": ("\udcff\udcfe", ["\ufffd\ufffd"]),
}


@pytest.mark.parametrize(("text", "expected"), WRITTEN.values(), ids=WRITTEN)
def test_the_end_of_a_log_is_its_last_lines_without_secrets(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]) -> None:
    monkeypatch.setenv("WEBHOOK_SECRET", "correct-horse-battery")
    log = tmp_path / "learner-0.log"
    log.write_bytes(text.encode(errors="surrogateescape"))
    assert last_lines(log) == expected and len(expected) <= LAST_LINES


def died(log: Path | None, why: str = "learner/0 (pid 7) is dead") -> LearnerDead:
    death = LearnerDead(why)
    death.log = log
    return death


def spent(cause: Exception) -> FailureBudgetSpent:
    error = FailureBudgetSpent(f"the learner died 2 times; the last: {cause}")
    error.__cause__ = cause
    return error


def of_a_file(cause: Exception) -> OSError:
    error = OSError(28, "No space left on device")
    error.__cause__ = cause
    return error


def test_an_error_that_a_dead_part_has_caused_says_below_its_first_line_what_the_part_wrote_last(
        tmp_path: Path) -> None:
    log, empty, absent = (tmp_path / f"learner-{rank}.log" for rank in range(3))
    log.write_text("loading\nout of memory\n")
    empty.touch()
    cases = [
        (died(log), "learner/0 (pid 7) is dead\nthe end of learner-0.log:\nloading\nout of memory"),
        (spent(died(log)), "the learner died 2 times; the last: learner/0 (pid 7) is dead\nthe end of learner-0.log:\n"
                           "loading\nout of memory"),
        (died(empty), "learner/0 (pid 7) is dead\nlearner-1.log is empty"),
        (died(absent), "learner/0 (pid 7) is dead\nlearner-2.log is empty"),
        (pickle.loads(pickle.dumps(died(log, "far away"))), "far away\nthe end of learner-0.log:\nloading\n"
                                                            "out of memory"),
        (died(None), "learner/0 (pid 7) is dead"),
        (DeadlinePassed("MLflow"), "MLflow"),
        (spent(ValueError("rewards")), "the learner died 2 times; the last: rewards"),
        (of_a_file(died(log)), "[Errno 28] No space left on device"),
    ]
    for error, said in cases:
        tell_last_lines(error)
        assert str(error) == said
