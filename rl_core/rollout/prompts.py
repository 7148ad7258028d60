"""Prompts: rows of a data set (dataset.py) with their tokens, in a deterministic order f(seed, dataset epoch).

All that is wrong with a row is refused before anything starts, with file and line (data.md sections 2 and 5).
Importable without torch and transformers; `load_tokenizer` imports transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.rollout.data_rows import Row
from rl_core.rollout.dataset import Dataset, training_data, validation_data
from rl_core.rollout.encoder import Encoder, Limits, Tokenizer
from rl_core.rollout.mixture import Mixture, epoch_order
from rl_core.rollout.token_table import Tokens, tokenize
from rl_core.types import Prompt

__all__ = ["PromptSource", "Tokenizer", "as_prompt", "epoch_order", "load_tokenizer", "read_vocab_size",
           "validation_prompts"]


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a local Hugging Face directory; no network, no remote code.

    One of no class of its own is loaded as what AutoTokenizer would make of it, without AutoTokenizer, which imports
    torch: two seconds of every start.
    """
    if _has_no_class(model_dir):
        from transformers import PreTrainedTokenizerFast as Loaded
    else:
        from transformers import AutoTokenizer as Loaded

    load = cast(Any, Loaded).from_pretrained
    return cast(Tokenizer, load(str(model_dir), local_files_only=True, trust_remote_code=False))


def _has_no_class(model_dir: Path) -> bool:
    """Whether tokenizer.json is all there is to it; False where that cannot be read, which AutoTokenizer then says."""
    try:
        settings = dict[str, Any](json.loads((model_dir / "tokenizer_config.json").read_text()))
    except (OSError, ValueError, TypeError):
        return False
    return (model_dir / "tokenizer.json").is_file() and "auto_map" not in settings \
        and settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")


