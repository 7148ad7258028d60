"""One training step over one claim: proximal pass if needed, then passes x minibatches of loss, backward, optimizer.

A pure function of (parameters and optimizer state, batch, plan, environment). Nothing random is drawn: minibatches are
groups in claim order, which the data order has shuffled already.

`_S` loss tokens of one micro-batch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from rl_core.config import LearnerConfig
from rl_core.errors import ConfigError, EngineMismatch, NonFiniteTraining
from rl_core.learner.attention import Rows
from rl_core.learner.batch import column, layout_of, to_device, to_tensor
from rl_core.learner.correction import loglinear_proximal, token_weights, truncate
from rl_core.learner.losses import Denominators, aggregate, ppo_clip
from rl_core.learner.packing import Pack, micro_batches, pack
from rl_core.learner.policy import PackInputs, Policy
from rl_core.learner.ranks import Ranks, gradient_norm, to_list
from rl_core.learner.state import set_optimizer
from rl_core.learner.sums import MAXIMA, TOTALS, Sums, anchor_sums, update_sums

DECOUPLED_CAP = 5.0
"""Cap of the token weights prox/mu that decoupled_ppo brings along."""
MISMATCH_ERROR = 0.1
"""Nats per token between proximal and behavior on tokens of the very same weights: engine and learner disagree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """All that a step depends on beside state and batch."""

    step: int
    idx: int
    """Publication index of the step; `i_prox` of the log-linear proximal."""
    learning_rate: float
    groups: int
    """Groups of the claim."""
    minibatch_groups: int
    max_new_tokens: int
    learner: LearnerConfig
    skipped_in_a_row: int
    max_skipped: int


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-batch: inputs and the per-token columns that the losses read."""

    inputs: PackInputs
    behavior_S: Tensor
    version_S: Tensor
    lag_S: Tensor
    swapped_S: Tensor
    advantage_S: Tensor
    sequence_S: Tensor


@dataclass(frozen=True, slots=True)
class Minibatch:
    micros: list[Micro]
    """Equally many on every rank."""
    denominators: Denominators


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Sums over all ranks by name (sums.py); losses and norms by update, NaN-free."""

    totals: dict[str, float]
    largest: dict[str, float]
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    updates: int
    """Updates attempted: minibatches with a loss token, times passes."""
    skipped: int
    skipped_in_a_row: int
    recomputed: bool
    """Proximal log-probs are the learner's own, not the log-linear approximation."""
    first_forward_s: float
    """Monotonic seconds when the first forward began."""
    proximal_s: float
    """Seconds of the pass for the proximal log-probs; 0 where none was made."""
    updated_s: float
    """Monotonic seconds when the last update was made."""


def check_combination(learner: LearnerConfig) -> None:
    """Raises ConfigError for losses and corrections that make no sense together."""
    if learner.loss.name == "decoupled_ppo" and learner.correction.weights != "none":
        raise ConfigError(f"learner.correction.weights: is {learner.correction.weights!r}, but decoupled_ppo brings "
                          "its own token weights prox/mu, and weights are applied at most once; set it to none")
    if learner.loss.name == "ppo_clip" and learner.loss.proximal == "loglinear":
        raise ConfigError("learner.loss.proximal: is 'loglinear', which is for decoupled_ppo; set learner.loss.name to "
                          "decoupled_ppo, or proximal to recompute")


def weight_cap(learner: LearnerConfig) -> float | None:
    """Cap of the token weights that the loss is multiplied by; None = no weights."""
    if learner.loss.name == "decoupled_ppo":
        return DECOUPLED_CAP
    return learner.correction.cap if learner.correction.weights == "token_truncate" else None


def needs_proximal_pass(learner: LearnerConfig, updates: int) -> bool:
    """Whether the proximal log-probs need a pass of their own.

    In a step of one update the weights under gradient ARE the proximal weights, so the proximal log-probs equal the
    policy's, detached, and cost nothing. (Then the ratio is exactly 1, the clip never acts, and the mismatch metrics
    compare the policy's own log-probs with the engine's.) From the second update on the two differ.
    """
    return learner.loss.proximal == "recompute" and updates > 1


