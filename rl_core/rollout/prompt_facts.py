"""What is known of prompts without tokenising them: equal ones, sizes, sequences of roles (data.md sections 3, 5)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from rl_core.rollout.data_digest import text_spans
from rl_core.rollout.data_rows import ROLES, Form

_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd: multiplication by it loses nothing modulo 2^64
_LENGTH = np.uint64(0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFacts:
    """Of the prompts of a source, by row [rows]."""

    key: NDArray[np.uint64]
    """Hash of the prompt: equal for equal prompts, whatever file and form they come from (a text is one user message).
    """
    size: NDArray[np.int32]
    """Bytes of UTF-8 of all contents; tokens of a list of ids."""
    wide: NDArray[np.int32]
    """Of these bytes, those outside ASCII."""
    kind: NDArray[np.uint64]
    """Equal for chats with the same roles in the same order."""


def facts_of(form: Form, prompts: Any) -> PromptFacts:
    """Facts of one column of prompts."""
    if form == "ids":
        starts, flat = _lists(prompts)
        values = np.ascontiguousarray(flat.to_numpy(zero_copy_only=False), np.int32)
        key = _hashes(values.view(np.uint8), starts * 4)
        zeros = np.zeros(len(key), np.int32)
        return PromptFacts(key=key ^ _LENGTH, size=np.diff(starts).astype(np.int32), wide=zeros,
                           kind=zeros.astype(np.uint64))
    if form == "text":
        starts = np.arange(len(prompts) + 1)
        contents, codes = prompts, np.full(len(prompts), ROLES.index("user") + 1, np.uint64)
        more = None
    else:
        starts, flat = _lists(prompts)
        roles, contents, more = flat.flatten()
        codes = pc.index_in(roles, pa.array(ROLES)).to_numpy().astype(np.uint64) + np.uint64(1)
    offsets, data = text_spans(contents)
    lengths = np.diff(offsets)
    kind = _mixed(codes, starts)
    key = _hashes(data, offsets[starts]) ^ _mixed(codes + lengths.astype(np.uint64) * _LENGTH, starts)
    if more is not None and more.null_count < len(more):
        texts = (text or "" for text in more.to_pylist())
        extra = _mixed(np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts], np.uint64), starts)
        kind, key = kind ^ extra, key ^ extra
    above = np.concatenate([[0], np.cumsum(data > 127)]) if len(data) and data.max() > 127 else None
    ends = offsets[starts] - offsets[0]
    wide = np.zeros(len(kind), np.int64) if above is None else np.diff(above[ends])
    return PromptFacts(key=key, size=np.diff(ends).astype(np.int32), wide=wide.astype(np.int32), kind=kind)


def _lists(prompts: Any) -> tuple[NDArray[np.int64], Any]:
    """Where each list begins in the flat values, and these."""
    lengths = pc.list_value_length(prompts).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), prompts.flatten()


def _hashes(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    digest, view = xxhash.xxh3_64_intdigest, memoryview(cast(Any, data))
    return np.fromiter((digest(view[a:b]) for a, b in pairwise(ends.tolist())), np.uint64, len(ends) - 1)


def _mixed(codes: NDArray[np.uint64], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One number of each list of codes, in their order; none is empty."""
    if not len(codes):
        return np.zeros(0, np.uint64)
    lengths = np.diff(starts)
    powers = np.multiply.accumulate(np.full(int(lengths.max()), _MIX))
    place = np.arange(len(codes)) - np.repeat(starts[:-1], lengths)
    return np.add.reduceat(codes * powers[place], starts[:-1])
