"""What is chosen from a whole minibatch, over all ranks, so that it does not depend on micro-batches or ranks.

Tokens that a loss selects, the mean that weights are normalised by, the entropy that the uncertain tokens are above,
and the denominators without rejected tokens: all of log-probs of a no-gradient pass, on the host.

`_K` loss tokens of the whole claim in claim order; a minibatch is some of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_core.config import LearnerConfig
from rl_core.learner.advantages.resampling import resampled, resampling_weights
from rl_core.learner.aggregation import Denominators
from rl_core.learner.batch import to_tensor
from rl_core.learner.correction import correction_weights, mean_weight
from rl_core.learner.losses.tokens import Tokens, loss_module
from rl_core.learner.micro import Minibatch
from rl_core.learner.objective import corrected, correction_of, difference, possible
from rl_core.learner.ranks import Ranks
from rl_core.learner.sequences import sequence_sum


@dataclass(frozen=True, slots=True)
class Draw:
    """The answers of one minibatch, drawn again with replacement (`resampling`): what all its losses are of."""

    copies_N: Tensor
    """How often each trajectory of the claim was drawn, int64 on the host; 0 for those of other minibatches."""
    copies_M: Tensor
    """Those of this rank, on its device."""
    tokens_N: Tensor
    """Loss tokens of every trajectory."""

    def denominators(self, left_N: Tensor | None = None) -> Denominators:
        """Tokens and sequences as often as they were drawn; `left_N`: of those tokens that were not rejected."""
        tokens_N = self.tokens_N if left_N is None else left_N
        return Denominators(tokens=int((self.copies_N * tokens_N).sum()),
                            sequences=int((self.copies_N * (tokens_N > 0)).sum()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Choices of one minibatch, as far as the settings ask for them; else None."""

    chosen_K: Tensor | None = None
    """bool: by `select` of the loss."""
    uncertain_K: Tensor | None = None
    """bool: of high entropy."""
    mean_weight: Tensor | None = None
    denominators: Denominators | None = None
    """Without rejected tokens, and sequences that have no other."""
    tokens_N: Tensor | None = None
    """Tokens of every trajectory that were not rejected."""


def selects(learner: LearnerConfig) -> bool:
    """Whether the loss chooses tokens from the whole minibatch."""
    return getattr(learner.loss, "scope", None) == "minibatch"


def needs_whole(learner: LearnerConfig) -> bool:
    """Whether an update needs a no-gradient pass over its minibatch first."""
    correction = learner.correction
    return selects(learner) or correction.normalize or correction.rejected == "exclude" \
        or learner.loss.top_entropy_quantile < 1.0


def reads_policy(learner: LearnerConfig) -> bool:
    """Whether that pass must be of the weights before each update; else it is the proximal pass. In bypass mode and
    with a log-linear proximal what is corrected moves with the policy."""
    chooser = loss_module(learner.loss.name)
    return learner.correction.mode == "bypass" or learner.loss.proximal == "loglinear" \
        or learner.loss.top_entropy_quantile < 1.0 \
        or (selects(learner) and getattr(chooser, "SELECTS_BY_POLICY", True))


def gather(values: Mapping[int, Tensor], minibatch: Minibatch, ranks: Ranks, tokens: int) -> Tensor:
    """One column of a minibatch over all ranks, `[K]` on the host, 0 at tokens of others; `values` by micro-batch.

    Exact, and float32 again where it was: every token is of one rank, and all others add 0.
    """
    mine_K = torch.zeros(tokens, dtype=torch.float64)
    for micro in minibatch.micros:
        mine_K[micro.place_S.cpu()] = values[micro.number].detach().double().cpu()
    return ranks.sum_tensor(mine_K).float()


def choose(seen: Tokens, entropy_K: Tensor, member_K: Tensor, denominators: Denominators, learner: LearnerConfig, *,
           seed: int) -> Whole:
    """The choices of one minibatch.

    `seen`: all loss tokens of the claim as the no-gradient pass has them; `member_K`: those of this minibatch.
    `seed`: of what is drawn by lot.
    """
    tokens, _ = possible(Tokens(
        policy_S=seen.policy_S[member_K], anchor_S=seen.anchor_S[member_K], behavior_S=seen.behavior_S[member_K],
        advantage_S=seen.advantage_S[member_K], reward_S=seen.reward_S[member_K], sequence_S=seen.sequence_S[member_K],
        sequences=seen.sequences, bypass=seen.bypass))
    found, correction = Whole(), correction_of(learner)
    if selects(learner):
        found = replace(found, chosen_K=_spread(select(tokens, learner, seed), member_K))
    if learner.loss.top_entropy_quantile < 1.0:
        found = replace(found, uncertain_K=_spread(top(entropy_K[member_K], learner.loss.top_entropy_quantile),
                                                   member_K))
    if correction.normalize:
        weights = correction_weights(difference(tokens), tokens.sequence_S, tokens.sequences, correction)
        assert weights is not None  # normalize without weights is refused
        found = replace(found, mean_weight=mean_weight(weights, tokens.sequence_S, tokens.sequences, correction))
    if correction.rejected == "exclude":
        kept_S = corrected(tokens, correction).kept_S
        assert kept_S is not None  # exclude without rules is refused
        tokens_N = sequence_sum(kept_S.long(), tokens.sequence_S, tokens.sequences)
        left = Denominators(tokens=int(kept_S.sum()), sequences=int((tokens_N > 0).sum()))
        found = replace(found, denominators=left, tokens_N=tokens_N)
    return found


def drawn(reward_N: Tensor, tokens_N: Tensor, member_N: Tensor, learner: LearnerConfig, *, seed: int) -> Tensor:
    """How often each trajectory is drawn: of one minibatch as many as have a loss token, by their rewards, `[N]`."""
    assert learner.resampling != "none"
    there_N = member_N & (tokens_N > 0)
    weights = resampling_weights(reward_N[there_N].double().numpy(), learner.resampling,
                                 power=learner.resampling_power)
    copies_N = torch.zeros_like(tokens_N)
    copies_N[there_N] = to_tensor(resampled(weights, seed))
    return copies_N


def select(tokens: Tokens, learner: LearnerConfig, seed: int) -> Tensor:
    """bool: the tokens that the loss chooses, with lots of a generator of this seed."""
    draw = torch.rand(len(tokens.policy_S), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return loss_module(learner.loss.name).select(tokens, learner.loss, draw.to(tokens.policy_S.device))


def top(entropy_S: Tensor, share: float) -> Tensor:
    """bool: the `share` of the tokens (rounded up) with the highest entropy; ties go by position. Beyond the 80/20 rule
    (arXiv 2506.01939)."""
    chosen_S = torch.zeros_like(entropy_S, dtype=torch.bool)
    chosen_S[(-entropy_S).argsort(stable=True)[:math.ceil(share * len(entropy_S))]] = True
    return chosen_S


def _spread(chosen: Tensor, member_K: Tensor) -> Tensor:
    spread_K = torch.zeros_like(member_K)
    spread_K[member_K] = chosen
    return spread_K
