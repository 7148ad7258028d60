"""The invariants of algorithms.md section 9 in real training steps: none, an alarm, or the end, by mode and precision.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.alarms import INVARIANTS, alarm_text, newest_alarm
from rl_core.config import Config
from rl_core.errors import EngineMismatch, ProximalDrift
from rl_core.learner import batch as stages
from rl_core.learner.invariants import (
    DRIFT_BOUND,
    DRIFT_ERROR,
    HIGHEST_BOUND,
    MISMATCH_ERROR,
    alarm_bounds,
    mismatch_bound,
)
from rl_core.learner.optimizer import make_optimizer
from rl_core.learner.plan import StepPlan
from rl_core.learner.policy import Policy, load_policy
from rl_core.learner.ranks import Ranks
from rl_core.learner.step import training_step
from rl_core.learner.step_metrics import update_metrics
from rl_core.metrics import BY_NAME
from rl_core.types import TrajectoryGroup
from rl_core.weights import digest_tensors
from tests.learning import all_by, random_groups, rows_of, sampled_by, write_model

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, ranks=1, rendezvous="", device=CPU, deadline_s=1, barrier_s=1)
TWO_PASSES = {"passes": 2}
LOGLINEAR = {"passes": 2, "loss": {"name": "decoupled_ppo", "proximal": "loglinear"}}
BYPASS = {"passes": 2, "correction": {"mode": "bypass"}}
HALF = {"passes": 2, "dtype": "bfloat16"}
CHOICE = {"loss": {"name": "kl_cov"}}
"""One update, and a pass before it by which tokens are chosen."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def groups(directory: Path) -> list[TrajectoryGroup]:
    """Two groups whose every token was sampled by the very weights that the step begins with."""
    stock = AutoModelForCausalLM.from_pretrained(directory)
    return [sampled_by(stock, all_by(0, group)) for group in random_groups(0, 2)]


def shifted(group: TrajectoryGroup, nats: float) -> TrajectoryGroup:
    """As an engine says it that is so far off."""
    return replace(group, trajectories=tuple(
        replace(t, behavior_logprobs_L=t.behavior_logprobs_L + nats * t.loss_mask_L) for t in group.trajectories))


def loaded(directory: Path, dtype: str = "float32", uneven: float = 0.0) -> Policy:
    """A policy whose log-probs under gradient are `uneven` nats above those without."""
    policy = load_policy(directory, logits_chunk=64, dtype=getattr(torch, dtype), device=CPU)
    policy.register_forward_hook(lambda _, __, found: found._replace(logprob_S=found.logprob_S + uneven)
                                 if torch.is_grad_enabled() else found)
    return policy


def trained(policy: Policy, groups: list[TrajectoryGroup], learner: dict[str, Any],
            nats: float = 0.0) -> dict[str, float]:
    """Metrics of step 0, from groups whose engine is `nats` off."""
    config = Config.model_validate({"groups_per_step": 2, "group_size": 4, "sampling": {"max_new_tokens": 12},
                                    "learner": {"lr": 1e-3, "warmup_steps": 0, "token_budget": 10_000, **learner}})
    batch = stages.assemble(rows_of([shifted(group, nats) for group in groups]))
    stages.mark_tokens(batch, step=0, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, config.learner.loss.truncated)
    stages.number_tokens(batch, ALONE.sum_tensor)
    stages.add_advantages(batch, config.learner.advantage)
    plan = StepPlan(step=0, idx=0, learning_rate=1e-3, groups=2, minibatch_groups=2, max_new_tokens=12,
                    learner=config.learner, skipped_in_a_row=0, max_skipped=0)
    result = training_step(policy, make_optimizer(policy, config.learner), ALONE, batch, plan)
    return update_metrics(result, 1e-3, alarm_bounds(config, {}))


RUNS = {
    "healthy": (TWO_PASSES, 0.0, 0.0, None),
    "healthy, one pass": ({}, 0.0, 0.0, None),
    "healthy in bfloat16": (HALF, 0.0, 0.0, None),
    "the engine is off": (TWO_PASSES, 0.01, 0.0, "mismatch 0.01 over 0.001"),
    "the engine is off, one pass": ({}, 0.01, 0.0, "mismatch 0.01 over 0.001"),
    "the engine is off, log-linear": (LOGLINEAR, 0.01, 0.0, "mismatch 0.01 over 0.001"),
    "the engine is off, bypass": (BYPASS, 0.01, 0.0, "mismatch 0.01 over 0.001"),
    "the engine is off in bfloat16": (HALF, 0.07, 0.0, "mismatch 0.07 over 0.05"),
    "as far off as bfloat16 may be": (HALF, 0.02, 0.0, None),
    "two passes are uneven": (TWO_PASSES, 0.0, 0.001, "drift 0.001 over 1e-06"),
    "a pass for a choice is uneven": (CHOICE, 0.0, 0.001, "drift 0.001 over 1e-06"),
    "both": (TWO_PASSES, 0.02, 0.002, "mismatch 0.02 over 0.001, drift 0.002 over 1e-06"),
    "uneven in bfloat16": (HALF, 0.0, 0.1, "drift 0.11 over 0.05"),
    "as uneven as bfloat16 may be": (HALF, 0.0, 0.02, None),
    "no invariant (a) in a step of one update": ({}, 0.0, 0.0005, None),
    "nor in bypass mode": (BYPASS, 0.0, 0.0005, None),
    "nor for a log-linear proximal": (LOGLINEAR, 0.0, 0.0005, None),
}