def training_step(policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks, batch: TensorDict,
                  plan: StepPlan) -> StepResult:
    """Update the policy in place on this rank's share of a claim whose masks and advantages are set.

    `batch` is on the host, and all stages of batch.py have been there.
    Raises EngineMismatch before anything is updated, NonFiniteTraining after too many skipped updates in a row.
    """
    check_combination(plan.learner)
    minibatches = _minibatches(batch, ranks, plan)
    updates = plan.learner.passes * len(minibatches)
    run = _Run(policy, optimizer, ranks, plan, to_tensor(_tokens_M(batch)).to(ranks.device))
    first_forward_s = time.monotonic()
    if needs_proximal_pass(plan.learner, updates):
        run.proximal_pass(minibatches)
        proximal_s = time.monotonic() - first_forward_s
    else:
        proximal_s = 0.0
    for _ in range(plan.learner.passes):
        for minibatch in minibatches:
            run.update(minibatch)
    updated_s = time.monotonic()
    totals = to_list(ranks.sum_tensor(_stack(run.sums.total, TOTALS, 0.0)))
    largest = to_list(ranks.max_tensor(_stack(run.sums.largest, MAXIMA, -math.inf)))
    return StepResult(
        totals=dict(zip(TOTALS, totals, strict=True)),
        largest=dict(zip(MAXIMA, largest, strict=True)), losses=tuple(run.losses), gradient_norms=tuple(run.norms),
        updates=updates, skipped=run.skipped, skipped_in_a_row=run.skipped_in_a_row,
        recomputed=plan.learner.loss.proximal == "recompute", first_forward_s=first_forward_s, updated_s=updated_s,
        proximal_s=proximal_s)


def _stack(values: dict[str, Tensor], names: tuple[str, ...], absent: float) -> Tensor:
    return torch.stack([values[name].cpu() if name in values else torch.tensor(absent, dtype=torch.float64)
                        for name in names])


def _tokens_M(batch: TensorDict) -> NDArray[np.int64]:
    """Loss tokens of each of this rank's trajectories."""
    cu = column(batch, "cu_seqlens").numpy()
    running = np.cumsum(column(batch, "loss_mask").numpy(), dtype=np.int64)
    before = np.concatenate([np.zeros(1, np.int64), running])
    return before[cu[1:]] - before[cu[:-1]]


