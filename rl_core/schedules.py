"""Schedules: pure functions of the training step and the settings, so that a replayed step has the same numbers.

Nothing here carries state or counts: step k (from 0) has one learning rate, whatever was restarted, skipped or voided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rl_core.config import CheckpointConfig, Config


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Linear ramp: step 0 has 1/warmup_steps, step warmup_steps - 1 and all later ones have 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def decay_factor(step: int, *, start: int, end: int, shape: str, final_ratio: float) -> float:
    """1 up to `start`, `final_ratio` from `end` on, a straight line or half a cosine between them."""
    if shape == "constant":
        return 1.0
    progress = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    left = 1.0 - progress if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return final_ratio + (1.0 - final_ratio) * left


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of training step k: `learner.lr` x warm-up x decay. All updates of one step share it."""
    learner = config.learner
    decay = decay_factor(step, start=learner.warmup_steps, end=config.decay_steps, shape=learner.decay,
                         final_ratio=learner.final_lr_ratio)
    return learner.lr * warmup_factor(step, learner.warmup_steps) * decay


def updates_before(step: int, config: Config) -> int:
    """Optimizer updates before step k, if all steps are made by these settings (skipped ones do not change it)."""
    return step * config.updates_per_step


def is_scheduled_publication(steps_done: int, config: Config) -> bool:
    """Whether weights behind `steps_done` training steps are published: every `publish_every` steps, and at 0."""
    return steps_done % config.publish_every == 0


def last_scheduled(steps_done: int, config: Config) -> int:
    """Steps behind the newest scheduled publication: `last_scheduled(10, K=4)` -> 8."""
    return steps_done - steps_done % config.publish_every


def is_scheduled_checkpoint(steps_done: int, settings: CheckpointConfig) -> bool:
    """Whether a checkpoint is due behind `steps_done` steps: every `every`, and every `keep_every`, which are kept."""
    return steps_done % settings.every == 0 or (settings.keep_every is not None
                                                and steps_done % settings.keep_every == 0)


def checkpoints_at_once(config: Config) -> int:
    """Most checkpoints that lie on the disk at one time, the one being written included (export.md 4).

    The newest `keep`, every `keep_every`-th, the best, and one that waits for its validation.
    """
    settings, steps = config.checkpoint, config.total_steps
    anchors = 0 if settings.keep_every is None else steps // settings.keep_every
    judged = 2 if settings.best is not None and config.data.validation is not None else 0
    return min(settings.keep + 1 + judged + anchors, steps // settings.every + anchors + 1)


def learning_rates(steps: Iterable[int], config: Config) -> list[float]:
    """`learning_rate` of each step, for plots and plans."""
    return [learning_rate(step, config) for step in steps]
