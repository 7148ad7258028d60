"""Is this file a whole, unrotted shard? Maps it, checks schema, shapes and the digest of every column.

Arrow has no checksum: a right-length file with a zeroed extent, or a flipped bit, reads as data. So the writer puts the
xxh3 of each column into the file's metadata, and nothing is believed, or claimed, before they match.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rl_core.errors import FormatTooNew, ShardCorrupt
from rl_core.experience.schema import (
    MAX_GROUPS,
    RUN_COLUMNS,
    SCHEMA_VERSION,
    TOKEN_COLUMNS,
    schema_differs,
)
from rl_core.experience.staging import Staging
from rl_core.types import ShardRef, parse_group_id

SEAL = "rl.seal"
"""Digest over all other metadata, so that a flipped bit in the footer is seen too."""
DIGEST_PREFIX = "rl.digest."
"""`rl.digest.model`, `rl.digest.tokenizer` ...: what the writer ran with, checked against run.json before a claim."""


def shard_key(stream: str, seq: int) -> str:
    """Key of a shard in `Claim.shard_digests`: `shard_key("w-0123456789ab", 3)` -> `"w-0123456789ab/3"`."""
    return f"{stream}/{seq}"


def _bytes(buffer: pa.Buffer | None, nbytes: int) -> memoryview:
    """The first `nbytes` of a buffer. Raises ShardCorrupt where it holds fewer."""
    if nbytes == 0:
        return memoryview(b"")
    if buffer is None or not 0 <= nbytes <= buffer.size:
        raise ShardCorrupt(f"a buffer holds {0 if buffer is None else buffer.size} bytes, {nbytes} are needed")
    return memoryview(cast(Any, buffer))[:nbytes]


def _bits(bitmap: pa.Buffer, n: int) -> NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(_bytes(bitmap, (n + 7) // 8), np.uint8), count=n, bitorder="little")


Plan = tuple[str, Any]
"""How to walk the buffers of a type: ("fixed", bytes), ("list", plan), ("string", None) or ("struct", plans)."""


def _plan(kind: pa.DataType) -> Plan:
    if pa.types.is_struct(kind):
        return "struct", tuple(_plan(child.type) for child in kind)
    if pa.types.is_list(kind):
        return "list", _plan(kind.value_type)
    if pa.types.is_string(kind):
        return "string", None
    if pa.types.is_primitive(kind) and kind.bit_width >= 8:
        return "fixed", kind.bit_width // 8
    raise ShardCorrupt(f"columns of type {kind} have no digest")


def _hash(state: xxhash.xxh3_64, plan: Plan, n: int, buffers: Iterator[pa.Buffer | None]) -> None:
    """Bytes of `n` values of one type, in the order of Arrow's buffers: nulls where there are any, offsets, values.

    Only bytes that mean something are hashed: Arrow pads buffers, and leaves out the bitmap of a column without nulls.
    """
    kind, inner = plan
    validity = next(buffers)
    if validity is not None and n:
        bits = _bits(validity, n)
        if not bits.all():
            state.update(np.packbits(bits).tobytes())
    if kind == "fixed":
        state.update(_bytes(next(buffers), n * inner))
    elif kind == "struct":
        for child in inner:
            _hash(state, child, n, buffers)
    else:
        offsets = _bytes(next(buffers), 4 * (n + 1) if n else 0)
        state.update(offsets)
        size = int.from_bytes(offsets[-4:], "little", signed=True)
        if kind == "list":
            _hash(state, inner, size, buffers)
        else:
            state.update(_bytes(next(buffers), size))


@lru_cache(maxsize=64)
def _plans(schema: pa.Schema) -> tuple[Plan, ...]:
    return tuple(_plan(field.type) for field in schema)


def column_digests(batch: pa.RecordBatch) -> dict[str, str]:
    """xxh3_64 of the bytes of every column, 16 hex digits, by name in schema order.

    The same before writing and after mapping. Raises ShardCorrupt where a buffer is shorter than its column.
    """
    digests: dict[str, str] = {}
    plans = _plans(batch.schema.remove_metadata())
    for name, plan, column in zip(batch.schema.names, plans, batch.columns, strict=True):
        assert column.offset == 0, "digests are of whole columns"
        state = xxhash.xxh3_64()
        _hash(state, plan, len(column), iter(column.buffers()))
        digests[name] = state.hexdigest()
    return digests


def digest_of_digests(pairs: Iterable[tuple[str, str]]) -> str:
    """One digest over named digests in their order: the shard's identity in a claim, or the seal of its metadata."""
    return xxhash.xxh3_64_hexdigest("\n".join(f"{name}={value}" for name, value in pairs).encode())


