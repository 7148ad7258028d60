"""From finished groups to one record batch of schema.py.

No Python object per token is made. Arrays are wrapped as Arrow buffers by hand: `pa.array` of a list would be slower,
and imports pandas into every rollout worker.

Shape suffixes: `_L` tokens of one response, `_N` responses of the batch, `_G` groups of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_core.experience.schema import MAX_GROUPS, SESSION, SESSION_FIELD, TOKEN_DTYPES, cached_schema
from rl_core.experience.staging import Staging
from rl_core.types import FINISH_CODES, Score, Trajectory, TrajectoryGroup


def n_tokens(group: TrajectoryGroup) -> int:
    """Tokens of a group: the prompt once, all responses, and the prompts that some of them have of their own."""
    own = sum(t.prompt_ids_P.size for t in group.trajectories if t.prompt_ids_P is not None)
    return group.lease.prompt.token_ids_P.size + own + sum(t.token_ids_L.size for t in group.trajectories)


def group_nbytes(group: TrajectoryGroup) -> int:
    """Bytes that one group takes in a shard, slightly over-estimated."""
    tokens = sum(t.token_ids_L.size for t in group.trajectories)
    runs = sum(t.version_runs.end_R.size + t.turn_end.size for t in group.trajectories)
    texts = sum(len(t.score.extracted or "") * 4 for t in group.trajectories)
    meta = sum(len(str(value)) * 4 for value in group.meta.values()) + len(group.lease.prompt.answer) * 6
    prompt = 4 * group.lease.prompt.token_ids_P.size
    if any(t.prompt_ids_P is not None for t in group.trajectories):
        prompt += 4 * sum(_prompt_of(group, t).size for t in group.trajectories)
    return 9 * tokens + prompt + 8 * runs + 64 * len(group.trajectories) + texts + meta + 512


def _offsets(counts: Any) -> NDArray[np.int32]:
    """`_offsets([2, 3])` -> `[0, 2, 5]`."""
    out = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def _buffer(values: NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(values)


def _fixed(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Values of a fixed width, not copied."""
    return pa.Array.from_buffers(kind, values.size, [None, _buffer(values)])


def _bitmap(valid: NDArray[np.bool_]) -> pa.Buffer | None:
    return None if valid.all() else _buffer(np.packbits(valid, bitorder="little"))


