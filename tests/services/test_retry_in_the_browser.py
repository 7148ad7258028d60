"""Retry, pressed on the page of a failed flow run in a real browser, completes the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_core.experience.audit import audit
from rl_core.experience.ledger import read_claim
from rl_core.learner.learner import fold_claims
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import newest_attempt
from rl_core.run_identity import prompt_rows
from tests.browser import chromium, open_prefect, pictured
from tests.failing import Spoiled, written
from tests.kept import SMALL, KeptHome, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.browser]

STEPS = 24


def test_retry_completes_a_run_that_failed(kept_home: KeptHome, tmp_path: Path) -> None:
    """Without a run key: the run has one of the flow run. The same claim for the failed step, and one MLflow run."""
    flow_run = kept_home.submit("train/adhoc", preset="tiny-cpu", overrides={**SMALL, "total_steps": STEPS})
    key = f"tiny-cpu-{flow_run[-12:]}"
    run = kept_home.run(key)
    wait_until(lambda: run.record(6).exists(), 180, "step 6")
    spoiled = Spoiled(run)
    spoiled.spoil()
    failed = kept_home.wait_for_state(flow_run, "FAILED")
    spoiled.mend()
    assert "ClaimedShardCorrupt" in failed["state"]["message"], failed["state"]
    before, step = written(run), recorded_steps(run)[-1] + 1
    claim, mlflow_run = run.claim(step).read_bytes(), json.loads(run.mlflow_run.read_text())["run_id"]
    assert 7 <= step < STEPS and kept_home.tracked(mlflow_run)[0] == "FAILED"

    with chromium() as page, pictured(page, tmp_path / "retry.png"):
        open_prefect(page, kept_home, f"/runs/flow-run/{flow_run}")
        page.get_by_text("Failed").first.wait_for()
        page.get_by_role("button", name="Open menu").first.click()
        page.get_by_role("menuitem", name="Retry").click()
        dialog = page.get_by_role("dialog").or_(page.get_by_role("alertdialog"))
        dialog.get_by_text("Retry Flow Run").wait_for()
        dialog.get_by_role("button", name="Retry").click()
        page.get_by_text("Flow run scheduled for retry").first.wait_for()
        page.goto("about:blank")  # drawing a flow run that goes on takes a core
        done = kept_home.wait_for_state(flow_run, "COMPLETED")
        open_prefect(page, kept_home, f"/runs/flow-run/{flow_run}")
        page.get_by_text("Completed").first.wait_for()

    assert done["id"] == flow_run and done["run_count"] == 2
    now = written(run)
    assert recorded_steps(run) == list(range(STEPS))
    assert {k: now[k] for k in before} == before, "steps before the failed one are not done again"
    assert {attempt for k, (_, attempt) in now.items() if k >= step} == {2} and newest_attempt(run) == 2
    assert run.claim(step).read_bytes() == claim and len(read_claim(run, step).groups) == SMALL["groups_per_step"]
    assert json.loads(run.mlflow_run.read_text())["run_id"] == mlflow_run
    status, points = kept_home.tracked(mlflow_run)
    assert status == "FINISHED" and set(points.values()) == {1}
    assert {k for name, k in points if name == "reward/mean"} == set(range(STEPS))
    assert fold_claims(str(run.root)) == read_record(run, STEPS - 1).weights_digest
    assert audit(run, n_prompts=prompt_rows(run)).violations == []
    assert [path.name for path in (kept_home.path / "runs").iterdir()] == [key]
