"""The fold: what a claimed step does to the state, and every metric that is a function of it. Writes nothing.

The state behind step k is the fold of claims 0 to k over the initial weights (experience-store.md 3.10). The learner of
a run folds as it trains, publishes and records; a replay (replay.py) folds the same claims again, by this same code.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

import torch
from torch import Tensor

from rl_core.checkpoint import Checkpoint
from rl_core.config import Config
from rl_core.experience.ledger import read_claim
from rl_core.experience.reader import ClaimRows, Staging, read_claim_rows
from rl_core.experience.staleness import OFFLINE
from rl_core.learner import batch as stages
from rl_core.learner.invariants import FIRST_STEPS, alarm_bounds
from rl_core.learner.own_metrics import own_metrics
from rl_core.learner.plan import StepPlan, StepResult
from rl_core.learner.ranks import Ranks
from rl_core.learner.roles import Roles
from rl_core.learner.state import TrainState
from rl_core.learner.step import training_step
from rl_core.learner.step_metrics import (
    TokenFacts,
    experience_metrics,
    part_means,
    token_metrics,
    update_metrics,
)
from rl_core.metrics import MAX_PARTS, part_metrics
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import config_of, trained_by
from rl_core.reward_settings import estimator_of
from rl_core.roles.models import role_directories
from rl_core.roles.plan import policy_learns
from rl_core.run_dir import RunDir
from rl_core.schedules import learning_rate
from rl_core.types import Claim, WeightVersion
from rl_core.versions import learn_versions
from rl_core.weights import changed_share

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Read:
    """A claim and this rank's rows of it, which lie in buffers that are reused when the step is over."""

    claim: Claim
    rows: ClaimRows


@dataclass(frozen=True, slots=True)
class Trained:
    """What one step computed, before anything of it is written."""

    claim: Claim
    rows: ClaimRows
    result: StepResult
    facts: TokenFacts
    config: Config
    """What the step was trained by."""
    seconds: dict[str, float]
    begun_s: float
    """Monotonic; read, build and update of `seconds` follow one another from here."""
    beside: dict[str, float]
    """Metrics of what is state beside the policy."""
    roles: dict[str, str]
    """Digest of the weights of every role that the step has changed, or a step before it."""


def make_deterministic() -> None:
    """Let torch compute the same bits from the same numbers, in this process from now on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic sums on CUDA; read at its start
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums in the switch have another order at each call
    torch.use_deterministic_algorithms(True)
    cast(Any, torch.utils).deterministic.fill_uninitialized_memory = False  # none is read before it is written


def changed_for_engines(before: Mapping[str, Tensor], now: Mapping[str, Tensor], config: Config) -> float:
    """Share of values that differ between two publications, in the dtype of the run's engines."""
    dtype = torch.bfloat16 if config.rollout.engine.dtype == "bfloat16" else torch.float32
    return changed_share(before, now, dtype)


