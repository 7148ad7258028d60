"""Every bad input gives a clear error: where it is, what was got, what to do. Nothing is started, nothing is lost.

Three tables. REFUSED: what can be known before the start, through `headway plan` and `headway train`. FAULTS of a
reward and SPOILED shards: what shows only while a run goes on, at the lowest real level that shows it. The full disk is
a real one, of a few megabytes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.launch import launch, show_plan
from flows.presets import load_preset
from rl_core.config import Config
from rl_core.errors import FailureBudgetSpent
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.shards import ShardWriter
from rl_core.experience.verify import map_shard
from rl_core.model_setup import set_up_model
from rl_core.plan import parse_overrides, resolve
from rl_core.rollout.prompts import PromptSource
from rl_core.rollout.worker import RolloutWorker, open_worker
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent, to_json
from rl_core.run_identity import check_inputs, open_identity
from rl_core.types import Claim, Lease, Outcome, Sampling
from rl_core.weights import publish, read_tensors
from tests.builders import make_group
from tests.runs import Home, processes_of

ROOT = Path(__file__).resolve().parents[2]
KEY = "mine"
GOOD = '{"prompt": "sort 21", "answer": "12"}\n'
GOOD_IDS = '{"prompt": [1], "answer": "1"}\n'
GOOD_CHAT = '{"prompt": [{"role": "user", "content": "sort 21"}], "answer": "12"}\n'
SMALL = ["data.size=64", "data.validation_size=16"]
"""Of the built-in task: rows are tokenised before they are refused or taken."""


def tree(path: Path) -> dict[str, bytes]:
    """Every file under a directory, with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@dataclass
