"""Decoder blocks of a model: what is sharded as one unit (ranks.py), and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils import checkpoint

from rl_core.errors import ConfigError


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of a Hugging Face model that transformers says are never split over devices, in order."""
    names: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_blocks(model: nn.Module, where: str) -> None:
    """Keep only the input of every decoder block for the backward pass, which computes the block again: the same
    numbers for a third more forward work, and the activations of one block at a time.

    Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174). Hooks of a sharded block stay
    outside, so that its weights are gathered once for both. Raises ConfigError, naming `where`, for a model that names
    no blocks.
    """
    blocks = decoder_blocks(model)
    if not blocks:
        raise ConfigError(f"learner.recompute: {where} is a {type(model).__name__}, which names no decoder blocks (got "
                          "true); use false and a smaller learner.token_budget")
    for block in blocks:
        block.forward = _recomputed(cast(Any, block).forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return cast(Any, checkpoint).checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again
