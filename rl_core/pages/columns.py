"""The answers that a page shows, as columns, and their way into a file: typed arrays, deflated, in base64.

A trajectory of 500 tokens is some 1.5 kB of a page. What does not fit is left out by whole groups, evenly, and said.

Shape suffixes: `_G` groups, `_N` their answers, `_T` tokens of all answers, `_R` version runs of all answers.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rl_core.experience.facts import members_of, starts_of
from rl_core.pages.token_texts import TokenTexts

MAX_BYTES = 14_000_000
"""Of all columns of a page: with texts and markup it stays below 15 MB."""
MARGIN = 0.97
LEVEL = 6
"""Of zlib: a million tokens in a fifth of a second."""
ABSENT = -32768
"""In a column of thousandths: there is no number."""
LARGEST = 32767


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """What all answers of a group share."""

    group_id: str
    source: str
    truth: str | None
    age: int | None
    """Publications, at the claim."""
    prompt: str = ""
    """As text, where its tokens are not known."""
    prompt_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerColumns:
    """Answers in order of their groups. Token columns have no entry at all for answers whose tokens are not known."""

    groups: tuple[Group, ...]
    group_N: NDArray[np.int64]
    """Place of its group in `groups`, ascending."""
    reward_N: NDArray[np.float32]
    """NaN where the reward failed."""
    correct_N: NDArray[np.float32]
    """NaN where the reward does not say."""
    length_N: NDArray[np.int64]
    """Tokens."""
    finish_N: tuple[str, ...]
    extracted_N: tuple[str | None, ...]
    mode_N: tuple[str, ...]
    """`greedy` or `sampled` of a validation; empty for those that were trained on."""
    text_N: tuple[str, ...]
    """Answers as texts where their tokens are not known; else empty."""
    parts: dict[str, NDArray[np.float32]]
    """Reward parts by name; NaN where an answer has no such part."""
    runs_N: NDArray[np.int64]
    """Version runs of each answer."""
    run_tokens_R: NDArray[np.int32]
    run_version_R: NDArray[np.int32]
    token_ids_T: NDArray[np.int32]
    state_T: NDArray[np.uint8]
    """rl_core/learner/token_states.py."""
    values: dict[str, NDArray[np.float32]]
    """By name, `[T]`: behavior, proximal and policy log-probs (nats), advantage. NaN where there is no number."""

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens of the answers are known, or only their texts."""
        return len(self.token_ids_T) > 0

    def only(self, kept: NDArray[np.int64]) -> AnswerColumns:
        """The answers of some groups (their places, ascending) alone."""
        place = np.full(len(self.groups), -1, np.int64)
        place[kept] = np.arange(len(kept))
        chosen_N = np.flatnonzero(place[self.group_N] >= 0)
        token_N = self.length_N if self.has_tokens else np.zeros_like(self.length_N)
        tokens_T = members_of(starts_of(token_N)[chosen_N], token_N[chosen_N])
        runs_R = members_of(starts_of(self.runs_N)[chosen_N], self.runs_N[chosen_N])
        listed: list[int] = chosen_N.tolist()
        places: list[int] = kept.tolist()
        return replace(
            self, groups=_chosen(self.groups, places), group_N=place[self.group_N][chosen_N],
            reward_N=self.reward_N[chosen_N], correct_N=self.correct_N[chosen_N], length_N=self.length_N[chosen_N],
            finish_N=_chosen(self.finish_N, listed), extracted_N=_chosen(self.extracted_N, listed),
            mode_N=_chosen(self.mode_N, listed), text_N=_chosen(self.text_N, listed),
            parts={name: values[chosen_N] for name, values in self.parts.items()}, runs_N=self.runs_N[chosen_N],
            run_tokens_R=self.run_tokens_R[runs_R], run_version_R=self.run_version_R[runs_R],
            token_ids_T=self.token_ids_T[tokens_T], state_T=self.state_T[tokens_T],
            values={name: values[tokens_T] for name, values in self.values.items()})


def no_answers() -> AnswerColumns:
    """Of a step or validation of which nothing can be read."""
    none = np.zeros(0, np.int64)
    return AnswerColumns(
        groups=(), group_N=none, reward_N=none.astype(np.float32), correct_N=none.astype(np.float32), length_N=none,
        finish_N=(), extracted_N=(), mode_N=(), text_N=(), parts={}, runs_N=none, run_tokens_R=none.astype(np.int32),
        run_version_R=none.astype(np.int32), token_ids_T=none.astype(np.int32), state_T=none.astype(np.uint8),
        values={})


