"""Buffers that are reused, since fresh memory costs 17-25 times the copy into it, in page faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _plain(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


class Staging:
    """Named buffers that are reused from claim to claim, or from shard to shard, and grow when they must.

    Keep one per learner (two to read ahead). What `take` returns is valid until the same name is taken again.
    `allocate(nbytes)` may hand out pinned memory.
    """

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]] = _plain) -> None:
        self._allocate = allocate
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, size: int, dtype: Any) -> NDArray[Any]:
        """`size` writable values of `dtype`, contents undefined."""
        nbytes = size * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._allocate(nbytes + nbytes // 4 + 64)
            self._buffers[name] = buffer
        return buffer[:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