def valid_bits(array: pa.Array) -> NDArray[np.bool_]:
    """True where the array is not null."""
    bitmap = array.buffers()[0]
    if bitmap is None:
        return np.ones(len(array), np.bool_)
    return _bits(bitmap, len(array)).view(np.bool_)


def fixed_values(array: pa.Array) -> NDArray[Any]:
    """Values of a column of a fixed width: a read-only view. (`Array.to_numpy` would import pandas.)"""
    kind = array.type
    letter = "f" if pa.types.is_floating(kind) else "u" if pa.types.is_unsigned_integer(kind) else "i"
    width = kind.bit_width // 8
    return np.frombuffer(_bytes(array.buffers()[1], len(array) * width), f"{letter}{width}")


def list_offsets(column: pa.Array) -> NDArray[np.int32]:
    """Offsets of a list column [lists + 1]: a read-only view."""
    return np.frombuffer(_bytes(column.buffers()[1], 4 * (len(column) + 1)), np.int32)


def list_values(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """`(offsets, values)` of a list column of at least one list: read-only views."""
    return list_offsets(column), fixed_values(column.values)


def token_values(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[Any]]:
    """`(response offsets of groups, token offsets of responses, values)` of a `list<list<T>>` column: views."""
    return list_offsets(column), *list_values(column.values)


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
    n_expected: NDArray[np.int32]
    idx_min: NDArray[np.int32]
    idx_max: NDArray[np.int32]
    n_tokens: NDArray[np.int32]
    nbytes: NDArray[np.int64]
    """The row's share of file_bytes, by tokens; sums to file_bytes."""
    reward_spread: NDArray[np.float32]
    """Largest minus smallest reward of the group; 0 = no signal."""
    reward_mean: NDArray[np.float32]
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
    for what is no Arrow file of one batch, OSError as it comes for a file that cannot be opened.
    """
    if path.stat().st_size == 0:
        raise ShardCorrupt(f"{path}: the file is empty")
    with pa.memory_map(str(path)) as source:
        return _parse(path, source)


def load_shard(path: Path, pool: Staging, name: str = "shard") -> tuple[pa.RecordBatch, dict[str, str]]:
    """`(batch, metadata)` of a shard file, read into buffer `name` of the pool; raises as `map_shard` does.

    Faster than a fresh mapping, whose pages fault one by one, where the pool has been used before.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        buffer, at = pool.take(name, size, np.uint8), 0
        while at < size and (got := file.readinto(cast(Any, buffer[at:]))):
            at += got
    return _parse(path, pa.BufferReader(pa.py_buffer(buffer[:at])))


def _parse(path: Path, source: pa.NativeFile) -> tuple[pa.RecordBatch, dict[str, str]]:
    try:
        reader = pa.ipc.open_file(source)
        if reader.num_record_batches != 1:
            raise ShardCorrupt(f"{path}: {reader.num_record_batches} record batches, a shard has one")
        batch = reader.get_batch(0)
        raw: Mapping[bytes, bytes] = batch.schema.metadata or {}
        return batch, {key.decode(): value.decode() for key, value in raw.items()}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ShardCorrupt(f"{path}: not a whole Arrow file ({str(error).splitlines()[0]})") from error


def verified_batch(path: Path, pool: Staging | None = None, name: str = "shard",
                   ) -> tuple[pa.RecordBatch, dict[str, str], str]:
    """`(batch, metadata, shard digest)` of a shard whose every byte of data is what the writer wrote.

    Mapped, or read into buffer `name` of the pool. Raises ShardCorrupt naming the file and what is wrong, FormatTooNew
    for a newer schema, OSError (FileNotFoundError) for a file that cannot be opened.
    """
    batch, meta = map_shard(path) if pool is None else load_shard(path, pool, name)
    if "rl.schema" not in meta:
        raise ShardCorrupt(f"{path}: an Arrow file, but not a shard (no `rl.schema`)")
    if meta["rl.schema"] != SCHEMA_VERSION:
        if meta["rl.schema"].isdigit() and int(meta["rl.schema"]) > int(SCHEMA_VERSION) and _sealed(meta):
            raise FormatTooNew(f"{path}: shard schema {meta['rl.schema']} is newer than this Headway reads "
                               f"({SCHEMA_VERSION}); upgrade")
        raise ShardCorrupt(f"{path}: shard schema {meta['rl.schema']!r} is unknown")
    if not _sealed(meta):
        raise ShardCorrupt(f"{path}: the metadata does not match its seal")
    stored: dict[str, str] = json.loads(meta["rl.xxh3"])
    try:
        if (difference := schema_differs(batch.schema)) is not None:
            raise ShardCorrupt(difference)
        batch.validate()  # lengths and buffer sizes: Arrow aborts the process over a negative length that it trusted
        found = column_digests(batch)
    except (ShardCorrupt, pa.ArrowException, UnicodeDecodeError) as error:
        raise ShardCorrupt(f"{path}: {error}") from error
    bad = [name for name in found if stored.get(name) != found[name]]
    if bad or stored.keys() != found.keys():
        raise ShardCorrupt(f"{path}: xxh3 of {bad or sorted(stored.keys() ^ found.keys())} does not match: the data "
                           "has changed since it was written")
    _check_shapes(path, batch, meta)
    return batch, meta, digest_of_digests(found.items())


def _sealed(meta: Mapping[str, str]) -> bool:
    rest = sorted((key, value) for key, value in meta.items() if key != SEAL)
    return meta.get(SEAL) == digest_of_digests(rest)


def _check_shapes(path: Path, batch: pa.RecordBatch, meta: Mapping[str, str]) -> None:
    """The name in the file is the file's name, and offsets agree: what digests cannot say of a file copied or misbuilt.
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


def verify_shard(path: Path, pool: Staging | None = None) -> ShardInfo:
    """Verify one shard file and return what the index needs of it; a pool makes many of them faster.

    Raises ShardCorrupt naming the file and what is wrong (then it goes to quarantine, and the run goes on),
    FormatTooNew, OSError (FileNotFoundError) for a file that cannot be opened.
    """
    batch, meta, digest = verified_batch(path, pool)
    ids: list[str] = batch.column("group_id").to_pylist()
    try_no = np.array([parse_group_id(text)[2] for text in ids], np.int32)
    n_tokens = _owned(batch, "n_tokens")
    file_bytes = path.stat().st_size
    edges = (np.concatenate([[0], np.cumsum(n_tokens, dtype=np.int64)]) * file_bytes) // int(n_tokens.sum())
    offsets, rewards = list_values(batch.column("reward"))
    high, low = np.maximum.reduceat(rewards, offsets[:-1]), np.minimum.reduceat(rewards, offsets[:-1])
    mean = np.add.reduceat(rewards, offsets[:-1], dtype=np.float64) / np.diff(offsets)
    version_offsets, version, version_tokens = _versions_of_rows(batch)
    return ShardInfo(
        ref=ShardRef(stream=meta["rl.stream"], seq=int(meta["rl.seq"])), attempt=int(meta["rl.attempt"]),
        digests={k.removeprefix(DIGEST_PREFIX): v for k, v in meta.items() if k.startswith(DIGEST_PREFIX)},
        shard_digest=digest, file_bytes=file_bytes, group_id=tuple(ids), dataset_epoch=_owned(batch, "dataset_epoch"),
        position=_owned(batch, "position"), prompt_idx=_owned(batch, "prompt_idx"), try_no=try_no,
        lease_no=_owned(batch, "lease_no"), n_responses=_owned(batch, "n_responses"),
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
