"""One training step of Headway over a batch of batch.py: loss, gradient norm and advantages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_core.config import Config
from rl_core.learner import batch as stages
from rl_core.learner.optimizer import make_optimizer
from rl_core.learner.plan import StepPlan
from rl_core.learner.policy import Policy
from rl_core.learner.ranks import Ranks
from rl_core.learner.roles import Roles
from rl_core.learner.step import training_step
from tests.learning import rows_of
from tests.peer.batch import Batch
from tests.peer.cases import GROUPS, LONGEST, SIZE

TOKEN_BUDGET = 60
"""Several micro-batches a step."""
ALONE = Ranks(rank=0, ranks=1, rendezvous="", device=torch.device("cpu"), deadline_s=1, barrier_s=1)


@dataclass(frozen=True)
class Found:
    """What one step came to."""

    loss: float
    """All that was differentiated: the policy loss, KL and entropy. A step's result names the policy loss alone."""
    norm: float
    advantages: list[float]
    """By answer; by loss token where the estimator gives tokens their own."""


@contextmanager
def differentiated() -> Iterator[list[float]]:
    """The numbers that `backward` is called on."""
    seen: list[float] = []
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen.append(float(self.detach()))
        original(self, *args, **kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


def config_of(learner: dict[str, Any]) -> Config:
    base = {"lr": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9, "token_budget": TOKEN_BUDGET}
    return Config.model_validate({"groups_per_step": GROUPS, "group_size": SIZE,
                                  "sampling": {"max_new_tokens": LONGEST}, "learner": base | learner})


def take_step(policy: Policy, given: Batch, learner: dict[str, Any], *, reference: Path | None = None,
              advantages: list[float] | None = None) -> Found:
    """The step with learning rate 0 on a copy of `policy`. `advantages`: in place of the estimator's."""
    config = config_of(learner)
    batch = stages.assemble(rows_of(given.groups))
    if config.learner.advantage.name == "gdpo":
        for name, values in given.parts.items():
            batch["parts", name] = torch.tensor(values)
    stages.mark_tokens(batch, step=1, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, config.learner.loss.truncated)
    stages.number_tokens(batch, ALONE.sum_tensor)
    stages.add_advantages(batch, config.learner.advantage)
    if advantages is not None:
        batch["trajectory", "advantage"] = torch.tensor(advantages)
    roles = Roles({} if reference is None else {"reference": reference})
    roles.prepare(config.learner, ALONE)
    trained = copy.deepcopy(policy)
    plan = StepPlan(step=1, idx=1, learning_rate=0.0, groups=GROUPS, minibatch_groups=GROUPS, max_new_tokens=LONGEST,
                    learner=config.learner, skipped_in_a_row=0, max_skipped=0, seed=5,
                    kl_beta=config.learner.kl.coef)
    with differentiated() as losses:
        result = training_step(trained, make_optimizer(trained, config.learner), ALONE, batch, plan, roles)
    return Found(sum(losses), result.gradient_norms[0], batch["trajectory", "advantage"].tolist())