class Fold:
    """State, and the claims of a run over it: `load`, then `compute` step after step. One rank's part.

    `config` holds the settings of config revision `revision`; a step is trained by those of its claim's revision, and
    of `config` it then has what is no training field (`trained_by`).
    """

    def __init__(self, run: RunDir, config: Config, ranks: Ranks, *, revision: int) -> None:
        self.versions: dict[int, WeightVersion] = {}
        """The run's, as far as they were read."""
        self.first_mismatch: dict[int, float] = {}
        """Step -> `train/mismatch_current_abs`, of the first steps."""
        self._run, self._config, self._ranks = run, config, ranks
        self._configs = {revision: config}
        self._revisions: dict[int, int] = {}
        """Config revision by claimed step, as far as they were asked for."""
        self._state: TrainState | None = None
        self._updated_s = NAN
        """When the step before made its last update: the next step's `since_update` counts from here to its forward."""

    @property
    def state(self) -> TrainState:
        """What was loaded, and what was trained since."""
        assert self._state is not None, "learner: a state is loaded before anything else"
        return self._state

    def load(self, saved: Checkpoint | None) -> int:
        """Take up a checkpoint, or with None the initial model; returns the next step. What was loaded before is gone
        from the beginning on: a GPU need not hold both."""
        self._state = None
        gc.collect()  # some modules of a model know themselves
        roles, learner = Roles(role_directories(self._run, self._config)), self._config.learner
        if saved is None:
            self._state = TrainState(self._run.model, self._config, self._ranks, roles=roles)
        else:
            roles.take_up(saved.roles, saved.state.roles, learner, self._ranks)
            self._state = TrainState(self._run.model, self._config, self._ranks, saved.parameters, saved.optimizer,
                                     roles)
            self._state.skipped_in_a_row = saved.state.skipped_in_a_row
        roles.prepare(learner, self._ranks)
        for step in recorded_steps(self._run)[:FIRST_STEPS]:
            self.first_mismatch[step] = read_record(self._run, step).metrics.get("train/mismatch_current_abs", NAN)
        return 0 if saved is None else saved.state.n

    def copied_state(self) -> TrainState:
        """The state once more, in memory of its own. One rank only."""
        now = self.state
        roles = Roles(now.roles.directories)
        roles.take_up(now.roles.tensors(), now.roles.numbers(), self._config.learner, self._ranks)
        copied = TrainState(self._run.model, self._config, self._ranks, now.weights(), now.optimizer_tensors(), roles)
        copied.skipped_in_a_row = now.skipped_in_a_row
        return copied

    def read(self, step: int, staging: Staging, versions: dict[int, WeightVersion] | None = None) -> Read:
        """The claim of a step and this rank's rows of it. `versions`: those known so far, if not the fold's own.

        Raises FileNotFoundError without a claim, ClaimedShardCorrupt, BrokenFile.
        """
        claim = read_claim(self._run, step)
        known = learn_versions(self._run, self.versions if versions is None else versions)
        config = self.config_of(claim.revision)
        return Read(claim, read_claim_rows(
            self._run, claim, rank=self._ranks.rank, ranks=self._ranks.ranks, versions=known, staging=staging,
            sharing_groups=config.minibatch_groups if config.learner.share_prefixes else None))

    def compute(self, step: int, staging: Staging, ahead: Read | None = None, *, config: Config | None = None,
                state: TrainState | None = None) -> Trained:
        """Read the claim, unless it was read ahead, and update the state with it. Writes nothing: state is the fold of
        this over the claims.

        `config`: other settings than those of the claim's revision. `state`: another state than the fold's own, which
        then stays as it is.
        """
        begin, state = time.monotonic(), state or self.state
        taken = ahead or self.read(step, staging)
        claim, rows = taken.claim, taken.rows
        config = config or self.config_of(claim.revision)
        read = time.monotonic()
        batch = stages.assemble(rows)
        facts = self._stages(batch, claim, config, int(rows.idx_min_G.min(initial=claim.idx)))
        built = time.monotonic()
        plan = _plan(claim, config, state)
        state.roles.prepare(config.learner, self._ranks)
        state.roles.refresh(state.policy, config.learner, step)
        result = training_step(state.policy, state.optimizer, self._ranks, batch, plan, state.roles)
        state.skipped_in_a_row = result.skipped_in_a_row
        kl = config.learner.kl.use != "none"
        beside = {"train/kl_beta": plan.kl_beta if kl else NAN,
                  "train/reference_step": float(state.roles.reference_step) if kl else NAN}
        seconds = {"read": read - begin, "build": built - read, "update": time.monotonic() - built,
                   "since_update": result.first_forward_s - self._updated_s}
        self._updated_s = result.updated_s
        return Trained(claim, rows, result, facts, config, seconds, begin, beside,
                       state.roles.digests(config.learner, keep=self._ranks.rank == 0))

    def metrics(self, trained: Trained, changed: float) -> dict[str, float]:
        """The learner's metrics that are a function of the step (`Metric.of_step`), and the reward parts.

        `changed`: share of values that the step's publication changed; NaN where nothing was published.
        """
        claim, rows, config = trained.claim, trained.rows, trained.config
        first = {step: value for step, value in self.first_mismatch.items() if step < claim.step}
        found = {**experience_metrics(rows, claim),
                 **token_metrics(trained.facts, len(rows.reward_N), trained.result.totals["tokens"]),
                 **update_metrics(trained.result, learning_rate(claim.step, config), alarm_bounds(config, first)),
                 **trained.beside}
        own = own_metrics(config.learner.metrics, rows, claim, found)
        return {**found, **part_metrics(part_means(rows), MAX_PARTS - len(own)), **own, "weights/changed": changed}

    def config_of(self, revision: int) -> Config:
        """What a step whose claim was made under this revision is trained by."""
        if revision not in self._configs:
            self._configs[revision] = trained_by(config_of(self._run, revision), self._config)
        return self._configs[revision]

    def _updates_per_step(self, claim: Claim, oldest_idx: int) -> int | list[int]:
        """Optimizer updates of every step before the claim's, or of each of them, newest first, back to the one behind
        publication `oldest_idx`: steps of another revision may have made more or fewer."""
        first = self.config_of(0)
        if claim.revision == 0 and not first.learner.critic.warmup_steps:
            return first.updates_per_step  # revisions never fall: all before are of revision 0, too
        made: list[int] = []
        for step in range(claim.step - 1, oldest_idx * self._config.publish_every - 1, -1):
            if step not in self._revisions:
                self._revisions[step] = read_claim(self._run, step).revision
            config = self.config_of(self._revisions[step])
            made.append(config.updates_per_step if policy_learns(config.learner, step) else 0)
        return made

    def _stages(self, batch: Any, claim: Claim, config: Config, oldest_idx: int) -> TokenFacts:
        """Masks and advantages, in place; returns what all ranks saw."""
        if claim.policy == OFFLINE:
            stages.mark_foreign_tokens(batch)
        else:
            stages.mark_tokens(batch, step=claim.step, publish_every=config.publish_every,
                               updates_per_step=self._updates_per_step(claim, oldest_idx))
        sampled_T = stages.column(batch, "loss_mask")
        lag_T = stages.column(batch, "lag")[sampled_T]
        swapped_M = torch.segment_reduce(stages.column(batch, "swapped").float(), "max",
                                         lengths=stages.column(batch, "cu_seqlens").diff())
        masked = 0
        if claim.policy == "mask":
            masked = stages.mask_by_age(batch, idx=claim.idx, limit=math.ceil(Decimal(claim.eta)))
        loss = config.learner.loss
        stages.mask_truncated(batch, loss.truncated)
        if loss.overlong_buffer is not None:
            stages.penalize_overlong(batch, longest=config.sampling.max_new_tokens, buffer=loss.overlong_buffer,
                                     factor=loss.overlong_factor)
        stages.number_tokens(batch, self._ranks.sum_tensor)
        stages.add_advantages(batch, estimator_of(config, batch["parts"].keys()))
        sampled, masked_all, lag, mixed, tokens = self._ranks.sum([
            float(sampled_T.sum()), float(masked), float(lag_T.sum()), float(swapped_M.sum()),
            float(stages.column(batch, "loss_mask").sum())])
        [lag_max] = self._ranks.max([float(lag_T.max()) if len(lag_T) else 0.0])
        if claim.policy == OFFLINE:
            lag = lag_max = NAN
        return TokenFacts(sampled=sampled, masked_by_age=masked_all, lag=lag, lag_max=lag_max, mixed=mixed, loss=tokens)


def _plan(claim: Claim, config: Config, state: TrainState) -> StepPlan:
    kl, beta = config.learner.kl, state.roles.kl_beta
    return StepPlan(step=claim.step, idx=claim.idx, learning_rate=learning_rate(claim.step, config),
                    groups=len(claim.groups), minibatch_groups=config.minibatch_groups,
                    max_new_tokens=config.sampling.max_new_tokens, learner=config.learner,
                    skipped_in_a_row=state.skipped_in_a_row, max_skipped=config.failure.max_skipped_updates,
                    kl_beta=kl.coef if beta is None or kl.target is None else beta,
                    policy_learns=policy_learns(config.learner, claim.step), seed=config.seed)
