"""What a policy loss reads and returns.

`_S` loss tokens of one micro-batch, in any order; whole sequences only. `_K` loss tokens of a whole minibatch over all
ranks, in claim order; `_M` sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from rl_core.learner.correction import log_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Loss tokens, all `[S]`: log-probs are nats; only `policy_S` carries a gradient."""

    policy_S: Tensor
    anchor_S: Tensor
    """The proximal policy in decoupled mode, the behavior policy in bypass mode."""
    behavior_S: Tensor
    advantage_S: Tensor
    reward_S: Tensor
    """Of the token's answer."""
    sequence_S: Tensor
    """int64: the token's sequence, below `sequences`."""
    sequences: int
    bypass: bool = False
    """The anchor is the behavior policy."""
    chosen_S: Tensor | None = None
    """bool: what `select` of the loss has chosen; None for a loss that chooses nothing."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Token losses, and where a clip, a gate or a mask acted."""

    loss_S: Tensor
    ratio_S: Tensor
    """Policy over anchor, of the token or its sequence; detached."""
    low_S: Tensor
    """bool: the lower bound took the gradient away, or cut the weight."""
    high_S: Tensor
    """bool: the upper bound did."""


def unclipped(loss_S: Tensor, policy_S: Tensor, anchor_S: Tensor) -> TokenLoss:
    """The token losses of a loss without bounds."""
    nowhere_S = torch.zeros_like(loss_S, dtype=torch.bool)
    return TokenLoss(loss_S, log_ratio(policy_S, anchor_S).detach().exp(), nowhere_S, nowhere_S)


def loss_module(name: str) -> ModuleType:
    """The file of a loss: of every name of `learner.loss.name` there is one."""
    return import_module(f"rl_core.learner.losses.{name}")
