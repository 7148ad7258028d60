"""The answers of a run as an Arrow table, from shards, ledger and outcomes, gap by gap.

No Python object is made for a token or an answer. Only the answers of one step are verified, as the learner verifies
them; of a whole run that would read every byte (`headway audit` does).

Shape suffixes: `_G` rows (groups) of one shard, `_N` their answers, `_R` version runs of all its answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rl_core.errors import ShardCorrupt
from rl_core.experience.columns import (
    digest_of_digests,
    first_of_session,
    fixed_values,
    list_values,
    nested_offsets,
    valid_bits,
)
from rl_core.experience.facts import members_of, starts_of
from rl_core.experience.reader import ensure_not_retired, retired_shards
from rl_core.experience.verify import digested_batch, shard_key
from rl_core.gaps import Gaps, found
from rl_core.group_facts import read_group_facts
from rl_core.landed_groups import GROUP_SCHEMA, Shard, checked_batch, group_table, join_groups
from rl_core.run_dir import RunDir
from rl_core.types import FINISH_CODES, Claim
from rl_core.versions import read_versions

OF_GROUP = ("group_id", "state", "step", "data_source", "dataset_epoch", "position", "prompt_idx", "try")
"""Columns that an answer takes from its group."""
INTS = pa.list_(pa.int32())
ANSWER_SCHEMA = pa.schema([
    *(GROUP_SCHEMA.field(name) for name in OF_GROUP), ("answer", pa.int32()), ("session", pa.int32()),
    ("reward", pa.float32()),
    ("correct", pa.float32()), ("extracted", pa.string()), ("length", pa.int32()), ("finish", pa.string()),
    ("versions", INTS), ("mixed", pa.bool_()), ("idx_min", pa.int32()), ("idx_max", pa.int32()), ("age", pa.int32()),
    ("seed", pa.int64())])
"""Columns of `answer_table`; frames.md section 3 says what they hold."""
TOKEN_SCHEMA = pa.schema([("prompt_ids", INTS), ("response_ids", INTS), ("behavior_logprobs", pa.list_(pa.float32())),
                          ("loss_mask", pa.list_(pa.uint8())), ("ver_run_end", INTS)])
FINISH_NAMES = sorted(FINISH_CODES, key=lambda name: FINISH_CODES[name])
"""By code."""


def answer_table(run: RunDir, step: int | None = None, *, tokens: bool = False, gaps: Gaps | None = None) -> pa.Table:
    """One row per landed answer in order of (stream, seq, row); with `step`, per answer of that step's claim, verified,
    in training order.

    Columns: ANSWER_SCHEMA, then `part_<name>` of every reward part. `tokens` adds TOKEN_SCHEMA: for a whole run those
    are all the bytes of its shards, mapped, not read before they are used. Raises FileNotFoundError for a step without
    a claim.
    """
    batches: dict[tuple[str, int], pa.RecordBatch] = {}
    if step is None:
        groups = group_table(run, gaps)
    else:
        facts = read_group_facts(run, step=step)
        batches = claimed_shards(run, facts.claims[step], gaps)
        groups = join_groups(facts, [Shard(*key, batch) for key, batch in batches.items()])
        groups = groups.filter(pc.equal(groups.column("step"), step))
    whole = answers_of(run, groups, batches, tokens=tokens, gaps=gaps)
    if step is not None and len(whole):
        whole = whole.sort_by([(name, "ascending") for name in ("dataset_epoch", "position", "try", "answer")])
    return whole


def answers_of(run: RunDir, groups: pa.Table, batches: Mapping[tuple[str, int], pa.RecordBatch] | None = None, *,
               tokens: bool = False, gaps: Gaps | None = None) -> pa.Table:
    """The answers of some rows of `group_table`, in order of (stream, seq, row).

    `batches`: shards that are open already.
    """
    of = run.origin if run.taken.exists() else run  # whose versions have sampled them
    versions = found(partial(read_versions, of), str(of.versions), gaps) or {}
    idx_of = {v: version.idx for v, version in versions.items()}
    opened = batches or {}
    pieces = [pa.schema([*ANSWER_SCHEMA, *(TOKEN_SCHEMA if tokens else ())]).empty_table()]
    for key, rows in _by_shard(groups.filter(pc.is_valid(groups.column("n_responses")))):
        path = run.shard(*key)
        batch = opened[key] if key in opened else found(partial(checked_batch, path), str(path), gaps)
        if batch is not None:
            pieces.append(_answers(batch, rows, idx_of, tokens=tokens))
    return pa.concat_tables(pieces, promote_options="default")


def claimed_shards(run: RunDir, claim: Claim, gaps: Gaps | None) -> dict[tuple[str, int], pa.RecordBatch]:
    """The shards of one claim whose digest is the claimed one; that some are retired is one gap."""
    batches: dict[tuple[str, int], pa.RecordBatch] = {}
    found(partial(ensure_not_retired, run, claim), f"step {claim.step}", gaps)
    for key in sorted({(group.stream, group.seq) for group in claim.groups} - retired_shards(run, claim)):
        batch = found(partial(_claimed, run.shard(*key), claim.shard_digests.get(shard_key(*key))),
                      str(run.shard(*key)), gaps)
        if batch is not None:
            batches[key] = batch
    return batches


def truth_of(meta_json: str) -> str | None:
    """The ground truth in a group's facts; None where they do not have one."""
    try:
        meta: Any = json.loads(meta_json)
    except ValueError:
        return None
    truth: Any = cast(Mapping[str, Any], meta).get("answer") if isinstance(meta, dict) else None
    return None if truth is None else str(truth)


