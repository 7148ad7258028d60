"""Where a run failed, and which part of it: what the message of a failed night names beside the cause."""

from __future__ import annotations

from rl_core import errors
from rl_core.records import recorded_steps
from rl_core.run_dir import RunDir, newest_attempt

COMPONENTS: tuple[tuple[type[BaseException], str], ...] = (
    (errors.LearnerDead, "learner"), (errors.NonFiniteTraining, "learner"), (errors.ForkDiverged, "learner"),
    (errors.WorkerDead, "rollout"), (errors.EngineStartFailed, "rollout"), (errors.EngineMismatch, "rollout"),
    (errors.FailureBudgetSpent, "rollout"), (errors.RewardError, "reward"), (errors.DataError, "data"),
    (errors.CheckpointDamaged, "checkpoints"), (errors.WeightsDamaged, "weights"),
    (errors.StalenessStarvation, "experience store"), (errors.NothingToTrainOn, "experience store"),
    (errors.ShardsSpent, "experience store"), (errors.DiskQuotaTooSmall, "disk"),
    (errors.BrokenFile, "experience store"), (errors.ConfigError, "settings"), (errors.RunIsAlive, "owner lock"),
    (errors.StaleAttempt, "owner lock"), (errors.NoExclusiveCreate, "disk"), (errors.DeadPart, "services"),
    (OSError, "disk"),
)
"""The first one that fits; a child comes before its parent. Any other error is of the flow itself."""


def component_of(error: BaseException) -> str:
    """The part that an error speaks of: `component_of(LearnerDead("..."))` -> `"learner"`."""
    return next((name for kind, name in COMPONENTS if isinstance(error, kind)), "flow")


def place_of(run: RunDir) -> str:
    """Where a run stands that failed: `set-up`, or `training step 7`, the first without a record."""
    if newest_attempt(run) == 0:
        return "set-up"
    done = recorded_steps(run)
    return f"training step {done[-1] + 1 if done else 0}"