class Place:
    """A working directory and a HEADWAY_HOME, both empty, and the models of this module."""

    work: Path
    home: Path
    model: Path
    undo: pytest.MonkeyPatch
    locks: list[OwnerLock] = field(default_factory=list)

    def run(self) -> RunDir:
        return RunDir(self.home / "runs" / KEY)

    def write(self, name: str, data: str | bytes) -> None:
        (self.work / name).write_bytes(data if isinstance(data, bytes) else data.encode())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny architecture with random weights."""
    config = Config.model_validate({"model": {"type": "tiny", "warmup_steps": 0}})
    return set_up_model(config, tmp_path_factory.mktemp("models"))


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    made = Place(tmp_path / "work", tmp_path / "home", model, monkeypatch)
    made.work.mkdir()
    monkeypatch.chdir(made.work)
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "RAY_", "MLFLOW_", "HEADWAY_"))]:
        del os.environ[name]
    os.environ["HEADWAY_HOME"] = str(made.home)
    yield made
    for lock in made.locks:
        lock.release()
    signal.signal(signal.SIGTERM, handler)
    os.environ.clear()
    os.environ.update(before)


# -- what can be known before the start


@dataclass(frozen=True)
class Bad:
    """One bad input: how it comes about, and what the error must say (regular expressions)."""

    settings: list[str] = field(default_factory=list)
    where: str = ""
    got: str = ""
    do: str = ""
    files: dict[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Place], object] = lambda place: None
    preset: str = "tiny-cpu"
    key: str | None = None
    amend: bool = False
    verbs: tuple[str, ...] = ("plan", "train")


def data(line: str | bytes, got: str, do: str, *settings: str, where: str = r"rows\.jsonl:2: ",
         good: str = GOOD) -> Bad:
    """A data file whose second line is the bad one."""
    text = good.encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good.encode()
    return Bad(["data.train=rows.jsonl", "data.validation=null", *settings], where, got, do, {"rows.jsonl": text})


def reward(source: str, got: str, do: str, *settings: str, where: str = r"reward \./reward\.py:score: ") -> Bad:
    """A reward that the first row of a data file shows to be bad."""
    return Bad(["reward=./reward.py:score", "data.train=rows.jsonl", "data.validation=null", *settings], where, got, do,
               {"reward.py": source, "rows.jsonl": GOOD})


def directory(change: Callable[[Path], object], got: str, do: str, where: str = r"model\.path: 'model' ") -> Bad:
    """A model directory in which something is changed."""
    def prepare(place: Place) -> None:
        shutil.copytree(place.model, place.work / "model")
        change(place.work / "model")

    return Bad(["model.type=local", "model.path=./model", *SMALL], where, got, do, prepare=prepare)


def edit(name: str, **changes: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes))
    return change


def existing_run(place: Place, *settings: str) -> None:
    """A run directory as its first start leaves it, with a training record that must not be lost."""
    config = resolve(load_preset("tiny-cpu"), parse_overrides(settings))
    open_identity(place.run(), KEY, "tiny-cpu", config)
    put_if_absent(place.run().record(0), to_json({"step": 0}))


def alive_run(place: Place) -> None:
    existing_run(place, *SMALL)
    place.locks.append(OwnerLock(place.run()))


def run_of_two_claims(place: Place) -> None:
    existing_run(place, *SMALL)
    for step in range(2):
        put_if_absent(place.run().claim(step), b"{}")


def run_on_other_data(place: Place) -> None:
    existing_run(place, "data.train=rows.jsonl", "data.validation=null")
    check_inputs(place.run(), {"data": "0" * 32})


def link_overwrites(place: Place) -> None:
    """Last writer wins, as with rename: two calls in a row both believe that they created the name."""
    place.undo.setattr(os, "link", lambda source, target: shutil.copyfile(source, target))


def link_checks_first(place: Place) -> None:
    """Check, then overwrite, as clients of some file systems do: right for two calls in a row, not for two at once."""
    def link(source: Path, target: Path) -> None:
        if os.path.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        time.sleep(0.002)
        shutil.copyfile(source, target)

    place.undo.setattr(os, "link", link)
    name = place.work / "name"
    assert [put_if_absent(name, b"one"), put_if_absent(name, b"two"), name.read_bytes()] == [True, False, b"one"]
    name.unlink()


def no_links(place: Place) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))

    place.undo.setattr(os, "link", link)


def no_home(place: Place) -> None:
    place.home.write_text("a file where the directory should be")


REFUSED: dict[str, Bad] = {
    # data
    "missing data file": Bad(["data.train=nothing.jsonl"], r"nothing\.jsonl: ", "no such data file", "write `sort` or"),
    "missing validation file": Bad(["data.validation=nothing.jsonl", *SMALL], r"nothing\.jsonl: ", "no such data file",
                                   "data.validation"),
    "data file in a file": Bad(["data.train=rows.jsonl/x"], r"rows\.jsonl/x: ", "Not a directory", "cannot be read",
                               {"rows.jsonl": GOOD}),
    "data file is a directory": Bad(["data.train=."], r"\.: ", "is a directory, not a JSONL, CSV or",
                                    "name its files: data.train="),
    "empty data file": Bad(["data.train=rows.jsonl"], r"rows\.jsonl: ", "the data file is empty",
                           "each line is one JSON object", {"rows.jsonl": ""}),
    "data file of blank lines": Bad(["data.train=rows.jsonl"], r"rows\.jsonl: ", "the data file is empty",
                                    "each line is one JSON object", {"rows.jsonl": "\n \n"}),
    "line that is not JSON": data('{"prompt": "sort', r"not JSON \(.*\): '\{\"prompt\": \"sort'",
                                  "each line is one JSON object"),
    "line nested without end": data("[" * 100_000, "not JSON", "each line is one JSON object"),
    "line that is not UTF-8": data(b'{"prompt": "\xff"}', "not UTF-8", "save the file as UTF-8"),
    "line that is a list": data("[1]", "not list", "a row is a JSON object with `prompt` and `answer`"),
    "row without prompt": data('{"answer": "1"}', r"no `prompt`; the row has \['answer'\]", "every row needs"),
    "row without answer": data('{"prompt": "sort 1"}', r"no `answer`; the row has \['prompt'\]", "every row needs"),
    "row with an empty answer": data('{"prompt": "a", "answer": " "}', "`answer` is ' '", "must be a text"),
    "answer that is NaN": data('{"prompt": "a", "answer": NaN}', "`answer` is nan", "must be a text"),
    "half a character": data('{"prompt": "a", "answer": "\\ud800"}', r"'\\ud800', half of a character", "is no text"),
    "chat with an unknown role": data('{"prompt": [{"role": "robot", "content": "a"}], "answer": "1"}',
                                      "message 0 of `prompt` has the role 'robot'", "known roles are system, user"),
    "chat with a role that the template refuses": data(
        '{"prompt": [{"role": "tool", "content": "a"}], "answer": "1"}', "unknown chat role tool",
        "chat template refuses this prompt: .*; write it as the template wants it, or leave it out", good=GOOD_CHAT),
    "prompt over the limit": data(
        '{"prompt": "sort 123456", "answer": "1"}', "the prompt has 19 tokens; the limit is 16",
        r"data\.max_prompt_tokens\): shorten, raise the limit, or leave them out with data\.overlong=drop",
        "data.max_prompt_tokens=16"),
    "prompts over the limit": Bad(
        ["data.train=rows.jsonl", "data.validation=null", "data.max_prompt_tokens=16"], r"rows\.jsonl:2: ",
        "has 19 tokens; .*; 2 of 4 prompts are over it, the longest is rows.jsonl:3 with 20", "data.overlong=drop",
        {"rows.jsonl": "".join(GOOD.replace("21", digits) for digits in ("21", "123456", "1234567", "12"))}),
    "token id outside the vocabulary": data('{"prompt": [1, 58], "answer": "1"}', "token id 58 .* vocabulary of 58",
                                            "use ids of this model's tokenizer", good=GOOD_IDS),
    "row of another form": data('{"prompt": [1], "answer": "1"}', r"`prompt` is a list of token ids, and rows\.jsonl:1"
                                " has a text", "write the others to a file of their own"),
    "row of another shape": data('{"prompt": "a", "reward_model": {"ground_truth": "1"}}',
                                 r"answer in `reward_model\.ground_truth`, and rows\.jsonl:1 has its .* in `answer`",
                                 "write the others to a file of their own"),
    "row with an image": data('{"prompt": "a", "answer": "1", "images": ["a.png"]}', "the row has `images`",
                              "a text model takes text alone"),
    "line of 100 MB": data(b'{"prompt": "' + b"a" * 100_000_000 + b'"}', "longer than 16777216 bytes",
                          "each line is one prompt"),
    "file of another ending": Bad(["data.train=rows.txt"], r"rows\.txt: ", "the ending '.txt'",
                                  r"rename it to one of .*\.parquet", {"rows.txt": GOOD}),
    "file that is no Parquet": Bad(["data.train=rows.parquet"], r"rows\.parquet: ", "cannot be read as Parquet",
                                   "write the file again", {"rows.parquet": GOOD}),
    "weight of held-out prompts": Bad(["data.validation=[{path: sort, weight: 2}]", *SMALL], r"data\.validation: ",
                                      "sort has the weight 2", "leave the weight out"),
    "token id below 0": data('{"prompt": [1, -1], "answer": "1"}', "token id -1 is outside", "from 0 on"),
    "token id beyond 64 bits": data('{"prompt": [1, 99999999999999999999], "answer": "1"}',
                                    "token id 99999999999999999999", "use ids of this model's tokenizer"),
    "token id that is no whole number": data('{"prompt": [1.0, 2.0], "answer": "1"}', "item 0 of `prompt` is 1.0",
                                             "whole numbers"),
    "stop token outside the vocabulary": Bad(["sampling.stop_token_ids=[99]", *SMALL], r"sampling\.stop_token_ids: ",
                                             r"vocabulary of 58; .*\(got 99\)", "use ids of its tokenizer"),
    # rewards, as far as the first row shows it
    "reward file that is missing": Bad(["reward=./nothing.py:score", *SMALL], "reward: ", "no such file", "nothing.py"),
    "reward package that may not be imported": Bad(["reward=json:loads", *SMALL], "reward: ", "package 'json'",
                                                   "HEADWAY_ALLOWED_IMPORTS"),
    "reward that is no path": Bad(["reward=good"], "reward: ", r"\(got 'good'\)", "write one of exact, "),
    "reward that raises at import": reward("import nothing_of_that_name\n", "No module named 'nothing_of_that_name'",
                                           r"cannot be loaded: .*\(reward\.py:1\)"),
    "reward without that function": reward("x = 1\n", "has no function 'score'", "cannot be loaded"),
    "reward of no argument": reward("def score(): return 1\n", "takes no argument for the answer", "cannot be loaded"),
    "reward of a column that no row has": reward(
        "def score(answer, truth, level): return 1\n", r"'level', and .*rows\.jsonl:1 has none",
        "give the parameter a default", where=r"reward: \./reward\.py:score "),
    "reward that raises": reward("def score(a, b):\n    raise OSError('no net')\n",
                                 r"raised OSError: no net \(reward\.py:2\)",
                                 r"trial on .*rows\.jsonl:1.*mend the function"),
    "reward that hangs": reward("def score(a, b):\n    while True: pass\n", "no answer within 0.3 s",
                                "mend the function", "deadlines.reward_s=0.3"),
    "reward that returns NaN": reward("def score(a, b): return float('nan')\n", "the result is nan", "must be finite"),
    "reward that returns inf": reward("def score(a, b): return float('inf')\n", "the result is inf", "must be finite"),
    "reward that returns a string": reward("def score(a, b): return '1.0'\n", "the result is '1.0' of type str",
                                           "must be a number, or the result a dict"),
    "reward that returns a list": reward("def score(a, b): return [1.0]\n", r"the result is \[1.0\] of type list",
                                         "must be a number, or the result a dict"),
    "reward beyond a float": reward("def score(a, b): return 10 ** 400\n", "the result is 10000", "must be finite"),
    "reward that ends its process": reward("import os\ndef score(a, b): os._exit(3)\n", "ended with exit code 3",
                                           "mend the function"),
    # models
    "model directory that is missing": directory(shutil.rmtree, "is not a directory", "give one written by save_pretr"),
    "model directory without tokenizer": directory(lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer",
                                                   "save one beside the model"),
    "tokenizer that cannot be read": directory(lambda d: (d / "tokenizer_config.json").write_text("[]"),
                                               "has a tokenizer that cannot be loaded", "model.path"),
    "tokenizer of another model": directory(edit("config.json", vocab_size=50), "id 57", "vocabulary of 50"),
    "weights of another model": directory(edit("config.json", vocab_size=99), "58 rows of .* says vocab_size 99",
                                          "weights and config are of two models"),
    "weights cut short": directory(lambda d: os.truncate(d / "model.safetensors", 10_000), "of 10000 bytes",
                                   "an incomplete copy"),
    "config that transformers cannot use": directory(edit("config.json", vocab_size="many"), "vocab_size.*'many'",
                                                     "a config.json that transformers cannot use"),
    "end token that is none": directory(edit("generation_config.json", eos_token_id="x"), "eos_token_id is 'x'",
                                        "it is a token id, or a list"),
    "chat template that raises": directory(
        lambda d: (d / "chat_template.jinja").write_text("{{ messages[0]['content'] + 1 }}"),
        "can only concatenate str", "chat template refuses this prompt", where="data.train row 0: "),
    # presets, keys, values
    "preset that does not exist": Bad([], "--preset nope: ", "no such preset", "there are .*tiny-cpu", preset="nope"),
    "preset file that does not exist": Bad([], "--preset no.yaml: ", "no such file", "no.yaml", preset="no.yaml"),
    "preset that is not YAML": Bad([], r"--preset p\.yaml, line 3: ", "not YAML", "expected ',' or ']'",
                                   {"p.yaml": "seed: 1\nlearner:\n  betas: [1\n"}, preset="p.yaml"),
    "preset that is not UTF-8": Bad([], r"--preset p\.yaml: ", "0xff in position 6", "cannot be read",
                                    {"p.yaml": b"seed: \xff\n"}, preset="p.yaml"),
    "preset that is a list": Bad([], r"--preset p\.yaml: ", r"\(got list\)", "write them as in", {"p.yaml": "- 1\n"},
                                 preset="p.yaml"),
    "preset that says one thing twice": Bad([], r"--preset p\.yaml, line 2: ", "'seed' stands twice", "in one group",
                                            {"p.yaml": "seed: 1\nseed: 2\n"}, preset="p.yaml"),
    "preset with a bad value": Bad([], "group_size: ", r"\(got 'many'\)", "valid integer",
                                   {"p.yaml": "group_size: many"}, preset="p.yaml"),
    "bad key": Bad(["learner.lrr=1"], r"learner\.lrr: ", "no such setting", "did you mean `learner.lr`"),
    "key of another system": Bad(["rollout.n=4"], r"rollout\.n: ", "unknown here", "Headway calls it `group_size`"),
    "key of another model": Bad(["model.path=./model"], r"model\.path: ", r"got './model'", "another `model.type`"),
    "bad value": Bad(["learner.lr=-1"], r"learner\.lr: ", r"\(got -1\)", "greater than 0"),
    "value that is not YAML": Bad(["learner.lr=["], r"--set learner\.lr: ", r"'\[' is not a YAML value", "quote"),
    "truth value for a number": Bad(["group_size=yes"], "group_size: ", r"\(got True\)", "a truth value is none"),
    "group set to a value": Bad(["learner=3"], "learner: ", r"\(got 3\)", "set the ones in it"),
    "setting without a value": Bad(["seed"], "--set 'seed': ", "", "write a field and a value"),
    "tracking into a bare path": Bad(["tracking.uri=/tmp/x", *SMALL], "tracking.uri ", "'/tmp/x'", "write sqlite:////"),
    "bad run key": Bad([], "--run-key '../x': ", r"\.\./x", "use at most 100 letters", key="../x"),
    "empty run key": Bad([], "--run-key '': ", "", "use at most 100 letters", key=""),
    # what cannot work together
    "bound that can deadlock": Bad(["staleness.bound=4", "staleness.hard_max=2"], r"staleness\.hard_max: ",
                                   r"\(got 2\)", "raise hard_max or lower the bound"),
    "group of one with a group estimator": Bad(["group_size=1"], "group_size: ", r"\(got 1\)", "use 2 or more"),
    "more groups per step than rows with epochs set": Bad(
        ["data.epochs=1", "groups_per_step=65", *SMALL], "groups_per_step: ", r"64 rows .*\(got 65\)",
        "use fewer groups per step, more epochs"),
    "quota below what lies between two retirements": Bad(
        ["storage.bytes_quota=96000000", *SMALL], r"storage\.bytes_quota: ",
        r"no shard is retired before the end .*\(got 96000000\)", r"use at least 1[01]\d{7}, or fewer total_steps"),
    # places and runs
    "home without exclusive create: rename": Bad(
        SMALL, "/home/runs: ", "of 8 writers believe that they created one name", "set HEADWAY_HOME to",
        prepare=link_overwrites, verbs=("train",)),
    "home without exclusive create: check, then write": Bad(
        SMALL, "/home/runs: ", "[2-8] of 8 writers believe that they created one name", "set HEADWAY_HOME to",
        prepare=link_checks_first, verbs=("train",)),
    "home without hard links": Bad(
        SMALL, "/home/runs: ", "cannot be created by link there .*not permitted", "set HEADWAY_HOME to",
        prepare=no_links, verbs=("train",)),
    "home that is a file": Bad(SMALL, "/home/runs/", "Not a directory", "set HEADWAY_HOME to", prepare=no_home),
    "run whose identity fields differ": Bad(
        ["group_size=4", "seed=9", *SMALL], f"run {KEY} exists with other identity fields: ",
        "group_size is 8, asked for 4; seed is 1, asked for 9", "another --run-key", key=KEY,
        prepare=lambda place: existing_run(place, *SMALL)),
    "run whose training fields differ": Bad(
        ["learner.lr=1", *SMALL], f"run {KEY} exists with other training fields: ",
        r"learner\.lr is 0\.0005, asked for 1", f"headway train --run-key {KEY} --amend --set learner.lr=1", key=KEY,
        prepare=lambda place: existing_run(place, *SMALL)),
    "amendment of an identity field": Bad(
        ["group_size=4", "learner.lr=1", *SMALL], f"run {KEY} exists with other identity fields: ",
        "group_size is 8, asked for 4", "cannot be amended: another run needs another --run-key", key=KEY, amend=True,
        prepare=lambda place: existing_run(place, *SMALL)),
    "amendment without a key": Bad(SMALL, "--amend: ", "", "say which run, by --run-key", amend=True),
    "amendment of a run that is not there": Bad(
        ["learner.lr=1", *SMALL], "--amend: ", f"there is no run {KEY} yet", "without --amend the same command begins",
        key=KEY, amend=True),
    "amendment below the steps that are claimed": Bad(
        ["total_steps=1", *SMALL], "total_steps: ", "2 steps of run .* have their claim", "use at least 2 .got 1",
        key=KEY, amend=True, prepare=run_of_two_claims),
    "amendment of a run that is alive": Bad(
        ["total_steps=9", *SMALL], f"/runs/{KEY}: ", f"owned by pid {os.getpid()} on ", "stop it first", key=KEY,
        amend=True, prepare=alive_run, verbs=("train",)),
    "run whose data changed": Bad(
        ["data.train=rows.jsonl", "data.validation=null"], f"/runs/{KEY}: ", "data changed since the run began",
        "put it back, or use another --run-key", {"rows.jsonl": GOOD}, key=KEY, prepare=run_on_other_data),
    "run that is alive": Bad(
        SMALL, f"/runs/{KEY}: ", f"owned by pid {os.getpid()} on ",
        "stop it first, end it with --take-over, or use another", key=KEY, prepare=alive_run, verbs=("train",)),
    "run of a newer Headway": Bad(
        SMALL, r"run\.json: ", "format 99 is newer", "upgrade", key=KEY,
        prepare=lambda place: put_if_absent(place.run().run_json, b'{"format": 99}')),
    "run directory with a broken identity": Bad(
        SMALL, r"run\.json: ", "not JSON", "Expecting", key=KEY,
        prepare=lambda place: put_if_absent(place.run().run_json, b"{")),
}

CASES = [(verb, name) for name, bad in REFUSED.items() for verb in bad.verbs]


@pytest.mark.parametrize(("verb", "name"), CASES, ids=[f"{verb}: {name}" for verb, name in CASES])
def test_what_is_known_before_the_start_is_refused(verb: str, name: str, place: Place,
                                                   capfd: pytest.CaptureFixture[str]) -> None:
    bad = REFUSED[name]
    for file, content in bad.files.items():
        place.write(file, content)
    bad.prepare(place)
    before = tree(place.work) | tree(place.home)
    place.undo.setattr("tasks.services.start", lambda *_, **__: pytest.fail("services were started"))
    if verb == "plan":
        code = show_plan(bad.preset, bad.settings, bad.key, as_json=False, amend=bad.amend)
    else:
        code = launch(bad.preset, bad.settings, bad.key, as_json=True, verbose=False, amend=bad.amend)
    out, err = capfd.readouterr()
    assert code == 2, (out, err)
    for expected in (bad.where, bad.got, bad.do):
        assert re.search(expected, err, re.DOTALL), (expected, err)
    assert all(line.startswith("error: ") for line in err.splitlines()) and "Traceback" not in err
    lines = out.splitlines()
    assert lines == [] if verb == "plan" else lines[0].startswith("headway ") and len(lines) <= 2, out
    assert tree(place.work) | tree(place.home) == before, "nothing was written, nothing was lost"
    runs = place.home / "runs"
    assert runs.exists() is False or [p.name for p in runs.iterdir()] in ([], [KEY])
    assert processes_of(Home(place.home)) == {}, "no process is left"


def test_every_row_says_where_and_what_to_do() -> None:
    assert [name for name, bad in REFUSED.items() if not (bad.where and bad.do)] == []


COMMANDS = {
    "train, missing data file": ("train", ["data.train=nothing.jsonl"], "error: nothing.jsonl: no such data file"),
    "plan, reward that returns a list": ("plan", ["reward=./reward.py:score", *SMALL], "error: reward .* of type list"),
}


@pytest.mark.parametrize(("verb", "settings", "message"), COMMANDS.values(), ids=COMMANDS)
def test_the_command_ends_with_code_2_and_leaves_nothing(verb: str, settings: list[str], message: str,
                                                         place: Place) -> None:
    place.write("reward.py", "def score(answer, truth): return [1.0]\n")
    home = Home(place.home)
    words = [word for setting in settings for word in ("--set", setting)]
    os.environ["PYTHONPATH"] = str(ROOT)
    command = home.start(verb, *words, cwd=place.work)
    assert command.wait(60) == 2, command.said
    assert re.match(message, command.err), command.err
    assert all(line.startswith("error: ") for line in command.err.splitlines())
    assert len(command.out.splitlines()) == (1 if verb == "train" else 0), command.out
    assert tree(place.home) == {} and processes_of(home) == {}


# -- a reward that fails while the run goes on

FAULTS = {
    "raises": ("reward_error", r"reward ./reward.py:score: raised OSError: no net \(reward.py:3\)"),
    "hangs": ("reward_timeout", r"reward ./reward.py:score: no answer within 0.4 s; its process was ended"),
    "returns NaN": ("reward_error", r"reward ./reward.py:score: the result is nan; it must be finite"),
    "returns inf": ("reward_error", r"reward ./reward.py:score: the result is inf; it must be finite"),
    "returns a string": ("reward_error", r"reward ./reward.py:score: the result is 'good' of type str; it must be a"),
    "returns a list": ("reward_error", r"reward ./reward.py:score: the result is \[1.0\] of type list; it must be a"),
}
REWARD = """
def score(answer, truth, fault):
    if fault == "raises": raise OSError("no net")
    while fault == "hangs": pass
    return {"returns NaN": float("nan"), "returns inf": float("inf"), "returns a string": "good",
            "returns a list": [1.0]}.get(fault, 0.5)
