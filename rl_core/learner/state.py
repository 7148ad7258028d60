"""What a step carries to the next one: parameters, optimizer, and the count of skipped updates. Nothing random."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rl_core.config import Config, LearnerConfig
from rl_core.errors import CheckpointDamaged
from rl_core.learner.flops import model_size
from rl_core.learner.policy import Policy, load_policy
from rl_core.learner.ranks import Ranks, assign, like, whole

MOMENTS = ("exp_avg", "exp_avg_sq")
COUNT = "step"
DECAYS = "decays"
"""Mark of the parameter group that weight decay applies to."""


class TrainState:
    """The policy (sharded over ranks) and its optimizer. Every method that returns tensors is a collective."""

    def __init__(self, directory: Path, config: Config, ranks: Ranks, parameters: Mapping[str, Tensor] | None = None,
                 optimizer: Mapping[str, Tensor] | None = None) -> None:
        """The model of `directory`, with the values of a checkpoint over it if given."""
        learner = config.learner
        self.policy: Policy = load_policy(directory, logits_chunk=learner.logits_chunk, dtype=_dtype(learner),
                                          device=ranks.device)
        self.size = model_size(self.policy.model)
        """None where model FLOPs cannot be counted."""
        if parameters is not None:
            self._load_parameters(parameters)
        ranks.shard(self.policy)
        self.optimizer = make_optimizer(self.policy, learner)
        if optimizer is not None:
            self._load_optimizer(optimizer)
        self.skipped_in_a_row = 0

    def compute_as(self, learner: LearnerConfig) -> None:
        """Compute in the dtype and chunks of these settings from now on. Parameters and sums are float32 anyway."""
        self.policy.dtype, self.policy.logits_chunk = _dtype(learner), learner.logits_chunk

    def weights(self) -> dict[str, Tensor]:
        """Full parameters by name; on one rank they are the policy's own memory, so use them before the next update."""
        return {name: whole(parameter.detach()) for name, parameter in self.policy.weights().items()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Full optimizer state as `<what>/<parameter>`; empty before the first update."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.policy.weights().items():
            for key, value in cast(dict[str, Tensor], self.optimizer.state.get(parameter, {})).items():
                tensors[f"{key}/{name}"] = whole(value)
        return tensors

    def _load_parameters(self, values: Mapping[str, Tensor]) -> None:
        mine = self.policy.weights()
        if mine.keys() != values.keys():
            raise CheckpointDamaged("a checkpoint of another model: parameters "
                                    f"{sorted(mine.keys() ^ values.keys())[:5]} are in only one of the two")
        for name, parameter in mine.items():
            assign(parameter, values[name])

    def _load_optimizer(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.policy.weights().items():
            if f"{COUNT}/{name}" in values:
                state: dict[str, Any] = {COUNT: values[f"{COUNT}/{name}"].clone().to(parameter.device)}
                state |= {key: like(parameter, values[f"{key}/{name}"]).clone() for key in MOMENTS}
                self.optimizer.state[parameter] = state


def _dtype(learner: LearnerConfig) -> torch.dtype:
    return torch.bfloat16 if learner.dtype == "bfloat16" else torch.float32


def make_optimizer(policy: Policy, learner: LearnerConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, not on norms and biases. Every step sets its numbers (set_optimizer)."""
    parameters = list(policy.weights().values())
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": learner.weight_decay, DECAYS: True},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, DECAYS: False}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learner.lr, betas=learner.betas,
                             eps=learner.adam_eps, fused=True)


def set_optimizer(optimizer: torch.optim.Optimizer, learner: LearnerConfig, learning_rate: float) -> None:
    """What the updates of one step are made with: all of it may differ from what the step before was made with."""
    for group in optimizer.param_groups:
        group |= {"lr": learning_rate, "betas": learner.betas, "eps": learner.adam_eps}
        if group.get(DECAYS, False):
            group["weight_decay"] = learner.weight_decay
