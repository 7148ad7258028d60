"""Is this file a whole, unrotted shard? Maps it, checks schema, shapes and the digest of every column.

Arrow has no checksum: a right-length file with a zeroed extent, or a flipped bit, reads as data. So the writer puts the
xxh3 of each column into the file's metadata, and nothing is believed, or claimed, before they match.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl_core.errors import FormatTooNew, ShardCorrupt
from rl_core.experience.columns import (
    column_digests,
    digest_of_digests,
    first_of_session,
    fixed_values,
    list_values,
    token_values,
    valid_bits,
)
from rl_core.experience.schema import (
    MAX_GROUPS,
    RUN_COLUMNS,
    SCHEMA_VERSION,
    SESSION,
    TOKEN_COLUMNS,
)
from rl_core.types import ShardRef, parse_group_id

SEAL = "rl.seal"
"""Digest over all other metadata, so that a flipped bit in the footer is seen too."""
DIGEST_PREFIX = "rl.digest."
"""`rl.digest.model`, `rl.digest.tokenizer` ...: what the writer ran with, checked against run.json before a claim."""


def shard_key(stream: str, seq: int) -> str:
    """Key of a shard in `Claim.shard_digests`: `shard_key("w-0123456789ab", 3)` -> `"w-0123456789ab/3"`."""
    return f"{stream}/{seq}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardInfo:
    """What the index keeps of a verified shard; arrays have one entry per row (group) and own their memory.

    Example: `info.idx_min` -> `array([3, 3, 4], int32)` for a shard of three groups.
    """

    ref: ShardRef
    attempt: int
    digests: dict[str, str]
    """What the writer ran with: model, tokenizer, chat_template, engine_dtype ... as given to ShardWriter."""
    shard_digest: str
    """Over the column digests: goes into `Claim.shard_digests`."""
    file_bytes: int
    group_id: tuple[str, ...]
    dataset_epoch: NDArray[np.int32]
    position: NDArray[np.int64]
    prompt_idx: NDArray[np.int64]
    try_no: NDArray[np.int32]
    lease_no: NDArray[np.int64]
    n_responses: NDArray[np.int32]
    """Sessions that landed: responses, where none has several trajectories."""
    n_expected: NDArray[np.int32]
    idx_min: NDArray[np.int32]
    idx_max: NDArray[np.int32]
    n_tokens: NDArray[np.int32]
    nbytes: NDArray[np.int64]
    """The row's share of file_bytes, by tokens; sums to file_bytes."""
    reward_spread: NDArray[np.float32]
    """Largest minus smallest reward of the group; 0 = no signal."""
    reward_mean: NDArray[np.float32]
    """Over its sessions."""
    version_offsets: NDArray[np.int32]
    """[rows + 1]: row g has the entries [version_offsets[g], version_offsets[g + 1]) of the next two."""
    version: NDArray[np.int32]
    """Version ids (`WeightVersion.v`, not indices) that sampled the row's tokens, ascending within a row."""
    version_tokens: NDArray[np.int32]
    """Tokens with loss mask 1 by that version, all responses of the row together."""

    @property
    def rows(self) -> int:
        return len(self.group_id)


def map_shard(path: Path) -> tuple[pa.RecordBatch, dict[str, str]]:
    """`(batch, metadata)` of a shard file, mapped: nothing is verified yet.

    The batch's buffers lie in the mapping: never write to them, never let them leave the reader. Raises ShardCorrupt
    for what is no Arrow file of one batch, OSError naming the file for one that cannot be opened or mapped.
    """
    batch = _mapped(path)
    return batch, metadata_of(path, batch)


def metadata_of(path: Path, batch: pa.RecordBatch) -> dict[str, str]:
    """The file's own metadata (`rl.*`). Raises ShardCorrupt where it is not text."""
    raw: Mapping[bytes, bytes] = batch.schema.metadata or {}
    try:
        return {key.decode(): value.decode() for key, value in raw.items()}
    except UnicodeDecodeError as error:
        raise ShardCorrupt(f"{path}: the metadata is not text ({error})") from error


def _mapped(path: Path) -> pa.RecordBatch:
    """Map and parse. (Arrow reads a plain mapping in a quarter of the time that `pa.memory_map` takes, which advises
    the kernel and reads ahead for every buffer.)"""
    fd = os.open(path, os.O_RDONLY)
    try:
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENODEV, errno.EINVAL):
            raise OSError(error.errno, error.strerror, str(path)) from error  # no files or memory left: not its fault
        raise ShardCorrupt(f"{path}: not a whole Arrow file ({error})") from error  # empty; a directory
    finally:
        os.close(fd)
    try:
        reader = pa.ipc.open_file(pa.py_buffer(mapping))
        if reader.num_record_batches != 1:
            raise ShardCorrupt(f"{path}: {reader.num_record_batches} record batches, a shard has one")
        return reader.get_batch(0)
    except (pa.ArrowException, OSError) as error:
        raise ShardCorrupt(f"{path}: not a whole Arrow file ({str(error).splitlines()[0]})") from error


