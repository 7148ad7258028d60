"""Passes without gradient through the models beside the policy, before the first update of a step.

`_S` loss tokens of one micro-batch, `_Q` its trajectories, `_SK` the teacher's most likely tokens at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.config import LearnerConfig
from rl_core.errors import NonFiniteTraining
from rl_core.learner.adapter import without_adapter
from rl_core.learner.micro import Micro
from rl_core.learner.policy import Policy
from rl_core.learner.ranks import reshard
from rl_core.learner.roles import Roles
from rl_core.roles.plan import asked_roles, is_base


@dataclass(frozen=True, slots=True)
class Asked:
    """What the roles say of a claim, by number of the micro-batch; empty where a role is not asked."""

    reference: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Log-probs of the loss tokens, `[S]`."""
    teacher: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    likely: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])
    """The teacher's most likely tokens: (log-probs, ids), both `[S, K]`."""
    value: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Of the critic before every loss token, `[S]`."""
    behind: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Of the critic behind every answer, `[Q]`."""


@torch.no_grad()
def ask(roles: Roles, micros: Sequence[Micro], policy: Policy, learner: LearnerConfig) -> Asked:
    """What the settings ask the roles for. Raises NonFiniteTraining for a role that answers NaN."""
    found, asked = Asked(), asked_roles(learner)
    for micro in micros:
        number = micro.number
        if "reference" in asked:
            found.reference[number] = _numbers("reference policy", _reference(roles, micro, policy, learner))
        if "teacher" in asked:
            assert roles.teacher is not None
            likely = (learner.teacher.top_k, policy.vocabulary) if learner.teacher.use == "forward_topk" else None
            answer = roles.teacher(micro.inputs, likely=likely)
            found.teacher[number] = _numbers("teacher", answer.logprob_S)
            if likely is not None:
                found.likely[number] = answer.others_SK, answer.likely_ids_SK
        if "critic" in asked:
            assert roles.critic is not None
            values = roles.critic(micro.inputs)
            found.value[number] = _numbers("critic", values.value_S)
            found.behind[number] = values.behind_Q
    for model in (roles.reference, roles.teacher, roles.critic, policy if is_base(learner) else None):
        if model is not None:
            reshard(model)
    return found


def _reference(roles: Roles, micro: Micro, policy: Policy, learner: LearnerConfig) -> Tensor:
    """Log-probs of the reference: a model of its own, or the policy without its adapter."""
    if is_base(learner):
        with without_adapter(policy):
            return policy(micro.inputs).logprob_S
    assert roles.reference is not None
    return roles.reference(micro.inputs).logprob_S


def _numbers(role: str, answer_S: Tensor) -> Tensor:
    if bool(torch.isnan(answer_S).any()):
        raise NonFiniteTraining(f"the {role} answers NaN at {int(torch.isnan(answer_S).sum())} of {len(answer_S)} loss "
                                "tokens: its weights are broken, or have become so")
    return answer_S
