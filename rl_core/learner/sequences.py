"""Sums, means and maxima over the tokens of each sequence. `_S` tokens in any order, `_M` sequences; pure."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values_S: Tensor, sequence_S: Tensor, sequences: int) -> Tensor:
    """Sum of each sequence's tokens, `[M]`; 0 where it has none."""
    return torch.zeros(sequences, dtype=values_S.dtype, device=values_S.device).index_add(0, sequence_S, values_S)


def sequence_mean(values_S: Tensor, sequence_S: Tensor, sequences: int) -> Tensor:
    """Mean of each sequence's tokens, `[M]`; 0 where it has none."""
    counts_M = sequence_sum(torch.ones_like(values_S), sequence_S, sequences)
    return sequence_sum(values_S, sequence_S, sequences) / counts_M.clamp(min=1.0)


def sequence_max(values_S: Tensor, sequence_S: Tensor, sequences: int) -> Tensor:
    """Largest value of each sequence's tokens, `[M]`; minus infinity where it has none. No gradient."""
    lowest_M = torch.full((sequences,), -torch.inf, dtype=values_S.dtype, device=values_S.device)
    return lowest_M.scatter_reduce(0, sequence_S, values_S.detach(), "amax")
