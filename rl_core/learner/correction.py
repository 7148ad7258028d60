"""Off-policy correction: token weights proximal/behavior, and the log-linear proximal log-probs. Pure functions.

`_S` loss tokens. Log-probs are float32 nats; weights are detached and multiplied to the token loss at most once.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Exponents of ratios are clamped to [-20, 20]."""


def log_ratio(numerator_S: Tensor, denominator_S: Tensor) -> Tensor:
    """log(numerator/denominator) per token, clamped to [-20, 20]."""
    return (numerator_S - denominator_S).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_weights(proximal_S: Tensor, behavior_S: Tensor) -> Tensor:
    """w_t = exp(log prox_t - log mu_t), detached, before truncation (algorithms.md section 5)."""
    return log_ratio(proximal_S, behavior_S).exp().detach()


def truncate(weights_S: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(w, cap). Espeholt et al., IMPALA (arXiv 1802.01561) section 4.1."""
    return weights_S.clamp(max=cap)


def effective_samples(total: float, total_squares: float, count: float) -> float:
    """Share of samples that still count: 1 / mean((w / mean w)^2) = (sum w)^2 / (n sum w^2); NaN without tokens."""
    return total * total / (count * total_squares) if count and total_squares else float("nan")


def loglinear_proximal(policy_S: Tensor, behavior_S: Tensor, idx_behavior_S: Tensor, idx_proximal: int) -> Tensor:
    """log prox ~ log mu + a (sg(log pi) - log mu): the proximal policy without a pass of its own.

    a = clamp((i_prox - i_mu) / (i_pi - i_mu), 0, 1) on publication indices, i_pi = i_prox + 1; 0 where the gap is 0.
    A token of the newest publication (i_mu = i_prox) has prox = mu. Detached.
    """
    gap_S = idx_proximal + 1 - idx_behavior_S
    share_S = torch.where(gap_S == 0, 0.0, (idx_proximal - idx_behavior_S) / gap_S.where(gap_S != 0, 1)).clamp(0.0, 1.0)
    return behavior_S + share_S.to(behavior_S.dtype) * (policy_S.detach() - behavior_S)
