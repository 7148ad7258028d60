"""The configured estimator over a claim: which file it is in, and what no estimator has to look after."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from rl_core.config import AdvantageConfig
from rl_core.learner.advantages.answers import Answers
from rl_core.learner.advantages.optimal_token_baseline import PolicyFacts


def estimator_module(name: str) -> ModuleType:
    """The file of an estimator: of every name of `learner.advantage.name` there is one."""
    return import_module(f"rl_core.learner.advantages.{name}")


def needs_policy(config: AdvantageConfig) -> bool:
    """Whether the estimator reads what the proximal policy says of every token."""
    return hasattr(estimator_module(config.name), "estimate_from_policy")


def needs_values(config: AdvantageConfig) -> bool:
    """Whether the estimator reads a critic's values of every token."""
    return hasattr(estimator_module(config.name), "estimate_from_values")


def is_per_token(config: AdvantageConfig) -> bool:
    """Whether the tokens of an answer may have different advantages."""
    return needs_policy(config) or needs_values(config) or hasattr(estimator_module(config.name), "estimate_tokens")


def answers_of(reward_N: NDArray[np.floating], group_N: NDArray[np.integer], *,
               length_N: NDArray[np.integer] | None = None, tokens_N: NDArray[np.integer] | None = None,
               parts: dict[str, NDArray[np.floating]] | None = None,
               baseline_N: NDArray[np.floating] | None = None) -> Answers:
    """Facts of a claim in the dtypes of the estimators; lengths that are not given are 1.

    Raises ValueError for a reward that is not finite: a shard never holds one.
    """
    reward = reward_N.astype(np.float64)
    if not np.isfinite(reward).all():
        raise ValueError(f"reward of trajectory {int(np.flatnonzero(~np.isfinite(reward))[0])} is not finite")
    ones = np.ones(len(reward), np.int64)
    return Answers(reward_N=reward, group_N=group_N.astype(np.int64),
                   length_N=ones if length_N is None else length_N.astype(np.int64),
                   tokens_N=ones if tokens_N is None else tokens_N.astype(np.int64),
                   baseline_N=None if baseline_N is None else baseline_N.astype(np.float64),
                   parts={name: values.astype(np.float64) for name, values in (parts or {}).items()})


def advantages(answers: Answers, config: AdvantageConfig, *, present_N: NDArray[np.bool_] | None = None,
               policy: PolicyFacts | None = None) -> NDArray[np.float32]:
    """Advantage of every trajectory of the claim, `[N]` float32, by the configured estimator; of every loss token,
    `[K]`, in claim order, where it is per token.

    `present_N` False = as if absent (`truncated: exclude`): outside all statistics, advantage 0. `policy`: for an
    estimator that needs it.
    """
    module, count = estimator_module(config.name), len(answers.reward_N)
    present = np.ones(count, np.bool_) if present_N is None else present_N
    chosen, there = answers.only(present), present
    if is_per_token(config):
        there = np.repeat(present, answers.tokens_N)
    if needs_policy(config):
        assert policy is not None
        found = module.estimate_from_policy(chosen, policy.only(there), config)
    else:
        found = (module.estimate_tokens if is_per_token(config) else module.estimate)(chosen, config)
    result = np.zeros(len(there), np.float32)
    result[there] = found
    return result
