"""Snapshots: what a start needs of all claims below a step, in one file (experience-store.md 3.11).

`ledger/<consumer>/snap-<k>.arrow` holds the claimed groups, dropped groups and outcomes below step k, the claimed rows
of every shard that is not retired, and the dataset epochs whose every position is finished: of those the ids are
forgotten. It says nothing that claims, drops and outcomes do not say, so one that is damaged, or of another run, is
passed over, and they are read instead. The two newest are kept. Importable without torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rl_core.errors import BrokenFile, FormatTooNew, ShardCorrupt
from rl_core.experience.columns import digest_of_digests, fixed_values, plain_digests
from rl_core.experience.ledger import (
    CONSUMER,
    Claimed,
    drop_files,
    drop_number,
    read_claimed,
    read_drops,
    read_retired,
)
from rl_core.experience.outcomes import outcome_ids, read_outcome
from rl_core.experience.verify import SEAL, metadata_of
from rl_core.run_dir import RunDir, check_attempt, numbered, put_if_absent, read_json
from rl_core.types import Drop, Outcome, parse_group_id

LOG = logging.getLogger("headway.experience")
SNAPSHOT_FORMAT = "1"
KEPT = 2
"""Snapshots that stay: should the newest be damaged, only the claims since the one before it are read."""
FINISHED_OUTCOMES = ("poison", "given_up")

@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What claims 0 .. `claimed.steps` - 1, all drops and all outcomes say, as the index needs it."""

    claimed: Claimed
    """Without the groups of closed epochs. `dropped`: of claims and of drops files."""
    closed: dict[int, int] = field(default_factory=dict[int, int])
    """Dataset epoch whose every position is finished -> its positions. What is landed of it is a duplicate."""
    drop_files: frozenset[tuple[int, int]] = frozenset()
    """(step, i) of the drops files that are in it."""
    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    """By group id, without those of closed epochs."""
    passed_over: tuple[str, ...] = ()
    """Snapshots that could not be used, with the reason."""


NOTHING = Past(claimed=Claimed(steps=0, groups_G4=np.zeros((0, 4), np.int64), rows_by_shard={}, dropped=()))


def read_past(run: RunDir, consumer: str = CONSUMER, *, below: int | None = None) -> Past:
    """The newest snapshot that is whole, and the claims, drops and outcomes that are not in it.

    With `below`, claims of steps under it only. Raises BrokenFile for a gap in the claims or a file that cannot be
    read; a snapshot that cannot be used is a warning.
    """
    base = _newest_whole(run, consumer, below)
    since = read_claimed(run, consumer, first=base.claimed.steps, below=below)
    paths = [path for path in drop_files(run, consumer) if drop_number(path) not in base.drop_files]
    dropped = [*since.dropped, *(drop for path in paths for drop in read_drops(path))]
    fresh = [name for name in outcome_ids(run) if name not in base.outcomes
             and not (base.closed and parse_group_id(name)[0] in base.closed)]
    rows = dict(base.claimed.rows_by_shard)
    for shard, count in since.rows_by_shard.items():
        rows[shard] = rows.get(shard, 0) + count
    return replace(
        base, drop_files=base.drop_files.union(map(drop_number, paths)),
        outcomes=base.outcomes | {name: read_outcome(run, name) for name in fresh},
        claimed=Claimed(steps=since.steps, groups_G4=np.concatenate([base.claimed.groups_G4, since.groups_G4]),
                        rows_by_shard=rows, dropped=(*base.claimed.dropped, *dropped)))


def put_snapshot(run: RunDir, step: int, *, attempt: int, consumer: str = CONSUMER) -> Path:
    """Write the snapshot of everything below `step`, durably, unless a whole one stands; then let old ones go.

    Raises ValueError where a step below has no claim, StaleAttempt if a newer attempt owns the run.
    """
    check_attempt(run, attempt)
    path = run.snapshot(step, consumer)
    if path.exists():
        if isinstance(_read(run, step, consumer), Past):
            return path
        path.unlink(missing_ok=True)  # damaged: it says nothing that is not said elsewhere
    past = read_past(run, consumer, below=step)
    if past.claimed.steps < step:
        raise ValueError(f"a snapshot below step {step} needs its claims; there are {past.claimed.steps}")
    retired = read_retired(run, consumer).shards
    rows = {shard: count for shard, count in past.claimed.rows_by_shard.items() if shard not in retired}
    past = forget_closed(replace(past, claimed=replace(past.claimed, rows_by_shard=rows)), _prompt_rows(run))
    put_if_absent(path, _serialise(past, _stated(run, step, consumer)))
    for _, old in snapshots(run, consumer)[:-KEPT]:
        if old != path:  # one behind which shards retire may be older than those of the newest claims
            old.unlink(missing_ok=True)
    return path


