"""Rejection: which tokens keep their loss, by how far the proximal policy is from the behavior policy. Pure functions.

`_S` loss tokens of whole sequences, `_M` sequences. d = log prox - log mu, nats (log pi - log mu in bypass mode).
Bounds are on the ratio prox/mu: verl's band [a, b] on mu/prox is [1/b, 1/a] here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl_core.correction_settings import RejectionRule
from rl_core.learner.correction import clamp_log
from rl_core.learner.sequences import sequence_max, sequence_mean, sequence_sum

STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - 1.0 - d,
}
"""Of d, per token: k1 and k3 estimate KL(mu || prox) on tokens that mu sampled."""
LEVELS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "seq_sum": sequence_sum, "seq_mean": sequence_mean, "seq_max": sequence_max}


def statistic(d_S: Tensor, sequence_S: Tensor, sequences: int, rule: str) -> Tensor:
    """The statistic of a rule at every token, `[S]`: of the token, or of its sequence. d is clamped to [-20, 20]."""
    level, _, name = rule.rpartition("_")
    values_S = STATISTICS[name](clamp_log(d_S.detach()))
    if level == "token":
        return values_S
    return LEVELS[level](values_S, sequence_S, sequences)[sequence_S]


def passes(d_S: Tensor, sequence_S: Tensor, sequences: int, rule: RejectionRule) -> Tensor:
    """bool `[S]`: k1 keeps log low <= d <= log high (of the token, or the sequence's sum or mean), low being 1 / high
    unless it is set; k2 and k3 keep what is at most high."""
    value_S = statistic(d_S, sequence_S, sequences, rule.rule)
    if not rule.rule.endswith("_k1"):
        return value_S <= rule.high
    high = math.log(rule.high)
    low = -high if rule.low is None else math.log(rule.low)
    return (-value_S >= low) & (-value_S <= high)


def keep_tokens(d_S: Tensor, sequence_S: Tensor, sequences: int, rules: Sequence[RejectionRule]) -> Tensor:
    """bool `[S]`: the tokens that pass every rule."""
    kept_S = torch.ones_like(d_S, dtype=torch.bool)
    for rule in rules:
        kept_S = kept_S & passes(d_S, sequence_S, sequences, rule)
    return kept_S
