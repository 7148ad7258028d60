"""The ledger: one immutable file per training step, created by link before the step runs (experience-store.md 3.5).

`ledger/<consumer>/`:

    step-<k>.json        the claim: which groups step k consumes. Whoever created it, it IS the claim of step k
    step-<k>.void.json   step k trains nothing (only while it has no record)
    drops-<k>-<i>.json   groups that no claim will take, judged while waiting for claim k
    end-<revision>.json  the source has ended, or the steps are done
    retired-<R>-<i>.json shards that no step from R on needs; written before they are removed
    snap-<k>.arrow       what a start needs of all claims below k (snapshots.py); can be made again from them

This module reads and writes these files. What to claim is chosen by `index.py`; waiting is `experience.py`.
Importable without torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from rl_core.errors import BrokenFile
from rl_core.run_dir import RunDir, check_attempt, file_numbers, numbered, put_if_absent, read_json, to_json
from rl_core.types import Claim, ClaimedGroup, Drop, Segment

CONSUMER = "learner"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfData:
    """Nothing more will be claimed under this config revision: `EndOfData(step=12, reason="data", left_over=3)`."""

    step: int
    """The step that has no claim."""
    reason: Literal["data", "steps"]
    left_over: int
    """Usable landed groups that no claim took: fewer than `groups_per_step` when the data ended."""


# -- claims ------------------------------------------------------------------------------------------------------------


def segments_of(groups: Sequence[ClaimedGroup]) -> tuple[Segment, ...]:
    """Runs of neighbouring rows by shard, in order of (stream, seq, lo).

    Rows 3, 4, 7 of one shard -> `Segment(lo=3, hi=5)`, `Segment(lo=7, hi=8)`.
    """
    segments: list[Segment] = []
    for group in sorted(groups, key=lambda g: (g.stream, g.seq, g.row)):
        last = segments[-1] if segments else None
        if last and (last.stream, last.seq, last.hi) == (group.stream, group.seq, group.row):
            segments[-1] = Segment(stream=last.stream, seq=last.seq, lo=last.lo, hi=group.row + 1)
        else:
            segments.append(Segment(stream=group.stream, seq=group.seq, lo=group.row, hi=group.row + 1))
    return tuple(segments)


def group_ids_digest(group_ids: Iterable[str]) -> str:
    """xxh3_128 over the group ids in training order."""
    return xxhash.xxh3_128_hexdigest("\n".join(group_ids).encode())


def claim_digest(claim: Claim) -> str:
    """xxh3_128 over all of a claim that a training step is a function of: groups, rows, shard digests, masks.

    Attempt and time are left out: two attempts that claim the same data claim the same.
    """
    payload = _content(claim)
    for name in ("attempt", "ts_us", "dropped"):
        payload.pop(name)
    return xxhash.xxh3_128_hexdigest(to_json(payload))


def _content(claim: Claim) -> dict[str, Any]:
    segments = segments_of(claim.groups)
    where = {(s.stream, s.seq, row): n for n, s in enumerate(segments) for row in range(s.lo, s.hi)}
    return {
        "step": claim.step, "idx": claim.idx, "attempt": claim.attempt, "consumer": claim.consumer, "eta": claim.eta,
        "hard_max": claim.hard_max, "policy": claim.policy, "revision": claim.revision,
        "groups": [[g.dataset_epoch, g.position, g.try_no, g.prompt_idx] for g in claim.groups],
        "segments": [[s.stream, s.seq, s.lo, s.hi] for s in segments],
        "rows": [[where[g.stream, g.seq, g.row], g.row] for g in claim.groups],
        "group_ids_digest": claim.group_ids_digest, "shard_digests": claim.shard_digests,
        "masked": [list(pair) for pair in claim.masked], "dropped": [_drop_json(drop) for drop in claim.dropped],
        "ts_us": claim.ts_us,
    }


def claim_to_json(claim: Claim) -> bytes:
    """`groups[i]` = [dataset_epoch, position, try, prompt_idx] lies in row `rows[i][1]` of segment `rows[i][0]`."""
    return to_json(_content(claim))


def claim_from_json(payload: dict[str, Any]) -> Claim:
    """The claim that `claim_to_json` wrote."""
    segments: list[list[Any]] = payload["segments"]
    groups = tuple(
        ClaimedGroup(dataset_epoch=epoch, position=position, try_no=try_no, prompt_idx=prompt_idx,
                     stream=segments[segment][0], seq=segments[segment][1], row=row)
        for (epoch, position, try_no, prompt_idx), (segment, row)
        in zip(payload["groups"], payload["rows"], strict=True))
    return Claim(
        step=payload["step"], idx=payload["idx"], attempt=payload["attempt"], consumer=payload["consumer"],
        eta=payload["eta"], hard_max=payload["hard_max"], policy=payload["policy"], groups=groups,
        group_ids_digest=payload["group_ids_digest"], shard_digests=payload["shard_digests"],
        masked=tuple((ordinal, n) for ordinal, n in payload["masked"]),
        dropped=tuple(_drop_from_json(entry) for entry in payload["dropped"]),
        revision=payload["revision"], ts_us=payload["ts_us"])


def read_claim_file(path: Path) -> Claim:
    """Raises BrokenFile where the group ids do not match their digest."""
    claim = claim_from_json(read_json(path))
    if group_ids_digest(g.group_id for g in claim.groups) != claim.group_ids_digest:
        raise BrokenFile(f"{path}: the group ids do not match their digest")
    return claim


def read_claim(run: RunDir, step: int, consumer: str = CONSUMER) -> Claim:
    """The claim of step k. Raises FileNotFoundError where there is none."""
    return read_claim_file(run.claim(step, consumer))


def claimed_steps(run: RunDir, consumer: str = CONSUMER) -> list[int]:
    """Steps that have a claim, ascending. Raises BrokenFile naming the gap if they are not 0, 1, 2, ..."""
    steps = file_numbers(run.ledger(consumer), r"step-(\d{9})\.json")
    if steps and steps[-1] != len(steps) - 1:
        gap = next(k for k, step in enumerate(steps) if k != step)
        raise BrokenFile(f"{run.claim(gap, consumer)}: absent, but step {steps[-1]} has a claim; the ledger has a gap")
    return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """What all claims of a run have taken, without one Python object per group."""

    steps: int
    """Claims 0 to steps - 1 exist."""
    groups_G4: NDArray[np.int64]
    """Columns dataset_epoch, position, try, prompt_idx."""
    rows_by_shard: dict[tuple[str, int], int]
    dropped: tuple[Drop, ...]


def read_claimed(run: RunDir, consumer: str = CONSUMER, *, first: int = 0, below: int | None = None) -> Claimed:
    """The claims of steps first .. below - 1 (None: to the last) at once, as the index needs them; `steps` counts from
    step 0 on. Raises BrokenFile for a gap or a file that cannot be read.

    Digests are not checked here: whoever trains a claim reads it by `read_claim`.
    """
    groups: list[NDArray[np.int64]] = [np.zeros((0, 4), np.int64)]
    rows: dict[tuple[str, int], int] = {}
    dropped: list[Drop] = []
    steps = claimed_steps(run, consumer)[:below]
    for step in steps[first:]:
        payload = read_json(run.claim(step, consumer))
        groups.append(np.array(payload["groups"], np.int64).reshape(-1, 4))
        for stream, seq, lo, hi in payload["segments"]:
            rows[stream, seq] = rows.get((stream, seq), 0) + hi - lo
        dropped += [_drop_from_json(entry) for entry in payload["dropped"]]
    return Claimed(steps=len(steps), groups_G4=np.concatenate(groups), rows_by_shard=rows, dropped=tuple(dropped))


def claims(run: RunDir, first: int = 0, consumer: str = CONSUMER) -> Iterator[Claim]:
    """The claims of steps first, first + 1, ... in order."""
    for step in claimed_steps(run, consumer)[first:]:
        yield read_claim(run, step, consumer)


def put_claim(run: RunDir, claim: Claim, *, fsync: bool = True) -> Claim:
    """Create the claim of its step, or adopt the one that exists. Returns the claim that stands.

    Raises StaleAttempt if a newer attempt owns the run: then nothing is created by this process, and nothing adopted.
    """
    check_attempt(run, claim.attempt)
    if put_if_absent(run.claim(claim.step, claim.consumer), claim_to_json(claim), fsync=fsync):
        return claim
    check_attempt(run, claim.attempt)
    return read_claim(run, claim.step, claim.consumer)


# -- drops -------------------------------------------------------------------------------------------------------------


def _drop_json(drop: Drop) -> list[Any]:
    return [drop.group_id, drop.reason, drop.n_tokens]


def _drop_from_json(entry: list[Any]) -> Drop:
    return Drop(group_id=entry[0], reason=entry[1], n_tokens=entry[2])


def put_drops(run: RunDir, step: int, drops: Sequence[Drop], *, attempt: int, consumer: str = CONSUMER,
              fsync: bool = True) -> Path:
    """Record groups that no claim will take, judged while waiting for the claim of `step`. Returns the file created.

    Raises StaleAttempt if a newer attempt owns the run.
    """
    return _put_next(run, "drops", step, {"dropped": [_drop_json(drop) for drop in drops]}, attempt=attempt,
                     consumer=consumer, fsync=fsync)


def _put_next(run: RunDir, kind: Literal["drops", "retired"], step: int, content: dict[str, Any], *, attempt: int,
              consumer: str, fsync: bool = True) -> Path:
    """Create the next `<kind>-<step>-<i>.json`, i from 0; returns it. Raises StaleAttempt."""
    check_attempt(run, attempt)
    place = {"drops": run.drops, "retired": run.retired}[kind]
    taken = file_numbers(run.ledger(consumer), rf"{kind}-{step:09d}-(\d{{6}})\.json")
    i = max(taken, default=-1) + 1
    while True:
        payload = {"step": step, "i": i, "attempt": attempt, **content, "ts_us": time.time_ns() // 1000}
        if put_if_absent(place(step, i, consumer), to_json(payload), fsync=fsync):
            return place(step, i, consumer)
        check_attempt(run, attempt)
        i += 1


def drop_files(run: RunDir, consumer: str = CONSUMER) -> list[Path]:
    """In order of (step, i)."""
    return [path for _, path in numbered(run.ledger(consumer), r"drops-(\d{9})-\d{6}\.json")]


def read_drops(path: Path) -> tuple[Drop, ...]:
    """The drops of one file of `drop_files`. Raises BrokenFile."""
    return tuple(_drop_from_json(entry) for entry in read_json(path)["dropped"])


def drop_number(path: Path) -> tuple[int, int]:
    """(step, i) of one file of `drop_files`."""
    _, step, i = path.stem.split("-")
    return int(step), int(i)


# -- retired shards ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RetiredRow:
    """A row of a retired shard that claims alone do not tell of."""

    group_id: str
    dataset_epoch: int
    position: int
    idx_min: int
    stream: str
    seq: int
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retired:
    """All that `retired-*.json` say."""

    shards: frozenset[tuple[str, int]] = frozenset()
    rows: tuple[RetiredRow, ...] = ()
    """Every row of those shards that claims had not used up to the last row."""
    below: int = 0
    """No step from here on needs any of them."""


def put_retired(run: RunDir, step: int, shards: Sequence[tuple[str, int]], rows: Sequence[RetiredRow], *, attempt: int,
                consumer: str = CONSUMER) -> Path:
    """Record, durably, that no step from `step` on needs these shards. Returns the file created.

    Raises StaleAttempt if a newer attempt owns the run.
    """
    rows_json = [[r.group_id, r.dataset_epoch, r.position, r.idx_min, r.stream, r.seq, r.row] for r in rows]
    return _put_next(run, "retired", step, {"shards": _spans(shards), "rows": rows_json}, attempt=attempt,
                     consumer=consumer)


def _spans(shards: Sequence[tuple[str, int]]) -> list[list[Any]]:
    """`[("w", 3), ("w", 4), ("w", 7)]` -> `[["w", 3, 5], ["w", 7, 8]]`."""
    spans: list[list[Any]] = []
    for stream, seq in sorted(shards):
        if spans and spans[-1][0] == stream and spans[-1][2] == seq:
            spans[-1][2] = seq + 1
        else:
            spans.append([stream, seq, seq + 1])
    return spans


def retired_below(run: RunDir, consumer: str = CONSUMER) -> int:
    """The largest R that shards were retired behind: steps from there on have all of theirs. By file names alone."""
    return max(file_numbers(run.ledger(consumer), r"retired-(\d{9})-\d{6}\.json"), default=0)


def read_retired(run: RunDir, consumer: str = CONSUMER) -> Retired:
    """Every shard that was retired, whether it is removed yet or not. Raises BrokenFile."""
    shards: set[tuple[str, int]] = set()
    rows: list[RetiredRow] = []
    below = 0
    for step, path in numbered(run.ledger(consumer), r"retired-(\d{9})-\d{6}\.json"):
        payload, below = read_json(path), step
        for stream, lo, hi in payload["shards"]:
            shards.update((stream, seq) for seq in range(lo, hi))
        rows += [RetiredRow(group_id=name, dataset_epoch=epoch, position=position, idx_min=idx_min, stream=stream,
                            seq=seq, row=row) for name, epoch, position, idx_min, stream, seq, row in payload["rows"]]
    return Retired(shards=frozenset(shards), rows=tuple(rows), below=below)


# -- void and end ------------------------------------------------------------------------------------------------------


def void_step(run: RunDir, step: int, *, reason: str, attempt: int, consumer: str = CONSUMER) -> bool:
    """Let a claimed step train nothing. It keeps its number in every schedule. False if it was voided before.

    Raises ValueError if the step has no claim, or has a record: what was trained is not undone, it is forked.
    """
    check_attempt(run, attempt)
    if not run.claim(step, consumer).exists():
        raise ValueError(f"step {step} has no claim; there is nothing to void")
    if run.record(step).exists():
        raise ValueError(f"step {step} has a record: it was trained; fork the run from step {step} instead")
    payload = {"step": step, "reason": reason, "attempt": attempt, "ts_us": time.time_ns() // 1000}
    return put_if_absent(run.void(step, consumer), to_json(payload))


def voided_steps(run: RunDir, consumer: str = CONSUMER) -> dict[int, str]:
    """Voided step -> reason."""
    return {k: read_json(path)["reason"] for k, path in numbered(run.ledger(consumer), r"step-(\d{9})\.void\.json")}


def put_end(run: RunDir, end: EndOfData, *, revision: int, attempt: int, consumer: str = CONSUMER) -> EndOfData:
    """Record that this config revision has ended, or return the record that stands."""
    check_attempt(run, attempt)
    payload = {"k": end.step, "reason": end.reason, "left_over": end.left_over, "attempt": attempt,
               "ts_us": time.time_ns() // 1000}
    if put_if_absent(run.end(revision, consumer), to_json(payload)):
        return end
    return cast(EndOfData, read_end(run, revision, consumer))


def read_end(run: RunDir, revision: int, consumer: str = CONSUMER) -> EndOfData | None:
    """How this config revision ended; None while it has not."""
    try:
        payload = read_json(run.end(revision, consumer))
    except FileNotFoundError:
        return None
    return EndOfData(step=payload["k"], reason=payload["reason"], left_over=payload["left_over"])
