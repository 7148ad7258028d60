"""A night after its runs: which of them is judged, against what, and that a verdict that is there stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.errors import ConfigError, LearnerDead
from rl_core.nightly.nights import Night, NightRun, put_night, run_keys
from rl_core.run_dir import put_if_absent, replace_file, to_json
from tasks.night_end import compare_night, training_failure
from tasks.night_files import TAG_NIGHT, TAG_PARENT, has_verdict, night_dir, night_of, night_tags, unfinished
from tasks.paths import run_dir
from tests.looking import small_run


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    """Two trained runs of a night that names its baseline, and the baseline."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    keys = run_keys("nightly-2026-11-30", 2)
    for key in ("monday", *keys):
        small_run(run_dir(key).root, key, bonus=0.5 * (key == keys[1]))
    asked = Night(key="nightly-2026-11-30", name="nightly", flow_run_id="f", scheduled_us=1, preset="tiny-cpu",
                  baseline="monday", register_version="never",
                  runs=tuple(NightRun(run_key=key, overrides={"seed": i}) for i, key in enumerate(keys)))
    assert put_night(night_dir(asked.key), asked)
    return asked


def test_the_best_run_is_judged_and_the_verdict_stands(night: Night) -> None:
    found = compare_night.fn(night)
    assert found.run_key == night.runs[0].run_key, "the first of equals"
    assert str(found.baseline) == "monday (named)" and found.verdict == "keep"
    widths = [one.differences[0].high - one.differences[0].low for one in found.compared]
    assert widths[0] == pytest.approx(widths[1] * 2.2414 / 1.96, rel=1e-3), "the best of two"
    assert any("largest held-out accuracy of 2 runs" in note for note in found.notes)
    again = compare_night.fn(replace(night, baseline="nobody"))
    assert str(again) == str(found) and has_verdict(night)


def test_a_named_baseline_that_is_gone_is_an_error(night: Night) -> None:
    with pytest.raises(ConfigError, match="baseline 'nobody': there is no such run"):
        compare_night.fn(replace(night, baseline="nobody"))
    with pytest.raises(ConfigError, match="baseline 'last-good-night': no night 'nightly' before this one"):
        compare_night.fn(replace(night, baseline="last-good-night"))
    assert not has_verdict(night)


def test_a_run_knows_its_night_and_its_parent_in_mlflow(night: Night) -> None:
    key = night.runs[1].run_key
    assert night_of(key) == night and night_of("monday") is None and night_of(night.key) is None
    assert night_tags(key) == {TAG_NIGHT: night.key} and night_tags("monday") == {}
    put_if_absent(night_dir(night.key).parent, to_json({"run_id": "4f"}))
    assert night_tags(key) == {TAG_NIGHT: night.key, TAG_PARENT: "4f"}


def test_a_night_waits_for_the_runs_that_are_not_completed(night: Night) -> None:
    first, second = (run_dir(run.run_key) for run in night.runs)
    replace_file(first.result, to_json({"status": "completed", "ended": {"reason": "steps"}}))
    replace_file(second.result, to_json({"status": "failed", "ended": None}))
    assert unfinished(night) == [night.runs[1]]


def test_a_failure_says_where_in_which_part_and_what_goes_on_with_it(night: Night) -> None:
    key = night.runs[1].run_key
    said = str(training_failure(night, key, LearnerDead("rank 1 is gone")))
    assert said.startswith(f"night {night.key}: ") and f" of run {key}, learner: LearnerDead: rank 1 is gone" in said
    assert said.endswith(f"Retry, or `headway rerun {key}`, goes on from there")
    said = str(training_failure(night, key, LearnerDead("rank 1 is gone\nthe end of learner-1.log:\nout of memory")))
    first, *log = said.splitlines()
    assert ": rank 1 is gone; Retry, or" in first and log == ["the end of learner-1.log:", "out of memory"]
