"""Whole runs on another run's shards: killed in the middle and finished by the same command; with another reward.

The tests stand in the order of the starts, and each begins where the one before it ended.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from rl_core.experience.audit import audit
from rl_core.experience.ledger import read_claim
from rl_core.learner.learner import fold_claims
from rl_core.offline import read_taken
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, newest_attempt
from rl_core.run_identity import prompt_rows, read_identity
from tests.runs import Command, Home, wait_until_gone

pytestmark = pytest.mark.slow
"""Four starts. `make chaos` runs it."""

KEY, AGAIN, OTHER = "sampled", "again", "other"
SMALL = ("total_steps=6", "groups_per_step=4", "group_size=4", "validation.every=50", "checkpoint.every=4",
         "data.size=256", "data.validation=null", "model.warmup_steps=0", "learner.loss.entropy_coef=0.05")
REWARD = """
def score(answer: str) -> float:
    return len(answer) / 8
"""


@pytest.fixture(scope="module")
def sampled(home: Home) -> RunDir:
    command = home.train(KEY, *SMALL)
    assert command.wait() == 0, command.said
    return command.run


def digest_of(run: RunDir) -> str:
    """Names, contents and times of everything in the tree."""
    facts = [f"{path} {path.lstat().st_mtime_ns} {path.read_bytes().hex() if path.is_file() else ''}"
             for path in sorted(run.root.rglob("*"))]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def again(home: Home, *sets: str, key: str = AGAIN, cwd: Path | None = None) -> Command:
    words = [word for setting in sets for word in ("--set", setting)]
    return home.start("train", "--shards-from", KEY, "--run-key", key, *words, "--json", key=key, cwd=cwd)


def test_what_does_not_fit_the_shards_is_refused_before_anything_starts(home: Home, sampled: RunDir) -> None:
    before = digest_of(sampled)
    for pair, why in {"total_steps=99": "use at most", "group_size=2": "group_size is 4, asked for 2"}.items():
        command = home.call("train", "--shards-from", KEY, "--run-key", AGAIN, "--set", pair)
        assert command.process.returncode == 2 and why in command.err, command.said
    planned = home.call("plan", "--shards-from", KEY, "--run-key", AGAIN, "--json").json
    assert planned["config"]["data"]["shards_from"] == KEY and planned["config"]["total_steps"] == 6
    assert planned["shards"].startswith(f"of run {KEY}: ") and planned["shards"].endswith("rewards kept")
    assert not home.run(AGAIN).root.exists() and digest_of(sampled) == before


def test_killed_in_the_middle_the_same_command_finishes_it(home: Home, sampled: RunDir) -> None:
    before, origin = digest_of(sampled), read_identity(sampled)
    sets = ("learner.lr=1e-3", "learner.loss.name=decoupled_ppo", "checkpoint.every=2")
    command = again(home, *sets)
    command.wait_for_step(2)
    command.process.kill()
    command.wait()
    command = again(home, *sets)
    assert command.wait() == 0, command.said
    assert "rollout-0" not in command.out and command.err == ""
    assert digest_of(sampled) == before
    run = command.run
    assert (newest_attempt(run), recorded_steps(run)) == (2, list(range(6)))
    assert not list(run.logs.glob("rollout-*")), "no rollout worker was started"
    claims = [read_claim(run, step) for step in range(6)]
    order = [(g.dataset_epoch, g.position) for claim in claims for g in claim.groups]
    assert order == sorted(order) and {claim.policy for claim in claims} == {"offline"}
    assert fold_claims(str(run.root)) == read_record(run, 5).weights_digest != read_record(sampled, 5).weights_digest
    report = audit(run, n_prompts=prompt_rows(run))
    assert report.violations == [] and report.origin is not None
    assert (report.origin["run_uuid"], report.origin["rescored"]) == (origin.run_uuid, False)
    status, points = home.tracked(command.json["mlflow_run_id"])
    assert status == "FINISHED" and {step for name, step in points if name == "reward/mean"} == set(range(6))
    with sqlite3.connect(home.path / "mlflow" / "mlflow.db") as database:
        tags = dict(database.execute("select key, value from tags where run_uuid = ?",
                                     (command.json["mlflow_run_id"],)))
    taken = read_taken(run)
    assert taken is not None
    assert json.loads(tags["headway.shards_from"]) == {"run_key": KEY, "run_uuid": origin.run_uuid,
                                                       "digest": taken.digest, "rescored": False}
    assert wait_until_gone(home, 30) == {}


def test_its_steps_replay_and_it_needs_the_other_run_no_more(home: Home, sampled: RunDir) -> None:
    aside = sampled.root.with_name("aside")
    sampled.root.rename(aside)
    try:
        replayed = home.call("replay", AGAIN, "--step", "1", "--step", "5")
        assert replayed.process.returncode == 0, replayed.said
        assert replayed.out.count("identical") >= 2
        held = home.call("audit", AGAIN)
        assert held.process.returncode == 0 and f"shards of run {KEY} (" in held.out
        assert home.call("status", AGAIN, "--json").json["shards_from"]["run_key"] == KEY
        frames = home.call("inspect", AGAIN, "--step", "1", "--json").json
        assert all(group["age"] is None for group in frames["groups"])
    finally:
        aside.rename(sampled.root)


def test_with_another_reward_every_answer_is_scored_anew(home: Home, sampled: RunDir, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    command = again(home, "reward=./reward.py:score", "total_steps=4", key=OTHER, cwd=tmp_path)
    assert command.wait() == 0, command.said
    assert "scored anew by ./reward.py:score" in command.out
    run = command.run
    assert {path.name.split("-")[0] for path in run.streams.iterdir()} == {"rescored"}
    report = audit(run, n_prompts=prompt_rows(run))
    assert report.violations == [] and report.origin is not None and report.origin["rescored"]
    assert read_record(run, 0).metrics["reward/mean"] > 0
    assert read_record(run, 0).metrics["rollout/length_mean"] == read_record(home.run(AGAIN), 0).metrics[
        "rollout/length_mean"], "the same answers"
    refused = home.start("train", "--run-key", OTHER, "--amend", "--set", "reward=exact", "--set", "total_steps=5",
                         cwd=tmp_path)
    assert refused.wait() == 2 and "the shards of this run are scored already" in refused.err
    shutil.rmtree(run.root)
