"""A policy loss of a user's: `learner.loss.path` (docs/hooks.md 5). `_S` loss tokens, log-probs in nats."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.errors import HookFailed
from rl_core.hooks.loading import call
from rl_core.learner.losses.tokens import TokenLoss, Tokens, unclipped
from rl_core.loss_settings import FunctionLoss

FIELD = "learner.loss.path"


def token_loss(tokens: Tokens, settings: FunctionLoss) -> TokenLoss:
    """The token losses of the function: a tensor `[S]`, or a TokenLoss. Raises HookFailed for anything else."""
    return checked(call("loss", FIELD, settings.path, tokens), tokens, settings.path)


def checked(value: Any, tokens: Tokens, name: str) -> TokenLoss:
    """A loss for every token, with a gradient. Raises HookFailed naming the function and what it returned."""
    found = value if isinstance(value, TokenLoss) else None
    loss_S = found.loss_S if found is not None else value
    if not isinstance(loss_S, torch.Tensor):
        raise HookFailed(f"{FIELD} {name}: the result is {type(value).__name__}; it must be a tensor of token losses, "
                         "or a TokenLoss")
    if loss_S.shape != tokens.policy_S.shape:
        raise HookFailed(f"{FIELD} {name}: the result has the shape {tuple(loss_S.shape)}; it must be "
                         f"{tuple(tokens.policy_S.shape)}, a loss for every token")
    if tokens.policy_S.requires_grad and loss_S.numel() and not loss_S.requires_grad:
        raise HookFailed(f"{FIELD} {name}: the result has no gradient by policy_S: nothing would be learned")
    return found or unclipped(loss_S, tokens.policy_S, tokens.anchor_S)
