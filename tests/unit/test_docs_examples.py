"""What README and docs tell people to type works: rows, reward, commands, make targets, on files as they are shown.

The `train` and `plan` commands go through everything that is checked before a start: preset, overrides, plan, prompts,
reward, model. Other commands are parsed as the shell would hand them over.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from flows.cli import app
from flows.presets import load_preset, preset_names
from rl_core.config import Config, LocalModel
from rl_core.errors import ConfigError, DataError
from rl_core.model_setup import set_up_model
from rl_core.plan import make_plan, parse_overrides, resolve
from rl_core.preflight import Inputs, inspect_inputs
from tasks.preparation import prepare

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def code_lines(text: str) -> list[str]:
    """Lines of code blocks, fenced or indented, and whole code spans; continued lines joined, comments cut."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = "\n".join([*fenced, *re.findall(r"^ {4}(.*)$", rest, re.MULTILINE)]).replace("\\\n", " ")
    spans = re.findall(r"`([^`\n]+)`", rest)
    return [line.split(" #")[0].strip() for line in [*blocks.splitlines(), *spans]]


def commands(text: str, program: str) -> list[list[str]]:
    """Words after the program of every command that is more than its bare name; KEY and N are put in."""
    words = [shlex.split(line) for line in code_lines(text) if line.startswith(f"{program} ")]
    example = {"KEY": "a-run", "N": "3"}
    return [[example.get(word, word) for word in line[1:]] for line in words]


def prose(path: Path) -> str:
    """Without the table of all verbs, whose rows are no whole commands: test_commands.py holds it against the app."""
    return re.sub(r"^\| `headway [^\n]*$", "", path.read_text(), flags=re.MULTILINE) if path.stem == "cli" \
        else path.read_text()


HEADWAY = [pytest.param(words, id=f"{path.stem}: {' '.join(words)}")
           for path in DOCUMENTS for words in commands(prose(path), "headway")]
STARTS = [param for param in HEADWAY if param.values[0][0] in ("train", "plan") and "--preset" in param.values[0]]


