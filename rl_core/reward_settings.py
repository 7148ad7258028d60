"""What the settings of a reward ask of one another: `reasoning_gym:<name>` is data and reward in one, a pattern belongs
to `regex`. Starts nothing, imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from rl_core.config import REWARDS, Config
from rl_core.errors import ConfigError

TASK = "reasoning_gym:"


def with_task(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one level (a preset, or overrides), a reasoning-gym task that is named once put into all its places.

    `{"reward": "reasoning_gym:x"}` without `data.train` takes it for data.train and data.validation, and
    `{"data": {"train": "reasoning_gym:x"}}` without `reward` takes it for the reward and data.validation; a
    data.validation that is set stays.
    """
    out = dict(settings)
    data: Any = out.get("data", {})
    if not isinstance(data, Mapping):
        return out
    given = cast("Mapping[str, Any]", data)
    reward = out.get("reward")
    if isinstance(reward, str) and reward.startswith(TASK) and "train" not in given:
        out["data"] = {"validation": reward, **given, "train": reward}
    task = _only_task(given.get("train"))
    if task is not None and "reward" not in out:
        out |= {"reward": task, "data": {"validation": task, **given}}
    return out


def _only_task(train: Any) -> str | None:
    """The task that these sources name, and no other source; None where there is no such one."""
    listed = list(cast("list[Any]", train)) if isinstance(train, list | tuple) else [train]
    paths = [cast("Mapping[str, Any]", item).get("path") if isinstance(item, Mapping) else item for item in listed]
    first = paths[0] if paths else None
    one = isinstance(first, str) and first.startswith(TASK) and all(path == first for path in paths)
    return first if one else None


def check_scoring(config: Config) -> None:
    """Refuse a reward that its settings do not make whole. Raises ConfigError naming the field."""
    pattern, reward = config.scoring.pattern, config.reward
    if reward == "regex":
        if pattern is None:
            raise ConfigError("scoring.pattern: reward=regex needs a pattern, as in --set "
                              "'scoring.pattern=\"answer is (.*)\"' (got None)")
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"scoring.pattern: is no regular expression: {error} (got {pattern!r})") from error
    elif pattern is not None:
        raise ConfigError(f"scoring.pattern: belongs to reward=regex, and reward is {reward} (got {pattern!r}); "
                          "add --set scoring.pattern=null")
    if config.scoring.signature != "auto" and (reward in REWARDS or reward.startswith(TASK)):
        raise ConfigError("scoring.signature: belongs to a function of yours, and reward is "
                          f"{reward} (got {config.scoring.signature!r})")
