"""The models beside the policy, on the ranks of the learner: a frozen reference, a critic and its optimizer, a teacher.

They are asked about every token of a claim, on the rank that has the token, by a replay as by the run: so they live
where the policy does, and are part of the state that a step carries to the next one (state.py). A role is loaded when
the settings of a step first ask for it. Of what they hold a checkpoint has what has changed since it was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rl_core.config import LearnerConfig
from rl_core.learner.critic import Critic, load_critic
from rl_core.learner.optimizer import full_weights, load_optimizer, load_weights, make_optimizer, optimizer_tensors
from rl_core.learner.policy import Policy, dtype_of, load_policy
from rl_core.learner.ranks import Ranks
from rl_core.roles.plan import asked_roles, is_base
from rl_core.weights import digest_tensors

REFERENCE, CRITIC, MOMENTS = "reference", "critic", "critic-optimizer"
"""What stands before the slash in the names of their tensors in a checkpoint."""


@dataclass(slots=True)
class Roles:
    """What a rank has beside the policy: `Roles()` is nothing. Every method that returns tensors is a collective."""

    directories: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Where each role is loaded from."""
    reference: Policy | None = None
    """None also where it is the base under the policy's adapter (asking.py)."""
    teacher: Policy | None = None
    critic: Critic | None = None
    optimizer: torch.optim.AdamW | None = None
    """Of the critic."""
    kl_beta: float | None = None
    """What the adaptive controller has made of `learner.kl.coef`; None before it has acted."""
    reference_step: int = 0
    """Training steps behind the weights that the reference took over last; 0 = as it was loaded."""
    critic_skipped_in_a_row: int = 0

    # -- to be ready for a step

    def prepare(self, learner: LearnerConfig, ranks: Ranks) -> None:
        """Load what these settings ask for and is not there. Raises ConfigError naming its `path`."""
        asked = asked_roles(learner)
        if "reference" in asked and self.reference is None and not is_base(learner):
            self.reference = self._frozen("reference", learner, ranks)
        if "teacher" in asked and self.teacher is None:
            self.teacher = self._frozen("teacher", learner, ranks)
        if "critic" in asked and self.critic is None:
            self.critic = load_critic(self.directories["critic"], dtype=dtype_of(learner), device=ranks.device,
                                      recompute=learner.recompute)
            ranks.shard(self.critic)
            self.optimizer = make_optimizer(self.critic, learner)

    def refresh(self, policy: Policy, learner: LearnerConfig, step: int) -> None:
        """Let the policy's weights into the reference where that is due before this step.

        What is due is a function of the step: a step that was voided delays a refresh, and skips none.
        """
        every = learner.reference.refresh_every
        if every is None or self.reference is None or "reference" not in asked_roles(learner):
            return
        due = step // every * every
        if due > self.reference_step:
            mix = learner.reference.refresh_mix
            mine = policy.weights()
            with torch.no_grad():
                for name, parameter in self.reference.weights().items():
                    if mix == 1.0:
                        parameter.copy_(mine[name])
                    else:
                        parameter.lerp_(mine[name], mix)
            self.reference_step = due

    def compute_as(self, learner: LearnerConfig) -> None:
        """Compute in the dtype and chunks of these settings from now on."""
        for model in (self.reference, self.teacher):
            if model is not None:
                model.dtype, model.logits_chunk = dtype_of(learner), learner.logits_chunk
        if self.critic is not None:
            self.critic.dtype = dtype_of(learner)

    def _frozen(self, role: str, learner: LearnerConfig, ranks: Ranks) -> Policy:
        model = load_policy(self.directories[role], logits_chunk=learner.logits_chunk, dtype=dtype_of(learner),
                            device=ranks.device, field=f"learner.{role}.path")
        model.requires_grad_(False)
        ranks.shard(model)
        return model

    # -- checkpoints and records

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """What has changed since it was loaded: critic, its optimizer, a refreshed reference; `<what>/<name>`. `keep`:
        as in on_host."""
        found: dict[str, Tensor] = {}
        if self.reference is not None and self.reference_step:
            found |= _named(REFERENCE, full_weights(self.reference, keep=keep))
        if self.critic is not None:
            found |= _named(CRITIC, full_weights(self.critic, keep=keep))
            found |= _named(MOMENTS, optimizer_tensors(self.critic, cast(torch.optim.AdamW, self.optimizer), keep=keep))
        return found

    def numbers(self) -> dict[str, float]:
        """The rest of the state, by name; what is as at the start is left out."""
        found = {"kl_beta": self.kl_beta, "reference_step": self.reference_step or None,
                 "critic_skipped_in_a_row": self.critic_skipped_in_a_row or None}
        return {name: value for name, value in found.items() if value is not None}

    def take_up(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float], learner: LearnerConfig,
                ranks: Ranks) -> None:
        """Be what `tensors` and `numbers` were of. Raises CheckpointDamaged for tensors of another model."""
        self.kl_beta = numbers.get("kl_beta")
        self.reference_step = int(numbers.get("reference_step", 0))
        self.critic_skipped_in_a_row = int(numbers.get("critic_skipped_in_a_row", 0))
        critic, reference = (_of(role, tensors) for role in (CRITIC, REFERENCE))
        if critic:
            self.critic = load_critic(self.directories["critic"], dtype=dtype_of(learner), device=ranks.device,
                                      recompute=learner.recompute)
            load_weights(self.critic, critic)
            ranks.shard(self.critic)
            self.optimizer = make_optimizer(self.critic, learner)
            load_optimizer(self.critic, self.optimizer, _of(MOMENTS, tensors))
        if reference:
            self.reference = self._frozen("reference", learner, ranks)
            load_weights(self.reference, reference)

    def digests(self, learner: LearnerConfig, *, keep: bool = True) -> dict[str, str]:
        """Of the weights of the roles that these settings train or refresh: `{"critic": "..."}`. Without `keep` (as in
        on_host) they say nothing."""
        asked, found = asked_roles(learner), dict[str, str]()
        if "critic" in asked and self.critic is not None:
            found["critic"] = digest_tensors(full_weights(self.critic, keep=keep).items())
        if "reference" in asked and self.reference is not None and self.reference_step:
            found["reference"] = digest_tensors(full_weights(self.reference, keep=keep).items())
        return found


def _named(what: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{what}/{name}": tensor for name, tensor in tensors.items()}


def _of(what: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{what}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{what}/")}
