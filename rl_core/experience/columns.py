"""Columns of a shard as bytes and as numpy views: their digests, and their values without a copy.

Arrow has no checksum, so every column carries an xxh3 of what it means: values, offsets, nulls where there are any.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rl_core.errors import ShardCorrupt
from rl_core.experience.schema import SESSION, cached_schema, schema_differs


def _bytes(buffer: Any, nbytes: int) -> memoryview:
    """The first `nbytes` of a buffer. Raises ShardCorrupt where it holds fewer."""
    if nbytes == 0:
        return memoryview(b"")
    if buffer is None or not 0 <= nbytes <= buffer.size:
        raise ShardCorrupt(f"a buffer holds {0 if buffer is None else buffer.size} bytes, {nbytes} are needed")
    return memoryview(buffer)[:nbytes]


def _bits(bitmap: pa.Buffer, n: int) -> NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(_bytes(bitmap, (n + 7) // 8), np.uint8), count=n, bitorder="little")


Plan = tuple[int | tuple["Plan", ...], ...]
"""The way through a type's buffers: LIST or STRING or the width of a value in bytes, level by level; a struct is the
plans of its children."""
LIST, STRING = 0, -1
LAST_OFFSET = struct.Struct("<i")


def _plan(kind: pa.DataType) -> Plan:
    if pa.types.is_struct(kind):
        return (tuple(_plan(child.type) for child in kind),)
    if pa.types.is_list(kind):
        return (LIST, *_plan(kind.value_type))
    if pa.types.is_string(kind):
        return (STRING,)
    if pa.types.is_primitive(kind) and kind.bit_width >= 8:
        return (kind.bit_width // 8,)
    raise ShardCorrupt(f"columns of type {kind} have no digest")


def _hash(update: Callable[[Any], None], plan: Plan, n: int, buffers: list[Any], at: int) -> int:
    """Bytes of `n` values of one type, in the order of Arrow's buffers: nulls where there are any, offsets, values.

    Only bytes that mean something are hashed: Arrow pads buffers, and leaves out the bitmap of a column without nulls.
    `buffers[at]` is the first of this type's buffers; returns where those of the next one begin.
    """
    for step in plan:
        validity, at = buffers[at], at + 1
        if validity is not None and n:
            bits = _bits(validity, n)
            if not bits.all():
                update(np.packbits(bits).tobytes())
        if isinstance(step, tuple):
            for child in step:
                at = _hash(update, child, n, buffers, at)
            continue
        size = n * step if step > 0 else 4 * (n + 1) if n else 0
        if size:
            data = buffers[at]
            if data is None or not 0 < size <= data.size:
                raise ShardCorrupt(f"a buffer holds {0 if data is None else data.size} bytes, {size} are needed")
            update(data if data.size == size else memoryview(data)[:size])
            if step <= 0:
                (n,) = LAST_OFFSET.unpack_from(data, size - 4)
        at += 1
        if step == STRING:
            update(_bytes(buffers[at], n))
            at += 1
    return at


@lru_cache(maxsize=64)
def _shard_plans(parts: tuple[str, ...]) -> tuple[Plan, ...]:
    return tuple(_plan(field.type) for field in cached_schema(parts))


def _plans_of(schema: pa.Schema, columns: list[pa.Array]) -> tuple[Plan, ...]:
    at = schema.get_field_index("reward_parts")
    nested = at >= 0 and pa.types.is_struct(schema.field(at).type)
    parts = tuple(field.name for field in schema.field(at).type) if nested else ()
    if schema.equals(cached_schema(parts)):
        return _shard_plans(parts)
    if (difference := schema_differs(schema)) is not None:
        raise ShardCorrupt(difference)
    return tuple(_plan(column.type) for column in columns)


def column_digests(batch: pa.RecordBatch) -> dict[str, str]:
    """xxh3_64 of the bytes of every column, 16 hex digits, by name in schema order.

    The same before writing and after reading. Raises ShardCorrupt for a schema that is not a shard's, and where a
    buffer is shorter than its column.
    """
    return _digests(batch, _plans_of(batch.schema, batch.columns))


def plain_digests(batch: pa.RecordBatch) -> dict[str, str]:
    """`column_digests` of a batch of any schema whose types a shard may have."""
    return _digests(batch, tuple(_plan(column.type) for column in batch.columns))


def _digests(batch: pa.RecordBatch, plans: tuple[Plan, ...]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for name, plan, column in zip(batch.schema.names, plans, batch.columns, strict=True):
        assert column.offset == 0, "digests are of whole columns"
        state = xxhash.xxh3_64()
        _hash(state.update, plan, len(column), column.buffers(), 0)
        digests[name] = state.hexdigest()
    return digests


def digest_of_digests(pairs: Iterable[tuple[str, str]]) -> str:
    """One digest over named digests in their order: the shard's identity in a claim, or the seal of its metadata."""
    return xxhash.xxh3_64_hexdigest("\n".join(f"{name}={value}" for name, value in pairs).encode())


def first_of_session(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """True at the first trajectory of every session of a shard, one entry per response."""
    offsets, rewards = list_values(batch.column("reward"))
    first_N, at = np.ones(rewards.size, np.bool_), batch.schema.get_field_index(SESSION)
    if at >= 0:
        numbers_N = list_values(batch.column(at))[1]
        first_N[1:] = numbers_N[1:] != numbers_N[:-1]
        first_N[offsets[:-1]] = True
    return first_N


def valid_bits(array: pa.Array) -> NDArray[np.bool_]:
    """True where the array is not null."""
    bitmap = array.buffers()[0]
    if bitmap is None:
        return np.ones(len(array), np.bool_)
    return _bits(bitmap, len(array)).view(np.bool_)


DTYPES: dict[int, np.dtype[Any]] = {
    kind.id: np.dtype(name) for kind, name in (
        (pa.int8(), "i1"), (pa.uint8(), "u1"), (pa.int32(), "i4"), (pa.int64(), "i8"), (pa.float32(), "f4"),
        (pa.timestamp("us", tz="UTC"), "i8"))}
"""NumPy's name of each fixed-width type of the schema, by Arrow's id."""


def fixed_values(array: pa.Array) -> NDArray[Any]:
    """Values of a column of a fixed width: a read-only view. (`Array.to_numpy` would import pandas.)"""
    dtype = DTYPES[array.type.id]
    return np.frombuffer(_bytes(array.buffers()[1], len(array) * dtype.itemsize), dtype)


def list_offsets(column: pa.Array) -> NDArray[np.int32]:
    """Offsets of a list column [lists + 1]: a read-only view."""
    return np.frombuffer(_bytes(column.buffers()[1], 4 * (len(column) + 1)), np.int32)


def list_values(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """`(offsets, values)` of a list column of at least one list: read-only views."""
    return list_offsets(column), fixed_values(column.values)


def nested_offsets(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`(response offsets of groups, token offsets of responses)` of a `list<list<T>>` column: views."""
    buffers, n = column.buffers(), len(column)
    outer = np.frombuffer(_bytes(buffers[1], 4 * (n + 1)), np.int32)
    return outer, np.frombuffer(_bytes(buffers[3], 4 * (int(outer[-1]) + 1)), np.int32)


def token_values(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[Any]]:
    """`(response offsets of groups, token offsets of responses, values)` of a `list<list<T>>` column: views."""
    return list_offsets(column), *list_values(column.values)
