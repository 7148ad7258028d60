"""cispo: log-probs weighted by the clipped ratio. `_S` loss tokens, float32."""

from __future__ import annotations

from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.loss_settings import CispoLoss


def cispo(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, *, low: float = 0.0,
          high: float = 1.2) -> TokenLoss:
    """-A sg(clip(r, low, high)) log pi: a clip that keeps every token's gradient.

    MiniMax-M1 (arXiv 2506.13585). All `[S]`.
    """
    ratio_S = log_ratio(policy_S, anchor_S).detach().exp()
    return TokenLoss(-advantage_S * ratio_S.clamp(low, high) * policy_S, ratio_S, ratio_S < low, ratio_S > high)


def token_loss(tokens: Tokens, settings: CispoLoss) -> TokenLoss:
    """`cispo` by its settings."""
    return cispo(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, low=settings.ratio_low, high=settings.ratio_high)
