"""What models beside the policy add to its loss: KL against the reference, distillation from a teacher. Pure.

`_S` loss tokens of one micro-batch, `_SK` the teacher's most likely tokens at each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.config import LearnerConfig
from rl_core.learner.distillation import distillation_loss, distilled_advantage, forward_topk
from rl_core.learner.kl import loss_term


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """Log-probs of one micro-batch's loss tokens by the models beside the policy; None for one that is not there."""

    reference_S: Tensor | None = None
    teacher_S: Tensor | None = None
    likely_SK: Tensor | None = None
    """Of the teacher's most likely tokens, by the teacher."""
    policy_SK: Tensor | None = None
    """Of the same tokens, by the policy under gradient."""

    @property
    def impossible_S(self) -> Tensor | None:
        """bool: tokens that one of them holds impossible; None without any of them."""
        found = [torch.isneginf(each) for each in (self.reference_S, self.teacher_S) if each is not None]
        return None if not found else torch.stack(found).any(0)


@dataclass(frozen=True, slots=True)
class Terms:
    """Token losses beside the policy loss, and what is recorded of them."""

    loss_S: Tensor | None
    """With their coefficients; None = nothing is added."""
    kl_S: Tensor | None
    distillation_S: Tensor | None
    """Values, detached."""


def taught_advantage(advantage_S: Tensor, policy_S: Tensor, others: Others, learner: LearnerConfig) -> Tensor:
    """The advantages, with the reverse KL against the teacher in them where that is asked for."""
    if learner.teacher.use != "advantage" or others.teacher_S is None:
        return advantage_S
    taught_S = distilled_advantage(advantage_S, policy_S, others.teacher_S, coef=learner.teacher.coef)
    return torch.where(torch.isneginf(others.teacher_S) | torch.isneginf(policy_S.detach()), advantage_S, taught_S)


def other_terms(others: Others, policy_S: Tensor, behavior_S: Tensor, impossible_S: Tensor,
                learner: LearnerConfig) -> Terms:
    """The terms that these settings add at every token; 0 where a log-prob is minus infinity (`impossible_S` for policy
    and behavior)."""
    elsewhere_S = others.impossible_S
    if elsewhere_S is None:
        return Terms(None, None, None)
    nowhere_S = impossible_S | elsewhere_S
    parts: list[Tensor] = []
    kl_S = distillation_S = None
    if others.reference_S is not None and learner.kl.use == "loss":
        kl_S = loss_term(policy_S, others.reference_S.masked_fill(elsewhere_S, 0.0), behavior_S,
                         learner.kl).masked_fill(nowhere_S, 0.0)
        parts.append(learner.kl.coef * kl_S)
    if others.teacher_S is not None:
        distillation_S = _distillation(others, policy_S, elsewhere_S, learner).masked_fill(nowhere_S, 0.0)
        if learner.teacher.use != "advantage":
            parts.append(learner.teacher.coef * distillation_S)
    loss_S = sum(parts[1:], parts[0]) if parts else None
    return Terms(loss_S, None if kl_S is None else kl_S.detach(),
                 None if distillation_S is None else distillation_S.detach())


def _distillation(others: Others, policy_S: Tensor, elsewhere_S: Tensor, learner: LearnerConfig) -> Tensor:
    if learner.teacher.use == "forward_topk":
        assert others.policy_SK is not None and others.likely_SK is not None
        return forward_topk(others.policy_SK, others.likely_SK)
    assert others.teacher_S is not None
    teacher_S = others.teacher_S.masked_fill(elsewhere_S, 0.0)
    if learner.teacher.use == "advantage":
        return policy_S.detach() - teacher_S
    return distillation_loss(policy_S, teacher_S, learner.teacher.estimator)
