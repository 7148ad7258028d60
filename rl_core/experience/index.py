"""The index: which landed groups wait to be claimed, and what is known of every other one.

Built from the run directory alone: shards that were verified, claims, drops, outcomes. A restart builds the same index.
Only groups that wait are kept as columns (admission bounds them to about B K (1 + eta)); of all others only their key.
Not thread-safe: `Experience` guards it. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.experience.positions import Slot
from rl_core.experience.staleness import (
    DROP_REASONS,
    MASK,
    OFFLINE,
    STALE,
    StalenessRule,
    is_drop,
    judge,
    masked_tokens,
)
from rl_core.experience.verify import ShardInfo, shard_key
from rl_core.types import ClaimedGroup, Drop, group_id, parse_group_id

EPOCH_BITS, PROMPT_BITS, TRY_BITS = 16, 36, 11


def group_keys(dataset_epoch: NDArray[Any], prompt_idx: NDArray[Any], try_no: NDArray[Any]) -> NDArray[np.int64]:
    """Group ids as 63-bit integers. Raises ValueError for numbers that no run can reach."""
    for name, values, bits in (("dataset_epoch", dataset_epoch, EPOCH_BITS), ("prompt_idx", prompt_idx, PROMPT_BITS),
                               ("try", try_no, TRY_BITS)):
        if values.size and not 0 <= int(values.min()) <= int(values.max()) < 1 << bits:
            raise ValueError(f"{name} is {int(values.max())}; the index holds 0 to {(1 << bits) - 1}")
    epoch = dataset_epoch.astype(np.int64) << (PROMPT_BITS + TRY_BITS)
    return epoch | prompt_idx.astype(np.int64) << TRY_BITS | try_no.astype(np.int64)


def group_key(text: str) -> int:
    """`group_key("e0-p12-t1")`, the same number as `group_keys` gives."""
    epoch, prompt_idx, try_no = parse_group_id(text)
    return epoch << (PROMPT_BITS + TRY_BITS) | prompt_idx << TRY_BITS | try_no


class KeySet:
    """A growing set of group keys: sorted array for the many, Python set for the latest."""

    MERGE_AT = 1 << 16

    def __init__(self) -> None:
        self._sorted: NDArray[np.int64] = np.zeros(0, np.int64)
        self._fresh: set[int] = set()

    def __len__(self) -> int:
        return self._sorted.size + len(self._fresh)

    def __contains__(self, key: int) -> bool:
        if key in self._fresh:
            return True
        at = int(np.searchsorted(self._sorted, key))
        return at < self._sorted.size and int(self._sorted[at]) == key

    def add(self, keys: Iterable[int]) -> None:
        """A few at a time, as they come."""
        self._fresh.update(keys)
        if len(self._fresh) >= self.MERGE_AT:
            self._merge()

    def add_array(self, keys: NDArray[np.int64]) -> None:
        """Many at once, as at a restart."""
        if keys.size < self.MERGE_AT:
            self.add(keys.tolist())
        else:
            self._sorted = np.union1d(self._sorted, keys)

    def contains(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each key whether it is in the set; the shape of `keys`."""
        found = np.fromiter((key in self._fresh for key in keys.tolist()), np.bool_, keys.size)
        if self._sorted.size:
            at = np.minimum(np.searchsorted(self._sorted, keys), self._sorted.size - 1)
            found |= self._sorted[at] == keys
        return found

    def _merge(self) -> None:
        fresh = np.fromiter(self._fresh, np.int64, len(self._fresh))
        self._sorted, self._fresh = np.union1d(self._sorted, fresh), set()


@dataclass(kw_only=True, slots=True, eq=False)
class Rows:
    """Columns of the groups that wait, one entry per group [G]."""

    key: NDArray[np.int64]
    dataset_epoch: NDArray[np.int32]
    position: NDArray[np.int64]
    prompt_idx: NDArray[np.int64]
    try_no: NDArray[np.int32]
    lease_no: NDArray[np.int64]
    n_responses: NDArray[np.int32]
    idx_min: NDArray[np.int32]
    idx_max: NDArray[np.int32]
    n_tokens: NDArray[np.int32]
    spread: NDArray[np.float32]
    shard: NDArray[np.int32]
    """Ordinal in `Index.shards`."""
    row: NDArray[np.int32]

    def __len__(self) -> int:
        return self.key.size

    def take(self, rows: NDArray[Any]) -> Rows:
        """Rows by number or by mask."""
        return Rows(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def plus(self, other: Rows) -> Rows:
        return Rows(**{f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)})


def no_rows() -> Rows:
    """Columns of length 0, each with its dtype."""
    small, large = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Rows(key=large, dataset_epoch=small, position=large, prompt_idx=large, try_no=small, lease_no=large,
                n_responses=small, idx_min=small, idx_max=small, n_tokens=small, spread=np.zeros(0, np.float32),
                shard=small, row=small)


