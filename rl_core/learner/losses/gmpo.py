"""gmpo: the geometric mean of an answer's clipped ratios. `_S` loss tokens of whole sequences, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.learner.sequences import sequence_mean
from rl_core.loss_settings import GmpoLoss


def gmpo(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, sequence_S: Tensor, sequences: int, *,
         low: float = 0.2, high: float = 0.2) -> TokenLoss:
    """-mean(A) exp(mean of log r), log r at most `high` for A > 0 and at least -`low` for A < 0.

    Every token has the loss of its answer, so that the mean over tokens and then over answers is the mean over answers.
    Zhao et al. (arXiv 2507.20673), "geo_mean" in verl. All `[S]`.
    """
    log_S = log_ratio(policy_S, anchor_S)
    sign_S = advantage_S.sign()
    clipped_S = sign_S * torch.minimum(sign_S * log_S, sign_S * log_S.clamp(-low, high))
    ratio_M = sequence_mean(clipped_S, sequence_S, sequences).exp()
    loss_M = -sequence_mean(advantage_S, sequence_S, sequences) * ratio_M
    with torch.no_grad():
        low_S, high_S = (advantage_S < 0) & (log_S < -low), (advantage_S > 0) & (log_S > high)
    return TokenLoss(loss_M[sequence_S], ratio_M.detach()[sequence_S], low_S, high_S)


def token_loss(tokens: Tokens, settings: GmpoLoss) -> TokenLoss:
    """`gmpo` by its settings."""
    return gmpo(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, tokens.sequence_S, tokens.sequences,
                low=settings.clip_low, high=settings.clip_high)
