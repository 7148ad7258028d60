"""sapo: a soft gate on the ratio in place of a clip. `_S` loss tokens, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.losses.tokens import TokenLoss, Tokens, unclipped
from rl_core.loss_settings import SapoLoss


def sapo(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor, *, tau_positive: float = 1.0,
         tau_negative: float = 1.05) -> TokenLoss:
    """-A (4/tau) sigmoid(tau (r - 1)), tau by the sign of A (0 counts as negative). Gao et al. (arXiv 2511.20347)."""
    ratio_S = log_ratio(policy_S, anchor_S).exp()
    tau_S = torch.full_like(ratio_S, tau_negative).masked_fill(advantage_S > 0, tau_positive)
    loss_S = -advantage_S * 4.0 / tau_S * torch.sigmoid(tau_S * (ratio_S - 1.0))
    return unclipped(loss_S, policy_S, anchor_S)


def token_loss(tokens: Tokens, settings: SapoLoss) -> TokenLoss:
    """`sapo` by its settings."""
    return sapo(tokens.policy_S, tokens.anchor_S, tokens.advantage_S, tau_positive=settings.tau_positive,
                tau_negative=settings.tau_negative)
