from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_core.errors import BrokenFile, ClaimedShardCorrupt
from rl_core.experience.reader import ClaimRows, Staging, read_claim_rows, read_groups
from rl_core.experience.shards import ShardWriter
from rl_core.experience.split import split_by_length, split_by_prompt
from rl_core.run_dir import RunDir
from rl_core.types import Claim, Score, ShardRef, TrajectoryGroup
from tests.builders import make_claim, make_group, make_run, make_versions

VERSIONS = make_versions(12)


def landed(tmp_path: Path, groups: list[TrajectoryGroup], per_shard: int = 3) -> tuple[RunDir, Claim]:
    """Land the groups in the order given, over two streams, and claim them all."""
    run = make_run(tmp_path / "run")
    writers = [ShardWriter(run, f"rollout-{w}", 1, {}, False) for w in range(2)]
    refs: list[ShardRef] = []
    for i in range(0, len(groups), per_shard):
        hint = writers[i // per_shard % 2].land(groups[i:i + per_shard])
        refs.append(ShardRef(stream=hint.stream, seq=hint.seq))
    return run, make_claim(run, refs)


def world(seed: int = 0, n_groups: int = 10) -> list[TrajectoryGroup]:
    """Groups of 1 to 5 answers of 1 to 12 tokens, landed in a random order of positions."""
    rng = np.random.default_rng(seed)
    return [make_group(int(i), n=int(rng.integers(1, 6)), n_expected=5, versions=tuple(sorted(rng.integers(0, 12, 3))),
                       prompt_length=int(rng.integers(1, 9)), seed=seed) for i in rng.permutation(n_groups)]


def assert_rows_are(rows: ClaimRows, groups: list[TrajectoryGroup]) -> None:
    """The rows of one rank, against the groups in training order, token by token."""
    answers = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    assert rows.group_N.tolist() == [g for g, _ in answers]
    assert rows.length_N.tolist() == [t.token_ids_L.size for _, t in answers]
    assert rows.reward_N.tolist() == [t.score.reward for _, t in answers]
    mine = [t for (_, t), m in zip(answers, rows.mine_N, strict=True) if m]
    assert len(rows.offsets) == len(mine) + 1
    for j, t in enumerate(mine):
        here = slice(rows.offsets[j], rows.offsets[j + 1])
        dense = np.repeat(t.version_runs.version_R, np.diff(t.version_runs.end_R, prepend=0))
        assert rows.response_ids[here].tolist() == t.token_ids_L.tolist()
        assert rows.loss_mask[here].tolist() == t.loss_mask_L.tolist()
        assert rows.behavior_logprobs[here].tolist() == t.behavior_logprobs_L.tolist()
        assert rows.version_idx[here].tolist() == dense.tolist()
    for g, group in enumerate(groups):
        prompt = rows.prompt_ids[rows.prompt_offsets[g]:rows.prompt_offsets[g + 1]]
        assert prompt.tolist() == group.lease.prompt.token_ids_P.tolist()
    assert rows.n_responses_G.tolist() == [len(group.trajectories) for group in groups]
    assert rows.n_expected_G.tolist() == [group.lease.n_expected for group in groups]
    assert rows.idx_min_G.tolist() == [group.idx_min for group in groups]
    assert rows.idx_max_G.tolist() == [group.idx_max for group in groups]
    assert rows.temperature_G.tolist() == [group.lease.sampling.temperature for group in groups]
    assert rows.groups == len(groups)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_every_rank_reads_its_own_tokens_in_training_order_whatever_the_order_of_landing(
        tmp_path: Path, seed: int, ranks: int) -> None:
    groups = world(seed)
    run, claim = landed(tmp_path, groups)
    in_order = sorted(groups, key=lambda group: group.lease.prompt.position)
    taken = np.zeros(sum(len(group.trajectories) for group in groups), int)
    for rank in range(ranks):
        rows = read_claim_rows(run, claim, rank=rank, ranks=ranks, versions=VERSIONS)
        assert_rows_are(rows, in_order)
        taken += rows.mine_N
    assert taken.tolist() == [1] * taken.size


def test_a_claim_may_take_some_rows_of_a_shard_and_leave_others(tmp_path: Path) -> None:
    groups = [make_group(i, versions=(i,)) for i in range(6)]
    run, claim = landed(tmp_path, groups)
    some = replace(claim, groups=(claim.groups[1], claim.groups[4], claim.groups[5]))
    assert_rows_are(read_claim_rows(run, some, rank=0, ranks=1, versions=VERSIONS), [groups[1], groups[4], groups[5]])


def test_token_columns_have_the_types_of_the_store(tmp_path: Path) -> None:
    run, claim = landed(tmp_path, world())
    rows = read_claim_rows(run, claim, rank=0, ranks=1, versions=VERSIONS)
    dtypes = {name: str(getattr(rows, name).dtype) for name in (
        "prompt_ids", "prompt_offsets", "response_ids", "loss_mask", "behavior_logprobs", "version_idx", "offsets",
        "group_N", "reward_N", "correct_N", "length_N", "finish_N", "mine_N", "temperature_G", "n_expected_G")}
    assert dtypes == {
        "prompt_ids": "int32", "prompt_offsets": "int32", "response_ids": "int32", "loss_mask": "uint8",
        "behavior_logprobs": "float32", "version_idx": "int32", "offsets": "int32", "group_N": "int32",
        "reward_N": "float32", "correct_N": "float32", "length_N": "int32", "finish_N": "int8", "mine_N": "bool",
        "temperature_G": "float32", "n_expected_G": "int32"}


def test_version_index_is_that_of_the_publication_not_the_version_id(tmp_path: Path) -> None:
    run, claim = landed(tmp_path, [make_group(0, n=1, versions=(3, 7), idx=(2, 3), lengths=[4])])
    versions = {v: replace(VERSIONS[v], idx=idx) for v, idx in ((3, 2), (7, 3))}
    rows = read_claim_rows(run, claim, rank=0, ranks=1, versions=versions)
    assert rows.version_idx.tolist() == [2, 2, 3, 3]
    with pytest.raises(BrokenFile, match="step 0: tokens of version 7, which has no manifest"):
        read_claim_rows(run, claim, rank=0, ranks=1, versions={3: versions[3]})
    with pytest.raises(BrokenFile, match="tokens of version 3, which"):
        read_claim_rows(run, claim, rank=0, ranks=1, versions={})


def test_correct_is_nan_where_the_reward_does_not_say(tmp_path: Path) -> None:
    said = make_group(0, n=2, rewards=[1.0, 0.0])
    silent = make_group(1, n=2)
    silent = replace(silent, trajectories=tuple(replace(t, score=Score(reward=0.5)) for t in silent.trajectories))
    run, claim = landed(tmp_path, [said, silent, make_group(2, n=1, rewards=[1.0])])
    rows = read_claim_rows(run, claim, rank=0, ranks=1, versions=VERSIONS)
    assert np.array_equal(rows.correct_N, [1, 0, np.nan, np.nan, 1], equal_nan=True)


def test_parts_and_sources_are_those_of_each_answer_and_group(tmp_path: Path) -> None:
    def scored(i: int, source: str, parts: dict[str, float]) -> TrajectoryGroup:
        group = make_group(i, n=2)
        return replace(group, lease=replace(group.lease, prompt=replace(group.lease.prompt, data_source=source)),
                       trajectories=tuple(replace(t, score=replace(t.score, parts={k: v + j for k, v in parts.items()}))
                                          for j, t in enumerate(group.trajectories)))

    groups = [scored(0, "sort", {"a": 0.5}), scored(1, "chat", {"a": 1.5, "b": 2.5}), scored(2, "sort", {})]
    run, claim = landed(tmp_path, groups, per_shard=1)
    rows = read_claim_rows(run, claim, rank=0, ranks=1, versions=VERSIONS)
    assert (rows.sources, rows.source_G.tolist()) == (("chat", "sort"), [1, 0, 1])
    assert list(rows.parts) == ["a", "b"]
    nan = np.nan
    np.testing.assert_equal(rows.parts["a"], np.array([0.5, 1.5, 1.5, 2.5, nan, nan], np.float32))
    np.testing.assert_equal(rows.parts["b"], np.array([nan, nan, 2.5, 3.5, nan, nan], np.float32))


def test_staging_is_reused_grows_and_is_writable(tmp_path: Path) -> None:
    small, claim_small = landed(tmp_path / "a", [make_group(0, n=1, lengths=[5])])
    large, claim_large = landed(tmp_path / "b", [make_group(0, n=1, lengths=[5000])])
    staging = Staging()
    first = read_claim_rows(small, claim_small, rank=0, ranks=1, versions=VERSIONS, staging=staging)
    again = read_claim_rows(small, claim_small, rank=0, ranks=1, versions=VERSIONS, staging=staging)
    assert first.response_ids.ctypes.data == again.response_ids.ctypes.data
    before = staging.nbytes
    rows = read_claim_rows(large, claim_large, rank=0, ranks=1, versions=VERSIONS, staging=staging)
    assert staging.nbytes > before and rows.response_ids.size == 5000
    rows.response_ids[:] = 1
    rows.loss_mask[:] = 0
    unchanged = read_claim_rows(large, claim_large, rank=0, ranks=1, versions=VERSIONS)
    assert unchanged.loss_mask.min() == 1


def test_staging_takes_memory_from_the_allocator_it_was_given(tmp_path: Path) -> None:
    run, claim = landed(tmp_path, world())
    asked: list[int] = []

    def allocate(nbytes: int) -> np.ndarray:
        asked.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    staging = Staging(allocate)
    read_claim_rows(run, claim, rank=0, ranks=1, versions=VERSIONS, staging=staging)
    assert len(asked) == 3 and sum(asked) == staging.nbytes


@pytest.mark.parametrize("damage", ["flipped", "gone", "replaced", "other digest"])
def test_a_shard_that_rotted_after_its_claim_is_never_training_data(tmp_path: Path, damage: str) -> None:
    run, claim = landed(tmp_path, [make_group(i, lengths=[400] * 4) for i in range(4)])
    first = claim.groups[0]
    path = run.shard(first.stream, first.seq)
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "gone":
        path.unlink()
    elif damage == "replaced":
        other = ShardWriter(run, "rollout-9", 1, {}, False)
        other.land([make_group(0, seed=1)])
        path.write_bytes(run.shard(other.stream, 0).read_bytes())
    else:
        claim = replace(claim, shard_digests=dict.fromkeys(claim.shard_digests, "0" * 16))
    with pytest.raises(ClaimedShardCorrupt, match="claim of step 0") as caught:
        read_claim_rows(run, claim, rank=0, ranks=1, versions=VERSIONS)
    assert path.name in str(caught.value)
    with pytest.raises(ClaimedShardCorrupt):
        read_groups(run, claim)


def test_a_claim_of_a_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run, claim = landed(tmp_path, [make_group(i) for i in range(2)])
    swapped = replace(claim, groups=(replace(claim.groups[0], row=1), claim.groups[1]))
    with pytest.raises(ClaimedShardCorrupt, match=r"row 1 of .* is e0-p1-t0, not e0-p0-t0"):
        read_claim_rows(run, swapped, rank=0, ranks=1, versions=VERSIONS)
    beyond = replace(claim, groups=(replace(claim.groups[0], row=9),))
    with pytest.raises(ClaimedShardCorrupt, match=r"row 9 of .* is absent"):
        read_claim_rows(run, beyond, rank=0, ranks=1, versions=VERSIONS)


SPLITS = {
    "one rank": ([5, 3, 3], 1, [0, 0, 0]),
    "longest alone": ([5, 3, 3], 2, [0, 1, 1]),
    "ties by position": ([4, 4, 4, 4], 2, [0, 1, 0, 1]),
    "fewer than ranks": ([7], 3, [0]),
    "nothing": ([], 2, []),
    "mixed": ([1, 9, 2, 8, 3], 3, [2, 0, 2, 1, 2]),
}


@pytest.mark.parametrize(("lengths", "ranks", "expected"), SPLITS.values(), ids=SPLITS.keys())
def test_the_split_is_a_balanced_pure_function(lengths: list[int], ranks: int, expected: list[int]) -> None:
    assert split_by_length(np.array(lengths, np.int32), ranks).tolist() == expected


def test_ranks_get_equal_loads_within_one_answer() -> None:
    lengths = np.random.default_rng(0).lognormal(7.3, 0.8, 4096).clip(200, 8000).astype(np.int32)
    ranks = split_by_length(lengths, 8)
    loads = np.bincount(ranks, weights=lengths)
    assert loads.max() - loads.min() <= lengths.min()


SHARES = {  # answers, prompts, numbers of the prompts, parts, ranks, what comes out
    "a prompt to each rank": ([2, 2, 2, 2], [6, 6, 6, 6], [0, 0, 1, 1], [0] * 4, 2, [0, 0, 1, 1]),
    "each part by itself": ([2, 2, 2, 2], [6, 6, 6, 6], [0, 0, 1, 1], [0, 0, 1, 1], 2, [0, 1, 0, 1]),
    "one prompt is shared out": ([9, 1, 1, 1], [2, 2, 2, 2], [0] * 4, [0] * 4, 2, [0, 1, 1, 1]),
    "short prompts: by length": ([9, 7, 5, 3], [1, 1, 1, 1], [0, 0, 1, 1], [0] * 4, 2, [0, 1, 1, 0]),
    "one rank": ([2, 2], [1, 1], [0, 1], [0, 1], 1, [0, 0]),
    "nothing": ([], [], [], [], 2, []),
}


@pytest.mark.parametrize(("answers", "prompts", "contexts", "parts", "ranks", "expected"), SHARES.values(),
                         ids=SHARES.keys())
def test_ranks_share_out_prompts_with_the_answers_to_them(
        answers: list[int], prompts: list[int], contexts: list[int], parts: list[int], ranks: int,
        expected: list[int]) -> None:
    found = split_by_prompt(*(np.array(each, np.int64) for each in (answers, prompts, contexts, parts)), ranks)
    assert found.tolist() == expected


def test_a_prompt_lies_on_few_ranks_and_their_work_is_nearly_equal() -> None:
    answers = np.random.default_rng(0).lognormal(5.0, 0.8, 64 * 8).clip(10, 1000).astype(np.int32)
    contexts, prompts = np.repeat(np.arange(64), 8), np.full(64 * 8, 600)
    ranks = split_by_prompt(answers, prompts, contexts, contexts // 32, 8)
    for part in range(2):
        held = [{int(context) for context in contexts[(contexts // 32 == part) & (ranks == rank)]} for rank in range(8)]
        work = [600 * len(held[rank]) + int(answers[(contexts // 32 == part) & (ranks == rank)].sum())
                for rank in range(8)]
        assert sum(map(len, held)) <= 32 + 7
        assert max(work) <= 1.15 * sum(work) / 8


def test_more_ranks_than_answers_leave_some_with_nothing(tmp_path: Path) -> None:
    run, claim = landed(tmp_path, [make_group(0, n=1)])
    rows = read_claim_rows(run, claim, rank=1, ranks=2, versions=VERSIONS)
    assert (rows.mine_N.tolist(), rows.offsets.tolist(), rows.response_ids.size) == ([False], [0], 0)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        read_claim_rows(run, claim, rank=2, ranks=2, versions=VERSIONS)


def test_people_read_groups_as_plain_values(tmp_path: Path) -> None:
    group = make_group(3, n=2, versions=(1, 2), lengths=[4, 2], rewards=[0.5, 1.0])
    run, claim = landed(tmp_path, [group, make_group(1)])
    other, mine = read_groups(run, claim)
    assert (other["group_id"], mine["group_id"]) == ("e0-p1-t0", "e0-p3-t0")
    assert mine["prompt_ids"] == group.lease.prompt.token_ids_P.tolist()
    assert (mine["meta"], mine["idx_min"], mine["idx_max"], mine["position"]) == ({"answer": "3"}, 1, 2, 3)
    assert [r["ids"] for r in mine["responses"]] == [t.token_ids_L.tolist() for t in group.trajectories]
    assert [r["versions"] for r in mine["responses"]] == [[[2, 1], [4, 2]], [[1, 1], [2, 2]]]
    assert [(r["reward"], r["correct"], r["finish_reason"]) for r in mine["responses"]] == [(0.5, 1, "stop"),
                                                                                         (1.0, 1, "stop")]


LIGHT = """
import sys
from pathlib import Path
from rl_core.experience.reader import read_claim_rows, read_groups
from rl_core.experience.shards import ShardWriter
from rl_core.types import ShardRef
from tests.builders import make_claim, make_group, make_run, make_versions

run = make_run(Path(sys.argv[1]))
landed = ShardWriter(run, "rollout-0", 1, {}, False).land([make_group(0), make_group(1)])
claim = make_claim(run, [ShardRef(stream=landed.stream, seq=landed.seq)])
read_claim_rows(run, claim, rank=0, ranks=1, versions=make_versions(2))
read_groups(run, claim)
print(sorted({"pandas", "torch", "tensordict"} & set(sys.modules)))
"""


def test_the_store_needs_neither_torch_nor_pandas(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path / "run")], cwd=Path(__file__).parents[2],
                          check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
