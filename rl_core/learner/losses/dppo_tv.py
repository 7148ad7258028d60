"""dppo_tv: log-probs weighted by the ratio, masked by the total variation of a token. `_S` loss tokens, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.loss_settings import DppoLoss


def dppo(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, low_S: Tensor, high_S: Tensor, *,
         cap: float) -> TokenLoss:
    """-A sg(min(r, cap)) log pi, 0 where `low_S` or `high_S` masks the token."""
    ratio_S = log_ratio(policy_S, anchor_S).detach().exp()
    kept_S = ~(low_S | high_S)
    return TokenLoss(-advantage_S * ratio_S.clamp(max=cap) * policy_S * kept_S, ratio_S, low_S, high_S)


def dppo_tv(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, *, low: float = 0.2, high: float = 0.2,
            cap: float = 20.0) -> TokenLoss:
    """Token kept for A > 0 if p - p_prox <= high, else if p - p_prox >= -low. All `[S]`.

    Divergence PPO (arXiv 2602.04879), total variation of the token against all others.
    """
    with torch.no_grad():
        rise_S = policy_S.exp() - anchor_S.exp()
        good_S = advantage_S > 0
        low_S, high_S = ~good_S & (rise_S < -low), good_S & (rise_S > high)
    return dppo(policy_S, anchor_S, advantage_S, low_S, high_S, cap=cap)


def token_loss(tokens: Tokens, settings: DppoLoss) -> TokenLoss:
    """`dppo_tv` by its settings."""
    return dppo_tv(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, low=settings.clip_low,
                   high=settings.clip_high, cap=settings.ratio_cap)
