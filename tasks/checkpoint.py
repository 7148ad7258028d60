"""Checkpoints: the learner writes them aside, manifest last; the flow only says when. Behind each, retention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

from rl_core.errors import BrokenFile
from rl_core.experience.retention import first_needed
from rl_core.experience.retirement import Retirement
from rl_core.schedules import is_scheduled_checkpoint

if TYPE_CHECKING:
    from tasks.owner import Owner


@task(name="checkpoint", task_run_name="checkpoint-{step}", cache_policy=NO_CACHE, persist_result=False)
def checkpoint(owner: Owner, step: int) -> int:
    """Save the state after `step` steps; returns the number of steps it holds. The learner then goes on by itself, and
    shards that no start needs any more are retired."""
    saved = owner.learner.checkpoint()
    if owner.claims.ready(step):
        owner.learner.send(step)
    if owner.config.retention.replay == "window":
        retire_shards(owner)
    return saved


def checkpoint_due(owner: Owner, steps_done: int, *, last: bool = False) -> bool:
    """Every `checkpoint.every` steps, every `checkpoint.keep_every`, and behind the last one."""
    return last != is_scheduled_checkpoint(steps_done, owner.config.checkpoint)


def retire_shards(owner: Owner) -> Retirement:
    """Retire what no start needs, seen from the checkpoints that are whole (experience-store.md 3.11).

    What keeps it from being done, such as a full disk, is a note for people: the next checkpoint tries again.
    """
    below = first_needed(_whole_checkpoints(owner), owner.config.checkpoint.keep)
    try:
        return owner.experience.retire(below)
    except (OSError, BrokenFile) as error:
        owner.progress.set(note=f"no shard was retired: {error}")
        return Retirement(below=below)


def _whole_checkpoints(owner: Owner) -> set[int]:
    """The newest `checkpoint.keep` that are whole: each is read back once, before anything is removed because of it."""
    from rl_core.checkpoint import checkpoints, is_whole  # imports torch

    newest: set[int] = set()
    for n in reversed(checkpoints(owner.run)):
        if len(newest) == owner.config.checkpoint.keep:
            break
        if n in owner.whole_checkpoints or is_whole(owner.run.checkpoint(n)):
            newest.add(n)
    owner.whole_checkpoints = newest
    return newest


def make_room(owner: Owner, steps_done: int) -> int:
    """The disk quota is used up and a claim waits for nothing else: a checkpoint at once, then retirement behind it,
    under `retention.replay=all`, too. Returns the bytes freed."""
    from rl_core.checkpoint import checkpoints  # imports torch

    if steps_done and steps_done not in checkpoints(owner.run):
        owner.learner.checkpoint()
    gone = retire_shards(owner)
    if gone.bytes:
        owner.progress.set(note=f"storage.bytes_quota is used up: {len(gone.shards)} shards of steps before "
                                f"{gone.below} are retired; these steps cannot be trained again")
    return gone.bytes
