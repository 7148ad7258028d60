"""Which rows a dataset epoch has, and in which order: weights of sources, f(seed, dataset epoch) (data.md section 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.seeds import derive


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """One source of `rows` rows from `row` on; its prompt indices begin at `base`."""

    row: int
    rows: int
    base: int
    whole: int
    """Times that every row is taken."""
    part: int
    """Rows that are taken once more, others in every dataset epoch."""


class Mixture:
    """Prompt indices of an epoch: `Mixture([4, 3], [1.0, 0.5])` has 4 + 2 positions in every one.

    Index `base + copy * rows + row`: the row's own where the weight is at most 1, another one for each time it is taken
    where it is more, since the exactly-once key of a group is epoch, prompt index and try.
    """

    def __init__(self, rows: Sequence[int], weights: Sequence[float]) -> None:
        self._shares: list[_Share] = []
        row = base = 0
        for n, weight in zip(rows, weights, strict=True):
            whole = math.floor(weight)
            part = round((weight - whole) * n)
            part = max(part, 1) if not whole and n else part  # a source that is named is never left out
            self._shares.append(_Share(row=row, rows=n, base=base, whole=whole, part=part))
            row, base = row + n, base + n * (whole + (part > 0))
        self._bases = np.array([share.base for share in self._shares], np.int64)
        self.positions = sum(share.whole * share.rows + share.part for share in self._shares)
        self.indices = base
        """Prompt indices there are: from 0 to this."""
        self._plain = all((share.whole, share.part) == (1, 0) for share in self._shares)

    def row(self, prompt_idx: int) -> int:
        """The row of a prompt index."""
        share = self._shares[int(np.searchsorted(self._bases, prompt_idx, "right")) - 1]
        return share.row + (prompt_idx - share.base) % share.rows

    def order(self, seed: int, dataset_epoch: int, *, shuffle: bool) -> NDArray[np.int64]:
        """Prompt index of each position of a dataset epoch."""
        order = epoch_order(self.positions, seed, dataset_epoch, shuffle=shuffle)
        return order if self._plain else self._entries(dataset_epoch)[order]

    def _entries(self, dataset_epoch: int) -> NDArray[np.int64]:
        parts = [np.zeros(0, np.int64)]
        for share in self._shares:
            whole = share.whole * share.rows
            # Evenly over the file, one row further on in every epoch: none is left out for good.
            once_more = (np.arange(share.part) * share.rows // max(share.part, 1) + dataset_epoch) % max(share.rows, 1)
            parts += [share.base + np.arange(whole), share.base + whole + once_more]
        return np.concatenate(parts)


def epoch_order(rows: int, seed: int, dataset_epoch: int, *, shuffle: bool) -> NDArray[np.int64]:
    """Entry of each position: a permutation of [0, rows), another for every dataset epoch; file order without shuffle.
    """
    if not shuffle:
        return np.arange(rows)
    # Raw 64-bit draws: NumPy promises that they are the same in every version, and promises it of nothing above them.
    return np.argsort(np.random.PCG64(derive(seed, dataset_epoch, "order")).random_raw(rows), kind="stable")
