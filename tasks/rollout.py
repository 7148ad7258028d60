"""Continuous rollout: one long task per run that hosts the pump."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

if TYPE_CHECKING:
    from tasks.session import Session


@task(name="continuous-rollout", task_run_name="continuous-rollout", cache_policy=NO_CACHE, persist_result=False)
def continuous_rollout(session: Session) -> None:
    """Lease prompts to the workers until the session is told to stop.

    An error wakes whoever waits for a claim at once, with this error as its cause.
    """
    try:
        session.pump.run(session.stop)
    except BaseException as error:
        session.experience.fail(error)
        raise


def gather(session: Session) -> None:
    """`headway rollout`: generate until so many groups wait, or the data has ended."""
    with session.progress.stage("rollout"):
        session.rollout = continuous_rollout.submit(session)
        session.gathered = session.experience.gather(session.config.deadlines.claim_s, session.check)
        session.end_rollout()
