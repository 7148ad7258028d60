"""The groups of a run as an Arrow table, from shards, ledger and outcomes, gap by gap.

Of a shard only the small columns are read. Shards are checked for being whole Arrow files of the schema, not for their
digests, which would read every byte (`headway audit` does).

Shape suffixes: `_G` rows (groups) of one shard, `_N` their answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rl_core.errors import ShardCorrupt
from rl_core.experience.columns import fixed_values, list_offsets, list_values, nested_offsets
from rl_core.experience.discovery import SHARD_NAME, stream_names
from rl_core.experience.ledger import read_retired
from rl_core.experience.schema import schema_differs
from rl_core.experience.staleness import OFFLINE
from rl_core.experience.verify import check_shapes, map_shard
from rl_core.gaps import Gaps, found
from rl_core.group_facts import GroupFacts, read_group_facts
from rl_core.run_dir import RunDir
from rl_core.types import FINISH_CODES, parse_group_id

GROUP_ID = r"^e\d{1,9}-p\d{1,12}-t\d{1,9}$"
Place = tuple[str, int, int]
"""(stream, seq, row)."""
OF_SHARD = ("group_id", "data_source", "dataset_epoch", "position", "prompt_idx", "lease_no", "n_responses",
            "n_expected", "idx_dispatch", "idx_min", "idx_max", "n_tokens", "dispatched_at", "finished_at")
"""Columns that a group takes from its shard as they are."""
TIME = pa.timestamp("us", tz="UTC")
GROUP_SCHEMA = pa.schema([
    ("group_id", pa.string()), ("state", pa.string()), ("reason", pa.string()), ("step", pa.int32()),
    ("age", pa.int32()), ("data_source", pa.string()), ("dataset_epoch", pa.int32()), ("position", pa.int64()),
    ("prompt_idx", pa.int64()), ("try", pa.int32()), ("lease_no", pa.int64()), ("n_responses", pa.int32()),
    ("n_expected", pa.int32()), ("idx_dispatch", pa.int32()), ("idx_min", pa.int32()), ("idx_max", pa.int32()),
    ("n_tokens", pa.int32()), ("masked_tokens", pa.int32()), ("reward_mean", pa.float32()),
    ("reward_std", pa.float32()), ("dispatched_at", TIME), ("finished_at", TIME), ("stream", pa.string()),
    ("seq", pa.int32()), ("row", pa.int32())])
"""Columns of `group_table`; frames.md section 2 says what they hold."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One readable shard. Its buffers lie in the mapping of the file: they are read, never written to."""

    stream: str
    seq: int
    batch: pa.RecordBatch


def read_shards(run: RunDir, gaps: Gaps | None = None) -> Iterator[Shard]:
    """All shards in order of (stream, seq); what is no shard, or in quarantine, is a gap. Retired ones are one gap."""
    gone = found(partial(read_retired, run), str(run.ledger()), gaps)
    retired = gone.shards if gone is not None else frozenset[tuple[str, int]]()
    if retired and gaps is not None:
        gaps.append(f"{run.streams}: {len(retired)} shards are retired (retention.replay): of their groups only the "
                    "ledger tells")
    for stream in stream_names(run.streams):
        listed = [int(hit.group(1)) for name in stream_names(run.stream(stream)) if (hit := SHARD_NAME.fullmatch(name))]
        for seq in range(max(listed, default=-1) + 1):  # those of a stream have no gap but the retired ones
            if (stream, seq) in retired:
                continue
            if run.quarantined(stream, seq).exists():
                if gaps is not None:
                    gaps.append(f"{run.shard(stream, seq)}: in quarantine")
                continue
            batch = found(partial(checked_batch, run.shard(stream, seq)), str(run.shard(stream, seq)), gaps)
            if batch is not None:
                yield Shard(stream, seq, batch)