def _claimed(path: Path, expected: str | None) -> pa.RecordBatch:
    batch, digests = digested_batch(path)
    if (digest := digest_of_digests(digests.items())) != expected:
        raise ShardCorrupt(f"{path}: has digest {digest}, the claim says {expected}")
    return batch


def _by_shard(groups: pa.Table) -> Iterator[tuple[tuple[str, int], pa.Table]]:
    """The rows of each shard, in order of row."""
    groups = groups.sort_by([(name, "ascending") for name in ("stream", "seq", "row")])
    keys: list[tuple[str, int]] = list(zip(groups.column("stream").to_pylist(), groups.column("seq").to_pylist(),
                                           strict=True))
    for key, lo, hi in _runs_of(keys):
        yield key, groups.slice(lo, hi - lo)


def _runs_of(keys: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], int, int]]:
    """`(key, begin, end)` of each run of equal keys."""
    lo = 0
    for hi in range(1, len(keys) + 1):
        if hi == len(keys) or keys[hi] != keys[lo]:
            yield keys[lo], lo, hi
            lo = hi


def _answers(batch: pa.RecordBatch, rows: pa.Table, idx_of: Mapping[int, int], *, tokens: bool) -> pa.Table:
    """The answers of some groups of one shard. Small columns are chosen by NumPy, lists and texts by Arrow."""
    row_G = _numpy(rows, "row")
    offsets, reward = list_values(batch.column("reward"))
    count_G = (offsets[row_G + 1] - offsets[row_G]).astype(np.int64)
    member_N = members_of(offsets[row_G].astype(np.int64), count_G)
    """Number of each answer among all of the shard."""
    parent_N = np.repeat(np.arange(len(row_G)), count_G)
    _, token_offsets = nested_offsets(batch.column("response_ids"))
    finish = fixed_values(batch.column("finish_reason").values)[member_N]
    session_N = np.cumsum(first_of_session(batch))
    columns: dict[str, Any] = {name: rows.column(name).take(pa.array(parent_N)) for name in OF_GROUP} | {
        "answer": np.arange(len(member_N)) - starts_of(count_G)[parent_N],
        "session": session_N[member_N] - session_N[offsets[row_G]][parent_N],
        "reward": reward[member_N], "correct": _said(batch.column("correct"), member_N, offsets),
        "extracted": _said(batch.column("extracted"), member_N, offsets),
        "length": np.diff(token_offsets)[member_N],
        "finish": pa.array(FINISH_NAMES, pa.string()).take(pa.array(finish)),
        "seed": fixed_values(batch.column("sampling_seed").values)[member_N],
    } | _versions_of(batch, member_N, rows, parent_N, idx_of)
    columns["correct"] = pc.if_else(pc.is_nan(columns["correct"]), None, columns["correct"])
    table = pa.table({field.name: _column(columns[field.name], field.type) for field in ANSWER_SCHEMA})
    parts = batch.column("reward_parts")
    for child in parts.type:
        values = list_values(parts.field(child.name))[1][member_N]
        table = table.append_column(f"part_{child.name}", pa.array(values, pa.float32(), from_pandas=True))
    return _with_tokens(table, batch, row_G[parent_N], member_N) if tokens else table


