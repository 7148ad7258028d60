"""The exact Arrow schema of a shard (experience-store.md 3.2): one row is one group.

Token columns are `list<list<T>>` with the same offsets, nothing is nullable unless the schema says so. batch.py builds
rows of it, verify.py checks files against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = "1"
MAX_GROUPS = 64
MAX_BYTES = 64 * 2**20
"""Per shard, checked at write."""

TOKEN_DTYPES: dict[str, Any] = {"response_ids": np.int32, "behavior_logprobs": np.float32, "loss_mask": np.uint8}
TOKEN_COLUMNS = tuple(TOKEN_DTYPES)
"""Columns with one entry per response token; they share their offsets."""
RUN_COLUMNS = ("ver_run_end", "ver_run_value")
SESSION = "x_session"
"""Extension column, in shards with a group whose sessions have several trajectories: number of each trajectory's
session in its group, ascending."""


def _list(item: pa.DataType, *, nullable_items: bool = False) -> pa.DataType:
    return pa.list_(pa.field("item", item, nullable=nullable_items))


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


SESSION_FIELD = pa.field(SESSION, _list(pa.int32()), nullable=False)
SAMPLING_TYPE = pa.struct([
    _required("temperature", pa.float32()), _required("top_p", pa.float32()), _required("top_k", pa.int32()),
    _required("min_p", pa.float32()), _required("max_new", pa.int32())])


def parts_type(parts: Sequence[str]) -> pa.DataType:
    """Type of `reward_parts` for these part names."""
    return pa.struct([_required(name, _list(pa.float32())) for name in parts])


def shard_schema(parts: Sequence[str] = ()) -> pa.Schema:
    """Schema of a shard whose rewards have these named parts (no metadata)."""
    ids, tokens = _list(pa.int32()), _list(_list(pa.int32()))
    return pa.schema([
        _required("group_id", pa.string()),
        _required("dataset_epoch", pa.int32()),
        _required("position", pa.int64()),
        _required("prompt_idx", pa.int64()),
        _required("lease_no", pa.int64()),
        _required("n_responses", pa.int32()),
        _required("n_expected", pa.int32()),
        _required("idx_dispatch", pa.int32()),
        _required("idx_min", pa.int32()),
        _required("idx_max", pa.int32()),
        _required("n_tokens", pa.int32()),
        _required("dispatched_at", pa.timestamp("us", tz="UTC")),
        _required("finished_at", pa.timestamp("us", tz="UTC")),
        _required("prompt_ids", ids),
        pa.field("response_prompt_ids", tokens),
        _required("response_ids", tokens),
        _required("behavior_logprobs", _list(_list(pa.float32()))),
        _required("loss_mask", _list(_list(pa.uint8()))),
        _required("ver_run_end", tokens),
        _required("ver_run_value", tokens),
        _required("turn_end", tokens),
        _required("reward", _list(pa.float32())),
        _required("reward_parts", parts_type(parts)),
        pa.field("token_reward", _list(_list(pa.float32()))),
        pa.field("correct", _list(pa.float32())),
        pa.field("extracted", _list(pa.string(), nullable_items=True)),
        pa.field("baseline_reward", pa.float32()),
        _required("finish_reason", _list(pa.int8())),
        _required("sampling", SAMPLING_TYPE),
        _required("sampling_seed", _list(pa.int64())),
        _required("data_source", pa.string()),
        _required("meta_json", pa.string()),
    ])


@lru_cache(maxsize=64)
def cached_schema(parts: tuple[str, ...]) -> pa.Schema:
    """`shard_schema`, made once for every set of part names."""
    return shard_schema(parts)


def schema_differs(schema: pa.Schema) -> str | None:
    """What keeps `schema` from being a shard's; None if nothing does. Extension columns `x_*` may follow."""
    index = schema.get_field_index("reward_parts")
    found = schema.field(index).type if index >= 0 else None
    if found is None or not pa.types.is_struct(found):
        return "no column `reward_parts`"
    expected = cached_schema(tuple(field.name for field in found))
    if schema.equals(expected):
        return None
    names = [name for name in schema.names if not name.startswith("x_")]
    if names != expected.names:
        odd = sorted(set(names) ^ set(expected.names)) or "their order"
        return f"columns differ: {odd}"
    for field in expected:
        if not schema.field(field.name).equals(field):
            return f"column `{field.name}` is {schema.field(field.name)}, not {field}"
    return None
