"""Correction weights of a user's: `learner.correction.path` (docs/hooks.md 6). `_S` loss tokens of whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_core.errors import HookFailed
from rl_core.hooks.loading import call

FIELD = "learner.correction.path"


def own_weights(d_S: Tensor, sequence_S: Tensor, sequences: int, path: str) -> Tensor:
    """What the function says of d = log prox - log mu (log pi - log mu in bypass mode), `[S]`, detached. Raises
    HookFailed for another shape, or for a weight that is negative or not finite."""
    return checked(call("correction", FIELD, path, d_S.detach(), sequence_S, sequences), d_S, path)


def checked(value: Any, d_S: Tensor, name: str) -> Tensor:
    """A weight for every token. Raises HookFailed naming the function and what it returned."""
    if not isinstance(value, Tensor):
        raise HookFailed(f"{FIELD} {name}: the result is {type(value).__name__}; it must be a tensor of token weights")
    if value.shape != d_S.shape:
        raise HookFailed(f"{FIELD} {name}: the result has the shape {tuple(value.shape)}; it must be "
                         f"{tuple(d_S.shape)}, a weight for every token")
    weights_S = value.detach().to(d_S.dtype)
    if weights_S.numel() and not bool((torch.isfinite(weights_S) & (weights_S >= 0)).all()):
        bad = weights_S[~(torch.isfinite(weights_S) & (weights_S >= 0))][0]
        raise HookFailed(f"{FIELD} {name}: a weight is {float(bad)}; weights are finite and at least 0")
    return weights_S
