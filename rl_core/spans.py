"""Spans as they stand in files: rows `[name, begin_us, end_us]`, with a fourth entry where `of` is said.

    records/step-<k>.json, `spans`        the learner (rank 0), since the record before
    a shard's metadata, `rl.spans`        the rollout worker, since the shard before
    checkpoints/n-<n>/manifest, `spans`   the learner, since the last record: what is behind the last one, too

They are written with what their owner writes anyway. What a part did after its last file is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from rl_core.types import Span

Row = list[Any]
SPANS = "rl.spans"
"""Key of a shard's metadata."""


def as_rows(spans: Iterable[Span]) -> list[Row]:
    """`[Span("busy", 5, 9, 3)]` -> `[["busy", 5, 9, 3]]`."""
    return [[span.name, span.begin_us, span.end_us, *([] if span.of is None else [span.of])] for span in spans]


def as_spans(rows: Iterable[Any]) -> tuple[Span, ...]:
    """What `as_rows` made. Raises ValueError for a row that is none."""
    found: list[Span] = []
    for row in rows:
        match row:
            case [str(), int(), int()] | [str(), int(), int(), int()]:
                found.append(Span(*cast(tuple[str, int, int], tuple(row))))
            case _:
                raise ValueError(f"not a span: {str(row)[:80]} (a name, two moments in microseconds, and a number)")
    return tuple(found)
