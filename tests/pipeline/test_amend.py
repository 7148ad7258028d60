"""A completed run that is amended: it goes on where it was, in the same MLflow run, and replays over the amendment."""

from __future__ import annotations

import json
import sqlite3

from rl_core.experience.audit import audit
from rl_core.experience.ledger import read_claim, read_end
from rl_core.learner.learner import fold_claims
from rl_core.metrics import names
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import config_of, current_revision
from rl_core.run_identity import prompt_rows
from rl_core.schedules import learning_rate
from tests.runs import Home

SMALL = ("total_steps=6", "groups_per_step=4", "group_size=4", "validation.every=50", "checkpoint.every=4",
         "data.size=256", "data.validation_size=16", "model.warmup_steps=0", "learner.loss.entropy_coef=0.05")
"""A model without warm-up, which no reward moves: its entropy does."""


def test_a_completed_run_is_made_longer_and_every_step_keeps_its_settings(home: Home) -> None:
    first = home.train("amended", *SMALL)
    assert first.wait() == 0, (first.out, first.err)
    done = home.call("train", "--run-key", "amended", "--amend", "--json")
    assert (done.process.returncode, done.json) == (0, first.json)
    assert "nothing to amend: no training setting differs from those of run amended" in done.out

    words = ("--amend", "--set", "total_steps=12", "--set", "staleness.bound=1", "--set", "learner.passes=2")
    second = home.start("train", "--run-key", "amended", *words, "--json", key="amended")
    assert second.wait() == 0, (second.out, second.err)
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
        flows = [state for (state,) in database.execute("select state_type from flow_run where name = 'amended'")]
    assert flows == ["COMPLETED", "COMPLETED"]
