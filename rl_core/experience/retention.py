"""Retention: which shards may go (experience-store.md 3.11). Pure functions of what the ledger says.

R is the next step of the oldest of the newest `checkpoint.keep` whole checkpoints: a start may have to train the steps
from R on again, and none before it. Older checkpoints that are kept (every `checkpoint.keep_every`-th, the best, those
that a validation pins) keep weights and optimizer; steps behind them can be trained again as long as their shards are
there. Carried out by retirement.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.experience.index import KeySet

ShardName = tuple[str, int]
"""(stream, seq)."""


def first_needed(whole: Collection[int], keep: int) -> int:
    """R. `whole`: steps behind each checkpoint that is whole. While there are fewer than `keep` of them the initial
    model counts as one: 0. `first_needed([10, 20, 30], keep=2)` -> 20."""
    newest = sorted(whole)[-keep:]
    return newest[0] if len(newest) == keep else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fates:
    """What has become of every group, seen from R."""

    claimed_below: Mapping[ShardName, int]
    """Rows by shard that claims of steps below R took."""
    claimed_later: Mapping[ShardName, int]
    """Rows by shard that claims of steps from R on took: each of them keeps its shard."""
    judged: KeySet
    """Groups that are claimed at any step, dropped (filtered, too), or have an outcome."""
    closed: frozenset[int] = frozenset()
    """Dataset epochs whose every position is finished."""

    def used_up(self, shard: ShardName, rows: int) -> bool:
        """Whether steps below R have claimed every row of a shard."""
        return self.claimed_below.get(shard, 0) == rows

    def lets_go(self, shard: ShardName, keys_G: NDArray[np.int64], dataset_epoch_G: NDArray[np.int32]) -> bool:
        """Whether every row of a shard is claimed below R, dropped, filtered, or a duplicate of a row elsewhere.

        `keys_G`, `dataset_epoch_G`: of its rows. A row that waits keeps its shard, and so does one that a claim from R
        on took.
        """
        if self.claimed_later.get(shard, 0):
            return False
        judged_G = self.judged.contains(keys_G) | np.isin(dataset_epoch_G, list(self.closed))
        return bool(judged_G.all())
