"""The tracker against a real MLflow on sqlite: one point per metric and step, whatever is replayed."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.metrics import MAX_PARTS, MAX_SCALARS, METRICS, names, tracked_names
from rl_core.records import put_record
from rl_core.run_dir import RunDir, put_if_absent, read_json, to_json
from rl_core.types import StepRecord
from rl_core.uris import redact, redact_in
from tasks.destination import Destination, destination, flatten, resolved
from tasks.tracking import (
    TAG_CHANGED,
    TAG_RUN_KEY,
    TAG_RUN_UUID,
    TAG_TABLES,
    Status,
    Tracker,
    TrackingFailed,
    make_database,
    open_parent,
)
from tasks.tracking.inputs import tags_of
from tasks.tracking.mirror import CAUSE_CHARACTERS, TAG_CAUSE, TAG_TRACED, TAG_UNTRACED
from tasks.tracking.sampled import SHOWN
from tests.looking import T0, run_of_sessions, small_run

CONFIG = Config.model_validate({"isolated": True, "total_steps": 180})
TS_US = 1_790_000_000_000_000
DEADLINE_S = 60.0


def commit(run: RunDir, step: int, value: float) -> None:
    """A committed training step; the length of right answers does not exist in it."""
    metrics = {name: value + i for i, name in enumerate(names("learner"))} | {"rollout/length_right": math.nan}
    put_record(run, StepRecord(step=step, idx=step, attempt=1, claim_digest="c", weights_digest="w", metrics=metrics,
                               env={}, published=None, revision=0, seconds={}, ts_us=TS_US + step * 1_000_000))


def validate(run: RunDir, step: int, accuracy: float) -> None:
    put_if_absent(run.validation(step), to_json({
        "step": step, "v": step, "greedy_accuracy": accuracy, "sampled_accuracy": None, "mean_length": 5.5, "n": 256,
        "seconds": 0.25, "ts_us": TS_US + step * 1_000_000}))


def observed(value: float) -> dict[str, float]:
    return dict.fromkeys(names("owner"), value)


def tracker(run: RunDir, home: Path, config: Config = CONFIG, uuid: str = "u-1", **kwargs: Any) -> Tracker:
    return Tracker(run, config, destination(config, home, {}), run_uuid=uuid, run_key="nightly",
                   tags={"headway.commit": "abc", "prefect.flow_run_id": "p-1"}, **kwargs)


def points(home: Path) -> dict[tuple[str, int], int]:
    """How many points MLflow's database holds for each metric and step."""
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as db:
        rows = db.execute("select key, step, count(*) from metrics group by run_uuid, key, step").fetchall()
    return {(key, step): count for key, step, count in rows}