def digested_batch(path: Path) -> tuple[pa.RecordBatch, dict[str, str]]:
    """`(mapped batch, column digests as found)` of a file with a shard's schema.

    Nothing is compared yet. Raises ShardCorrupt naming the file and what is wrong, FormatTooNew for a shard of a newer
    Headway, OSError (FileNotFoundError) for a file that cannot be opened or mapped.
    """
    batch = _mapped(path)
    try:
        batch.validate()  # lengths and buffer sizes: Arrow aborts the process over a negative length that it trusted
        return batch, column_digests(batch)
    except (ShardCorrupt, pa.ArrowException, UnicodeDecodeError) as error:
        problem = _not_a_shard(path, metadata_of(path, batch)) or error
        raise ShardCorrupt(f"{path}: {problem}") from error


def verified_batch(path: Path) -> tuple[pa.RecordBatch, dict[str, str], str]:
    """`(mapped batch, metadata, shard digest)` of a shard whose every byte of data is what the writer wrote.

    Raises as `digested_batch`, and FormatTooNew for a newer schema.
    """
    batch, found = digested_batch(path)
    meta = metadata_of(path, batch)
    if (problem := _not_a_shard(path, meta)) is not None:
        raise ShardCorrupt(f"{path}: {problem}")
    stored: dict[str, str] = json.loads(meta["rl.xxh3"])
    bad = [name for name in found if stored.get(name) != found[name]]
    if bad or stored.keys() != found.keys():
        raise ShardCorrupt(f"{path}: xxh3 of {bad or sorted(stored.keys() ^ found.keys())} does not match: the data "
                           "has changed since it was written")
    check_shapes(path, batch, meta)
    return batch, meta, digest_of_digests(found.items())


def _not_a_shard(path: Path, meta: Mapping[str, str]) -> str | None:
    """What in the metadata says that this is no shard of ours. Raises FormatTooNew for one of a newer Headway."""
    if (version := meta.get("rl.schema")) is None:
        return "an Arrow file, but not a shard (no `rl.schema`)"
    if version != SCHEMA_VERSION:
        if version.isdigit() and int(version) > int(SCHEMA_VERSION) and _sealed(meta):
            raise FormatTooNew(f"{path}: shard schema {version} is newer than this Headway reads ({SCHEMA_VERSION}); "
                               "upgrade")
        return f"shard schema {version!r} is unknown"
    return None if _sealed(meta) else "the metadata does not match its seal"


def _sealed(meta: Mapping[str, str]) -> bool:
    rest = sorted((key, value) for key, value in meta.items() if key != SEAL)
    return meta.get(SEAL) == digest_of_digests(rest)


def check_shapes(path: Path, batch: pa.RecordBatch, meta: Mapping[str, str]) -> None:
    """The name in the file is the file's name, and offsets agree: what digests cannot say of a file copied or misbuilt.

    Raises ShardCorrupt.
    """
    name = shard_key(path.parent.name, int(path.stem)) if path.stem.isdigit() else str(path)
    if (claimed := shard_key(meta["rl.stream"], int(meta["rl.seq"]))) != name:
        raise ShardCorrupt(f"{path}: holds shard {claimed}: copied or renamed")
    if not 1 <= batch.num_rows <= MAX_GROUPS or batch.num_rows != int(meta["rl.groups"]):
        raise ShardCorrupt(f"{path}: {batch.num_rows} rows, `rl.groups` says {meta['rl.groups']}, at most {MAX_GROUPS}")
    outer, inner, values = token_values(batch.column("response_ids"))
    if inner[-1] != values.size or outer[-1] != inner.size - 1:
        raise ShardCorrupt(f"{path}: response_ids has {values.size} values, its offsets end at {inner[-1]}")
    for name in (*TOKEN_COLUMNS, *RUN_COLUMNS):
        other_outer, other_inner, _ = token_values(batch.column(name))
        if not np.array_equal(outer, other_outer) or (name in TOKEN_COLUMNS and not np.array_equal(inner, other_inner)):
            raise ShardCorrupt(f"{path}: offsets of {name} and response_ids differ")
    _, run_offsets, run_ends = token_values(batch.column("ver_run_end"))
    if not np.array_equal(run_ends[run_offsets[1:] - 1], np.diff(inner)):
        raise ShardCorrupt(f"{path}: ver_run_end does not end at the lengths of the responses")
    _check_sessions(path, batch, outer)


