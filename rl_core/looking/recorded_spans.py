"""What a run's files say of when its parts did what: the raw material of the timeline.

| file | says |
| --- | --- |
| records/step-<k>.json | states of the learner's interval ledger, and stages of the step |
| checkpoints/n-<n>/manifest.json | the same since the last record |
| metadata of a shard | states of the worker's interval ledger since the shard before, and how that one landed |
| rows of a shard | when a group was dispatched, its last answer was there, its last reward was there |
| validations/step-<k>.json | when a validation ended, and how long it took |

Every moment is one that its part has read from its clock and written down; where nothing was written there is a hole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from rl_core.gaps import Gaps, found
from rl_core.landed_groups import Shard
from rl_core.metrics import State
from rl_core.run_dir import RunDir, numbered, read_json
from rl_core.spans import SPANS, as_spans
from rl_core.types import Span, StepRecord

MANIFEST = "manifest.json"
STATES = get_args(State)


def states_of(spans: Iterable[Span]) -> list[Span]:
    """The states of an interval ledger among them, in order, each in one piece however often it was written down.

    Example: busy 0-4, busy 4-9, waiting 9-12, busy 0-4 once more -> busy 0-9, waiting 9-12.
    """
    whole: list[Span] = []
    ledger = sorted((span for span in spans if span.name in STATES), key=lambda span: (span.begin_us, span.end_us))
    for span in ledger:
        last = whole[-1] if whole else None
        if last is not None and (last.name, last.of) == (span.name, span.of) and span.begin_us <= last.end_us:
            whole[-1] = Span(span.name, last.begin_us, max(last.end_us, span.end_us), span.of)
        else:
            whole.append(span)
    return whole


def stages_of(spans: Iterable[Span]) -> list[Span]:
    """What is no state of a ledger among them, each once, in order."""
    return sorted({span for span in spans if span.name not in STATES}, key=lambda span: (span.begin_us, span.end_us))


def learner_spans(run: RunDir, records: Iterable[StepRecord], gaps: Gaps | None = None) -> list[Span]:
    """Those of the learner (rank 0), from these records and the checkpoints that are kept."""
    spans = [span for record in records for span in record.spans]
    for _, directory in numbered(run.checkpoints, r"n-(\d{9})"):
        kept = found(partial(_of_manifest, directory / MANIFEST), str(directory / MANIFEST), gaps)
        spans += kept or ()
    return spans


def _of_manifest(path: Path) -> tuple[Span, ...]:
    return as_spans(read_json(path).get("spans", ()))


def worker_spans(shard: Shard) -> tuple[Span, ...]:
    """Those of the worker that wrote this shard, since its shard before. Raises ValueError for what are none."""
    metadata: Mapping[bytes, bytes] = shard.batch.schema.metadata or {}
    raw = metadata.get(SPANS.encode())
    return () if raw is None else as_spans(json.loads(raw))


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """One landed group: microseconds since 1970 UTC, by its worker's clock."""

    group_id: str
    answers: int
    tokens: int
    idx_min: int
    idx_max: int
    dispatched_us: int
    answered_us: int | None
    """The engine gave its last answer; None where the shard does not say it."""
    finished_us: int
    """The last of its rewards was there."""


def group_times(shard: Shard) -> Iterator[GroupTimes]:
    """The groups of one shard, row by row."""
    batch = shard.batch
    columns: list[list[Any]] = [batch.column(name).to_pylist() for name in (
        "group_id", "n_responses", "n_tokens", "idx_min", "idx_max", "meta_json")]
    columns += [batch.column(name).cast(pa.int64()).to_pylist() for name in ("dispatched_at", "finished_at")]
    for group_id, answers, tokens, oldest, newest, meta, dispatched, finished in zip(*columns, strict=True):
        yield GroupTimes(group_id, answers, tokens, oldest, newest, dispatched,
                         json.loads(meta).get("answered_at_us"), finished)


def by_worker(shards: Iterable[Shard]) -> Iterator[tuple[str, list[Shard]]]:
    """The shards of each worker by its name, over all its incarnations."""
    for name, group in groupby(shards, key=lambda shard: worker_of(shard.stream)):
        yield name, list(group)


def worker_of(stream: str) -> str:
    """`worker_of("rollout-0-0123456789ab")` -> `"rollout-0"`."""
    return stream.rsplit("-", 1)[0]