def checked_batch(path: Path) -> pa.RecordBatch:
    """A shard that can be read without harm, though its numbers may have rotted: offsets, which Arrow would follow out
    of the file, and whatever others are computed from.

    Raises ShardCorrupt, FileNotFoundError.
    """
    batch, meta = map_shard(path)
    if (difference := schema_differs(batch.schema)) is not None:
        raise ShardCorrupt(f"{path}: not a shard: {difference}")
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise ShardCorrupt(f"{path}: {str(error).splitlines()[0]}") from error
    check_shapes(path, batch, meta)
    offsets, _ = nested_offsets(batch.column("response_ids"))
    finish = fixed_values(batch.column("finish_reason").values)
    sane = {"group_id": pc.all(pc.match_substring_regex(batch.column("group_id"), GROUP_ID)).as_py(),
            "response_ids": np.diff(offsets).min() > 0, "idx_min": fixed_values(batch.column("idx_min")).min() >= 0,
            "finish_reason": finish.min() >= 0 and finish.max() < len(FINISH_CODES),
            **{name: np.array_equal(offsets, list_offsets(batch.column(name)))
               for name in ("reward", "finish_reason", "sampling_seed")},
            **{f"reward_parts.{child.name}": np.array_equal(offsets, list_offsets(batch.column("reward_parts").field(
                child.name))) for child in batch.column("reward_parts").type}}
    if odd := [name for name, fine in sane.items() if not fine]:
        raise ShardCorrupt(f"{path}: {', '.join(odd)} holds what no writer writes")
    return batch


def group_table(run: RunDir, gaps: Gaps | None = None) -> pa.Table:
    """One row per landed group, and per group that ended without landing or whose shard cannot be read (then with
    nulls), in order of (dataset_epoch, position, try, stream, seq, row). Columns: GROUP_SCHEMA."""
    facts = read_group_facts(run, gaps=gaps)
    return join_groups(facts, read_shards(run, gaps))


def join_groups(facts: GroupFacts, shards: Iterable[Shard]) -> pa.Table:
    """`group_table` of these facts and shards."""
    landed = _gathered(_of_shard(shard) for shard in shards)
    states = _States(facts)
    ids: list[str] = landed.column("group_id").to_pylist()
    places: list[Place] = list(zip(landed.column("stream").to_pylist(), landed.column("seq").to_pylist(),
                                   landed.column("row").to_pylist(), strict=True))
    oldest: list[int] = landed.column("idx_min").to_pylist()
    order = sorted(range(len(ids)), key=lambda i: (-oldest[i], places[i]))  # of several rows the freshest counts
    judged: list[dict[str, Any]] = [{}] * len(ids)
    for i in order:
        judged[i] = states.judge(ids[i], places[i], oldest[i])
    table = landed
    for name in ("state", "reason", "step", "age", "masked_tokens", "try"):
        table = table.append_column(name, pa.array([row[name] for row in judged], GROUP_SCHEMA.field(name).type))
    table = pa.concat_tables([table.select(GROUP_SCHEMA.names).cast(GROUP_SCHEMA),
                              pa.Table.from_pylist(states.without_row(), schema=GROUP_SCHEMA)])
    return table.sort_by([(name, "ascending") for name in ("dataset_epoch", "position", "try", "stream", "seq", "row")])


COMPUTED = ("stream", "seq", "row", "reward_mean", "reward_std")
MAPPED = 1000
"""Shards that are mapped at once, at most: a process may have some 65000 mappings, a run more shards."""


def _gathered(parts: Iterable[pa.Table]) -> pa.Table:
    """One table of all parts, copied out of their mappings."""
    whole = [GROUP_SCHEMA.empty_table().select([*OF_SHARD, *COMPUTED])]
    mapped: list[pa.Table] = []
    for part in parts:
        mapped.append(part)
        if len(mapped) == MAPPED:
            whole, mapped = [*whole, pa.concat_tables(mapped).combine_chunks()], []
    return pa.concat_tables([*whole, *mapped])


