"""Advantages against small numbers checked by hand, and against plain loops written from algorithms.md."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl_core.advantage_settings import GroupAdvantage
from rl_core.learner.advantages.estimate import advantages, answers_of
from rl_core.learner.advantages.grpo import grpo
from rl_core.learner.advantages.rloo import rloo

HALF = np.sqrt(1 / 3)  # sample deviation of [0, 0, 0, 1] is 0.5, of [0, 1, 0, 1] is sqrt(1/3)
HALF_OF_PAIR = 0.5 / np.sqrt(0.5)  # of [0, 1] it is sqrt(1/2)


def reference(name: str, rewards: list[float], groups: list[int], *, eps: float = 1e-6, std: bool = True,
              alone: str = "zero") -> list[float]:
    """One answer at a time, from the formulas alone."""
    out: list[float] = []
    for s, g in zip(rewards, groups, strict=True):
        mates = [r for r, h in zip(rewards, groups, strict=True) if h == g]
        n, mu = len(mates), math.fsum(mates) / len(mates)
        if n == 1:
            out.append(s if alone == "raw" else 0.0)
        elif name == "rloo":
            out.append(n / (n - 1) * (s - mu))
        else:
            sigma = math.sqrt(math.fsum((r - mu) ** 2 for r in mates) / (n - 1))
            out.append((s - mu) / (sigma + eps) if std else s - mu)
    return out


BY_HAND = {
    "grpo, one right of four": ("grpo", {}, [1, 0, 0, 0], [0, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
    "grpo, half right": ("grpo", {}, [0, 1, 0, 1], [0, 0, 0, 0], [-0.5 / HALF, 0.5 / HALF, -0.5 / HALF, 0.5 / HALF]),
    "grpo, no spread": ("grpo", {}, [1, 1, 1], [0, 0, 0], [0, 0, 0]),
    "grpo, large eps": ("grpo", {"eps": 0.5}, [1, 0, 0, 0], [0, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    "dr.grpo": ("grpo", {"normalize_by_std": False}, [1, 0, 0, 0], [0, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    "grpo, two groups interleaved": ("grpo", {}, [1, 2, 0, 2], [0, 1, 0, 1], [HALF_OF_PAIR, 0, -HALF_OF_PAIR, 0]),
    "grpo, group of one is 0": ("grpo", {}, [5, 1, 0], [0, 1, 1], [0, HALF_OF_PAIR, -HALF_OF_PAIR]),
    "grpo, group of one raw": ("grpo", {"group_of_one": "raw"}, [5], [0], [5]),
    "rloo, one right of four": ("rloo", {}, [1, 0, 0, 0], [0, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    "rloo, pair": ("rloo", {}, [3, 1], [0, 0], [2, -2]),
    "rloo, group of one is 0": ("rloo", {}, [5], [0], [0]),
    "rloo, group of one raw": ("rloo", {"group_of_one": "raw"}, [5], [0], [5]),
}


@pytest.mark.parametrize(("name", "options", "rewards", "groups", "expected"), BY_HAND.values(), ids=BY_HAND.keys())
def test_small_groups_have_the_advantages_worked_out_by_hand(name, options, rewards, groups, expected):
    config = GroupAdvantage(name=name, **options)
    found = advantages(answers_of(np.array(rewards, np.float32), np.array(groups, np.int32)), config)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_random_claims_agree_with_a_plain_loop(name, std):
    rng = np.random.default_rng(3)
    groups = rng.integers(0, 40, 300)
    groups = np.unique(groups, return_inverse=True)[1]
    rewards = rng.normal(size=300).round(3)
    config = GroupAdvantage(name=name, normalize_by_std=std)
    expected = reference(name, rewards.tolist(), groups.tolist(), std=std)
    np.testing.assert_allclose(advantages(answers_of(rewards, groups), config), expected, rtol=1e-5, atol=1e-6)


def test_every_group_sums_to_zero_and_rloo_is_the_mean_of_the_others():
    rewards, groups = np.array([0.2, 0.9, 0.4, 1.0, 0.0]), np.array([0, 0, 0, 1, 1])
    for found in (grpo(rewards, groups), rloo(rewards, groups)):
        np.testing.assert_allclose(np.bincount(groups, weights=found), 0, atol=1e-6)
    assert rloo(rewards, groups)[1] == pytest.approx(0.9 - (0.2 + 0.4) / 2)


def test_an_absent_answer_is_outside_its_groups_statistics():
    config = GroupAdvantage(name="grpo", normalize_by_std=False)
    present = np.array([True, True, True, False])
    found = advantages(answers_of(np.array([1.0, 0.0, 0.5, 100.0]), np.zeros(4, np.int32)), config,
                       present_N=present)
    np.testing.assert_allclose(found, [0.5, -0.5, 0.0, 0.0])


def test_a_group_left_with_one_present_answer_is_a_group_of_one():
    present = np.array([True, False])
    found = advantages(answers_of(np.array([1.0, 7.0]), np.zeros(2, np.int32)), GroupAdvantage(), present_N=present)
    assert found.tolist() == [0.0, 0.0]


def test_a_reward_that_is_not_finite_is_refused_by_place():
    with pytest.raises(ValueError, match="trajectory 1 is not finite"):
        answers_of(np.array([0.0, np.nan]), np.zeros(2, np.int32))
