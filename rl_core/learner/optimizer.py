"""AdamW of a model, and its state as named tensors. A model is known by its parameters by name, sharded or not.

Every function that returns tensors is a collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from rl_core.config import LearnerConfig
from rl_core.errors import CheckpointDamaged, NonFiniteTraining
from rl_core.learner.plan import StepPlan
from rl_core.learner.ranks import Ranks, assign, gradient_norm, like, on_host

MOMENTS = ("exp_avg", "exp_avg_sq")
COUNT = "step"
DECAYS = "decays"
"""Mark of the parameter group that weight decay applies to."""


class Trained(Protocol):
    """A model that is trained: its parameters by name, tied ones once."""

    def weights(self) -> dict[str, Tensor]: ...


def make_optimizer(model: Trained, learner: LearnerConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, not on norms and biases. Every step sets its numbers (set_optimizer)."""
    parameters = list(model.weights().values())
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": learner.weight_decay, DECAYS: True},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, DECAYS: False}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learner.lr, betas=learner.betas,
                             eps=learner.adam_eps, fused=True)


def set_optimizer(optimizer: torch.optim.Optimizer, learner: LearnerConfig, learning_rate: float,
                  weight_decay: float | None = None) -> None:
    """What the updates of one step are made with: all of it may differ from what the step before was made with.

    `weight_decay` None: that of the policy.
    """
    for group in optimizer.param_groups:
        group |= {"lr": learning_rate, "betas": learner.betas, "eps": learner.adam_eps}
        if group.get(DECAYS, False):
            group["weight_decay"] = learner.weight_decay if weight_decay is None else weight_decay


@dataclass(slots=True)
class OptimizerSteps:
    """Updates of one model in one training step: those that were made, and those that were not finite."""

    optimizer: torch.optim.Optimizer
    ranks: Ranks
    plan: StepPlan
    skipped_in_a_row: int
    """Also of the training steps before."""
    of: str = ""
    """Whose updates, in an error: " of the critic"."""
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    skipped: int = 0

    def take(self, parameters: list[nn.Parameter], loss: Tensor, max_norm: float) -> None:
        """Clip the gradients and update, or skip where loss or gradient is not finite, on all ranks alike.

        `loss`: this rank's share, a scalar. Raises NonFiniteTraining after too many skipped in a row.
        """
        norm = gradient_norm(parameters)
        total = float(self.ranks.sum_tensor(loss[None])[0])
        if not (math.isfinite(total) and math.isfinite(float(norm))):
            self._skip(total, float(norm))
            return
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        self.losses.append(total)
        self.norms.append(float(norm))
        self.skipped_in_a_row = 0

    def _skip(self, loss: float, norm: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.plan.max_skipped:
            raise NonFiniteTraining(
                f"step {self.plan.step}: {self.skipped_in_a_row} updates{self.of} in a row were not finite (loss "
                f"{loss}, gradient norm {norm}); failure.max_skipped_updates is {self.plan.max_skipped}")


def full_weights(model: Trained, *, keep: bool = True) -> dict[str, Tensor]:
    """Full parameters by name, on the host; on one rank without a GPU they are the model's own memory, so use them
    before the next update. `keep`: as in on_host."""
    return on_host(model.weights().items(), keep=keep)


def load_weights(model: Trained, values: Mapping[str, Tensor]) -> None:
    """Put full parameters into a model. Raises CheckpointDamaged for those of another model."""
    mine = model.weights()
    if mine.keys() != values.keys():
        raise CheckpointDamaged("a checkpoint of another model: parameters "
                                f"{sorted(mine.keys() ^ values.keys())[:5]} are in only one of the two")
    for name, parameter in mine.items():
        assign(parameter, values[name])


def optimizer_tensors(model: Trained, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Tensor]:
    """Full optimizer state as `<what>/<parameter>`, as full_weights gives them; empty before the first update."""
    return on_host(((f"{key}/{name}", value) for name, parameter in model.weights().items()
                    for key, value in cast(dict[str, Tensor], optimizer.state.get(parameter, {})).items()), keep=keep)


def load_optimizer(model: Trained, optimizer: torch.optim.Optimizer, values: Mapping[str, Tensor]) -> None:
    """Put what `optimizer_tensors` returned into a fresh optimizer of the model; parameters without state stay so."""
    for name, parameter in model.weights().items():
        if f"{COUNT}/{name}" in values:
            state: dict[str, Any] = {COUNT: values[f"{COUNT}/{name}"].clone().to(parameter.device)}
            state |= {key: like(parameter, values[f"{key}/{name}"]).clone() for key in MOMENTS}
            optimizer.state[parameter] = state
