from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rl_core.errors import DataError
from rl_core.experience.batch import group_nbytes, groups_to_batch
from rl_core.experience.schema import TOKEN_COLUMNS, schema_differs, shard_schema
from rl_core.types import Score, TrajectoryGroup, VersionRuns
from tests.builders import make_group

NULLABLE = {"response_prompt_ids", "token_reward", "correct", "extracted", "baseline_reward"}


def with_trajectory(group: TrajectoryGroup, j: int, **changes: Any) -> TrajectoryGroup:
    answers = list(group.trajectories)
    answers[j] = replace(answers[j], **changes)
    return replace(group, trajectories=tuple(answers))


def test_a_batch_holds_what_the_groups_held() -> None:
    groups = [make_group(i, n=3, versions=(2, 5), rewards=[0.5, 1.0, 0.0]) for i in (4, 9)]
    rows = groups_to_batch(groups).to_pylist()
    assert [row["group_id"] for row in rows] == ["e0-p4-t0", "e0-p9-t0"]
    for row, group in zip(rows, groups, strict=True):
        assert row["prompt_ids"] == group.lease.prompt.token_ids_P.tolist()
        assert row["response_ids"] == [t.token_ids_L.tolist() for t in group.trajectories]
        assert row["behavior_logprobs"] == [t.behavior_logprobs_L.tolist() for t in group.trajectories]
        assert row["loss_mask"] == [t.loss_mask_L.tolist() for t in group.trajectories]
        assert row["ver_run_end"] == [t.version_runs.end_R.tolist() for t in group.trajectories]
        assert row["ver_run_value"] == [t.version_runs.version_R.tolist() for t in group.trajectories]
        assert row["turn_end"] == [[t.token_ids_L.size] for t in group.trajectories]
        assert row["reward"] == [0.5, 1.0, 0.0]
        assert row["correct"] == [1.0, 1.0, 0.0]
        assert row["sampling_seed"] == [t.seed for t in group.trajectories]
        assert row["finish_reason"] == [0, 0, 0]
        assert row["n_tokens"] == 6 + sum(t.token_ids_L.size for t in group.trajectories)
        assert (row["idx_min"], row["idx_max"], row["n_responses"], row["n_expected"]) == (2, 5, 3, 3)
        assert row["sampling"]["temperature"] == 1.0 and row["sampling"]["max_new"] == 64


def test_nothing_is_null_but_what_may_be_and_token_columns_share_their_offsets() -> None:
    batch = groups_to_batch([make_group(i) for i in range(3)])
    batch.validate(full=True)
    assert {name for name in batch.schema.names if batch.column(name).null_count} == NULLABLE - {"correct"}
    assert {field.name for field in batch.schema if field.nullable} == NULLABLE
    inner = [batch.column(name).values.offsets.to_pylist() for name in TOKEN_COLUMNS]
    assert inner[0] == inner[1] == inner[2]
    addresses = {batch.column(name).values.offsets.buffers()[1].address for name in TOKEN_COLUMNS}
    assert len(addresses) == 1


def test_named_reward_parts_are_columns_and_a_missing_one_is_nan() -> None:
    group = with_trajectory(make_group(0, n=2), 0, score=Score(reward=1.0, parts={"format": 0.5, "exact": 1.0}))
    row = groups_to_batch([group]).to_pylist()[0]["reward_parts"]
    assert row["format"][0] == 0.5 and row["exact"][0] == 1.0
    assert np.isnan(row["format"][1]) and np.isnan(row["exact"][1])
    with pytest.raises(DataError, match=r"\['exact', 'format'\] are not among those of the run: \['other'\]"):
        groups_to_batch([group], parts=["other"])


def test_correct_and_extracted_are_null_for_a_group_that_does_not_say_and_nan_for_one_answer() -> None:
    silent = make_group(0, n=2)
    for j in range(2):
        silent = with_trajectory(silent, j, score=Score(reward=0.0))
    half = with_trajectory(make_group(1, n=2), 1, score=Score(reward=0.0, extracted="12"))
    rows = groups_to_batch([silent, half]).to_pylist()
    assert rows[0]["correct"] is None and rows[0]["extracted"] is None
    assert rows[1]["correct"][0] == 0.0 and np.isnan(rows[1]["correct"][1])
    assert rows[1]["extracted"] == [None, "12"]


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def spoil(**changes: object) -> Callable[[TrajectoryGroup], TrajectoryGroup]:
    """Change response 1, which has 4 tokens."""
    return lambda group: with_trajectory(group, 1, **changes)


