"""The timeline of a run: what every part did when, from the run's files alone (docs/operations.md, "Timeline").

    timeline(RunDir(Path("runs/k"))).lanes[0].bars[0]     # Bar("wait", 1790000000000000, 1790000000400000)
    chrome_trace(RunDir(Path("runs/k")))                  # for Perfetto and chrome://tracing

A lane is what one part does one thing after the other: its bars do not overlap. Groups in flight do, so a worker has as
many lanes of groups as it had groups at once. A run may go on meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from rl_core.experience.ledger import voided_steps
from rl_core.gaps import Gaps, found
from rl_core.group_facts import GroupFacts, read_group_facts
from rl_core.history import read_history
from rl_core.landed_groups import Shard, read_shards
from rl_core.looking.recorded_spans import (
    GroupTimes,
    by_worker,
    group_times,
    learner_spans,
    stages_of,
    states_of,
    worker_spans,
)
from rl_core.metrics import State
from rl_core.run_dir import RunDir, numbered, read_json
from rl_core.types import Span

LEARNER: dict[State, str] = {"busy": "learn", "waiting": "wait", "syncing": "publish", "paused": "checkpoint"}
"""What the states of the learner's ledger are called in its lane."""
WORKER: dict[State, str] = {"busy": "generate", "waiting": "wait", "syncing": "swap", "paused": "paused"}
COUNTERS = {"reward/mean": "reward", "staleness/mean": "publications", "staleness/max": "publications",
            "rollout/in_flight": "groups", "rollout/tokens_per_s": "tokens/s", "system/tokens_per_s": "tokens/s"}
"""Metrics that are drawn over time, with their units."""


@dataclass(frozen=True, slots=True)
class Bar:
    """`Bar("swap", 1_790_000_000_000_000, 1_790_000_000_020_000, of=7, about="to version 7")`."""

    name: str
    begin_us: int
    end_us: int
    of: int | None = None
    """Training step, weight version, shard or checkpoint that it is about."""
    about: str = ""
    """For whoever points at it."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Bars of one part in order, none of which overlaps another. `Lane("rollout-0", "engine", [Bar(...)])`."""

    part: str
    name: str
    bars: list[Bar]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment. `Mark("version", 1_790_000_000_000_000, 7, "version 7 published, behind 7 steps")`."""

    kind: str
    """`version`, `claim`, `attempt`."""
    at_us: int
    of: int
    about: str


@dataclass(frozen=True, slots=True)
class Counter:
    name: str
    unit: str
    points: list[tuple[int, float]]
    """(microseconds, value), by time."""


@dataclass(frozen=True, slots=True)
class Timeline:
    run_key: str
    lanes: list[Lane]
    """The learner's, each worker's, validation's."""
    marks: list[Mark]
    counters: list[Counter]
    gaps: Gaps = field(default_factory=list[str])
    """What could not be read."""

    @property
    def begin_us(self) -> int:
        """The first moment that is known; 0 where none is."""
        return min([*(lane.bars[0].begin_us for lane in self.lanes), *(mark.at_us for mark in self.marks)], default=0)

    @property
    def end_us(self) -> int:
        return max([*(lane.bars[-1].end_us for lane in self.lanes), *(mark.at_us for mark in self.marks)], default=0)


def timeline(run: RunDir) -> Timeline:
    """Read it. What is absent or broken is a gap; a run of which nothing is known has no lanes."""
    gaps = Gaps()
    facts = read_group_facts(run, outcomes=False, gaps=gaps)
    history = read_history(run, gaps=gaps)
    spans = learner_spans(run, history.records, gaps)
    lanes = _lanes("learner", "state", [_learner_bar(span) for span in states_of(spans)])
    stages = stages_of(spans)
    lanes += _lanes("learner", "stages", [Bar(s.name, s.begin_us, s.end_us, s.of, _stage_text(s)) for s in stages])
    if run.taken.exists():
        gaps.append(f"{run.taken}: the answers are of another run, whose timeline has the rollout side")
    else:
        for worker, shards in by_worker(read_shards(run, gaps)):
            lanes += _worker_lanes(worker, shards, facts, gaps)
    lanes += _lanes("validation", "validate", _validations(history.validations))
    counters = [Counter(name, unit, _points(history.time_K, history.metrics[name])) for name, unit in COUNTERS.items()]
    return Timeline(run.root.name, lanes, _marks(run, facts, stages, gaps), [c for c in counters if c.points], gaps)


