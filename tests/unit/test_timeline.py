"""The timeline: what was recorded when, without overlap, without holes where the ledger has none, never invented."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.errors import ConfigError
from rl_core.experience.shards import ShardWriter
from rl_core.looking.recorded_spans import stages_of, states_of
from rl_core.looking.timeline import Bar, Lane, Timeline, chrome_trace, packed, timeline
from rl_core.metrics import IntervalLedger
from rl_core.pages.timeline import as_page, timeline_page
from rl_core.records import put_record, read_record
from rl_core.run_dir import RunDir, put_if_absent, read_json, to_json
from rl_core.spans import SPANS, as_rows, as_spans
from rl_core.types import Span, TrajectoryGroup
from tests.builders import make_group, make_run
from tests.looking import T0, record, small_run

T = T0 * 1_000_000
"""The run's first moment, microseconds."""


def groups_at(first: int, begins: Sequence[int], *, answered: int = 900, finished: int = 1000) -> list[TrajectoryGroup]:
    """A group dispatched at each of these moments after T, answered and finished so many microseconds later."""
    return [replace(make_group(first + i), dispatched_at_us=T + at, finished_at_us=T + at + finished,
                    meta={"answered_at_us": T + at + answered}) for i, at in enumerate(begins)]


def told(*spans: Span) -> dict[str, str]:
    return {SPANS: json.dumps(as_rows(spans))}


def land(writer: ShardWriter, groups: Sequence[TrajectoryGroup], *spans: Span) -> None:
    """A shard whose writer says this of its time."""
    writer.stated = lambda: told(*spans)
    writer.land(groups)


