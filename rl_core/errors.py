"""Errors that name the place, the value got, and what to do.

`ValueError` (here `ConfigError`, `DataError`) is for what the user can mend; `BrokenFile` and its children are for
files that cannot be trusted; `DeadPart` and its children are for processes that died or went silent; `RunEnded` and
its children end a run with a cause. `assert` is kept for Headway's own invariants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn


class ConfigError(ValueError):
    """A setting that cannot work. The message names the field, the value got, and a remedy."""


def refuse(field: str, value: Any, why: str) -> NoReturn:
    """Raises ConfigError in the one form that refusals of settings have: `field: why; what to do (got value)`."""
    raise ConfigError(f"{field}: {why} (got {value!r})")


class DataError(ValueError):
    """A data file or row that cannot be used. The message names file and line."""


class RewardError(ValueError):
    """A reward function raised, hung, or returned something that is no finite number. Never a reward of 0."""

    reason = "reward_error"
    """Short name of what went wrong."""


class RewardTimeout(RewardError):
    """A reward function that did not answer by its deadline; its process was ended."""

    reason = "reward_timeout"


class RewardNegative(RewardError):
    """A reward below 0 where the estimator takes none (maxrl). Its answer is sampled again, never scored 0."""

    reason = "reward_negative"


class JudgeFailed(RewardError):
    """A judge that gave no score: nonsense, a refusal, no connection. `reason` says which, as in `judge_refused`."""

    def __init__(self, message: str, trouble: str) -> None:
        super().__init__(message)
        self.reason = f"judge_{trouble}"


class FilterError(ValueError):
    """A group filter raised, hung, or returned no verdict. Never a group that is silently kept or left out."""


class FilterTimeout(FilterError):
    """A group filter that did not answer by its deadline; its process was ended."""


class SessionError(ValueError):
    """A session function raised, hung, or asked what cannot be asked. Its answer is sampled again, never scored."""


class SessionTimeout(SessionError):
    """A session function that did not answer by its deadline; its process was ended."""


class BrokenFile(Exception):
    """A file of a run directory that cannot be trusted."""


class ShardCorrupt(BrokenFile):
    """A shard that failed verification before any claim took it: quarantined, the run goes on."""


class ClaimedShardCorrupt(BrokenFile):
    """A shard that rotted after its claim was written: its rows are never training data."""


class ShardRetired(BrokenFile):
    """A shard that retention has removed: the step that claimed it cannot be trained again here."""


class CheckpointDamaged(BrokenFile):
    """A checkpoint without a whole manifest, or whose digests do not match its files."""


class WeightsDamaged(BrokenFile):
    """The bytes of a weight version that are absent or do not match the digest of its manifest."""


class ReplayUnavailable(Exception):
    """A step that cannot be trained again: the message names each such step, and what is absent or damaged."""


class FormatTooNew(BrokenFile):
    """A file written by a newer Headway."""


class NoExclusiveCreate(Exception):
    """The file system lets two writers create one name: Headway cannot keep its promises there."""


class DeadPart(Exception):
    """A process that died or did not answer by its deadline. The message names it and what was asked of it."""

    log: Path | None = None
    """File of what the process wrote to stdout and stderr, where it has one."""


class WorkerDead(DeadPart):
    """A rollout worker is gone: its leases end, the same groups are leased again."""


class EngineStartFailed(DeadPart):
    """A server that generates ended, or said nothing, before it served. The message holds the tail of its log."""


class LearnerDead(DeadPart):
    """A learner rank is gone: the group is restored from the newest whole checkpoint."""


class CollectiveFailed(LearnerDead):
    """A collective among learner ranks ended without one of them: it left, or did not come in time."""


class DeadlinePassed(DeadPart):
    """A wait reached its deadline. The message says what was waited for and for how long."""


class StaleAttempt(Exception):
    """A call from an attempt that is no longer the newest: the caller is a zombie and must stop."""


class RunIsAlive(Exception):
    """Another process owns this run directory. The message names the holder."""


class RunEnded(Exception):
    """A run that ends with a named cause."""


class WallTimeReached(RunEnded):
    """`max_wall_time` is over, or the next step would not fit into it: the run ends in order, and can go on."""


class ForkDiverged(RunEnded):
    """The steps before a fork, replayed, gave other weights than were recorded."""


class DiskQuotaTooSmall(RunEnded):
    """The quota holds neither a full batch nor anything that could be freed."""


class StalenessStarvation(RunEnded):
    """Too large a share of groups was over the staleness limit for too long."""


class NothingToTrainOn(RunEnded):
    """Many verified groups in a row, none of them usable."""


class ShardsSpent(RunEnded):
    """A run on another run's shards has fewer usable groups left than its steps need: none will land."""


class FailureBudgetSpent(RunEnded):
    """The same kind of failure came too often. The message holds the first cause."""


class NonFiniteTraining(RunEnded):
    """More non-finite updates in a row than `failure.max_skipped_updates`."""


class SamplerError(RunEnded):
    """A sampler raised, hung, or returned no order of the prompts."""


class SamplerTimeout(SamplerError):
    """A sampler that did not answer by its deadline; its process was ended."""


class HookFailed(RunEnded):
    """A function of a user's inside a training step raised, or returned what cannot be used. The message names it."""


class EngineMismatch(RunEnded):
    """Log-probs of engine and learner differ by far more than rounding on tokens of the very same weights."""


class ProximalDrift(RunEnded):
    """Two passes of the learner over the same tokens with the same weights differ by far more than rounding."""


class AdapterNotServed(EngineMismatch):
    """An engine samples from the base model in place of the adapter that it was given."""


class NightFailed(RunEnded):
    """A night without a verdict: the message names its place, the component, the cause, and what goes on with it."""
