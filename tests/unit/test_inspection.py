"""What the read-only commands make of a run directory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.console import view_of
from flows.looking import show_audit, show_status
from rl_core.config import Config
from rl_core.experience.ledger import EndOfData, put_end
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.run_dir import RunDir, put_if_absent, replace_file, to_json
from rl_core.run_identity import check_inputs, open_identity
from rl_core.types import Outcome
from tasks.inspection import run_audit, run_status, summary_so_far
from tasks.paths import run_dir
from tests.builders import make_group


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """One pass over three prompts, of which two landed; an attempt whose last status has a number that is not there."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    made = run_dir("k")
    open_identity(made, "k", "tiny-cpu", Config.model_validate({"data": {"epochs": 1}}))
    check_inputs(made, {"data": "d"}, rows=3)
    put_if_absent(made.attempt(1), to_json({"attempt": 1}))
    ShardWriter(made, "w", 1, {}, False).land([make_group(0), make_group(1)])
    replace_file(made.status, to_json({"state": "training", "total_steps": 9, "metrics": {
        "reward/mean": 0.5, "rollout/tokens_per_s": math.nan}}))
    return made


def test_the_audit_knows_how_many_prompts_there_are(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_audit("k")["holds"]
    put_end(run, EndOfData(step=0, reason="data", left_over=2), revision=0, attempt=1)
    report = run_audit("k")
    assert report["positions"]["lost"] == 1
    assert report["violations"] == ["dataset epoch 0 position 2 is lost, but the data has ended"]
    assert show_audit("k", as_json=False) == 1
    assert "DOES NOT HOLD: 1 violations" in capsys.readouterr().out


def test_the_audit_counts_for_people_what_was_left_out_and_what_failed(
        run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    failed = replace(make_group(2), meta={"failures": 3, "failed": {"reward_error": 2, "engine_error": 1}})
    ShardWriter(run, "w2", 1, {}, False).land([failed])
    put_outcome(run, Outcome(group_id="e0-p0-t1", kind="failed", reason="group_deadline", error="", try_no=1,
                             position=0, dataset_epoch=0))
    show_audit("k", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "failed           3  1 engine_error, 2 reward_error: tries of answers in groups that landed" in lines
    assert "ended            1  1 group_deadline: tries of groups that have no row" in lines
    assert not any(line.startswith("filtered") for line in lines)


def test_the_audit_lists_what_its_options_ask_for(run: RunDir) -> None:
    def said(*options: str) -> list[str]:
        found = CliRunner().invoke(app, ["audit", "k", *options])
        assert found.exit_code == 0
        return found.output.splitlines()

    shard = f"{next(run.streams.iterdir()).name}/0"
    counted = said()
    assert counted[1:3] == ["positions        2  2 pending", "rows             2  2 eligible"]
    assert said("--prompts") == ["epoch 0 position 0        e0-p0-t0       pending",
                                 "epoch 0 position 1        e0-p1-t0       pending", "", *counted]
    assert said("--shards") == [f"{shard}  eligible: 2 eligible", "", *counted]
    report = json.loads(said("--shards", "--json")[-1])
    assert report["each_prompt"] is None and report["each_shard"] == [
        {"shard": shard, "state": "eligible", "steps": [], "rows": {"eligible": 2}, "reason": None}]


def test_a_number_that_does_not_exist_is_null_in_json_and_left_out_for_people(
        run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_status("k")["metrics"] == {"reward/mean": 0.5, "rollout/tokens_per_s": None}
    assert show_status("k", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["rollout/tokens_per_s"] is None
    assert show_status("k", as_json=False) == 0
    out = capsys.readouterr().out
    assert "reward      0.5" in out and "tokens/s" not in out


def test_the_console_sees_nan_again(run: RunDir) -> None:
    metrics = view_of(json.loads(run.status.read_text())).metrics
    assert metrics["reward/mean"] == 0.5 and math.isnan(metrics["rollout/tokens_per_s"])


def test_a_status_with_the_word_nan_is_still_read(run: RunDir) -> None:
    run.status.write_text('{"format": 1, "metrics": {"reward/mean": NaN}, "state": "training"}')
    assert run_status("k")["metrics"] == {"reward/mean": None}


def test_the_summary_of_a_broken_directory_has_all_keys_and_no_numbers(run: RunDir) -> None:
    assert summary_so_far("k", "failed", 1.5)["groups_trained"] == 0
    run.record(0).parent.mkdir()
    run.record(0).write_text("{")
    broken = summary_so_far("k", "failed", 1.5)
    assert {name: value for name, value in broken.items() if value is not None} == {
        "run_key": "k", "status": "failed", "wall_s": 1.5}
    assert "groups_trained" in broken
