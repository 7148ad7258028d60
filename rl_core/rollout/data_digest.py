"""Digest of Arrow values, and the bytes of their texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray


def text_spans(texts: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Offsets [rows + 1], from 0, and bytes of a string array without nulls."""
    _, offsets, data = texts.buffers()
    if not len(texts):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32)[texts.offset:texts.offset + len(texts) + 1].astype(np.int64)
    whole = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return ends - ends[0], whole[ends[0]:ends[-1]]


class ValuesDigest:
    """Digest of Arrow values, the same however they are cut into batches, and in every version of pyarrow."""

    def __init__(self) -> None:
        self._leaves: dict[str, Any] = {}

    def add(self, path: str, array: Any) -> None:
        """More values of the column at `path`."""
        self._leaf(f"{path}?", array.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False))
        kind = array.type
        if pa.types.is_string(kind):
            full = array.fill_null("") if array.null_count else array
            offsets, data = text_spans(full)
            self._leaf(f"{path}#", np.diff(offsets))
            self._leaf(path, data)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            self._leaf(f"{path}#", pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64))
            self.add(f"{path}[]", array.flatten())
        elif pa.types.is_struct(kind):
            for name, child in zip([kind.field(i).name for i in range(kind.num_fields)], array.flatten(), strict=True):
                self.add(f"{path}.{name}", child)
        elif pa.types.is_boolean(kind):
            self._leaf(path, array.fill_null(False).cast(pa.uint8()).to_numpy(zero_copy_only=False))
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
            full = array.fill_null(0) if array.null_count else array
            self._leaf(path, np.ascontiguousarray(full.to_numpy(zero_copy_only=False)))
        elif not pa.types.is_null(kind):  # dates, decimals, maps: rare beside prompts
            self._leaf(path, np.frombuffer("".join(f"{value!r}\0" for value in array.to_pylist()).encode(), np.uint8))

    def _leaf(self, path: str, values: NDArray[Any]) -> None:
        self._leaves.setdefault(path, xxhash.xxh3_128()).update(values.tobytes())

    def hexdigest(self) -> str:
        """Of all values so far."""
        listed = "\n".join(f"{path} {state.hexdigest()}" for path, state in sorted(self._leaves.items()))
        return xxhash.xxh3_128_hexdigest(listed.encode())
