"""A function of a user's tried against the contract of its kind: `headway hook test`."""

from __future__ import annotations

from typing import Any

from rl_core.hooks.kinds import FIELDS
from rl_core.hooks.trial import try_hook, whole_target


def run_trial(text: str) -> dict[str, Any]:
    """{kind, target, setting, problems, holds} of `KIND=PATH`, or of a path whose function is called as its kind.

    Raises ConfigError for a path that may not be run.
    """
    kind, target = whole_target(text)
    problems = try_hook(kind, target, field=kind)
    setting = {"advantage": "learner.advantage.name=function", "loss": "learner.loss.name=function",
               "correction": "learner.correction.weights=function"}.get(kind)
    return {"kind": kind, "target": target, "problems": problems, "holds": not problems,
            "settings": [*([setting] if setting else []), f"{FIELDS[kind]}={target}"]}
