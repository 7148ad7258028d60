"""Where a run failed, and which part of it: what the message of a failed night names beside the cause."""

from __future__ import annotations

from rl_core import errors
from rl_core.records import recorded_steps
from rl_core.run_dir import RunDir, newest_attempt
from rl_core.run_log import last_lines

COMPONENTS: tuple[tuple[type[BaseException], str], ...] = (
    (errors.LearnerDead, "learner"), (errors.NonFiniteTraining, "learner"), (errors.ForkDiverged, "learner"),
    (errors.ProximalDrift, "learner"),
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


def tell_last_lines(error: BaseException) -> None:
    """Append to the message of an error that a dead part has caused what that part wrote last: its first line stays the
    cause, and whoever tells the error tells all of it. Any other error stays as it is."""
    part = dead_part(error)
    if part is None or part.log is None or not isinstance(error, errors.DeadPart | errors.RunEnded):
        return
    try:
        lines = last_lines(part.log)
    except OSError:  # it has not begun to write
        lines = []
    head = f"the end of {part.log.name}:" if lines else f"{part.log.name} is empty"
    error.args = ("\n".join([str(error), head, *lines]),)


def dead_part(error: BaseException | None) -> errors.DeadPart | None:
    """The death or silence of a process with a log of its own that `error` is, or comes of."""
    while error is not None:
        if isinstance(error, errors.DeadPart) and error.log is not None:
            return error
        error = error.__cause__
    return None
