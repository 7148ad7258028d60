"""One run over three starts: only validated, trained by its stored settings, amended when it was completed.

The tests stand in the order of the starts, and each begins where the one before it ended.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_core.experience.audit import audit
from rl_core.experience.ledger import read_claim, read_end
from rl_core.learner.learner import fold_claims
from rl_core.metrics import names
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import config_of, current_revision
from rl_core.run_identity import prompt_rows
from rl_core.schedules import learning_rate
from rl_core.validation import read_table, read_validation, validated_steps
from tasks.measurement import measure, of_run, open_subject
from tests.runs import Command, Home

pytestmark = pytest.mark.slow
KEY = "starts"
SMALL = ("total_steps=6", "groups_per_step=4", "group_size=4", "validation.every=50", "checkpoint.every=4",
         "data.size=256", "data.validation_size=16", "model.warmup_steps=0", "learner.loss.entropy_coef=0.05",
         "data.validation=[sort, three.jsonl]", "validation.n=2")
"""A model without warm-up, which no reward moves: its entropy does."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The first two starts, and where they ran."""

    only: Command
    command: Command
    place: Path


@pytest.fixture(scope="module")
def trained(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("starts")
    rows = [json.dumps({"prompt": f"sort {text}", "answer": "".join(sorted(text))}) for text in ("21", "312", "4130")]
    (place / "three.jsonl").write_text("\n".join(rows) + "\n")
    only = home.train(KEY, *SMALL, "validation.only=true", cwd=place)
    assert only.wait() == 0, only.said
    assert recorded_steps(only.run) == [] and validated_steps(only.run) == [0]
    assert not only.run.streams.exists() or list(only.run.streams.iterdir()) == [], "no rollout worker"
    command = home.start("train", "--run-key", KEY, "--json", key=KEY, cwd=place)
    assert command.wait() == 0, command.said
    return Trained(only=only, command=command, place=place)


def test_a_start_that_only_validates_trains_nothing(trained: Trained) -> None:
    only = trained.only
    accuracy = round(read_validation(only.run, 0)["greedy_accuracy"], 6)
    assert (only.json["status"], only.json["steps"], only.json["accuracy_end"]) == ("completed", 0, accuracy)
    assert "validation.only: this start trained nothing" in only.out


def test_the_next_start_trains_by_the_stored_settings(home: Home, trained: Trained) -> None:
    command = trained.command
    assert (command.json["status"], command.json["steps"]) == ("completed", 6)
    assert validated_steps(command.run) == [0, 6]
    _, points = home.tracked(command.json["mlflow_run_id"])
    assert all(points[f"validation/source_{source}_accuracy", step] == 1 for source in ("sort", "three")
               for step in (0, 6))
    assert len(read_table(command.run, 6)) == 16 * 3


def files_of(command: Command) -> dict[Path, int]:
    """All but what services that end may still write."""
    ending = (command.run.services, command.run.logs)
    return {path: path.stat().st_mtime_ns for path in command.run.root.rglob("*")
            if path.is_file() and path.parent not in ending}


def test_measuring_the_run_again_gives_its_own_record_and_changes_nothing(
        home: Home, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    run, before = trained.command.run, files_of(trained.command)
    monkeypatch.setenv("HEADWAY_HOME", str(home.path))
    monkeypatch.chdir(trained.place)
    subject = of_run(KEY, None, {})
    measuring = open_subject(subject)
    report, table = measure(subject, measuring, lambda scored, total: None)
    measuring.close()
    assert files_of(trained.command) == before
    stored = read_validation(run, 6)
    same = {name: value for name, value in stored.items() if name in report and name != "seconds"}
    assert {name: report[name] for name in same} == same and table == read_table(run, 6)
    assert same["by_source"].keys() == {"sort", "three"} and same["sampling"]["n"] == 2


def test_a_completed_run_is_made_longer_and_every_step_keeps_its_settings(home: Home, trained: Trained) -> None:
    first = trained.command
    done = home.start("train", "--run-key", KEY, "--amend", "--json", key=KEY, cwd=trained.place)
    assert done.wait() == 0, done.said
    assert done.json == first.json
    assert f"nothing to amend: no training setting differs from those of run {KEY}" in done.out

    words = ("--amend", "--set", "total_steps=12", "--set", "staleness.bound=1", "--set", "learner.passes=2")
    second = home.start("train", "--run-key", KEY, *words, "--json", key=KEY, cwd=trained.place)
    assert second.wait() == 0, second.said
    told = "as revision 1, from step 6 on: learner.passes 1 -> 2, staleness.bound 2 -> 1, total_steps 6 -> 12"
    assert told in second.out
    assert (second.json["steps"], second.json["mlflow_run_id"]) == (12, first.json["mlflow_run_id"])

    run = second.run
    assert (current_revision(run), recorded_steps(run)) == (1, list(range(12)))
    assert [read_claim(run, step).revision for step in range(12)] == [0] * 6 + [1] * 6
    assert [read_claim(run, step).eta for step in (5, 6)] == ["2", "1"]
    ends = [read_end(run, revision) for revision in (0, 1)]
    assert [(end.step, end.reason) for end in ends if end is not None] == [(6, "steps"), (12, "steps")]
    rates = [read_record(run, step).metrics["train/learning_rate"] for step in range(12)]
    assert rates == [learning_rate(step, config_of(run, step // 6)) for step in range(12)]
    assert len({read_record(run, step).weights_digest for step in range(12)}) == 12
    assert fold_claims(str(run.root)) == read_record(run, 11).weights_digest
    report = audit(run, n_prompts=prompt_rows(run))
    assert (report.violations, report.recorded) == ([], 12)

    mlflow_status, points = home.tracked(second.json["mlflow_run_id"])
    assert mlflow_status == "FINISHED"
    assert {step for name, step in points if name == names("learner")[0]} == set(range(12))
    assert set(points.values()) == {1}
    with sqlite3.connect(home.path / "mlflow" / "mlflow.db") as database:
        tags = dict(database.execute("select key, value from tags where run_uuid = ?", (second.json["mlflow_run_id"],)))
    assert tags["headway.revision"] == "1"
    assert json.loads(tags["headway.amend.1"]) == {
        "from_step": 6, "learner.passes": [1, 2], "staleness.bound": ["2", "1"], "total_steps": [6, 12]}
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        flows = [state for (state,) in database.execute("select state_type from flow_run where name = ?", (KEY,))]
    assert flows == ["COMPLETED"] * 3
