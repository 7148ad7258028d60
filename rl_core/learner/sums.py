"""What a step adds up on its way: token sums and maxima by name, reduced over ranks once at the end.

`update_sums` and `correction_sums` see a loss token in every update. `anchor_sums` sees it once, and only where the
proximal log-prob is exact: all of the claim where a pass is made for it, or in a step of one update. Bypass mode and a
log-linear proximal make no pass, and behind the first update the weights have moved: there it sees the first minibatch
alone. `_S` loss tokens of one micro-batch, whole sequences only; `_M` sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_core.correction_settings import CorrectionConfig
from rl_core.learner.correction import LOG_RATIO_LIMIT, log_ratio, uncut_weights
from rl_core.learner.kl import k3
from rl_core.learner.losses.tokens import TokenLoss, Tokens
from rl_core.learner.sequences import sequence_sum

if TYPE_CHECKING:
    from rl_core.learner.objective import Corrected
    from rl_core.learner.others import Terms

NAN = float("nan")


@dataclass(slots=True)
class Sums:
    """Named float64 scalars that grow: `total` by addition, `largest` by maximum."""

    total: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    largest: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            before = self.total.get(name)
            self.total[name] = value.double() if before is None else before + value.double()

    def raise_to(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            before = self.largest.get(name)
            self.largest[name] = value.double() if before is None else torch.maximum(before, value.double())


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between which weights are not cut or taken away."""

    low: float
    high: float

    @classmethod
    def of(cls, correction: CorrectionConfig) -> Bounds:
        """Those of the weights that are applied; without any, none is out of bounds."""
        if correction.weights.endswith("_icepop"):
            return cls(correction.icepop_low, correction.icepop_high)
        return cls(-math.inf, correction.cap if correction.weights.endswith("_truncate") else math.inf)


ANCHOR_TOTALS = ("tokens", "current", "current_abs", "current_k3", "stale", "stale_abs", "stale_k3", "swapped",
                 "swapped_abs", "swapped_k3", "weight", "weight_square", "weight_truncated", "weight_under",
                 "token_ratio_square", "behavior_kl", "behavior_k3", "proximal_logprob", "behavior_logprob",
                 "sequences", "sequence_weight_square")
UPDATE_TOTALS = ("update_tokens", "entropy", "clip_low", "clip_high", "kl_proximal", "zero_advantage", "impossible",
                 "rejected_tokens", "update_sequences", "rejected_sequences")
OTHER_TOTALS = ("other_tokens", "impossible_to_others", "kl_tokens", "kl_reference", "distilled_tokens", "distillation")
TOTALS = (*ANCHOR_TOTALS, *UPDATE_TOTALS, "loglinear_tokens", "loglinear_error", *OTHER_TOTALS)
MAXIMA = ("weight_max", "weight_max_inverse", "ratio_max", "ratio_drift")


def stack(values: dict[str, Tensor], names: tuple[str, ...], absent: float) -> Tensor:
    """The values of these names on the host, float64."""
    return torch.stack([values[name].cpu() if name in values else torch.tensor(absent, dtype=torch.float64)
                        for name in names])


