"""Policy losses and how they become one number (algorithms.md 4 and 6). Pure functions of tensors: no config, no
collective.

`_S` loss tokens of one micro-batch (mask 1), in any order; `sequence_S` names each token's sequence. Losses are sums
over the micro-batch divided by denominators of the whole minibatch over all ranks, so that adding the losses of
micro-batches and ranks gives the loss of the minibatch, whatever it was cut into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_core.learner.correction import log_ratio

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of one minibatch over all ranks, as integers: tokens with mask 1, sequences with at least one."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Clipped:
    """Token losses of `ppo_clip` and where the clip acted."""

    loss_S: Tensor
    ratio_S: Tensor
    low_S: Tensor
    """bool: the lower clip decided (A < 0 and r < 1 - low)."""
    high_S: Tensor
    """bool: the upper clip decided (A > 0 and r > 1 + high)."""


def ppo_clip(policy_S: Tensor, proximal_S: Tensor, advantage_S: Tensor, *, low: float = 0.2, high: float = 0.2,
             dual: float | None = 3.0) -> Clipped:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi/prox; for A < 0 at most -A `dual`.

    Schulman et al. (arXiv 1707.06347) eq. 7; asymmetric clip: DAPO (arXiv 2503.14476) section 3.1; dual clip: Ye et al.
    (arXiv 1912.09729) section 4. `proximal_S` carries no gradient. All `[S]` float32.
    """
    ratio_S = log_ratio(policy_S, proximal_S).exp()
    free_S = -advantage_S * ratio_S
    clipped_S = -advantage_S * ratio_S.clamp(1.0 - low, 1.0 + high)
    loss_S = torch.maximum(free_S, clipped_S)
    if dual is not None:
        loss_S = torch.where(advantage_S < 0, torch.minimum(loss_S, -advantage_S * dual), loss_S)
    with torch.no_grad():
        low_S = (advantage_S < 0) & (ratio_S < 1.0 - low)
        high_S = (advantage_S > 0) & (ratio_S > 1.0 + high)
    return Clipped(loss_S=loss_S, ratio_S=ratio_S.detach(), low_S=low_S, high_S=high_S)


def aggregate(loss_S: Tensor, sequence_S: Tensor, tokens_M: Tensor, denominators: Denominators,
              aggregation: Aggregation, *, max_new_tokens: int) -> Tensor:
    """One micro-batch's share of the minibatch loss, a scalar.

    Args:
        loss_S: token losses, masked tokens left out.
        sequence_S: int64, row of `tokens_M` that each token belongs to.
        tokens_M: mask-1 tokens of every sequence of this rank's claim, all micro-batches together.
        denominators: of the minibatch over all ranks; a minibatch without a token gives 0.
        max_new_tokens: the divisor of `seq_mean_token_sum_norm` (TRL's dr_grpo).
    """
    tokens, sequences = max(1, denominators.tokens), max(1, denominators.sequences)
    if aggregation == "token_sum":
        return loss_S.sum()
    if aggregation == "token_mean":
        return loss_S.sum() / tokens
    if aggregation == "seq_mean_token_sum":
        return loss_S.sum() / sequences
    if aggregation == "seq_mean_token_sum_norm":
        return loss_S.sum() / (sequences * max_new_tokens)
    return (loss_S / tokens_M[sequence_S].to(loss_S.dtype)).sum() / sequences
