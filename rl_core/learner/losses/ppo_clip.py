"""ppo_clip: the clipped ratio of a token. `_S` loss tokens, float32, log-probs in nats."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.loss_settings import PpoClipLoss


def ppo_clip(policy_S: Tensor, proximal_S: Tensor, advantage_S: Tensor, *, low: float = 0.2, high: float = 0.2,
             dual: float | None = 3.0, delta: float | None = None) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi/prox; for A < 0 at most -A `dual`.

    Schulman et al. (arXiv 1707.06347) eq. 7; asymmetric clip: DAPO (arXiv 2503.14476) section 3.1; dual clip: Ye et al.
    (arXiv 1912.09729) section 4; `delta` bounds the unclipped ratio from above (INTELLECT-2, arXiv 2505.07291).
    `proximal_S` carries no gradient. All `[S]` float32.
    """
    ratio_S = log_ratio(policy_S, proximal_S).exp()
    free_S = -advantage_S * (ratio_S if delta is None else ratio_S.clamp(max=delta))
    clipped_S = -advantage_S * ratio_S.clamp(1.0 - low, 1.0 + high)
    loss_S = torch.maximum(free_S, clipped_S)
    if dual is not None:
        loss_S = torch.where(advantage_S < 0, torch.minimum(loss_S, -advantage_S * dual), loss_S)
    with torch.no_grad():
        low_S = (advantage_S < 0) & (ratio_S < 1.0 - low)
        high_S = (advantage_S > 0) & (ratio_S > 1.0 + high)
    return TokenLoss(loss_S=loss_S, ratio_S=ratio_S.detach(), low_S=low_S, high_S=high_S)


def token_loss(tokens: Tokens, settings: PpoClipLoss) -> TokenLoss:
    """`ppo_clip` by its settings."""
    return ppo_clip(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, low=settings.clip_low,
                    high=settings.clip_high, dual=settings.dual_clip, delta=settings.delta)
