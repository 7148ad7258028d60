"""Hooks that run inside a process of Headway's: found by path, loaded once, named by the digest of their file.

A relative path starts at the working directory of the command, in which its actors work, too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from rl_core.config import Config
from rl_core.errors import ConfigError, HookFailed
from rl_core.hooks.kinds import IN_LEARNER, Kind, hooks_of
from rl_core.rollout.rewards.child import load
from rl_core.rollout.rewards.function import allowed_imports, check_target

_LOADED: dict[tuple[str, str], Callable[..., Any]] = {}


def hook(kind: Kind, field: str, target: str, cwd: Path | None = None) -> Callable[..., Any]:
    """The function, loaded once in this process. Raises ConfigError for a path that may not be run, or that fails."""
    where = (cwd or Path.cwd()).resolve()
    key = (str(where), target)
    if key not in _LOADED:
        check_target(target, where, allowed_imports(), field)
        if str(where) not in sys.path:
            sys.path.append(str(where))  # behind everything else: a file of yours hides no module of ours
        try:
            _LOADED[key] = load(target, str(where), what=kind, module_name=f"headway_hook_{digest(target, where)[:16]}")
        except Exception as error:  # a user's file may raise anything
            raise ConfigError(f"{field}: {target} cannot be loaded: {type(error).__name__}: {error}") from error
    return _LOADED[key]


def digest(target: str, cwd: Path) -> str:
    """Digest of the file that a function lies in; `absent` where there is none."""
    place = target.rpartition(":")[0]
    path = cwd / place
    if not place.endswith(".py"):
        try:
            found = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            found = None
        if found is None or found.origin is None or not os.path.isfile(found.origin):
            return "absent"
        path = Path(found.origin)
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except OSError:
        return "absent"


def learner_hooks(config: Config, cwd: Path | None = None) -> str:
    """`learner.loss.path=./mine.py:loss 3f2a...`: the functions that a training step is a function of, each with the
    digest of its file; empty where there are none."""
    where = cwd or Path.cwd()
    return "; ".join(f"{each.field}={each.target} {digest(each.target, where)}" for each in hooks_of(config)
                     if each.kind in IN_LEARNER)


def call(kind: Kind, field: str, target: str, *arguments: Any) -> Any:
    """What the function returns. Raises HookFailed with its name for whatever it raises."""
    function = hook(kind, field, target)
    try:
        return function(*arguments)
    except Exception as error:  # a user's function may raise anything
        raise HookFailed(f"{field} {target} raised {type(error).__name__}: {error}") from error
