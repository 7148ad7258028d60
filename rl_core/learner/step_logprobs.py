"""What the learner says of every token of a recorded step: log-probs by its weights before the step, and behind it.

A step does not record them: they are 8 bytes a token that follow from checkpoint and claims. They are computed by a
replay (replay.py), from the nearest whole checkpoint on, and so are those that the step was trained with, as far as the
environment is the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.config import LearnerConfig
from rl_core.experience.ledger import read_claim
from rl_core.experience.reader import read_claim_rows
from rl_core.learner import batch as stages
from rl_core.learner.micro import Minibatch, minibatches_of
from rl_core.learner.policy import Policy
from rl_core.learner.replay import Walk
from rl_core.learner.token_states import StepLogprobs
from rl_core.run_dir import RunDir
from rl_core.types import Claim
from rl_core.versions import read_versions


def step_logprobs(run: RunDir, step: int) -> StepLogprobs:
    """Train the steps from the nearest checkpoint up to `step` again, and ask the weights on both sides of it.

    Writes nothing. Raises ReplayUnavailable, naming why the step cannot be replayed.
    """
    walk = Walk(run, [step])
    walk.go_to(step)
    sampled_T, minibatches = _questions(run, read_claim(run, step), walk, walk.settings(step).learner)
    proximal_T = _asked(walk.fold.state.policy, minibatches, sampled_T)
    walk.train()
    return StepLogprobs(proximal_T=proximal_T, policy_T=_asked(walk.fold.state.policy, minibatches, sampled_T))


def _questions(run: RunDir, claim: Claim, walk: Walk,
               learner: LearnerConfig) -> tuple[NDArray[np.bool_], list[Minibatch]]:
    """Which tokens of the claim the model has sampled, and micro-batches of all of these: no mask leaves one out."""
    rows = read_claim_rows(run, claim, rank=0, ranks=1, versions=read_versions(run))
    batch = stages.assemble(rows)
    stages.mark_foreign_tokens(batch)
    stages.number_tokens(batch)
    batch["trajectory", "advantage"] = torch.zeros(len(rows.reward_N))
    return rows.loss_mask == 1, minibatches_of(batch, walk.ranks, groups=rows.groups, minibatch_groups=rows.groups,
                                               token_budget=learner.token_budget,
                                               share_prefixes=learner.share_prefixes)


@torch.no_grad()
def _asked(policy: Policy, minibatches: list[Minibatch], sampled_T: NDArray[np.bool_]) -> NDArray[np.float32]:
    found_K = np.full(int(sampled_T.sum()), np.nan, np.float32)
    for micro in (micro for minibatch in minibatches for micro in minibatch.micros):
        found_K[micro.place_S.cpu().numpy()] = policy(micro.inputs).logprob_S.float().cpu().numpy()
    found_T = np.full(len(sampled_T), np.nan, np.float32)
    found_T[sampled_T] = found_K
    return found_T