@torch.no_grad()
def anchor_sums(sums: Sums, proximal_S: Tensor, behavior_S: Tensor, lag_S: Tensor, swapped_S: Tensor,
                sequence_S: Tensor, sequences: int, correction: CorrectionConfig) -> None:
    """Mismatch of proximal against behavior, apart for current, older and swapped tokens; and the weights of the level
    that `correction` applies, before they are cut: at every token that of its answer, where the level is an answer's.

    Current: sampled by the very weights that the step starts from, and not behind a swap (whose keys and values are of
    older weights). Only there does a mismatch point at a bug. Tokens with a log-prob of minus infinity are left out;
    `update_sums` counts them.
    """
    there_S = ~(torch.isneginf(proximal_S) | torch.isneginf(behavior_S))
    if not bool(there_S.any()):
        return
    difference_S = (proximal_S - behavior_S).masked_fill(~there_S, 0.0)  # as `possible` has it for the loss
    weight_S = uncut_weights(difference_S, sequence_S, sequences, correction)
    if not bool(there_S.all()):
        proximal_S, behavior_S, lag_S, swapped_S, sequence_S, weight_S = (
            values[there_S] for values in (proximal_S, behavior_S, lag_S, swapped_S, sequence_S, weight_S))
    absolute_S, weight_S, bounds = (proximal_S - behavior_S).abs(), weight_S.double(), Bounds.of(correction)
    k3_S = k3(behavior_S, proximal_S)
    log_S = log_ratio(proximal_S, behavior_S)
    current_S = (lag_S == 0) & ~swapped_S
    stale_S = (lag_S > 0) & ~swapped_S
    sequence_log_M = sequence_sum(log_S.double(), sequence_S, sequences)
    mine_M = torch.zeros_like(sequence_log_M, dtype=torch.bool)
    mine_M[sequence_S] = True
    sums.add({
        "tokens": torch.tensor(float(len(proximal_S))),
        "current": current_S.sum(), "current_abs": absolute_S[current_S].sum(), "current_k3": k3_S[current_S].sum(),
        "stale": stale_S.sum(), "stale_abs": absolute_S[stale_S].sum(), "stale_k3": k3_S[stale_S].sum(),
        "swapped": swapped_S.sum(), "swapped_abs": absolute_S[swapped_S].sum(), "swapped_k3": k3_S[swapped_S].sum(),
        "weight": weight_S.sum(), "weight_square": weight_S.square().sum(),
        "weight_truncated": (weight_S > bounds.high).sum(), "weight_under": (weight_S < bounds.low).sum(),
        "token_ratio_square": log_S.double().mul(2).exp().sum(), "behavior_kl": -log_S.sum(),
        "behavior_k3": k3_S.sum(), "proximal_logprob": proximal_S.sum(), "behavior_logprob": behavior_S.sum(),
        "sequences": mine_M.sum(),
        "sequence_weight_square": (2 * sequence_log_M[mine_M].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp().sum()})
    sums.raise_to({"weight_max": weight_S.max(), "weight_max_inverse": -weight_S.min()})


@torch.no_grad()
def update_sums(sums: Sums, found: TokenLoss, tokens: Tokens, entropy_S: Tensor, impossible_S: Tensor) -> None:
    """Entropy, clip shares, k3 of policy against anchor, and the largest ratio of one micro-batch."""
    policy_S = tokens.policy_S
    if not len(policy_S):
        return
    sums.add({"update_tokens": torch.tensor(float(len(policy_S))), "entropy": entropy_S.sum(),
              "clip_low": found.low_S.sum(), "clip_high": found.high_S.sum(),
              "kl_proximal": k3(tokens.anchor_S, policy_S).sum(), "zero_advantage": (tokens.advantage_S == 0).sum(),
              "impossible": impossible_S.sum()})
    sums.raise_to({"ratio_max": found.ratio_S.max()})


@torch.no_grad()
def correction_sums(sums: Sums, correction: Corrected, tokens: Tokens) -> None:
    """Rejected tokens, and sequences of which none is left."""
    if correction.kept_S is None or not len(correction.kept_S):
        return
    kept_M = sequence_sum(correction.kept_S.long(), tokens.sequence_S, tokens.sequences)
    all_M = sequence_sum(torch.ones_like(tokens.sequence_S), tokens.sequence_S, tokens.sequences)
    sums.add({"rejected_tokens": (~correction.kept_S).sum(), "update_sequences": (all_M > 0).sum(),
              "rejected_sequences": ((all_M > 0) & (kept_M == 0)).sum()})


@torch.no_grad()
def other_sums(sums: Sums, terms: Terms, impossible_S: Tensor | None) -> None:
    """What the models beside the policy came to; nothing without one. `impossible_S`: as of Others."""
    if impossible_S is None:
        return
    sums.add({"other_tokens": torch.tensor(float(len(impossible_S))), "impossible_to_others": impossible_S.sum()})
    for name, values_S in (("kl", terms.kl_S), ("distilled", terms.distillation_S)):
        if values_S is not None:
            what = "kl_reference" if name == "kl" else "distillation"
            sums.add({f"{name}_tokens": torch.tensor(float(len(values_S))), what: values_S.sum()})


def share(total: float, count: float) -> float:
    """total / count; NaN where there is nothing to divide by."""
    return total / count if count else NAN
