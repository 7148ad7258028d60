"""Records and observations: written once, valid JSON, and what does not exist is NaN again when they are read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any, NoReturn

import pytest

from rl_core.errors import StaleAttempt
from rl_core.observations import put_observation, read_observation
from rl_core.records import put_record, read_record
from rl_core.run_dir import RunDir, json_values, put_if_absent, read_json, to_json
from rl_core.types import StepRecord, WeightVersion

RECORD = StepRecord(
    step=3, idx=3, attempt=1, claim_digest="c", weights_digest="w", env={"torch": "2"}, revision=0, ts_us=1,
    metrics={"reward/mean": 0.5, "train/ratio_drift": math.nan, "train/kl_proximal": math.inf},
    seconds={"update": 0.25, "since_update": math.nan},
    published=WeightVersion(v=4, step=4, idx=4, attempt=1, digest="w"))


def _no_json(word: str) -> NoReturn:
    raise AssertionError(f"{word} is no JSON")


def strict(data: bytes) -> Any:
    """What a reader that knows only JSON makes of it."""
    return json.loads(data, parse_constant=_no_json)


def test_a_record_is_json_and_read_back_with_nan_for_what_does_not_exist(run: RunDir) -> None:
    assert put_record(run, RECORD) is RECORD
    stored = strict(run.record(3).read_bytes())
    assert stored["metrics"] == {"reward/mean": 0.5, "train/ratio_drift": None, "train/kl_proximal": None}
    assert stored["seconds"] == {"update": 0.25, "since_update": None}
    found = read_record(run, 3)
    assert found.metrics["reward/mean"] == 0.5 and math.isnan(found.metrics["train/kl_proximal"])
    assert math.isnan(found.metrics["train/ratio_drift"]) and math.isnan(found.seconds["since_update"])
    assert replace(found, metrics=RECORD.metrics, seconds=RECORD.seconds) == RECORD


def test_a_record_says_what_each_data_source_and_each_reward_part_came_to(run: RunDir) -> None:
    by_source = {"sort": {"n": 4, "reward_mean": 0.5, "correct": math.nan, "length_mean": 2.0}}
    put_record(run, replace(RECORD, by_source=by_source, parts={"format": 0.25, "nothing": math.nan}))
    assert strict(run.record(3).read_bytes())["by_source"]["sort"]["correct"] is None
    found = read_record(run, 3)
    assert found.by_source["sort"]["n"] == 4 and math.isnan(found.by_source["sort"]["correct"])
    assert found.parts["format"] == 0.25 and math.isnan(found.parts["nothing"])


def test_a_record_from_before_there_were_sources_and_parts_is_read(run: RunDir) -> None:
    stored = {name: value for name, value in asdict(RECORD).items() if name not in ("by_source", "parts")}
    run.records.mkdir(parents=True)
    run.record(3).write_bytes(to_json(stored))
    assert (read_record(run, 3).by_source, read_record(run, 3).parts) == ({}, {})


def test_a_record_with_the_word_nan_is_still_read(run: RunDir) -> None:
    run.records.mkdir(parents=True)
    run.record(3).write_text(json.dumps({"format": 1, **asdict(RECORD)}))
    assert "NaN" in run.record(3).read_text()
    assert math.isnan(read_record(run, 3).metrics["train/ratio_drift"])
    assert read_record(run, 3).published == RECORD.published


def test_a_recomputed_record_with_other_weights_is_left_beside_the_stored_one(run: RunDir) -> None:
    put_record(run, RECORD)
    assert put_record(run, replace(RECORD, weights_digest="x", attempt=2)).weights_digest == "w"
    assert strict(run.divergent_record(3, 2).read_bytes())["weights_digest"] == "x"


def test_an_attempt_that_is_over_records_nothing(run: RunDir) -> None:
    put_if_absent(run.attempt(2), to_json({"attempt": 2}))
    with pytest.raises(StaleAttempt, match="attempt 1 is over, attempt 2 owns the run"):
        put_record(run, RECORD)
    assert not run.records.exists()
    second = replace(RECORD, attempt=2)
    assert put_record(run, second) is second
    with pytest.raises(StaleAttempt):
        put_record(run, replace(RECORD, weights_digest="x"))
    assert [path.name for path in run.records.iterdir()] == ["step-000000003.json"], "no divergence from it either"


def test_an_observation_is_json_and_read_back_with_nan(run: RunDir) -> None:
    assert put_observation(run, 3, {"rollout/wasted": math.nan, "rollout/in_flight": 12.0}, ts_us=7)
    assert strict(run.observation(3).read_bytes())["metrics"] == {"rollout/wasted": None, "rollout/in_flight": 12.0}
    found = read_observation(run, 3)
    assert math.isnan(found.metrics["rollout/wasted"]) and found.metrics["rollout/in_flight"] == 12.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_json_files_hold_null_for_every_number_that_json_does_not_know(run: RunDir, value: float) -> None:
    run.root.mkdir()
    run.status.write_bytes(to_json({"a": value, "b": [1.5, {"c": (value, True, "NaN")}]}))
    assert strict(run.status.read_bytes()) == {"format": 1, "a": None, "b": [1.5, {"c": [None, True, "NaN"]}]}
    assert read_json(run.status)["a"] is None


def test_values_that_json_knows_stay_as_they_are() -> None:
    payload = {"a": [1, 2.5, None, "x"], "b": {"c": False}}
    assert json_values(payload) == payload
