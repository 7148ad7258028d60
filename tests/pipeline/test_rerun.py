"""One run that fails in the middle: `headway rerun` finishes it, and a fork begins in its past.

The tests stand in the order of the starts, and each begins where the one before it ended.
"""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
import subprocess
import sys
from dataclasses import dataclass

import pytest

from rl_core.experience.audit import audit
from rl_core.experience.ledger import claimed_steps, read_claim
from rl_core.learner.learner import fold_claims
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import config_of, revisions
from rl_core.run_dir import RunDir, newest_attempt
from rl_core.run_identity import prompt_rows, read_identity
from rl_core.schedules import learning_rate
from tests.failing import Spoiled, written
from tests.runs import Command, Home, prefect_server

pytestmark = pytest.mark.slow
"""Five starts. `make chaos` runs it."""

KEY = "fails"
STEPS = 24
SMALL = (f"total_steps={STEPS}", "groups_per_step=4", "group_size=4", "validation.every=50", "checkpoint.every=4",
         "checkpoint.keep=20", "data.size=256", "data.validation=null", "model.warmup_steps=0",
         "learner.loss.entropy_coef=0.05")
"""A model without warm-up, which no reward moves: its entropy does."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The run as its first start left it."""

    command: Command
    step: int
    """The one that has a claim and no record."""
    records: dict[int, tuple[int, int]]
    """Step -> (when its record was written, by which attempt)."""
    claim: bytes


@pytest.fixture(scope="module")
def failed(home: Home) -> Failed:
    command = home.train(KEY, *SMALL)
    command.wait_for_step(6)
    spoiled = Spoiled(command.run)
    spoiled.spoil()
    assert command.wait(60) == 1, command.said
    assert "failed: ClaimedShardCorrupt" in command.out
    spoiled.mend()
    run, step = command.run, recorded_steps(command.run)[-1] + 1
    assert 7 <= step < STEPS and run.claim(step).exists()
    return Failed(command=command, step=step, records=written(run), claim=run.claim(step).read_bytes())


def test_a_rerun_finishes_the_run_and_does_nothing_again(home: Home, failed: Failed) -> None:
    command = home.start("rerun", KEY, "--json", key=KEY)
    assert command.wait() == 0, command.said
    assert (command.json["status"], command.json["steps"], command.err) == ("completed", STEPS, "")
    assert command.out.startswith("headway ") and f": rerun {KEY}\n" in command.out
    run = command.run
    now = written(run)
    assert {step: now[step] for step in failed.records} == failed.records
    assert {attempt for step, (_, attempt) in now.items() if step >= failed.step} == {2}
    assert run.claim(failed.step).read_bytes() == failed.claim
    assert list(run.records.glob("*divergent*")) == []
    assert fold_claims(str(run.root)) == read_record(run, STEPS - 1).weights_digest
    assert audit(run, n_prompts=prompt_rows(run)).violations == []


def test_twenty_random_steps_of_the_finished_run_replay_bit_for_bit(home: Home, failed: Failed) -> None:
    """Of both attempts; `retention.replay` is `all`."""
    assert config_of(failed.command.run, 0).retention.replay == "all"
    steps = sorted(random.Random(5).sample(range(STEPS), 20))
    assert steps[0] < failed.step <= steps[-1]
    before = digest_of(failed.command.run)
    replayed = home.call("replay", KEY, *(word for step in steps for word in ("--step", str(step))), "--json")
    assert replayed.process.returncode == 0, replayed.said
    assert [(one["step"], one["verdict"]) for one in replayed.json["steps"]] == [(step, "identical") for step in steps]
    assert all(one["differing"] == {} and one["compared"] > 20 for one in replayed.json["steps"])
    assert digest_of(failed.command.run) == before, "a replay writes nothing"


REFUSED = {
    "a key without a run": (("rerun", "nobody"), "run 'nobody': there is no such run"),
    "settings without a fork": (("rerun", KEY, "--set", "learner.lr=1"), "add --from-step N for a fork"),
    "a fork with another identity": (("rerun", KEY, "--from-step", "8", "--set", "seed=9", "--set", "group_size=2"),
                                     "group_size is 4, asked for 2; seed is 1, asked for 9"),
}


