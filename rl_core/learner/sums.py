"""What a step adds up on its way: token sums and maxima by name, reduced over ranks once at the end.

`anchor_sums` sees every loss token once, where its proximal log-prob is exact; `update_sums` sees it in every update.
`_S` loss tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.learner.correction import log_ratio
from rl_core.learner.kl import k3
from rl_core.learner.losses import Clipped

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


ANCHOR_TOTALS = ("tokens", "current", "current_abs", "current_k3", "stale", "stale_abs", "stale_k3", "swapped",
                 "swapped_k3", "weight", "weight_square", "weight_truncated")
UPDATE_TOTALS = ("update_tokens", "entropy", "clip_low", "clip_high", "kl_proximal")
TOTALS = (*ANCHOR_TOTALS, *UPDATE_TOTALS, "loglinear_tokens", "loglinear_error")
MAXIMA = ("weight_max", "ratio_max", "ratio_drift")


@torch.no_grad()
def anchor_sums(sums: Sums, proximal_S: Tensor, behavior_S: Tensor, lag_S: Tensor, swapped_S: Tensor,
                cap: float) -> None:
    """Mismatch of proximal against behavior, apart for current, older and swapped tokens; token weights.

    Current: sampled by the very weights that the step starts from, and not behind a swap (whose keys and values are of
    older weights). Only there does a mismatch point at a bug.
    """
    if not len(proximal_S):
        return
    difference_S = (proximal_S - behavior_S).abs()
    k3_S = k3(behavior_S, proximal_S)
    weight_S = log_ratio(proximal_S, behavior_S).exp()
    current_S = (lag_S == 0) & ~swapped_S
    stale_S = (lag_S > 0) & ~swapped_S
    sums.add({
        "tokens": torch.tensor(float(len(proximal_S))),
        "current": current_S.sum(), "current_abs": difference_S[current_S].sum(), "current_k3": k3_S[current_S].sum(),
        "stale": stale_S.sum(), "stale_abs": difference_S[stale_S].sum(), "stale_k3": k3_S[stale_S].sum(),
        "swapped": swapped_S.sum(), "swapped_k3": k3_S[swapped_S].sum(), "weight": weight_S.sum(),
        "weight_square": weight_S.square().sum(), "weight_truncated": (weight_S > cap).sum()})
    sums.raise_to({"weight_max": weight_S.max()})


@torch.no_grad()
def update_sums(sums: Sums, clipped: Clipped, policy_S: Tensor, proximal_S: Tensor, entropy_S: Tensor) -> None:
    """Entropy, clip shares, k3 of policy against proximal, and the largest ratio of one micro-batch."""
    if not len(policy_S):
        return
    sums.add({"update_tokens": torch.tensor(float(len(policy_S))), "entropy": entropy_S.sum(),
              "clip_low": clipped.low_S.sum(), "clip_high": clipped.high_S.sum(),
              "kl_proximal": k3(proximal_S, policy_S).sum()})
    sums.raise_to({"ratio_max": clipped.ratio_S.max()})


def share(total: float, count: float) -> float:
    """total / count; NaN where there is nothing to divide by."""
    return total / count if count else NAN
