"""The group filter of a user's (`rollout.group_filter`): which finished groups do not land.

A group that it leaves out ends with an outcome `filtered` and the filter's reason, before it lands: its position is
finished in this dataset epoch, and the next one is leased. The verdict is made once and is durable, so that a restart
decides nothing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_core.config import Config
from rl_core.errors import FilterError, FilterTimeout
from rl_core.rollout.rewards.child import Task
from rl_core.rollout.rewards.function import allowed_imports, check_target
from rl_core.rollout.rewards.process import FunctionProcess
from rl_core.rollout.verdicts import facts_of
from rl_core.types import TrajectoryGroup

FIELD = "rollout.group_filter"


class GroupFilter(FunctionProcess):
    """`filter(group)` -> why it is left out, or None. Raises FilterError, FilterTimeout by its deadline."""

    def __init__(self, target: str, *, cwd: Path, deadline_s: float, allowed: Sequence[str] = (),
                 quiet: bool = False) -> None:
        """Raises ConfigError for a path that may not be run."""
        check_target(target, cwd, allowed, FIELD)
        task: Task = {"kind": "group_filter", "target": target, "cwd": str(cwd.resolve()), "signature": "auto",
                      "answer_key": "answer", "pattern": None, "code": None, "watch": False}
        super().__init__(f"{FIELD} {target}", task, deadline_s=deadline_s, quiet=quiet, failed=FilterError,
                         timeout=FilterTimeout)

    def __call__(self, group: TrajectoryGroup) -> str | None:
        return self.ask({"group": facts_of(group)})["reason"]


def make_group_filter(config: Config, *, cwd: Path | None = None, allowed: Sequence[str] | None = None,
                      quiet: bool = False) -> GroupFilter | None:
    """The run's filter, or None. `cwd` is the working directory of the command. Raises ConfigError."""
    if config.rollout.group_filter is None:
        return None
    return GroupFilter(config.rollout.group_filter, cwd=cwd or Path.cwd(), deadline_s=config.deadlines.reward_s,
                       allowed=allowed_imports() if allowed is None else allowed, quiet=quiet)


def check_group_filter(config: Config, *, cwd: Path | None = None) -> None:
    """Load the run's filter once, in a process of its own. Raises ConfigError where that fails."""
    if (made := make_group_filter(config, cwd=cwd, quiet=True)) is not None:
        try:
            made.load()
        finally:
            made.close()
