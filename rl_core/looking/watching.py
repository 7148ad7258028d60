"""A run that is looked at again and again: what is new since the last look is read, and nothing twice.

From the run directory alone, and for people: what cannot be read is left out (`headway status` names it).

Shape suffix: `_K` trained steps, ascending.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rl_core.alarms import newest_alarm
from rl_core.errors import BrokenFile
from rl_core.experience.columns import fixed_values
from rl_core.experience.ledger import read_claim
from rl_core.experience.staleness import OFFLINE
from rl_core.gaps import Gaps, found
from rl_core.landed_groups import checked_batch
from rl_core.metrics import STATES, weighted_mean
from rl_core.observations import seen_observation
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, numbered, read_json

CURVE_STEPS = 2000
"""Steps of the reward curve: a longer run's first look would take seconds for records that make no visible point."""
AGE_STEPS = 64
"""Steps whose groups are counted by age: what is true now, not what was at the start."""
LAST_STEPS = 16
"""Steps that shares of time and tokens/s are averaged over, and the pace is taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """One look at a run: `Sight(steps=42, ages={0: 60, 1: 4}, shares={"learner_busy": 0.9, ...}, ...)`."""

    steps: int
    """With a record."""
    step_K: tuple[int, ...]
    """The last CURVE_STEPS of them that could be read."""
    reward_K: tuple[float, ...]
    """`reward/mean` of each; NaN where it has none."""
    metrics: Mapping[str, float]
    """Of the newest step, by the names of learner and owner."""
    alarm: str | None
    """`step 12: mismatch 0.012 over 0.005`, of the newest of those steps that violated an invariant."""
    ages: Mapping[int, int]
    """Trained groups of the last AGE_STEPS steps by age, publications, ascending. Groups of another run have none."""
    shares: Mapping[str, float]
    """`learner_busy`, `rollout_waiting` ...: share of the time of a side, mean over the last LAST_STEPS steps that
    tell; NaN where none does."""
    tokens_per_s: float
    """`trained_tokens_per_s` of the last LAST_STEPS steps."""
    step_s: float
    """Mean seconds from one record to the next, over as many; NaN where there are fewer than two."""
    newest_s: float
    """When the newest record was made, seconds since 1970; NaN without one."""
    accuracy_V: tuple[float, ...]
    """Greedy accuracy of each validation, by step; NaN where a record has none."""


def trained_tokens_per_s(steps: Iterable[Mapping[str, float]]) -> float:
    """Answer tokens that steps trained over the time that they took, waits between them included; NaN where none tells.

    By the records: what rollout workers count are the tokens of answers that ended, and none may end in a short step. A
    step's time is that of an answer, 1 / `system/samples_per_s`, as in docs/frames.md 7.
    """
    speeds = [(step.get("system/tokens_per_s", math.nan), step.get("system/samples_per_s", math.nan)) for step in steps]
    known = [(tokens, answers) for tokens, answers in speeds if tokens > 0 and answers > 0]
    return weighted_mean([tokens for tokens, _ in known], [1 / answers for _, answers in known])


class Watch:
    """Keeps what it has read. `Watch(run).look()`; not thread-safe.

    `curve`: steps of the reward curve, `ages`: steps whose groups are counted by age (0: none, and no shard is read).
    """

    def __init__(self, run: RunDir, *, curve: int = CURVE_STEPS, ages: int = AGE_STEPS) -> None:
        self._run, self._curve, self._age_steps = run, curve, ages
        self._metrics: dict[int, dict[str, float]] = {}
        self._ts_us: dict[int, int] = {}
        self._observed: set[int] = set()
        self._ages: dict[int, Counter[int]] = {}
        self._oldest: dict[tuple[str, int], Sequence[int]] = {}
        """Oldest publication of each group of a shard."""
        self._accuracy: dict[Path, float] = {}

    def look(self) -> Sight:
        """What the run has recorded by now."""
        steps = recorded_steps(self._run)
        for step in steps[-self._curve:]:
            self._read(step)
        for step in sorted(self._metrics)[:-self._curve]:
            del self._metrics[step], self._ts_us[step]
        read = sorted(self._metrics)
        last = read[-LAST_STEPS:]
        for step in last:
            self._read_observation(step)
        recent = steps[-self._age_steps:] if self._age_steps else []
        for step in recent:
            self._read_ages(step)
        ages: Counter[int] = Counter()
        for step in recent:
            ages += self._ages.get(step, Counter())
        return Sight(
            steps=len(steps), step_K=tuple(read), metrics=self._metrics[read[-1]] if read else {},
            reward_K=tuple(self._metrics[step].get("reward/mean", math.nan) for step in read),
            alarm=newest_alarm((step, self._metrics[step]) for step in reversed(read)),
            ages=dict(sorted(ages.items())), shares=self._shares(last),
            tokens_per_s=trained_tokens_per_s(self._metrics[step] for step in last), step_s=self._step_s(last),
            newest_s=self._ts_us[read[-1]] / 1e6 if read else math.nan, accuracy_V=self._accuracies())

    def recent(self, count: int) -> list[dict[str, float]]:
        """Metrics of the last steps that `look` has read."""
        return [self._metrics[step] for step in sorted(self._metrics)[-count:]]

    def _read(self, step: int) -> None:
        if step in self._metrics:
            return
        record = found(partial(read_record, self._run, step), str(self._run.record(step)), Gaps())
        if record is not None:
            self._metrics[step], self._ts_us[step] = dict(record.metrics), record.ts_us

    def _read_observation(self, step: int) -> None:
        """It is written behind the record, so the newest may be there at a later look."""
        if step in self._observed:
            return
        seen = seen_observation(self._run, step)
        if seen is not None:
            self._metrics[step] |= seen.metrics
            self._observed.add(step)

    def _read_ages(self, step: int) -> None:
        if step in self._ages:
            return
        claim = found(partial(read_claim, self._run, step), str(self._run.claim(step)), Gaps())
        if claim is None:
            return
        ages: Counter[int] = Counter()
        for group in () if claim.policy == OFFLINE else claim.groups:
            oldest = self._shard(group.stream, group.seq)
            if group.row < len(oldest):
                ages[claim.idx - int(oldest[group.row])] += 1
        self._ages[step] = ages

    def _shard(self, stream: str, seq: int) -> Sequence[int]:
        """Empty for a shard that is retired, or cannot be trusted."""
        if (stream, seq) not in self._oldest:
            path = self._run.shard(stream, seq)
            batch = found(partial(checked_batch, path), str(path), Gaps())
            self._oldest[stream, seq] = () if batch is None else fixed_values(batch.column("idx_min")).tolist()
        return self._oldest[stream, seq]

    def _shares(self, steps: Sequence[int]) -> dict[str, float]:
        names = [f"{side}_{state}" for side in ("learner", "rollout") for state in STATES]
        return {name: _mean([self._metrics[step].get(f"utilization/{name}", math.nan) for step in steps])
                for name in names}

    def _step_s(self, steps: Sequence[int]) -> float:
        if len(steps) < 2:
            return math.nan
        return (self._ts_us[steps[-1]] - self._ts_us[steps[0]]) / 1e6 / (steps[-1] - steps[0])

    def _accuracies(self) -> tuple[float, ...]:
        for _, path in numbered(self._run.validations, r"step-(\d{9})\.json"):
            if path not in self._accuracy:
                self._accuracy[path] = _greedy_accuracy(path)
        return tuple(self._accuracy[path] for path in sorted(self._accuracy))


def _greedy_accuracy(path: Path) -> float:
    try:
        value = read_json(path).get("greedy_accuracy")
    except (BrokenFile, OSError):
        return math.nan
    return math.nan if value is None else float(value)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
