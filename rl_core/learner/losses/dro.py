"""dro: log-probs under a quadratic penalty. `_S` loss tokens, float32."""

from __future__ import annotations

from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.losses.tokens import TokenLoss, Tokens, unclipped
from rl_core.loss_settings import DroLoss


def dro(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, *, beta: float) -> TokenLoss:
    """-(A log pi - beta/2 (log r)^2). Richemond et al. (arXiv 2405.19107). All `[S]`."""
    log_S = log_ratio(policy_S, anchor_S)
    return unclipped(-(advantage_S * policy_S - beta / 2 * log_S.square()), policy_S, anchor_S)


def token_loss(tokens: Tokens, settings: DroLoss) -> TokenLoss:
    """`dro` by its settings."""
    return dro(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, beta=settings.beta)
