"""Sessions of several trajectories: what a shard holds of them, and what of a step does not change where one answer is
cut into several trajectories with the same tokens."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rl_core.advantage_settings import AdvantageConfig
from rl_core.config import Config
from rl_core.errors import ConfigError, DataError, ShardCorrupt
from rl_core.experience.archive import archive_shard, read_archived
from rl_core.experience.batch import groups_to_batch
from rl_core.experience.reader import ClaimRows, read_claim_rows, read_groups
from rl_core.experience.schema import SESSION
from rl_core.experience.shards import ShardWriter, verify_shard
from rl_core.landed_answers import answer_table
from rl_core.learner import batch as stages
from rl_core.learner.advantages.estimate import advantages, answers_of
from rl_core.learner.optimizer import make_optimizer
from rl_core.learner.plan import StepPlan
from rl_core.learner.policy import Policy, load_policy
from rl_core.learner.ranks import Ranks
from rl_core.learner.step import training_step
from rl_core.learner.step_metrics import experience_metrics
from rl_core.learner.token_states import Sampled, token_advantages, token_states
from rl_core.metrics import is_of_step, is_tracked
from rl_core.plan import check
from rl_core.rollout.verdicts import facts_of
from rl_core.types import Score, Trajectory, TrajectoryGroup, VersionRuns
from rl_core.variants import variants
from tests.builders import make_group, make_run, make_versions
from tests.learning import all_by, claim_groups, random_groups, rows_of, sampled_by, write_model

ESTIMATORS = variants(AdvantageConfig)
CPU = torch.device("cpu")
ALONE = Ranks(rank=0, ranks=1, rendezvous="", device=CPU, deadline_s=1, barrier_s=1)


def cut(group: TrajectoryGroup, places: Sequence[Sequence[int]]) -> TrajectoryGroup:
    """The group with answer i cut at `places[i]`: each piece answers the prompt and all tokens before it."""
    prompt, pieces = group.lease.prompt.token_ids_P, []
    for number, (t, at) in enumerate(zip(group.trajectories, places, strict=True)):
        edges = [0, *sorted({place for place in at if 0 < place < len(t.token_ids_L)}), len(t.token_ids_L)]
        pieces += [piece(t, number, prompt, lo, hi) for lo, hi in pairwise(edges)]
    return replace(group, trajectories=tuple(pieces))


def piece(t: Trajectory, session: int, prompt: np.ndarray, lo: int, hi: int) -> Trajectory:
    length, last = np.array([hi - lo], np.int32), hi == len(t.token_ids_L)
    runs = VersionRuns(end_R=length, version_R=t.version_runs.version_R[:1])
    return replace(t, token_ids_L=t.token_ids_L[lo:hi], behavior_logprobs_L=t.behavior_logprobs_L[lo:hi],
                   loss_mask_L=t.loss_mask_L[lo:hi], version_runs=runs, turn_end=length, session=session,
                   finish_reason=t.finish_reason if last else "stop",
                   prompt_ids_P=np.concatenate([prompt, t.token_ids_L[:lo]]) if lo else None)


def pair() -> TrajectoryGroup:
    """Two answers of 4 and 3 tokens, of which the first is two trajectories, of 3 tokens and 1."""
    return cut(make_group(0, n=2, lengths=[4, 3], rewards=[1.0, 0.0]), [[3], []])


# -- in a shard


def test_sessions_and_prompts_of_their_own_are_in_the_shard_and_come_back(tmp_path: Path) -> None:
    run, split, plain = make_run(tmp_path), pair(), make_group(1, n=2, lengths=[2, 2])
    claim = claim_groups(run, Config(), 0, [split, plain])
    rows = read_claim_rows(run, claim, rank=0, ranks=1, versions=make_versions(1))
    assert rows.session_N.tolist() == [0, 0, 1, 2, 3] and rows.group_N.tolist() == [0, 0, 0, 1, 1]
    assert rows.first_N.tolist() == [True, False, True, True, True]
    assert rows.context_N.tolist() == [0, 2, 0, 1, 1], "the prompts of the groups, then those of trajectories"
    prompt, answer = split.lease.prompt.token_ids_P.tolist(), split.trajectories[0].token_ids_L.tolist()
    assert rows.prompt_ids[rows.prompt_offsets[2]:rows.prompt_offsets[3]].tolist() == prompt + answer
    expected = rows_of([split, plain])
    for name in ("prompt_ids", "prompt_offsets", "session_N", "context_N", "reward_N", "length_N", "response_ids"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(expected, name), err_msg=name)
    info = verify_shard(next(run.streams.glob("*/*.arrow")))
    assert info.n_responses.tolist() == [2, 2] and info.reward_mean.tolist() == [0.5, 0.5], "a session counts once"
    assert info.n_tokens.tolist() == [6 + 7 + 9, 6 + 4]
    first, second = read_groups(run, claim)
    assert [answer["session"] for answer in first["responses"]] == [0, 0, 1]
    assert [len(answer["prompt_ids"]) for answer in first["responses"]] == [6, 9, 6]
    assert [answer["session"] for answer in second["responses"]] == [0, 1], "a shard has the column for all its rows"
    archived = archive_shard(run, tmp_path / "archive", info.ref.stream, 0)
    assert read_archived(archived)[0].column(SESSION).to_pylist() == [[0, 0, 1], [0, 1]]


def test_the_answers_of_a_run_as_a_table_name_their_session_and_what_they_answer(tmp_path: Path) -> None:
    run, split = make_run(tmp_path), pair()
    claim_groups(run, Config(), 0, [make_group(1, n=2, lengths=[2, 2]), split])
    table = answer_table(run, 0, tokens=True)
    assert table.column("session").to_pylist() == [0, 0, 1, 0, 1]
    prompt = split.lease.prompt.token_ids_P.tolist()
    assert table.column("prompt_ids").to_pylist()[:3] == [prompt, prompt + split.trajectories[0].token_ids_L.tolist(),
                                                          prompt]


def test_a_shard_without_sessions_has_no_column_for_them() -> None:
    assert SESSION not in groups_to_batch([make_group(0)]).schema.names


def with_sessions(*numbers: int | None) -> TrajectoryGroup:
    group = make_group(0, n=len(numbers), rewards=[1.0] * len(numbers), n_expected=3)
    return replace(group, trajectories=tuple(replace(t, session=number) for t, number in
                                             zip(group.trajectories, numbers, strict=True)))


def another_reward() -> TrajectoryGroup:
    first, *others = pair().trajectories
    return replace(pair(), trajectories=(replace(first, score=Score(reward=0.25)), *others))


REFUSED: dict[str, tuple[Callable[[], TrajectoryGroup], str]] = {
    "of no session": (lambda: with_sessions(0, None), "1 trajectories are of no session, 1 are"),
    "not from 0": (lambda: with_sessions(1, 1), r"its sessions are numbered \[1, 1\]"),
    "a gap": (lambda: with_sessions(0, 2), r"numbered \[0, 2\]"),
    "not together": (lambda: with_sessions(0, 1, 0), r"numbered \[0, 1, 0\]"),
    "more than were asked for": (lambda: with_sessions(0, 1, 2, 3), "has 4 responses of 3 expected"),
    "two rewards": (another_reward, r"response 1: its reward is 1\.0, that of its session 0\.25; a session has one"),
    "nothing asked": (lambda: replace(pair(), trajectories=tuple(
        replace(t, prompt_ids_P=np.zeros(0, np.int32)) for t in pair().trajectories)), "an empty prompt of its own"),
}


@pytest.mark.parametrize(("group", "why"), REFUSED.values(), ids=REFUSED)
def test_sessions_that_do_not_fit_together_never_land(group: Callable[[], TrajectoryGroup], why: str) -> None:
    with pytest.raises(DataError, match=why):
        groups_to_batch([group()])


def test_a_shard_whose_sessions_were_misbuilt_is_corrupt(tmp_path: Path) -> None:
    batch = groups_to_batch([pair()])
    at = batch.schema.get_field_index(SESSION)
    column = pa.array([[0, 1, 1]], batch.schema.field(at).type)  # two rewards in one session
    wrong = pa.RecordBatch.from_arrays([column if i == at else batch.column(i) for i in range(batch.num_columns)],
                                       schema=batch.schema)
    writer = ShardWriter(make_run(tmp_path), "w", 1, {}, False)
    writer.land_batch(wrong, ("e0-p0-t0",))
    with pytest.raises(ShardCorrupt, match="trajectories of one session have other rewards"):
        verify_shard(next(tmp_path.glob("streams/*/*.arrow")))


# -- advantages


claims = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
                  min_size=1, max_size=10).map(lambda rows: sorted(rows, key=lambda row: row[1]))
OF_A_SESSION = ("grpo", "rloo", "grpo_passk", "opo", "gpg", "lite_ppo", "maxrl", "reinforce_plus_plus_baseline")


@settings(max_examples=25, deadline=None)
@given(claims)
def test_a_session_has_the_advantage_of_one_answer_with_all_its_tokens(claim) -> None:
    reward_N = np.array([float(reward) for reward, _, pieces in claim for _ in pieces])
    group_N = np.unique([group for _, group, pieces in claim for _ in pieces], return_inverse=True)[1]
    length_N = np.array([length for *_, pieces in claim for length in pieces])
    session_N = np.repeat(np.arange(len(claim)), [len(pieces) for *_, pieces in claim])
    first_N = np.diff(session_N, prepend=-1) != 0
    whole = answers_of(reward_N[first_N], group_N[first_N], length_N=np.bincount(session_N, length_N).astype(int),
                       tokens_N=np.bincount(session_N, length_N).astype(int), baseline_N=np.ones(len(claim)))
    pieces = answers_of(reward_N, group_N, length_N=length_N, tokens_N=length_N,
                        baseline_N=np.ones(len(reward_N))).by_session(session_N)
    for name in (*OF_A_SESSION, "reinforce_plus_plus", "remax"):
        config = ESTIMATORS[name](name=name)
        np.testing.assert_array_equal(advantages(pieces, config), advantages(whole, config), err_msg=name)


def test_a_session_of_two_rewards_has_no_advantage() -> None:
    answers = answers_of(np.array([1.0, 0.5, 0.0]), np.zeros(3, int))
    with pytest.raises(ValueError, match="trajectories of session 0 of the claim have other rewards"):
        answers.by_session(np.array([0, 0, 1]))


# -- in a step: an answer that is cut has the same tokens in the same contexts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Any]:
    directory = write_model(tmp_path_factory.mktemp("model"))
    policy = load_policy(directory, logits_chunk=64, dtype=torch.float32, device=CPU)
    return policy, AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def groups(model: tuple[Policy, Any]) -> list[TrajectoryGroup]:
    found = [sampled_by(model[1], all_by(0, group), noise=0.2, seed=i)
             for i, group in enumerate(random_groups(0, rewards=[1.0, 0.0, 0.5, 0.0]))]
    return [replace(group, baseline_reward=0.25) for group in found]


@pytest.fixture(scope="module")
def split(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Answers cut into one to four trajectories; of the second group none is."""
    return [cut(group, [[(3 * i + 2 * g) % 7, 5, 8][:i] for i in range(4)]) if g != 1 else group
            for g, group in enumerate(groups)]


