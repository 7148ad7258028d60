"""Token ids of a data set, as far as a start needs them.

All prompts of a data set are tokenised at the start, up to `EAGER_ROWS`. Of more rows only those that could be over the
limit are, where the tokenizer is of a kind that makes no more tokens than there are bytes (byte-level BPE without
unknown tokens: Qwen, Llama 3, GPT); the others are tokenised when they are leased (data.md section 5). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.rollout.dataset import Dataset
from rl_core.rollout.encoder import Encoder
from rl_core.rollout.token_bounds import bounds_of

EAGER_ROWS = 20_000
SAMPLE_ROWS = 1024
"""Rows of a larger data set that are tokenised at the start whatever their length, evenly over it."""
CHUNK_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """Token ids of many prompts: row i is `ids[offsets[i]:offsets[i + 1]]`. int32; offsets int64 [rows + 1]."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def row(self, i: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[i]:self.offsets[i + 1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What the start found out about the tokens of a data set, by row."""

    table: TokenTable | None
    """None: rows are tokenised when they are asked for."""
    lengths: NDArray[np.int32]
    """Tokens of each prompt; without a table, of rows that are not `known`, no less than they have."""
    known: NDArray[np.bool_]
    """Rows whose length is exact."""


def tokenize(data: Dataset, encoder: Encoder, *, eager: bool | None = None) -> Tokens:
    """Tokenise a data set, or find out that most of it can wait. `eager` None: by its size and the tokenizer.

    Raises what `Encoder` raises; prompts over the limit are no error here.
    """
    if eager is None:
        eager = len(data) <= EAGER_ROWS
    bounds = None if eager else bounds_of(data, encoder)
    if bounds is None:
        return _all(data, encoder)
    lengths, known = bounds, np.zeros(len(data), bool)
    wanted = np.union1d(np.flatnonzero(bounds > encoder.limits.exact),
                        np.linspace(0, len(data) - 1, min(SAMPLE_ROWS, len(data))).astype(np.int64))
    if len(wanted) > len(data) // 2:  # most are needed: then all, and none is tokenised twice
        return _all(data, encoder)
    for numbers, lists in _chunks(data, encoder, wanted):
        lengths[numbers] = [len(ids) for ids in lists]
    known[wanted] = True
    return Tokens(table=None, lengths=lengths, known=known)


def _all(data: Dataset, encoder: Encoder) -> Tokens:
    parts: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    lengths = np.zeros(len(data), np.int32)
    for numbers, lists in _chunks(data, encoder, np.arange(len(data))):
        lengths[numbers] = [len(ids) for ids in lists]
        parts.append(np.concatenate(lists))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Tokens(table=TokenTable(ids=np.concatenate(parts), offsets=offsets), lengths=lengths,
                  known=np.ones(len(data), bool))


def _chunks(data: Dataset, encoder: Encoder, wanted: NDArray[np.int64]) \
        -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.int32]]]]:
    for start in range(0, len(wanted), CHUNK_ROWS):
        numbers = wanted[start:start + CHUNK_ROWS]
        yield numbers, encoder(list(data.bare(numbers)))
