"""How many tokens a prompt can have at most, from its bytes alone (data.md section 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rl_core.rollout.data_rows import Row
from rl_core.rollout.dataset import Dataset
from rl_core.rollout.encoder import Encoder, Tokenizer, is_bytewise, state_of

KINDS = 256
"""Most sequences of roles in one data set whose prompts are not all tokenised at the start."""
NFC_GROWTH = 3
"""Most bytes of UTF-8 that NFC makes of one (Unicode Standard Annex 15, table of maximal expansion)."""


def bounds_of(data: Dataset, encoder: Encoder) -> NDArray[np.int32] | None:
    """Most tokens that each prompt can have, from its bytes alone; None where nothing can be said of this tokenizer or
    template."""
    growth = _growth(encoder.tokenizer)
    vocabulary = encoder.limits.vocab_size
    if growth is None or (vocabulary is not None and len(cast(Any, encoder.tokenizer)) > vocabulary):
        return None
    bounds = [np.zeros(0, np.int32)]
    for table, start in zip(data.tables, data.starts, strict=False):
        facts = table.facts
        if table.form == "ids":
            bounds.append(facts.size)
            continue
        contents = facts.size + (growth - 1) * facts.wide.astype(np.int64)
        around = _around(data, encoder, int(start), facts.kind, contents, growth)
        if around is None:
            return None
        bounds.append((contents + around).clip(max=np.iinfo(np.int32).max).astype(np.int32))
    return np.concatenate(bounds)


def _growth(tokenizer: Tokenizer) -> int | None:
    """Most tokens that a byte of text can become; None if that is not known."""
    if not is_bytewise(tokenizer):
        return None
    normalizer = cast(Any, tokenizer).backend_tokenizer.normalizer
    return 1 if normalizer is None else NFC_GROWTH if state_of(normalizer) == {"type": "NFC"} else None


def _around(data: Dataset, encoder: Encoder, start: int, kind: NDArray[np.uint64], contents: NDArray[np.int64],
            growth: int) -> NDArray[np.int32] | None:
    """Most tokens of what the template puts around the contents of each row; None if it is no function of the roles.

    `contents`: most tokens of the contents alone.
    The shortest and the longest prompt of every sequence of roles are rendered beside one whose contents are a letter:
    a template that repeats a content, or escapes it, makes more of the longer one.
    """
    kinds, which = np.unique(kind, return_inverse=True)
    if len(kinds) > KINDS:
        return None
    around = np.zeros(len(kinds), np.int32)
    for i in range(len(kinds)):
        rows = np.flatnonzero(which == i)
        shortest, longest = (data.row(start + int(rows[find(contents[rows])])) for find in (np.argmin, np.argmax))
        letters = _of_letters(shortest)
        added = [_most(encoder.render(row), growth) - taken for row, taken in (
            (letters, 1 if letters.form == "text" else len(letters.prompt)), (shortest, contents[rows].min()),
            (longest, contents[rows].max()))]
        if added[2] > max(added[:2]):
            return None
        around[i] = max(added)
    if not encoder.tokenizer.chat_template:
        around += len(encoder.tokenizer([""], add_special_tokens=True)["input_ids"][0])
    return around[which]


def _most(text: str, growth: int) -> int:
    """Most tokens of a text."""
    data = text.encode()
    return len(data) + (growth - 1) * int(np.count_nonzero(np.frombuffer(data, np.uint8) > 127))


def _of_letters(row: Row) -> Row:
    """The row with one letter in place of every content."""
    if isinstance(row.prompt, str):
        return replace(row, prompt="x")
    return replace(row, prompt=[{**message, "content": "x"} for message in cast(list[dict[str, Any]], row.prompt)])
