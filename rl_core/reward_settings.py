"""What the settings of a reward ask of one another: `reasoning_gym:<name>` is data and reward in one, a pattern belongs
to `regex`. Starts nothing, imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from rl_core.advantage_settings import AdvantageConfig, PartsAdvantage, PartWeight
from rl_core.config import REWARDS, Config
from rl_core.errors import ConfigError, refuse

TASK = "reasoning_gym:"
MAIN = "main"
"""Name of the part that is `reward` itself, where there are others beside it."""


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


def single_rewards(config: Config) -> list[Config]:
    """The settings of each reward of the run as if it were the only one: `reward`, then `scoring.parts`."""
    alone = config.scoring.model_copy(update={"weight": 1.0, "parts": ()})
    return [config.model_copy(update={"scoring": alone}), *(
        config.model_copy(update={"reward": part.reward, "scoring": alone.model_copy(
            update={"pattern": part.pattern, "signature": "auto"})}) for part in config.scoring.parts)]


def estimator_of(config: Config, recorded: Collection[str]) -> AdvantageConfig:
    """The estimator's settings as a step reads them: gdpo without parts of its own has those that the reward is added
    up of, each at its weight.

    `recorded`: parts that answers of the claim have. What was amended to be a part since these were scored is left out;
    where that is all, nothing is, and the estimator says so.
    """
    settings, scoring = config.learner.advantage, config.scoring
    if not isinstance(settings, PartsAdvantage) or settings.parts or not scoring.parts:
        return settings
    parts = (PartWeight(part=MAIN, weight=scoring.weight),
             *(PartWeight(part=part.part, weight=part.weight) for part in scoring.parts))
    there = tuple(part for part in parts if part.part in recorded)
    return settings.model_copy(update={"parts": there or parts})


def check_scoring(config: Config) -> None:
    """Refuse rewards that their settings do not make whole. Raises ConfigError naming the field."""
    parts = config.scoring.parts
    names = [MAIN, *(part.part for part in parts)]
    if twice := [name for name in names if names.count(name) > 1]:
        refuse("scoring.parts", twice[0], f"stands twice among the parts {', '.join(names)}; `{MAIN}` is the "
               "setting `reward` itself")
    if not any((config.scoring.weight, *(part.weight for part in parts))):
        refuse("scoring.weight", config.scoring.weight, "no reward has a weight: all answers would be alike")
    for part in parts:
        if part.reward not in REWARDS and ":" not in part.reward:
            refuse("scoring.parts", part.reward, f"of the part {part.part}: no reward; write one as `reward` names it")
    for alone in single_rewards(config):
        _check_alone(alone)
    check_asked(config)


def check_asked(config: Config) -> None:
    """Refuse a judge or a reward model that is not made whole, or that no reward asks. Raises ConfigError."""
    asked = {config.reward, *(part.reward for part in config.scoring.parts)}
    judge, model = config.scoring.judge, config.scoring.model
    for field, value, reward, example in (
            ("scoring.judge.url", judge.url, "judge", "http://host:8000/v1"),
            ("scoring.model.path", model.path, "reward_model", "the directory of a sequence classifier")):
        if reward in asked and value is None:
            refuse(field, value, f"reward={reward} needs it, as in {example}")
        if reward not in asked and value is not None:
            refuse(field, value, f"belongs to reward={reward}, and no reward is it; leave it out")
    if judge.low >= judge.high:
        refuse("scoring.judge.low", judge.low, f"not below scoring.judge.high = {judge.high:g}")
    try:
        re.compile(judge.pattern)
    except (re.error, OverflowError, RecursionError) as error:
        refuse("scoring.judge.pattern", judge.pattern, f"is no regular expression: {error}")
    if "{answer}" not in judge.prompt:
        refuse("scoring.judge.prompt", judge.prompt[:80], "does not show the answer: write {answer} in it")


def _check_alone(config: Config) -> None:
    code = config.scoring.code
    if config.reward == "code" and code.total_s + code.time_s >= config.deadlines.reward_s:
        refuse("scoring.code.total_s", code.total_s,
               f"with the last run of scoring.code.time_s = {code.time_s:g} not below deadlines.reward_s = "
               f"{config.deadlines.reward_s:g}, which ends a reward that takes so long; lower it, or raise that")
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
