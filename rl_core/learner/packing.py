"""Packing: which answers share a micro-batch, and where every token of them lies. Host-side NumPy indices only.

`_M` trajectories of this rank, `_T` tokens of this rank's claim (prompt and answer of each trajectory in a row), `_P`
places of one pack, `_S` loss tokens of one pack, `_Q` its trajectories, `_R` attention rows of one call, `_L` their
padded length.

A pack never pads its tokens: padding exists only inside an attention call, among rows of like length. A prompt is
computed once per pack, and every answer to it attends to it and to itself (prefix sharing); answers to one prompt share
a pack as far as the budget allows. The last token of an answer predicts nothing and is left out. Everything is a pure
function of lengths and budget; ties are broken by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

LIKE_LENGTH, LIKE_TOKENS = 0.8, 16
"""Rows of one attention call are at least this share of its longest, or shorter by so few tokens."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the trajectories of a rank lie in its claim's packed columns.

    Example, prompts of 2 and answers of 3 and 1 tokens: `start_M=[0, 5]`, `prompt_M=[2, 2]`, `used_M=[3, 1]`.
    """

    start_M: Ints
    """First token of each trajectory in `_T`."""
    prompt_M: Ints
    """Prompt tokens, at least 1."""
    used_M: Ints
    """Answer tokens up to the last one in the loss; 0 = nothing of it is in the loss."""
    context_M: Ints
    """Number of its prompt in the claim: the answers of a group share one, but for prompts of their own."""
    loss_T: NDArray[np.bool_]
    """Tokens in the loss, after masks."""
    behind: bool = False
    """The last token in the loss is laid out, too: a critic is asked for the value behind it."""

    @property
    def answer_M(self) -> Ints:
        """Answer tokens that a trajectory brings to the model: without the last one in the loss, which predicts
        nothing, unless something is asked `behind` it."""
        return np.maximum(self.used_M - (not self.behind), 0)

    def apart(self) -> Layout:
        """The same with a prompt of its own for every trajectory: nothing is shared."""
        return replace(self, context_M=np.arange(len(self.context_M)))


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention call as places: every row of it sees the keys that are not behind its query. Padding, at the end,
    says 0."""

    query: Ints
    """`[R, Q]`"""
    key: Ints | None = None
    """`[R, K]`; None: the queries themselves."""
    before_R: Ints | None = None
    """Keys in front of the first query of each row, or one number for all rows; None: none."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch as indices."""

    source_P: Ints
    """Token in `_T` at each place."""
    calls: tuple[Attention, ...]
    home_P: Ints
    """Where the result of each place lies in the flattened, concatenated queries."""
    predictor_S: Ints
    """Place whose output predicts each loss token."""
    target_S: Ints
    """The loss tokens, in `_T`."""
    sequence_S: Ints
    """Their trajectory, in `_M`."""
    last_Q: Ints
    """Place of the last loss token of each of its trajectories, where those are laid out; else empty."""
    order_Q: Ints
    """Those trajectories, in `_M`."""


def last_loss_token(loss_T: NDArray[np.bool_], start_M: Ints, prompt_M: Ints, length_M: Ints) -> Ints:
    """Answer tokens up to and with the last one in the loss, `[M]`; 0 where none is."""
    ends = np.append(np.flatnonzero(loss_T), -1)
    last_M = ends[np.searchsorted(ends[:-1], start_M + prompt_M + length_M) - 1]
    return np.maximum(last_M - (start_M + prompt_M) + 1, 0)


def fill(lengths: Ints, budget: int) -> list[Ints]:
    """Sort by length, longest first, and fill bins of at most `budget` tokens; a longer row has a bin of its own.

    `fill([3, 9, 4, 4], budget=9)` -> `[[1], [2, 3], [0]]`. Returns indices into `lengths`, all of them exactly once.
    """
    bins: list[list[int]] = []
    room = -1
    for i in np.argsort(-lengths, kind="stable"):
        if lengths[i] > room:
            bins.append([])
            room = budget
        bins[-1].append(int(i))
        room -= int(lengths[i])
    return [np.array(members, np.int64) for members in bins]


