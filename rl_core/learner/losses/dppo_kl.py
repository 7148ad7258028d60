"""dppo_kl: log-probs weighted by the ratio, masked by the KL of a token. `_S` loss tokens, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learner.losses.dppo_tv import dppo
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.loss_settings import DppoLoss


def binary_kl(log_p_S: Tensor, log_q_S: Tensor) -> Tensor:
    """p log(p/q) + (1 - p) log((1 - p)/(1 - q)) of one token against all others, nats; probabilities of 1 count as just
    below it."""
    p_S, q_S = log_p_S.exp(), log_q_S.exp()
    tiny = torch.finfo(log_p_S.dtype).eps
    rest_p_S, rest_q_S = (1 - p_S).clamp(min=tiny), (1 - q_S).clamp(min=tiny)
    return p_S * (log_p_S - log_q_S) + rest_p_S * (rest_p_S.log() - rest_q_S.log())


def dppo_kl(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, *, low: float = 0.2, high: float = 0.2,
            cap: float = 20.0) -> TokenLoss:
    """Token kept for A > 0 if KL <= high or p <= p_prox, else if KL <= low or p >= p_prox; KL of prox against pi.

    Divergence PPO (arXiv 2602.04879). All `[S]`.
    """
    with torch.no_grad():
        kl_S = binary_kl(anchor_S, policy_S)
        good_S = advantage_S > 0
        low_S = ~good_S & (kl_S > low) & (policy_S < anchor_S)
        high_S = good_S & (kl_S > high) & (policy_S > anchor_S)
    return dppo(policy_S, anchor_S, advantage_S, low_S, high_S, cap=cap)


def token_loss(tokens: Tokens, settings: DppoLoss) -> TokenLoss:
    """`dppo_kl` by its settings."""
    return dppo_kl(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, low=settings.clip_low,
                   high=settings.clip_high, cap=settings.ratio_cap)
