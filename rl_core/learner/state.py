"""What a step carries to the next one: parameters, optimizer, models beside the policy, and the count of skipped
updates. Nothing random."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rl_core.config import Config, LearnerConfig
from rl_core.learner.flops import model_size
from rl_core.learner.optimizer import full_weights, load_optimizer, load_weights, make_optimizer, optimizer_tensors
from rl_core.learner.policy import Policy, dtype_of, load_policy
from rl_core.learner.probing import adapter_probe
from rl_core.learner.ranks import Ranks, on_host
from rl_core.learner.roles import Roles
from rl_core.lora.canary import Probe
from rl_core.lora.tensors import merged


class TrainState:
    """The policy (sharded over ranks), its optimizer, and the roles. Every method that returns tensors is a collective.
    """

    def __init__(self, directory: Path, config: Config, ranks: Ranks, parameters: Mapping[str, Tensor] | None = None,
                 optimizer: Mapping[str, Tensor] | None = None, roles: Roles | None = None) -> None:
        """The model of `directory`, with the values of a checkpoint over it if given. `roles`: models beside it."""
        learner = config.learner
        self.policy: Policy = load_policy(directory, logits_chunk=learner.logits_chunk, dtype=dtype_of(learner),
                                          device=ranks.device, lora=learner.lora, seed=config.seed,
                                          recompute=learner.recompute)
        self.lora = learner.lora
        self.size = model_size(self.policy.model)
        """None where model FLOPs cannot be counted."""
        if parameters is not None:
            load_weights(self.policy, parameters)
        ranks.shard(self.policy)
        self.optimizer = make_optimizer(self.policy, learner)
        if optimizer is not None:
            load_optimizer(self.policy, self.optimizer, optimizer)
        self.skipped_in_a_row = 0
        self.roles = roles or Roles()

    def compute_as(self, learner: LearnerConfig) -> None:
        """Compute in the dtype and chunks of these settings from now on. Parameters and sums are float32 anyway."""
        self.policy.dtype, self.policy.logits_chunk = dtype_of(learner), learner.logits_chunk
        self.roles.compute_as(learner)

    def weights(self, *, keep: bool = True) -> dict[str, Tensor]:
        """What is trained, whole, on the host and by name: all parameters, or those of the adapter. On one rank without
        a GPU they are the policy's own memory, so use them before the next update. `keep`: as in on_host."""
        return full_weights(self.policy, keep=keep)

    def base(self, *, keep: bool = True) -> dict[str, Tensor]:
        """The parameters under an adapter, as `weights` gives them; none without one."""
        return on_host(self.policy.base_weights().items(), keep=keep)

    def served(self, weights: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The parameters of the model that engines serve when these are the trained ones: with an adapter those of the
        base under it, too. No collective."""
        return merged(base, weights, self.lora.scale) if self.lora.used else weights

    def published(self, weights: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What a publication of these weights holds (`learner.lora.publish`). No collective."""
        return weights if self.lora.publish == "adapter" else self.served(weights, base)

    def probe(self, weights: Mapping[str, Tensor], room: int) -> Probe | None:
        """What the policy says of the canary's prompts when these are the trained weights; None without an adapter.
        `room`: tokens of prompt and answer that engines take."""
        if not self.lora.used:
            return None
        now = {name: tensor.clone() for name, tensor in self.weights().items()}
        load_weights(self.policy, weights)
        try:
            return adapter_probe(self.policy, room)
        finally:
            load_weights(self.policy, now)

    def optimizer_tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Full optimizer state as `<what>/<parameter>`; empty before the first update."""
        return optimizer_tensors(self.policy, self.optimizer, keep=keep)
