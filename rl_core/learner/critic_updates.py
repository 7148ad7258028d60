"""The critic's updates of one step: value loss, backward, its own optimizer. `_S` loss tokens of one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_core.learner.aggregation import aggregate
from rl_core.learner.asking import Asked
from rl_core.learner.credit import Returns
from rl_core.learner.critic import Critic
from rl_core.learner.micro import Micro, Minibatch
from rl_core.learner.optimizer import OptimizerSteps, set_optimizer
from rl_core.learner.plan import StepPlan
from rl_core.learner.ranks import Ranks, to_list
from rl_core.learner.sums import NAN, share
from rl_core.learner.value_loss import value_loss
from rl_core.learner.whole import Draw


class CriticUpdates:
    """One update per minibatch and pass, beside the policy's. Lives as long as the step.

    `returns` is what the values shall be, by number of the micro-batch; `asked.value` what they were before the step.
    """

    def __init__(self, critic: Critic, optimizer: torch.optim.Optimizer, ranks: Ranks, plan: StepPlan, asked: Asked,
                 values: Returns, returns: Mapping[int, Tensor], *, tokens_M: Tensor, skipped_in_a_row: int) -> None:
        self.critic, self.ranks, self.plan = critic, ranks, plan
        self.asked, self.values, self.returns, self.tokens_M = asked, values, returns, tokens_M
        self.steps = OptimizerSteps(optimizer, ranks, plan, skipped_in_a_row, " of the critic")
        self._clipped = torch.zeros((), dtype=torch.float64)
        self._tokens = 0
        settings = plan.learner.critic
        set_optimizer(optimizer, plan.learner, settings.lr, settings.weight_decay)

    def update(self, minibatch: Minibatch, draw: Draw | None) -> None:
        """One optimizer update, or a skipped one where loss or gradient is not finite, on all ranks alike.

        `draw`: the answers that it is of, as often as they were drawn; None = all of the minibatch, once each.
        """
        self.steps.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64)
        for micro in minibatch.micros:
            loss = loss + self._backward(micro, minibatch, draw)
        self.steps.take(list(self.critic.parameters()), loss, self.plan.learner.critic.max_grad_norm)

    def _backward(self, micro: Micro, minibatch: Minibatch, draw: Draw | None) -> Tensor:
        """Add this micro-batch's gradient; returns its share of the loss, the mean over tokens, detached float64."""
        value_S = self.critic(micro.inputs).value_S
        before_S, clip = self.asked.value[micro.number], self.plan.learner.critic.clip
        loss_S = value_loss(value_S, before_S, self.returns[micro.number], clip=clip)
        denominators = minibatch.denominators
        if draw is not None:
            loss_S, denominators = loss_S * draw.copies_M[micro.sequence_S], draw.denominators()
        loss = aggregate(loss_S, micro.sequence_S, self.tokens_M, denominators, "token_mean",
                         max_new_tokens=self.plan.max_new_tokens)
        (loss * self.ranks.loss_scale).backward()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        self._clipped += ((value_S.detach() - before_S).abs() > clip).sum().double().cpu()
        self._tokens += len(value_S)
        return loss.detach().double().cpu()

    def metrics(self) -> dict[str, float]:
        """The critic's metrics of the step (a collective)."""
        value_K = self.values.value_K
        clipped, tokens = to_list(self.ranks.sum_tensor(torch.stack([self._clipped, torch.tensor(
            float(self._tokens), dtype=torch.float64)])))
        returned, error = self.values.return_K.double(), (self.values.return_K - value_K).double()
        spread = float(returned.var(unbiased=False)) if len(returned) else 0.0
        made = len(self.steps.losses)
        return {
            "critic/value_loss": share(math.fsum(self.steps.losses), made),
            "critic/grad_norm": share(math.fsum(self.steps.norms), made),
            "critic/value_mean": float(value_K.double().mean()) if len(value_K) else NAN,
            "critic/return_mean": float(returned.mean()) if len(returned) else NAN,
            "critic/explained_variance": 1.0 - float(error.var(unbiased=False)) / spread if spread > 0 else NAN,
            "critic/clipped": share(clipped, tokens), "critic/skipped_updates": float(self.steps.skipped)}