def rows_of(info: ShardInfo, shard: int) -> Rows:
    """The columns of a verified shard."""
    return Rows(key=group_keys(info.dataset_epoch, info.prompt_idx, info.try_no), dataset_epoch=info.dataset_epoch,
                position=info.position, prompt_idx=info.prompt_idx, try_no=info.try_no, lease_no=info.lease_no,
                n_responses=info.n_responses, idx_min=info.idx_min, idx_max=info.idx_max, n_tokens=info.n_tokens,
                spread=info.reward_spread, shard=np.full(info.rows, shard, np.int32),
                row=np.arange(info.rows, dtype=np.int32))


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Shard:
    """What the index keeps of a verified shard."""

    stream: str
    seq: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What a claim of step k would be now. `groups` are in training order (dataset_epoch, position, try)."""

    groups: tuple[ClaimedGroup, ...]
    shard_digests: dict[str, str]
    masked: tuple[tuple[int, int], ...]
    dropped: tuple[Drop, ...]


class Index:
    """Groups that wait, and the keys of those that are claimed or ended (dropped, or with an outcome)."""

    def __init__(self, rule: StalenessRule) -> None:
        self.rule = rule
        self.shards: list[Shard] = []
        self.waiting = no_rows()
        self.claimed = KeySet()
        self.ended = KeySet()
        self.closed: set[int] = set()
        """Dataset epochs whose every position is finished and whose keys were forgotten: none of their rows waits."""
        self._at: dict[int, int] = {}
        self._versions: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}

    # -- facts

    def add_shard(self, info: ShardInfo) -> tuple[Rows, NDArray[np.bool_]]:
        """Index a verified shard. Returns its rows, and which of them wait now.

        Of several rows of one id the one with the largest idx_min waits; the others are duplicates.
        """
        shard = len(self.shards)
        self.shards.append(Shard(stream=info.ref.stream, seq=info.ref.seq, digest=info.shard_digest))
        rows = rows_of(info, shard)
        open_G = ~(self.claimed.contains(rows.key) | self.ended.contains(rows.key))
        if self.closed:
            open_G &= ~np.isin(rows.dataset_epoch, list(self.closed))
        worse: list[int] = []
        best: dict[int, int] = {}
        for i in np.flatnonzero(open_G).tolist():
            key, idx_min = int(rows.key[i]), int(rows.idx_min[i])
            if (rival := best.get(key)) is not None:
                loser = rival if int(rows.idx_min[rival]) < idx_min else i
                open_G[loser] = False
                best[key] = i if loser == rival else rival
            elif (at := self._at.get(key)) is None:
                best[key] = i
            elif self._beats(info, idx_min, at):
                best[key] = i
                worse.append(at)
            else:
                open_G[i] = False
        for i in best.values():
            lo, hi = int(info.version_offsets[i]), int(info.version_offsets[i + 1])
            self._versions[int(rows.key[i])] = (info.version[lo:hi], info.version_tokens[lo:hi])
        self._replace_waiting(worse, rows.take(open_G))
        return rows, open_G

    def _beats(self, info: ShardInfo, idx_min: int, at: int) -> bool:
        """Larger idx_min wins; of equals the first by (stream, seq), so that the order of discovery does not matter."""
        held, shard = int(self.waiting.idx_min[at]), self.shards[int(self.waiting.shard[at])]
        return (-idx_min, info.ref.stream, info.ref.seq) < (-held, shard.stream, shard.seq)

    def add_claimed(self, keys: NDArray[np.int64]) -> None:
        """Note groups that a claim holds; they no longer wait."""
        self.claimed.add_array(keys)
        self._remove(keys)

    def add_ended(self, keys: Sequence[int]) -> None:
        """Note groups that end without training (dropped, or with an outcome); they no longer wait."""
        self.ended.add(keys)
        self._remove(np.array(keys, np.int64))

    def waits(self, key: int) -> bool:
        return key in self._at

    def slot_of(self, key: int) -> Slot | None:
        """Position of a group that waits."""
        if (i := self._at.get(key)) is None:
            return None
        return Slot(dataset_epoch=int(self.waiting.dataset_epoch[i]), position=int(self.waiting.position[i]),
                    try_no=int(self.waiting.try_no[i]))

    def _remove(self, keys: NDArray[np.int64]) -> None:
        at = [i for key in keys.tolist() if (i := self._at.get(key)) is not None]
        for key in keys.tolist():
            self._versions.pop(key, None)
        if at:
            self._replace_waiting(at, None)

    def _replace_waiting(self, gone: list[int], fresh: Rows | None) -> None:
        if gone:
            keep = np.ones(len(self.waiting), np.bool_)
            keep[gone] = False
            self.waiting = self.waiting.take(keep)
            self._at = {key: i for i, key in enumerate(self.waiting.key.tolist())}
        if fresh is not None and len(fresh):
            start = len(self.waiting)
            self.waiting = self.waiting.plus(fresh)
            self._at.update((key, start + i) for i, key in enumerate(fresh.key.tolist()))

    # -- verdicts

    def verdicts(self, idx_step: int) -> NDArray[np.int8]:
        """Of the groups that wait [G], at a step of this publication index."""
        w = self.waiting
        return judge(idx_step, self.rule, idx_min_G=w.idx_min, idx_max_G=w.idx_max, n_responses_G=w.n_responses,
                     spread_G=w.spread)

    def usable(self, idx_step: int) -> int:
        """Groups that a claim at this publication index would keep or mask."""
        return int(np.count_nonzero(self.verdicts(idx_step) < STALE))

    def held(self, idx_step: int) -> int:
        """L: groups that a claim at this publication index would keep or mask, or leaves to a later one."""
        return int(np.count_nonzero(~is_drop(self.verdicts(idx_step))))

    def held_by_publication(self, idx_step: int) -> dict[int, int]:
        """L by the publication index of the oldest token."""
        idx, count = np.unique(self.waiting.idx_min[~is_drop(self.verdicts(idx_step))], return_counts=True)
        return dict(zip(idx.tolist(), count.tolist(), strict=True))

    def drops(self, idx_step: int) -> tuple[Drop, ...]:
        """The waiting groups that no claim from here on will take, and why."""
        verdict_G = self.verdicts(idx_step)
        return self._drops(np.flatnonzero(is_drop(verdict_G)), verdict_G)

    def _drops(self, at: NDArray[np.intp], verdict_G: NDArray[np.int8]) -> tuple[Drop, ...]:
        w = self.waiting
        return tuple(Drop(group_id=group_id(int(w.dataset_epoch[i]), int(w.prompt_idx[i]), int(w.try_no[i])),
                          reason=DROP_REASONS[int(verdict_G[i])], n_tokens=int(w.n_tokens[i])) for i in at.tolist())

    def select(self, idx_step: int, n: int, idx_of_version: dict[int, int]) -> Selection | None:
        """The n oldest usable groups by (idx_min, lease_no, stream, seq, row), offline the first n in training order;
        None where fewer wait.

        `idx_of_version`: publication index of every version id, needed for tokens masked by age.
        """
        verdict_G = self.verdicts(idx_step)
        usable = np.flatnonzero(verdict_G < STALE)
        if usable.size < n:
            return None
        w = self.waiting
        if self.rule.policy == OFFLINE:
            chosen = self._in_training_order(usable)[:n]
        else:
            chosen = self._in_training_order(self._oldest(usable, n))
        masked = tuple((ordinal, tokens) for ordinal, i in enumerate(chosen.tolist()) if verdict_G[i] == MASK
                       and (tokens := self._masked(idx_step, int(w.key[i]), idx_of_version)))
        shards = sorted({self.shards[int(i)] for i in np.unique(w.shard[chosen])})
        return Selection(groups=self._groups(chosen), masked=masked,
                         shard_digests={shard_key(s.stream, s.seq): s.digest for s in shards},
                         dropped=self._drops(np.flatnonzero(is_drop(verdict_G)), verdict_G))

    def _in_training_order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        w = self.waiting
        return rows[np.lexsort((w.try_no[rows], w.position[rows], w.dataset_epoch[rows]))]

    def _oldest(self, usable: NDArray[np.intp], n: int) -> NDArray[np.intp]:
        """Narrowed by idx_min, and among equals by lease number, before rows are looked at one by one."""
        w = self.waiting
        if usable.size > n:
            idx_min = w.idx_min if usable.size == len(w) else w.idx_min[usable]
            level, older, missing = int(idx_min.min()), list[NDArray[np.intp]](), n
            while (equal := usable[np.flatnonzero(idx_min == level)]).size < missing:  # a pass for each age: few
                older.append(equal)
                missing -= equal.size
                level = int(idx_min.min(where=idx_min > level, initial=np.iinfo(np.int32).max))
            if equal.size > missing:
                lease_no = w.lease_no[equal]
                equal = equal[lease_no <= np.partition(lease_no, missing - 1)[missing - 1]]
            usable = np.concatenate([*older, equal])
        shards = [(self.shards[int(i)].stream, self.shards[int(i)].seq) for i in w.shard[usable]]
        order = sorted(zip(w.idx_min[usable].tolist(), w.lease_no[usable].tolist(), shards, w.row[usable].tolist(),
                           usable.tolist(), strict=True))
        return np.array([row[-1] for row in order[:n]], np.intp)

    def _groups(self, chosen: NDArray[np.intp]) -> tuple[ClaimedGroup, ...]:
        rows = self.waiting.take(chosen)
        columns = (rows.dataset_epoch, rows.position, rows.try_no, rows.prompt_idx, rows.shard, rows.row)
        return tuple(
            ClaimedGroup(dataset_epoch=epoch, position=position, try_no=try_no, prompt_idx=prompt_idx, row=row,
                         stream=self.shards[int(shard)].stream, seq=self.shards[int(shard)].seq)
            for epoch, position, try_no, prompt_idx, shard, row
            in zip(*(column.tolist() for column in columns), strict=True))

    def _masked(self, idx_step: int, key: int, idx_of_version: dict[int, int]) -> int:
        versions, tokens = self._versions[key]
        idx_R = np.array([idx_of_version[v] for v in versions.tolist()], np.int32)
        return masked_tokens(idx_step, self.rule, idx_R=idx_R, tokens_R=tokens)
