"""One training step over one claim: passes that it needs first, then passes x minibatches of loss, backward, optimizer.

A pure function of (parameters and optimizer state, roles, batch, plan, environment). What is drawn by lot is drawn from
a generator seeded by (run seed, step, pass, minibatch).
"""

from __future__ import annotations

import math
import time

import torch
from tensordict import TensorDict

from rl_core.combinations import check_combination
from rl_core.learner.advantages.estimate import needs_policy
from rl_core.learner.asking import ask
from rl_core.learner.batch import loss_tokens, to_tensor
from rl_core.learner.credit import Credit, is_made_late
from rl_core.learner.critic_updates import CriticUpdates
from rl_core.learner.kl import KlController
from rl_core.learner.micro import minibatches_of
from rl_core.learner.plan import StepPlan, StepResult, needs_proximal_pass, recomputes_proximal
from rl_core.learner.policy import Policy
from rl_core.learner.ranks import Ranks, reshard, to_list
from rl_core.learner.roles import Roles
from rl_core.learner.sums import MAXIMA, TOTALS, stack
from rl_core.learner.updates import Updates
from rl_core.roles.plan import asked_roles


def training_step(policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks, batch: TensorDict,
                  plan: StepPlan, roles: Roles | None = None) -> StepResult:
    """Update the policy in place on this rank's share of a claim whose masks and advantages are set; and of `roles`
    the critic and the coefficient of the KL, where the plan has them.

    `batch` is on the host, and all stages of batch.py have been there.
    Raises EngineMismatch and ProximalDrift before anything is updated, NonFiniteTraining after too many skipped updates
    in a row.
    """
    learner, roles = plan.learner, roles or Roles()
    check_combination(learner)
    minibatches = minibatches_of(batch, ranks, groups=plan.groups, minibatch_groups=plan.minibatch_groups,
                                 token_budget=learner.token_budget, share_prefixes=learner.share_prefixes,
                                 behind="critic" in asked_roles(learner))
    updates = learner.passes * len(minibatches) if plan.policy_learns else 0
    first_forward_s = time.monotonic()
    asked = ask(roles, [micro for one in minibatches for micro in one.micros], policy, learner)
    run = Updates(policy, optimizer, ranks, plan, batch, to_tensor(loss_tokens(batch)).to(ranks.device), asked)
    asked_s = time.monotonic()
    if proximal := needs_proximal_pass(learner, updates) or not plan.policy_learns:
        run.proximal_pass(minibatches, squares=needs_policy(learner.advantage))
    credit = run.late_credit(minibatches) if is_made_late(learner) else None
    proximal_s = time.monotonic() - asked_s if proximal else 0.0
    if not plan.policy_learns:
        reshard(policy)
        run.check_mismatch()
    critic = _critic_updates(run, roles, credit)
    for passed in range(learner.passes):
        for minibatch in minibatches:
            draw = run.draw(minibatch, passed)
            if plan.policy_learns:
                run.update(minibatch, draw, passed)
            if critic is not None:
                critic.update(minibatch, draw)
    updated_s = time.monotonic()
    if critic is not None:
        roles.critic_skipped_in_a_row = critic.steps.skipped_in_a_row
    if credit is not None and math.isfinite(credit.kl):
        roles.kl_beta = _next_beta(plan, credit)
    totals = to_list(ranks.sum_tensor(stack(run.sums.total, TOTALS, 0.0)))
    largest = to_list(ranks.max_tensor(stack(run.sums.largest, MAXIMA, -math.inf)))
    return StepResult(
        totals=dict(zip(TOTALS, totals, strict=True)),
        largest=dict(zip(MAXIMA, largest, strict=True)),
        losses=tuple(run.steps.losses), gradient_norms=tuple(run.steps.norms),
        updates=updates, skipped=run.steps.skipped, skipped_in_a_row=run.steps.skipped_in_a_row,
        recomputed=recomputes_proximal(learner),
        first_forward_s=first_forward_s, updated_s=updated_s, proximal_s=proximal_s, roles_s=asked_s - first_forward_s,
        critic={} if critic is None else critic.metrics(), kl=math.nan if credit is None else credit.kl)


def _critic_updates(run: Updates, roles: Roles, credit: Credit | None) -> CriticUpdates | None:
    """What the critic learns in this step; None without one."""
    if credit is None or credit.values is None:
        return None
    assert roles.critic is not None and roles.optimizer is not None
    return CriticUpdates(roles.critic, roles.optimizer, run.ranks, run.plan, run.asked, credit.values, run.returns,
                         tokens_M=run.tokens_M, skipped_in_a_row=roles.critic_skipped_in_a_row)


def _next_beta(plan: StepPlan, credit: Credit) -> float | None:
    """The coefficient that the next step has; None where it is the one of the settings."""
    settings = plan.learner.kl
    if settings.target is None:
        return None
    controller = KlController(beta=plan.kl_beta, target=settings.target, horizon=settings.horizon)
    return controller.after(credit.kl, credit.answers).beta