def step(policy: Policy, groups: list[TrajectoryGroup], learner: dict[str, Any], *,
         budget: int = 10_000) -> tuple[tuple[float, ...], list[torch.Tensor]]:
    """Losses of one training step, and the gradients of its last update."""
    config = Config.model_validate({
        "groups_per_step": 4, "group_size": 4, "sampling": {"max_new_tokens": 12},
        "learner": {"lr": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9, "token_budget": budget} | learner})
    loss = config.learner.loss
    batch = stages.assemble(rows_of(groups))
    stages.mark_tokens(batch, step=1, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, loss.truncated)
    if loss.overlong_buffer is not None:
        stages.penalize_overlong(batch, longest=12, buffer=loss.overlong_buffer, factor=loss.overlong_factor)
    stages.number_tokens(batch)
    stages.add_advantages(batch, config.learner.advantage)
    one = copy.deepcopy(policy)
    plan = StepPlan(step=1, idx=1, learning_rate=1e-3, groups=4, minibatch_groups=config.minibatch_groups,
                    max_new_tokens=12, learner=config.learner, skipped_in_a_row=0, max_skipped=0, seed=5)
    result = training_step(one, make_optimizer(one, config.learner), ALONE, batch, plan)
    return result.losses, [p.grad for p in one.parameters() if p.grad is not None]


