"""What `headway status --watch` shows of a run at one moment, read from the run directory alone.

Reports are JSON values: a number that does not exist is None.
"""

from __future__ import annotations

import math
from typing import Any

from rl_core.looking.watching import Sight, Watch
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import json_values, newest_attempt, owner_is_alive
from tasks.inspection import cause_of, open_run, read_result, read_status, state_of
from tasks.paths import run_dir

PARTS = ("warmed_up", "rescored", "replayed")
"""Long parts of a start, done and total, while they run."""


class Watcher:
    """Looks at one run as often as it is asked. Raises ConfigError where there is no such run."""

    def __init__(self, run_key: str) -> None:
        self._key, self._run = run_key, run_dir(run_key)
        open_run(self._run, run_key)
        self._watch = Watch(self._run)

    def look(self) -> dict[str, Any]:
        """The run now; `over` says that nobody owns it, so that nothing changes any more."""
        run, revision = self._run, current_revision(self._run)
        config, alive = config_of(run, revision), owner_is_alive(run)
        view, result, seen = read_status(run), read_result(run), self._watch.look()
        state = state_of(run, view, result, alive=alive)
        now = view if alive else {}
        return json_values({
            "run_key": self._key, "state": state, "over": not alive, "attempt": newest_attempt(run),
            "steps": seen.steps, "total_steps": config.total_steps,
            "left_s": _left_s(seen, config.total_steps) if state == "training" else None,
            "stages": now.get("stages", []), **{key: now[key] for key in PARTS if key in now},
            "reward": {"steps": list(seen.step_K), "mean": list(seen.reward_K)},
            "accuracy": list(seen.accuracy_V), "metrics": dict(seen.metrics),
            "alarm": seen.alarm,
            "tokens_per_s": seen.tokens_per_s,
            "staleness": {"limit": config.staleness.limit, "groups": {str(age): n for age, n in seen.ages.items()}},
            "utilization": dict(seen.shares), "live": now.get("live", {}), "waits": now.get("waits", []),
            "note": now.get("trouble") or now.get("note"), "cause": cause_of(result) if state == "failed" else None})


def _left_s(seen: Sight, total: int) -> float:
    return max(0, total - seen.step_K[-1] - 1) * seen.step_s if seen.step_K else math.nan

