"""Whole runs whose groups are more than answers side by side: a greedy baseline beside them (remax), and sessions of
several trajectories."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rl_core.experience.ledger import read_claim
from rl_core.experience.reader import read_claim_rows, read_groups
from rl_core.observations import read_observation
from rl_core.records import read_record, recorded_steps
from rl_core.versions import read_versions
from tests.learning import same_again
from tests.runs import Home, ended

pytestmark = [pytest.mark.slow, pytest.mark.algorithms]

B, N, STEPS = 4, 4, 3
SMALL = (f"groups_per_step={B}", f"group_size={N}", "data.size=256", "data.validation=null", "checkpoint.every=2",
         "learner.warmup_steps=0", "sampling.max_new_tokens=8")


MINE = '''
def kinds(completion):
    """How many characters it has that differ."""
    return len(set(completion)) / 8

def again(session):
    """One more answer, with the first one in the question."""
    if len(session["answers"]) == 1:
        return session["prompts"][0] + " not " + session["answers"][0]
'''


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def test_a_run_against_greedy_answers_is_replayed_and_its_shards_train_another_one(home: Home, work: Path) -> None:
    run = ended(home.train("remax", *SMALL, f"total_steps={STEPS}", "learner.advantage.name=remax",
                           "reward=./mine.py:kinds", cwd=work))
    same_again(run, STEPS)
    for step in range(STEPS):
        rows = read_claim_rows(run, read_claim(run, step), rank=0, ranks=1, versions=read_versions(run))
        assert np.isfinite(rows.baseline_G).all() and len(rows.reward_N) == B * N, "the greedy answers are no data"
        metrics = read_record(run, step).metrics
        assert metrics["reward/greedy"] == pytest.approx(float(rows.baseline_G.mean()))
        assert metrics["train/loss_tokens"] == rows.length_N.sum() and metrics["train/grad_norm"] > 0
    seen = [read_observation(run, step).metrics for step in range(STEPS)]
    known = [one for one in seen if not math.isnan(one["rollout/greedy"])]
    assert known and all(0.0 < one["rollout/greedy"] < 0.5 for one in known), "one answer of five"
    assert all(one["rollout/wasted"] >= one["rollout/greedy"] for one in known)
    again = home.start("train", "--shards-from", "remax", "--run-key", "remax-again", "--set", "learner.lr=2e-3",
                       "--set", "total_steps=2", "--json", key="remax-again", cwd=work)
    assert recorded_steps(ended(again)) == [0, 1]
    amended = home.start("train", "--run-key", "remax", "--amend", "--set", "learner.advantage.name=grpo", "--set",
                         f"total_steps={STEPS + 1}", "--json", key="remax", cwd=work)
    assert recorded_steps(ended(amended)) == list(range(STEPS + 1)), "what a baseline stands beside trains without it"
    refused = home.start("train", "--run-key", "remax", "--amend", "--set", "learner.advantage.name=remax", "--set",
                         f"total_steps={STEPS + 2}", "--json", key="remax", cwd=work)
    ended(refused, 2)
    assert "run remax has sampled for grpo, without a greedy answer to each prompt" in refused.err


def test_a_run_whose_prompts_are_answered_in_sessions_counts_each_once_and_is_replayed(home: Home, work: Path) -> None:
    settings = (*SMALL, f"total_steps={STEPS}", "reward=./mine.py:kinds", "rollout.session=./mine.py:again",
                "learner.loss.aggregation=seq_mean_token_mean", "learner.minibatch_groups=2")
    run = ended(home.train("sessions", *settings, cwd=work))
    same_again(run, STEPS)
    for step in range(STEPS):
        claim = read_claim(run, step)
        rows = read_claim_rows(run, claim, rank=0, ranks=1, versions=read_versions(run))
        assert rows.session_N.tolist() == np.repeat(np.arange(B * N), 2).tolist(), "two trajectories each"
        for group in read_groups(run, claim):
            assert [answer["session"] for answer in group["responses"]] == [0, 0, 1, 1, 2, 2, 3, 3]
            for first, second in zip(group["responses"][::2], group["responses"][1::2], strict=True):
                assert first["reward"] == second["reward"] and first["prompt_ids"] == group["prompt_ids"]
                assert len(second["prompt_ids"]) > len(first["prompt_ids"]), "with the first answer in it"
        metrics = read_record(run, step).metrics
        assert metrics["rollout/trajectories"] == 2.0 and metrics["rollout/partial"] == 0.0
        assert metrics["reward/mean"] == pytest.approx(float(rows.reward_N[rows.first_N].mean()), abs=1e-6)
        assert metrics["train/loss_tokens"] == rows.length_N.sum() and metrics["train/grad_norm"] > 0
    audit = home.call("audit", "sessions", "--json")
    assert audit.process.returncode == 0, audit.said
    assert audit.json["positions"]["trained"] == STEPS * B
    page = work / "step.html"
    shown = home.call("inspect", "sessions", "--step", "1", "--html", str(page))
    assert shown.process.returncode == 0 and page.stat().st_size > 0, shown.said
    two_ranks = ended(home.train("sessions-of-two-ranks", *settings, "learner.ranks=2", "rollout.over_sampling=1",
                                 "total_steps=2", cwd=work))
    assert recorded_steps(two_ranks) == [0, 1]