"""


@dataclass
class Rollout:
    """A real worker over the real engine, in a run directory with one published version."""

    run: RunDir
    config: Config
    prompts: PromptSource
    worker: RolloutWorker

    def lease(self, position: int) -> Lease:
        return Lease(prompt=self.prompts.at(0, position), try_no=0, lease_no=position, idx_dispatch=0, n_expected=2,
                     min_group=2, sampling=Sampling(max_new_tokens=4), attempt=1)


def open_rollout(work: Path, model: Path, **settings: Any) -> Rollout:
    config = Config.model_validate({
        "groups_per_step": 2, "group_size": 2, "staleness": {"bound": 4}, "reward": "./reward.py:score",
        "storage": {"fsync": False}, "deadlines": {"reward_s": 0.4}, "sampling": {"max_new_tokens": 4},
        "data": {"train": str(work / "rows.jsonl"), "validation": None, "shuffle": False}} | settings)
    run = RunDir(work / "run")
    run.root.mkdir()
    run.model.symlink_to(model)
    version = publish(run, read_tensors(model / "model.safetensors"), 0, 0, 1, config)
    worker = open_worker(root=str(run.root), config=config, name="rollout-0", attempt=1, cwd=str(work))
    worker.swap(version)
    return Rollout(run, config, PromptSource.of_model(config, model), worker)


def faulty_work(work: Path, faults: list[str]) -> Path:
    (work / "reward.py").write_text(REWARD)
    (work / "rows.jsonl").write_text("".join(json.dumps({"prompt": "sort 21", "answer": "12", "fault": fault}) + "\n"
                                             for fault in faults))
    return work


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Rollout, dict[str, Outcome]]:
    """One group for each fault, and a good one before, between and after them; with what became of the bad ones."""
    faults = ["", *FAULTS, ""]
    r = open_rollout(faulty_work(tmp_path_factory.mktemp("faults"), faults), model, failure={"trajectory_tries": 2})
    try:
        r.worker.lease([r.lease(position) for position in range(len(faults))])
        outcomes: dict[str, Outcome] = {}
        landed: set[str] = set()
        deadline = time.monotonic() + 30
        while len(outcomes) + len(landed) < len(faults) and time.monotonic() < deadline:
            events = r.worker.events(0.2)
            outcomes |= {faults[outcome.position]: outcome for outcome in events.outcomes}
            landed |= {name for hint in events.landed for name in hint.group_ids}
        assert landed == {"e0-p0-t0", f"e0-p{len(faults) - 1}-t0"}, "the good groups landed all the same"
    finally:
        r.worker.close()
    return r, outcomes


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_that_fails_is_a_named_failure_of_its_group_never_a_reward_of_0(
        fault: str, rolled_out: tuple[Rollout, dict[str, Outcome]]) -> None:
    reason, message = FAULTS[fault]
    outcome = rolled_out[1][fault]
    assert (outcome.kind, outcome.reason) == ("failed", reason)
    assert re.search(message, outcome.error), outcome.error


def test_groups_whose_reward_failed_are_tried_again_and_the_others_are_claimed(
        rolled_out: tuple[Rollout, dict[str, Outcome]]) -> None:
    r, _ = rolled_out
    lock = OwnerLock(r.run)
    experience = Experience(r.run, r.config, lock.next_attempt(0, None))
    lock.release()
    experience.attach(len(r.prompts), lambda epoch, position: position)
    claim = experience.claim(0, 5)
    assert isinstance(claim, Claim) and [group.position for group in claim.groups] == [0, len(FAULTS) + 1]
    rewards = [reward for path in r.run.streams.glob("*/*.arrow")
               for row in map_shard(path)[0].to_pylist() for reward in row["reward"]]
    assert rewards == [0.5] * 4
    experience.serves("rollout-0", 0)
    experience.leases_known()
    assert [lease.group_id for lease in experience.grant(["rollout-0"])][:len(FAULTS)] == [
        f"e0-p{position}-t1" for position in range(1, len(FAULTS) + 1)]


def test_a_reward_that_never_works_ends_the_run_with_the_function_and_the_value(tmp_path: Path, model: Path) -> None:
    r = open_rollout(faulty_work(tmp_path, ["returns a string"] * 4), model, failure={"reward_failures": 6})
    try:
        r.worker.lease([r.lease(position) for position in range(4)])
        with pytest.raises(FailureBudgetSpent, match=r"6 reward calls failed in a row \(failure.reward_failures\); the "
                                                     r"last one: reward ./reward.py:score: the result is 'good'"):
            for _ in range(100):
                r.worker.events(0.2)
    finally:
        r.worker.close()


# -- a bad file among the shards


def rewrite(change: Callable[[bytearray], bytes | bytearray]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(bytearray(path.read_bytes()))) and None


def flip(where: Callable[[bytearray], int]) -> Callable[[Path], None]:
    """One bit of the byte at `where(bytes of the file)`."""
    def change(shard: bytearray) -> bytearray:
        shard[where(shard)] ^= 4
        return shard
    return rewrite(change)


def zeros(shard: bytearray) -> bytearray:
    middle = len(shard) // 2
    return shard[:middle] + bytes(512) + shard[middle + 512:]


def a_table(path: Path) -> None:
    batch = pa.record_batch({"prompt": ["a"], "reward": [1.0]})
    with pa.ipc.new_file(str(path), batch.schema) as out:
        out.write_batch(batch)


def of_another_model(path: Path) -> None:
    run = RunDir(path.parents[2])
    other = ShardWriter(run, "rollout-1", 1, {"model": "another"}, False)
    other.land([make_group(i) for i in range(4, 8)])
    path.unlink()
    shutil.rmtree(run.stream_tmp(other.stream))


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (rewrite(lambda shard: shard[:-100]), "not a whole Arrow file"),
    "cut in half": (rewrite(lambda shard: shard[: len(shard) // 2]), "not a whole Arrow file"),
    "empty": (rewrite(lambda shard: b""), "not a whole Arrow file"),
    "flipped bit in the data": (flip(lambda shard: len(shard) // 2), "does not match"),
    "flipped bit in the metadata": (flip(lambda shard: shard.rindex(b"mine")), "does not match its seal"),
    "zeroed extent": (rewrite(zeros), "does not match"),
    "foreign text": (rewrite(lambda shard: b"not a shard at all\n"), "not a whole Arrow file"),
    "foreign table": (a_table, "no `rl.schema`"),
    "copy of its neighbour": (lambda path: shutil.copy(path.with_name("00000000.arrow"), path) and None,
                              "copied or renamed"),
    "made with another model": (of_another_model, "made with model another, the run has mine"),
}


def start(run: RunDir, config: Config) -> Experience:
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    return Experience(run, config, attempt)


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_a_bad_shard_is_quarantined_by_name_and_the_run_goes_on(spoil: Callable[[Path], None], message: str,
                                                                tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    check_inputs(run, {"model": "mine"})
    config = Config.model_validate({"groups_per_step": 4, "group_size": 4, "data": {"epochs": 1},
                                    "storage": {"fsync": False}})
    writer = ShardWriter(run, "rollout-0", 1, {"model": "mine"}, False)
    for first in (0, 4, 8):
        writer.land([make_group(i) for i in range(first, first + 4)])
    spoil(run.shard(writer.stream, 1))
    spoiled = tree(run.streams)
    experience = start(run, config)
    experience.attach(12, lambda epoch, position: position)
    claims = [experience.claim(step, 5) for step in range(2)]
    claimed = [group.position for claim in claims if isinstance(claim, Claim) for group in claim.groups]
    assert claimed == [0, 1, 2, 3, 8, 9, 10, 11]
    [report] = [json.loads(path.read_text()) for path in run.quarantine.iterdir()]
    name = f"{report['stream']}/{report['seq']:08d}.arrow"
    assert message in report["error"] and name in report["error"]
    assert tree(run.streams) == spoiled, "the file stays where it is, for whoever wants to know"
    experience.serves("rollout-0", 0)
    experience.leases_known()
    granted = {lease.slot.position for lease in experience.grant(["rollout-0"])}
    assert granted == {4, 5, 6, 7}, "its prompts are asked again"
    again = start(run, config)
    assert again.claim(1, 5) == claims[1] and again.poll(2, 0) is None and again.L == 0
    gone = [] if spoil is not of_another_model else [f"stream {writer.stream}: shard 1 is gone, shard 2 is there"]
    assert audit(run).violations == gone


def test_a_file_with_a_foreign_name_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    writer.land([make_group(i) for i in range(4)])
    (run.stream(writer.stream) / "notes.txt").write_text("hello")
    experience = start(run, Config.model_validate({"groups_per_step": 4, "group_size": 4}))
    assert isinstance(experience.claim(0, 5), Claim)
    report = json.loads(run.foreign(writer.stream, "notes.txt").read_text())
    assert (report["name"], report["error"]) == ("notes.txt", "not the name of a shard")


# -- a full disk: a real file system of a few megabytes, in a mount that only the child sees

FULL_DISK = """
import json, os, subprocess, sys, time
from pathlib import Path

