"""Policy losses and aggregations against NumPy loops written from algorithms.md, values and gradients."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from rl_core.learner.aggregation import Denominators, aggregate
from rl_core.learner.losses.ppo_clip import ppo_clip
from rl_core.loss_settings import Aggregation
from tests.golden import aggregation as golden


def reference_ppo_clip(policy, proximal, advantage, low, high, dual):
    """Token losses and their derivative by log pi, one token at a time."""
    losses, slopes = [], []
    for p, q, a in zip(policy, proximal, advantage, strict=True):
        r = math.exp(max(-20.0, min(20.0, p - q)))
        free, clipped = -a * r, -a * min(max(r, 1 - low), 1 + high)
        loss, slope = (free, free) if free >= clipped else (clipped, -a * r if 1 - low < r < 1 + high else 0.0)
        if dual is not None and a < 0 and loss > -a * dual:
            loss, slope = -a * dual, 0.0
        losses.append(loss)
        slopes.append(slope)
    return losses, slopes


BY_HAND = {
    # name: log ratio, advantage, loss, d loss / d log pi, (clipped low, clipped high)
    "inside, good": (math.log(1.1), 2.0, -2.2, -2.2, (False, False)),
    "too likely, good: no gradient": (math.log(1.5), 2.0, -2.4, 0.0, (False, True)),
    "too unlikely, good: pulled back": (math.log(0.5), 2.0, -1.0, -1.0, (False, False)),
    "inside, bad": (math.log(0.9), -2.0, 1.8, 1.8, (False, False)),
    "too unlikely, bad: no gradient": (math.log(0.5), -2.0, 1.6, 0.0, (True, False)),
    "too likely, bad: pulled back": (math.log(2.0), -2.0, 4.0, 4.0, (False, False)),
    "far too likely, bad: dual clip": (math.log(5.0), -2.0, 6.0, 0.0, (False, False)),
    "on policy": (0.0, 0.5, -0.5, -0.5, (False, False)),
}


@pytest.mark.parametrize(("d", "a", "loss", "slope", "clips"), BY_HAND.values(), ids=BY_HAND.keys())
def test_ppo_clip_of_one_token_is_as_worked_out_by_hand(d, a, loss, slope, clips):
    policy = torch.tensor([-1.0 + d], requires_grad=True)
    found = ppo_clip(policy, torch.tensor([-1.0]), torch.tensor([a]))
    found.loss_S.sum().backward()
    assert found.loss_S.item() == pytest.approx(loss, rel=1e-5)
    assert policy.grad is not None and policy.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
    assert (bool(found.low_S), bool(found.high_S)) == clips


SETTINGS = {"symmetric": (0.2, 0.2, 3.0), "asymmetric": (0.2, 0.28, 3.0), "no dual clip": (0.2, 0.2, None),
            "tight": (0.01, 0.02, 1.5)}


@pytest.mark.parametrize(("low", "high", "dual"), SETTINGS.values(), ids=SETTINGS.keys())
def test_ppo_clip_agrees_with_a_plain_loop_in_value_and_gradient(low, high, dual):
    rng = np.random.default_rng(5)
    proximal = -rng.exponential(1.0, 400)
    policy = proximal + rng.normal(0, 0.8, 400)
    advantage = rng.normal(size=400)
    x = torch.tensor(policy, requires_grad=True)
    found = ppo_clip(x, torch.tensor(proximal), torch.tensor(advantage), low=low, high=high, dual=dual)
    found.loss_S.sum().backward()
    losses, slopes = reference_ppo_clip(policy, proximal, advantage, low, high, dual)
    np.testing.assert_allclose(found.loss_S.detach(), losses, rtol=1e-12)
    assert x.grad is not None
    np.testing.assert_allclose(x.grad, slopes, rtol=1e-12, atol=1e-15)


def test_a_ratio_beyond_e_to_the_20_is_clamped():
    found = ppo_clip(torch.tensor([0.0]), torch.tensor([-50.0]), torch.tensor([-1.0]), dual=None)
    assert found.ratio_S.item() == pytest.approx(math.exp(20), rel=1e-6)


# Three sequences with 1, 2 and 3 loss tokens; divisor 4 for the normalised sum.
LOSSES, SEQUENCES, TOKENS = [6.0, 1.0, 3.0, 2.0, 4.0, 9.0], [0, 1, 1, 2, 2, 2], [1, 2, 3]
AGGREGATED = {"token_mean": 25 / 6, "token_sum": 25.0, "seq_mean_token_sum": 25 / 3, "seq_mean_token_sum_norm": 25 / 12,
              "seq_mean_token_mean": (6 + 2 + 5) / 3}


@pytest.mark.parametrize(("name", "expected"), AGGREGATED.items(), ids=AGGREGATED.keys())
def test_aggregations_of_three_sequences_are_as_worked_out_by_hand(name, expected):
    found = aggregate(torch.tensor(LOSSES), torch.tensor(SEQUENCES), torch.tensor(TOKENS), Denominators(6, 3), name,
                      max_new_tokens=4)
    assert found.item() == pytest.approx(expected)


@pytest.mark.parametrize("name", get_args(Aggregation))
def test_an_aggregation_agrees_with_its_reference_however_the_minibatch_is_cut(name):
    for seed in range(3):
        case = golden.random_minibatch(seed)
        answer, micro = np.array(case.answer), np.random.default_rng(seed).integers(0, 4, len(case.loss))
        tokens_M, whole = torch.tensor(np.bincount(answer, minlength=11)), Denominators(len(answer), 9)
        loss = torch.tensor(case.loss, dtype=torch.float64, requires_grad=True)
        parts = [aggregate(loss[micro == m], torch.tensor(answer[micro == m]), tokens_M, whole, name,
                           max_new_tokens=case.longest) for m in range(4)]
        assert sum(parts).item() == pytest.approx(golden.aggregated(case, name), rel=1e-12)
        np.testing.assert_allclose(torch.autograd.grad(sum(parts), loss)[0], golden.slopes(case, name), rtol=1e-12)


@pytest.mark.parametrize("name", AGGREGATED)
def test_micro_batches_add_up_to_the_minibatch(name):
    whole = Denominators(6, 3)
    parts = [aggregate(torch.tensor(LOSSES)[part], torch.tensor(SEQUENCES)[part], torch.tensor(TOKENS), whole, name,
                       max_new_tokens=4).item() for part in ([0, 2, 5], [1, 3, 4])]
    assert sum(parts) == pytest.approx(AGGREGATED[name])


@pytest.mark.parametrize("name", AGGREGATED)
def test_a_minibatch_without_a_token_has_loss_zero(name):
    nothing = torch.zeros(0)
    found = aggregate(nothing, nothing.long(), torch.tensor([0]), Denominators(0, 0), name, max_new_tokens=4)
    assert found.item() == 0.0
