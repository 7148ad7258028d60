"""Randomness is never carried: each use draws from a generator seeded by what it is for (experience-store.md 3.10)."""

from __future__ import annotations

import xxhash


def derive(*parts: int | str) -> int:
    """63-bit seed of the parts in order, stable over machines and versions.

    `derive(1, "e0-p12-t0", 3, 0, "sample")`
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