disk, work, model = map(Path, sys.argv[1:4])
said = {}

def fill():
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)): pass
        except OSError: pass

def empty(): (disk / "filler").unlink()

def tried(name, call):
    try: call()
    except OSError as error: said[name] = str(error)

fill()
command = subprocess.run([sys.executable, "-m", "flows.cli", "train", "--set", "data.size=64"], cwd=work, text=True,
                         capture_output=True, env=os.environ | {"HEADWAY_HOME": str(disk / "home")})
said["command"] = [command.returncode, command.stdout, command.stderr]
said["left by the command"] = sorted(p.name for p in (disk / "home").rglob("*"))
empty()

from rl_core.config import Config
from rl_core.errors import DeadlinePassed
from rl_core.experience.experience import Experience
from rl_core.experience.shards import GroupCommit, ShardWriter, verify_shard
from rl_core.run_dir import OwnerLock, RunDir
from tests.builders import make_group

run = RunDir(disk / "run")
attempt = OwnerLock(run).next_attempt(0, None)
writer = ShardWriter(run, "rollout-0", 1, {}, True)
writer.land([make_group(0), make_group(1)])
fill()
landed, errors = [], []
commit = GroupCommit(writer, on_landed=landed.append, on_refused=lambda group, error: errors.append(error),
                     on_error=errors.append, retry_s=0.02)
