"""KL estimators of log-prob differences (Schulman, "Approximating KL divergence", 2020), and what a KL term does with
them. Pure, per token, float32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_core.correction_settings import KlConfig
from rl_core.learner.correction import log_ratio

K3_LIMIT = 10.0
CONTROL_LIMIT = 0.2
"""Largest relative error that the adaptive controller acts on."""


def k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """d = log p - log q, for samples of p an unbiased estimate of KL(p || q)."""
    return log_p - log_q


def k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """d^2 / 2."""
    return (log_p - log_q).square() / 2


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """exp(-d) + d - 1 >= 0, d = log p - log q clamped to [-20, 20], the result to [-10, 10]."""
    d = log_ratio(log_p, log_q)
    return ((-d).exp() + d - 1.0).clamp(-K3_LIMIT, K3_LIMIT)


def absolute(log_p: Tensor, log_q: Tensor) -> Tensor:
    """|d|."""
    return (log_p - log_q).abs()


ESTIMATORS = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}


def estimate(log_p: Tensor, log_q: Tensor, estimator: str) -> Tensor:
    """By name: k1, abs, k2, k3; with a `+` behind it that value and the gradient of k2, so that k2+ is k2."""
    name, plus, _ = estimator.partition("+")
    value = ESTIMATORS[name](log_p, log_q)
    if not plus:
        return value
    square = k2(log_p, log_q)
    return value.detach() + square - square.detach()


def loss_term(policy_S: Tensor, reference_S: Tensor, behavior_S: Tensor, settings: KlConfig) -> Tensor:
    """KL of the policy against the reference per token, for the loss, without its coefficient; `unbiased` multiplies it
    by sg(pi/mu), since the tokens were sampled by mu (TRL's default)."""
    term_S = estimate(policy_S, reference_S, settings.estimator)
    return term_S * log_ratio(policy_S, behavior_S).exp().detach() if settings.unbiased else term_S


@dataclass(frozen=True, kw_only=True, slots=True)
class KlController:
    """The coefficient beta of a KL in the reward: `KlController(beta=0.001, target=0.1, horizon=10000)`.

    `target` None: fixed. Ziegler et al. (arXiv 1909.08593) section 2.2.
    """

    beta: float
    target: float | None = None
    """Nats per token, mean over answers of their means."""
    horizon: int = 10_000
    """Answers."""

    def after(self, kl: float, answers: int) -> KlController:
        """The controller behind a claim of `answers` answers whose mean KL was `kl`."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -CONTROL_LIMIT), CONTROL_LIMIT)
        return KlController(beta=self.beta * (1.0 + error * answers / self.horizon), target=self.target,
                            horizon=self.horizon)