def span(name: str, begin: int, end: int, of: int | None = None) -> Span:
    return Span(name, T + begin, T + end, of)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two workers, two steps, a checkpoint behind them, a validation. Read by the tests, never changed."""
    run = make_run(tmp_path_factory.mktemp("timed") / "night")
    one = ShardWriter(run, "rollout-0", 1, {}, False)
    land(one, groups_at(0, [1000, 1000, 1500]), span("waiting", 0, 600), span("syncing", 600, 1000, 0),
         span("busy", 1000, 2500))
    land(one, groups_at(3, [2100, 2600]), span("landing", 2500, 2700, 0), span("busy", 2500, 2800),
         span("syncing", 2800, 3000, 1), span("busy", 3000, 3600))
    two = ShardWriter(run, "rollout-1", 1, {}, False)
    land(two, groups_at(5, [1200]), span("waiting", 100, 1200), span("busy", 1200, 2200))
    stages = [span("read", 2200, 2300, 0), span("build", 2300, 2350, 0), span("update", 2350, 2700, 0),
              span("publish", 2700, 2790, 1)]
    put_record(run, replace(record(0), ts_us=T + 2800, spans=(
        span("waiting", 500, 2200), span("busy", 2200, 2700, 0), span("syncing", 2700, 2790),
        span("busy", 2790, 2800, 0), span("publish", 510, 560, 0), *stages)))
    put_record(run, replace(record(1), ts_us=T + 4000, spans=(
        span("busy", 2800, 2810, 0), span("waiting", 2810, 3700), span("busy", 3700, 4000, 1))))
    last = (span("busy", 4000, 4010, 1), span("paused", 4010, 4500, 2))
    put_if_absent(run.checkpoint(2) / "manifest.json", to_json({"n": 2, "spans": as_rows(last)}))
    put_if_absent(run.validation(2), to_json({"step": 2, "v": 1, "n": 8, "greedy_accuracy": 0.5, "seconds": 0.001,
                                              "ts_us": T + 5000}))
    return run


def lanes_of(found: Timeline) -> dict[tuple[str, str], list[tuple[str, int, int, int | None]]]:
    return {(lane.part, lane.name): [(bar.name, bar.begin_us - T, bar.end_us - T, bar.of) for bar in lane.bars]
            for lane in found.lanes}


def others(gaps: list[str]) -> list[str]:
    """The gaps but for the claims, which these runs do not have."""
    return [gap for gap in gaps if "/ledger/" not in gap]


def overlapping(lane: Lane) -> list[tuple[Bar, Bar]]:
    return [(a, b) for a, b in pairwise(lane.bars) if b.begin_us < a.end_us]


# -- what is written down


class Clock:
    def __init__(self) -> None:
        self.ns = 5_000

    def __call__(self) -> int:
        return self.ns

    def pass_us(self, us: int) -> None:
        self.ns += us * 1000


def test_the_spans_of_a_ledger_are_its_seconds_without_holes_and_each_is_taken_once() -> None:
    clock = Clock()
    ledger = IntervalLedger(clock_ns=clock, wall_ns=lambda: T * 1000)
    clock.pass_us(10)
    for _ in range(3):  # answer after answer, one busy interval
        ledger.enter("busy")
        clock.pass_us(10)
    with ledger.during("syncing", 7):
        clock.pass_us(5)
    clock.pass_us(1)
    assert ledger.spans() == [span("waiting", 0, 10), span("busy", 10, 40), span("syncing", 40, 45, 7),
                              span("busy", 45, 46)]
    taken = ledger.take_spans()
    assert len(taken) == 4 and ledger.take_spans() == []
    clock.pass_us(4)
    taken += ledger.take_spans()
    assert all(a.end_us == b.begin_us for a, b in pairwise(taken))
    seconds: Counter[str] = Counter()
    for each in taken:
        seconds[each.name] += each.end_us - each.begin_us
    assert {name: us / 1e6 for name, us in seconds.items()} == {k: v for k, v in ledger.seconds().items() if v}


def test_a_state_that_was_written_down_in_pieces_or_twice_is_one() -> None:
    pieces = [span("busy", 4, 9, 1), span("busy", 0, 4, 1), span("waiting", 9, 12), span("busy", 0, 4, 1),
              span("busy", 12, 13, 1), span("busy", 13, 14, 2), span("read", 0, 2, 1), span("read", 0, 2, 1)]
    assert states_of(pieces) == [span("busy", 0, 9, 1), span("waiting", 9, 12), span("busy", 12, 13, 1),
                                 span("busy", 13, 14, 2)]
    assert stages_of(pieces) == [span("read", 0, 2, 1)]


def test_spans_are_rows_in_files_and_other_rows_are_refused() -> None:
    spans = (span("busy", 0, 4), span("swap", 4, 5, 3))
    assert as_spans(json.loads(json.dumps(as_rows(spans)))) == spans
    for wrong in ([["busy", 1]], [["busy", 1, 2.5]], ["busy"], [[1, 2, 3]], [["busy", 1, 2, 3, 4]]):
        with pytest.raises(ValueError, match="not a span"):
            as_spans(wrong)


def test_a_record_keeps_its_spans(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    kept = replace(record(0), spans=(span("busy", 0, 4, 0), span("waiting", 4, 5)))
    put_record(run, kept)
    assert read_record(run, 0).spans == kept.spans
    payload = read_json(run.record(0))
    del payload["spans"]
    run.record(0).write_bytes(to_json(payload))
    assert read_record(run, 0).spans == (), "a record of an earlier Headway"


# -- lanes


@pytest.mark.parametrize("seed", range(5))
def test_packed_bars_overlap_nowhere_and_take_as_few_rows_as_they_must(seed: int) -> None:
    rng = random.Random(seed)
    bars = [Bar("b", begin, begin + rng.randint(0, 40)) for begin in (rng.randint(0, 300) for _ in range(120))]
    rows = packed(bars)
    assert all(not overlapping(Lane("p", "l", row)) for row in rows)
    lasting = [bar for bar in bars if bar.end_us > bar.begin_us]
    assert Counter(bar for row in rows for bar in row) == Counter(lasting)
    depth = max(sum(bar.begin_us <= at < bar.end_us for bar in lasting) for at in range(341))
    assert len(rows) == depth


def test_every_part_has_its_lanes_with_what_was_recorded(timed: RunDir) -> None:
    found = timeline(timed)
    assert others(found.gaps) == [] and found.run_key == "night"
    lanes = lanes_of(found)
    assert list(lanes) == [
        ("learner", "state"), ("learner", "stages"), ("rollout-0", "engine"), ("rollout-0", "landing"),
        ("rollout-0", "groups 0"), ("rollout-0", "groups 1"), ("rollout-0", "groups 2"), ("rollout-1", "engine"),
        ("rollout-1", "groups 0"), ("validation", "validate")]
    assert lanes["learner", "state"] == [
        ("wait", 500, 2200, None), ("learn", 2200, 2700, 0), ("publish", 2700, 2790, None), ("learn", 2790, 2810, 0),
        ("wait", 2810, 3700, None), ("learn", 3700, 4010, 1), ("checkpoint", 4010, 4500, 2)]
    assert lanes["learner", "stages"] == [
        ("publish", 510, 560, 0), ("read", 2200, 2300, 0), ("build", 2300, 2350, 0), ("update", 2350, 2700, 0),
        ("publish", 2700, 2790, 1)]
    assert lanes["rollout-0", "engine"] == [
        ("wait", 0, 600, None), ("swap", 600, 1000, 0), ("generate", 1000, 2800, 0), ("swap", 2800, 3000, 1),
        ("generate", 3000, 3600, 1)], "what is generated has the version of the swap before"
    assert lanes["rollout-1", "engine"] == [("wait", 100, 1200, None), ("generate", 1200, 2200, None)]
    assert lanes["rollout-0", "landing"] == [("land", 2500, 2700, 0)]
    assert lanes["rollout-0", "groups 0"] == [
        ("generate", 1000, 1900, None), ("reward", 1900, 2000, None), ("generate", 2100, 3000, None),
        ("reward", 3000, 3100, None)], "a group's reward stands behind its answers, in one lane"
    assert lanes["validation", "validate"] == [("validate", 4000, 5000, 1)]


def test_no_bar_overlaps_another_of_its_lane_and_the_lanes_cover_what_the_ledger_says(timed: RunDir) -> None:
    found = timeline(timed)
    assert [overlapping(lane) for lane in found.lanes] == [[]] * len(found.lanes)
    written: Counter[str] = Counter()
    for step in (0, 1):
        for each in read_record(timed, step).spans:
            written[each.name] += each.end_us - each.begin_us
    drawn: Counter[str] = Counter()
    for name, begin, end, _ in lanes_of(found)["learner", "state"]:
        drawn[name] += end - begin
    assert (drawn["wait"], drawn["learn"]) == (written["waiting"], written["busy"] + 10), "and 10 of the checkpoint's"
    assert (drawn["publish"], drawn["checkpoint"]) == (written["syncing"], 490)
    first, last = found.lanes[0].bars[0], found.lanes[0].bars[-1]
    assert sum(drawn.values()) == last.end_us - first.begin_us, "no hole"


def test_moments_and_numbers_are_beside_the_lanes(timed: RunDir) -> None:
    found = timeline(timed)
    assert [(mark.kind, mark.at_us - T, mark.of) for mark in found.marks] == [("version", 560, 0), ("version", 2790, 1)]
    counters = {counter.name: counter for counter in found.counters}
    assert counters["reward/mean"].points == [(T + 2800, 0.0), (T + 4000, 0.0)]
    assert "rollout/in_flight" not in counters, "no observation says it"
    assert (found.begin_us, found.end_us) == (T, T + 5000)


def test_a_group_tells_what_became_of_it(tmp_path: Path) -> None:
    found = timeline(small_run(tmp_path / "small"))
    texts = {bar.about for lane in found.lanes for bar in lane.bars}
    assert any(re.fullmatch(r"e0-p2-t0: 4 answers, \d+ tokens, sampled by publication 0-1; trained in step 1, age 1",
                            text) for text in texts)
    assert any(text.endswith("; claimed in step 3, age 3") for text in texts)
    assert any(text.startswith("e0-p9-t0") and text.endswith("; dropped: stale") for text in texts)
    assert {bar.name for lane in found.lanes for bar in lane.bars} == {"group", "validate"}, \
        "where no moment between is written down, none is invented"
    assert Counter(mark.kind for mark in found.marks) == {"claim": 4}


def test_what_is_broken_is_a_gap_and_the_rest_is_shown(timed: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "broken")
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    writer.stated = lambda: {SPANS: '[["busy", 1]]'}
    writer.land(groups_at(0, [1000]))
    put_record(run, replace(record(0), spans=(span("busy", 0, 4, 0),)))
    put_record(run, record(1))
    run.record(1).write_text("{")
    (run.checkpoint(1)).mkdir(parents=True)
    found = timeline(run)
    record_gap, manifest_gap, shard_gap = others(found.gaps)
    assert record_gap.startswith(f"{run.record(1)}: not JSON")
    assert manifest_gap == f"{run.checkpoint(1) / 'manifest.json'}: absent"
    assert shard_gap.startswith("rollout-0, shard rollout-0-") and "not a span: ['busy', 1]" in shard_gap
    assert [(lane.part, len(lane.bars)) for lane in found.lanes] == [("learner", 1), ("rollout-0", 2)]


def test_two_processes_of_a_part_that_lived_at_once_have_a_lane_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for first, begin in ((0, 1000), (1, 1400)):
        land(ShardWriter(run, "rollout-0", 1, {}, False), groups_at(first, [begin]),
             span("busy", begin, begin + 900))
    engines = [lane for lane in timeline(run).lanes if lane.name.startswith("engine")]
    assert [(lane.name, len(lane.bars)) for lane in engines] == [("engine", 1), ("engine (2)", 1)]


# -- the trace


def test_the_trace_is_json_with_names_and_times_that_never_run_backwards(timed: RunDir) -> None:
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace(timed), allow_nan=False))
    events = trace["traceEvents"]
    named = [event for event in events if event["ph"] == "M"]
    assert {event["args"]["name"] for event in named if event["name"] == "process_name"} == {
        "learner", "rollout-0", "rollout-1", "validation"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named if event["name"] == "thread_name"}
    timed_events = [event for event in events if event["ph"] != "M"]
    assert events[:len(named)] == named
    assert [event["ts"] for event in timed_events] == sorted(event["ts"] for event in timed_events)
    assert timed_events[0]["ts"] == 0 and trace["otherData"]["begin_us"] == T
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(lane.bars) for lane in timeline(timed).lanes)
    assert all(event["dur"] > 0 and (event["pid"], event["tid"]) in threads for event in complete)
    swap = next(event for event in complete if event["name"] == "swap" and event["args"]["of"] == 1)
    assert (swap["ts"], swap["dur"], threads[swap["pid"], swap["tid"]]) == (2800, 200, "engine")
    assert Counter(event["ph"] for event in events) == {"M": 28, "X": 33, "i": 2, "C": 8}


def test_a_run_of_which_nothing_is_known_has_an_empty_trace_and_a_page_that_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert chrome_trace(run)["traceEvents"] == []
    assert "<canvas" in timeline_page(run)


# -- the page


def decoded(html: str) -> dict[str, Any]:
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


def test_the_page_holds_every_bar_as_five_numbers(timed: RunDir) -> None:
    found = timeline(timed)
    data = decoded(as_page(found))
    assert data["begin_us"] == T and data["length_us"] == 5000
    read = []
    for lane in data["lanes"]:
        at, bars = 0, []
        for since, lasts, name, of, _ in np.array(lane["bars"]).reshape(-1, 5).tolist():
            bars.append((data["names"][name], at + since, at + since + lasts, None if of < 0 else of))
            at += since + lasts
        read.append(((lane["part"], lane["name"]), bars))
    assert dict(read) == lanes_of(found)
    assert [mark[1:3] for mark in data["marks"]] == [[560, 0], [2790, 1]]


def test_what_a_file_says_is_text_on_the_page() -> None:
    hostile = "</script><script>alert(1)</script>"
    html = as_page(Timeline(hostile, [Lane(hostile, hostile, [Bar(hostile, 0, 1, None, hostile)])], [], [], [hostile]))
    assert "<script>alert" not in html and html.count("</script>") == 2
    assert decoded(html)["lanes"][0]["part"] == hostile


# -- the command


def test_the_command_writes_a_page_or_a_trace_and_refuses_the_rest(
        timed: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.timing import draw_timeline

    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    small_run(tmp_path / "runs" / "small")
    report = draw_timeline("small", str(tmp_path / "out" / "small.json"))
    assert json.loads((tmp_path / "out" / "small.json").read_text())["otherData"]["run_key"] == "small"
    assert report["spans"] == 14 and report["gaps"] == []
    draw_timeline("small", str(tmp_path / "small.html"))
    assert (tmp_path / "small.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match=r"--out '.*small.txt': a timeline is a file whose name ends in"):
        draw_timeline("small", str(tmp_path / "small.txt"))
    with pytest.raises(ConfigError, match="no such run"):
        draw_timeline("nobody", str(tmp_path / "small.html"))
    with pytest.raises(OSError, match=r"--out '.*small.html/x.json': nothing was written"):
        draw_timeline("small", str(tmp_path / "small.html" / "x.json"))
