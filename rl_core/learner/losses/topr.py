"""topr: good answers in full, bad ones by their truncated ratio. `_S` loss tokens, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.loss_settings import PlainLoss


def topr(policy_S: Tensor, behavior_S: Tensor, advantage_S: Tensor, reward_S: Tensor) -> TokenLoss:
    """Reward > 0: -A log pi; else -A log pi sg(clip(pi/mu, 0, 1)). Roux et al. (arXiv 2503.14286)."""
    ratio_S = log_ratio(policy_S, behavior_S).detach().exp()
    bad_S = reward_S <= 0
    weight_S = torch.where(bad_S, ratio_S.clamp(max=1.0), 1.0)
    return TokenLoss(-advantage_S * weight_S * policy_S, ratio_S, torch.zeros_like(bad_S), bad_S & (ratio_S > 1.0))


def token_loss(tokens: Tokens, settings: PlainLoss) -> TokenLoss:
    """`topr`; it has no settings."""
    return topr(tokens.policy_S, tokens.behavior_S, tokens.advantage_S, tokens.reward_S)
