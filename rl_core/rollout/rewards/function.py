"""A reward function in a process of its own: `./file.py:function`, `package.module:function`, or one of Headway's that
can hang or must not run in a thread (CHILD_REWARDS, `reasoning_gym:<name>`).

One child process per scorer; calls go one after the other, each with a deadline. A call that hangs is ended with its
process, the next one gets a new process. A function that raises, hangs or returns no finite number is a RewardError
with the function's name and the value, never a reward of 0.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, RewardError, RewardTimeout
from rl_core.reward_settings import TASK
from rl_core.rollout.rewards.child import Task
from rl_core.rollout.rewards.code import CodeLimits
from rl_core.rollout.rewards.process import FunctionProcess
from rl_core.rollout.rewards.reward_model import ModelTask
from rl_core.types import Prompt, Score

ALLOWED_IMPORTS = "HEADWAY_ALLOWED_IMPORTS"
PACKAGES = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}
"""Module and package of what a reward of Headway's needs beside Headway: the extra `tasks`."""
CHILD_REWARDS = ("regex", "math_verify", "code", "reward_model")


def allowed_imports() -> tuple[str, ...]:
    """Top-level packages of HEADWAY_ALLOWED_IMPORTS (comma-separated)."""
    return tuple(name.strip() for name in os.environ.get(ALLOWED_IMPORTS, "").split(",") if name.strip())


def is_own(reward: str) -> bool:
    """Whether a reward that runs in a child process is one of Headway's, by its name."""
    return reward in CHILD_REWARDS or reward.startswith(TASK)


def check_package(reward: str) -> None:
    """Refuse, with ConfigError, a reward or task of Headway's whose package is not installed. Imports nothing."""
    module = reward.partition(":")[0]
    if module in PACKAGES and importlib.util.find_spec(module) is None:
        raise ConfigError(f"{reward}: needs the package {PACKAGES[module]}, which is not installed; pip install "
                          "'headway[tasks]'")


def check_target(target: str, cwd: Path, allowed: Sequence[str], field: str = "reward") -> None:
    """Refuse, with ConfigError naming the field, what is no function path or lies outside rl_core, `cwd` and `allowed`.

    Imports nothing.
    """
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"{field}: {target!r} is no function path; write `./file.py:function` or "
                          "`package.module:function`")
    if place.endswith(".py"):
        path = (cwd / place).resolve()
        if not path.is_relative_to(cwd.resolve()):
            raise ConfigError(f"{field}: {path} lies outside the working directory {cwd}; start the command beside it")
        if not path.is_file():
            raise ConfigError(f"{field}: no such file {path}")
        return
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"{field}: {place!r} is neither a `.py` file nor a module")
    top = place.split(".")[0]
    if top != "rl_core" and top not in allowed and importlib.machinery.PathFinder.find_spec(top, [str(cwd)]) is None:
        raise ConfigError(f"{field}: package {top!r} may not be imported: it is neither in {cwd} nor named by "
                          f"{ALLOWED_IMPORTS} ({','.join(allowed) or 'empty'})")


class FunctionScorer(FunctionProcess):
    """Scores by a function in a child process. Thread-safe; one call at a time.

    Raises ConfigError in the constructor for a path that may not be run or a package that is not installed; RewardError
    per call. `start()` loads the function now and raises ConfigError if that fails; otherwise the first call does
    (RewardError).
    """

    def __init__(self, reward: str, *, cwd: Path, deadline_s: float, allowed: Sequence[str] = (), quiet: bool = False,
                 signature: str = "auto", answer_key: str = "answer", pattern: str | None = None,
                 code: CodeLimits | None = None, model: ModelTask | None = None, watch: bool = False) -> None:
        """`quiet` leaves out what the function prints; else it goes to this process's stderr. `signature`,
        `answer_key`, `pattern`, `code` and `model` are settings of the run. `watch` asks the child for `notes`."""
        if is_own(reward):
            check_package(reward)
        else:
            check_target(reward, cwd, allowed)
        task: Task = {"kind": "reward", "target": reward, "cwd": str(cwd.resolve()), "signature": signature,
                      "answer_key": answer_key, "pattern": pattern, "code": code, "watch": watch}
        if model is not None:
            task["model"] = model
        super().__init__(f"reward {reward}", task, deadline_s=deadline_s, quiet=quiet, failed=RewardError,
                         timeout=RewardTimeout)
        self.notes: dict[str, Any] = {}
        """With `watch`: what loading or the last call printed, left running, or gave in vain."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        columns = dict(prompt.columns)
        request = {"text": text, "truth": prompt.answer, "prompt": columns.pop("prompt", None),
                   "data_source": prompt.data_source, "columns": columns}
        return Score(**self.ask(request))

    def start(self) -> tuple[str, ...]:
        """Load the function. Returns the columns that a row must have for it. Raises ConfigError with its error."""
        return tuple(self.load()["columns"])

    @property
    def signature(self) -> str:
        """How the function is called, once it is loaded: answer, verl or trl."""
        return str(self.ready.get("signature", ""))

    def said(self, reply: dict[str, Any]) -> None:
        """Keep the notes of loading or of a call; a call that has not answered has none."""
        self.notes = reply.get("notes", {})
