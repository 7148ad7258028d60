"""Weights, rejection rules, KL estimators and their controller against the plain reference of
tests/golden/corrections.py, and small numbers worked out by hand."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from rl_core.correction_settings import CorrectionConfig, KlConfig, RejectionRule, RuleName
from rl_core.learner.correction import correction_weights, icepop, level_weights, mean_weight
from rl_core.learner.distillation import distillation_loss, distilled_advantage, forward_topk
from rl_core.learner.kl import KlController, estimate, loss_term
from rl_core.learner.rejection import keep_tokens, passes
from rl_core.learner.value_loss import value_loss
from tests.golden import corrections as golden

RNG = np.random.default_rng(11)
SEQUENCE = RNG.permutation(np.arange(40) % 6).tolist()
D = RNG.normal(0, 0.6, 40).tolist()
HUGE = [80.0, -80.0, *D[2:]]
D_S, HUGE_S, SEQUENCE_S = torch.tensor(D), torch.tensor(HUGE), torch.tensor(SEQUENCE)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_of_every_level_agree_with_the_reference(level):
    for d, tensor in ((D, D_S), (HUGE, HUGE_S)):
        found = level_weights(tensor.double(), SEQUENCE_S, 6, level)
        np.testing.assert_allclose(found, golden.weights(d, SEQUENCE, level), rtol=1e-6)
        truncated = correction_weights(tensor.double(), SEQUENCE_S, 6,
                                       CorrectionConfig(weights=f"{level}_truncate", cap=1.5))
        np.testing.assert_allclose(truncated, golden.truncated(golden.weights(d, SEQUENCE, level), 1.5), rtol=1e-6)
        popped = correction_weights(tensor.double(), SEQUENCE_S, 6,
                                    CorrectionConfig(weights=f"{level}_icepop", icepop_low=0.8, icepop_high=1.4))
        np.testing.assert_allclose(popped, golden.icepopped(golden.weights(d, SEQUENCE, level), 0.8, 1.4), rtol=1e-6)


def test_weights_of_two_answers_are_as_worked_out_by_hand():
    log2, sequence = math.log(2.0), torch.tensor([0, 0, 1])
    d = torch.tensor([log2, -2 * log2, log2])
    np.testing.assert_allclose(level_weights(d, sequence, 2, "token"), [2, 0.25, 2], rtol=1e-6)
    np.testing.assert_allclose(level_weights(d, sequence, 2, "sequence"), [0.5, 0.5, 2], rtol=1e-6)
    np.testing.assert_allclose(level_weights(d, sequence, 2, "geometric"), [0.5**0.5, 0.5**0.5, 2], rtol=1e-6)
    assert icepop(torch.tensor([0.4, 0.5, 5.0, 5.1]), 0.5, 5.0).tolist() == [0.0, 0.5, 5.0, 0.0]


def test_the_mean_weight_is_over_tokens_for_token_weights_and_over_answers_for_others():
    weights, sequence = torch.tensor([1.0, 1.0, 4.0]), torch.tensor([0, 0, 2])
    assert mean_weight(weights, sequence, 3, CorrectionConfig(weights="token_truncate")).item() == 2.0
    assert mean_weight(weights, sequence, 3, CorrectionConfig(weights="sequence_truncate")).item() == 2.5
    assert mean_weight(torch.zeros(3), sequence, 3, CorrectionConfig(weights="token_icepop")).item() == 1.0


BOUNDS = {"k1": [(1.5, None), (1.2, 0.9)], "k2": [(0.1, None), (1.0, None)], "k3": [(0.1, None), (1.0, None)]}
RULES = [(rule, high, low) for rule in get_args(RuleName) for high, low in BOUNDS[rule[-2:]]]


@pytest.mark.parametrize(("rule", "high", "low"), RULES)
def test_a_rejection_rule_agrees_with_the_reference(rule, high, low):
    settings = RejectionRule(rule=rule, high=high, low=low)
    for d, tensor in ((D, D_S), (HUGE, HUGE_S)):
        found = passes(tensor.double(), SEQUENCE_S, 6, settings)
        assert found.tolist() == golden.kept(d, SEQUENCE, rule, high, low)


REJECTED = {
    # rule: bounds, d of two answers (two tokens and one), what is kept
    "token_k1 of ratios 1.1, 3, 0.4 in [1/2, 2]": ("token_k1", 2.0, None, [1.1, 3.0, 0.4], [True, False, False]),
    "token_k1 with a lower bound of its own": ("token_k1", 3.1, 0.3, [1.1, 3.0, 0.2], [True, True, False]),
    "seq_mean_k1 is the geometric mean: sqrt(0.5 * 3) = 1.22": ("seq_mean_k1", 1.25, None, [0.5, 3.0, 1.3],
                                                               [True, True, False]),
    "seq_sum_k1 is the product: 1.5": ("seq_sum_k1", 1.4, None, [0.5, 3.0, 1.3], [False, False, True]),
    "token_k2 of log 2 is 0.24": ("token_k2", 0.24, None, [2.0, 1.5, 2.0], [False, True, False]),
    "seq_max_k2": ("seq_max_k2", 0.2, None, [2.0, 1.0, 1.5], [False, False, True]),
    "token_k3 of 2 is 0.307, of 1/2 is 0.193": ("token_k3", 0.25, None, [2.0, 0.5, 1.0], [False, True, True]),
    "seq_mean_k3 of 2 and 1 is 0.153": ("seq_mean_k3", 0.16, None, [2.0, 1.0, 2.0], [True, True, False]),
    "seq_sum_k3": ("seq_sum_k3", 0.3, None, [2.0, 1.0, 0.5], [False, False, True]),
}


@pytest.mark.parametrize(("rule", "high", "low", "ratios", "expected"), REJECTED.values(), ids=REJECTED.keys())
def test_rejection_is_as_worked_out_by_hand(rule, high, low, ratios, expected):
    d = torch.tensor(ratios, dtype=torch.float64).log()
    assert passes(d, torch.tensor([0, 0, 1]), 2, RejectionRule(rule=rule, high=high, low=low)).tolist() == expected


def test_several_rules_are_all_to_be_passed():
    rules = (RejectionRule(rule="token_k1", high=2.0), RejectionRule(rule="seq_max_k2", high=0.3))
    found = keep_tokens(D_S, SEQUENCE_S, 6, rules)
    assert found.tolist() == [a and b for a, b in zip(golden.kept(D, SEQUENCE, "token_k1", 2.0, None),
                                                      golden.kept(D, SEQUENCE, "seq_max_k2", 0.3, None), strict=True)]
    assert keep_tokens(D_S, SEQUENCE_S, 6, ()).all()


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"])
def test_kl_estimators_agree_with_the_reference_in_value_and_gradient(name):
    policy = torch.tensor(D, dtype=torch.float64, requires_grad=True)
    found = estimate(policy, torch.zeros(40, dtype=torch.float64), name)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    np.testing.assert_allclose(found.detach(), [golden.kl(d, name.rstrip("+")) for d in D], rtol=1e-9)
    np.testing.assert_allclose(gradient, [golden.kl_slope(d, name) for d in D], rtol=1e-9)


def test_a_plus_behind_an_estimator_is_its_value_with_the_gradient_of_k2():
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)  # d = 0.5 and -0.25
    found = {name: estimate(policy, torch.tensor([-1.5, -1.75]), name) for name in ("k1+", "abs+", "k2+", "k2")}
    assert {name: value.tolist() for name, value in found.items()} == {
        "k1+": [0.5, -0.25], "abs+": [0.5, 0.25], "k2+": [0.125, 0.03125], "k2": [0.125, 0.03125]}
    slopes = [torch.autograd.grad(value.sum(), policy)[0].tolist() for value in found.values()]
    assert slopes == [[0.5, -0.25]] * 4


def test_kl_estimators_are_bounded_where_the_policies_are_far_apart():
    far = torch.tensor([-80.0, 80.0])
    assert estimate(far, torch.zeros(2), "k3").tolist() == [10.0, 10.0]
    assert torch.isfinite(estimate(far, torch.zeros(2), "k3+")).all()


def test_the_kl_of_the_loss_is_weighted_by_pi_over_mu_where_it_is_unbiased():
    policy, reference = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.5])
    behavior = torch.tensor([-1.0 - math.log(2.0)])
    plain = loss_term(policy, reference, behavior, KlConfig(estimator="k2"))
    weighted = loss_term(policy, reference, behavior, KlConfig(estimator="k2", unbiased=True))
    assert plain.item() == pytest.approx(0.125) and weighted.item() == pytest.approx(0.25)
    assert torch.autograd.grad(weighted.sum(), policy)[0].item() == pytest.approx(1.0), "the weight has no gradient"


CONTROL = {  # kl, beta after 500 answers at target 0.1, horizon 1000, beta 1
    "on target": (0.1, 1.0), "10 % above": (0.11, 1.05), "far above": (9.0, 1.1), "far below": (0.0, 0.9)}


@pytest.mark.parametrize(("kl", "expected"), CONTROL.values(), ids=CONTROL.keys())
def test_the_adaptive_controller_follows_the_clipped_error(kl, expected):
    controller = KlController(beta=1.0, target=0.1, horizon=1000)
    assert controller.after(kl, 500).beta == pytest.approx(expected)
    assert controller.after(kl, 500).after(kl, 500).beta == pytest.approx(expected**2)
    assert KlController(beta=1.0).after(kl, 500).beta == 1.0, "fixed without a target"


def test_the_value_loss_is_as_worked_out_by_hand():
    value, before, returns = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, 1.0, 0.2])
    # (1-2)^2; V far above the clip 1.5: max(1, 0.25); V below it 0.5: max(0.04, 0.09)
    np.testing.assert_allclose(value_loss(value, before, returns), [0.5, 0.5, 0.045], rtol=1e-6)


def test_distillation_is_as_worked_out_by_hand():
    policy, teacher = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0])
    found = distilled_advantage(torch.tensor([0.5]), policy, teacher, coef=0.25)
    assert found.tolist() == [0.25] and not found.requires_grad
    assert distillation_loss(policy, teacher, "k2").item() == 0.5
    apart = distillation_loss(policy, teacher, "abs")
    assert (apart.item(), torch.autograd.grad(apart, policy)[0].item()) == (1.0, 1.0)
    p, t = torch.tensor([[0.25, 0.5]]).log(), torch.tensor([[0.5, 0.25]]).log()
    # 0.5 log 2 - 0.25 log 2, and the rest is 0.25 on both sides
    assert forward_topk(p, t).item() == pytest.approx(0.25 * math.log(2))
    whole = torch.tensor([[0.5, 0.5]]).log()
    assert forward_topk(whole, whole).item() == pytest.approx(0.0, abs=1e-6)


NEVER = {  # policy, teacher, the sum over what both hold possible
    "by the teacher": ([0.25, 0.75], [0.0, 1.0], math.log(1 / 0.75)),
    "by the policy": ([0.0, 1.0], [0.5, 0.5], 0.5 * math.log(0.5)),
    "by both": ([0.0, 1.0], [0.0, 1.0], 0.0),
}


@pytest.mark.parametrize(("policy", "teacher", "expected"), NEVER.values(), ids=NEVER)
def test_a_token_that_is_held_impossible_has_no_part_in_the_forward_kl(policy, teacher, expected):
    logits = torch.tensor([policy]).log().requires_grad_()
    found = forward_topk(logits.log_softmax(-1), torch.tensor([teacher]).log())
    found.sum().backward()
    assert found.item() == pytest.approx(expected, abs=3e-6) and torch.isfinite(logits.grad).all()
