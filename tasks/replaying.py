"""What `headway replay` and `headway explain` find out, from the run directory alone. They write nothing.

Reports are JSON values: a number that does not exist is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, cast, get_args

from rl_core.errors import ConfigError
from rl_core.experience.staleness import Policy
from rl_core.run_dir import RunDir, json_values
from tasks.inspection import open_run
from tasks.paths import run_dir

if TYPE_CHECKING:
    from rl_core.learner.replay import Replayed


def _opened(run_key: str) -> RunDir:
    run = run_dir(run_key)
    open_run(run, run_key)
    return run


def replayable_steps(run_key: str) -> list[dict[str, Any]]:
    """Of every step with a claim or a record: step, checkpoint that a replay begins with, and why it cannot be."""
    from rl_core.learner.replay import replayable

    return [{"step": one.step, "checkpoint": one.checkpoint, "why": one.why} for one in replayable(_opened(run_key))]


def replayed_steps(run_key: str, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Train the steps again and report each beside its record. Raises as `replay` does."""
    from rl_core.learner.replay import replay

    return (json_values(_report(one)) for one in replay(_opened(run_key), steps))


def _report(one: Replayed) -> dict[str, Any]:
    return {"step": one.step, "verdict": one.verdict, "checkpoint": one.checkpoint, "weights_digest": one.digests,
            "claim_digest": one.claims, "role_digests": one.roles, "environment": one.environment,
            "compared": len(one.metrics), "differing": one.differing, "beyond_tolerance": sorted(one.beyond),
            "seconds": one.seconds}


def tried_steps(run_key: str, steps: Sequence[int], changes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Train the steps with other settings and report each beside its record. Raises as `try_settings` does."""
    from rl_core.learner.replay import try_settings

    return (json_values({"step": one.step, "checkpoint": one.checkpoint, "changed": one.changed,
                         "weights_digest": one.digests, "environment": one.environment, "metrics": one.metrics})
            for one in try_settings(_opened(run_key), steps, changes))


def explained_policy(run_key: str, *, policy: str | None, bound: str | None, hard_max: int | None) -> dict[str, Any]:
    """The run's staleness policy beside another one, on what has landed. Raises ConfigError, BrokenFile."""
    from rl_core.experience.other_policy import other_policy

    if policy is None and bound is None and hard_max is None:
        raise ConfigError("--policy: name another policy, bound or hard_max, as in --policy drop --bound 1")
    if policy is not None and policy not in get_args(Policy):
        raise ConfigError(f"--policy {policy!r}: use {', '.join(get_args(Policy))}")
    try:
        eta = None if bound is None else Decimal(bound)
    except InvalidOperation:
        raise ConfigError(f"--bound {bound!r}: write a number, as in --bound 1 or --bound 0.5") from None
    report = other_policy(_opened(run_key), policy=cast("Policy | None", policy), bound=eta, hard_max=hard_max)
    return {"run_key": run_key, **report.as_json()}