def _check_sessions(path: Path, batch: pa.RecordBatch, outer: NDArray[np.int32]) -> None:
    """Sessions and prompts of their own, where a shard has them, are those of its responses, each session with one
    reward. Raises ShardCorrupt."""
    prompts = batch.column("response_prompt_ids")
    if prompts.null_count < len(prompts):
        of_row = np.diff(token_values(prompts)[0])
        if not np.array_equal(of_row, np.where(valid_bits(prompts), np.diff(outer), 0)):
            raise ShardCorrupt(f"{path}: response_prompt_ids does not hold a prompt for every response")
    if (at := batch.schema.get_field_index(SESSION)) < 0:
        return
    offsets, numbers = list_values(batch.column(at))
    if not np.array_equal(offsets, outer):
        raise ShardCorrupt(f"{path}: offsets of {SESSION} and response_ids differ")
    steps, first_N = np.diff(numbers, prepend=0), first_of_session(batch)
    steps[outer[:-1]] = numbers[outer[:-1]]
    if ((steps != 0) & (steps != 1)).any() or steps[outer[:-1]].any():
        raise ShardCorrupt(f"{path}: {SESSION} does not count the sessions of every group from 0 on")
    rewards = list_values(batch.column("reward"))[1]
    if (rewards[1:] != rewards[:-1])[~first_N[1:]].any():
        raise ShardCorrupt(f"{path}: trajectories of one session have other rewards")


def verify_shard(path: Path) -> ShardInfo:
    """Verify one shard file and return what the index needs of it.

    Raises ShardCorrupt naming the file and what is wrong (then it goes to quarantine, and the run goes on),
    FormatTooNew, OSError (FileNotFoundError) for a file that cannot be opened or mapped.
    """
    batch, meta, digest = verified_batch(path)
    ids: list[str] = batch.column("group_id").to_pylist()
    try_no = np.array([parse_group_id(text)[2] for text in ids], np.int32)
    n_tokens = _owned(batch, "n_tokens")
    file_bytes = path.stat().st_size
    edges = (np.concatenate([[0], np.cumsum(n_tokens, dtype=np.int64)]) * file_bytes) // int(n_tokens.sum())
    offsets, rewards = list_values(batch.column("reward"))
    high, low = np.maximum.reduceat(rewards, offsets[:-1]), np.minimum.reduceat(rewards, offsets[:-1])
    first_N = first_of_session(batch)
    sessions = np.add.reduceat(first_N, offsets[:-1], dtype=np.int32)
    mean = np.add.reduceat(rewards * first_N, offsets[:-1], dtype=np.float64) / sessions
    version_offsets, version, version_tokens = _versions_of_rows(batch)
    return ShardInfo(
        ref=ShardRef(stream=meta["rl.stream"], seq=int(meta["rl.seq"])), attempt=int(meta["rl.attempt"]),
        digests={k.removeprefix(DIGEST_PREFIX): v for k, v in meta.items() if k.startswith(DIGEST_PREFIX)},
        shard_digest=digest, file_bytes=file_bytes, group_id=tuple(ids), dataset_epoch=_owned(batch, "dataset_epoch"),
        position=_owned(batch, "position"), prompt_idx=_owned(batch, "prompt_idx"), try_no=try_no,
        lease_no=_owned(batch, "lease_no"), n_responses=sessions,
        n_expected=_owned(batch, "n_expected"), idx_min=_owned(batch, "idx_min"), idx_max=_owned(batch, "idx_max"),
        n_tokens=n_tokens, nbytes=np.diff(edges), reward_spread=high - low, reward_mean=mean.astype(np.float32),
        version_offsets=version_offsets, version=version, version_tokens=version_tokens)


def _owned(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    return fixed_values(batch.column(name)).copy()


def _versions_of_rows(batch: pa.RecordBatch) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Sampled tokens of each row by version id, as (offsets [rows + 1], version, tokens)."""
    outer, token_offsets, mask = token_values(batch.column("loss_mask"))
    _, run_offsets, run_ends = token_values(batch.column("ver_run_end"))
    _, _, run_values = token_values(batch.column("ver_run_value"))
    runs_N = np.diff(run_offsets)
    starts = np.concatenate([np.zeros(1, np.int64), run_ends[:-1]])
    starts[run_offsets[:-1]] = 0
    sampled = np.add.reduceat(mask, starts + np.repeat(token_offsets[:-1], runs_N), dtype=np.int64)
    rows: NDArray[np.int64] = np.arange(batch.num_rows, dtype=np.int64)
    row = np.repeat(np.repeat(rows, np.diff(outer)), runs_N)
    pairs, place = np.unique(row << 32 | run_values, return_inverse=True)
    tokens = np.bincount(place, weights=sampled).astype(np.int32)
    offsets = np.append(np.searchsorted(pairs >> 32, rows), pairs.size).astype(np.int32)
    return offsets, (pairs & 0xFFFFFFFF).astype(np.int32), tokens