def _of_shard(shard: Shard) -> pa.Table:
    """The columns that a shard itself says of its groups."""
    batch, n = shard.batch, shard.batch.num_rows
    offsets, reward_N = list_values(batch.column("reward"))
    count_G = np.diff(offsets)
    mean_G = np.add.reduceat(reward_N, offsets[:-1], dtype=np.float64) / count_G
    spread_N = (reward_N - np.repeat(mean_G, count_G)) ** 2
    std_G = np.sqrt(np.add.reduceat(spread_N, offsets[:-1]) / count_G)
    columns = {name: batch.column(name) for name in OF_SHARD} | {
        "stream": pa.array([shard.stream] * n, pa.string()), "seq": pa.array([shard.seq] * n, pa.int32()),
        "row": pa.array(np.arange(n), pa.int32()), "reward_mean": pa.array(mean_G, pa.float32()),
        "reward_std": pa.array(std_G, pa.float32())}
    return pa.table(columns).cast(pa.schema([GROUP_SCHEMA.field(name) for name in columns]))


class _States:
    """The state of every group, row by row, by what the ledger and the outcomes say."""

    def __init__(self, facts: GroupFacts) -> None:
        self._facts = facts
        self._claimed = {group.group_id: ((group.stream, group.seq, group.row), claim, ordinal)
                         for claim in facts.claims.values() for ordinal, group in enumerate(claim.groups)}
        self._seen: set[str] = set()

    def judge(self, name: str, place: Place, oldest: int | None) -> dict[str, Any]:
        """State, reason, step and age of one landed row."""
        row: dict[str, Any] = {"state": "waiting", "reason": None, "step": None, "age": None, "masked_tokens": None,
                               "try": parse_group_id(name)[2]}
        at, claim, ordinal = self._claimed.get(name, (None, None, 0))
        drop, outcome = self._facts.drops.get(name), self._facts.outcomes.get(name)
        again = name in self._seen if claim is None else at != place
        if again:
            return row | {"state": "duplicate"}
        self._seen.add(name)
        if claim is not None:
            age = None if oldest is None or claim.policy == OFFLINE else claim.idx - oldest
            return row | {"state": self._facts.state_of(claim.step), "step": claim.step, "age": age,
                          "masked_tokens": dict(claim.masked).get(ordinal, 0)}
        if drop is not None or outcome is not None:
            return row | {"state": "dropped", "reason": drop.reason if drop else outcome.reason if outcome else None}
        return row

    def without_row(self) -> list[dict[str, Any]]:
        """Groups of which no row was judged: claimed ones whose shard is a gap, and those that never landed."""
        rows: list[dict[str, Any]] = []
        for name, (place, claim, ordinal) in self._claimed.items():
            if name not in self._seen:
                group = claim.groups[ordinal]
                rows.append(self.judge(name, place, None) | {
                    "group_id": name, "dataset_epoch": group.dataset_epoch, "position": group.position,
                    "prompt_idx": group.prompt_idx, "stream": place[0], "seq": place[1], "row": place[2]})
        for name, outcome in self._facts.outcomes.items():
            if name not in self._seen:
                rows.append({"group_id": name, "state": outcome.kind, "reason": outcome.reason,
                             "dataset_epoch": outcome.dataset_epoch, "position": outcome.position,
                             "prompt_idx": parse_group_id(name)[1], "try": outcome.try_no})
        return rows


def trained_ages(run: RunDir) -> NDArray[np.int64]:
    """Age of every trained group at its step, publications, in training order (experience-store.md 3.6).

    Groups whose shard is not there any more are left out.
    """
    table = group_table(run, gaps=[])
    table = table.filter(pc.and_(pc.equal(table.column("state"), "trained"), pc.is_valid(table.column("age"))))
    table = table.sort_by([(name, "ascending") for name in ("step", "dataset_epoch", "position", "try")])
    return np.array(table.column("age").to_pylist(), np.int64)