def snapshots(run: RunDir, consumer: str = CONSUMER) -> list[tuple[int, Path]]:
    """(step, file) of every snapshot, whole or not, in order of step."""
    return list(numbered(run.ledger(consumer), r"snap-(\d{9})\.arrow"))


def forget_closed(past: Past, n_prompts: int | None) -> Past:
    """The same without the ids of dataset epochs whose every position is trained, filtered, poison or given up.

    `n_prompts`: positions of a dataset epoch; None: not known, nothing is forgotten.
    """
    if n_prompts is None:
        return past
    groups = past.claimed.groups_G4
    names = [drop.group_id for drop in past.claimed.dropped if drop.reason == "filtered"]
    names += [name for name, outcome in past.outcomes.items() if outcome.kind in FINISHED_OUTCOMES]
    ended = np.array([parse_group_id(name)[:2] for name in names], np.int64).reshape(-1, 2)
    # the order of a dataset epoch is a permutation of its prompts: as many prompts as positions
    prompts = np.unique(np.concatenate([groups[:, [0, 3]], ended]), axis=0)
    epochs, finished = np.unique(prompts[:, 0], return_counts=True)
    closed = dict.fromkeys(cast("list[int]", epochs[finished == n_prompts].tolist()), n_prompts)
    if not closed:
        return past
    dropped = tuple(drop for drop in past.claimed.dropped if parse_group_id(drop.group_id)[0] not in closed)
    return replace(
        past, closed=past.closed | closed,
        outcomes={name: outcome for name, outcome in past.outcomes.items() if outcome.dataset_epoch not in closed},
        claimed=replace(past.claimed, groups_G4=groups[~np.isin(groups[:, 0], list(closed))], dropped=dropped))


def _prompt_rows(run: RunDir) -> int | None:
    try:
        return read_json(run.inputs).get("rows")
    except FileNotFoundError:
        return None


# -- the file


def _stated(run: RunDir, step: int, consumer: str) -> dict[str, str]:
    """Whose snapshot it is: of this run, and of these very claims. Raises FileNotFoundError without the last claim."""
    try:
        uuid = str(read_json(run.run_json).get("run_uuid", ""))
    except FileNotFoundError:
        uuid = ""
    last = xxhash.xxh3_128_hexdigest(run.claim(step - 1, consumer).read_bytes()) if step else ""
    return {"rl.snapshot": SNAPSHOT_FORMAT, "rl.run": uuid, "rl.consumer": consumer, "rl.step": str(step),
            "rl.last_claim": last}


def _serialise(past: Past, stated: Mapping[str, str]) -> bytes:
    groups = past.claimed.groups_G4
    groups = groups[np.lexsort((groups[:, 2], groups[:, 1], groups[:, 0]))]
    shards, dropped = sorted(past.claimed.rows_by_shard), past.claimed.dropped
    streams = sorted({stream for stream, _ in shards})
    number = {stream: i for i, stream in enumerate(streams)}
    files = sorted(past.drop_files)
    columns: dict[str, pa.Array] = {
        "dataset_epoch": _ints(groups[:, 0], np.int32), "position": _ints(groups[:, 1], np.int64),
        "try": _ints(groups[:, 2], np.int32), "prompt_idx": _ints(groups[:, 3], np.int64),
        "closed_epoch": _ints(list(past.closed), np.int32),
        "closed_positions": _ints(list(past.closed.values()), np.int64),
        "stream": pa.array(streams, pa.string()),
        "shard_stream": _ints([number[stream] for stream, _ in shards], np.int32),
        "shard_seq": _ints([seq for _, seq in shards], np.int32),
        "shard_rows": _ints([past.claimed.rows_by_shard[shard] for shard in shards], np.int32),
        "dropped_id": pa.array([drop.group_id for drop in dropped], pa.string()),
        "dropped_reason": pa.array([drop.reason for drop in dropped], pa.string()),
        "dropped_tokens": _ints([drop.n_tokens for drop in dropped], np.int32),
        "drops_step": _ints([step for step, _ in files], np.int64), "drops_i": _ints([i for _, i in files], np.int64),
        "outcome": pa.array([json.dumps(asdict(outcome)) for outcome in past.outcomes.values()], pa.string()),
    }
    lists = [pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values) for values in columns.values()]
    batch = pa.RecordBatch.from_arrays(lists, names=list(columns))
    meta = {**stated, "rl.xxh3": json.dumps(plain_digests(batch))}
    meta[SEAL] = digest_of_digests(sorted(meta.items()))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema.with_metadata(meta), options=pa.ipc.IpcWriteOptions(compression="zstd")
                         ) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _ints(values: NDArray[np.int64] | Sequence[int], dtype: Any) -> pa.Array:
    return pa.array(np.asarray(values, dtype))


