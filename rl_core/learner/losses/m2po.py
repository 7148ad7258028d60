"""m2po: ppo_clip without the tokens that the two policies differ most in. `_S` loss tokens, `_K` of the minibatch."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learner.losses import ppo_clip
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.loss_settings import M2poLoss

SELECTS_BY_POLICY = False
"""In decoupled mode tokens are chosen by the proximal policy, whatever the policy has become since."""


def m2po_tokens(behavior_K: Tensor, proximal_K: Tensor, *, tau: float = 0.04) -> Tensor:
    """bool `[K]`: tokens of the largest (log mu - log prox)^2, masked until the mean of the others is at most `tau`.

    At least one token stays; ties go by position. Zheng et al., "Prosperity before collapse" (arXiv 2510.01161).
    """
    square_K = (behavior_K - proximal_K).double().square()
    order = square_K.argsort(stable=True)
    ascending_K = square_K[order].cpu()  # on the host: CUDA has no cumulative sum whose bits are always the same
    mean_K = ascending_K.cumsum(0) / torch.arange(1, len(order) + 1, dtype=torch.float64)
    kept = max(1, int((mean_K <= tau).sum()))  # means of ascending values ascend
    masked_K = torch.zeros_like(square_K, dtype=torch.bool)
    masked_K[order[kept:]] = True
    return masked_K


def select(whole: Tokens, settings: M2poLoss, draw_K: Tensor) -> Tensor:
    """The tokens that are masked. In bypass mode, where prox is mu, they are judged by log mu - log pi."""
    now_K = whole.policy_S.detach() if whole.bypass else whole.anchor_S
    return m2po_tokens(whole.behavior_S, now_K, tau=settings.tau)


def token_loss(tokens: Tokens, settings: M2poLoss) -> TokenLoss:
    """`ppo_clip`, 0 at the chosen tokens."""
    found = ppo_clip.token_loss(tokens, settings)
    assert tokens.chosen_S is not None
    return TokenLoss(found.loss_S * ~tokens.chosen_S, found.ratio_S, found.low_S, found.high_S)
