"""Which rank trains which trajectory of a claim. Pure functions of lengths; ties go by position, then by rank.

`_N` trajectories of the claim.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int32]


def split_by_length(length_N: NDArray[np.integer], ranks: int) -> Ranks:
    """Rank of every trajectory: longest first to the rank with the least so far.

    `split_by_length(array([5, 3, 3]), 2)` -> `[0, 1, 1]`.
    """
    rank_N = np.zeros(len(length_N), np.int32)
    if ranks == 1:
        return rank_N
    loads = [(0, rank) for rank in range(ranks)]
    for i in np.argsort(-length_N.astype(np.int64), kind="stable").tolist():
        load, rank = loads[0]
        rank_N[i] = rank
        heapq.heapreplace(loads, (load + int(length_N[i]), rank))
    return rank_N


def split_by_prompt(answer_N: NDArray[np.integer], prompt_N: NDArray[np.integer], context_N: NDArray[np.integer],
                    part_N: NDArray[np.integer], ranks: int) -> Ranks:
    """Rank of every trajectory, where a prompt costs a rank its tokens once, for all answers to it.

    Every part (minibatch) is split by itself, in the best of three ways, that is with the least work of the busiest
    rank: all answers to a prompt on one rank; ranks in a row, cut where the work is equal; by length alone, as if
    nothing were shared. Two prompts of 6 with answers of 2 and 2 each: `[0, 0, 1, 1]`, 10 tokens a rank, where by
    length alone every rank would have both prompts, and 16 tokens.

    `answer_N`, `prompt_N`: tokens; `context_N`: number of the prompt; `part_N`: number of the part.
    """
    rank_N = np.zeros(len(answer_N), np.int32)
    if ranks == 1:
        return rank_N
    for part in np.unique(part_N):
        here = np.flatnonzero(part_N == part)
        here = here[np.argsort(context_N[here], kind="stable")]
        answer, prompt, context = (of_N[here].astype(np.int64) for of_N in (answer_N, prompt_N, context_N))
        _, first, mine = np.unique(context, return_index=True, return_inverse=True)
        together = prompt[first] + np.bincount(mine, weights=answer).astype(np.int64)
        ways = (split_by_length(together, ranks)[mine], _in_a_row(answer, prompt, first, ranks),
                split_by_length(prompt + answer, ranks))
        rank_N[here] = min(ways, key=lambda way: _busiest(way, answer, prompt, mine, ranks))
    return rank_N


def _in_a_row(answer: NDArray[np.int64], prompt: NDArray[np.int64], first: NDArray[np.int64], ranks: int) -> Ranks:
    """The answers one behind the other, each prompt in front of its first one, cut into pieces of equal length."""
    cost = answer.copy()
    cost[first] += prompt[first]
    end = np.cumsum(cost)
    return np.minimum((2 * end - answer) * ranks // max(1, 2 * int(end[-1])), ranks - 1).astype(np.int32)


def _busiest(rank: Ranks, answer: NDArray[np.int64], prompt: NDArray[np.int64], context: NDArray[np.int64],
             ranks: int) -> int:
    """Tokens of the rank that has most."""
    load = np.bincount(rank, weights=answer, minlength=ranks)
    _, pairs = np.unique(context * ranks + rank, return_index=True)
    return int((load + np.bincount(rank[pairs], weights=prompt[pairs], minlength=ranks)).max())