def micro_batches(layout: Layout, members_M: NDArray[np.bool_], budget: int) -> list[Ints]:
    """Trajectories of each micro-batch of one minibatch on this rank; those without a loss token are left out.

    Answers to one prompt stay together. Those that are too many for the budget are cut into parts, longest answers
    first, and every part has the prompt.
    """
    chosen = np.flatnonzero(members_M & (layout.used_M > 0))
    order = chosen[np.argsort(layout.context_M[chosen], kind="stable")]
    _, first = np.unique(layout.context_M[order], return_index=True)
    parts: list[Ints] = []
    sizes: list[int] = []
    for same in np.split(order, first[1:]) if len(order) else []:
        prompt, answer = int(layout.prompt_M[same[0]]), layout.answer_M[same]
        together = prompt + int(answer.sum()) <= budget
        for part in [np.arange(len(same))] if together else fill(answer, budget - prompt):
            parts.append(same[part])
            sizes.append(prompt + int(answer[part].sum()))
    bins = fill(np.array(sizes, np.int64), budget)
    return [np.concatenate([parts[int(i)] for i in one]) for one in bins]


def ragged_arange(starts: Ints, lengths: Ints) -> Ints:
    """`ragged_arange([10, 20], [3, 2])` -> `[10, 11, 12, 20, 21]`."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def pack(layout: Layout, sequences: Ints) -> Pack:
    """Lay out these trajectories (indices into `_M`, each with a loss token) as one micro-batch.

    No trajectories: a pack of one place and no loss token, for a rank that must take part in the collectives of a
    micro-batch that it has nothing for.
    """
    if not len(sequences):
        empty, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
        return Pack(source_P=zero, calls=(Attention(zero[None]),), home_P=zero, predictor_S=empty, target_S=empty,
                    sequence_S=empty, last_Q=empty, order_Q=empty)
    order = sequences[np.argsort(-(layout.prompt_M + layout.answer_M)[sequences], kind="stable")]
    start, prompt, used, answer = (of_M[order] for of_M in (layout.start_M, layout.prompt_M, layout.used_M,
                                                            layout.answer_M))
    _, first, mine, answers = np.unique(layout.context_M[order], return_index=True, return_inverse=True,
                                        return_counts=True)
    prompt_place = np.cumsum(prompt[first]) - prompt[first]
    answer_place = int(prompt[first].sum()) + np.cumsum(answer) - answer
    prompt_at = prompt_place[mine]
    source_P = np.concatenate([ragged_arange(start[first], prompt[first]), ragged_arange(start + prompt, answer)])
    rows = _Rows(prompt=prompt, answer=answer, prompt_at=prompt_at, answer_at=answer_place)
    calls, home_P = _calls(rows, first, answers[mine] > 1, len(source_P))

    token_S = ragged_arange(start + prompt, used)
    row_S = np.repeat(np.arange(len(order)), used)
    kept = layout.loss_T[token_S]
    token_S, row_S = token_S[kept], row_S[kept]
    t_S = token_S - (start + prompt)[row_S]
    predictor_S = np.where(t_S == 0, (prompt_at + prompt - 1)[row_S], answer_place[row_S] + t_S - 1)
    nothing = np.zeros(0, np.int64)
    return Pack(source_P=source_P, calls=calls, home_P=home_P, predictor_S=predictor_S, target_S=token_S,
                sequence_S=order[row_S], last_Q=answer_place + used - 1 if layout.behind else nothing,
                order_Q=order if layout.behind else nothing)


# -- attention


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of attention: tokens of prompt and answer, and the place of the first one of each."""

    prompt: Ints
    answer: Ints
    prompt_at: Ints
    answer_at: Ints

    def at(self, chosen: Ints) -> _Rows:
        return _Rows(self.prompt[chosen], self.answer[chosen], self.prompt_at[chosen], self.answer_at[chosen])

    def places(self) -> tuple[Ints, NDArray[np.bool_]]:
        """`[R, L]` the place of each token of each row, 0 for padding, and which of them are tokens."""
        column = np.arange(int((self.prompt + self.answer).max()))[None]
        place = np.where(column < self.prompt[:, None], self.prompt_at[:, None] + column,
                         self.answer_at[:, None] + column - self.prompt[:, None])
        real = column < (self.prompt + self.answer)[:, None]
        return np.where(real, place, 0), real