@pytest.mark.parametrize(("words", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_rerun_is_refused(home: Home, failed: Failed, words: tuple[str, ...], why: str) -> None:
    command = home.call(*words)
    assert command.process.returncode == 2, command.out
    assert command.err.startswith("error: ") and why in command.err
    assert sorted(path.name for path in (home.path / "runs").glob(f"*{KEY}*")) == [KEY]


def digest_of(run: RunDir) -> str:
    """Names, contents and times of everything in the tree."""
    facts = [f"{path} {path.lstat().st_mtime_ns} {path.read_bytes().hex() if path.is_file() else ''}"
             for path in sorted(run.root.rglob("*"))]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


@pytest.mark.slow
def test_a_fork_trains_on_from_a_step_of_the_past_and_leaves_the_run_alone(home: Home, failed: Failed) -> None:
    parent = failed.command.run
    before, origin = digest_of(parent), read_identity(parent)
    words = ("--from-step", "10", "--set", "learner.lr=2e-4", "--set", "total_steps=16", "--json")
    command = home.start("rerun", KEY, *words, key=f"{KEY}~1")
    assert command.wait() == 0, command.said
    assert f"{KEY}~1: from {KEY}, checkpoint 8, steps 8 to 9 replayed" in command.out
    assert (command.json["run_key"], command.json["steps"], command.err) == (f"{KEY}~1", 16, "")
    assert digest_of(parent) == before
    run = command.run
    assert recorded_steps(run) == list(range(16)) and list(run.records.glob("*divergent*")) == []
    weights = [[read_record(each, step).weights_digest for step in range(16)] for each in (parent, run)]
    assert [mine == theirs for mine, theirs in zip(*weights, strict=True)] == [True] * 10 + [False] * 6
    assert [read_claim(run, step).revision for step in (9, 10)] == [0, 1]
    assert [(one.from_step, one.changed["learner.lr"][1]) for one in revisions(run)] == [(10, 2e-4)]
    assert read_record(run, 12).metrics["train/learning_rate"] == learning_rate(12, config_of(run, 1))
    assert fold_claims(str(run.root)) == weights[1][-1]
    assert audit(run, n_prompts=prompt_rows(run)).violations == []
    assert newest_attempt(run) == newest_attempt(parent) + 1
    lineage = {"run_key": KEY, "run_uuid": origin.run_uuid, "step": 10}
    assert home.call("status", f"{KEY}~1", "--json").json["forked_from"] == lineage
    status, points = home.tracked(command.json["mlflow_run_id"])
    assert status == "FINISHED" and {step for name, step in points if name == "reward/mean"} == set(range(16))
    assert set(points.values()) == {1}
    with sqlite3.connect(home.path / "mlflow" / "mlflow.db") as database:
        tags = dict(database.execute("select key, value from tags where run_uuid = ?",
                                     (command.json["mlflow_run_id"],)))
    assert json.loads(tags["headway.forked_from"]) == lineage
    assert tags["headway.run_uuid"] == read_identity(run).run_uuid != origin.run_uuid


@pytest.mark.slow
def test_rollout_alone_fills_a_run_that_is_trained_later(home: Home) -> None:
    sets = [word for setting in (*SMALL, "total_steps=6", "staleness.hard_max=9") for word in ("--set", setting)]
    words = ("--groups", "30", "--preset", "tiny-cpu", *sets, "--run-key", "halves", "--json")
    rolled = home.start("rollout", *words, key="halves")
    assert rolled.wait() == 0, rolled.said
    assert "30 groups wait to be trained: headway train --run-key halves" in rolled.out
    run = rolled.run
    assert (recorded_steps(run), claimed_steps(run), rolled.json["steps"]) == ([], [], 0)
    report = audit(run, n_prompts=prompt_rows(run))
    assert (report.violations, report.rows["eligible"]) == ([], 30)
    trained = home.start("train", "--run-key", "halves", "--json", key="halves")
    assert trained.wait() == 0, trained.said
    assert recorded_steps(run) == list(range(6))
    ages = [read_record(run, step).metrics["staleness/max"] for step in range(6)]
    assert ages == list(range(6)), "all of it was sampled by the initial weights"
    assert audit(run, n_prompts=prompt_rows(run)).rows["claimed"] == 24


@pytest.mark.slow
def test_a_retry_by_prefect_goes_on_with_the_run(home: Home) -> None:
    command = home.train("retried", *SMALL)
    command.wait_for_step(6)
    spoiled = Spoiled(command.run)
    spoiled.spoil()
    assert command.wait(60) == 1, command.said
    spoiled.mend()
    before = written(command.run)
    with prefect_server(home) as env:
        retry = subprocess.run([sys.executable, "-m", "prefect", "flow-run", "retry", "retried", "--entrypoint",
                                "flows.train.train"], env=env, capture_output=True, text=True, timeout=180)
        assert retry.returncode == 0, (retry.stdout, retry.stderr)
    run = command.run
    now = written(run)
    assert recorded_steps(run) == list(range(STEPS)) and {step: now[step] for step in before} == before
    assert (newest_attempt(run), audit(run, n_prompts=prompt_rows(run)).violations) == (2, [])
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        flows = [state for (state,) in database.execute("select state_type from flow_run where name = ?", ("retried",))]
    assert flows == ["COMPLETED"]
    runs = [path.name for path in (home.path / "runs").iterdir()]
    assert [name for name in runs if name.startswith("tiny-cpu")] == [], "no other run was begun"
