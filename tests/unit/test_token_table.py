"""Tokens of a data set: what is over the limit, and how much of a large one has to be tokenised to know it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from rl_core.config import Config
from rl_core.errors import ConfigError, DataError
from rl_core.rollout import token_table
from rl_core.rollout.data_warnings import duplicates, warnings_of
from rl_core.rollout.encoder import Encoder, Limits
from rl_core.rollout.prompts import PromptSource, Tokenizer, load_tokenizer
from rl_core.rollout.token_bounds import bounds_of
from rl_core.rollout.token_table import tokenize
from rl_core.tokenizer import CHAT_TEMPLATE, write_tokenizer

LETTERS = ["a", "ab" * 40, "ü" * 30, "ab ab\nab", "e\u0301" * 5, "\U0001d160" * 9, "日本語です", "123",
           "<|im_end|>"]


def bytewise(directory: Path, *, template: str | None = CHAT_TEMPLATE, change: Callable[[Any], None] = lambda _: None) \
        -> Tokenizer:
    """A byte-level BPE tokenizer with two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "ab", "abab", "<|im_start|>", "<|im_end|>"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [("a", "b"), ("ab", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    change(backend)
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


def data_of(tmp_path: Path, prompts: list[Any], **data: Any) -> Config:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return Config.model_validate({"data": {"train": str(path), "validation": None, "shuffle": False, **data}})


def lengths_of(config: Config, tokenizer: Tokenizer, *, max_tokens: int = 10_000) -> tuple[Any, Any]:
    """Exact lengths, and the bounds that need no tokens."""
    source = PromptSource(config, tokenizer)
    encoder = Encoder(tokenizer, Limits(max_tokens=max_tokens))
    return tokenize(source.data, encoder, eager=True).lengths, bounds_of(source.data, encoder)


# -- bounds

CHATS = [[{"role": "system", "content": word}, {"role": "user", "content": word}] for word in LETTERS]


@pytest.mark.parametrize("prompts", [LETTERS, CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize("nfc", [False, True], ids=["as it is", "NFC"])
def test_no_prompt_has_more_tokens_than_its_bound(nfc: bool, prompts: list[Any], tmp_path: Path) -> None:
    def change(backend: Any) -> None:
        if nfc:
            backend.normalizer = normalizers.NFC()

    config = data_of(tmp_path, prompts, max_prompt_tokens=10_000)
    lengths, bounds = lengths_of(config, bytewise(tmp_path / "m", change=change))
    assert (lengths <= bounds).all(), (lengths, bounds)
    assert bounds[0] - lengths[0] <= 60, "near to it for a short one"


def test_bounds_of_token_ids_are_their_number(tmp_path: Path) -> None:
    lengths, bounds = lengths_of(data_of(tmp_path, [[1, 2], [3]]), bytewise(tmp_path / "m"))
    assert lengths.tolist() == bounds.tolist() == [2, 1]



def part(name: str, value: Any) -> Callable[[Any], None]:
    """Another part of the tokenizer."""
    return lambda backend: setattr(backend, name, value)


REPEATS = CHAT_TEMPLATE.replace("message['content']", "message['content'] ~ message['content']")
TRIMS = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
UNBOUNDED: dict[str, tuple[dict[str, Any], bool]] = {
    "the template repeats a content": ({"template": REPEATS}, False),
    "the template trims": ({"template": TRIMS}, True),
    "no template": ({"template": None}, True),
    "a prefix space": ({"change": part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))}, False),
    "a normalizer that makes more": ({"change": part("normalizer", normalizers.NFKC())}, False),
    "words by white space": ({"change": part("pre_tokenizer", pre_tokenizers.Whitespace())}, False),
}


@pytest.mark.parametrize(("made", "bounded"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_where_nothing_can_be_said_there_is_no_bound(made: dict[str, Any], bounded: bool, tmp_path: Path) -> None:
    tokenizer = bytewise(tmp_path / "m", **made)
    config = data_of(tmp_path, ["  a", "ab" * 9, "b", " a\n\n"], max_prompt_tokens=10_000)
    lengths, bounds = lengths_of(config, tokenizer)
    assert (bounds is not None) is bounded
    assert bounds is None or (lengths <= bounds).all()


def test_the_tokenizer_of_the_tiny_model_has_no_bound(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "m", 256)
    assert lengths_of(data_of(tmp_path, ["a", "ab"]), load_tokenizer(tmp_path / "m"))[1] is None


# -- large data sets


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty rows are a large data set, and one of them is a sample."""
    monkeypatch.setattr(token_table, "EAGER_ROWS", 10)
    monkeypatch.setattr(token_table, "SAMPLE_ROWS", 1)


WORDS = ["ab" * i for i in range(1, 21)]


def test_of_a_large_data_set_only_prompts_that_could_be_too_long_are_tokenised(
        tmp_path: Path, small_limits: None) -> None:
    tokenizer = bytewise(tmp_path / "m")
    config = data_of(tmp_path, WORDS, max_prompt_tokens=76)
    source = PromptSource(config, tokenizer)
    assert 1 < source.exact.sum() < 10, "the first, as a sample, and the longest"
    assert source.exact.tolist() == [True, *sorted(source.exact.tolist()[1:])]
    exact = PromptSource(config, tokenizer, exact_above=-1)
    assert exact.exact.all() and (source.lengths >= exact.lengths).all()
    for position in range(20):
        one, two = source.at(0, position), exact.at(0, position)
        assert one.token_ids_P.tolist() == two.token_ids_P.tolist() and one.token_ids_P.dtype == np.int32
        assert len(one.token_ids_P) == exact.lengths[position]
    assert PromptSource(config, tokenizer, exact_above=10).exact.all(), "the plan could refuse any of them"


OVERLONG: dict[str, list[Any]] = {"texts": WORDS, "chats": [[{"role": "user", "content": word}] for word in WORDS],
                                  "ids": [[1] * (i + 45) for i in range(20)]}


@pytest.mark.parametrize("eager", [True, False], ids=["all tokenised", "large"])
@pytest.mark.parametrize("prompts", OVERLONG.values(), ids=OVERLONG)
def test_prompts_over_the_limit_are_refused_with_their_count_or_left_out(
        prompts: list[Any], eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not eager:
        monkeypatch.setattr(token_table, "EAGER_ROWS", 10)
    tokenizer = bytewise(tmp_path / "m")
    lengths = PromptSource(data_of(tmp_path, prompts), tokenizer).lengths
    limit = int(np.sort(lengths)[-4])
    over = np.flatnonzero(lengths > limit)
    first, most = over[0], over[np.argmax(lengths[over])]
    message = (rf"rows\.jsonl:{first + 1}: the prompt has {lengths[first]} tokens; the limit is {limit} "
               rf"\(data.max_prompt_tokens\); {len(over)} of 20 prompts are over it, the longest is "
               rf".*rows\.jsonl:{most + 1} with {lengths[most]}: .* data\.overlong=drop")
    with pytest.raises(DataError, match=message):
        PromptSource(data_of(tmp_path, prompts, max_prompt_tokens=limit), tokenizer)
    source = PromptSource(data_of(tmp_path, prompts, max_prompt_tokens=limit, overlong="drop"), tokenizer)
    assert (len(source), source.dropped) == (20 - len(over), len(over))
    assert [source.at(0, i).prompt_idx for i in range(len(source))] == list(range(len(source))), "numbered without gaps"
    assert [source.at(0, i).columns["prompt"] for i in range(len(source))] == [
        prompt for i, prompt in enumerate(prompts) if i not in over]
    with pytest.raises(DataError, match=r"data.train: all 20 prompts have more than 1 tokens .* raise the limit"):
        PromptSource(data_of(tmp_path, prompts, max_prompt_tokens=1, overlong="drop"), tokenizer)


def test_weights_count_the_rows_that_are_left(tmp_path: Path) -> None:
    tokenizer = bytewise(tmp_path / "m")
    (tmp_path / "b.jsonl").write_text('{"prompt": "b", "answer": "1"}\n')
    train = [{"path": str(tmp_path / "rows.jsonl"), "weight": 2}, str(tmp_path / "b.jsonl")]
    limit = int(PromptSource(data_of(tmp_path, WORDS), tokenizer).lengths[9])
    config = Config.model_validate({"data": {"train": train, "validation": None, "shuffle": False, "overlong": "drop",
                                             "max_prompt_tokens": limit}})
    source = PromptSource(config, tokenizer)
    kept = len(source.lengths) - 1
    assert len(source) == 2 * kept + 1 < 2 * len(WORDS)
    asked = [source.at(0, i) for i in range(len(source))]
    assert [prompt.prompt_idx for prompt in asked] == list(range(2 * kept + 1)), "each time it is taken its own index"
    words = [prompt.columns["prompt"] for prompt in asked]
    assert words[:kept] == words[kept:-1] and words[-1] == "b"
    assert [source.prompt_idx(0, i) for i in range(len(source))] == [prompt.prompt_idx for prompt in asked]


# -- what a template refuses


def test_a_template_that_fails_on_one_row_names_it(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE + "{% if 'seven' in messages[0]['content'] %}{{ messages[9].content }}{% endif %}"
    tokenizer = bytewise(tmp_path / "m", template=template)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the model's chat template refuses this prompt: .*'seven'; "
                                        "write it as the template wants it, or leave it out"):
        PromptSource(data_of(tmp_path, ["six", "seven"]), tokenizer)


def test_a_role_that_a_template_refuses_is_found_in_a_large_data_set(tmp_path: Path, small_limits: None) -> None:
    prompts = [[{"role": "tool" if i == 17 else "user", "content": "a"}] for i in range(20)]
    with pytest.raises(DataError, match=r"rows\.jsonl:18: the model's chat template refuses this prompt: unknown chat "
                                        "role tool"):
        PromptSource(data_of(tmp_path, prompts), bytewise(tmp_path / "m"))


def test_a_vocabulary_that_is_too_small_is_found_in_a_large_data_set(tmp_path: Path, small_limits: None) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:\d+: token id \d+ is outside the model's vocabulary of 200"):
        PromptSource(data_of(tmp_path, WORDS), bytewise(tmp_path / "m"), vocab_size=200)


# -- warnings


def test_repeats_and_shared_prompts_are_said(tmp_path: Path) -> None:
    tokenizer = bytewise(tmp_path / "m")
    (tmp_path / "held-out.jsonl").write_text("".join(
        json.dumps({"prompt": [{"role": "user", "content": word}], "answer": "1"}) + "\n" for word in ("c", "b", "a")))
    config = data_of(tmp_path, ["a", "b", "a", "a"], validation=str(tmp_path / "held-out.jsonl"))
    source = PromptSource(config, tokenizer)
    repeated, shared = warnings_of(source, source.held_out)
    assert repeated.replace(str(tmp_path), "") == (
        "data.train: 2 of 4 prompts repeat an earlier one (first /rows.jsonl:3, which repeats /rows.jsonl:1); each is "
        "trained as often as it stands there")
    assert shared.replace(str(tmp_path), "") == (
        "data.validation: 2 of 3 held-out prompts are training prompts, too (first /held-out.jsonl:2, as "
        "/rows.jsonl:2): accuracy on them says little about others")
    clean = PromptSource(data_of(tmp_path, ["a", "b"]), tokenizer)
    assert warnings_of(clean, clean.held_out) == ()


@pytest.mark.parametrize(("keys", "found"), [([], (0, 0, 0)), ([5, 6], (0, 0, 0)), ([7, 8, 7], (1, 0, 2)),
                                             ([9, 8, 8, 9, 8], (3, 1, 2))])
def test_the_first_repeat_is_found(keys: list[int], found: tuple[int, int, int]) -> None:
    assert duplicates(np.array(keys, np.uint64)) == found


def test_a_chat_without_a_template_is_refused_in_a_large_data_set(tmp_path: Path, small_limits: None) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl:\d+: a chat prompt needs a tokenizer with a chat template"):
        PromptSource(data_of(tmp_path, CHATS * 3), bytewise(tmp_path / "m", template=None))
