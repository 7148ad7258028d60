"""Packing: which answers share a micro-batch, and where every token of them lies. Host-side NumPy indices only.

`_M` trajectories of this rank, `_T` tokens of this rank's claim (prompt and answer of each trajectory in a row), `_P`
places of one pack, `_S` loss tokens of one pack, `_Q` its trajectories, `_R` attention rows of one call, `_L` their
padded length.

A pack never pads its tokens: padding exists only inside an attention call, among rows of like length, where right
padding under a causal mask needs no mask at all. A group's prompt is computed once per pack and every answer of the
group attends to it and to itself (prefix sharing). The last token of an answer predicts nothing and is left out.
Everything is a pure function of lengths and budget; ties are broken by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LIKE_LENGTH = 0.8
"""Rows of one attention call are at least this share of its longest."""

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
    group_M: Ints
    """Ordinal of its group in the claim."""
    loss_T: NDArray[np.bool_]
    """Tokens in the loss, after masks."""
    behind: bool = False
    """The last token in the loss is laid out, too: a critic is asked for the value behind it."""

    @property
    def rows_M(self) -> Ints:
        """Tokens that a trajectory brings to the model: prompt and answer, without the last token in the loss, which
        predicts nothing, unless something is asked `behind` it."""
        return self.prompt_M + np.maximum(self.used_M - (not self.behind), 0)


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch as indices."""

    source_P: Ints
    """Token in `_T` at each place."""
    rows: tuple[Ints, ...]
    """One `[R, L]` per attention call: the place of each token of each row; padding (at the end) says 0."""
    home_P: Ints
    """Where the result of each place lies in the flattened, concatenated rows."""
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
    """Trajectories of each micro-batch of one minibatch on this rank; those without a loss token are left out."""
    chosen = np.flatnonzero(members_M & (layout.used_M > 0))
    return [chosen[part] for part in fill(layout.rows_M[chosen], budget)]


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
        return Pack(source_P=zero, rows=(zero[None],), home_P=zero, predictor_S=empty, target_S=empty, sequence_S=empty,
                    last_Q=empty, order_Q=empty)
    order = sequences[np.argsort(-layout.rows_M[sequences], kind="stable")]
    start, prompt, used = layout.start_M[order], layout.prompt_M[order], layout.used_M[order]
    answer = used if layout.behind else used - 1
    _, first, mine = np.unique(layout.group_M[order], return_index=True, return_inverse=True)
    prompt_place = np.cumsum(prompt[first]) - prompt[first]
    answer_place = int(prompt[first].sum()) + np.cumsum(answer) - answer
    prompt_at = prompt_place[mine]
    source_P = np.concatenate([ragged_arange(start[first], prompt[first]), ragged_arange(start + prompt, answer)])
    rows, home_P = _rows(prompt, answer, prompt_at, answer_place, first, len(source_P))

    token_S = ragged_arange(start + prompt, used)
    row_S = np.repeat(np.arange(len(order)), used)
    kept = layout.loss_T[token_S]
    token_S, row_S = token_S[kept], row_S[kept]
    t_S = token_S - (start + prompt)[row_S]
    predictor_S = np.where(t_S == 0, (prompt_at + prompt - 1)[row_S], answer_place[row_S] + t_S - 1)
    nothing = np.zeros(0, np.int64)
    return Pack(source_P=source_P, rows=rows, home_P=home_P, predictor_S=predictor_S, target_S=token_S,
                sequence_S=order[row_S], last_Q=answer_place + used - 1 if layout.behind else nothing,
                order_Q=order if layout.behind else nothing)


def _rows(prompt: Ints, answer: Ints, prompt_at: Ints, answer_place: Ints, first: Ints,
          places: int) -> tuple[tuple[Ints, ...], Ints]:
    """Attention rows in calls of like length (rows come longest first), and where each place finds its result."""
    lengths = prompt + answer
    owner = np.zeros(len(lengths), np.bool_)
    owner[first] = True
    rows: list[Ints] = []
    home_P = np.zeros(places, np.int64)
    base = lo = 0
    while lo < len(lengths):
        longest = int(lengths[lo])
        hi = lo + int(np.searchsorted(-lengths[lo:], -LIKE_LENGTH * longest, side="right"))
        column = np.arange(longest)[None]
        in_prompt = column < prompt[lo:hi, None]
        index = np.where(in_prompt, prompt_at[lo:hi, None] + column,
                         answer_place[lo:hi, None] + column - prompt[lo:hi, None])
        real = column < lengths[lo:hi, None]
        index = np.where(real, index, 0)
        decides = real & (~in_prompt | owner[lo:hi, None])
        flat = base + np.arange(index.size).reshape(index.shape)
        home_P[index[decides]] = flat[decides]
        rows.append(index)
        base += index.size
        lo = hi
    return tuple(rows), home_P
