"""What a training step depends on beside state and batch, and what it comes to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rl_core.config import LearnerConfig
from rl_core.learner.advantages.estimate import needs_policy
from rl_core.learner.objective import correction_of
from rl_core.learner.whole import needs_whole


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
    kl_beta: float = 0.0
    """Coefficient of the KL in the reward (`learner.kl.use=reward`)."""
    policy_learns: bool = True
    """False: the critic alone learns in this step (`learner.critic.warmup_steps`)."""
    seed: int = 0
    """Of the run: what is drawn by lot in a step is drawn from it."""


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
    """The ratio's anchor is the learner's own proximal policy, not the log-linear approximation or the behavior
    policy."""
    first_forward_s: float
    """Monotonic seconds when the first forward began."""
    proximal_s: float
    """Seconds of the pass for the proximal log-probs; 0 where none was made."""
    updated_s: float
    """Monotonic seconds when the last update was made."""
    critic: dict[str, float] = field(default_factory=dict[str, float])
    """The critic's metrics, where there is one."""
    kl: float = math.nan
    """KL in the reward: mean over answers of their means, nats per token."""
    roles_s: float = 0.0
    """Seconds of the passes through the models beside the policy, before the first update."""


def weight_cap(learner: LearnerConfig) -> float | None:
    """Cap of the weights that the loss is multiplied by; None = none is cut."""
    correction = correction_of(learner)
    return correction.cap if correction.weights.endswith("_truncate") else None


def recomputes_proximal(learner: LearnerConfig) -> bool:
    """Whether the ratio's anchor is the learner's own proximal policy, not an approximation or the behavior policy."""
    return learner.correction.mode == "decoupled" and learner.loss.proximal == "recompute"


def needs_proximal_pass(learner: LearnerConfig, updates: int) -> bool:
    """Whether the proximal log-probs need a pass of their own.

    In a step of one update the weights under gradient ARE the proximal weights, so the proximal log-probs equal the
    policy's, detached, and cost nothing. (Then the ratio is exactly 1, the clip never acts, and the mismatch metrics
    compare the policy's own log-probs with the engine's.) From the second update on the two differ. What is chosen from
    a whole minibatch, an estimator that reads the proximal policy, and the KL in the reward need it before the first
    one.
    """
    if not recomputes_proximal(learner):
        return False
    return updates > 1 or needs_whole(learner) or needs_policy(learner.advantage) or learner.kl.use == "reward"