def read_vocab_size(model_dir: Path) -> int:
    """Rows of the model's embedding, from config.json."""
    return int(json.loads((model_dir / "config.json").read_text())["vocab_size"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Rows that are used, and what was left out."""

    rows: NDArray[np.int32]
    """Rows of the data set, in its order."""
    dropped: int
    """Prompts over `data.max_prompt_tokens` that were left out (data.overlong)."""

    @classmethod
    def of(cls, data: Dataset, tokens: Tokens, config: Config, field: str) -> Kept:
        """Raises DataError where prompts are over the limit and `data.overlong` is `refuse`, or where none is left."""
        limit = config.data.max_prompt_tokens
        over = np.flatnonzero(tokens.lengths > limit)
        if len(over) and config.data.overlong == "refuse":
            raise DataError(_overlong(data, tokens, over, limit))
        if len(over) and len(over) == len(data):
            raise DataError(f"{field}: all {len(data)} prompts have more than {limit} tokens (data.max_prompt_tokens), "
                            f"the shortest {tokens.lengths.min()}, the longest {tokens.lengths.max()}: raise the limit")
        rows = np.arange(len(data)) if not len(over) else np.flatnonzero(tokens.lengths <= limit)
        return cls(rows=rows.astype(np.int32), dropped=len(over))


def _overlong(data: Dataset, tokens: Tokens, over: NDArray[np.int64], limit: int) -> str:
    first, longest = int(over[0]), int(over[np.argmax(tokens.lengths[over])])
    rest = "" if len(over) == 1 else (f"; {len(over)} of {len(data)} prompts are over it, the longest is "
                                      f"{data.where(longest)} with {tokens.lengths[longest]}")
    return (f"{data.where(first)}: the prompt has {tokens.lengths[first]} tokens; the limit is {limit} "
            f"(data.max_prompt_tokens){rest}: shorten, raise the limit, or leave them out with data.overlong=drop")


class PromptSource:
    """The training prompts in the order f(seed, dataset epoch), and the held-out ones.

    Thread-safe; `at` is a pure function, so any position can be asked for again after a restart.

        source = PromptSource(config, load_tokenizer(run.model), vocab_size=58)
        len(source)            # positions of one dataset epoch
        source.at(0, 3)        # Prompt(dataset_epoch=0, position=3, prompt_idx=..., ...)

    Raises DataError or ConfigError in the constructor for anything that cannot be used, naming the place.
    `exact_above`: prompts that may have more tokens than this are counted exactly, of however many rows.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, *, vocab_size: int | None = None,
                 exact_above: int | None = None) -> None:
        self._config = config
        self._encoder = Encoder(tokenizer, Limits(max_tokens=config.data.max_prompt_tokens, vocab_size=vocab_size,
                                                  exact_above=exact_above))
        self.data = training_data(config)
        self._tokens = tokenize(self.data, self._encoder)
        self._kept = Kept.of(self.data, self._tokens, config, "data.train")
        ends = np.cumsum([0, *map(len, self.data.sources)])
        rows = np.diff(np.searchsorted(self._kept.rows, ends)).tolist()
        self._mixture = Mixture(rows, [source.weight for source in self.data.sources])
        self._orders: dict[int, NDArray[np.int64]] = {}
        self.sampled: Callable[[int, NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]] | None = None
        """Where `data.sampler` is set: the order of an epoch by its number, its prompts and their rows (orders.py). Set
        by the run, before an order is asked for."""

    @classmethod
    def of_model(cls, config: Config, model_dir: Path) -> PromptSource:
        """With the tokenizer and vocabulary of a local Hugging Face directory."""
        return cls(config, load_tokenizer(model_dir), vocab_size=read_vocab_size(model_dir))

    def __len__(self) -> int:
        return self._mixture.positions

    def at(self, dataset_epoch: int, position: int) -> Prompt:
        """The prompt at one place of the order. Raises IndexError outside [0, len)."""
        idx = self.prompt_idx(dataset_epoch, position)
        return self._prompt(self._mixture.row(idx), dataset_epoch, position, idx)

    def of_index(self, idx: int, dataset_epoch: int, position: int) -> Prompt:
        """The prompt of this index, which stands at that place in an order that need not be this one's seed's. Raises
        IndexError outside [0, len)."""
        if not 0 <= idx < len(self):
            raise IndexError(f"prompt {idx}; there are {len(self)}")
        return self._prompt(self._mixture.row(idx), dataset_epoch, position, idx)

    def prompt_idx(self, dataset_epoch: int, position: int) -> int:
        """The prompt index at one place of the order, without reading its row."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of dataset epoch {dataset_epoch}; it has {len(self)}")
        return int(self._order(dataset_epoch)[position])

    def _prompt(self, kept_row: int, dataset_epoch: int, position: int, idx: int) -> Prompt:
        number = int(self._kept.rows[kept_row])
        row, table = self.data.row(number), self._tokens.table
        return as_prompt(row, self._encoder([row])[0] if table is None else table.row(number), dataset_epoch, position,
                         idx)

    def used(self, row: int) -> Prompt:
        """One row of those that are used, in file order."""
        return self._prompt(row, 0, row, row)

    def validation(self) -> list[Prompt]:
        """The held-out prompts, in file order; empty where data.validation is null."""
        return self.held_out.prompts

    @cached_property
    def held_out(self) -> HeldOut:
        """The held-out prompts with what is known of their rows."""
        return HeldOut.of(self._config, self._encoder)

    def first(self) -> tuple[Prompt, str]:
        """The first row of the data set in file order, and where it stands: `file:line`."""
        return self.used(0), self.where(0)

    def without(self, column: str) -> str | None:
        """Where the first row without this column stands, held-out rows included; None if all have it."""
        return self.data.without(column) or self.held_out.data.without(column)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every training prompt that is used, by row. Of a large data set, prompts that are certainly below
        the limit count with the most tokens that they can have (`exact`)."""
        return self._tokens.lengths[self._kept.rows]

    @property
    def all_lengths(self) -> NDArray[np.int32]:
        """`lengths` of all rows, those that were left out included."""
        return self._tokens.lengths

    @property
    def exact(self) -> NDArray[np.bool_]:
        """Whose length is exact, by row."""
        return self._tokens.known[self._kept.rows]

    @property
    def dropped(self) -> int:
        """Prompts over the limit that were left out."""
        return self._kept.dropped

    @property
    def keys(self) -> NDArray[np.uint64]:
        """Hash of every training prompt that is used: equal for equal prompts."""
        return self.data.keys[self._kept.rows]

    def where(self, row: int) -> str:
        """Where a prompt that is used stands."""
        return self.data.where(int(self._kept.rows[row]))

    @property
    def digest(self) -> str:
        """Of all values of all rows. Another digest under the same path is another data set."""
        return self.data.digest

    def _order(self, dataset_epoch: int) -> NDArray[np.int64]:
        order = self._orders.get(dataset_epoch)
        if order is None:
            order = self._made_order(dataset_epoch)
            # Leases look at one epoch, retries at the one before; others are made again.
            near = {e: o for e, o in self._orders.items() if abs(e - dataset_epoch) <= 1}
            self._orders = near | {dataset_epoch: order}
        return order


    def _made_order(self, dataset_epoch: int) -> NDArray[np.int64]:
        config = self._config
        if config.data.sampler is None:
            return self._mixture.order(config.seed, dataset_epoch, shuffle=config.data.shuffle)
        assert self.sampled is not None, "a sampler's order is made inside a run"
        prompts = self._mixture.order(config.seed, dataset_epoch, shuffle=False)
        rows = np.array([self._kept.rows[self._mixture.row(idx)] for idx in prompts.tolist()], np.int64)
        return self.sampled(dataset_epoch, prompts, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The held-out prompts of a run: `HeldOut.of(config, encoder)`."""

    data: Dataset
    kept: Kept
    prompts: list[Prompt]
    """dataset_epoch 0, position = prompt_idx = row that is used."""

    @classmethod
    def of(cls, config: Config, encoder: Encoder, cwd: Path = Path()) -> HeldOut:
        """Raises DataError or ConfigError for anything that cannot be used."""
        data = validation_data(config, cwd)
        tokens = tokenize(data, encoder, eager=True)
        assert tokens.table is not None
        kept = Kept.of(data, tokens, config, "data.validation")
        return cls(data=data, kept=kept, prompts=[as_prompt(data.row(row), tokens.table.row(row), 0, i, i)
                                                  for i, row in enumerate(kept.rows.tolist())])

    @property
    def keys(self) -> NDArray[np.uint64]:
        """Hash of every held-out prompt that is used."""
        return self.data.keys[self.kept.rows]

    def where(self, row: int) -> str:
        """Where a prompt that is used stands."""
        return self.data.where(int(self.kept.rows[row]))


def validation_prompts(config: Config, tokenizer: Tokenizer, vocab_size: int | None = None, *,
                       cwd: Path = Path()) -> list[Prompt]:
    """The held-out prompts of a run; dataset_epoch 0, position = prompt_idx = row. `cwd`: of the command."""
    encoder = Encoder(tokenizer, Limits(max_tokens=config.data.max_prompt_tokens, vocab_size=vocab_size))
    return HeldOut.of(config, encoder, cwd).prompts


def as_prompt(row: Row, ids: NDArray[np.int32], dataset_epoch: int, position: int, idx: int) -> Prompt:
    """The prompt as written goes along as column `prompt`, for rewards that read it."""
    return Prompt(dataset_epoch=dataset_epoch, position=position, prompt_idx=idx, token_ids_P=ids, answer=row.answer,
                  data_source=row.data_source, columns={**row.columns, "prompt": row.prompt})
