"""Every policy loss against the plain reference of tests/golden/losses.py, small numbers worked out by hand, and what
holds for all of them."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rl_core.config import LearnerConfig
from rl_core.learner.losses.covariance import at_least_one
from rl_core.learner.losses.m2po import m2po_tokens
from rl_core.learner.losses.tokens import TokenLoss, Tokens, loss_module
from rl_core.learner.objective import Corrected, composed
from rl_core.learner.whole import top
from rl_core.loss_settings import LossConfig
from rl_core.variants import variants
from tests.golden.losses import REFERENCES, SELECTIONS, Case, random_case, slopes

LOSSES = variants(LossConfig)
CASES = {f"{name} {settings or ''}": (name, settings) for name, (_, cases) in REFERENCES.items() for settings in cases}
FIRST = {name: cases[0] for name, (_, cases) in REFERENCES.items()}
"""Settings of every loss, the required ones among them."""


def tokens_of(case: Case) -> Tokens:
    def tensor(values):
        return torch.tensor(np.asarray(values))

    return Tokens(policy_S=tensor(case.policy).requires_grad_(), anchor_S=tensor(case.anchor),
                  behavior_S=tensor(case.behavior), advantage_S=tensor(case.advantage), reward_S=tensor(case.reward),
                  sequence_S=tensor(case.sequence), sequences=int(case.sequence.max(initial=-1)) + 1)


def found_by(name: str, case: Case, settings: dict) -> tuple[TokenLoss, torch.Tensor, Tokens]:
    """Token losses, their gradient by log pi, and the tokens with what was selected of them."""
    config, module = LOSSES[name](name=name, **settings), loss_module(name)
    tokens = tokens_of(case)
    if hasattr(module, "select"):
        tokens = replace(tokens, chosen_S=module.select(tokens, config, torch.tensor(case.draw)))
    found = module.token_loss(tokens, config)
    (gradient,) = torch.autograd.grad(found.loss_S.sum(), tokens.policy_S)
    return found, gradient, tokens


def test_every_loss_has_a_reference():
    assert set(REFERENCES) == set(LOSSES)


@pytest.mark.parametrize(("name", "settings"), CASES.values(), ids=CASES.keys())
def test_a_loss_agrees_with_its_reference_in_value_gradient_and_selection(name, settings):
    for seed in range(3):
        case = random_case(seed)
        found, gradient, tokens = found_by(name, case, settings)
        expected = REFERENCES[name][0](case.policy, case.policy, case, **settings)
        np.testing.assert_allclose(found.loss_S.detach(), expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(gradient, slopes(name, case, settings), rtol=1e-4, atol=1e-6)
        if tokens.chosen_S is not None:
            assert tokens.chosen_S.tolist() == SELECTIONS[name](case.policy, case, **settings)
            assert 0 < tokens.chosen_S.sum() < len(case.policy)


def one_answer(logs: list[float], advantage: float, *, reward: float = 1.0, behavior: float = 0.0) -> Case:
    """An answer of tokens with these log pi/prox; log prox is -1, log mu `behavior` below it."""
    count = len(logs)
    return Case(policy=-1.0 + np.array(logs), anchor=np.full(count, -1.0), behavior=np.full(count, -1.0 - behavior),
                advantage=np.full(count, advantage), reward=np.full(count, reward), sequence=np.zeros(count, np.int64),
                draw=np.zeros(count))


LOG2, P = math.log(2.0), math.exp(-1.0)
BY_HAND = {
    # name: loss, settings, answer, token losses, their gradient
    "dppo_tv keeps a small rise": ("dppo_tv", {}, one_answer([0.1], 2.0), [-2 * math.exp(0.1) * -0.9],
                                   [-2 * math.exp(0.1)]),
    "dppo_tv masks a rise of e^-0.4 - e^-1 = 0.302": ("dppo_tv", {}, one_answer([0.6], 2.0), [0.0], [0.0]),
    "dppo_tv lets a bad token rise": ("dppo_tv", {}, one_answer([0.6], -1.0), [math.exp(0.6) * -0.4], [math.exp(0.6)]),
    "dppo_kl masks KL 0.0935 > 0.09 of a fall by half": (
        "dppo_kl", {"clip_low": 0.09}, one_answer([-LOG2], -1.0), [0.0], [0.0]),
    "dppo_kl keeps it at 0.1": ("dppo_kl", {"clip_low": 0.1}, one_answer([-LOG2], -1.0), [0.5 * (-1 - LOG2)], [0.5]),
    "gspo has the ratio of the answer": ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, one_answer([0.2, -0.1], 1.0),
                                         [-math.exp(0.05)] * 2, [-math.exp(0.05)] * 2),
    "gspo clips an answer as a whole": ("gspo", {}, one_answer([0.2, -0.1], 1.0), [-1.0004] * 2, [0.0, 0.0]),
    "sapo on policy is -2A with gradient -A": ("sapo", {}, one_answer([0.0], 3.0), [-6.0], [-3.0]),
    "sapo of a bad token at r = 2": ("sapo", {}, one_answer([LOG2], -1.0), [4 / 1.05 / (1 + math.exp(-1.05))],
                                     [2 * 4 * math.exp(-1.05) / (1 + math.exp(-1.05)) ** 2]),
    "gpg": ("gpg", {}, one_answer([0.5], 3.0), [1.5], [-3.0]),
    "gmpo of ratios 2 and 0.5 clips the high one": ("gmpo", {}, one_answer([LOG2, -LOG2], 1.0),
                                                    [-math.exp((0.2 - LOG2) / 2)] * 2,
                                                    [0.0, -math.exp((0.2 - LOG2) / 2)]),
    "dro": ("dro", {"beta": 2.0}, one_answer([0.5], 3.0), [1.5 + 0.25], [-3.0 + 1.0]),
    "cispo clips the weight and keeps the gradient": ("cispo", {}, one_answer([LOG2], 3.0), [-3 * 1.2 * (-1 + LOG2)],
                                                      [-3.6]),
    "tis_reinforce weighs by pi/mu": ("tis_reinforce", {}, one_answer([0.0], 1.0, behavior=LOG2), [2.0], [-2.0]),
    "topr takes good answers in full": ("topr", {}, one_answer([0.0], 1.0, behavior=LOG2), [1.0], [-1.0]),
    "topr cuts bad ones at 1": ("topr", {}, one_answer([0.0], -1.0, reward=0.0, behavior=LOG2), [-1.0], [1.0]),
    "topr takes bad ones that have left by their ratio": (
        "topr", {}, one_answer([0.0], -1.0, reward=0.0, behavior=-LOG2), [-0.5], [0.5]),
    "kl_cov adds coef |log r| to one token": ("kl_cov", {"coef": 0.5}, one_answer([0.3], 1.0), [-math.exp(0.3) + 0.15],
                                              [-math.exp(0.3) + 0.5]),
    "opsm drops a bad answer that mu preferred": ("opsm", {"opsm_delta": 0.1}, one_answer([-0.1, -0.15], -1.0),
                                                  [0.0, 0.0], [0.0, 0.0]),
    "opsm keeps a good one": ("opsm", {"opsm_delta": 0.1}, one_answer([-0.1, -0.15], 1.0),
                              [-math.exp(-0.1), -math.exp(-0.15)], [-math.exp(-0.1), -math.exp(-0.15)]),
    "delta bounds the ratio": ("ppo_clip", {"delta": 1.5, "dual_clip": None}, one_answer([LOG2], -1.0), [1.5], [0.0]),
}


@pytest.mark.parametrize(("name", "settings", "case", "losses", "gradient"), BY_HAND.values(), ids=BY_HAND.keys())
def test_token_losses_are_as_worked_out_by_hand(name, settings, case, losses, gradient):
    found, slope, _ = found_by(name, case, settings)
    np.testing.assert_allclose(found.loss_S.detach(), losses, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(slope, gradient, rtol=1e-9, atol=1e-12)


def test_m2po_masks_the_largest_until_the_mean_of_the_rest_is_below_tau():
    behavior, proximal = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.1, -1.3, -2.0, -1.0])
    # squares 0.01, 0.09, 1, 0: means of the smallest 0, 0.005, 0.0333, 0.275
    assert m2po_tokens(behavior, proximal, tau=0.04).tolist() == [False, False, True, False]
    assert m2po_tokens(behavior, proximal, tau=0.03).tolist() == [False, True, True, False]
    assert m2po_tokens(behavior - 1, proximal, tau=0.04).sum() == 3, "one token stays"


def test_a_share_of_tokens_is_at_least_one():
    assert [at_least_one(2e-4, n) for n in (1, 4999, 10_000)] == [1, 1, 2]


def test_what_is_aggregated_is_the_loss_of_uncertain_tokens_and_a_penalty_on_all_but_rejected_ones():
    """Of gpg with A = 2: -2 log pi. log pi - log mu is 0.5, -1, 0.25, 0.5, 0.1; the penalty is 0.1 times its square."""
    case = replace(one_answer([0.0] * 5, 2.0), behavior=np.array([-1.5, 0.0, -1.25, -1.5, -1.1]))
    tokens = replace(tokens_of(case), policy_S=torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True))
    learner = LearnerConfig.model_validate({"loss": {"name": "gpg", "behavior_penalty": 0.1}})
    correction = Corrected(torch.tensor([3.0, 1.0, 1.0, 1.0, 1.0]), torch.tensor([True, True, True, False, True]))
    uncertain, impossible = torch.tensor([True, True, False, True, True]), torch.tensor([False] * 4 + [True])
    found = composed(loss_module("gpg").token_loss(tokens, learner.loss), tokens, correction, impossible, learner,
                     uncertain)
    np.testing.assert_allclose(found.detach(), [6.025, 2.1, 0.00625, 0.0, 0.0], rtol=1e-9)
    (slope,) = torch.autograd.grad(found.sum(), tokens.policy_S)
    np.testing.assert_allclose(slope, [-5.9, -2.2, 0.05, 0.0, 0.0], rtol=1e-9, atol=1e-12)


TOP = {"half of five, rounded up": (0.5, [True, False, True, True, False]), "all": (1.0, [True] * 5),
       "a tie goes to the earlier token": (0.4, [True, False, True, False, False]),
       "one at least": (0.01, [False, False, True, False, False])}


@pytest.mark.parametrize(("share", "expected"), TOP.values(), ids=TOP)
def test_the_uncertain_tokens_are_those_of_highest_entropy(share, expected):
    assert top(torch.tensor([1.0, 0.2, 3.0, 1.0, 0.0]), share).tolist() == expected


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_tokens_does_not_matter(name):
    case, settings = random_case(5), FIRST[name]
    order = np.random.default_rng(0).permutation(len(case.policy))
    shuffled = Case(**{field.name: getattr(case, field.name)[order] for field in fields(case)})
    one, slope, _ = found_by(name, case, settings)
    two, other_slope, _ = found_by(name, shuffled, settings)
    np.testing.assert_allclose(two.loss_S.detach(), one.loss_S.detach()[order], rtol=1e-12)
    np.testing.assert_allclose(other_slope, slope[order], rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in SELECTIONS])
def test_an_answer_has_the_loss_that_it_has_alone(name):
    case, settings = random_case(6), FIRST[name]
    whole = found_by(name, case, settings)[0].loss_S.detach()
    for answer in range(7):
        mine = case.sequence == answer
        alone = Case(**{field.name: getattr(case, field.name)[mine] for field in fields(case)})
        np.testing.assert_allclose(found_by(name, alone, settings)[0].loss_S.detach(), whole[mine], rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_of_every_loss_is_minus_the_advantage(name):
    """All are policy gradients: they differ only in what they do with tokens that another policy sampled."""
    case = random_case(7, spread=0.0)
    settings = {**FIRST[name], **({"coef": 1e-12} if name == "kl_cov" else {})}
    _, gradient, tokens = found_by(name, replace(case, anchor=case.policy, behavior=case.policy), settings)
    here = np.ones(len(case.policy), bool) if tokens.chosen_S is None or name == "kl_cov" else ~tokens.chosen_S.numpy()
    np.testing.assert_allclose(gradient[here], -case.advantage[here], rtol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_advantage_zero_everywhere_is_no_gradient_and_no_nan(name):
    case = replace(random_case(8), advantage=np.zeros(48))
    settings = {**FIRST[name], **({"coef": 1e-12} if name == "kl_cov" else {})}
    found, gradient, _ = found_by(name, case, settings)
    assert torch.isfinite(found.loss_S).all()
    if name != "dro":  # whose penalty does not know the advantage
        np.testing.assert_allclose(gradient, 0.0, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_without_company_and_extreme_ratios_stay_finite(name):
    for logs in ([0.9], [-700.0, 0.5], [0.99] * 3):
        case = replace(one_answer(logs, -1.0, behavior=90.0), anchor=np.full(len(logs), -900.0))
        found, gradient, _ = found_by(name, case, FIRST[name])
        assert torch.isfinite(found.loss_S).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_a_token_is_no_loss(name):
    case = random_case(1, tokens=0, sequences=3)
    config = LOSSES[name](name=name, **FIRST[name])
    tokens = replace(tokens_of(case), chosen_S=torch.zeros(0, dtype=torch.bool), sequence_S=torch.zeros(0).long())
    assert loss_module(name).token_loss(tokens, config).loss_S.sum().item() == 0.0
