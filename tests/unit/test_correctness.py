"""What is right: by `correct`, or by a reward of 0 and 1, source by source; and what a step's metrics say of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rl_core.correctness import is_known_everywhere, known_correctness
from rl_core.experience.reader import ClaimRows
from rl_core.learner.step_metrics import by_source, experience_metrics
from rl_core.metrics import names
from rl_core.types import Claim

NAN = math.nan

KNOWN: dict[str, tuple[list[float], list[float], list[int], list[float], bool]] = {
    # rewards, what the reward says, data sources -> what is known, of every source
    "said": ([0.3, 0.9, 0.1], [1, 0, 1], [0, 0, 0], [1, 0, 1], True),
    "said of some": ([0.3, 1.0], [1, NAN], [0, 0], [1, NAN], True),
    "reward of 0 and 1": ([1, 0, NAN], [NAN, NAN, NAN], [0, 0, 0], [1, 0, NAN], True),
    "a bonus of 0.1 for the format": ([1, 0.1, 0], [NAN, NAN, NAN], [0, 0, 0], [NAN, NAN, NAN], False),
    "said of one source, 0 and 1 of the other": ([0.3, 0.9, 1, 0], [1, 0, NAN, NAN], [1, 1, 0, 0], [1, 0, 1, 0], True),
    "said of one source, shaped in the other": ([0.3, 0.9, 1, 0.1], [1, 0, NAN, NAN], [1, 1, 0, 0], [1, 0, NAN, NAN],
                                                False),
    "all failed of one source": ([1, NAN], [NAN, NAN], [0, 1], [1, NAN], False),
}


@pytest.mark.parametrize(("rewards", "said", "sources", "expected", "everywhere"), KNOWN.values(), ids=KNOWN)
def test_what_is_right_is_known_source_by_source(rewards: list[float], said: list[float], sources: list[int],
                                                 expected: list[float], everywhere: bool) -> None:
    source_N = np.array(sources)
    known_N = known_correctness(np.array(rewards, np.float32), np.array(said, np.float32), source_N)
    np.testing.assert_array_equal(known_N, expected)
    assert is_known_everywhere(known_N, source_N) == everywhere


# -- of a step: groups of two answers, of 2 and 4 tokens


def rows_of(rewards: list[float], said: list[float], sources: list[int]) -> ClaimRows:
    groups, answers = len(rewards) // 2, len(rewards)
    none_i, none_f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return ClaimRows(
        prompt_ids=none_i, prompt_offsets=np.zeros(groups + 1, np.int32), n_expected_G=np.full(groups, 2, np.int32),
        n_responses_G=np.full(groups, 2, np.int32), idx_min_G=np.zeros(groups, np.int32),
        idx_max_G=np.zeros(groups, np.int32), temperature_G=np.ones(groups, np.float32),
        baseline_G=np.full(groups, NAN, np.float32), context_N=np.repeat(np.arange(groups, dtype=np.int32), 2),
        session_N=np.arange(answers, dtype=np.int32),
        group_N=np.repeat(np.arange(groups, dtype=np.int32), 2), reward_N=np.array(rewards, np.float32),
        correct_N=np.array(said, np.float32), length_N=np.tile(np.array([2, 4], np.int32), groups),
        finish_N=np.zeros(answers, np.int8), parts={}, sources=("gsm8k", "math")[:max(sources) + 1],
        source_G=np.array(sources, np.int32), mine_N=np.ones(answers, np.bool_), offsets=np.zeros(1, np.int32),
        response_ids=none_i, loss_mask=np.zeros(0, np.uint8), behavior_logprobs=none_f,
        run_version_idx_R=none_i, run_tokens_R=none_i)


CLAIM = Claim(step=0, idx=0, attempt=1, consumer="learner", eta="2", hard_max=8, policy="keep", groups=(),
              group_ids_digest="", shard_digests={}, masked=(), dropped=(), revision=0, ts_us=0)
UNSAID = [NAN] * 6
NAMES = ("reward/correct", "reward/no_spread_right", "reward/no_spread_wrong", "rollout/length_right",
         "rollout/length_wrong")
STEPS: dict[str, tuple[list[float], list[float], list[int], list[float]]] = {
    # rewards, what the reward says, data source of each group -> the metrics of NAMES
    "said": ([0.2, 0.2, 0.1, 0.1, 1, 0], [1, 1, 0, 0, 1, 0], [0, 0, 0], [1 / 2, 1 / 3, 1 / 3, 8 / 3, 10 / 3]),
    "plain 0 and 1": ([1, 1, 0, 0, 1, 0], UNSAID, [0, 0, 0], [1 / 2, 1 / 3, 1 / 3, 8 / 3, 10 / 3]),
    "a bonus of 0.1 is not right": ([1, 1, 0.1, 0.1, 1, 0], UNSAID, [0, 0, 0], [NAN, 0, 0, NAN, NAN]),
    "wrong below 0 where it is said": ([-1, -1, 1, 1, 1, -1], [0, 0, 1, 1, 1, 0], [0, 0, 0],
                                       [1 / 2, 1 / 3, 1 / 3, 8 / 3, 10 / 3]),
    "flat, and said to be right of one": ([0.5, 0.5], [1, 0], [0], [1 / 2, 0, 1, 2, 4]),
    "flat, and said of one that it is right": ([0.5, 0.5], [1, NAN], [0], [1, 0, 0, 2, NAN]),
    "said of one source, 0 and 1 of the other": ([0.7, 0.7, 0, 0], [1, 1, NAN, NAN], [1, 0],
                                                 [1 / 2, 1 / 2, 1 / 2, 3, 3]),
    "said of one source, shaped in the other": ([0.7, 0.7, 0.1, 0.1], [1, 1, NAN, NAN], [1, 0],
                                                [NAN, 1 / 2, 0, 3, NAN]),
}


@pytest.mark.parametrize(("rewards", "said", "sources", "expected"), STEPS.values(), ids=STEPS)
def test_a_step_counts_as_right_what_is_known_to_be(rewards: list[float], said: list[float], sources: list[int],
                                                    expected: list[float]) -> None:
    found = experience_metrics(rows_of(rewards, said, sources), CLAIM)
    assert set(found) <= set(names("learner"))
    np.testing.assert_allclose([found[name] for name in NAMES], expected, rtol=1e-6)


ALL_EQUAL: dict[str, tuple[list[float], list[float], list[int], list[float]]] = {
    # rewards, what the reward says, answers of each group -> all equal, of them right, wrong; groups of one
    "a shaped reward": ([0.3, 0.3, 0.3, 0.7, 0.1, 0.1], UNSAID, [2, 2, 2], [2 / 3, 0, 0, 0]),
    "a judge's scores": ([4, 4, 4, 4, 3, 4], UNSAID, [4, 2], [1 / 2, 0, 0, 0]),
    "scores of a reward model": ([-1.25, 0.5, 0.75, 0.5, 0.5, -0.25], UNSAID, [3, 3], [0, 0, 0, 0]),
    "groups of one": ([0.3, 0.3, 0.7, 0.1, 0.3, 0.3], UNSAID, [1] * 6, [0, 0, 0, 1]),
    "one of them alone": ([0.3, 0.3, 0.7, 0.7, 0.7, 0.2], UNSAID, [3, 2, 1], [1 / 3, 0, 0, 1 / 3]),
    "plain 0 and 1": ([1, 1, 0, 0, 1, 0], UNSAID, [2, 2, 2], [2 / 3, 1 / 3, 1 / 3, 0]),
    "right or wrong alone": ([1, 0, 0, 0, 0, 0], UNSAID, [1, 1, 4], [1 / 3, 0, 1 / 3, 2 / 3]),
}


@pytest.mark.parametrize(("rewards", "said", "sizes", "expected"), ALL_EQUAL.values(), ids=ALL_EQUAL)
def test_groups_of_equal_rewards_and_groups_of_one_are_counted_whatever_is_known_to_be_right(
        rewards: list[float], said: list[float], sizes: list[int], expected: list[float]) -> None:
    counts = np.array(sizes, np.int32)
    rows = replace(rows_of(rewards, said, [0] * 3), n_responses_G=counts, n_expected_G=np.full(len(sizes), 2, np.int32),
                   group_N=np.repeat(np.arange(len(sizes), dtype=np.int32), counts),
                   idx_min_G=np.zeros(len(sizes), np.int32), source_G=np.zeros(len(sizes), np.int32),
                   baseline_G=np.full(len(sizes), NAN, np.float32), prompt_offsets=np.zeros(len(sizes) + 1, np.int32))
    found = experience_metrics(rows, CLAIM)
    assert [found[name] for name in ("reward/all_equal", "reward/no_spread_right", "reward/no_spread_wrong",
                                     "rollout/groups_of_one")] == pytest.approx(expected)


P95: dict[str, tuple[list[float], list[float], float, float]] = {
    # rewards, what the reward says -> p95 of the lengths of right and of wrong answers: of 2, 2, 4 and of 2, 4, 4
    "said": ([0.2, 0.2, 0.1, 0.1, 1, 0], [1, 1, 0, 0, 1, 0], 3.8, 4.0),
    "all right": ([1, 1, 1, 1], [NAN] * 4, 4.0, NAN),
    "not known": ([1, 1, 0.1, 0.1], [NAN] * 4, NAN, NAN),
}


@pytest.mark.parametrize(("rewards", "said", "right", "wrong"), P95.values(), ids=P95)
def test_right_and_wrong_answers_have_a_tail_each(rewards: list[float], said: list[float], right: float,
                                                  wrong: float) -> None:
    found = experience_metrics(rows_of(rewards, said, [0] * (len(rewards) // 2)), CLAIM)
    np.testing.assert_allclose([found["rollout/right_length_p95"], found["rollout/wrong_length_p95"]], [right, wrong])


def test_the_record_of_a_source_follows_the_same_rule() -> None:
    found = by_source(rows_of([0.7, 0.7, 0.1, 0.1, 1, 0], [1, 0, NAN, NAN, NAN, NAN], [1, 0, 0]))
    assert found["math"]["correct"] == 0.5 and math.isnan(found["gsm8k"]["correct"])
    plain = by_source(rows_of([0.7, 0.7, 1, 1, 1, 0], [1, 0, NAN, NAN, NAN, NAN], [1, 0, 0]))
    assert (plain["math"]["correct"], plain["gsm8k"]["correct"]) == (0.5, 0.75)