REFUSED: dict[str, tuple[Callable[[TrajectoryGroup], TrajectoryGroup], str]] = {
    "cancelled": (spoil(finish_reason="cancelled"), "ended as 'cancelled' never lands"),
    "no token": (spoil(token_ids_L=i32(), behavior_logprobs_L=np.zeros(0, np.float32),
                       loss_mask_L=np.zeros(0, np.uint8)), "response 1: has no token"),
    "short log-probs": (spoil(behavior_logprobs_L=np.zeros(3, np.float32)), "response 1: behavior log-probs and token"),
    "short mask": (spoil(loss_mask_L=np.ones(3, np.uint8)), "response 1: loss mask and token ids differ"),
    "NaN log-prob": (spoil(behavior_logprobs_L=np.array([0, np.nan, 0, 0], np.float32)), "response 1: .*not finite"),
    "-inf log-prob": (spoil(behavior_logprobs_L=np.array([0, -np.inf, 0, 0], np.float32)), "response 1: .*not finite"),
    "log-prob under mask 0": (spoil(loss_mask_L=np.array([1, 0, 1, 1], np.uint8)), "response 1: .*is not 0.0 where"),
    "mask 2": (spoil(loss_mask_L=np.array([1, 2, 1, 1], np.uint8)), "response 1: a loss mask is neither"),
    "int64 ids": (spoil(token_ids_L=np.arange(4)), "response_ids is int64 .* stores 1-D int32"),
    "float64 log-probs": (spoil(behavior_logprobs_L=np.zeros(4)), "behavior_logprobs is float64"),
    "no run": (spoil(version_runs=VersionRuns(end_R=i32(), version_R=i32())), "response 1: has no version run"),
    "runs end early": (spoil(version_runs=VersionRuns(end_R=i32(3), version_R=i32(0))), "response 1: .*does not end"),
    "runs in no order": (spoil(version_runs=VersionRuns(end_R=i32(3, 2, 4), version_R=i32(0, 0, 0))),
                         "response 1: version runs or turns are not in order"),
    "empty run": (spoil(version_runs=VersionRuns(end_R=i32(0, 4), version_R=i32(0, 0))), "response 1: .*not in order"),
    "more values than runs": (spoil(version_runs=VersionRuns(end_R=i32(4), version_R=i32(0, 1))),
                              "response 1: version run ends and values differ"),
    "turns": (spoil(turn_end=i32(2)), "response 1: .*does not end at the response's length"),
    "reward NaN": (spoil(score=Score(reward=float("nan"))), "response 1: the reward is not finite"),
    "more answers than asked": (lambda g: replace(g, trajectories=g.trajectories * 2), "has 4 responses of 2 expected"),
    "no answer": (lambda g: replace(g, trajectories=()), "has 0 responses of 2 expected"),
    "idx backwards": (lambda g: replace(g, idx_min=2, idx_max=1), "idx_min 2 and idx_max 1"),
    "empty prompt": (lambda g: replace(g, lease=replace(g.lease, prompt=replace(g.lease.prompt, token_ids_P=i32()))),
                     "has an empty prompt"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_shard_cannot_hold_is_refused_by_group_and_response(
        change: Callable[[TrajectoryGroup], TrajectoryGroup], message: str) -> None:
    good = [make_group(i, n=2, lengths=[3, 4]) for i in range(3)]
    with pytest.raises(DataError, match=message) as caught:
        groups_to_batch([good[0], change(good[1]), good[2]])
    if "64" not in message:
        assert "e0-p1-t0" in str(caught.value)


def test_a_batch_of_no_or_too_many_groups_is_refused() -> None:
    with pytest.raises(DataError, match="1 to 64 groups, not 0"):
        groups_to_batch([])
    with pytest.raises(DataError, match="1 to 64 groups, not 65"):
        groups_to_batch([make_group(i, n=1) for i in range(65)])


def test_environment_tokens_are_kept_with_mask_and_logprob_zero() -> None:
    mask = np.array([1, 0, 0, 1], np.uint8)
    logprobs = np.array([-1.5, 0, 0, -0.25], np.float32)
    group = with_trajectory(make_group(0, n=2, lengths=[4, 4]), 0, loss_mask_L=mask, behavior_logprobs_L=logprobs,
                            turn_end=i32(2, 4), finish_reason="environment")
    row = groups_to_batch([group]).to_pylist()[0]
    assert row["loss_mask"][0] == [1, 0, 0, 1]
    assert row["behavior_logprobs"][0] == [-1.5, 0, 0, -0.25]
    assert row["turn_end"][0] == [2, 4] and row["finish_reason"] == [2, 0]


FOREIGN: dict[str, tuple[pa.Schema, str | None]] = {
    "own": (shard_schema(["exact"]), None),
    "with extension": (shard_schema().append(pa.field("x_routed", pa.list_(pa.int8()))), None),
    "other table": (pa.schema([("a", pa.int32())]), "no column `reward_parts`"),
    "column gone": (shard_schema().remove(3), r"columns differ: \['prompt_idx'\]"),
    "column more": (shard_schema().append(pa.field("late", pa.int8())), r"columns differ: \['late'\]"),
    "wider type": (shard_schema().set(1, pa.field("dataset_epoch", pa.int64(), nullable=False)), "`dataset_epoch` is"),
    "nullable": (shard_schema().set(1, pa.field("dataset_epoch", pa.int32())), "`dataset_epoch` is"),
}


@pytest.mark.parametrize(("schema", "message"), FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_schema_is_told_from_a_shards(schema: pa.Schema, message: str | None) -> None:
    found = schema_differs(schema)
    if message is None:
        assert found is None
    else:
        assert re.search(message, found or "nothing")


def test_group_nbytes_is_an_upper_estimate_within_a_kilobyte_and_a_tenth() -> None:
    groups = [make_group(i, n=8, lengths=[500] * 8, versions=(1, 2)) for i in range(16)]
    stored = groups_to_batch(groups).nbytes
    estimated = sum(group_nbytes(group) for group in groups)
    assert stored <= estimated <= 1.1 * stored + 1024 * len(groups)