commit.put(make_group(2))
while len(errors) < 3: time.sleep(0.01)
said["landing"] = sorted({error.errno for error in errors})
said["names while full"] = sorted(p.name for p in run.stream(writer.stream).rglob("*") if p.is_file())
config = Config(groups_per_step=2, group_size=4)
experience = Experience(run, config, attempt)
tried("claim", lambda: experience.claim(0, 5))
said["claims while full"] = sorted(p.name for p in run.ledger().iterdir())
empty()
commit.close(10)
said["landed with room"] = [[hint.seq, *hint.group_ids] for hint in landed]
said["claimed with room"] = [group.group_id for group in experience.claim(0, 5).groups]
for seq in (0, 1): verify_shard(run.shard(writer.stream, seq))

from rl_core.rollout import worker as workers
from rl_core.rollout.prompts import PromptSource
from rl_core.types import Lease, Sampling
from rl_core.weights import publish, read_tensors

workers.LANDING_DEADLINE_S = 0.5
run = RunDir(disk / "rollout")
run.root.mkdir()
run.model.symlink_to(model)
version = publish(run, read_tensors(model / "model.safetensors"), 0, 0, 1, config)
worker = workers.open_worker(root=str(run.root), config=config, name="rollout-0", attempt=1)
worker.swap(version)
prompts = PromptSource.of_model(Config.model_validate({"data": {"size": 4}}), model)
fill()
worker.lease([Lease(prompt=prompts.at(0, 0), try_no=0, lease_no=0, idx_dispatch=0, n_expected=2, min_group=2,
                    sampling=Sampling(max_new_tokens=4), attempt=1)])
