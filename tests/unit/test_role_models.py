"""Directories of models beside the policy: what is refused before anything starts, and what a run keeps of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flows.presets import load_preset
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.fork import link_tree
from rl_core.model_setup import check_model, model_digests
from rl_core.plan import InputFacts, describe, make_plan, parse_overrides, resolve
from rl_core.preflight import inspect_inputs
from rl_core.roles.models import place_roles, role_directories
from rl_core.run_dir import RunDir
from rl_core.run_identity import check_inputs
from rl_core.tokenizer import VOCABULARY, write_tokenizer
from tests.learning import write_model

FACTS = InputFacts(rows=4096, longest_prompt=20, mean_prompt=15.0, validation_rows=256, model_bytes=10**6, context=2048)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model over the characters of the tiny one."""
    made = write_model(tmp_path_factory.mktemp("other"), vocab=len(VOCABULARY))
    write_tokenizer(made, 256)
    return made


def settings(*sets: str) -> Config:
    return resolve(load_preset("tiny-cpu"), parse_overrides([*sets, "data.size=64", "data.validation_size=16"]))


def with_roles(directory: Path) -> Config:
    return settings("learner.kl.use=loss", f"learner.reference.path={directory}", "learner.advantage.name=gae",
                    f"learner.teacher={{use: advantage, path: {directory}}}")


def test_roles_of_the_same_vocabulary_are_taken_and_reckoned_with(directory: Path) -> None:
    config = with_roles(directory)
    facts = inspect_inputs(config).facts
    size = 4 * check_model(directory).parameters
    assert dict(facts.role_bytes) == {"reference": size, "critic": facts.model_bytes, "teacher": size}
    plan, without = make_plan(config, facts), make_plan(settings(), inspect_inputs(settings()).facts)
    assert plan.memory_bytes - without.memory_bytes == 2 * size + 4 * facts.model_bytes
    assert plan.reserve_bytes > without.reserve_bytes
    assert dict(describe(config, plan))["beside the policy"] == (
        f"reference ({directory}), critic (initial model), teacher ({directory})")


def test_updates_of_a_warm_up_are_the_critics_alone() -> None:
    config = settings("learner.advantage.name=gae", "learner.critic.warmup_steps=30", "learner.passes=2")
    assert make_plan(config, FACTS).updates == (180 - 30) * 2


def swap_two_tokens(path: Path) -> None:
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["7"], vocab["8"] = vocab["8"], vocab["7"]
    file.write_text(json.dumps(tokenizer))


def shorten(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))


def relabel(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "another vocabulary": (swap_two_tokens, r"has another vocabulary than model: 2 of 58 tokens differ, as in '[78]'"),
    "a context too short": (shorten, r"takes 8 tokens, and the longest prompt with its answer has \d+"),
    "no causal model": (relabel, r"holds Qwen3ForSequenceClassification, not a causal language model"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), r"has no model\.safetensors"),
}


@pytest.mark.parametrize("role", ["reference", "teacher"])
@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED)
def test_a_directory_that_cannot_be_used_is_refused_by_the_roles_name(tmp_path: Path, directory: Path, role: str,
                                                                     damage: Callable[[Path], None],
                                                                     message: str) -> None:
    link_tree(directory, tmp_path / "copy")
    for path in (tmp_path / "copy").iterdir():  # of its own, not links
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    damage(tmp_path / "copy")
    asks = {"reference": "learner.kl.use=loss", "teacher": "learner.teacher.use=loss"}[role]
    with pytest.raises(ConfigError, match=rf"^learner\.{role}\.path: .*{message}"):
        inspect_inputs(settings(asks, f"learner.{role}.path={tmp_path / 'copy'}"))


def test_a_model_with_fewer_rows_than_the_policy_knows_too_few_tokens(tmp_path: Path, directory: Path) -> None:
    from rl_core.roles.models import check_vocabulary
    from rl_core.rollout.prompts import load_tokenizer

    facts = check_model(directory)
    with pytest.raises(ConfigError, match=r"learner\.teacher\.path: has 58 rows of embeddings, fewer than the 64 of"):
        check_vocabulary("learner.teacher.path", str(directory), facts, replace(facts, vocabulary=64),
                         load_tokenizer(directory))
    check_vocabulary("learner.teacher.path", str(directory), replace(facts, vocabulary=64), facts,
                     load_tokenizer(directory))


def test_a_run_keeps_a_copy_of_each_directory_and_refuses_one_that_changed(tmp_path: Path, directory: Path) -> None:
    run, config = RunDir(tmp_path / "run"), with_roles(directory)
    digests = place_roles(run, config)
    assert digests == dict.fromkeys(("reference", "teacher"), model_digests(directory)["model"])
    assert place_roles(run, config) == digests
    assert role_directories(run, config) == {"reference": run.role("reference"), "critic": run.model,
                                             "teacher": run.role("teacher")}
    check_inputs(run, digests)
    shorten(run.role("teacher"))
    with pytest.raises(ConfigError, match="teacher changed since the run began"):
        check_inputs(run, place_roles(run, config))
    assert place_roles(RunDir(tmp_path / "other"), settings()) == {}
    assert not (tmp_path / "other").exists()
