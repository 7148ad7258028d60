"""gpg: the plain policy gradient. `_S` loss tokens, float32."""

from __future__ import annotations

from torch import Tensor

from rl_core.learner.losses.tokens import TokenLoss, Tokens, unclipped
from rl_core.loss_settings import PlainLoss


def gpg(policy_S: Tensor, anchor_S: Tensor, advantage_S: Tensor) -> TokenLoss:
    """-A log pi. Williams (1992); Chu et al. (arXiv 2504.02546). The anchor is for the metrics only."""
    return unclipped(-advantage_S * policy_S, policy_S, anchor_S)


def token_loss(tokens: Tokens, settings: PlainLoss) -> TokenLoss:
    """`gpg`; it has no settings."""
    return gpg(tokens.policy_S, tokens.anchor_S, tokens.advantage_S)
