"""How token losses become one number (algorithms.md 6). Pure functions of tensors: no config, no collective.

`_S` loss tokens of one micro-batch (mask 1), in any order; `sequence_S` names each token's sequence. Losses are sums
over the micro-batch divided by denominators of the whole minibatch over all ranks, so that adding the losses of
micro-batches and ranks gives the loss of the minibatch, whatever it was cut into.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_core.loss_settings import Aggregation


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of one minibatch over all ranks, as integers: tokens with mask 1, sequences with at least one. The
    trajectories of a session are one sequence."""

    tokens: int
    sequences: int


def aggregate(loss_S: Tensor, sequence_S: Tensor, tokens_M: Tensor, denominators: Denominators,
              aggregation: Aggregation, *, max_new_tokens: int) -> Tensor:
    """One micro-batch's share of the minibatch loss, a scalar.

    Args:
        loss_S: token losses, masked tokens left out.
        sequence_S: int64, row of `tokens_M` that each token belongs to.
        tokens_M: mask-1 tokens of the whole session that a trajectory of this rank's claim is of, all micro-batches
            and ranks together.
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
