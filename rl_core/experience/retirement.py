"""Retirement: shards that no step from R on needs are removed, in an order that no crash can spoil.

    snapshot below R, durable  ->  archive (optional)  ->  retired-<R>-<i>.json, durable  ->  unlink

Whoever dies before `retired-*.json` is there has removed nothing; whoever dies behind it has said what is to be
removed, and the next start removes the rest (`finish_retirement`). Claims, records and versions stay. What may go is
decided in retention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl_core.errors import ShardCorrupt
from rl_core.experience.archive import archive_shard
from rl_core.experience.columns import fixed_values
from rl_core.experience.discovery import SHARD_NAME, stream_names
from rl_core.experience.index import KeySet, group_key, group_keys
from rl_core.experience.ledger import (
    CONSUMER,
    RetiredRow,
    put_retired,
    read_claimed,
    read_retired,
)
from rl_core.experience.retention import Fates, ShardName
from rl_core.experience.snapshots import put_snapshot, read_past
from rl_core.experience.verify import map_shard, verified_batch
from rl_core.run_dir import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class Retirement:
    """What one retirement has removed: `Retirement(below=40, shards=(("w-0123456789ab", 0),), bytes=81920)`."""

    below: int
    """R."""
    shards: tuple[ShardName, ...] = ()
    bytes: int = 0


def retire(run: RunDir, below: int, *, attempt: int, archive: Path | None = None, consumer: str = CONSUMER,
           reached: Callable[[str], None] = lambda point: None) -> Retirement:
    """Retire every shard that no step from `below` (R) on needs.

    `reached` is told each point of the protocol that is behind: "snapshot", "archived", "retired", "unlinked" (after
    each file). Raises StaleAttempt if a newer attempt owns the run, BrokenFile, OSError (a full disk): then what was
    not recorded is still there.
    """
    going = list(_going(run, fates(run, below, consumer), consumer)) if below else []
    if not going:
        return Retirement(below=below)
    put_snapshot(run, below, attempt=attempt, consumer=consumer)
    reached("snapshot")
    if archive is not None:
        for stream, seq in (shard for shard, _ in going):
            archive_shard(run, archive, stream, seq)
        reached("archived")
    put_retired(run, below, [shard for shard, _ in going], [row for _, rows in going for row in rows],
                attempt=attempt, consumer=consumer)
    reached("retired")
    freed = 0
    for shard, _ in going:
        freed += _unlink(run, shard)
        reached("unlinked")
    return Retirement(below=below, shards=tuple(shard for shard, _ in going), bytes=freed)


def finish_retirement(run: RunDir, consumer: str = CONSUMER) -> int:
    """Remove what a retirement that was killed had recorded and not removed yet. Returns the number of shards."""
    return sum(_unlink(run, shard) > 0 for shard in sorted(read_retired(run, consumer).shards))


def _unlink(run: RunDir, shard: ShardName) -> int:
    """Bytes of the shard, which is gone now; 0 where it was gone."""
    path = run.shard(*shard)
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def fates(run: RunDir, below: int, consumer: str = CONSUMER) -> Fates:
    """What the ledger and the outcomes say of every group, seen from step `below` (R)."""
    past = read_past(run, consumer, below=below)
    later = read_claimed(run, consumer, first=below)
    judged = KeySet()
    for groups in (past.claimed.groups_G4, later.groups_G4):
        judged.add_array(group_keys(groups[:, 0], groups[:, 3], groups[:, 2]))
    judged.add(group_key(drop.group_id) for drop in (*past.claimed.dropped, *later.dropped))
    judged.add(group_key(name) for name in past.outcomes)
    return Fates(claimed_below=past.claimed.rows_by_shard, claimed_later=later.rows_by_shard, judged=judged,
                 closed=frozenset(past.closed))


def _going(run: RunDir, known: Fates, consumer: str) -> Iterator[tuple[ShardName, list[RetiredRow]]]:
    """Shards that may go, each with its rows if claims alone do not tell of all of them."""
    retired = read_retired(run, consumer).shards
    for stream in stream_names(run.streams):
        for name in stream_names(run.stream(stream)):
            hit = SHARD_NAME.fullmatch(name)
            if hit is None or (shard := (stream, int(hit.group(1)))) in retired or shard in known.claimed_later \
                    or run.quarantined(*shard).exists():
                continue
            if (rows := _rows_if_going(run, shard, known)) is not None:
                yield shard, rows


def _rows_if_going(run: RunDir, shard: ShardName, known: Fates) -> list[RetiredRow] | None:
    """None: the shard stays. A shard that cannot be read stays, too: the audit names it."""
    path = run.shard(*shard)
    try:
        batch, _ = map_shard(path)
        if known.used_up(shard, batch.num_rows):
            return []
        if known.lets_go(shard, _keys(batch), fixed_values(batch.column("dataset_epoch"))):
            return _rows(verified_batch(path)[0], shard)
    except (ShardCorrupt, FileNotFoundError, KeyError, ValueError):
        pass
    return None


def _keys(batch: pa.RecordBatch) -> NDArray[np.int64]:
    return np.array([group_key(name) for name in batch.column("group_id").to_pylist()], np.int64)


def _rows(batch: pa.RecordBatch, shard: ShardName) -> list[RetiredRow]:
    columns = [batch.column(name).to_pylist() for name in ("group_id", "dataset_epoch", "position", "idx_min")]
    return [RetiredRow(group_id=name, dataset_epoch=epoch, position=position, idx_min=idx_min, stream=shard[0],
                       seq=shard[1], row=row)
            for row, (name, epoch, position, idx_min) in enumerate(zip(*columns, strict=True))]