def _chosen(column: tuple[Any, ...], places: list[int]) -> tuple[Any, ...]:
    return tuple(column[place] for place in places) if column else ()


def fitted(columns: AnswerColumns, texts: TokenTexts, *, max_bytes: int = MAX_BYTES) -> tuple[AnswerColumns, Any]:
    """The columns, or of as many groups, evenly, as fit into a page; and those as JSON values (`as_json`)."""
    packed_values, kept = as_json(columns, texts), len(columns.groups)
    while (size := _size(packed_values)) > max_bytes and kept > 1:
        kept = max(1, min(kept - 1, int(kept * MARGIN * max_bytes / size)))
        columns = columns.only(np.arange(kept) * len(columns.groups) // kept)
        packed_values = as_json(columns, texts)
    return columns, packed_values


def _size(value: Any) -> int:
    """About the bytes of it in JSON, for the parts that may be large."""
    match value:
        case str():
            return len(value) + 3
        case dict():
            return sum(map(_size, cast(dict[str, Any], value).values()))
        case list():
            return sum(map(_size, cast(list[Any], value)))
        case _:
            return 5


def as_json(columns: AnswerColumns, texts: TokenTexts) -> dict[str, Any]:
    """What answers_data.js reads: JSON values."""
    prompts = [group.prompt_ids for group in columns.groups]
    empty = np.zeros(0, np.int32)
    return {
        "groups": {"id": [group.group_id for group in columns.groups],
                   "source": [group.source for group in columns.groups],
                   "truth": [group.truth for group in columns.groups], "age": [group.age for group in columns.groups],
                   "prompt": [group.prompt for group in columns.groups],
                   "prompt_tokens": packed(np.array([len(ids) for ids in prompts], np.uint32)),
                   "prompt_ids": packed(_places(texts, np.concatenate([empty, *prompts])))},
        "answers": {"group": packed(columns.group_N.astype(np.uint32)), "reward": packed(columns.reward_N),
                    "correct": packed(columns.correct_N), "length": packed(columns.length_N.astype(np.uint32)),
                    "runs": packed(columns.runs_N.astype(np.uint32)), "finish": list(columns.finish_N),
                    "extracted": list(columns.extracted_N), "mode": list(columns.mode_N),
                    "text": list(columns.text_N)},
        "parts": {name: packed(values) for name, values in columns.parts.items()},
        "runs": {"tokens": packed(columns.run_tokens_R.astype(np.uint32)), "version": packed(columns.run_version_R)},
        "tokens": {"place": packed(_places(texts, columns.token_ids_T)), "state": packed(columns.state_T),
                   **{name: packed(values if name == "advantage" else thousandths(values))
                      for name, values in columns.values.items()}},
        "texts": list(texts.texts), "ids": list(texts.ids), "special": list(texts.special),
        "pieces": {str(place): raw for place, raw in texts.pieces.items()},
    }


def _places(texts: TokenTexts, token_ids: NDArray[np.int32]) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Places of the tokens in the dictionary, in as few bytes as they need."""
    found = np.searchsorted(np.array(texts.ids, np.int32), token_ids)
    return found.astype(np.uint16) if len(texts.ids) <= 2**16 else found.astype(np.uint32)


def thousandths(values: NDArray[np.float32]) -> NDArray[np.int16]:
    """Nats in thousandths, at most 32.767 to either side; ABSENT for NaN. `[-0.5, nan]` -> `[-500, -32768]`."""
    known = np.isfinite(values) | np.isinf(values)
    scaled = np.clip(np.where(known, values, 0.0) * 1000.0, -LARGEST, LARGEST).round()
    return np.where(known, scaled, ABSENT).astype(np.int16)


def packed(values: NDArray[Any]) -> dict[str, Any]:
    """`{"kind": "uint16", "z": base64 of the deflated little-endian bytes}`."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {"kind": values.dtype.name, "z": base64.b64encode(zlib.compress(little.tobytes(), LEVEL)).decode("ascii")}


def unpacked(column: dict[str, Any]) -> NDArray[Any]:
    """The array that was packed."""
    return np.frombuffer(zlib.decompress(base64.b64decode(column["z"])), column["kind"])
