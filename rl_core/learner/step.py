"""One training step over one claim: proximal pass if needed, then passes x minibatches of loss, backward, optimizer.

A pure function of (parameters and optimizer state, batch, plan, environment). What is drawn by lot is drawn from a
generator seeded by (run seed, step, pass, minibatch).
"""

from __future__ import annotations

import math
import time

import torch
from tensordict import TensorDict

from rl_core.combinations import check_combination
from rl_core.learner.advantages.estimate import needs_policy
from rl_core.learner.batch import loss_tokens, to_tensor
from rl_core.learner.micro import minibatches_of
from rl_core.learner.plan import StepPlan, StepResult, needs_proximal_pass
from rl_core.learner.policy import Policy
from rl_core.learner.ranks import Ranks, to_list
from rl_core.learner.sums import MAXIMA, TOTALS, stack
from rl_core.learner.updates import Updates


def training_step(policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks, batch: TensorDict,
                  plan: StepPlan) -> StepResult:
    """Update the policy in place on this rank's share of a claim whose masks and advantages are set.

    `batch` is on the host, and all stages of batch.py have been there.
    Raises EngineMismatch before anything is updated, NonFiniteTraining after too many skipped updates in a row.
    """
    learner = plan.learner
    check_combination(learner)
    minibatches = minibatches_of(batch, ranks, groups=plan.groups, minibatch_groups=plan.minibatch_groups,
                                 token_budget=learner.token_budget)
    updates = learner.passes * len(minibatches)
    run = Updates(policy, optimizer, ranks, plan, batch, to_tensor(loss_tokens(batch)).to(ranks.device))
    first_forward_s = time.monotonic()
    if needs_proximal_pass(learner, updates):
        from_policy = needs_policy(learner.advantage)
        run.proximal_pass(minibatches, squares=from_policy)
        if from_policy:
            run.token_baselines(minibatches)
        proximal_s = time.monotonic() - first_forward_s
    else:
        proximal_s = 0.0
    for passed in range(learner.passes):
        for minibatch in minibatches:
            run.update(minibatch, passed)
    updated_s = time.monotonic()
    totals = to_list(ranks.sum_tensor(stack(run.sums.total, TOTALS, 0.0)))
    largest = to_list(ranks.max_tensor(stack(run.sums.largest, MAXIMA, -math.inf)))
    return StepResult(
        totals=dict(zip(TOTALS, totals, strict=True)),
        largest=dict(zip(MAXIMA, largest, strict=True)), losses=tuple(run.losses), gradient_norms=tuple(run.norms),
        updates=updates, skipped=run.skipped, skipped_in_a_row=run.skipped_in_a_row,
        recomputed=learner.loss.proximal == "recompute" and learner.correction.mode == "decoupled",
        first_forward_s=first_forward_s, updated_s=updated_s, proximal_s=proximal_s)
