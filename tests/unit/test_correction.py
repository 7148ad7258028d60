"""Token weights, the log-linear proximal and the KL estimators against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl_core.combinations import check_combination
from rl_core.config import CorrectionConfig, LearnerConfig
from rl_core.errors import ConfigError
from rl_core.learner.correction import effective_samples, loglinear_proximal, token_weights, truncate
from rl_core.learner.kl import k1, k2, k3
from rl_core.learner.plan import needs_proximal_pass, weight_cap
from rl_core.loss_settings import PpoClipLoss


def test_token_weights_are_ratios_detached_and_truncated_from_above_only():
    proximal = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behavior = torch.tensor([-1.0, -1.0 - math.log(4.0), -1.0 + math.log(4.0)])
    weights = token_weights(proximal, behavior)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights, [1.0, 4.0, 0.25], rtol=1e-6)
    np.testing.assert_allclose(truncate(weights, 2.0), [1.0, 2.0, 0.25], rtol=1e-6)


def test_an_extreme_weight_is_clamped_at_e_to_the_20():
    assert token_weights(torch.tensor([0.0]), torch.tensor([-80.0])).item() == pytest.approx(math.exp(20), rel=1e-6)


def test_effective_samples_of_weights_1_1_and_4():
    w = np.array([1.0, 1.0, 4.0])
    assert effective_samples(w.sum(), (w**2).sum(), 3) == pytest.approx(1 / np.mean((w / w.mean()) ** 2))
    assert effective_samples(6.0, 18.0, 3) == pytest.approx(36 / 54)
    assert math.isnan(effective_samples(0.0, 0.0, 0))


LOGLINEAR = {
    # i_mu, share a at i_prox = 4 (i_pi = 5)
    "sampled by the proximal publication": (4, 0.0),
    "one older": (3, 1 / 2),
    "two older": (2, 2 / 3),
    "the first": (0, 4 / 5),
    "gap of zero": (5, 0.0),
}


@pytest.mark.parametrize(("idx_mu", "share"), LOGLINEAR.values(), ids=LOGLINEAR.keys())
def test_loglinear_proximal_lies_between_behavior_and_policy(idx_mu, share):
    policy = torch.tensor([-0.5], requires_grad=True)
    found = loglinear_proximal(policy, torch.tensor([-2.0]), torch.tensor([idx_mu]), 4)
    assert found.item() == pytest.approx(-2.0 + share * 1.5)
    assert not found.requires_grad


def test_kl_estimators_of_one_token():
    p, q = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert k1(p, q).item() == pytest.approx(0.5)
    assert k2(p, q).item() == pytest.approx(0.125)
    assert k3(p, q).item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert k3(torch.tensor([-30.0]), torch.tensor([0.0])).item() == 10.0


def test_k3_is_unbiased_and_never_negative():
    rng = np.random.default_rng(0)
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.4, 0.3])
    drawn = rng.choice(3, 200_000, p=p)
    found = k3(torch.tensor(np.log(p[drawn])), torch.tensor(np.log(q[drawn])))
    assert found.min().item() >= 0
    assert found.mean().item() == pytest.approx(float((p * np.log(p / q)).sum()), rel=0.02)


def test_combinations_that_make_no_sense_are_refused_by_field():
    twice = LearnerConfig(loss=PpoClipLoss(name="decoupled_ppo"), correction=CorrectionConfig(weights="token_truncate"))
    with pytest.raises(ConfigError, match=r"learner\.correction\.weights: decoupled_ppo has its own"):
        check_combination(twice)
    with pytest.raises(ConfigError, match=r"learner\.loss\.proximal: belongs to"):
        check_combination(LearnerConfig(loss=PpoClipLoss(name="ppo_clip", proximal="loglinear")))
    check_combination(LearnerConfig(loss=PpoClipLoss(name="decoupled_ppo", proximal="loglinear")))


def test_the_cap_of_token_weights_is_the_losss_own_or_the_corrections():
    assert weight_cap(LearnerConfig()) is None
    assert weight_cap(LearnerConfig(correction=CorrectionConfig(weights="token_truncate", cap=1.5))) == 1.5
    assert weight_cap(LearnerConfig(loss=PpoClipLoss(name="decoupled_ppo"))) == 5.0


def test_a_proximal_pass_is_made_only_from_the_second_update_on():
    recompute, loglinear = LearnerConfig(), LearnerConfig(loss=PpoClipLoss(name="decoupled_ppo", proximal="loglinear"))
    assert [needs_proximal_pass(recompute, n) for n in (1, 2)] == [False, True]
    assert [needs_proximal_pass(loglinear, n) for n in (1, 2)] == [False, False]
