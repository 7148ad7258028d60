"""The kinds of hooks: which setting names one, and where it runs. Importable without torch and NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from rl_core.config import Config

Kind = Literal["reward", "group_filter", "sampler", "environment", "session", "advantage", "loss", "correction",
               "metrics"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FIELDS: dict[Kind, str] = {
    "reward": "reward", "group_filter": "rollout.group_filter", "sampler": "data.sampler", "environment": "data.train",
    "session": "rollout.session",
    "advantage": "learner.advantage.path", "loss": "learner.loss.path", "correction": "learner.correction.path",
    "metrics": "learner.metrics"}
"""The setting that takes the function's path."""
IN_LEARNER: tuple[Kind, ...] = ("advantage", "loss", "correction", "metrics")
"""Kinds that a training step is a function of."""


@dataclass(frozen=True, slots=True)
class Hook:
    """`Hook("loss", "learner.loss.path", "./mine.py:loss")`."""

    kind: Kind
    field: str
    target: str


def hooks_of(config: Config) -> Iterator[Hook]:
    """The hooks of a run that run in processes of Headway's: not the reward, the group filter and the session function,
    which have their own."""
    for field, sources in (("data.train", config.data.train), ("data.validation", config.data.validation or ())):
        for source in sources:
            if is_function(source.path):
                yield Hook("environment", field, source.path)
    if config.data.sampler is not None:
        yield Hook("sampler", FIELDS["sampler"], config.data.sampler)
    learner = config.learner
    if learner.advantage.name == "function":
        yield Hook("advantage", FIELDS["advantage"], learner.advantage.path)
    if learner.loss.name == "function":
        yield Hook("loss", FIELDS["loss"], learner.loss.path)
    if learner.correction.path is not None:
        yield Hook("correction", FIELDS["correction"], learner.correction.path)
    if learner.metrics is not None:
        yield Hook("metrics", FIELDS["metrics"], learner.metrics)


def is_function(source: str) -> bool:
    """Whether a source of rows is a function by path, `./file.py:function`."""
    place, colon, name = source.rpartition(":")
    return bool(colon) and place.endswith(".py") and name.isidentifier()