@pytest.mark.parametrize(("learner", "nats", "uneven", "said"), RUNS.values(), ids=RUNS)
def test_a_violated_invariant_is_an_alarm_of_the_step_that_goes_on(
        directory: Path, groups: list[TrajectoryGroup], learner: dict[str, Any], nats: float, uneven: float,
        said: str | None) -> None:
    metrics = trained(loaded(directory, learner.get("dtype", "float32"), uneven), groups, learner, nats)
    assert alarm_text(metrics) == said
    assert metrics["train/mismatch_alarm"] == float("mismatch" in (said or ""))
    assert metrics["train/drift_alarm"] == float("drift" in (said or ""))
    assert math.isfinite(metrics["train/ratio_drift"]) == (learner in (TWO_PASSES, HALF, CHOICE)), "else none is made"


ENDS = {
    "engine": (TWO_PASSES, 0.2, 0.0, EngineMismatch, r"step 0: mean .* is 0\.200 nats .* \(limit 0\.1\)"),
    "engine, bfloat16": (HALF, 0.2, 0.0, EngineMismatch, r"is 0\.2\d\d nats"),
    "two passes": (TWO_PASSES, 0.0, 0.05, ProximalDrift,
                   r"step 0: \|policy/proximal - 1\| is 0\.0513 .*limit 0\.01 in float32"),
    "two passes, bfloat16": (HALF, 0.0, 0.6, ProximalDrift, r"is 0\.82\d? .*limit 0\.5 in bfloat16"),
}


@pytest.mark.parametrize(("learner", "nats", "uneven", "error", "said"), ENDS.values(), ids=ENDS)
def test_at_its_hard_bound_an_invariant_ends_the_run_before_anything_is_updated(
        directory: Path, groups: list[TrajectoryGroup], learner: dict[str, Any], nats: float, uneven: float,
        error: type[Exception], said: str) -> None:
    policy = loaded(directory, learner.get("dtype", "float32"), uneven)
    before = digest_tensors(policy.state_dict().items())
    with pytest.raises(error, match=said):
        trained(policy, groups, learner, nats)
    assert digest_tensors(policy.state_dict().items()) == before


@pytest.mark.parametrize("loss", ["gspo", "topr", "gmpo"])
def test_drift_is_of_policy_and_proximal_whatever_ratio_the_loss_is_on(
        directory: Path, groups: list[TrajectoryGroup], loss: str) -> None:
    metrics = trained(loaded(directory), groups, {"passes": 2, "loss": {"name": loss}}, nats=0.05)
    assert metrics["train/ratio_drift"] <= 1e-6 and metrics["train/drift_alarm"] == 0.0


BOUNDS = {
    "float32 on both sides": ({}, True, 1e-3),
    "nothing measured yet": ({}, False, 0.05),
    "four times the mean of the first steps": ({0: 0.002, 1: 0.006, 2: math.nan, 9: 5.0}, False, 0.016),
    "never more than half of what ends the run": ({0: 0.03, 1: 0.04}, False, 0.05),
}


@pytest.mark.parametrize(("first", "float32", "bound"), BOUNDS.values(), ids=BOUNDS)
def test_the_mismatch_bound(first: dict[int, float], float32: bool, bound: float) -> None:
    assert mismatch_bound(first, float32=float32) == pytest.approx(bound)


def test_an_alarm_comes_before_its_error_and_reads_metrics_that_there_are() -> None:
    assert HIGHEST_BOUND < MISMATCH_ERROR
    assert all(DRIFT_BOUND[dtype] < DRIFT_ERROR[dtype] for dtype in ("float32", "bfloat16"))
    assert {name for _, *of in INVARIANTS for name in of} <= set(BY_NAME)


OLD = {"train/mismatch_alarm": 1.0, "train/mismatch_current_abs": 0.012}
SAID = {
    "none": ([(2, {"train/mismatch_alarm": 0.0}), (1, {})], None),
    "the newest": ([(3, {}), (2, OLD | {"train/mismatch_bound": 0.005}), (1, OLD)],
                   "step 2: mismatch 0.012 over 0.005"),
    "of a record without bounds": ([(1, OLD)], "step 1: mismatch 0.012 over its bound"),
    "of a record of another version": ([(1, {"train/mismatch_alarm": math.nan})], None),
}


@pytest.mark.parametrize(("steps", "said"), SAID.values(), ids=SAID)
def test_alarms_in_words(steps: list[tuple[int, dict[str, float]]], said: str | None) -> None:
    assert newest_alarm(steps) == said
