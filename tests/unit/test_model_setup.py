"""Model set-up: the tiny model's cache, what a local directory must hold, the tokenizer, and the warm-up's gate."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.config import Config, LocalModel, TinyModel
from rl_core.errors import ConfigError, DeadlinePassed
from rl_core.model_setup import (
    MANIFEST,
    ModelFacts,
    chat_template,
    check_model,
    copy_model,
    eos_token_ids,
    loaded_bytes,
    model_digests,
    set_up_model,
)
from rl_core.plan import make_plan
from rl_core.preflight import inspect_inputs, tiny_facts
from rl_core.rollout.environments.sort import held_out_rows
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.tiny_model import IGNORED, habit_row, pad_rows, tail_weights
from rl_core.tokenizer import CHARACTERS, VOCABULARY, character_tokenizer, encode_chat
from rl_core.types import GenerateRequest, Sampling

EOS = 2


def tiny(seed: int = 1, **model: Any) -> Config:
    return Config(seed=seed, model=TinyModel(**{"warmup_steps": 2, **model}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(cache, model directory)."""
    cache = tmp_path_factory.mktemp("models")
    return cache, set_up_model(tiny(), cache)


# -- the tiny model and its cache


def test_transformers_loads_what_was_made(made: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(made[1])
    tokenizer = AutoTokenizer.from_pretrained(made[1], local_files_only=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 401408
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (58, EOS, 0)
    facts = check_model(made[1])
    assert replace(facts, layers=()) == ModelFacts(parameters=401408, context=2048, vocabulary=58, eos_token_ids=(EOS,))
    assert sorted(facts.layers) == sorted(tiny_facts(TinyModel()).layers)


def test_settings_decide_the_bytes_and_the_cache_is_used(made: tuple[Path, Path], tmp_path: Path) -> None:
    cache, directory = made
    steps: list[tuple[int, int]] = []
    assert set_up_model(tiny(), cache, lambda done, total: steps.append((done, total))) == directory
    assert steps == []  # found, not made
    again = set_up_model(tiny(), tmp_path, lambda done, total: steps.append((done, total)))
    assert steps == [(1, 2), (2, 2)]
    assert model_digests(again) == model_digests(directory)
    other = set_up_model(tiny(seed=2), cache)
    assert model_digests(other)["model"] != model_digests(directory)["model"]
    assert model_digests(other)["tokenizer"] == model_digests(directory)["tokenizer"]
    assert set_up_model(Config(seed=9, model=TinyModel(warmup_steps=2, seed=1)), cache) == directory
    assert [path.name for path in cache.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("damage", ["manifest gone", "weights changed", "manifest cut"])
def test_a_damaged_cache_is_made_again(damage: str, tmp_path: Path) -> None:
    directory = set_up_model(tiny(warmup_steps=0), tmp_path)
    digests = model_digests(directory)
    if damage == "weights changed":
        with (directory / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x7f")
    elif damage == "manifest cut":
        (directory / MANIFEST).write_text("{")
    else:
        (directory / MANIFEST).unlink()
    assert set_up_model(tiny(warmup_steps=0), tmp_path) == directory
    assert model_digests(directory) == digests


def test_a_warm_up_has_a_deadline(tmp_path: Path) -> None:
    config = tiny()
    late = config.model_copy(update={"deadlines": config.deadlines.model_copy(update={"model_setup_s": 1e-9})})
    with pytest.raises(DeadlinePassed, match=r"model warm-up: step 0 of 2 .* deadlines.model_setup_s"):
        set_up_model(late, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_shapes_are_made_and_sampled(tmp_path: Path) -> None:
    directory = set_up_model(tiny(warmup_steps=0, layers=1, hidden=96), tmp_path)
    engine = TorchEngine(directory, slots=2)
    answer = engine.submit(GenerateRequest(request_id="a", token_ids_P=np.array([1, 4, 6], np.int32), seed=1,
                                           sampling=Sampling(max_new_tokens=4))).result(60)
    engine.close()
    assert 1 <= len(answer.token_ids_L) <= 4


# -- warm-up rows


def test_habits_are_right_with_the_given_share_else_reverse_or_copy() -> None:
    words, draw = character_tokenizer(), random.Random(0)
    targets = [words.decode(habit_row(words, "sort 31245", 0.35, draw)[1]) for _ in range(4000)]
    shares = {target: targets.count(target) / 4000 for target in set(targets)}
    assert shares == pytest.approx({"12345": 0.35, "54321": 0.325, "31245": 0.325}, abs=0.03)


def test_a_tail_is_copies_of_the_question_and_long_for_few() -> None:
    words, draw = character_tokenizer(), random.Random(1)
    counts: list[int] = []
    for _ in range(4000):
        target = words.decode(habit_row(words, "sort 31245", 0.35, draw, 6.0)[1])
        answer, *copies = target.split(" ")
        assert answer in {"12345", "54321", "31245"} and copies == ["31245"] * len(copies)
        counts.append(len(copies))
    assert np.mean(counts) == pytest.approx(6.0, rel=0.1)
    assert 3 <= np.median(counts) <= 5 and np.quantile(counts, 0.95) >= 16 and max(counts) == 32


def test_the_answer_outweighs_its_tail() -> None:
    blank, one, two = (VOCABULARY.index(text) for text in " 12")
    assert tail_weights([one, two, EOS]) == [1.0, 1.0, 0.1]
    assert tail_weights([one, two, blank, two, one, EOS]) == [1.0, 1.0, 0.1, 0.1, 0.1, 0.1]


def test_labels_are_the_answer_tokens_one_place_early() -> None:
    ids, labels = pad_rows([([10, 11, 12], [20, EOS]), ([10, 11], [21, 22, 23, EOS])])
    assert ids.tolist() == [[10, 11, 12, 20, 0], [10, 11, 21, 22, 23]]
    assert labels.tolist() == [[IGNORED, IGNORED, 20, EOS, IGNORED], [IGNORED, 21, 22, 23, EOS]]


# -- the tokenizer


def test_every_character_and_the_chat_form_come_back(made: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made[1], local_files_only=True)
    text = CHARACTERS + " user assistant system \n\n" + CHARACTERS[::-1]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 58
    messages = [{"role": "user", "content": "sort 31245"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == encode_chat(character_tokenizer(), "sort 31245")
    assert tokenizer.decode(ids) == "<|im_start|>user\nsort 31245<|im_end|>\n<|im_start|>assistant\n"


def test_a_character_outside_the_alphabet_is_an_error_never_a_replacement() -> None:
    with pytest.raises(Exception, match="Missing \\[UNK\\]"):
        character_tokenizer().encode("sort A")


# -- local directories


def edit_json(name: str, **changes: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        payload = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**payload, **changes}))
    return edit


def cut_weights(directory: Path) -> None:
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[:-100])


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "is not a directory"),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json that is not JSON"),
    "not a language model": (edit_json("config.json", architectures=["BertForMaskedLM"]), "BertForMaskedLM, not a"),
    "own code": (edit_json("config.json", model_type="foreign", auto_map={"AutoConfig": "x.Y"}),
                 "without running its own code"),
    "pickled weights": (pickled, "has no model.safetensors; weights must be safetensors"),
    "weights cut short": (cut_weights, "an incomplete copy"),
    "weights foreign": (lambda d: (d / "model.safetensors").write_bytes(b"PK\3\4" * 50), "is no safetensors file"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer"),
    "tokenizer broken": (lambda d: (d / "tokenizer.json").write_text("[]"), "has a tokenizer that cannot be loaded"),
    "tokenizer too large": (edit_json("config.json", vocab_size=50), "id 57, outside the model's vocabulary of 50"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_directory_that_cannot_be_used_is_refused_by_name(case: str, made: tuple[Path, Path], tmp_path: Path) -> None:
    breakage, message = BROKEN[case]
    directory = tmp_path / "model"
    shutil.copytree(made[1], directory)
    breakage(directory)
    with pytest.raises(ConfigError, match=f"model.path: .*{message}"):
        set_up_model(Config(model=LocalModel(path=str(directory))), tmp_path / "cache")


def test_a_good_local_directory_is_used_as_it_is(made: tuple[Path, Path], tmp_path: Path) -> None:
    assert set_up_model(Config(model=LocalModel(path=str(made[1]))), tmp_path) == made[1]
    assert list(tmp_path.iterdir()) == []


EXPERTS: dict[str, tuple[dict[str, Any], int]] = {
    "dense": ({}, 0), "one expert is dense": ({"num_experts": 1}, 0), "by Qwen's name": ({"num_experts": 128}, 128),
    "by Mixtral's": ({"num_local_experts": 8}, 8), "by DeepSeek's": ({"n_routed_experts": 64, "num_experts": None}, 64)}


@pytest.mark.parametrize(("said", "experts"), EXPERTS.values(), ids=EXPERTS)
def test_the_plan_warns_of_experts_whose_choice_is_not_replayed(said: dict[str, Any], experts: int,
                                                                made: tuple[Path, Path], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(made[1], directory)
    edit_json("config.json", **said)(directory)
    config = Config.model_validate({"model": {"type": "local", "path": str(directory)},
                                    "data": {"size": 16, "validation": None}})
    told = make_plan(config, inspect_inputs(config).facts).warnings
    assert check_model(directory).experts == experts
    assert [text.split(":")[1] for text in told if "experts" in text] == (
        [f" a mixture of {experts} experts"] if experts else [])


def test_a_copy_holds_what_is_loaded_and_nothing_else(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "run" / "model"
    shutil.copytree(made[1], source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("x")
    for name in ("optimizer.pt", "pytorch_model.bin", "consolidated.safetensors", "README.md", ".git/config"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"x" * 1000)
    (tmp_path / "run" / ".model.tmp" / "left").mkdir(parents=True)  # by a start that was killed
    copy_model(source, target)
    assert sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()) == [
        "additional_chat_templates/tools.jinja", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert model_digests(target) == model_digests(made[1])
    assert loaded_bytes(source) == sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert check_model(target) == check_model(made[1])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"]
    (source / "config.json").write_text("{}")
    copy_model(source, target)  # what stands is the model of the run
    assert check_model(target) == check_model(made[1])


def test_a_copy_of_weights_in_parts_holds_the_parts_of_the_index(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "copy"
    shutil.copytree(made[1], source)
    (source / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(made[1]).save_pretrained(source, max_shard_size="1MB")
    parts = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(parts) > 1
    copy_model(source, target)
    assert sorted(path.name for path in target.glob("*.safetensors*")) == [*parts, "model.safetensors.index.json"]
    one, two = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (made[1], target))
    assert all(bool((one[name] == two[name]).all()) for name in one)


def test_an_index_that_leaves_its_directory_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(made[1], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ConfigError, match=r"model.path: .* names '../model.safetensors'; weights lie beside"):
        copy_model(tmp_path / "model", tmp_path / "copy")


def test_end_tokens_and_template_are_read_from_either_place(made: tuple[Path, Path], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(made[1], directory)
    template = chat_template(directory)
    edit_json("tokenizer_config.json", chat_template=template)(directory)
    (directory / "chat_template.jinja").unlink()
    assert chat_template(directory) == template
    assert model_digests(directory)["chat_template"] == model_digests(made[1])["chat_template"]
    edit_json("generation_config.json", eos_token_id=[2, 0])(directory)
    assert eos_token_ids(directory) == (2, 0)
    (directory / "generation_config.json").unlink()
    assert eos_token_ids(directory) == (2,)


# -- the gate of the recipe


@pytest.mark.slow
@pytest.mark.algorithms
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_warm_up_leaves_room_to_learn(seed: int, tmp_path: Path) -> None:
    """Greedy accuracy at the start: above 0.1, or nothing is rewarded; at most 0.45, or nothing is left to learn."""
    directory = set_up_model(Config(seed=seed), tmp_path)
    assert all(tensor.isfinite().all() for tensor in load_file(directory / "model.safetensors").values())
    engine, words, rows = TorchEngine(directory, slots=128, max_context=64), character_tokenizer(), held_out_rows(256)
    futures = [engine.submit(GenerateRequest(
        request_id=row["prompt"], token_ids_P=np.array(encode_chat(words, row["prompt"]), np.int32), seed=0,
        sampling=Sampling(temperature=0.0, max_new_tokens=8))) for row in rows]
    right = [words.decode(future.result(60).token_ids_L.tolist()) == row["answer"]
             for future, row in zip(futures, rows, strict=True)]
    engine.close()
    assert 0.1 < np.mean(right) <= 0.45
