"""What a person should know of a data set, and what refuses nothing: prompts that stand in it more than once, and
held-out ones that are trained on (data.md section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.rollout.prompts import HeldOut, PromptSource


def warnings_of(source: PromptSource, held_out: HeldOut) -> tuple[str, ...]:
    """Sentences for the plan."""
    keys, told = source.keys, list[str]()
    again, first, second = duplicates(keys)
    if again:
        told.append(f"data.train: {again} of {len(keys)} prompts repeat an earlier one (first {source.where(second)}, "
                    f"which repeats {source.where(first)}); each is trained as often as it stands there")
    if len(held_out.keys):
        shared = np.isin(held_out.keys, keys)
        if shared.any():
            row = int(np.flatnonzero(shared)[0])
            where = source.where(int(np.flatnonzero(keys == held_out.keys[row])[0]))
            told.append(f"data.validation: {int(shared.sum())} of {len(held_out.keys)} held-out prompts are training "
                        f"prompts, too (first {held_out.where(row)}, as {where}): accuracy on them says little "
                        "about others")
    return tuple(told)


def duplicates(keys: NDArray[Any]) -> tuple[int, int, int]:
    """How many rows repeat an earlier one, and the first pair: `duplicates([7, 8, 7])` -> `(1, 0, 2)`."""
    order = np.argsort(keys, kind="stable")
    again = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    if not len(again):
        return 0, 0, 0
    at = again[np.argmin(order[again + 1])]
    return len(again), int(order[at]), int(order[at + 1])
