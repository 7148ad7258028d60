"""A night after its runs: which of them is judged, against what, and that a verdict that is there stands."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal

from flows.command import INTERRUPTED
from flows.console import Console
from flows.ending import Flow, Start
from flows.finishing import _ended, finish
from flows.nightly import nightly, run_night
from flows.presets import settings_of
from rl_core.config import Config
from rl_core.errors import ConfigError, LearnerDead, NightFailed, RunIsAlive
from rl_core.nightly.nights import Night, NightRun, put_night, run_keys
from rl_core.run_dir import put_if_absent, replace_file, to_json
from tasks.night_end import compare_night, end_night, training_failure
from tasks.night_files import (
    TAG_NIGHT,
    TAG_PARENT,
    has_ended,
    has_verdict,
    night_dir,
    night_of,
    night_tags,
    night_to_finish,
    owned,
    put_ended,
    unfinished,
    verdict_lines,
    waits_for_verdict,
)
from tasks.paths import run_dir
from tests.looking import small_run
from tests.unit.test_launch import DONE, SUMMARY
from tests.unit.test_notifying import webhook


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
    assert said.endswith(f"Retry, or `headway rerun {night.key}`, goes on from there")
    said = str(training_failure(night, key, LearnerDead("rank 1 is gone\nthe end of learner-1.log:\nout of memory")))
    first, *log = said.splitlines()
    assert ": rank 1 is gone; Retry, or" in first and log == ["the end of learner-1.log:", "out of memory"]


def test_an_error_that_nobody_thought_of_is_told_with_its_place(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(night: Night, config: Config) -> None:
        raise LookupError("no such thing")

    monkeypatch.setattr("flows.nightly.open_matrix", broken)
    monkeypatch.setattr("tasks.night_end.tell_night", lambda markdown, what: None)
    with webhook() as (url, told), pytest.raises(NightFailed) as failed:
        monkeypatch.setenv("HOOK", url)
        run_night(replace(night, notify="env:HOOK"), Config())
    why = f"night {night.key}: training, flow: LookupError: no such thing; Retry, or `headway rerun {night.key}`, " \
          "goes on from there"
    assert str(failed.value) == why
    assert [(note["verdict"], note["reasons"]) for note in told] == [("failed", [why])]


# -- a rerun by the night's key

def trained(*keys: str) -> None:
    for key in keys:
        replace_file(run_dir(key).result, to_json({
            "status": "completed", "ended": {"step": 3, "reason": "steps", "left_over": 0}, "tracked": True,
            "summary": {"run_key": key}}))


def test_a_rerun_takes_the_key_of_a_night_and_the_run_of_one_that_was_begun(night: Night) -> None:
    first, second = (run.run_key for run in night.runs)
    assert night_to_finish(night.key) == night
    assert night_to_finish(first) is None and night_to_finish("monday") is None and night_to_finish("nobody") is None
    shutil.rmtree(run_dir(second).root)
    assert night_to_finish(night.key) == night and night_to_finish(first) is None
    with pytest.raises(ConfigError, match=rf"run '{second}': .* `headway rerun {night.key}` finishes the night"):
        night_to_finish(second)


def test_a_night_of_one_run_is_finished_as_a_night_where_the_run_was_never_begun(night: Night) -> None:
    alone = replace(night, key="alone-2026-11-30", runs=(NightRun(run_key="alone-2026-11-30", overrides={}),))
    assert put_night(night_dir(alone.key), alone)
    assert night_to_finish(alone.key) == alone
    small_run(run_dir(alone.key).root, alone.key)
    assert night_to_finish(alone.key) is None, "the run goes on, and the comparison behind it"


def test_a_run_that_is_begun_keeps_its_settings_and_another_has_those_of_the_night(night: Night) -> None:
    asked = replace(night, preset="gone.yaml", runs=(night.runs[0], NightRun(run_key="new", overrides={"seed": 7})))
    assert settings_of(asked, asked.runs[0])[1].seed == 1
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        settings_of(asked, asked.runs[1])
    preset, config = settings_of(replace(asked, preset="tiny-cpu"), asked.runs[1])
    assert (preset, config.seed) == ("tiny-cpu", 7)


def test_one_process_at_a_time_is_at_a_night(night: Night) -> None:
    with owned(night), pytest.raises(RunIsAlive, match=f"night {night.key}: another process is at it"), owned(night):
        pass
    with owned(night):
        pass


def test_a_verdict_is_not_yet_the_end_and_what_is_left_is_said(night: Night) -> None:
    """Registration and report come behind it: where they fail, a rerun goes on with them."""
    first, second = (run.run_key for run in night.runs)
    trained(first)
    assert not waits_for_verdict(first)
    assert verdict_lines(first) == [f"night {night.key}: 1 of 2 runs are trained; `headway rerun {night.key}` "
                                    "finishes it"]
    trained(second)
    compare_night.fn(night)
    assert has_verdict(night) and waits_for_verdict(first)
    put_ended(night)
    assert not waits_for_verdict(first) and verdict_lines(first)[0] == f"night {night.key}: keep"


def test_a_night_that_has_ended_is_shown_and_one_that_has_not_needs_a_server(
        night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "PREFECT__FLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(night_dir(night.key).root / "none.toml"))
    out = io.StringIO()
    start = Start(Console(out), None, True, True, verb="rerun")
    with pytest.raises(ConfigError, match=r"no Prefect server is kept .* `headway services up`, then the same"):
        finish(start, night)
    assert "0 of 2 runs are trained" in out.getvalue()
    with owned(night), pytest.raises(RunIsAlive):
        finish(start, night)
    best = compare_night.fn(night).run_key
    put_ended(night)
    replace_file(run_dir(best).result, to_json(DONE | {"summary": SUMMARY | {"run_key": best}}))
    with owned(night):  # which is looked at, not touched
        assert finish(start, night) == 0
    *words, last = out.getvalue().splitlines()
    assert f"  night {night.key}: keep" in words and json.loads(last)["run_key"] == best
    night_dir(night.key).ended.unlink()
    shutil.rmtree(run_dir(night.runs[1].run_key).root)
    with pytest.raises(ConfigError, match="tiny-gpu"):
        finish(start, replace(night, preset="tiny-gpu"))


# -- a night that is stopped

STOPS = {"SIGINT": KeyboardInterrupt(), "SIGTERM": TerminationSignal(15)}


@pytest.mark.parametrize(("name", "stop"), STOPS.items(), ids=STOPS)
def test_a_night_that_is_stopped_behind_its_training_is_cancelled_and_told(
        night: Night, monkeypatch: pytest.MonkeyPatch, name: str, stop: BaseException) -> None:
    def stopped(night: Night) -> None:
        raise stop

    monkeypatch.setattr("tasks.night_end.compare_night", compare_night.fn)
    monkeypatch.setattr("tasks.night_end.track_missed", stopped)
    monkeypatch.setattr("tasks.night_end.tell_night", lambda markdown, what: None)
    with webhook() as (url, told):
        monkeypatch.setenv("HOOK", url)
        ended = end_night(replace(night, notify="env:HOOK"))
    why = f"night {night.key}: stopped by {name} at its tracking; Retry, or `headway rerun {night.key}`, goes on " \
          "from there"
    assert isinstance(ended, State) and ended.is_cancelled() and ended.message == why
    assert [(note["verdict"], note["reasons"]) for note in told] == [("stopped", [why])]
    assert has_verdict(night) and not has_ended(night)


def test_a_rerun_that_is_stopped_behind_training_says_what_goes_on(night: Night) -> None:
    trained(*(run.run_key for run in night.runs))
    out = io.StringIO()
    start = Start(Console(out), None, True, True, verb="rerun")
    assert _ended(start, night, Flow("CANCELLED"), None) == INTERRUPTED
    *words, last = out.getvalue().splitlines()
    assert "stopped by SIGINT before the night was told; its runs are trained" in words
    assert f"  go on    headway rerun {night.key}" in words and json.loads(last)["status"] == "completed"


# -- Retry

def test_retry_of_a_night_that_was_begun_does_not_need_its_preset(night: Night, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    """Nor what it was asked for at first: what it has stored holds."""
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(night.flow_run_id))
    trained(*(run.run_key for run in night.runs))
    compare_night.fn(night)
    put_ended(night)
    told = nightly.fn(preset="gone.yaml", name="other")
    assert isinstance(told, dict) and (told["night"], told["verdict"]) == (night.key, "keep")


def test_retry_tells_that_a_run_that_is_not_begun_cannot_be(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = night.runs
    trained(first.run_key)
    shutil.rmtree(run_dir(second.run_key).root)
    replace_file(night_dir(night.key).night, to_json(asdict(replace(night, preset="gone.yaml", notify="env:HOOK"))))
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(night.flow_run_id))
    monkeypatch.setattr("tasks.night_end.tell_night", lambda markdown, what: None)
    with webhook() as (url, told), pytest.raises(ConfigError, match=r"gone\.yaml"):
        monkeypatch.setenv("HOOK", url)
        nightly.fn(preset="gone.yaml")
    assert [(note["night"], note["verdict"]) for note in told] == [(night.key, "failed")]
