"""KL estimators of log-prob differences (Schulman, "Approximating KL divergence", 2020). Pure, per token, float32."""

from __future__ import annotations

from torch import Tensor

from rl_core.learner.correction import log_ratio

K3_LIMIT = 10.0


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