def query(home: Path, sql: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as db:
        return db.execute(sql).fetchall()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the module: making it costs seconds."""
    return tmp_path_factory.mktemp("home")


def test_a_run_that_is_killed_and_replayed_has_one_run_and_one_point_per_metric_and_step(tmp_path: Path) -> None:
    home, run = tmp_path / "home", RunDir(tmp_path / "run")
    figure = tmp_path / "learning-curve.svg"
    figure.write_text("<svg/>")

    first = tracker(run, home)
    for k in range(60):
        commit(run, k, k / 10)
    validate(run, 0, 0.4)
    first.start()
    first.observe(0, observed(1.0))
    assert first.flush(DEADLINE_S)
    assert len(points(home)) == 60 * len(tracked_names("learner")) + len(tracked_names("owner")) + len(
        tracked_names("validator"))
    # The owner dies here: `first` is never finished, and what it had committed meanwhile was not replayed by it.
    for k in range(60, 120):
        commit(run, k, k / 10)

    second = tracker(run, home)
    second.start()
    for k in range(120, 180):
        commit(run, k, k / 10)
        second.observe(k, observed(float(k)))
    validate(run, 180, 0.9)
    assert second.finish("FINISHED", DEADLINE_S, [figure])
    assert second.run_id == first.run_id == read_json(run.mlflow_run)["run_id"]

    third = tracker(run, home)  # a start that finds everything done
    third.start()
    assert third.finish("FINISHED", DEADLINE_S)

    counts = points(home)
    assert set(counts.values()) == {1}
    for name in tracked_names("learner"):
        assert sorted(step for key, step in counts if key == name) == list(range(180)), name
    for name in tracked_names("owner"):
        assert sorted(step for key, step in counts if key == name) == [0, *range(120, 180)], name
    for name in tracked_names("validator"):
        assert sorted(step for key, step in counts if key == name) == [0, 180], name
    assert {key for key, _ in counts} == {metric.name for metric in METRICS if metric.tracked}
    assert query(home, "select value, is_nan, timestamp from metrics where key = 'rollout/length_right' and step = 7"
                 ) == [(0.0, 1, (TS_US + 7_000_000) // 1000)]
    assert query(home, "select value from metrics where key = 'train/policy_loss' and step = 42") == [(4.2,)]
    assert query(home, "select count(*), max(status), max(name) from runs") == [(1, "FINISHED", "nightly")]
    artifacts = home / "mlflow" / "artifacts" / str(second.run_id) / "artifacts"
    assert sorted(p.relative_to(artifacts).as_posix() for p in artifacts.rglob("*") if p.is_file()) == [
        "config.yaml", "figures/learning-curve.svg"]
    first.finish("KILLED", DEADLINE_S)


def test_an_observation_that_cannot_be_read_holds_nothing_else_back(tmp_path: Path, home: Path) -> None:
    run = RunDir(tmp_path / "run")
    made = tracker(run, home, uuid="u-torn")
    for k in range(3):
        commit(run, k, 0.0)
        made.observe(k, observed(float(k)))
    run.observation(1).write_bytes(b"")  # what a power loss leaves
    made.start()
    assert made.flush(DEADLINE_S), made.trouble
    where = f"run_uuid = '{made.run_id}'"
    marker = tracked_names("owner")[0]
    assert query(home, f"select step from metrics where {where} and key = '{marker}' order by step") == [(0,), (2,)]
    assert query(home, f"select count(*) from metrics where {where} and key = 'reward/mean'") == [(3,)]
    run.observation(1).unlink()
    made.observe(1, observed(1.0))  # made up by a start
    assert made.finish("FINISHED", DEADLINE_S), made.trouble
    assert query(home, f"select step from metrics where {where} and key = '{marker}' order by step"
                 ) == [(0,), (1,), (2,)]


def tabulate(run: RunDir, step: int, text: str) -> None:
    """The table of answers beside a validation."""
    row = {"data_source": "sort", "prompt": "sort 21", "mode": "greedy", "text": text, "correct": 1.0,
           "extracted": None}
    put_if_absent(run.validation_table(step), to_json({"step": step, "rows": [row, row | {"mode": "sampled"}]}))


def test_the_answers_of_a_validation_are_a_table_of_mlflow_however_often_it_is_replayed(
        tmp_path: Path, home: Path) -> None:
    run = RunDir(tmp_path / "run")
    for step in (0, 20):
        tabulate(run, step, f"1{step}")
        validate(run, step, 0.5)
    tabulate(run, 40, "its validation was cut short")
    first = tracker(run, home)
    first.start()
    assert first.finish("KILLED", DEADLINE_S)
    tables = home / "mlflow" / "artifacts" / str(first.run_id) / "artifacts" / "validations"
    expected = {"columns": ["data_source", "prompt", "mode", "text", "correct", "extracted"],
                "data": [["sort", "sort 21", mode, "120", 1.0, None] for mode in ("greedy", "sampled")]}
    assert json.loads((tables / "step-000000020.json").read_text()) == expected
    (tables / "step-000000020.json").write_text("{")  # cut short
    written = (tables / "step-000000000.json").stat().st_mtime_ns
    validate(run, 40, 0.75)
    again = tracker(run, home)
    again.start()
    assert again.finish("FINISHED", DEADLINE_S)
    assert sorted(path.name for path in tables.iterdir()) == [f"step-0000000{step}.json" for step in ("00", "20", "40")]
    assert json.loads((tables / "step-000000020.json").read_text()) == expected
    assert (tables / "step-000000000.json").stat().st_mtime_ns == written
    [(shown,)] = query(home, f"select value from tags where run_uuid = '{again.run_id}' and key = '{TAG_TABLES}'")
    assert json.loads(str(shown)) == [{"path": f"validations/step-0000000{step}.json", "type": "table"}
                                      for step in ("00", "20", "40")]


def test_some_answers_of_a_validation_are_traces_with_a_span_for_each_turn_and_none_is_doubled(
        tmp_path: Path, home: Path) -> None:
    run = RunDir(tmp_path / "run")
    rows = [{"data_source": "sort", "prompt": f"sort {n}", "answer": f"{n}", "mode": "sampled", "text": f"<b>{n}</b>",
             "reward": n / 10, "correct": float(n % 2), "extracted": None, "length": 3, "finish": "stop"}
            for n in range(20)]
    put_if_absent(run.validation_table(20), to_json({"step": 20, "rows": rows}))
    validate(run, 20, 0.5)
    for _ in range(3):  # the table is the last one, so that each start writes step 20 again
        again = tracker(run, home, uuid="traces")
        again.start()
        assert again.finish("FINISHED", DEADLINE_S)
    mine = f"where request_id in (select request_id from trace_request_metadata where value = '{again.run_id}')"
    traces = query(home, f"select request_preview, response_preview, timestamp_ms from trace_info {mine} order by 1")
    assert traces == [(f"sort {n}", f"<b>{n}</b>", TS_US // 1000 + 20_000) for n in (0, 10, 13, 16, 3, 6)]
    of_trace = mine.replace("request_id in", "trace_id in")
    assert query(home, f"select name, count(*) from spans {of_trace} group by name order by name") == [
        ("turn 1", SHOWN), ("validation 20: sampled", SHOWN)]
    assert query(home, f"select name, value from assessments {of_trace} order by name, value") == [
        *(("correct", value) for value in ("0.0",) * 4 + ("1.0",) * 2),
        *(("reward", value) for value in ("0.0", "0.3", "0.6", "1.0", "1.3", "1.6"))]


def of_traces(tracker: Tracker) -> str:
    """Ids of the traces of its run, as SQL."""
    return f"(select request_id from trace_request_metadata where value = '{tracker.run_id}')"


def tag(home: Path, tracker: Tracker, key: str) -> str | None:
    found = query(home, f"select value from tags where run_uuid = '{tracker.run_id}' and key = '{key}'")
    return str(found[0][0]) if found else None


def test_some_trajectories_of_the_step_before_each_validation_are_traces_and_none_is_doubled(
        tmp_path: Path, home: Path) -> None:
    """Validations 0, 2 and 3: of steps 1 and 2, whose claims have two groups of four answers each."""
    from mlflow import MlflowClient

    run = small_run(tmp_path / "run")
    for start in ("first", "after one that died before it could say so", "that finds all there, and reads none again"):
        if start.startswith("that"):
            run.claim(2).write_text("{")
        again = tracker(run, home, uuid="training")
        again.start()
        assert again.finish("FINISHED", DEADLINE_S)
        assert (tag(home, again, TAG_TRACED), tag(home, again, TAG_UNTRACED)) == ("3", None), start
        if start == "first":
            MlflowClient(again.where.uri).delete_tag(str(again.run_id), TAG_TRACED)
    mine = of_traces(again)
    assert query(home, "select name, count(*), min(timestamp_ms), max(response_preview) from trace_info join spans on "
                       f"trace_id = request_id where request_id in {mine} and parent_span_id is null "
                       "group by name order by name") == [
        ("training 1", SHOWN, (T0 + 1) * 1000, "31"), ("training 2", SHOWN, (T0 + 2) * 1000, "31"),
        ("validation 3: greedy", 1, 0, "13")]
    assert query(home, f"select name, count(*) from spans where trace_id in {mine} group by name order by name") == [
        ("training 1", SHOWN), ("training 2", SHOWN), ("turn 1", 2 * SHOWN + 1), ("validation 3: greedy", 1)]
    of_training = f"{mine} and trace_id in (select request_id from trace_tags where value = 'training')"
    assert query(home, f"select name, value, count(*) from assessments where trace_id in {of_training} "
                       "group by name, value order by name, value") == [
        ("correct", "0.0", 8), ("correct", "1.0", 4), ("part_digits", "0.5", 4), ("part_digits", "1.0", 8),
        ("reward", "0.0", 4), ("reward", "0.25", 4), ("reward", "1.0", 4)]


def test_a_trajectory_says_what_it_got_who_sampled_it_and_where_it_landed(tmp_path: Path, home: Path) -> None:
    run = small_run(tmp_path / "run")
    one = tracker(run, home, uuid="facts")
    one.start()
    assert one.finish("FINISHED", DEADLINE_S)
    root, turn = spans_of(home, one, "training 2")[0]
    assert root["name"] == "training 2" and turn["name"] == "turn 1"
    assert root["mlflow.spanInputs"] == {"prompt": "user\nsort 31\nassistant\n", "answer": "4"}
    assert root["mlflow.spanOutputs"] == {"text": "13", "reward": 1.0, "correct": 1.0, "extracted": "13", "length": 2,
                                          "finish": "stop"}
    stream = root.pop("stream")
    assert stream.startswith("rollout-0-") and run.shard(stream, root["seq"]).exists()
    assert {name: root[name] for name in ("group", "session", "seq", "row", "versions", "age")} == {
        "group": "e0-p4-t0", "session": 0, "seq": 2, "row": 0, "versions": [1, 2], "age": 1}
    assert {name: turn[name] for name in ("length", "finish", "versions", "age")} == {
        "length": 2, "finish": "stop", "versions": [1, 2], "age": 1}
    assert turn["mlflow.spanInputs"]["messages"][0]["content"] == "user\nsort 31\nassistant\n"
    assert turn["mlflow.spanOutputs"]["choices"][0]["message"]["content"] == "13"
    tags = set(query(home, f"select key, value from trace_tags where request_id in {of_traces(one)}"))
    assert tags >= {("headway.group", "e0-p4-t0"), ("headway.version", "1, 2"), ("headway.kind", "validation")}


def spans_of(home: Path, tracker: Tracker, name: str) -> list[list[dict[str, Any]]]:
    """The spans of each trace of that name, the root first: names and attributes."""
    from mlflow.tracing.client import TracingClient

    uri = f"sqlite:///{home / 'mlflow' / 'mlflow.db'}"
    ids = query(home, f"select trace_id from spans where trace_id in {of_traces(tracker)} and name = '{name}'")
    traces = [TracingClient(uri).get_trace(str(trace_id)) for trace_id, in ids]
    found = [[{"name": span.name, **span.attributes} for span in trace.data.spans] for trace in traces]
    return sorted(found, key=lambda spans: (spans[0]["group"], spans[0]["session"]))


def test_a_session_of_several_trajectories_is_one_trace_with_a_span_for_each_in_order(
        tmp_path: Path, home: Path) -> None:
    one = tracker(run_of_sessions(tmp_path / "run"), home, uuid="sessions")
    one.start()
    assert one.finish("FINISHED", DEADLINE_S)
    two_turns, single = spans_of(home, one, "training 0")
    assert [span["name"] for span in two_turns] == ["training 0", "turn 1", "turn 2"]
    assert two_turns[0]["mlflow.spanOutputs"]["length"] == 3 and two_turns[0]["mlflow.spanOutputs"]["text"] == "13"
    assert [span["mlflow.spanInputs"]["messages"][0]["content"].splitlines()[-1] for span in two_turns[1:]] == [
        "assistant", "1 "]
    assert [span["name"] for span in single] == ["training 0", "turn 1"]


def test_shards_that_cannot_be_read_are_no_traces_and_a_tag_that_says_why(tmp_path: Path, home: Path) -> None:
    run = small_run(tmp_path / "run")
    [stream] = {key.rpartition("/")[0] for key in read_json(run.claim(2))["shard_digests"]}
    shard = run.shard(stream, 2)
    shard.unlink()
    one = tracker(run, home, uuid="unread-shards")
    one.start()
    assert one.finish("FINISHED", DEADLINE_S) and one.trouble is None
    why = tag(home, one, TAG_UNTRACED)
    assert why is not None and why.startswith("step 2: ") and shard.name in why
    assert tag(home, one, TAG_TRACED) == "3"
    assert len(spans_of(home, one, "training 1")) == SHOWN and spans_of(home, one, "training 2") == []


def test_the_data_sets_are_inputs_by_digest_and_source_and_no_row_of_them_is_copied(tmp_path: Path, home: Path) -> None:
    run, held_out = RunDir(tmp_path / "run"), tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "sort 21", "answer": "12"}\n{"prompt": "sort 91", "answer": "19"}\n')
    put_if_absent(run.inputs, to_json({"digests": {"data": "d" * 32}, "rows": 4096}))
    config = Config.model_validate({"isolated": True, "data": {
        "train": ["sort", {"path": "hf:owner/name:train", "weight": 2}], "validation": str(held_out)}})
    for _ in range(2):
        again = tracker(run, home, config, uuid="inputs")
        again.start()
        assert again.finish("FINISHED", DEADLINE_S)
    found = query(home, "select d.name, d.digest, dataset_source_type, dataset_source, dataset_profile, t.value from "
                        "datasets d join inputs i on i.source_id = d.dataset_uuid join input_tags t using (input_uuid) "
                        f"where i.destination_id = '{again.run_id}' order by t.value")
    (name, digest, kind, source, profile, context), validation = found
    assert (name, digest, kind, context) == ("sort, hf:owner/name:train", "d" * 32, "code", "training")
    assert json.loads(str(source)) == {"sources": [{"task": "sort", "weight": 1.0}, {
        "path": "owner/name", "split": "train", "weight": 2.0}]} and json.loads(str(profile)) == {"num_rows": 4096}
    assert validation[0::2] == ("held-out.jsonl", "local", '{"num_rows": 2}')
    assert json.loads(str(validation[3])) == {"uri": str(held_out)} and len(str(validation[1])) == 32
    artifacts = home / "mlflow" / "artifacts" / str(again.run_id)
    assert [path.name for path in artifacts.rglob("*") if path.is_file()] == ["config.yaml"]


def test_held_out_rows_that_cannot_be_read_leave_the_run_tracked(tmp_path: Path, home: Path) -> None:
    run = RunDir(tmp_path / "run")
    put_if_absent(run.inputs, to_json({"digests": {"data": "d" * 32}, "rows": 1}))
    config = Config.model_validate({"isolated": True, "data": {"validation": str(tmp_path / "gone.jsonl")}})
    commit(run, 0, 1.0)
    gone = tracker(run, home, config, uuid="unread")
    gone.start()
    assert gone.finish("FINISHED", DEADLINE_S) and gone.trouble is None
    assert query(home, f"select count(*) from inputs where destination_id = '{gone.run_id}'") == [(0,)]
    [(why,)] = query(home, f"select value from tags where run_uuid = '{gone.run_id}' and key = 'headway.data_unread'")
    assert "gone.jsonl" in str(why)


def test_the_first_and_the_newest_alarm_are_tags_whatever_is_replayed(tmp_path: Path, home: Path) -> None:
    run = RunDir(tmp_path / "run")

    def tags_behind(*steps: tuple[int, float]) -> dict[str, str]:
        for k, mismatch in steps:
            metrics = dict.fromkeys(names("learner"), 0.0) | {
                "train/mismatch_alarm": float(mismatch > 1e-3), "train/mismatch_current_abs": mismatch,
                "train/mismatch_bound": 1e-3}
            put_record(run, StepRecord(step=k, idx=k, attempt=1, claim_digest="c", weights_digest="w", metrics=metrics,
                                       env={}, published=None, revision=0, seconds={}, ts_us=TS_US + k))
        one = tracker(run, home, uuid="alarms")
        one.start()
        assert one.finish("FINISHED", DEADLINE_S)
        sql = f"select key, value from tags where run_uuid = '{one.run_id}' and key like 'headway.alarm%'"
        return {str(key): str(value) for key, value in query(home, sql)}

    assert tags_behind((0, 1e-6)) == {}
    first = {"headway.alarm": "step 1: mismatch 0.012 over 0.001"}
    assert tags_behind((1, 0.012), (2, 0.0), (3, 0.02)) == first | {
        "headway.alarm_newest": "step 3: mismatch 0.02 over 0.001"}
    again = first | {"headway.alarm_newest": "step 4: mismatch 0.05 over 0.001"}
    assert tags_behind((4, 0.05)) == tags_behind((5, 0.0)) == tags_behind() == again
    counts = query(home, "select count(*) from metrics where key = 'train/learning_rate' and run_uuid = "
                         "(select run_uuid from tags where key = 'headway.run_uuid' and value = 'alarms')")
    assert counts == [(6,)]


def test_tags_to_filter_by_are_the_runs_settings_and_what_its_caller_says(tmp_path: Path, home: Path) -> None:
    config = Config.model_validate({"isolated": True, "model": {"type": "local", "path": "/models/qwen"}, "learner": {
        "advantage": {"name": "rloo"}, "loss": {"name": "gspo"}}, "data": {"train": "/data/gsm8k.parquet"}})
    assert tags_of(config) == {"headway.model": "qwen", "headway.data": "gsm8k.parquet", "headway.engine": "torch",
                               "headway.algorithm": "rloo, gspo", "headway.reward": "exact"}
    one = tracker(RunDir(tmp_path / "run"), home, uuid="tags")
    one.start()
    assert one.finish("FINISHED", DEADLINE_S)
    tags = dict(query(home, f"select key, value from tags where run_uuid = '{one.run_id}'"))
    assert tags.items() >= {"headway.algorithm": "grpo, ppo_clip", "headway.data": "sort", "headway.model": "tiny",
                            "headway.commit": "abc", "prefect.flow_run_id": "p-1"}.items()


def test_what_is_tracked_is_grouped_so_that_two_runs_lie_over_each_other() -> None:
    """MLflow's charts make a section of what stands before the slash, and lay runs over each other by equal names."""
    tracked = [metric.name for metric in METRICS if metric.tracked]
    assert {name.partition("/")[0] for name in tracked} == {
        "train", "rollout", "staleness", "reward", "validation", "utilization", "weights", "system"}
    assert len(tracked) + MAX_PARTS <= MAX_SCALARS == 60


def test_params_are_written_once_and_a_changed_setting_becomes_a_tag(tmp_path: Path, home: Path) -> None:
    run = RunDir(tmp_path / "run")
    before = tracker(run, home)
    before.start()
    assert before.finish("KILLED", DEADLINE_S)
    changed = Config.model_validate({"isolated": True, "total_steps": 180, "checkpoint": {"every": 7}})
    after = tracker(run, home, changed)
    after.start()
    assert after.finish("FAILED", DEADLINE_S)
    where = f"where run_uuid = '{after.run_id}'"
    params = dict(query(home, f"select key, value from params {where}"))
    tags = dict(query(home, f"select key, value from tags {where}"))
    assert params == flatten(resolved(CONFIG))
    assert params["checkpoint.every"] == "20" and params["learner.lr"] == "1e-06" and params["staleness.bound"] == "2"
    assert tags[TAG_CHANGED] == '{"checkpoint.every": "7"}'
    assert tags[TAG_RUN_UUID] == "u-1" and tags[TAG_RUN_KEY] == "nightly"
    assert tags["headway.commit"] == "abc" and tags["prefect.flow_run_id"] == "p-1"
    assert query(home, f"select status from runs {where}") == [("FAILED",)]
    assert after.link is not None and after.link.endswith(f"/runs/{after.run_id}")


def test_a_start_that_died_before_it_stored_the_id_is_found_by_its_tag(tmp_path: Path, home: Path) -> None:
    run = RunDir(tmp_path / "run")
    where = destination(CONFIG, home, {})
    first = Tracker(run, CONFIG, where, run_uuid="u-2", run_key="k")
    first.start()
    assert first.finish("KILLED", DEADLINE_S)
    run.mlflow_run.unlink()
    second = Tracker(run, CONFIG, where, run_uuid="u-2", run_key="k")
    second.start()
    assert second.finish("FINISHED", DEADLINE_S)
    assert second.run_id == first.run_id
    assert read_json(run.mlflow_run)["run_id"] == first.run_id


def test_runs_of_other_uuids_are_not_mixed_up(tmp_path: Path, home: Path) -> None:
    where = destination(CONFIG, home, {})
    trackers = [Tracker(RunDir(tmp_path / uuid), CONFIG, where, run_uuid=uuid, run_key="same") for uuid in ("a", "b")]
    for one in trackers:
        one.start()
    assert all(one.finish("FINISHED", DEADLINE_S) for one in trackers)
    assert trackers[0].run_id != trackers[1].run_id


def test_trouble_never_stops_the_run_and_is_caught_up_with_when_it_is_over(tmp_path: Path, home: Path) -> None:
    """The trouble is a run that somebody deleted in MLflow, and restores later."""
    from mlflow import MlflowClient

    run, told, where = RunDir(tmp_path / "run"), list[str](), destination(CONFIG, home, {})
    first = Tracker(run, CONFIG, where, run_uuid="u-3", run_key="k")
    first.start()
    assert first.finish("KILLED", DEADLINE_S)
    client, run_id = MlflowClient(where.uri), str(first.run_id)
    client.delete_run(run_id)

    second = Tracker(run, CONFIG, where, run_uuid="u-3", run_key="k", report=told.append)
    second.start()
    started = time.monotonic()
    for k in range(5):
        commit(run, k, 1.0)
        second.observe(k, observed(1.0))
        second.wake()
    assert time.monotonic() - started < 1.0
    assert not second.flush(3.0)
    assert second.trouble is not None and f"mlflow runs restore --run-id {run_id}" in second.trouble
    assert len(told) == 1 and told[0].startswith(f"MLflow at {where}: ") and "training goes on" in told[0]

    client.restore_run(run_id)
    assert second.flush(DEADLINE_S)
    assert second.trouble is None and told[1:] == [f"MLflow at {where} is back and up to date"]
    assert second.finish("FINISHED", DEADLINE_S)
    assert query(home, "select count(*) from metrics where key = 'train/policy_loss' "
                       f"and run_uuid = '{run_id}'") == [(5,)]


CAUSE = "FailureBudgetSpent: the learner died 2 times\nthe end of learner-0.log:\n" + "out of memory\n" * 1000
ENDS: list[tuple[Status, str | None, str | None]] = [
    ("FAILED", CAUSE, CAUSE[:CAUSE_CHARACTERS]), ("FAILED", "OSError: no room", "OSError: no room"),
    ("FINISHED", None, None), ("FINISHED", None, None)]
"""How one start after the other ends, why, and what the tag is then."""


def test_why_a_start_failed_is_a_tag_until_one_completes_the_run(tmp_path: Path, home: Path) -> None:
    for status, why, tagged in ENDS:
        one = tracker(RunDir(tmp_path / "run"), home, uuid="caused")
        one.start()
        assert one.finish(status, DEADLINE_S, why=why)
        assert tag(home, one, TAG_CAUSE) == tagged, status
        assert query(home, f"select status from runs where run_uuid = '{one.run_id}'") == [(status,)]


@pytest.fixture
def impatient() -> Iterator[None]:
    """MLflow gives a locked database up after 0.2 s, where it would wait for 20."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def shortened(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any,
                  executemany: bool) -> tuple[str, Any]:
        return statement.replace("busy_timeout = 20000", "busy_timeout = 200"), parameters

    event.listen(Engine, "before_cursor_execute", shortened, retval=True)
    yield
    event.remove(Engine, "before_cursor_execute", shortened)


@contextmanager
def locked(home: Path) -> Iterator[sqlite3.Connection]:
    """Another writer holds the database until the end of the block, or its own rollback."""
    writer = sqlite3.connect(home / "mlflow" / "mlflow.db", isolation_level=None, check_same_thread=False)
    writer.execute("begin exclusive")
    try:
        yield writer
    finally:
        writer.rollback()
        writer.close()


@pytest.mark.usefixtures("impatient")
def test_a_database_that_another_writer_holds_is_tried_again_and_nothing_is_doubled(
        tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once while the run is made there, once between its steps."""
    run, told, done = RunDir(tmp_path / "run"), list[str](), 0
    make_database(destination(CONFIG, home, {}).uri)
    one = tracker(run, home, uuid="locked", report=told.append)
    for _ in range(2):
        with locked(home):
            for k in range(done, done + 3):
                commit(run, k, 1.0)
            if done == 0:
                one.start()
            assert not one.flush(1.5)
            assert one.trouble is not None and "database is locked" in one.trouble
        assert one.flush(DEADLINE_S) and one.trouble is None
        done += 3
    assert one.finish("FINISHED", DEADLINE_S)
    assert ["database is locked" in text for text in told] == [True, False] * 2 and "back and up to date" in told[-1]
    mine = "(select run_uuid from tags where key = 'headway.run_uuid' and value = 'locked')"
    assert query(home, f"select run_uuid, status from runs where run_uuid in {mine}") == [(one.run_id, "FINISHED")]
    assert query(home, "select step, count(*) from metrics where key = 'train/policy_loss' and run_uuid in "
                       f"{mine} group by step order by step") == [(k, 1) for k in range(done)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("impatient")
def test_who_waits_for_a_few_calls_waits_for_another_writer_up_to_a_deadline(
        tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = destination(CONFIG, home, {})
    make_database(where.uri)
    with locked(home) as writer:
        release = threading.Timer(1.0, writer.rollback)
        release.start()
        begun = time.monotonic()
        parent = open_parent(where, experiment="headway", key="patient", settings={"seed": 1})
        assert time.monotonic() - begun > 0.8
        release.join()
    assert query(home, "select run_uuid from tags where key = 'headway.matrix' and value = 'patient'") == [(parent,)]
    monkeypatch.setattr("tasks.tracking.client.LOCKED_S", 0.5)
    told = f"MLflow at {re.escape(str(where))}: database is locked by another writer for 0.5 s now; end it, then"
    with locked(home), pytest.raises(TrackingFailed, match=told):
        open_parent(where, experiment="headway", key="patient")


def test_a_new_database_stands_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, directory = f"sqlite:///{tmp_path}/mlflow/mlflow.db", tmp_path / "mlflow"

    class Interrupted:
        """MLflow, with one table of many made."""

        def __init__(self, tracking_uri: str) -> None:
            with sqlite3.connect(tracking_uri.removeprefix("sqlite:///")) as database:
                database.execute("create table _alembic_tmp_latest_metrics (key text)")

        def search_experiments(self, max_results: int) -> None:
            assert [path.suffix for path in directory.iterdir()] == [".tmp"]
            raise OSError("interrupted")

    with monkeypatch.context() as broken:
        broken.setattr("mlflow.MlflowClient", Interrupted)
        with pytest.raises(OSError, match="interrupted"):
            make_database(uri)
    assert list(directory.iterdir()) == []
    make_database(uri)
    made = directory / "mlflow.db"
    assert list(directory.glob("*.db*")) == [made] and list(directory.glob(".*")) == []
    with sqlite3.connect(made) as database:
        assert list(database.execute("select name from experiments")) == [("Default",)]
    before = made.stat().st_ino
    make_database(uri)
    assert made.stat().st_ino == before


def test_a_server_that_is_down_is_named(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        uri = f"http://127.0.0.1:{closed.server_port}"
    down = Tracker(RunDir(tmp_path / "run"), CONFIG, Destination(uri=uri, artifacts=None, why="test"),
                   run_uuid="u", run_key="k", report=lambda text: None)
    down.start()
    assert not down.finish("FINISHED", 6.0)
    assert down.trouble is not None and uri in down.trouble and down.run_id is None


class Hangs(BaseHTTPRequestHandler):
    """A server that takes the connection and never answers."""

    released = threading.Event()

    def do_GET(self) -> None:
        self.released.wait(30)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_finish_keeps_its_deadline_when_the_server_hangs(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hanging = Tracker(RunDir(tmp_path / "run"), CONFIG, Destination(
        uri=f"http://127.0.0.1:{server.server_port}", artifacts=None, why="test"), run_uuid="u", run_key="k")
    hanging.start()
    try:
        started = time.monotonic()
        assert not hanging.finish("FINISHED", 2.0)
        assert time.monotonic() - started < 4.0
    finally:
        Hangs.released.set()
        server.shutdown()
        server.server_close()


def test_finish_of_a_tracker_that_was_never_started_says_so(tmp_path: Path) -> None:
    assert not tracker(RunDir(tmp_path / "run"), tmp_path).finish("FAILED", 1.0)


def test_nothing_reaches_stdout_or_stderr_and_no_file_the_working_directory(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from rl_core.config import Config
from rl_core.run_dir import RunDir
from tasks.tracking import Tracker, destination
assert "mlflow" not in sys.modules
config = Config(isolated=True)
t = Tracker(RunDir(Path("../run")), config, destination(config, Path("../home")), run_uuid="u", run_key="k")
t.start()
raise SystemExit(0 if t.finish("FINISHED", 60) else 1)
"""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    for name in ("MLFLOW_LOGGING_LEVEL", "MLFLOW_DISABLE_TELEMETRY"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(cwd.iterdir()) == []


PLACES = {
    "isolated": ({"isolated": True}, "sqlite:////h/mlflow/mlflow.db (default)", "file:///h/mlflow/artifacts"),
    "ambient": ({}, "http://ambient:1 (MLFLOW_TRACKING_URI)", None),
    "set": ({"isolated": True, "tracking": {"uri": "http://set:2"}}, "http://set:2 (tracking.uri)", None),
    "database": ({"tracking": {"uri": "postgresql://me:secret@db/x"}}, "postgresql://me:***@db/x (tracking.uri)",
                 "file:///h/mlflow/artifacts"),
}


@pytest.mark.parametrize(("settings", "text", "artifacts"), PLACES.values(), ids=PLACES)
def test_destination_says_where_and_why(settings: dict[str, object], text: str, artifacts: str | None) -> None:
    place = destination(Config.model_validate(settings), Path("/h"), {"MLFLOW_TRACKING_URI": "http://ambient:1"})
    assert (str(place), place.artifacts) == (text, artifacts)


def test_a_bare_path_is_refused_with_the_field_and_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.uri is './mlruns'; write sqlite"):
        destination(Config.model_validate({"tracking": {"uri": "./mlruns"}}), Path("/h"), {})


NAMED = Config.model_validate({"tracking": {"uri": "env:HEADWAY_TRACKING"}})


@pytest.mark.parametrize("isolated", [False, True])
def test_the_variable_that_tracking_uri_names_holds_the_uri(isolated: bool) -> None:
    environ = {"HEADWAY_TRACKING": "postgresql://me:s3cr3t@db/x", "MLFLOW_TRACKING_URI": "http://ambient:1"}
    config = NAMED.model_copy(update={"isolated": isolated})
    place = destination(config, Path("/h"), environ)
    assert (place.uri, str(place)) == (environ["HEADWAY_TRACKING"], "postgresql://me:***@db/x (tracking.uri)")
    assert flatten(resolved(config))["tracking.uri"] == "env:HEADWAY_TRACKING"


HELD = {
    # what the variable holds -> why it is refused
    "nothing": (None, r"there is no variable HEADWAY_TRACKING .*\(got 'env:HEADWAY_TRACKING'\)"),
    "an empty text": ("", "or it is empty"), "another secret": ("s3cr3t", "holds no URI; write sqlite:////"),
    "a password that is not escaped": ("postgresql://me:s3cr3t#@db/x", "what is special in the password as %2F"),
    "no host": ("http://[s3cr3t", "holds no URI")}


@pytest.mark.parametrize(("value", "why"), HELD.values(), ids=HELD)
def test_a_variable_without_a_uri_is_named_and_what_it_holds_is_not_told(value: str | None, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^tracking.uri: .*{why}") as refused:
        destination(NAMED, Path("/h"), {} if value is None else {"HEADWAY_TRACKING": value})
    assert "s3cr3t" not in str(refused.value)


def test_passwords_reach_neither_params_nor_reports() -> None:
    uri = "postgresql://me:secret@db:5432/x"
    assert redact(uri) == "postgresql://me:***@db:5432/x"
    assert redact_in(f"cannot reach {uri}: secret is wrong", uri) == (
        "cannot reach postgresql://me:***@db:5432/x: *** is wrong")
    config = Config.model_validate({"tracking": {"uri": uri}})
    assert flatten(resolved(config))["tracking.uri"] == redact(uri)