def _strings(texts: Sequence[str | None], name: str) -> pa.Array:
    """Texts as a column. Raises DataError, with the column's name, for one that UTF-8 cannot hold."""
    try:
        data = [b"" if text is None else text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise DataError(f"{name} {error.object[:80]!r} cannot be encoded as UTF-8 ({error.reason})") from error
    valid = np.array([text is not None for text in texts], np.bool_)
    return pa.Array.from_buffers(pa.string(), len(data), [_bitmap(valid), _buffer(_offsets([len(d) for d in data])),
                                                          pa.py_buffer(b"".join(data))])


def _lists(offsets: NDArray[np.int32], values: pa.Array, kind: pa.DataType, valid: NDArray[np.bool_] | None = None,
           ) -> pa.Array:
    bitmap = None if valid is None else _bitmap(valid)
    return pa.Array.from_buffers(kind, offsets.size - 1, [bitmap, _buffer(offsets)], children=[values])


def _struct(columns: Sequence[pa.Array], kind: pa.DataType, n: int) -> pa.Array:
    return pa.Array.from_buffers(kind, n, [None], children=list(columns))


def _flat(arrays: Sequence[NDArray[Any]], dtype: Any, name: str, pool: Staging | None) -> NDArray[Any]:
    """One array after the other, in a buffer of the pool that is named as the column."""
    dtypes, dimensions, wanted = [a.dtype for a in arrays], [a.ndim for a in arrays], np.dtype(dtype)
    if dtypes.count(wanted) != len(arrays) or dimensions.count(1) != len(arrays):
        bad = next(i for i in range(len(arrays)) if dtypes[i] != wanted or dimensions[i] != 1)
        raise DataError(f"{name} is {dtypes[bad]} with {dimensions[bad]} dimensions; a shard stores 1-D {wanted}")
    size = sum(a.size for a in arrays)
    out = np.empty(size, dtype) if pool is None else pool.take(name, size, dtype)
    return np.concatenate(arrays, out=out)


def _refuse(groups: Sequence[TrajectoryGroup], bad_N: NDArray[np.bool_], text: str) -> None:
    """Raise DataError naming the group and response of the first True."""
    if not bad_N.any():
        return
    ordinal = int(np.argmax(bad_N))
    for group in groups:
        if ordinal < len(group.trajectories):
            raise DataError(f"group {group.lease.group_id}, response {ordinal}: {text}")
        ordinal -= len(group.trajectories)


def _prompt_of(group: TrajectoryGroup, trajectory: Trajectory) -> NDArray[np.int32]:
    own = trajectory.prompt_ids_P
    return group.lease.prompt.token_ids_P if own is None else own


def session_numbers(group: TrajectoryGroup) -> list[int]:
    """Number of each trajectory's session in the group. Raises DataError where some have one and others none, where
    they are not 0, 1, 2 ... in order, and for trajectories of one session with other rewards."""
    given = [t.session for t in group.trajectories]
    numbers = [number for number in given if number is not None]
    if not numbers:
        return list(range(len(given)))
    name = group.lease.group_id
    if len(numbers) < len(given):
        raise DataError(f"group {name}: {len(given) - len(numbers)} trajectories are of no session, {len(numbers)} are")
    if numbers[0] != 0 or any(after - before not in (0, 1) for before, after in pairwise(numbers)):
        raise DataError(f"group {name}: its sessions are numbered {numbers}, not 0, 1, 2 ... one after the other")
    for i, (before, after) in enumerate(pairwise(group.trajectories), 1):
        if numbers[i] == numbers[i - 1] and before.score != after.score:
            raise DataError(f"group {name}, response {i}: its reward is {after.score.reward}, that of its session "
                            f"{before.score.reward}; a session has one score")
    return numbers


def _check_group(group: TrajectoryGroup) -> None:
    name, n = group.lease.group_id, len(group.trajectories)
    n = session_numbers(group)[-1] + 1 if n else 0
    if not 1 <= n <= group.lease.n_expected:
        raise DataError(f"group {name} has {n} responses of {group.lease.n_expected} expected")
    if group.lease.prompt.token_ids_P.size == 0:
        raise DataError(f"group {name} has an empty prompt")
    if not 0 <= group.idx_min <= group.idx_max:
        raise DataError(f"group {name}: idx_min {group.idx_min} and idx_max {group.idx_max} are not in order")
    for t in group.trajectories:
        if t.finish_reason not in FINISH_CODES:
            raise DataError(f"group {name}: an answer that ended as {t.finish_reason!r} never lands")
        if t.prompt_ids_P is not None and t.prompt_ids_P.size == 0:
            raise DataError(f"group {name}: a trajectory has an empty prompt of its own")


def _check_tokens(groups: Sequence[TrajectoryGroup], trajectories: Sequence[Trajectory], length_N: NDArray[np.int32],
                  logprobs: NDArray[np.float32], mask: NDArray[np.uint8]) -> None:
    """Lengths agree, at least one token, finite log-probs that are 0.0 where the mask is 0."""
    for name, sizes in (("behavior log-probs", [t.behavior_logprobs_L.size for t in trajectories]),
                        ("loss mask", [t.loss_mask_L.size for t in trajectories])):
        _refuse(groups, np.array(sizes) != length_N, f"{name} and token ids differ in length")
    _refuse(groups, length_N == 0, "has no token")
    start_N = _offsets(length_N)[:-1]
    if not np.isfinite(logprobs.sum()):
        _refuse(groups, np.logical_or.reduceat(~np.isfinite(logprobs), start_N), "a behavior log-prob is not finite")
    if mask.min() == 0:
        _refuse(groups, np.logical_or.reduceat((mask == 0) & (logprobs != 0.0), start_N),
                "a behavior log-prob is not 0.0 where the loss mask is 0")
    if mask.max() > 1:
        _refuse(groups, np.logical_or.reduceat(mask > 1, start_N), "a loss mask is neither 0 nor 1")


def _check_runs(groups: Sequence[TrajectoryGroup], length_N: NDArray[np.int32], runs_N: NDArray[np.int32],
                ends: NDArray[np.int32]) -> None:
    """Cumulative ends of version runs (or turns) grow from above 0 to the response's length."""
    _refuse(groups, runs_N == 0, "has no version run, or no turn")
    offsets = _offsets(runs_N)
    _refuse(groups, ends[offsets[1:] - 1] != length_N,
            "the last version run or turn does not end at the response's length")
    before = np.concatenate([np.zeros(1, np.int32), ends[:-1]])
    before[offsets[:-1]] = 0
    _refuse(groups, np.logical_or.reduceat(ends <= before, offsets[:-1]), "version runs or turns are not in order")


def part_names(groups: Sequence[TrajectoryGroup]) -> tuple[str, ...]:
    """Names of all reward parts of these groups, sorted."""
    return tuple(sorted({name for group in groups for t in group.trajectories for name in t.score.parts}))


def groups_to_batch(groups: Sequence[TrajectoryGroup], parts: Sequence[str] | None = None,
                    pool: Staging | None = None) -> pa.RecordBatch:
    """One record batch, one row per group, in the order given; with `pool`, valid until the pool is used again.

    `parts` are the names of the reward parts (default: all that occur, sorted); a missing part is NaN. `correct` is
    null for a group where no score says it, NaN for a single answer that does not. Raises DataError, naming the group,
    for whatever experience-store.md 3.2 forbids.
    """
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise DataError(f"a shard holds 1 to {MAX_GROUPS} groups, not {len(groups)}")
    for group in groups:
        _check_group(group)
    names = part_names(groups) if parts is None else tuple(parts)
    schema = cached_schema(names)
    columns = _scalar_columns(groups, schema) | _token_columns(groups, schema, pool) | _response_columns(groups, schema)
    columns |= score_columns([[t.score for t in group.trajectories] for group in groups], names)
    columns["baseline_reward"] = _baselines(groups)
    columns["response_prompt_ids"] = _own_prompts(groups, schema)
    columns["token_reward"] = pa.nulls(len(groups), schema.field("token_reward").type)
    if any(t.session is not None for group in groups for t in group.trajectories):
        numbers = np.array([number for group in groups for number in session_numbers(group)], np.int32)
        outer = _offsets([len(group.trajectories) for group in groups])
        columns[SESSION] = _lists(outer, _fixed(numbers, pa.int32()), SESSION_FIELD.type)
        schema = schema.append(SESSION_FIELD)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _scalar_columns(groups: Sequence[TrajectoryGroup], schema: pa.Schema) -> dict[str, pa.Array]:
    """Columns with one entry per group."""
    leases = [group.lease for group in groups]
    sampling = [lease.sampling for lease in leases]
    integers = {
        "dataset_epoch": [lease.prompt.dataset_epoch for lease in leases],
        "position": [lease.prompt.position for lease in leases],
        "prompt_idx": [lease.prompt.prompt_idx for lease in leases],
        "lease_no": [lease.lease_no for lease in leases],
        "n_responses": [len(group.trajectories) for group in groups],
        "n_expected": [lease.n_expected for lease in leases],
        "idx_dispatch": [lease.idx_dispatch for lease in leases],
        "idx_min": [group.idx_min for group in groups],
        "idx_max": [group.idx_max for group in groups],
        "n_tokens": [n_tokens(group) for group in groups],
        "dispatched_at": [group.dispatched_at_us for group in groups],
        "finished_at": [group.finished_at_us for group in groups],
    }
    settings = {"temperature": [s.temperature for s in sampling], "top_p": [s.top_p for s in sampling],
                "top_k": [s.top_k for s in sampling], "min_p": [s.min_p for s in sampling],
                "max_new": [s.max_new_tokens for s in sampling]}
    texts = {"group_id": [lease.group_id for lease in leases],
             "data_source": [lease.prompt.data_source for lease in leases],
             "meta_json": [json.dumps({"answer": g.lease.prompt.answer, **g.meta}) for g in groups]}
    prompts = [lease.prompt.token_ids_P for lease in leases]
    prompt_ids = _fixed(_flat(prompts, np.int32, "prompt_ids", None), pa.int32())
    return {name: _numbers(values, schema.field(name).type) for name, values in integers.items()} | {
        name: _strings(values, name) for name, values in texts.items()} | {
        "prompt_ids": _lists(_offsets([p.size for p in prompts]), prompt_ids, schema.field("prompt_ids").type),
        "sampling": _struct([_numbers(settings[child.name], child.type) for child in schema.field("sampling").type],
                            schema.field("sampling").type, len(groups))}


def _numbers(values: Sequence[float], kind: pa.DataType) -> pa.Array:
    """A list of numbers as a column. Raises OverflowError for an integer that its type cannot hold."""
    letter = "f" if pa.types.is_floating(kind) else "i"
    return _fixed(np.array(values, f"{letter}{kind.bit_width // 8}"), kind)


def _token_columns(groups: Sequence[TrajectoryGroup], schema: pa.Schema, pool: Staging | None) -> dict[str, pa.Array]:
    """The `list<list<T>>` columns: all of them over the same outer offsets, token columns also over the same inner."""
    trajectories = [t for group in groups for t in group.trajectories]
    length_N = np.array([t.token_ids_L.size for t in trajectories], np.int32)
    runs_N = np.array([t.version_runs.end_R.size for t in trajectories], np.int32)
    turns_N = np.array([t.turn_end.size for t in trajectories], np.int32)
    flat = {name: _flat(arrays, TOKEN_DTYPES.get(name, np.int32), name, pool) for name, arrays in (
        ("response_ids", [t.token_ids_L for t in trajectories]),
        ("behavior_logprobs", [t.behavior_logprobs_L for t in trajectories]),
        ("loss_mask", [t.loss_mask_L for t in trajectories]),
        ("ver_run_end", [t.version_runs.end_R for t in trajectories]),
        ("ver_run_value", [t.version_runs.version_R for t in trajectories]),
        ("turn_end", [t.turn_end for t in trajectories]))}
    _check_tokens(groups, trajectories, length_N, flat["behavior_logprobs"], flat["loss_mask"])
    _check_runs(groups, length_N, runs_N, flat["ver_run_end"])
    _check_runs(groups, length_N, turns_N, flat["turn_end"])
    values_N = np.array([t.version_runs.version_R.size for t in trajectories])
    _refuse(groups, values_N != runs_N, "version run ends and values differ in number")
    outer = _offsets([len(group.trajectories) for group in groups])
    tokens, runs = _offsets(length_N), _offsets(runs_N)
    inner = {"ver_run_end": runs, "ver_run_value": runs, "turn_end": _offsets(turns_N)}
    columns: dict[str, pa.Array] = {}
    for name, values in flat.items():
        kind = schema.field(name).type
        of_response = _lists(inner.get(name, tokens), _fixed(values, kind.value_type.value_type), kind.value_type)
        columns[name] = _lists(outer, of_response, kind)
    return columns


def _response_columns(groups: Sequence[TrajectoryGroup], schema: pa.Schema) -> dict[str, pa.Array]:
    """Columns with one entry per response."""
    trajectories = [t for group in groups for t in group.trajectories]
    outer = _offsets([len(group.trajectories) for group in groups])
    _refuse(groups, ~np.isfinite(np.array([t.score.reward for t in trajectories], np.float32)),
            "the reward is not finite")
    values = {"finish_reason": np.array([FINISH_CODES[t.finish_reason] for t in trajectories], np.int8),
              "sampling_seed": np.array([t.seed for t in trajectories], np.int64)}
    return {name: _lists(outer, _fixed(array, schema.field(name).type.value_type), schema.field(name).type)
            for name, array in values.items()}


def score_columns(scores_G: Sequence[Sequence[Score]], parts: Sequence[str]) -> dict[str, pa.Array]:
    """What the scores of each group's answers say, as the columns `reward`, `reward_parts`, `correct`, `extracted`.

    Raises DataError for a part that is not among `parts`.
    """
    schema, scores = cached_schema(tuple(parts)), [score for scores in scores_G for score in scores]
    outer = _offsets([len(scores) for scores in scores_G])
    reward_N = np.array([score.reward for score in scores], np.float32)
    columns = {"reward": _lists(outer, _fixed(reward_N, pa.float32()), schema.field("reward").type),
               "reward_parts": _reward_parts(scores, outer, parts, schema)}
    correct = [score.correct for score in scores]
    numbers = np.array([np.nan if c is None else c for c in correct], np.float32)
    keep_N, offsets, valid_G = _said(outer, np.array([c is not None for c in correct]))
    columns["correct"] = _lists(offsets, _fixed(numbers[keep_N], pa.float32()), schema.field("correct").type, valid_G)
    texts = [score.extracted for score in scores]
    keep_N, offsets, valid_G = _said(outer, np.array([text is not None for text in texts]))
    kept = [text for text, keep in zip(texts, keep_N.tolist(), strict=True) if keep]
    columns["extracted"] = _lists(offsets, _strings(kept, "extracted"), schema.field("extracted").type, valid_G)
    return columns


def _own_prompts(groups: Sequence[TrajectoryGroup], schema: pa.Schema) -> pa.Array:
    """What each response answers, whole; null for groups where all of them answer the group's prompt."""
    kind = schema.field("response_prompt_ids").type
    valid_G = np.array([any(t.prompt_ids_P is not None for t in group.trajectories) for group in groups])
    if not valid_G.any():
        return pa.nulls(len(groups), kind)
    prompts = [[_prompt_of(group, t) for t in group.trajectories] if valid else []
               for group, valid in zip(groups, valid_G.tolist(), strict=True)]
    flat = [prompt for of_group in prompts for prompt in of_group]
    ids = _fixed(_flat(flat, np.int32, "response_prompt_ids", None), pa.int32())
    of_response = _lists(_offsets([p.size for p in flat]), ids, kind.value_type)
    return _lists(_offsets([len(of_group) for of_group in prompts]), of_response, kind, valid_G)


def _baselines(groups: Sequence[TrajectoryGroup]) -> pa.Array:
    """Reward of each group's greedy answer; null where none was asked for."""
    valid_G = np.array([group.baseline_reward is not None for group in groups])
    reward_G = np.array([group.baseline_reward or 0.0 for group in groups], np.float32)
    if not np.isfinite(reward_G).all():
        bad = groups[int(np.argmin(np.isfinite(reward_G)))]
        raise DataError(f"group {bad.lease.group_id}: the reward of its greedy answer is {bad.baseline_reward}, not "
                        "finite")
    return pa.Array.from_buffers(pa.float32(), len(groups), [_bitmap(valid_G), _buffer(reward_G)])


def _said(outer: NDArray[np.int32], said_N: NDArray[np.bool_]) -> tuple[
        NDArray[np.bool_], NDArray[np.int32], NDArray[np.bool_]]:
    """A column that is null for groups where no response says it: (responses kept, list offsets, groups not null)."""
    valid_G = np.logical_or.reduceat(said_N, outer[:-1])
    counts = np.diff(outer)
    return np.repeat(valid_G, counts), _offsets(np.where(valid_G, counts, 0)), valid_G


def _reward_parts(scores: Sequence[Score], outer: NDArray[np.int32], names: Sequence[str],
                  schema: pa.Schema) -> pa.Array:
    unknown = {name for score in scores for name in score.parts} - set(names)
    if unknown:
        raise DataError(f"reward parts {sorted(unknown)} are not among those of the run: {sorted(names)}")
    kind = schema.field("reward_parts").type
    columns = [_lists(outer, _fixed(np.array([score.parts.get(child.name, np.nan) for score in scores], np.float32),
                                    pa.float32()), child.type) for child in kind]
    return _struct(columns, kind, outer.size - 1)