def _minibatches(batch: TensorDict, ranks: Ranks, plan: StepPlan) -> list[Minibatch]:
    """Minibatches that have a loss token on any rank, cut into equally many micro-batches on every rank."""
    layout = layout_of(batch)
    tokens_M = _tokens_M(batch)
    count = math.ceil(plan.groups / plan.minibatch_groups)
    members = [layout.group_M // plan.minibatch_groups == i for i in range(count)]
    parts = [micro_batches(layout, members[i], plan.learner.token_budget) for i in range(count)]
    sums = ranks.sum([float(x) for i in range(count)
                      for x in (tokens_M[members[i]].sum(), (tokens_M[members[i]] > 0).sum())])
    most = ranks.max([float(len(part)) for part in parts])
    nothing = np.zeros(0, np.int64)
    there = to_device(batch, ranks.device)
    minibatches: list[Minibatch] = []
    for i, part in enumerate(parts):
        tokens, sequences = int(sums[2 * i]), int(sums[2 * i + 1])
        if tokens:
            padded = part + [nothing] * (int(most[i]) - len(part))
            micros = [_micro(there, pack(layout, sequences)) for sequences in padded]
            minibatches.append(Minibatch(micros, Denominators(tokens=tokens, sequences=sequences)))
    return minibatches


def _micro(batch: TensorDict, packed: Pack) -> Micro:
    """Gather the columns of one pack on the device of the batch."""
    device = column(batch, "input_ids").device

    def index(values: NDArray[np.int64]) -> Tensor:
        return to_tensor(values).to(device, non_blocking=True)

    source_P, target_S, sequence_S = index(packed.source_P), index(packed.target_S), index(packed.sequence_S)
    row_S = column(batch, "mine")[sequence_S]
    input_ids = column(batch, "input_ids")
    inputs = PackInputs(
        input_ids_P=input_ids[source_P], position_ids_P=column(batch, "position_ids")[source_P],
        rows=Rows(tuple(index(rows) for rows in packed.rows), index(packed.home_P)),
        predictor_S=index(packed.predictor_S), target_ids_S=input_ids[target_S],
        temperature_S=column(batch, "trajectory", "temperature")[row_S])
    return Micro(inputs=inputs, behavior_S=column(batch, "behavior_logprobs")[target_S],
                 version_S=column(batch, "version")[target_S], lag_S=column(batch, "lag")[target_S],
                 swapped_S=column(batch, "swapped")[target_S],
                 advantage_S=column(batch, "trajectory", "advantage")[row_S], sequence_S=sequence_S)


class _Run:
    """The updates of one step, in order. Lives as long as the step."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks, plan: StepPlan,
                 tokens_M: Tensor) -> None:
        self.policy, self.optimizer, self.ranks, self.plan = policy, optimizer, ranks, plan
        self.tokens_M = tokens_M
        self.cap = weight_cap(plan.learner)
        self.proximal: dict[int, Tensor] = {}
        """By identity of the micro-batch; only where a pass was made."""
        self.sums = Sums()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped = 0
        self.skipped_in_a_row = plan.skipped_in_a_row
        self.first = True
        set_optimizer(optimizer, plan.learner, plan.learning_rate)

    @torch.no_grad()
    def proximal_pass(self, minibatches: list[Minibatch]) -> None:
        for minibatch in minibatches:
            for micro in minibatch.micros:
                proximal_S = self.policy(micro.inputs).logprob_S
                self.proximal[id(micro)] = proximal_S
                self._anchor(micro, proximal_S)

    def update(self, minibatch: Minibatch) -> None:
        """One optimizer update, or a skipped one where loss or gradient is not finite, on all ranks alike."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64)
        for i, micro in enumerate(minibatch.micros):
            loss = loss + self._backward(micro, minibatch.denominators, drift=self.first and i == 0)
        if self.first:
            self._check_mismatch()
        self.first = False
        parameters = list(self.policy.parameters())
        norm = gradient_norm(parameters)
        total = float(self.ranks.sum_tensor(loss[None])[0])
        if not (math.isfinite(total) and math.isfinite(float(norm))):
            self._skip(total, float(norm))
            return
        torch.nn.utils.clip_grads_with_norm_(parameters, self.plan.learner.max_grad_norm, norm)
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
                f"step {self.plan.step}: {self.skipped_in_a_row} updates in a row were not finite (loss {loss}, "
                f"gradient norm {norm}); failure.max_skipped_updates is {self.plan.max_skipped}")

    def _backward(self, micro: Micro, denominators: Denominators, *, drift: bool) -> Tensor:
        """Add this micro-batch's gradient; returns its share of the policy loss, detached float64."""
        loss_config, cap = self.plan.learner.loss, self.cap
        answer = self.policy(micro.inputs, entropy_gradient=loss_config.entropy_coef != 0.0)
        policy_S, entropy_S = cast(Tensor, answer.logprob_S), cast(Tensor, answer.entropy_S)
        proximal_S = self._proximal(micro, policy_S)
        clipped = ppo_clip(policy_S, proximal_S, micro.advantage_S, low=loss_config.clip_low,
                           high=loss_config.clip_high, dual=loss_config.dual_clip)
        loss_S = clipped.loss_S
        if cap is not None:
            loss_S = loss_S * truncate(token_weights(proximal_S, micro.behavior_S), cap)
        policy_loss = self._aggregate(loss_S, micro, denominators)
        loss = policy_loss
        if loss_config.entropy_coef:
            loss = loss - loss_config.entropy_coef * self._aggregate(entropy_S, micro, denominators)
        (loss * self.ranks.loss_scale).backward()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        update_sums(self.sums, clipped, policy_S, proximal_S, entropy_S)
        if drift and len(policy_S):
            self.sums.raise_to({"ratio_drift": (clipped.ratio_S - 1.0).abs().max()})
        return policy_loss.detach().double().cpu()

    def _aggregate(self, values_S: Tensor, micro: Micro, denominators: Denominators) -> Tensor:
        return aggregate(values_S, micro.sequence_S, self.tokens_M, denominators, self.plan.learner.loss.aggregation,
                         max_new_tokens=self.plan.max_new_tokens)

    def _proximal(self, micro: Micro, policy_S: Tensor) -> Tensor:
        """Proximal log-probs of one micro-batch, detached; see needs_proximal_pass for why none may be stored."""
        stored = self.proximal.get(id(micro))
        if stored is not None:
            return stored
        now_S = policy_S.detach()
        if self.first:
            self._anchor(micro, now_S)
        if self.plan.learner.loss.proximal == "recompute":
            return now_S
        estimate_S = loglinear_proximal(policy_S, micro.behavior_S, micro.version_S, self.plan.idx)
        if self.first:  # before the first update the exact proximal is at hand: the error costs nothing
            self.sums.add({"loglinear_tokens": torch.tensor(float(len(now_S))),
                           "loglinear_error": (estimate_S - now_S).abs().sum()})
        return estimate_S

    def _anchor(self, micro: Micro, proximal_S: Tensor) -> None:
        anchor_sums(self.sums, proximal_S, micro.behavior_S, micro.lag_S, micro.swapped_S,
                    math.inf if self.cap is None else self.cap)

    def _check_mismatch(self) -> None:
        current, total = to_list(self.ranks.sum_tensor(_stack(self.sums.total, ("current", "current_abs"), 0.0)))
        if current and total / current > MISMATCH_ERROR:
            raise EngineMismatch(
                f"step {self.plan.step}: mean |log proximal - log behavior| is {total / current:.3f} nats over "
                f"{int(current)} tokens that the engine sampled with the very weights of this step (limit "
                f"{MISMATCH_ERROR}); engine and learner disagree about the model, its dtype, or the sampling settings")