SAME: dict[str, dict[str, Any]] = {
    **{f"aggregated by {name}": {"loss": {"aggregation": name}} for name in (
        "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean")},
    **{f"estimated by {name}": {"advantage": {"name": name}} for name in (
        "rloo", "opo", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")},
    "several updates": {"passes": 2, "minibatch_groups": 2, "loss": {"aggregation": "seq_mean_token_mean"}},
    "token weights, rejected tokens left out": {
        "loss": {"aggregation": "seq_mean_token_mean"},
        "correction": {"weights": "token_truncate", "rejected": "exclude",
                       "rejection": [{"rule": "token_k1", "high": 1.2}]}},
}


@pytest.mark.parametrize("learner", SAME.values(), ids=SAME)
def test_a_step_is_the_same_however_its_answers_are_cut_into_trajectories(model, groups, split, learner) -> None:
    whole, gradients = step(model[0], groups, learner)
    for budget in (10_000, 60):
        found, others = step(model[0], split, learner, budget=budget)
        assert found == pytest.approx(whole, rel=2e-5, abs=1e-6)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=2e-6)


def test_a_cut_answer_takes_its_session_along_where_it_is_as_if_absent(groups: list[TrajectoryGroup]) -> None:
    whole = cut(groups[0], [[], [4], [], []])
    first, second, *others = whole.trajectories
    batch = stages.assemble(rows_of([replace(whole, trajectories=(
        first, replace(second, finish_reason="length"), *others))]))
    stages.mask_truncated(batch, "exclude")
    of_session_1 = np.array([t.session == 1 for t in whole.trajectories])
    assert stages.column(batch, "trajectory", "present").tolist() == (~of_session_1).tolist()
    assert (stages.loss_tokens(batch) == 0).tolist() == of_session_1.tolist()


def test_a_session_loses_what_all_its_trajectories_cost() -> None:
    group = cut(make_group(0, n=2, lengths=[11, 11], rewards=[1.0, 1.0]), [[1], []])
    batch = stages.assemble(rows_of([group]))
    stages.penalize_overlong(batch, longest=12, buffer=4, factor=1.0)
    assert stages.column(batch, "trajectory", "reward").tolist() == [0.5, 0.5, 0.25], "10 tokens and 1, or 11"


def test_rewards_of_sessions_count_once_in_the_metrics() -> None:
    group = cut(make_group(0, n=2, lengths=[6, 3], rewards=[1.0, 0.0], n_expected=3), [[2, 4], []])
    rows: ClaimRows = rows_of([group])
    claim: Any = type("Claim", (), {"idx": 0, "policy": "keep", "dropped": ()})()
    found = experience_metrics(rows, claim)
    assert (found["reward/mean"], found["reward/std"], found["reward/correct"]) == (0.5, 0.5, 0.5)
    assert (found["rollout/trajectories"], found["rollout/partial"], found["rollout/length_mean"]) == (2.0, 1.0, 2.25)


def test_answers_that_are_an_end_token_alone_are_counted() -> None:
    """Of one token that ended by itself; one that was cut behind its first token is cut, not empty."""
    group = make_group(0, n=4, lengths=[1, 1, 2, 5])
    cut_short = replace(group.trajectories[1], finish_reason="length")
    claim: Any = type("Claim", (), {"idx": 0, "policy": "keep", "dropped": ()})()
    found = experience_metrics(rows_of([replace(group, trajectories=(group.trajectories[0], cut_short,
                                                                     *group.trajectories[2:]))]), claim)
    assert (found["rollout/empty"], found["rollout/truncated"]) == (0.25, 0.25)
    assert not is_tracked("rollout/empty") and is_of_step("rollout/empty")


def test_a_page_has_the_advantages_of_the_learner(split: list[TrajectoryGroup]) -> None:
    config = Config.model_validate({"learner": {"advantage": {"name": "grpo"}}})
    rows = rows_of(split)
    sampled = Sampled(group_N=rows.group_N.astype(int), reward_N=rows.reward_N, length_N=rows.length_N.astype(int),
                      finish_N=rows.finish_N, loss_mask_T=rows.loss_mask, idx_T=rows.version_idx, parts={},
                      session_N=rows.session_N)
    claim: Any = type("Claim", (), {"policy": "keep"})()
    found_T = token_advantages(sampled, token_states(sampled, claim, config), config)
    batch = stages.assemble(rows)
    stages.mask_truncated(batch, "score")
    stages.number_tokens(batch)
    stages.add_advantages(batch, config.learner.advantage)
    expected_N = stages.column(batch, "trajectory", "advantage").numpy()
    np.testing.assert_array_equal(found_T, np.repeat(expected_N, rows.length_N))
    assert not math.isnan(found_T.sum()) and found_T.any()


def test_a_group_filter_is_asked_about_sessions() -> None:
    facts = facts_of(cut(make_group(0, n=3, lengths=[6, 3, 2], rewards=[1.0, 0.0, 0.5]), [[2, 4], [], [1]]))
    assert (facts["rewards"], facts["lengths"]) == ([1.0, 0.0, 0.5], [6, 3, 2])


SETTINGS_REFUSED = {
    "answers drawn again": ({"learner": {"resampling": "pow"}}, r"learner\.resampling: draws answers again"),
    "packs that are too small": ({"learner": {"token_budget": 300}}, r"learner\.token_budget: .*may have data\."),
    "answers scored anew": ({"data": {"shards_from": "k", "rescore": True}}, r"data\.rescore: a session is scored by"),
}


@pytest.mark.parametrize(("changes", "why"), SETTINGS_REFUSED.values(), ids=SETTINGS_REFUSED)
def test_settings_that_cannot_take_sessions_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check(Config.model_validate({"rollout": {"session": "./mine.py:again"}} | changes))
