"""Prompts: rows of a data set (dataset.py), tokenised once, in a deterministic order f(seed, dataset epoch).

All that is wrong with a row is refused before anything starts, with file and line. Importable without torch and
transformers; `load_tokenizer` imports transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import xxhash
from jinja2 import TemplateError
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.errors import ConfigError, DataError
from rl_core.rollout.dataset import Row, Text, training_rows, validation_rows
from rl_core.seeds import derive
from rl_core.types import Prompt

TEMPLATE_BUGS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a chat template raises beside TemplateError: it is a program of the model's authors."""


class Tokenizer(Protocol):
    """What this package asks of a transformers tokenizer."""

    chat_template: Any
    unk_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a local Hugging Face directory; no network, no remote code."""
    from transformers import AutoTokenizer

    load = cast(Any, AutoTokenizer).from_pretrained
    return cast(Tokenizer, load(str(model_dir), local_files_only=True, trust_remote_code=False))


def read_vocab_size(model_dir: Path) -> int:
    """Rows of the model's embedding, from config.json."""
    return int(json.loads((model_dir / "config.json").read_text())["vocab_size"])


# -- token ids


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """Token ids of many prompts: row i is `ids[offsets[i]:offsets[i + 1]]`. int32; offsets int64 [rows + 1]."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def row(self, i: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[i]:self.offsets[i + 1]]


def tokenize(rows: Sequence[Row], tokenizer: Tokenizer, *, max_tokens: int, vocab_size: int | None) -> TokenTable:
    """Render by the chat template and tokenise all rows. Without a template a text is taken as it is.

    Raises DataError naming the row that is too long, holds text that the tokenizer cannot represent, has a token id
    outside the vocabulary, or that the template refuses; ConfigError for a chat where the tokenizer has no template.
    """
    texts = {i: _render(row, tokenizer) for i, row in enumerate(rows) if not _is_ids(row.prompt)}
    encoded = iter(_encode([rows[i] for i in texts], list(texts.values()), tokenizer))
    lists = [np.asarray(next(encoded), np.int64) if i in texts else _given_ids(row, vocab_size)
             for i, row in enumerate(rows)]
    for row, ids in zip(rows, lists, strict=True):
        _check_ids(row, ids, tokenizer, max_tokens, vocab_size)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    flat = np.concatenate(lists) if lists else np.zeros(0, np.int64)
    return TokenTable(ids=flat.astype(np.int32), offsets=offsets)


def _encode(rows: Sequence[Row], texts: list[str], tokenizer: Tokenizer) -> Sequence[Sequence[int]]:
    """Token ids of each text, special tokens by the template alone where there is one."""
    if not texts:
        return []
    try:
        return tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    except Exception as error:  # the tokenizers library raises bare Exception for text that it cannot represent
        if len(texts) == 1:
            raise DataError(f"{rows[0].where}: the model's tokenizer cannot represent this prompt ({error}): "
                            f"{str(rows[0].prompt)[:80]!r}") from error
    return [_encode([row], [text], tokenizer)[0] for row, text in zip(rows, texts, strict=True)]


def _is_ids(prompt: Text) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], int)


def _given_ids(row: Row, vocab_size: int | None) -> NDArray[np.int64]:
    """Ids that the row spells out; int32 whatever the vocabulary."""
    given = cast(list[int], row.prompt)
    limit = 2**31 if vocab_size is None else vocab_size
    for bad in (token for token in given if not 0 <= token < limit):
        raise DataError(f"{row.where}: token id {bad} is outside the model's vocabulary of {limit}; use ids of this "
                        "model's tokenizer, from 0 on, or write the prompt as text")
    return np.asarray(given, np.int64)


def _render(row: Row, tokenizer: Tokenizer) -> str:
    if not tokenizer.chat_template:
        if isinstance(row.prompt, str):
            return row.prompt
        raise ConfigError(f"{row.where}: a chat prompt needs a tokenizer with a chat template, and this model's has "
                          "none; write prompts as text or use an instruction-tuned model (model.path)")
    chat: Any = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except (TemplateError, *TEMPLATE_BUGS) as error:
        raise DataError(f"{row.where}: the model's chat template refuses this prompt: {error}") from error


def _check_ids(row: Row, ids: NDArray[np.int64], tokenizer: Tokenizer, max_tokens: int, vocab_size: int | None) -> None:
    if not 1 <= len(ids) <= max_tokens:
        remedy = "shorten it, or raise the limit" if len(ids) else "write one"
        raise DataError(f"{row.where}: the prompt has {len(ids)} tokens; the limit is {max_tokens} "
                        f"(data.max_prompt_tokens): {remedy}")
    if vocab_size is not None and ids.max() >= vocab_size:
        raise DataError(f"{row.where}: token id {ids.max()} is outside the model's vocabulary of {vocab_size}: the "
                        "tokenizer is not this model's")
    unknown = tokenizer.unk_token_id
    if unknown is not None and not _is_ids(row.prompt) and (ids == unknown).any():
        raise DataError(f"{row.where}: the prompt holds characters that the model's tokenizer does not know: "
                        f"{str(row.prompt)[:80]!r}")


# -- the source


class PromptSource:
    """The training prompts in the order f(seed, dataset epoch), and the held-out ones.

    Thread-safe; `at` is a pure function, so any position can be asked for again after a restart.

        source = PromptSource(config, load_tokenizer(run.model), vocab_size=58)
        len(source)            # rows, = positions of one dataset epoch
        source.at(0, 3)        # Prompt(dataset_epoch=0, position=3, prompt_idx=..., ...)

    Raises DataError or ConfigError in the constructor for anything that cannot be used, naming the place.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._rows = training_rows(config)
        self._table = tokenize(self._rows, tokenizer, max_tokens=config.data.max_prompt_tokens, vocab_size=vocab_size)
        self._orders: dict[int, NDArray[np.int64]] = {}

    @classmethod
    def of_model(cls, config: Config, model_dir: Path) -> PromptSource:
        """With the tokenizer and vocabulary of a local Hugging Face directory."""
        return cls(config, load_tokenizer(model_dir), vocab_size=read_vocab_size(model_dir))

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, dataset_epoch: int, position: int) -> Prompt:
        """The prompt at one place of the order. Raises IndexError outside [0, len)."""
        if not 0 <= position < len(self._rows):
            raise IndexError(f"position {position} of dataset epoch {dataset_epoch}; it has {len(self._rows)}")
        idx = int(self._order(dataset_epoch)[position])
        return as_prompt(self._rows[idx], self._table.row(idx), dataset_epoch, position, idx)

    def validation(self) -> list[Prompt]:
        """The held-out prompts, in file order; empty where data.validation is null."""
        return validation_prompts(self._config, self._tokenizer, self._vocab_size)

    def first(self) -> tuple[Prompt, str]:
        """The first row of the data set in file order, and where it stands: `file:line`."""
        return as_prompt(self._rows[0], self._table.row(0), 0, 0, 0), self._rows[0].where

    def without(self, column: str) -> str | None:
        """Where the first row without this column stands, held-out rows included; None if all have it."""
        rows = (*self._rows, *validation_rows(self._config))
        return next((row.where for row in rows if column not in row.columns), None)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every training prompt, by row [rows]."""
        return np.diff(self._table.offsets)

    @property
    def digest(self) -> str:
        """Of all rows: token ids and answers. Another digest under the same path is another data set."""
        state = xxhash.xxh3_128(self._table.offsets.tobytes())
        state.update(self._table.ids.tobytes())
        for row in self._rows:
            state.update(row.answer.encode() + b"\0")
        return state.hexdigest()

    def _order(self, dataset_epoch: int) -> NDArray[np.int64]:
        order = self._orders.get(dataset_epoch)
        if order is None:
            order = epoch_order(len(self._rows), self._config.seed, dataset_epoch, shuffle=self._config.data.shuffle)
            # Leases look at one epoch, retries at the one before; others are made again.
            near = {e: o for e, o in self._orders.items() if abs(e - dataset_epoch) <= 1}
            self._orders = near | {dataset_epoch: order}
        return order


def epoch_order(rows: int, seed: int, dataset_epoch: int, *, shuffle: bool) -> NDArray[np.int64]:
    """Row of each position: a permutation of [0, rows), its own for every dataset epoch; file order without shuffle."""
    if not shuffle:
        return np.arange(rows)
    # Raw 64-bit draws: NumPy promises that they are the same in every version, and promises it of nothing above them.
    return np.argsort(np.random.PCG64(derive(seed, dataset_epoch, "order")).random_raw(rows), kind="stable")


def validation_prompts(config: Config, tokenizer: Tokenizer, vocab_size: int | None = None, *,
                       cwd: Path = Path()) -> list[Prompt]:
    """The held-out prompts of a run; dataset_epoch 0, position = prompt_idx = row. `cwd`: of the command."""
    rows = validation_rows(config, cwd)
    table = tokenize(rows, tokenizer, max_tokens=config.data.max_prompt_tokens, vocab_size=vocab_size)
    return [as_prompt(row, table.row(i), 0, i, i) for i, row in enumerate(rows)]


def as_prompt(row: Row, ids: NDArray[np.int32], dataset_epoch: int, position: int, idx: int) -> Prompt:
    """The prompt as written goes along as column `prompt`, for rewards that read it."""
    return Prompt(dataset_epoch=dataset_epoch, position=position, prompt_idx=idx, token_ids_P=ids, answer=row.answer,
                  data_source=row.data_source, columns={**row.columns, "prompt": row.prompt})
