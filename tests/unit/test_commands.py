"""The contract of docs/cli.md, command by command of the real app: verbs, `--json`, exit codes, refusals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from flows import command
from flows.cli import app
from flows.command import answer, guarded
from rl_core.errors import (
    BrokenFile,
    ConfigError,
    DataError,
    DeadlinePassed,
    NoExclusiveCreate,
    ReplayUnavailable,
    RewardError,
    RunEnded,
    RunIsAlive,
)

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
MORE = {"replay": ("--step", "0"), "rollout": ("--groups", "4"), "explain": ("--policy", "drop")}
"""What a command wants beside what its signature says."""


def commands(group: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """`("services up", its command)` for each of the app."""
    if not hasattr(group, "commands"):
        yield " ".join(name), group
        return
    for word, one in group.commands.items():
        yield from commands(one, (*name, word))


COMMANDS = dict(commands(typer.main.get_command(app)))


def table(section: str) -> list[list[str]]:
    """Cells of the table of a section, without its head."""
    text = DOCUMENT.split(f"## {section}", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return rows[2:]


VERBS = {re.sub(r" \[?[A-Z_]+(\.\.\.)?\]?", "", row[0].strip("`").removeprefix("headway ")): row
         for row in table("1 Verbs")}
CODES = {int(row[0]) for row in table("2 Exit codes")}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with nothing in it; what a command does to this process does not outlast the test."""
    before = dict(os.environ)
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    monkeypatch.chdir(tmp_path)
    os.environ["HEADWAY_HOME"] = str(tmp_path / "home")
    yield tmp_path / "home"
    os.environ.clear()
    os.environ.update(before)


def options(name: str) -> set[str]:
    return {option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("--")}


def test_every_command_is_in_the_table_and_nothing_else_is() -> None:
    assert sorted(VERBS) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_who_knows_json_and_which_codes_there_are(name: str) -> None:
    _, what, knows_json, codes = VERBS[name]
    assert what and knows_json == ("yes" if "--json" in options(name) else "no")
    said = {int(code) for code in codes.split()}
    assert {0, 1, 2, 130, 143} <= said <= CODES
    assert (124 in said) == (name in ("train", "rerun", "rollout")), "only runs have a max_wall_time"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_every_option_says_what_it_is(name: str) -> None:
    one = COMMANDS[name]
    bare = [parameter.name for parameter in one.params if not parameter.help]
    assert one.help and not bare


def test_the_codes_of_the_document_are_those_of_the_program() -> None:
    named = {command.FAILED, command.REFUSED, command.OUT_OF_TIME, command.INTERRUPTED, command.TERMINATED}
    assert {0} | named == CODES


def words(name: str, key: str) -> list[str] | None:
    """A call of this command with this key; None for one that takes none."""
    said = list(MORE.get(name, ()))
    keyed = False
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument" and (parameter.metavar or "").startswith("RUN_KEY"):
            said, keyed = [*said, *[key] * (2 if parameter.nargs == -1 else 1)], True
        elif "--run-key" in parameter.opts:
            said, keyed = [*said, "--run-key", key], True
        elif parameter.required and parameter.opts[0] not in said:
            said += [parameter.opts[0], "out.html"]
    return [*name.split(), *said] if keyed else None


NO_SUCH_RUN = [name for name in COMMANDS if words(name, "k") and "--run-key" not in options(name)]
KEYED = [name for name in COMMANDS if words(name, "k")]


@pytest.mark.parametrize("name", NO_SUCH_RUN)
def test_a_run_that_is_not_there_is_refused_by_name(name: str, alone: Path) -> None:
    refused(words(name, "no-such-run"), "no-such-run")
    assert not (alone / "runs" / "no-such-run").exists()


@pytest.mark.parametrize("name", KEYED)
def test_a_key_that_is_none_is_refused(name: str, alone: Path) -> None:
    refused(words(name, "../elsewhere"), "error: --run-key '../elsewhere': use at most 100 letters")
    assert not (alone / "elsewhere").exists()


def refused(said: list[str] | None, message: str) -> None:
    assert said is not None
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, [*said, *more])
        assert done.exit_code == 2, (done.output, done.exception)
        assert isinstance(done.exception, SystemExit), done.exception
        assert message in done.stderr and "Traceback" not in done.output
        assert all(line.startswith("error: ") for line in done.stderr.splitlines())
        assert "{" not in done.stdout


def test_many_commands_were_asked() -> None:
    assert len(NO_SUCH_RUN) >= 11 and len(KEYED) >= 14


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_is_none_is_refused(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split(), "--nope"])
    assert done.exit_code == 2 and "No such option: --nope" in done.stderr


# -- the one place that knows which error is which code

ENDS: dict[str, tuple[BaseException, int]] = {
    "settings": (ConfigError("seed: at least 0 (got -1)"), 2),
    "data": (DataError("rows.jsonl:3: no prompt"), 2),
    "a live owner": (RunIsAlive("runs/k: the run is alive"), 2),
    "a file system": (NoExclusiveCreate("/mnt: no links"), 2),
    "a damaged file": (BrokenFile("run.json: not JSON"), 2),
    "a replay": (ReplayUnavailable("step 3: absent"), 2),
    "a reward": (RewardError("it raised"), 1),
    "a deadline": (DeadlinePassed("no answer in 3 s"), 1),
    "an end": (RunEnded("nothing to train on"), 1),
    "a disk": (OSError(28, "No space left on device"), 1),
}


@pytest.mark.parametrize(("error", "code"), ENDS.values(), ids=ENDS)
def test_each_error_has_its_code_and_its_line(error: BaseException, code: int,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise error

    assert guarded(work) == code
    assert capsys.readouterr() == ("", f"error: {error}\n")


def test_ctrl_c_says_what_was_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise KeyboardInterrupt

    assert (guarded(work), guarded(work, stopped="nothing was written")) == (130, 130)
    assert capsys.readouterr().err == "error: nothing was written\n"


def test_a_mistake_of_headways_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 // 0)


def test_an_answer_is_words_or_json_and_its_code_says_whether_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    report = {"holds": False, "n": 3}

    def asked(*, as_json: bool, both: bool = False) -> tuple[int, str]:
        code = answer(lambda: report, lambda found: [f"n {found['n']}"], as_json=as_json, both=both,
                      holds=lambda found: found["holds"])
        return code, capsys.readouterr().out

    assert asked(as_json=False) == (1, "n 3\n")
    assert asked(as_json=True) == (1, '{"holds": false, "n": 3}\n')
    assert asked(as_json=True, both=True) == (1, 'n 3\n{"holds": false, "n": 3}\n')


STUCK = """
import atexit, sys, threading, time
from flows import cli, command
command.LEAVE_S = 0.5
threading.Thread(target=time.sleep, args=(60,)).start()  # as one that asks a Ray head that is dead
threading._register_atexit(time.sleep, 60)  # as what Prefect does for a server that is away
sys.argv = ["headway", *sys.argv[1:]]
cli.process()
"""


@pytest.mark.parametrize(("words", "code"), [(("--help",), 0), (("status", "no-such-run"), 2)], ids=["said", "refused"])
def test_a_command_that_has_ended_is_gone_whatever_still_waits_in_it(words: tuple[str, ...], code: int,
                                                                     tmp_path: Path) -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK, *words], env=os.environ | {"HEADWAY_HOME": str(tmp_path)},
                          capture_output=True, text=True, timeout=50)
    assert done.returncode == code and time.monotonic() - begun < 30
    assert ("Usage" in done.stdout) if code == 0 else ("no-such-run" in done.stderr)
