"""What the owner of a run saw of the rollout side beside training step k: `observations/step-<k>.json`, put-if-absent.

They stand beside the records because the learner cannot see the workers and a record is written once. Nothing is
decided by them, so they are not fsynced: a power loss may leave a name without bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from rl_core.errors import BrokenFile, FormatTooNew
from rl_core.gaps import Gaps, found
from rl_core.metrics import names
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, file_numbers, numbers, put_if_absent, read_json, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One step seen from the rollout side. `Observation(step=4, metrics={"rollout/in_flight": 12.0}, ts_us=1)`."""

    step: int
    metrics: dict[str, float]
    """By the owner's names of rl_core/metrics.py."""
    ts_us: int


def put_observation(run: RunDir, step: int, metrics: Mapping[str, float], ts_us: int) -> bool:
    """Write it; False if the step has one already (the stored one stands)."""
    payload = {"step": step, "metrics": dict(metrics), "ts_us": ts_us}
    return put_if_absent(run.observation(step), to_json(payload), fsync=False)


def read_observation(run: RunDir, step: int) -> Observation:
    """Raises FileNotFoundError where step k has none."""
    payload = read_json(run.observation(step))
    return Observation(step=payload["step"], metrics=numbers(payload["metrics"]), ts_us=payload["ts_us"])


def seen_observation(run: RunDir, step: int) -> Observation | None:
    """What people are shown of it: None where step k has none, or one that cannot be read. That is no gap: it is lost
    to people only. Raises FormatTooNew."""
    return found(partial(read_observation, run, step), str(run.observation(step)), Gaps())


def make_up_observations(run: RunDir) -> None:
    """Give every recorded step an observation that can be read, if only of NaN: its owner was stopped before it wrote
    that of the last ones, or a power loss tore them. For the owner, at a start."""
    for step in recorded_steps(run):
        try:
            read_observation(run, step)
        except FormatTooNew:
            raise
        except (BrokenFile, FileNotFoundError, KeyError, TypeError, ValueError):
            run.observation(step).unlink(missing_ok=True)
            put_observation(run, step, dict.fromkeys(names("owner"), math.nan), read_record(run, step).ts_us)


def observed_steps(run: RunDir) -> list[int]:
    """Steps with an observation, ascending."""
    return file_numbers(run.observations, r"step-(\d{9})\.json")