def _with_tokens(table: pa.Table, batch: pa.RecordBatch, row_N: NDArray[np.int64],
                 member_N: NDArray[np.int64]) -> pa.Table:
    for field in TOKEN_SCHEMA:
        if field.name == "prompt_ids":
            lists = batch.column("prompt_ids").take(pa.array(row_N))
            own = batch.column("response_prompt_ids")
            if own.null_count < len(own):
                lists = pc.coalesce(_said(own, member_N, list_values(batch.column("reward"))[0]), lists)
        else:
            lists = pc.list_flatten(batch.column(field.name))  # of all answers of the shard, without a copy
            if not np.array_equal(member_N, np.arange(len(lists))):
                lists = lists.take(pa.array(member_N))
        table = table.append_column(field.name, lists.cast(field.type))
    return table


def _versions_of(batch: pa.RecordBatch, member_N: NDArray[np.int64], rows: pa.Table, parent_N: NDArray[np.int64],
                 idx_of: Mapping[int, int]) -> dict[str, Any]:
    """Versions of each answer, the least and largest publication index among them, and the age at the claim.

    Null where a version has no manifest (any more).
    """
    per_answer = pc.list_flatten(batch.column("ver_run_value"))
    run_offsets, version_R = list_values(per_answer)
    used, place_R = np.unique(version_R, return_inverse=True)
    idx_R = np.array([idx_of.get(v, -1) for v in used.tolist()], np.int32)[place_R]
    least = np.minimum.reduceat(idx_R, run_offsets[:-1])[member_N]
    most = np.maximum.reduceat(idx_R, run_offsets[:-1])[member_N]
    mixed = (np.minimum.reduceat(version_R, run_offsets[:-1])
             != np.maximum.reduceat(version_R, run_offsets[:-1]))[member_N]
    unknown = least < 0
    claim_idx = pc.add(rows.column("age"), rows.column("idx_min")).take(pa.array(parent_N))
    idx_min = pa.array(least, pa.int32(), mask=unknown)
    return {"versions": per_answer.take(pa.array(member_N)), "mixed": pa.array(mixed), "idx_min": idx_min,
            "idx_max": pa.array(most, pa.int32(), mask=unknown), "age": pc.subtract(claim_idx, idx_min)}


def _said(column: pa.Array, member_N: NDArray[np.int64], offsets: NDArray[np.int32]) -> pa.Array:
    """A column of one entry per answer that is null for the groups where nothing is said."""
    valid_G = valid_bits(column)
    count_G = np.diff(offsets)
    valid_N = np.repeat(valid_G, count_G)
    place_N = np.cumsum(valid_N) - 1
    return column.flatten().take(pa.array(place_N[member_N], pa.int64(), mask=~valid_N[member_N]))


def _numpy(table: pa.Table, name: str) -> NDArray[np.int64]:
    return np.array(table.column(name).to_pylist(), np.int64)


def _column(values: Any, kind: pa.DataType) -> Any:
    return pa.array(values, kind) if isinstance(values, np.ndarray) else values.cast(kind)
