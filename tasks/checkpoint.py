"""Checkpoints: the learner writes them aside, manifest last; the flow only says when."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from rl_core.schedules import is_scheduled_checkpoint
from tasks.session import Session


@task(name="checkpoint", task_run_name="checkpoint-{step}", cache_policy=NO_CACHE, persist_result=False)
def checkpoint(session: Session, step: int) -> int:
    """Save the state after `step` steps; returns the number of steps it holds. The learner then goes on by itself."""
    saved = session.learner.checkpoint()
    if session.claims.ready(step):
        session.learner.send(step)
    return saved


def checkpoint_due(session: Session, steps_done: int, *, last: bool = False) -> bool:
    """Every `checkpoint.every` steps, every `checkpoint.keep_every`, and behind the last one."""
    return last != is_scheduled_checkpoint(steps_done, session.config.checkpoint)