def _calls(rows: _Rows, first: Ints, shares: NDArray[np.bool_], places: int) -> tuple[tuple[Attention, ...], Ints]:
    """The attention of a pack, and where each place finds its result.

    A row of its own for prompt and answer costs (p + a)^2 / 2 pairs of query and key. Queries of the answer alone cost
    a (p + a), and p^2 / 2 once for all answers to the prompt: less where answers share a prompt that is longer.
    `first`: the longest row of each prompt; `shares`: rows whose prompt has others.
    """
    alone = ~shares | (rows.answer > rows.prompt)
    whole, prompts = rows.at(np.flatnonzero(alone)), rows.at(first[~alone[first]])
    causal = _Rows(*(np.concatenate(pair) for pair in (
        (whole.prompt, prompts.prompt), (whole.answer, 0 * prompts.answer), (whole.prompt_at, prompts.prompt_at),
        (whole.answer_at, prompts.answer_at))))
    owner = np.concatenate([np.isin(np.flatnonzero(alone), first), np.ones(len(prompts.prompt), np.bool_)])
    calls: list[Attention] = []
    home_P = np.zeros(places, np.int64)
    base = 0
    for call, decides in chain(_causal(causal, owner), _behind(rows.at(np.flatnonzero(~alone & (rows.answer > 0))))):
        flat = base + np.arange(call.query.size).reshape(call.query.shape)
        home_P[call.query[decides]] = flat[decides]
        base += call.query.size
        calls.append(call)
    return tuple(calls), home_P


def _causal(rows: _Rows, owner: NDArray[np.bool_]) -> Iterator[tuple[Attention, NDArray[np.bool_]]]:
    """Calls of rows from their first token on, and which results count: of prompt tokens those of the `owner`."""
    length = rows.prompt + rows.answer
    order = np.argsort(-length, kind="stable")
    for part in _alike(length[order]):
        here = rows.at(order[part])
        query, real = here.places()
        in_prompt = np.arange(int(query.shape[1]))[None] < here.prompt[:, None]
        yield Attention(query), real & (~in_prompt | owner[order[part], None])


def _behind(rows: _Rows) -> Iterator[tuple[Attention, NDArray[np.bool_]]]:
    """Calls of answers behind their prompts, and which results count."""
    like = np.floor(np.log(rows.prompt) / np.log(1 / LIKE_LENGTH)).astype(np.int64)  # prompts of like length together
    order = np.lexsort((-rows.answer, -like))
    for rows_alike in np.split(order, np.flatnonzero(np.diff(like[order])) + 1):
        for part in _alike(rows.answer[rows_alike]):
            here = rows.at(rows_alike[part])
            key, _ = here.places()
            query, real = _Rows(0 * here.prompt, here.answer, here.prompt_at, here.answer_at).places()
            one_length = bool((here.prompt == here.prompt[0]).all())
            yield Attention(query, key, here.prompt[:1] if one_length else here.prompt), real


def _alike(lengths: Ints) -> list[slice]:
    """Cut rows that come longest first into calls of like length."""
    parts: list[slice] = []
    lo = 0
    while lo < len(lengths):
        longest = int(lengths[lo])
        least = min(LIKE_LENGTH * longest, longest - LIKE_TOKENS)
        hi = lo + int(np.searchsorted(-lengths[lo:], -least, side="right"))
        parts.append(slice(lo, hi))
        lo = hi
    return parts