# -- lanes


def packed(bars: Iterable[Bar]) -> list[list[Bar]]:
    """The bars in as few rows as they need without overlap, each in the first row that is free, without empty bars.

    `packed([Bar("a", 0, 4), Bar("b", 2, 3), Bar("c", 4, 5)])` -> a and c, b.
    """
    rows: list[list[Bar]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for bar in sorted((bar for bar in bars if bar.end_us > bar.begin_us), key=lambda bar: (bar.begin_us, bar.end_us)):
        while busy and busy[0][0] <= bar.begin_us:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            rows.append([])
            free.append(len(rows) - 1)
        row = heapq.heappop(free)
        rows[row].append(bar)
        heapq.heappush(busy, (bar.end_us, row))
    return rows


def _lanes(part: str, name: str, bars: Iterable[Bar]) -> list[Lane]:
    """One lane; more where two processes of the part lived at once."""
    return [Lane(part, name if i == 0 else f"{name} ({i + 1})", row) for i, row in enumerate(packed(bars))]


def _learner_bar(span: Span) -> Bar:
    name = _named(LEARNER, span)
    about = {"learn": "step", "checkpoint": "behind steps:"}.get(name, "")
    return Bar(name, span.begin_us, span.end_us, span.of, "" if span.of is None else f"{about} {span.of}")


def _stage_text(span: Span) -> str:
    if span.of is None:
        return ""
    return f"version {span.of}" if span.name == "publish" else f"step {span.of}"


def _named(words: dict[State, str], span: Span) -> str:
    return next(words[state] for state in get_args(State) if state == span.name)


def _worker_lanes(worker: str, shards: Sequence[Shard], facts: GroupFacts, gaps: Gaps) -> list[Lane]:
    states: list[Bar] = []
    landings: list[Bar] = []
    groups: list[tuple[GroupTimes, str]] = []
    steps = {group.group_id: (step, claim.idx) for step, claim in facts.claims.items() for group in claim.groups}
    for stream in dict.fromkeys(shard.stream for shard in shards):
        mine = [shard for shard in shards if shard.stream == stream]
        spans = [span for shard in mine for span in
                 found(partial(worker_spans, shard), f"{worker}, shard {shard.stream}/{shard.seq}", gaps) or ()]
        states += _worker_states(spans)
        landings += [Bar("land", span.begin_us, span.end_us, span.of, f"shard {stream}/{span.of}")
                     for span in spans if span.name == "landing"]
        groups += [(times, _group_text(times, steps, facts)) for shard in mine for times in group_times(shard)]
    return [*_lanes(worker, "engine", states), *_lanes(worker, "landing", landings), *_group_lanes(worker, groups)]


def _worker_states(spans: Sequence[Span]) -> list[Bar]:
    """States of one incarnation; what it generates it samples by the version of its last swap."""
    bars: list[Bar] = []
    served: int | None = None
    for span in states_of(spans):
        name = _named(WORKER, span)
        of, about = span.of, ""
        if name == "swap":
            served, about = span.of, f"to version {span.of}"
        elif name == "generate" and served is not None:
            of, about = served, f"by version {served}"
        bars.append(Bar(name, span.begin_us, span.end_us, of, about))
    return bars


def _group_text(times: GroupTimes, steps: dict[str, tuple[int, int]], facts: GroupFacts) -> str:
    idx = f"{times.idx_min}" if times.idx_min == times.idx_max else f"{times.idx_min}-{times.idx_max}"
    text = f"{times.group_id}: {times.answers} answers, {times.tokens} tokens, sampled by publication {idx}"
    if times.group_id in steps:
        step, at = steps[times.group_id]
        return f"{text}; {facts.state_of(step)} in step {step}, age {at - times.idx_min}"
    drop = facts.drops.get(times.group_id)
    return f"{text}; dropped: {drop.reason}" if drop is not None else text


def _group_lanes(worker: str, groups: Iterable[tuple[GroupTimes, str]]) -> list[Lane]:
    """A group is packed whole: its reward stands behind its answers, in one lane."""
    whole = [(Bar("group", times.dispatched_us, times.finished_us, i), times, text)
             for i, (times, text) in enumerate(groups)]
    lanes: list[Lane] = []
    for number, row in enumerate(packed(bar for bar, _, _ in whole)):
        bars: list[Bar] = []
        for bar in row:
            assert bar.of is not None
            bars += _group_bars(*whole[bar.of][1:])
        lanes.append(Lane(worker, f"groups {number}", bars))
    return lanes


def _group_bars(times: GroupTimes, text: str) -> list[Bar]:
    if times.answered_us is None or not times.dispatched_us <= times.answered_us <= times.finished_us:
        return [Bar("group", times.dispatched_us, times.finished_us, None, text)]
    both = [Bar("generate", times.dispatched_us, times.answered_us, None, text),
            Bar("reward", times.answered_us, times.finished_us, None, text)]
    return [bar for bar in both if bar.end_us > bar.begin_us]


def _validations(validations: Iterable[Any]) -> list[Bar]:
    bars: list[Bar] = []
    for validation in validations:
        seconds, end = validation.record.get("seconds"), validation.record.get("ts_us")
        if seconds is not None and end is not None:
            bars.append(Bar("validate", end - int(seconds * 1e6), end, validation.record.get("v"),
                            f"version {validation.record.get('v')}, behind {validation.step} steps: greedy accuracy "
                            f"{validation.greedy_accuracy:.3f}"))
    return bars


# -- moments


def _marks(run: RunDir, facts: GroupFacts, stages: Iterable[Span], gaps: Gaps) -> list[Mark]:
    marks = [Mark("version", span.end_us, span.of, f"version {span.of} is published")
             for span in stages if span.name == "publish" and span.of is not None]
    void = found(partial(voided_steps, run), str(run.ledger()), gaps) or {}
    marks += [Mark("claim", claim.ts_us, step, f"step {step} claims {len(claim.groups)} groups"
                   + (", and is void" if step in void else "")) for step, claim in facts.claims.items()]
    for a, path in numbered(run.attempts, r"attempt-(\d{6})\.json"):
        attempt = found(partial(read_json, path), str(path), gaps)
        if attempt is not None and "ts_us" in attempt:
            at = attempt.get("next_step")
            marks.append(Mark("attempt", attempt["ts_us"], a, f"attempt {a} begins, at step {at}"))
    return sorted(marks, key=lambda mark: mark.at_us)


def _points(time_K: Any, value_K: Any) -> list[tuple[int, float]]:
    return [(int(at * 1e6), value) for at, value in zip(time_K.tolist(), value_K.tolist(), strict=True)
            if value == value]


# -- for Perfetto and chrome://tracing


def chrome_trace(run: RunDir) -> dict[str, object]:
    """The timeline as a trace in the JSON format of Chrome: names of processes and threads, then complete events,
    instants and counters by time, in microseconds since the first of them (`otherData.begin_us` says when that was)."""
    return as_trace(timeline(run))


def as_trace(of: Timeline) -> dict[str, object]:
    """`chrome_trace` of a timeline that was read."""
    begin = min([of.begin_us, *(counter.points[0][0] for counter in of.counters)]) if of.lanes else of.begin_us
    pids = {part: pid for pid, part in enumerate(dict.fromkeys(lane.part for lane in of.lanes), start=1)}
    named: list[dict[str, Any]] = []
    for part, pid in pids.items():
        named += [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": part}},
                  {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}]
    events: list[dict[str, Any]] = []
    for tid, lane in enumerate(of.lanes, start=1):
        named += [{"ph": "M", "name": "thread_name", "pid": pids[lane.part], "tid": tid, "args": {"name": lane.name}},
                  {"ph": "M", "name": "thread_sort_index", "pid": pids[lane.part], "tid": tid,
                   "args": {"sort_index": tid}}]
        events += [{"ph": "X", "name": bar.name, "cat": lane.part, "ts": bar.begin_us - begin,
                    "dur": bar.end_us - bar.begin_us, "pid": pids[lane.part], "tid": tid,
                    "args": {name: value for name, value in (("of", bar.of), ("about", bar.about))
                             if value not in (None, "")}} for bar in lane.bars]
    events += [{"ph": "i", "s": "g", "name": f"{mark.kind} {mark.of}", "cat": mark.kind, "ts": mark.at_us - begin,
                "pid": 1, "tid": 0, "args": {"about": mark.about}} for mark in of.marks]
    events += [{"ph": "C", "name": counter.name, "ts": at - begin, "pid": 1, "tid": 0, "args": {counter.unit: value}}
               for counter in of.counters for at, value in counter.points]
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": [*named, *events], "displayTimeUnit": "ms",
            "otherData": {"run_key": of.run_key, "begin_us": begin, "gaps": of.gaps}}
