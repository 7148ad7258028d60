"""Prompts: the sort task, JSONL files, tokenisation, and the order f(seed, dataset epoch)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from rl_core.config import Config
from rl_core.errors import ConfigError, DataError
from rl_core.rollout.data_files import read_file
from rl_core.rollout.data_rows import Keys
from rl_core.rollout.environments.sort import MAX_ROWS, held_out_rows, sort_rows
from rl_core.rollout.prompts import PromptSource, Tokenizer, epoch_order, load_tokenizer
from rl_core.tokenizer import VOCABULARY, write_tokenizer

VOCAB = len(VOCABULARY)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 256)
    return load_tokenizer(directory)


def with_data(**data: Any) -> Config:
    return Config.model_validate({"data": data})


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# -- the sort task


def test_sort_rows_are_right_distinct_and_a_function_of_the_seed() -> None:
    rows = sort_rows(4096, seed=1)
    assert rows == sort_rows(4096, seed=1)
    assert rows[:100] == sort_rows(100, seed=1)
    assert rows != sort_rows(4096, seed=2)
    assert len({row["prompt"] for row in rows}) == 4096
    for row in rows:
        number = row["prompt"].removeprefix("sort ")
        assert row["answer"] == "".join(sorted(number))
    shares = np.bincount([len(row["answer"]) for row in rows], minlength=7)[3:] / 4096
    assert shares.sum() == 1.0 and (shares > 0.15).all(), shares


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_training_row_is_held_out(seed: int, tokenizer: Tokenizer) -> None:
    source = PromptSource(Config(seed=seed), tokenizer, vocab_size=VOCAB)
    held_out = {prompt.columns["prompt"] for prompt in source.validation()}
    training = {source.at(0, i).columns["prompt"] for i in range(len(source))}
    assert len(held_out) == 256 and len(training) == 4096
    assert not held_out & training
    assert held_out == {row["prompt"] for row in held_out_rows(256)}, "the same for every seed"


def test_sort_refuses_more_rows_than_it_can_draw() -> None:
    with pytest.raises(ConfigError, match=f"{MAX_ROWS} rows asked for .* beside 1 excluded"):
        sort_rows(MAX_ROWS, seed=1, exclude={"sort 123"})


# -- tokens and order


def test_a_prompt_is_one_user_message_in_the_chat_form(tokenizer: Tokenizer) -> None:
    source = PromptSource(with_data(size=8), tokenizer, vocab_size=VOCAB)
    prompt = source.at(0, 3)
    assert tokenizer.decode(prompt.token_ids_P, skip_special_tokens=False) == (
        f"<|im_start|>user\n{prompt.columns['prompt']}<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.token_ids_P.dtype == np.int32
    assert prompt.answer == "".join(sorted(prompt.columns["prompt"].removeprefix("sort ")))
    assert source.lengths.tolist() == [len(source.at(0, int(i)).token_ids_P)
                                       for i in np.argsort(epoch_order(8, 1, 0, shuffle=True))]


def test_the_order_is_a_permutation_of_its_own_for_every_seed_and_epoch(tokenizer: Tokenizer) -> None:
    def order(source: PromptSource, epoch: int) -> list[int]:
        return [source.at(epoch, i).prompt_idx for i in range(len(source))]

    source = PromptSource(with_data(size=64), tokenizer)
    orders = [order(source, epoch) for epoch in (0, 1, 7, 0)]
    assert orders[0] == orders[3] == order(PromptSource(with_data(size=64), tokenizer), 0), "resumable"
    assert all(sorted(each) == list(range(64)) for each in orders)
    assert orders[0] != orders[1] != orders[2]
    other_seed = PromptSource(Config.model_validate({"seed": 2, "data": {"size": 64}}), tokenizer)
    assert order(other_seed, 0) != orders[0]
    assert order(PromptSource(with_data(size=64, shuffle=False), tokenizer), 3) == list(range(64))


def test_the_order_stays_the_same_over_versions_of_numpy() -> None:
    assert epoch_order(8, 1, 0, shuffle=True).tolist() == [5, 6, 1, 2, 4, 7, 3, 0]


def test_positions_outside_the_epoch_are_refused(tokenizer: Tokenizer) -> None:
    source = PromptSource(with_data(size=8), tokenizer)
    for position in (-1, 8):
        with pytest.raises(IndexError, match=f"position {position} .* it has 8"):
            source.at(0, position)


# -- files


def test_files_give_texts_chats_token_ids_and_columns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = jsonl(tmp_path / "sums.jsonl", {"prompt": "1+1?", "answer": 2, "level": 3}, "",
                 {"prompt": "1+2?", "answer": 3, "level": 3})
    chats = jsonl(tmp_path / "chats.jsonl", {"prompt": [{"role": "system", "content": "be short"},
                                                        {"role": "user", "content": "2+2?"}],
                                             "answer": "4", "data_source": "hard"})
    ids = jsonl(tmp_path / "ids.jsonl", {"prompt": [1, 4, 6], "answer": "x"})
    source = PromptSource(with_data(train=[str(path), str(chats), str(ids)], validation=str(path), validation_size=2,
                                    shuffle=False), tokenizer, vocab_size=VOCAB)
    first, _, second, third = (source.at(0, i) for i in range(4))
    assert (first.answer, first.data_source, first.columns) == ("2", "sums", {"level": 3, "prompt": "1+1?"})
    assert (second.answer, second.data_source) == ("4", "hard")
    assert tokenizer.decode(second.token_ids_P, skip_special_tokens=False) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert third.token_ids_P.tolist() == [1, 4, 6]
    assert [prompt.prompt_idx for prompt in source.validation()] == [0, 1]
    assert [source.where(i).removeprefix(f"{tmp_path}/") for i in range(4)] == [
        "sums.jsonl:1", "sums.jsonl:3", "chats.jsonl:1", "ids.jsonl:1"]


def test_no_validation_is_no_prompts(tokenizer: Tokenizer) -> None:
    assert PromptSource(with_data(size=8, validation=None), tokenizer).validation() == []


def user(content: Any, role: str = "user") -> dict[str, Any]:
    return {"prompt": [{"role": role, "content": content}], "answer": "a"}


BAD_ROWS = {
    "not JSON": ('{"prompt": ', r"d.jsonl:3: not JSON"),
    "not an object": ("[1]", r"d.jsonl:3: a row is a JSON object .* not list"),
    "no prompt": ({"answer": "1"}, r"d.jsonl:3: no `prompt`; the row has \['answer'\]"),
    "no answer": ({"prompt": "a"}, r"d.jsonl:3: no `answer`; the row has \['prompt'\]"),
    "null answer": ({"prompt": "a", "answer": None}, r"d.jsonl:3: no `answer`"),
    "empty answer": ({"prompt": "a", "answer": " "}, r"d.jsonl:3: `answer` is ' '; .* not empty"),
    "answer is a list": ({"prompt": "a", "answer": [1]}, r"d.jsonl:3: `answer` is \[1\]; it must be a text"),
    "empty prompt": ({"prompt": " ", "answer": "1"}, r"d.jsonl:3: `prompt` is ' '"),
    "prompt is a number": ({"prompt": 3, "answer": "1"}, r"d.jsonl:3: `prompt` is 3; it must be a text, a chat"),
    "unknown role": (user("a", "robot"), r"d.jsonl:3: message 0 .* has the role 'robot'; known roles are system"),
    "role the template refuses": (user("a", "tool"), r"d.jsonl:3: the model's chat template .*unknown chat role tool"),
    "assistant last": (user("a", "assistant"), r"d.jsonl:3: the last message .* assistant"),
    "message without content": (user(None), r"d.jsonl:3: message 0 .* must have `role` and a text `content`"),
    "too long": ({"prompt": "a" * 64, "answer": "1"}, r"d.jsonl:3: the prompt has 72 tokens; the limit is 64 \(data.m"),
    "one of two shapes": ({"prompt": "a", "reward_model": {"ground_truth": "1"}},
                          r"d.jsonl:3: the row has its answer in `reward_model.ground_truth`, and .*d.jsonl:1 has its"),
    "another form": (user("a"), r"d.jsonl:3: `prompt` is a chat, and .*d.jsonl:1 has a text: one file holds one form"),
    "unknown characters": ({"prompt": "sort ß", "answer": "1"}, r"d.jsonl:3: the model's tokenizer cannot represent"),
    "token outside vocabulary": ({"prompt": [1, VOCAB], "answer": "1"}, r"d.jsonl:3: token id 58 is outside .* of 58"),
    "negative token": ({"prompt": [1, -1], "answer": "1"}, r"d.jsonl:3: token id -1 is outside"),
}


GOOD_PROMPTS = {"role the template refuses": [{"role": "user", "content": "1"}], "token outside vocabulary": [1],
                "negative token": [1]}
"""Of the other rows of the file, where they are no text."""


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    row, message = BAD_ROWS[name]
    good = {"prompt": GOOD_PROMPTS.get(name, "1"), "answer": "1"}
    path = jsonl(tmp_path / "d.jsonl", good, "", row, good)
    with pytest.raises(DataError, match=message):
        PromptSource(with_data(train=str(path), max_prompt_tokens=64), tokenizer, vocab_size=VOCAB)


def test_an_empty_answer_is_fine_for_a_reward_that_does_not_compare(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "1", "answer": ""})
    assert read_file(path, Keys(needs_answer=False)).row(0).answer == ""


BAD_FILES = {
    "missing": (None, r"d.jsonl: no such data file; write `sort` or the path"),
    "empty": (b"", r"d.jsonl: the data file is empty"),
    "blank lines": (b"\n \n", r"d.jsonl: the data file is empty"),
    "not UTF-8": (b'{"prompt": "1", "answer": "1"}\n{"prompt": "\xff"}\n', r"d.jsonl:2: not UTF-8"),
}


@pytest.mark.parametrize(("data", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_named(data: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_file(path, Keys())


def test_a_chat_needs_a_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_tokenizer(tmp_path / "base", 256)
    (tmp_path / "base" / "chat_template.jinja").unlink()
    base = load_tokenizer(tmp_path / "base")
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "sort 1", "answer": "1"})
    source = PromptSource(with_data(train=str(path)), base)
    assert base.decode(source.at(0, 0).token_ids_P, skip_special_tokens=False) == "sort 1", "a text is taken as it is"
    jsonl(path, user("a"))
    with pytest.raises(ConfigError, match=r"d.jsonl:1: a chat prompt needs a tokenizer with a chat template"):
        PromptSource(with_data(train=str(path)), base)


NO_TORCH = """
import sys
from pathlib import Path
from rl_core.rollout.prompts import load_tokenizer
load_tokenizer(Path(sys.argv[1]))
assert "torch" not in sys.modules
"""


def test_a_tokenizer_of_no_class_is_what_auto_tokenizer_makes_of_it_and_needs_no_torch(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 256)
    subprocess.run([sys.executable, "-c", NO_TORCH, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    ours: Any = load_tokenizer(tmp_path)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert type(ours) is type(theirs) and ours.init_kwargs == theirs.init_kwargs
    assert ours.get_vocab() == theirs.get_vocab() and ours.all_special_ids == theirs.all_special_ids
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
