"""Outcomes: how a leased group ended without a landed row. `outcomes/<group_id>.json`, put-if-absent."""

from __future__ import annotations

import os
from dataclasses import asdict

from rl_core.run_dir import RunDir, put_if_absent, read_json, to_json
from rl_core.types import Outcome


def put_outcome(run: RunDir, outcome: Outcome) -> bool:
    """Record the outcome; False if the group has one already (the stored one stands)."""
    return put_if_absent(run.outcome(outcome.group_id), to_json(asdict(outcome)))


def read_outcome(run: RunDir, group_id: str) -> Outcome:
    """Raises FileNotFoundError where the group has no outcome, BrokenFile where its file cannot be trusted."""
    payload = read_json(run.outcome(group_id))
    payload.pop("format")
    return Outcome(**payload)


def outcome_ids(run: RunDir) -> list[str]:
    """Group ids that have an outcome, sorted."""
    try:
        names = os.listdir(run.outcomes)
    except FileNotFoundError:
        return []
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and not name.startswith("."))