def fenced(language: str) -> str:
    """The one block of this language in the quickstart."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", QUICKSTART, re.MULTILINE | re.DOTALL)
    return block


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files that the documents talk about, as they show them."""
    directory = tmp_path_factory.mktemp("work")
    for name in ("train.jsonl", "held-out.jsonl"):
        (directory / name).write_text(fenced("json"))
    (directory / "reward.py").write_text(fenced("python"))
    problem = {"prompt": "write a program", "answer": "assert 1 == 1"}
    (directory / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    random_weights = Config.model_validate({"model": {"type": "tiny", "warmup_steps": 0}})
    set_up_model(random_weights, directory / "models").rename(directory / "my-model")
    for name, target in {".venv-sglang": sys.prefix, "deployments": ROOT / "deployments"}.items():  # as in a checkout
        (directory / name).symlink_to(target)
    return directory


def prepared(preset: str, sets: list[str]) -> tuple[Config, Inputs]:
    """All that `headway plan` and `headway train` check before a start."""
    config = resolve(load_preset(preset), parse_overrides(sets))
    make_plan(config)
    inputs = inspect_inputs(config)
    make_plan(config, inputs.facts)
    return config, inputs


def option(words: list[str], name: str) -> list[str]:
    return [value for word, value in pairwise(words) if word == name]


@pytest.mark.parametrize("words", HEADWAY)
def test_a_command_of_the_documents_parses(words: list[str]) -> None:
    name, *args = words
    verbs: dict[str, Any] = cast(Any, typer.main.get_command(app)).commands
    assert name in verbs
    if args or name == "ui":  # else it is only named in running text
        verbs[name].make_context(name, args)


@pytest.mark.parametrize("words", STARTS)
def test_a_start_of_the_documents_passes_every_check(words: list[str], work: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    (preset,) = option(words, "--preset")
    sets = option(words, "--set")
    if resolve(load_preset(preset), {}).learner.device != "cpu" and words[0] == "train":
        sets += ["model.path=my-model", "data.train=train.jsonl", "sampling.max_new_tokens=512"]  # those of this test
        words = ["plan", *words[1:]]
    if preset == "smollm-cpu":  # whose model only `headway fetch` brings
        words = ["plan", *words[1:]]
    if words[0] == "plan":  # of another machine, and without what the preset leaves to be set
        prepare(resolve(load_preset(preset), parse_overrides(sets)), preset, None, planned=True)
        return
    if any("reasoning_gym:" in each for each in sets):  # the model of this test has no capital letters
        with pytest.raises(DataError, match="cannot represent"):
            prepared(preset, sets)
        return
    config, inputs = prepared(preset, sets)
    if config.data.train[0].path == "train.jsonl":
        assert inputs.facts.rows == inputs.facts.validation_rows == 2
        assert [inputs.prompts.at(0, i).answer for i in range(2)] == ["42", "42"]


def test_the_quickstart_shows_a_start_with_own_data_own_reward_and_own_model() -> None:
    shown = {key.split("=")[0] for param in STARTS for key in option(param.values[0], "--set")}
    assert {"data.train", "data.validation", "reward", "model.path"} <= shown


def test_the_row_that_the_tiny_model_learns_from_is_in_its_alphabet(tmp_path: Path) -> None:
    (row,) = (span for span in re.findall(r"`(\{[^`]+\})`", QUICKSTART) if "prompt" in span)
    assert json.loads(row)["answer"] == "".join(sorted("31245", reverse=True))
    (tmp_path / "rows.jsonl").write_text(row)
    _, inputs = prepared("tiny-cpu", [f"data.train={tmp_path / 'rows.jsonl'}", "data.validation=null"])
    assert inputs.facts.rows == 1


def test_a_row_outside_the_alphabet_of_the_tiny_model_is_refused_as_the_quickstart_says(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(fenced("json").replace("what is", "What is"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*cannot represent"):
        prepared("tiny-cpu", [f"data.train={tmp_path / 'rows.jsonl'}", "data.validation=null"])


def test_the_preset_for_a_local_model_names_what_it_needs() -> None:
    with pytest.raises(ConfigError) as refused:
        prepared("local-model-cpu", [])
    first, second = str(refused.value).splitlines()
    assert first.startswith("model.path: must be set (got ''); add --set model.path=")
    assert second.startswith("data.train: must be set (got ''); add --set data.train=")


def test_the_preset_for_a_local_model_is_what_the_quickstart_says_of_it() -> None:
    config = resolve(load_preset("local-model-cpu"), {})
    assert isinstance(config.model, LocalModel)
    assert (config.learner.lr, config.groups_per_step, config.group_size) == (1e-6, 8, 8)
    assert (config.sampling.max_new_tokens, config.data.max_prompt_tokens, config.data.validation) == (256, 512, None)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_presets_and_make_targets_exist(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {words[0] for words in commands(text, "make")} <= targets
    assert set(re.findall(r"--preset ([a-z0-9-]+)", text)) <= set(preset_names())


def test_stages_of_the_quickstart_are_those_of_the_code() -> None:
    """Console, services and session name them; the table has the same, in order."""
    table = QUICKSTART.split("| stage |")[1].split("\n\n")[0]
    named = [name for cell in re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE) for name in cell.split(", ")]
    source = "\n".join((ROOT / name).read_text() for name in ("flows/launch.py", "flows/train.py", "tasks/owner.py"))
    sometimes = {"mlflow", "fork", "shards"}
    staged = set(re.findall(r"stage\((?:console, |start\.console, )?\"([a-z]+)\"[) ]", source)) - sometimes
    assert named == ["plan", "prefect", "ray", "model", "actors", "learner", "experience", "training"]
    assert set(named) == staged | {"prefect", "ray"}
