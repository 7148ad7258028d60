"""Distillation from a teacher, on answers that the policy sampled. Pure functions, for learner/others.py.

`_S` loss tokens, `_SK` the k most likely tokens of the teacher at each of them. Log-probs are float32 nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learner.kl import estimate


def distilled_advantage(advantage_S: Tensor, policy_S: Tensor, teacher_S: Tensor, *, coef: float) -> Tensor:
    """A_t - coef sg(log pi_t - log T_t): on-policy distillation as an advantage. Agarwal et al. (arXiv 2306.13649)."""
    return advantage_S - coef * (policy_S.detach() - teacher_S)


def distillation_loss(policy_S: Tensor, teacher_S: Tensor, estimator: str) -> Tensor:
    """KL of the policy against the teacher per token, by an estimator of kl.py: the same as a loss."""
    return estimate(policy_S, teacher_S, estimator)


def forward_topk(policy_SK: Tensor, teacher_SK: Tensor) -> Tensor:
    """sum over the teacher's k most likely tokens of T_v (log T_v - log pi_v), all other tokens as one, `[S]`.

    A token with a log-prob of minus infinity adds 0: where it is the teacher's since T log T is 0, where it is the
    policy's since no gradient brings it back.
    """
    never_SK = torch.isneginf(teacher_SK) | torch.isneginf(policy_SK.detach())
    apart_SK = teacher_SK.masked_fill(never_SK, 0.0) - policy_SK.masked_fill(never_SK, 0.0)
    return (teacher_SK.exp() * apart_SK).sum(-1) + _rest(policy_SK, teacher_SK)


def _rest(policy_SK: Tensor, teacher_SK: Tensor) -> Tensor:
    """The same of what the k tokens leave; 0 where the teacher leaves nothing."""
    tiny = torch.finfo(policy_SK.dtype).eps
    teacher_S, policy_S = ((1.0 - log_SK.exp().sum(-1)).clamp(min=tiny) for log_SK in (teacher_SK, policy_SK))
    return teacher_S * (teacher_S.log() - policy_S.log())
