"""Off-policy correction: weights proximal/behavior, and the log-linear proximal log-probs. Pure functions.

`_S` loss tokens, `_M` sequences. Log-probs are float32 nats; weights are detached and multiplied to the token loss at
most once. In bypass mode the policy itself, detached, takes the place of the proximal policy.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rl_core.correction_settings import CorrectionConfig
from rl_core.learner.own_weights import own_weights
from rl_core.learner.sequences import sequence_mean, sequence_sum

LOG_RATIO_LIMIT = 20.0
"""Exponents of ratios are clamped to [-20, 20]."""
Level = Literal["token", "sequence", "geometric"]


def clamp_log(difference_S: Tensor) -> Tensor:
    """Clamped to [-20, 20]."""
    return difference_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(numerator_S: Tensor, denominator_S: Tensor) -> Tensor:
    """log(numerator/denominator) per token, clamped to [-20, 20]."""
    return clamp_log(numerator_S - denominator_S)


def token_weights(proximal_S: Tensor, behavior_S: Tensor) -> Tensor:
    """w_t = exp(log prox_t - log mu_t), detached, before truncation (algorithms.md section 5)."""
    return log_ratio(proximal_S, behavior_S).exp().detach()


def level_weights(d_S: Tensor, sequence_S: Tensor, sequences: int, level: Level) -> Tensor:
    """Weights of d = log prox - log mu, `[S]`, detached: exp(d) of the token; of its sequence exp(sum of d), or
    exp(mean of d) (geometric). d and its sums are clamped to [-20, 20]."""
    clamped_S = clamp_log(d_S.detach())
    if level == "token":
        return clamped_S.exp()
    of_sequence = sequence_sum if level == "sequence" else sequence_mean
    return clamp_log(of_sequence(clamped_S, sequence_S, sequences)).exp()[sequence_S]


def truncate(weights_S: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(w, cap). Espeholt et al., IMPALA (arXiv 1802.01561) section 4.1."""
    return weights_S.clamp(max=cap)


def icepop(weights_S: Tensor, low: float, high: float) -> Tensor:
    """w where low <= w <= high, else 0. IcePop, in Ling Team, "Every step evolves" (arXiv 2510.18855)."""
    return weights_S.where((weights_S >= low) & (weights_S <= high), 0.0)


def uncut_weights(d_S: Tensor, sequence_S: Tensor, sequences: int, settings: CorrectionConfig) -> Tensor:
    """Weights of the level that the settings apply, or those of their function, before they are cut or normalised,
    `[S]`; token weights for `weights: none`."""
    if settings.weights == "none":
        return level_weights(d_S, sequence_S, sequences, "token")
    if settings.weights == "function":
        assert settings.path is not None  # combinations.py
        return own_weights(d_S, sequence_S, sequences, settings.path)
    level = settings.weights.partition("_")[0]
    return level_weights(d_S, sequence_S, sequences, level)  # pyright: ignore[reportArgumentType]


def correction_weights(d_S: Tensor, sequence_S: Tensor, sequences: int, settings: CorrectionConfig) -> Tensor | None:
    """Weights by their settings, before they are normalised; None for `weights: none`."""
    if settings.weights == "none":
        return None
    weights_S = uncut_weights(d_S, sequence_S, sequences, settings)
    if settings.weights == "function":
        return weights_S
    if settings.weights.endswith("_truncate"):
        return truncate(weights_S, settings.cap)
    return icepop(weights_S, settings.icepop_low, settings.icepop_high)


def mean_weight(weights_S: Tensor, sequence_S: Tensor, sequences: int, settings: CorrectionConfig) -> Tensor:
    """What `normalize` divides by: the mean over tokens for token weights, over sequences with a token for others; 1
    where all weights are 0."""
    if settings.weights == "function" or settings.weights.startswith("token"):
        mean = weights_S.double().mean()
    else:
        there_M = sequence_sum(torch.ones_like(weights_S), sequence_S, sequences) > 0
        mean = sequence_mean(weights_S.double(), sequence_S, sequences)[there_M].mean()
    return mean.where(mean > 0, 1.0).to(weights_S.dtype)


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
