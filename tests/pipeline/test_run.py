"""One short run from the command to MLflow, and everything that a person looks at afterwards."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest
from numpy.typing import NDArray

from rl_core.learner.learner import fold_claims
from rl_core.metrics import STATES, tracked_names
from rl_core.observations import observed_steps, read_observation
from rl_core.records import read_record, recorded_steps
from rl_core.run_identity import read_identity
from tests.runs import Command, Home, wait_until_gone

STEPS = 12
SUMMARY_KEYS = ["run_key", "status", "steps", "accuracy_start", "accuracy_end", "wall_s", "groups_trained",
                "groups_dropped", "staleness_max", "staleness_mean", "update_lag_mean", "samples_per_s",
                "mlflow_run_id"]


@pytest.fixture(scope="module")
def finished(home: Home) -> Command:
    command = home.train("short", f"total_steps={STEPS}", "validation.every=6", "checkpoint.every=5")
    assert command.wait() == 0, (command.out, command.err)
    return command


def test_the_last_line_is_the_summary(finished: Command) -> None:
    summary = finished.json
    assert list(summary) == SUMMARY_KEYS
    assert (summary["run_key"], summary["status"], summary["steps"]) == ("short", "completed", STEPS)
    assert summary["groups_trained"] == STEPS * 16
    assert 0 <= summary["staleness_mean"] <= summary["staleness_max"] <= 8
    assert finished.err == ""


def test_nothing_of_the_run_is_left_running(finished: Command, home: Home) -> None:
    assert wait_until_gone(home, 10) == {}


def test_the_first_line_and_the_stages_are_said(finished: Command) -> None:
    lines = finished.out.splitlines()
    assert lines[0].startswith("headway ")
    for stage in ("plan", "prefect", "ray", "model", "actors", "learner"):
        assert any(line.split()[:1] == [stage] and line.endswith(" s") for line in lines), stage


def test_every_step_has_its_record_and_the_weights_are_the_fold_of_the_claims(finished: Command) -> None:
    assert recorded_steps(finished.run) == list(range(STEPS))
    config = read_identity(finished.run).config
    assert fold_claims(str(finished.run.root), config) == read_record(finished.run, STEPS - 1).weights_digest


def test_audit_holds_and_inspect_and_status_read_the_directory(finished: Command, home: Home) -> None:
    audit = home.call("audit", "short", "--json")
    assert audit.process.returncode == 0, (audit.out, audit.err)
    assert audit.json["holds"] is True
    step = home.call("inspect", "short", "--step", "3", "--json").json
    assert len(step["groups"]) == 16
    for group in step["groups"]:
        assert group["prompt"].startswith("user\nsort ") and len(group["answers"]) == 8
        assert all(answer["reward"] in (0.0, 1.0) for answer in group["answers"])
    status = home.call("status", "short", "--json").json
    assert (status["state"], status["alive"], status["steps"]) == ("completed", False, STEPS)


def test_mlflow_has_one_point_per_metric_and_step(finished: Command, home: Home) -> None:
    run_id = finished.json["mlflow_run_id"]
    status, points = home.tracked(run_id)
    assert status == "FINISHED"
    per_step = [*tracked_names("learner"), *tracked_names("owner")]
    expected = {(name, k) for name in per_step for k in range(STEPS)}
    expected |= {(name, k) for name in tracked_names("validator") for k in (0, 6, 12)}
    assert points == dict.fromkeys(expected, 1)
    artifacts = {path.name for path in home.path.glob(f"mlflow/artifacts/{run_id}/artifacts/figures/*")}
    assert artifacts == {"learning-curve.png", "staleness.png", "timeline.png"}


def test_prefect_has_the_flow_with_named_tasks_and_artifacts(finished: Command, home: Home) -> None:
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        [(flow_run, state)] = database.execute("select id, state_type from flow_run where name = 'short'")
        tasks = dict(database.execute("select name, state_type from task_run where flow_run_id = ?", (flow_run,)))
        artifacts = {key for (key,) in database.execute("select key from artifact where flow_run_id = ?",
                                                        (flow_run,))}
    assert state == "COMPLETED"
    expected = {"set-up", "continuous-rollout", "report", *(f"train-step-{k}" for k in range(STEPS)),
                "validate-0", "validate-6", "validate-12", "checkpoint-5", "checkpoint-10", "checkpoint-12"}
    assert tasks == dict.fromkeys(expected, "COMPLETED")
    assert artifacts == {"progress", "summary", "mlflow-run"}


def test_the_learners_intervals_are_the_wall_time_between_its_records(finished: Command) -> None:
    """By three clocks: the records' time stamps, the interval behind samples/s, and what the ledger calls a step.

    The shares alone would sum to 1 whatever the ledger lost. From step 1 on: the first record looks up the commit.
    """
    records = [read_record(finished.run, k) for k in range(1, STEPS)]
    wall_s = np.diff([record.ts_us for record in records]) / 1e6
    metrics = [record.metrics for record in records[1:]]

    def of(name: str) -> NDArray[np.float64]:
        return np.array([each[name] for each in metrics])

    assert (16 * 8 / of("system/samples_per_s")).sum() == pytest.approx(wall_s.sum(), rel=0.05)
    in_step_s = (of("utilization/learner_busy") + of("utilization/learner_syncing")) * wall_s
    beside_s = float(np.median(in_step_s - of("system/step_s")))  # putting down the record before
    assert -0.005 <= beside_s <= 0.05 * np.median(of("system/step_s")) + 0.02
    assert sum(of(f"utilization/learner_{state}") for state in STATES) == pytest.approx(1.0)
    paused = [record.step for record in records if record.metrics["utilization/learner_paused"] > 0]
    assert paused == [5, 10], "behind each checkpoint"


def test_the_rollout_side_is_seen_busy_waiting_and_syncing_at_every_step(finished: Command) -> None:
    assert observed_steps(finished.run) == list(range(STEPS))
    seen = [read_observation(finished.run, k).metrics for k in range(STEPS)]
    share = {state: np.array([metrics[f"utilization/rollout_{state}"] for metrics in seen]) for state in STATES}
    assert sum(share.values()) == pytest.approx(1.0)  # and so none is NaN
    assert all(share[state].min() >= 0 for state in STATES)
    assert all(share[state].max() > 0 for state in ("busy", "waiting", "syncing"))


def test_the_same_command_again_is_told_that_the_run_is_completed(finished: Command, home: Home) -> None:
    again = home.train("short", f"total_steps={STEPS}", "validation.every=6", "checkpoint.every=5")
    assert again.wait(60) == 0, (again.out, again.err)
    assert again.json == finished.json
    assert recorded_steps(finished.run) == list(range(STEPS))


def test_other_identity_fields_are_refused_by_name(finished: Command, home: Home) -> None:
    other = home.train("short", f"total_steps={STEPS}", "group_size=4")
    assert other.wait(60) == 2
    assert "group_size is 8, asked for 4" in other.err
