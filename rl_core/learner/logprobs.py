"""Log-probs of chosen tokens: fp32, on the loss tokens only, with logits held a chunk at a time. `_S` loss tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]  # untyped in torch

Head = Callable[[Tensor], Tensor]


class TokenLogprobs(NamedTuple):
    """Of the sampled distribution (temperature applied), nats, float32.

    A tuple, since sharded modules look for their outputs' tensors in tuples, lists and dicts only.
    """

    logprob_S: Tensor
    entropy_S: Tensor
    """Of the whole distribution at that place; no gradient unless asked for."""
    squares_S: Tensor | None = None
    """Sum over the vocabulary of p^2, where asked for."""
    others_SK: Tensor | None = None
    """Log-probs of other tokens at the same places, where asked for."""
    likely_ids_SK: Tensor | None = None
    """int64: the tokens of `others_SK` where the most likely ones are asked for, the first one first."""


def chosen_logprobs(logits_SV: Tensor, target_S: Tensor, temperature_S: Tensor, *,
                    entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that distribution, both `[S]` float32.

    A logit may be minus infinity: that token has log-prob minus infinity, and no part in the entropy.
    """
    log_SV = (logits_SV.float() / temperature_S[:, None]).log_softmax(-1)
    logprob_S = log_SV.gather(-1, target_S[:, None]).squeeze(-1)
    entropy_S = cast(Any, _Entropy).apply(log_SV if entropy_gradient else log_SV.detach())
    return logprob_S, entropy_S


class _Entropy(torch.autograd.Function):
    """-sum p log p with 0 log 0 = 0, from log p `[S, V]`; its gradient is 0 where p is 0.

    A function of its own, since autograd makes NaN of p = 0, and keeps p and log p both. This one keeps log p, which
    log_softmax keeps anyway, and holds one more tensor of that size at a time, two in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, log_SV: Tensor) -> Tensor:
        ctx.save_for_backward(log_SV)
        return -log_SV.exp().mul_(log_SV).masked_fill_(log_SV == -torch.inf, 0.0).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        [gradient_S], [log_SV] = gradients, ctx.saved_tensors
        slope_SV = (log_SV + 1.0).mul_(log_SV.exp()).masked_fill_(log_SV == -torch.inf, 0.0)
        return slope_SV.mul_(-gradient_S[:, None])


def head_logprobs(hidden_SH: Tensor, head: Head, target_S: Tensor, temperature_S: Tensor, *, chunk: int,
                  entropy_gradient: bool = False) -> TokenLogprobs:
    """The same from hidden states, `chunk` rows of logits at once.

    With more than one chunk their logits are computed again in the backward pass, so that at most `chunk` rows of
    logits (and of their gradient) are held: at a vocabulary of 49152, 4096 rows are 0.8 GB, twice.
    """
    def one(hidden: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return chosen_logprobs(head(hidden), target, temperature, entropy_gradient=entropy_gradient)

    if len(target_S) <= chunk:
        logprob_S, entropy_S = one(hidden_SH, target_S, temperature_S)
        return TokenLogprobs(logprob_S, entropy_S)
    pieces = [_again_in_backward(one, hidden_SH[lo:lo + chunk], target_S[lo:lo + chunk], temperature_S[lo:lo + chunk])
              for lo in range(0, len(target_S), chunk)]
    return TokenLogprobs(torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces]))


def head_others(hidden_SH: Tensor, head: Head, ids_SK: Tensor, temperature_S: Tensor, *, chunk: int) -> Tensor:
    """Log-probs of these tokens at every place, `[S, K]` float32, under gradient, `chunk` rows of logits at once: they
    are computed again in the backward pass."""
    def one(hidden: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        log_SV = (head(hidden).float() / temperature[:, None]).log_softmax(-1)
        return log_SV.gather(-1, ids), temperature

    return torch.cat([_again_in_backward(one, hidden_SH[lo:lo + chunk], ids_SK[lo:lo + chunk],
                                         temperature_S[lo:lo + chunk])[0]
                      for lo in range(0, max(1, len(hidden_SH)), chunk)])


@torch.no_grad()
def head_likely(hidden_SH: Tensor, head: Head, temperature_S: Tensor, *, top_k: int, vocabulary: int,
                chunk: int) -> tuple[Tensor, Tensor]:
    """`(log-probs, ids)` of the most likely tokens below `vocabulary` at every place, both `[S, K]`."""
    pieces: list[tuple[Tensor, Tensor]] = []
    for lo in range(0, max(1, len(hidden_SH)), chunk):
        log_SV = (head(hidden_SH[lo:lo + chunk]).float() / temperature_S[lo:lo + chunk, None]).log_softmax(-1)
        found = log_SV[:, :vocabulary].topk(min(top_k, vocabulary), -1)
        pieces.append((found.values, found.indices))
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])


def _again_in_backward(function: Callable[..., tuple[Tensor, Tensor]], *args: Tensor) -> tuple[Tensor, Tensor]:
    return cast(Any, checkpoint)(function, *args, use_reentrant=False, preserve_rng_state=False)


@torch.no_grad()
def head_squares(hidden_SH: Tensor, head: Head, temperature_S: Tensor, *, chunk: int) -> Tensor:
    """Sum over the vocabulary of p^2 at every place, `[S]` float32, `chunk` rows of logits at once."""
    pieces = [(head(hidden_SH[lo:lo + chunk]).float() / temperature_S[lo:lo + chunk, None]).softmax(-1).square().sum(-1)
              for lo in range(0, max(1, len(hidden_SH)), chunk)]
    return torch.cat(pieces)