def wait():
    for _ in range(100): worker.events(0.2)
tried("worker", wait)
worker.close()
said["names by the worker"] = [p.name for p in run.streams.rglob("*") if p.is_file()]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    """What a command, a landing, a claim and a worker said on a full disk, and what they did when it had room again."""
    base = tmp_path_factory.mktemp("full")
    disk, work = base / "disk", base / "work"
    disk.mkdir()
    work.mkdir()
    private = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
               'mount -t tmpfs -o size=8m none "$0" && exec "$@"', str(disk)]
    if shutil.which("unshare") is None or subprocess.run([*private, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system lends no private mounts (user namespaces)")
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("PREFECT_", "RAY_", "MLFLOW_", "HEADWAY_"))}
    done = subprocess.run([*private, sys.executable, "-c", FULL_DISK, str(disk), str(work), str(model)], text=True,
                          capture_output=True, timeout=120, env=env | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_command_on_a_full_disk_starts_nothing(full_disk: dict[str, Any]) -> None:
    code, out, err = full_disk["command"]
    assert code == 2 and out.splitlines()[0].startswith("headway "), (out, err)
    assert re.match(r"error: .*/disk/home/runs: nothing can be written there \(No space left on device\); make", err)
    assert len(err.splitlines()) == 1 and full_disk["left by the command"] == ["runs"]


def test_groups_wait_for_room_and_land_under_the_same_number(full_disk: dict[str, Any]) -> None:
    assert full_disk["landing"] == [errno.ENOSPC]
    assert full_disk["names while full"] == ["00000000.arrow"]
    assert full_disk["landed with room"] == [[1, "e0-p2-t0"]]


def test_a_claim_on_a_full_disk_names_its_file_and_can_be_made_again(full_disk: dict[str, Any]) -> None:
    assert re.search(r"No space left on device: '.*/ledger/learner/step-000000000\.json'", full_disk["claim"])
    assert full_disk["claims while full"] == []
    assert full_disk["claimed with room"] == ["e0-p0-t0", "e0-p1-t0"]


def test_a_worker_on_a_full_disk_ends_with_the_place_and_leaves_no_torn_name(full_disk: dict[str, Any]) -> None:
    told = r"No space left on device: no shard has landed for \d+ s; make room.*: '.*/rollout/streams/rollout-0"
    assert re.search(told, full_disk["worker"])
    assert full_disk["names by the worker"] == []
