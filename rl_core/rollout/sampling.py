"""Sampling of one token for every row, and the log-prob of exactly the distribution that was sampled.

Pure functions. Noise is a function of (seed, place in the context), so what a request samples depends neither on its
row nor on what else runs, and an answer resumed behind its own first tokens goes on as if it had never stopped.

Shapes: `_N` rows, `_M` those of them that are truncated, `_V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rl_core.rollout.tensors import on_device

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
BLOCK = 256
"""Vocabulary entries summed at once when an id is looked up by its share."""


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def uniforms(seed_N: NDArray[np.uint64], place_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row: splitmix64 of the mixed seed, counted by place (Steele et al., OOPSLA 2014)."""
    bits = _mix(_mix(seed_N) + (place_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 bits, so that the product with a sum of shares stays below that sum.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Rows of which parts of the distribution are left out, and which parts; 1, 0 and 0 leave out nothing."""

    row_M: NDArray[np.int64]
    top_p_M: NDArray[np.float32]
    top_k_M: NDArray[np.int64]
    min_p_M: NDArray[np.float32]


def truncate(logprobs_MV: Tensor, truncation: Truncation) -> Tensor:
    """Renormalised log-probs [M, V] of the truncated rows, -inf where left out.

    First top-k, then top-p of what stays, then min-p. top-p keeps the fewest likeliest tokens whose shares reach it;
    min-p those of at least that share of the likeliest. Ties are broken by the lower id.
    """
    device = logprobs_MV.device
    top_p, top_k, min_p = (on_device(column, device)[:, None] for column in (
        truncation.top_p_M, truncation.top_k_M, truncation.min_p_M))
    values, order = logprobs_MV.sort(dim=-1, descending=True, stable=True)
    shares = values.exp().double()
    keep = (top_k == 0) | (torch.arange(shares.shape[-1], device=device) < top_k)
    shares = shares * keep
    shares = shares / shares.sum(-1, keepdim=True)
    before = shares.cumsum(-1) - shares
    keep &= (top_p >= 1) | (before < top_p)
    keep &= shares >= min_p * shares[:, :1]
    kept = torch.zeros_like(keep).scatter(-1, order, keep)
    return logprobs_MV.masked_fill(~kept, -torch.inf).log_softmax(-1)


def pick(shares_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The id at which the running sum of shares passes `uniform` times their total, in float64 [N]."""
    n, vocabulary = shares_NV.shape
    if vocabulary <= 8 * BLOCK:
        return _passes(shares_NV.cumsum(-1, dtype=torch.float64), uniform_N)[0]
    # Two levels: sums of blocks first, then inside one block. One over all entries costs ten times this.
    blocks = F.pad(shares_NV, (0, -vocabulary % BLOCK)).view(n, -1, BLOCK)
    block, rest = _passes(blocks.sum(-1, dtype=torch.float64).cumsum(-1), uniform_N)
    inside = blocks[torch.arange(n, device=block.device), block].cumsum(-1, dtype=torch.float64)
    # The two levels round differently: never beyond the last share of the block.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    within = torch.minimum(torch.searchsorted(inside, rest[:, None], right=True), last).squeeze(1)
    return (block * BLOCK + within).clamp_(max=vocabulary - 1)


def _passes(sums_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """(first index whose running sum is above uniform * total, what is left of that product before it)."""
    target = uniform_N[:, None] * sums_NV[:, -1:]
    # The clamp is for sums that are no number, which `sample` refuses.
    index = torch.searchsorted(sums_NV, target, right=True).clamp_(max=sums_NV.shape[-1] - 1)
    before = F.pad(sums_NV, (1, 0)).gather(-1, index)
    return index.squeeze(1), (target - before).squeeze(1)


def sample(logits_NV: Tensor, temperature_N: NDArray[np.float32], uniform_N: NDArray[np.float64],
           truncation: Truncation | None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and their log-probs [N], float32 softmax, temperature and truncation applied.

    Temperature 0 takes the likeliest token (the lower id of equals) and reports its log-prob at temperature 1, as
    servers do; the distribution itself has no other outcome. Raises FloatingPointError for logits that are no numbers.
    """
    greedy = temperature_N == 0
    divisor = np.where(greedy, np.float32(1), temperature_N)
    if (divisor != 1).any():
        logits_NV = logits_NV / on_device(divisor, logits_NV.device)[:, None]
    logprobs = logits_NV.log_softmax(-1)
    if truncation is not None:
        rows = on_device(truncation.row_M, logprobs.device)
        logprobs[rows] = truncate(logprobs[rows], truncation)  # other rows keep their bits
    if greedy.all():
        token = logprobs.argmax(-1)
    else:
        token = pick(logprobs.exp(), on_device(uniform_N, logprobs.device))
        if greedy.any():
            token = torch.where(on_device(greedy, token.device), logprobs.argmax(-1), token)
    chosen = logprobs.gather(-1, token[:, None]).squeeze(1)
    chosen = chosen.cpu().numpy()
    if not np.isfinite(chosen).all():
        raise FloatingPointError("logits are not finite: the weights have diverged or are damaged")
    return token.cpu().numpy(), chosen
