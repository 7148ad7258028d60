"""Whole runs with models beside the policy: each trains, says what it did, and is replayed bit by bit."""

from __future__ import annotations

import json
import math
import signal
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from rl_core.checkpoint import newest_whole
from rl_core.records import read_record, recorded_steps
from rl_core.roles.settings import TeacherConfig
from rl_core.rollout.rewards.code import OUTCOMES
from rl_core.tokenizer import VOCABULARY, write_tokenizer
from tests.judging import Judge, says
from tests.learning import same_again, write_model
from tests.runs import Home, ended

pytestmark = [pytest.mark.slow, pytest.mark.algorithms]

SMALL = ("groups_per_step=4", "group_size=4", "data.size=256", "data.validation=null", "checkpoint.every=2",
         "learner.warmup_steps=0")
STEPS = 4
RUNS: dict[str, tuple[str, ...]] = {
    # what is asked for, and the metrics that are numbers in every step
    "kl-in-the-loss": ("learner.kl={use: loss, coef: 0.1}", "learner.reference.refresh_every=2"),
    "kl-in-the-reward": ("learner.kl={use: reward, coef: 0.05, estimator: k1, target: 0.01, horizon: 100}",
                         "learner.reference.path=./teacher", "learner.passes=2"),
    "distilled-by-reverse-kl": ("learner.teacher={use: advantage, path: ./teacher}",),
    "distilled-by-the-loss": ("learner.teacher={use: loss, path: ./teacher, coef: 0.5, estimator: k1+}",
                              "learner.minibatch_groups=2"),
    "distilled-by-forward-kl": ("learner.teacher={use: forward_topk, path: ./teacher, top_k: 4}",
                                "learner.minibatch_groups=2"),
}
NUMBERS = {"kl-in-the-loss": ("train/kl_reference", "train/kl_beta", "train/reference_step"),
           "kl-in-the-reward": ("train/kl_reference", "train/kl_beta"),
           "distilled-by-reverse-kl": ("train/distillation",), "distilled-by-the-loss": ("train/distillation",),
           "distilled-by-forward-kl": ("train/distillation",)}


