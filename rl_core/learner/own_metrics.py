"""Metrics of a user's: `learner.metrics` (docs/hooks.md 7). `_N` trajectories of the claim, `_G` its groups.

A function that fails ends no run: the step is recorded without them, and `own/failed` counts it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl_core.errors import ConfigError, HookFailed
from rl_core.experience.staleness import OFFLINE
from rl_core.hooks.loading import call
from rl_core.metrics import MAX_OWN, OWN

if TYPE_CHECKING:
    from rl_core.experience.reader import ClaimRows
    from rl_core.types import Claim

LOG = logging.getLogger("headway.learner")
FIELD = "learner.metrics"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
FAILED = f"{OWN}failed"


def own_metrics(path: str | None, rows: ClaimRows, claim: Claim, metrics: Mapping[str, float]) -> dict[str, float]:
    """`own/<name>` of what the function returns, and `own/failed`: 1 where it raised, or returned what it may not.
    Empty without a function."""
    if path is None:
        return {}
    try:
        found = checked(call("metrics", FIELD, path, facts_of(rows, claim, metrics)), path)
    except (HookFailed, ConfigError) as error:
        LOG.warning("step %d has no metrics of your own: %s", claim.step, error)
        return {FAILED: 1.0}
    return {f"{OWN}{name}": value for name, value in found.items()} | {FAILED: 0.0}


def facts_of(rows: ClaimRows, claim: Claim, metrics: Mapping[str, float]) -> dict[str, Any]:
    """What the function is given: copies, which it may change."""
    return {
        "step": claim.step, "metrics": dict(metrics), "rewards_N": rows.reward_N.astype(np.float64),
        "correct_N": rows.correct_N.astype(np.float64), "lengths_N": rows.length_N.astype(np.int64),
        "finish_N": rows.finish_N.astype(np.int64), "group_N": rows.group_N.astype(np.int64),
        "age_G": np.full(rows.groups, np.nan) if claim.policy == OFFLINE else
        (claim.idx - rows.idx_min_G).astype(np.float64), "sources": list(rows.sources),
        "source_G": rows.source_G.astype(np.int64),
        "parts": {name: values.astype(np.float64) for name, values in rows.parts.items()}}


def checked(value: Any, name: str) -> dict[str, float]:
    """Numbers by name, NaN where one does not exist. Raises HookFailed naming the function and what it returned."""
    if not isinstance(value, Mapping):
        raise HookFailed(f"{FIELD} {name}: the result is {type(value).__name__}; it must be a dict of numbers by name")
    found: dict[str, float] = {}
    for key, number in cast("Mapping[Any, Any]", value).items():
        if not isinstance(key, str) or not NAME.fullmatch(key) or f"{OWN}{key}" == FAILED:
            raise HookFailed(f"{FIELD} {name}: {key!r} is no name of a metric: letters, digits, `_`, `.` and `-`, and "
                             "not `failed`")
        try:
            found[key] = float(number)
        except (TypeError, ValueError) as error:
            raise HookFailed(f"{FIELD} {name}: {key} is {repr(number)[:80]}; it must be a number") from error
        if math.isinf(found[key]):
            raise HookFailed(f"{FIELD} {name}: {key} is infinite; a number that does not exist is NaN")
    if len(found) > MAX_OWN:
        raise HookFailed(f"{FIELD} {name}: {len(found)} metrics; at most {MAX_OWN}, since trackers get them all")
    return found
