"""Continuous rollout: one long task per run that hosts the pump."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

if TYPE_CHECKING:
    from tasks.owner import Owner


@task(name="continuous-rollout", task_run_name="continuous-rollout", cache_policy=NO_CACHE, persist_result=False)
def continuous_rollout(owner: Owner) -> None:
    """Lease prompts to the workers until the owner is told to stop.

    An error wakes whoever waits for a claim at once, with this error as its cause.
    """
    try:
        owner.pump.run(owner.stop)
    except BaseException as error:
        owner.experience.fail(error)
        raise


def gather(owner: Owner) -> None:
    """`headway rollout`: generate until so many groups wait, or the data has ended."""
    with owner.progress.stage("rollout"):
        owner.rollout = continuous_rollout.submit(owner)
        owner.gathered = owner.experience.gather(owner.config.deadlines.claim_s, owner.check)
        owner.end_rollout()