@pytest.fixture(scope="module")
def beside(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a teacher in it: what a short run has made of the tiny model."""
    place = tmp_path_factory.mktemp("beside")
    ended(home.train("teacher", *SMALL, "total_steps=2", "learner.lr=3e-3"))
    exported = home.call("export", "teacher", "--out", str(place / "teacher"))
    assert exported.process.returncode == 0, exported.err
    return place


def test_every_use_of_a_teacher_has_its_run() -> None:
    words = " ".join(word for settings in RUNS.values() for word in settings)
    uses = get_args(TeacherConfig.model_fields["use"].annotation)
    assert [use for use in uses if use != "none" and f"teacher={{use: {use}," not in words] == []


@pytest.mark.parametrize("key", RUNS)
def test_a_run_with_a_model_beside_the_policy_trains_and_is_replayed(home: Home, beside: Path, key: str) -> None:
    run = ended(home.train(key, *SMALL, f"total_steps={STEPS}", *RUNS[key], cwd=beside))
    same_again(run, STEPS)
    for step in range(STEPS):
        metrics = read_record(run, step).metrics
        assert all(math.isfinite(metrics[name]) for name in NUMBERS[key]), (step, metrics)
        assert math.isnan(metrics["critic/value_loss"]) and metrics["train/skipped_updates"] == 0.0
    last = read_record(run, STEPS - 1).metrics
    if key == "kl-in-the-loss":
        assert last["train/reference_step"] == 2.0
    if key == "kl-in-the-reward":
        assert (run.role("reference") / "config.json").is_file()
        assert read_record(run, 0).metrics["train/kl_reference"] != 0.0, "the policy is not its reference at the start"
    if "distilled" in key:
        assert (run.role("teacher") / "config.json").is_file() and last["train/distillation"] != 0.0


def test_a_critic_that_is_stopped_goes_on_from_its_checkpoint_bit_by_bit(home: Home) -> None:
    asked = ("learner.advantage={name: gae, lam: 0.95}", "learner.critic={lr: 1e-3, warmup_steps: 2}",
             "learner.kl={use: reward, coef: 0.01}", "learner.minibatch_groups=2", "total_steps=8")
    first = home.train("critic", *SMALL, *asked)
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGINT)
    ended(first, 130)
    run = ended(home.train("critic", *SMALL, *asked))
    same_again(run, 8)
    records = [read_record(run, step) for step in range(8)]
    assert len({record.attempt for record in records}) == 2
    assert records[0].weights_digest == records[1].weights_digest != records[2].weights_digest
    assert len({record.roles["critic"] for record in records}) == 8
    assert records[0].metrics["critic/explained_variance"] <= 1e-6  # all values are 0
    assert all(abs(record.metrics["critic/explained_variance"]) > 1e-3 for record in records[2:]), "they are not 0 now"
    saved = newest_whole(run)
    assert saved is not None and saved.state.n == 8 and "critic/head.weight" in saved.roles
    replayed = home.call("replay", "critic", "--steps", "6:8", "--json")
    assert replayed.process.returncode == 0, replayed.err
    assert all(before == now for one in replayed.json["steps"] for before, now in one["role_digests"].values())


def rates(handler: BaseHTTPRequestHandler, asked: dict[str, Any], number: int) -> None:
    """By how many digits of the answer stand in order; each seventh time it has nothing to say, each eleventh it
    refuses."""
    answer = asked["messages"][0]["content"].partition("Answer to rate:\n")[2].partition("\n\nSay in")[0]
    score = 10 * sum(a <= b for a, b in pairwise(answer)) / max(1, len(answer) - 1)
    reply = says("hm") if number % 7 == 0 else says(None, refusal="no") if number % 11 == 0 else says(
        f"as it is\nScore: {min(score, 10):.1f}")
    reply(handler)


def test_a_judge_scores_a_run_and_what_it_fails_at_is_counted(home: Home) -> None:
    judge = Judge([])
    judge.answer = rates
    try:
        run = ended(home.train("judged", *SMALL, f"total_steps={STEPS}", "reward=judge", "scoring.workers=4",
                               f"scoring.judge.url={judge.url}", "scoring.judge.right=1"))
    finally:
        judge.close()
    records = [read_record(run, step) for step in range(STEPS)]
    assert recorded_steps(run) == list(range(STEPS)) and len(judge.asked) > STEPS * 16
    for record in records:
        assert 0.0 < record.metrics["reward/mean"] <= 1.0
        assert record.parts["judge_score"] == pytest.approx(10 * record.metrics["reward/mean"], rel=1e-5)
    assert sum(record.parts["judge_nonsense"] for record in records) > 0.0
    assert sum(record.parts["judge_refused"] for record in records) > 0.0
    same_again(run, STEPS)


def test_a_run_that_no_judge_answers_is_refused_by_name(home: Home) -> None:
    judge = Judge([says("no idea")])
    try:
        command = home.train("unjudged", *SMALL, "reward=judge", f"scoring.judge.url={judge.url}")
        assert command.wait() != 0
    finally:
        judge.close()
    assert "reward judge: nonsense: no score in 'no idea'" in command.out + command.err
    assert len(judge.asked) == 3


def test_a_reward_model_scores_a_run(home: Home, tmp_path: Path) -> None:
    made = write_model(tmp_path / "scorer", vocab=len(VOCABULARY))
    model = Qwen3ForSequenceClassification.from_pretrained(made, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(made)
    write_tokenizer(made, 256)
    run = ended(home.train("scored", *SMALL, "total_steps=2", "reward=reward_model", "scoring.model.path=./scorer",
                           "scoring.model.squash=true", cwd=tmp_path))
    for step in range(2):
        metrics = read_record(run, step).metrics
        assert 0.0 < metrics["reward/mean"] < 1.0 and metrics["reward/std"] > 1e-4
        assert math.isnan(metrics["reward/correct"])


CODE_TESTS = {
    # an answer is some digits: a program that prints nothing, or no Python where it begins with a zero
    "prints nothing": {"inputs": ["1\n"], "outputs": [""]}, "prints a line": {"inputs": ["1\n"], "outputs": ["1"]},
    "runs": ["assert __name__ == '__main__'"]}


def test_code_scores_a_run_and_says_how_its_programs_ended(home: Home, tmp_path: Path) -> None:
    rows = [{"prompt": f"sort {digits}", "answer": json.dumps(tests)} for digits in ("8361", "5021", "9042", "7431")
            for tests in CODE_TESTS.values()]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = ended(home.train("code", *SMALL, "total_steps=3", "reward=code", "scoring.workers=2",
                           "data.train=problems.jsonl", cwd=tmp_path))
    records = [read_record(run, step) for step in range(3)]
    for record in records:
        assert sum(record.parts[f"ended_{name}"] for name in OUTCOMES) == pytest.approx(1.0)
        right = pytest.approx(record.parts["ended_right"])
        assert record.metrics["reward/mean"] == record.metrics["reward/correct"] == record.parts["passed"] == right
    seen = {name for name in OUTCOMES if any(record.parts[f"ended_{name}"] > 0.0 for record in records)}
    assert {"right", "wrong", "error"} <= seen <= {"right", "wrong", "error", "no_code"}
    same_again(run, 3)


def test_a_reference_of_another_vocabulary_is_refused_by_name_before_anything_starts(home: Home,
                                                                                    tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab=len(VOCABULARY))
    write_tokenizer(other, 256)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"7": ', '"seven": ').replace('"8": ', '"7": ')
                                          .replace('"seven": ', '"8": '))
    command = home.train("other", *SMALL, "learner.kl.use=loss", "learner.reference.path=./other", cwd=tmp_path)
    assert command.wait() != 0
    assert "learner.reference.path: has another vocabulary than model" in command.out + command.err
    assert not command.run.root.exists() or not command.run.records.exists()