def _newest_whole(run: RunDir, consumer: str, below: int | None) -> Past:
    passed: list[str] = []
    for step, path in reversed(snapshots(run, consumer)):
        if below is not None and step > below:
            continue
        found = _read(run, step, consumer)
        if isinstance(found, Past):
            return replace(found, passed_over=tuple(passed))
        passed.append(f"{path}: {found}")
        LOG.warning("snapshot passed over (%s: %s); the one before it and the claims are read instead", path, found)
    return replace(NOTHING, passed_over=tuple(passed))


def _read(run: RunDir, step: int, consumer: str) -> Past | str:
    """The snapshot, or why it cannot be used. Raises FormatTooNew."""
    path = run.snapshot(step, consumer)
    try:
        batch = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).get_batch(0)
        batch.validate(full=True)
        meta = metadata_of(path, batch)
        seal = meta.pop(SEAL, None)
        if seal != digest_of_digests(sorted(meta.items())):
            return "its metadata does not match its seal"
        if meta["rl.snapshot"] != SNAPSHOT_FORMAT:
            raise FormatTooNew(f"{path}: snapshot format {meta['rl.snapshot']} is newer than this Headway reads "
                               f"({SNAPSHOT_FORMAT}); upgrade")
        if json.loads(meta["rl.xxh3"]) != plain_digests(batch):
            return "its data do not match their digests"
        stated = _stated(run, step, consumer)
        if odd := sorted(name for name, value in stated.items() if meta.get(name) != value):
            return f"it is of other claims or another run ({', '.join(odd)} differ)"
        return _past_of(batch, step)
    except FormatTooNew:
        raise
    except (pa.ArrowException, OSError, BrokenFile, ShardCorrupt, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or ['no word'])[0]}"


def _past_of(batch: pa.RecordBatch, step: int) -> Past:
    def ints(name: str) -> NDArray[np.int64]:
        return fixed_values(batch.column(name).values).astype(np.int64)

    def texts(name: str) -> list[str]:
        return batch.column(name).values.to_pylist()

    streams, of_shard = texts("stream"), cast("list[int]", ints("shard_stream").tolist())
    shards = zip([streams[i] for i in of_shard], cast("list[int]", ints("shard_seq").tolist()), strict=True)
    dropped: list[tuple[str, Any, int]] = list(zip(texts("dropped_id"), texts("dropped_reason"),
                                                   ints("dropped_tokens").tolist(), strict=True))
    outcomes = [Outcome(**json.loads(text)) for text in texts("outcome")]
    return Past(
        claimed=Claimed(
            steps=step, rows_by_shard=dict(zip(shards, ints("shard_rows").tolist(), strict=True)),
            groups_G4=np.stack([ints(name) for name in ("dataset_epoch", "position", "try", "prompt_idx")], axis=1),
            dropped=tuple(Drop(group_id=name, reason=reason, n_tokens=tokens) for name, reason, tokens in dropped)),
        closed=dict(zip(ints("closed_epoch").tolist(), ints("closed_positions").tolist(), strict=True)),
        drop_files=frozenset(zip(ints("drops_step").tolist(), ints("drops_i").tolist(), strict=True)),
        outcomes={outcome.group_id: outcome for outcome in outcomes})
