"""The learner over real claims, real shards and a small real model."""

from __future__ import annotations

import math
import multiprocessing
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core import metrics
from rl_core.advantage_settings import GroupAdvantage
from rl_core.config import Config, CorrectionConfig, LearnerConfig, ScoringConfig
from rl_core.env_digest import differing_fields, environment
from rl_core.errors import ClaimedShardCorrupt, ConfigError, EngineMismatch, NonFiniteTraining, StaleAttempt
from rl_core.experience.ledger import void_step
from rl_core.learner import batch as stages
from rl_core.learner.learner import After, Learner, fold_claims
from rl_core.looking.recorded_spans import learner_spans, stages_of, states_of
from rl_core.loss_settings import PpoClipLoss
from rl_core.records import read_record
from rl_core.run_dir import RunDir, to_json
from rl_core.types import StepRecord
from rl_core.versions import read_versions
from rl_core.weights import digest_tensors, load_weights
from tests.learning import (
    all_by,
    answer_logprobs,
    claim_groups,
    meet_late,
    random_groups,
    rows_of,
    sampled_by,
    start_attempt,
    train_as_rank,
    write_model,
)


def settings(*, publish_every: int = 1, groups: int = 4, **learner) -> Config:
    base = {"lr": 1e-3, "warmup_steps": 0, "token_budget": 100}
    return Config(groups_per_step=groups, group_size=4, publish_every=publish_every, total_steps=20,
                  learner=LearnerConfig(**{**base, **learner}))


def new_run(tmp_path: Path, config: Config, steps: int = 3, name: str = "run", stock_behavior: bool = True) -> RunDir:
    """A run with a model and `steps` claims. Every claim's groups are sampled by the initial weights (version 0)."""
    run = RunDir(tmp_path / name)
    write_model(run.model)
    start_attempt(run)
    stock = AutoModelForCausalLM.from_pretrained(run.model)
    for step in range(steps):
        groups = [all_by(0, group) for group in random_groups(step, config.groups_per_step)]
        if stock_behavior:
            groups = [sampled_by(stock, group) for group in groups]
        claim_groups(run, config, step, groups)
    return run


def learner_of(run: RunDir, config: Config, attempt: int = 1) -> Learner:
    return Learner(root=str(run.root), config=config, attempt=attempt, rank=0, ranks=1, rendezvous="")


def started(run: RunDir, config: Config) -> Learner:
    learner = learner_of(run, config)
    learner.restore()
    learner.publish_current()
    return learner


def same(one: StepRecord | None, two: StepRecord | None) -> bool:
    """Equal records, NaN being equal to itself."""
    return one is not None and two is not None and to_json(asdict(one)) == to_json(asdict(two))


# -- numbers -----------------------------------------------------------------------------------------------------------


def reference_step(model, optimizer, groups, *, config: Config, minibatches, passes: int) -> list[float]:
    """A training step by the book: one sequence at a time through the stock model, grpo, ppo_clip, token mean."""
    answers = []
    for g, group in enumerate(groups):
        rewards = np.array([t.score.reward for t in group.trajectories])
        for t in group.trajectories:
            advantage = (t.score.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            answers.append((g, group.lease.prompt.token_ids_P.tolist(), t, advantage))
    cap = config.learner.correction.cap if config.learner.correction.weights != "none" else None
    proximal = [answer_logprobs(model, prompt, t.token_ids_L.tolist()) for _, prompt, t, _ in answers]
    losses = []
    for members in minibatches * passes:
        optimizer.zero_grad()
        tokens = sum(len(t.token_ids_L) for g, _, t, _ in answers if g in members)
        total = torch.zeros(())
        for (g, prompt, t, advantage), prox in zip(answers, proximal, strict=True):
            if g in members:
                ids = torch.tensor([[*prompt, *t.token_ids_L.tolist()]])
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1]
                policy = logits.log_softmax(-1).gather(-1, ids[0, len(prompt):, None]).squeeze(-1)
                ratio = (policy - prox).exp()
                loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
                if advantage < 0:
                    loss = torch.minimum(loss, torch.tensor(-advantage * 3.0, dtype=loss.dtype))
                if cap is not None:
                    loss = loss * (prox - torch.tensor(t.behavior_logprobs_L)).exp().clamp(max=cap)
                total = total + loss.sum() / tokens
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item())
    return losses


STEPS = {
    "one update": ({}, [[0, 1, 2, 3]], 1),
    "two passes of two minibatches": ({"passes": 2, "minibatch_groups": 2}, [[0, 1], [2, 3]], 2),
    "an uneven last minibatch": ({"minibatch_groups": 3}, [[0, 1, 2], [3]], 1),
    "truncated token weights": ({"correction": {"weights": "token_truncate", "cap": 1.05}}, [[0, 1, 2, 3]], 1),
}


@pytest.mark.parametrize(("options", "minibatches", "passes"), STEPS.values(), ids=STEPS.keys())
def test_a_step_changes_the_weights_as_a_plain_loop_over_the_stock_model_does(tmp_path, options, minibatches, passes):
    config = settings(**options)
    run = new_run(tmp_path, config, steps=0)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    groups = [sampled_by(model, all_by(0, group), noise=0.1) for group in random_groups(0)]
    claim_groups(run, config, 0, groups)
    learner = started(run, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = reference_step(model, optimizer, groups, config=config, minibatches=minibatches, passes=passes)
    record = learner.train(0)
    assert record is not None
    assert record.metrics["train/policy_loss"] == pytest.approx(np.mean(losses), rel=2e-4, abs=2e-7)
    weights, _ = learner.tensors()
    moved = 0.0
    before = dict(AutoModelForCausalLM.from_pretrained(run.model).named_parameters())
    for name, theirs in model.named_parameters():
        # AdamW scales all gradients to one size: where one is nearly 0, the order of its sum is a share of lr.
        np.testing.assert_allclose(weights[name], theirs.detach(), atol=5e-5, err_msg=name)
        assert (weights[name] - theirs.detach()).abs().mean() < 1e-7, name
        moved = max(moved, (theirs - before[name]).abs().max().item())
    assert moved > 5e-4


def test_the_result_does_not_depend_on_how_the_claim_is_cut_into_micro_batches(tmp_path):
    norms, losses = [], []
    for budget in (1, 40, 10_000):
        config = settings(token_budget=budget, loss=PpoClipLoss(aggregation="seq_mean_token_mean", entropy_coef=0.01))
        run = new_run(tmp_path, config, steps=1, name=f"run-{budget}")
        record = started(run, config).train(0)
        assert record is not None
        norms.append(record.metrics["train/grad_norm"])
        losses.append(record.metrics["train/policy_loss"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4, abs=1e-7)


def test_the_entropy_bonus_raises_the_entropy(tmp_path):
    found = []
    for coef in (0.0, 1.0):
        config = settings(loss=PpoClipLoss(entropy_coef=coef), passes=4)
        record = started(new_run(tmp_path, config, steps=1, name=f"run-{coef}"), config).train(0)
        assert record is not None
        found.append(record.metrics["train/entropy"])
    assert found[1] > found[0] + 0.05


def test_training_raises_the_logprob_of_rewarded_answers(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=1)
    learner = started(run, config)
    groups = random_groups(0)
    before = AutoModelForCausalLM.from_pretrained(run.model)
    learner.train(0)
    after = AutoModelForCausalLM.from_pretrained(run.model)
    after.load_state_dict(load_weights(run.weights(1), read_versions(run)[1]), strict=False)
    after.tie_weights()
    gains = {0.0: [], 1.0: []}
    for group in groups:
        for t in group.trajectories:
            prompt, answer = group.lease.prompt.token_ids_P.tolist(), t.token_ids_L.tolist()
            gain = answer_logprobs(after, prompt, answer).mean() - answer_logprobs(before, prompt, answer).mean()
            gains[t.score.reward].append(float(gain))
    assert np.mean(gains[1.0]) > 0.02 > -0.02 > np.mean(gains[0.0])


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_record_has_exactly_the_learners_metrics_and_their_values(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=2)
    learner = started(run, config)
    records = [learner.train(step) for step in range(2)]
    for record in records:
        assert record is not None
        metrics.check(record.metrics, "learner")
        shares = [record.metrics[f"utilization/learner_{state}"] for state in metrics.STATES]
        assert sum(shares) == pytest.approx(1.0)
    first, second = (record.metrics for record in records if record is not None)
    lengths = [len(t.token_ids_L) for group in random_groups(0) for t in group.trajectories]
    assert first["train/loss_tokens"] == sum(lengths)
    assert first["rollout/length_mean"] == pytest.approx(np.mean(lengths))
    assert (first["reward/mean"], first["reward/correct"], first["reward/std"]) == (0.5, 0.5, 0.5)
    assert (first["staleness/max"], second["staleness/max"], second["staleness/update_lag_mean"]) == (0.0, 1.0, 1.0)
    assert first["train/mismatch_current_abs"] < 1e-6 and math.isnan(first["train/mismatch_stale_abs"])
    assert math.isnan(second["train/mismatch_current_abs"]) and second["train/mismatch_stale_abs"] > 1e-3
    assert (first["train/ratio_max"], first["train/mismatch_alarm"], first["train/drift_alarm"]) == (1.0, 0.0, 0.0)
    assert math.isnan(first["train/ratio_drift"]), "a step of one update has no second pass to compare with"
    assert first["train/effective_samples"] == pytest.approx(1.0, abs=1e-6)
    assert 0.5 < first["weights/changed"] <= 1.0
    assert first["train/learning_rate"] == config.learner.lr
    assert 2.0 < first["train/entropy"] < math.log(97)
    assert records[0].by_source == {"sort": {"n": 16, "reward_mean": 0.5, "correct": 0.5,
                                             "length_mean": pytest.approx(np.mean(lengths))}}
    assert (first["system/proximal_s"], records[0].parts) == (0.0, {}), "a step of one update makes no proximal pass"
    times = [first[f"system/{name}_s"] for name in ("proximal", "update", "publish")]
    assert min(times[1:]) > 0.0 and sum(times) <= first["system/step_s"]
    assert first["system/waiting_s"] >= 0.0 and 0.0 < first["system/mfu"] < 1.0


def test_reward_parts_are_in_the_record_and_its_metrics(tmp_path):
    config = settings(groups=2)
    run = new_run(tmp_path, config, steps=0)
    stock = AutoModelForCausalLM.from_pretrained(run.model)
    groups = [sampled_by(stock, all_by(0, group)) for group in random_groups(0, 2)]
    groups = [replace(group, trajectories=tuple(
        replace(t, score=replace(t.score, parts={"is_short": j / 4, **({"late": 3.0} if g else {})}))
        for j, t in enumerate(group.trajectories))) for g, group in enumerate(groups)]
    claim_groups(run, config, 0, groups)
    record = started(run, config).train(0)
    assert record is not None
    assert record.parts == {"is_short": 0.375, "late": 3.0}
    assert record.metrics["reward/part_is-short_mean"] == 0.375 and record.metrics["reward/part_late_mean"] == 3.0
    metrics.check(record.metrics, "learner")


WEIGHTED = {"parts": [{"part": "len", "reward": "./mine.py:length", "weight": -0.01}]}


def test_a_step_under_gdpo_learns_from_weighted_rewards_at_their_weights(tmp_path):
    """As from the same parts by name, and not as from their sum at weight 1."""
    def trained(name, scoring=None, **weights):
        config = settings(groups=2, advantage={"name": "gdpo", "parts": [
            {"part": part, "weight": weight} for part, weight in weights.items()]})
        config = config.model_copy(update={"scoring": ScoringConfig.model_validate(scoring or {})})
        run = new_run(tmp_path, config, steps=0, name=name)
        stock = AutoModelForCausalLM.from_pretrained(run.model)
        claim_groups(run, config, 0, [replace(group, trajectories=tuple(
            replace(t, score=replace(t.score, parts={"main": t.score.reward, "len": float(len(t.token_ids_L)),
                                                     "len.of": float(j)}))
            for j, t in enumerate(group.trajectories)))
            for group in (sampled_by(stock, all_by(0, one)) for one in random_groups(0, 2))])
        return started(run, config).train(0).weights_digest

    assert trained("weighted", WEIGHTED) == trained("named", main=1.0, len=-0.01)
    assert trained("again", WEIGHTED) != trained("ones", main=1.0, len=1.0)


def test_a_proximal_pass_takes_its_time_and_counts_in_the_flops(tmp_path):
    config = settings(passes=2, peak_tflops=1e-6)
    run = new_run(tmp_path, config, steps=1)
    learner = started(run, config)
    record = learner.train(0)
    assert record is not None
    seconds = record.metrics["system/proximal_s"] + record.metrics["system/update_s"]
    assert record.metrics["system/proximal_s"] > 0.0
    groups = random_groups(0)
    prompts = [len(group.lease.prompt.token_ids_P) for group in groups]
    tokens = sum(prompts) + sum(len(t.token_ids_L) for group in groups for t in group.trajectories)
    pairs = sum(p * p / 2 + sum(p * (a := len(t.token_ids_L)) + a * a / 2 for t in group.trajectories)
                for p, group in zip(prompts, groups, strict=True))
    weights, _ = learner.tensors()  # tied: the embeddings are the head
    parameters = sum(tensor.numel() for tensor in weights.values())
    flops = (3 * 2 + 1) * (2 * parameters * tokens + 4 * 2 * 64 * pairs)
    assert record.metrics["system/mfu"] == pytest.approx(flops / (seconds * 1e6), rel=1e-6)


def test_with_several_updates_the_proximal_pass_agrees_with_the_first_update(tmp_path):
    config = settings(passes=2)
    record = started(new_run(tmp_path, config, steps=1), config).train(0)
    assert record is not None
    assert record.metrics["train/ratio_drift"] <= 1e-6
    assert record.metrics["train/ratio_max"] > 1.001
    assert record.metrics["train/mismatch_current_abs"] < 1e-6


def test_a_step_publishes_its_weights_and_the_record_says_so(tmp_path):
    config = settings(publish_every=2)
    run = new_run(tmp_path, config, steps=4)
    learner = started(run, config)
    records = [learner.train(step) for step in range(4)]
    assert [r and r.published and (r.published.v, r.published.step, r.published.idx) for r in records] == [
        None, (1, 2, 1), None, (2, 4, 2)]
    for record in (records[1], records[3]):
        assert record is not None and record.published is not None
        assert record.weights_digest == record.published.digest
        tensors = load_weights(run.weights(record.published.v), record.published)
        assert digest_tensors(tensors.items()) == record.published.digest
    assert same(read_record(run, 3), records[3])


def test_records_and_checkpoints_say_where_the_time_of_the_learner_went(tmp_path):
    config = settings(publish_every=2)
    run = new_run(tmp_path, config, steps=3)
    learner = started(run, config)
    for step in range(3):
        learner.train(step)
    learner.checkpoint()
    spans = learner_spans(run, [read_record(run, step) for step in range(3)])
    states = states_of(spans)
    assert all(a.end_us == b.begin_us for a, b in pairwise(states)), "no hole"
    shown = [(span.name, span.of) for span in states if span.name != "waiting"]
    assert shown == [("syncing", None), ("busy", 0), ("busy", 1), ("syncing", None), ("busy", 1), ("busy", 2),
                     ("paused", 3)]
    told_s, age_s = (states[-1].end_us - states[0].begin_us) / 1e6, sum(learner.status()["seconds"].values())
    assert told_s <= age_s < told_s + 5
    stages = stages_of(spans)
    assert [span.name for span in stages] == ["publish", *["read", "build", "update", "publish"] * 3]
    assert [span.of for span in stages if span.name == "publish"] == [0, None, 1, None], "every second step publishes"
    assert all(a.end_us <= b.begin_us for a, b in pairwise(stages))
    for step in range(3):
        mine = [span for span in stages if span.of == step and span.name == "update"]
        seconds = read_record(run, step).seconds["update"]
        assert [(span.end_us - span.begin_us) / 1e6 for span in mine] == [pytest.approx(seconds, abs=1e-5)]


# -- masks -------------------------------------------------------------------------------------------------------------


def test_tokens_older_than_the_limit_leave_the_loss_and_the_denominator(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=3)
    learner = started(run, config)
    for step in range(3):
        learner.train(step)
    # 3 tokens of age 3, then 3 of age 0; the limit is ceil(1.5) = 2
    groups = random_groups(3, versions=(0, 3), lengths=[6] * 4)
    claim_groups(run, config, 3, groups, policy="mask", eta="1.5", masked=tuple((i, 12) for i in range(4)))
    record = learner.train(3)
    assert record is not None
    assert record.metrics["staleness/masked_tokens"] == 4 * 4 * 3
    assert record.metrics["train/loss_tokens"] == 4 * 4 * 3
    assert record.metrics["staleness/update_lag_mean"] == 1.5
    assert record.metrics["staleness/update_lag_max"] == 3.0
    assert record.metrics["staleness/mixed"] == 1.0
    assert record.metrics["train/mismatch_swapped_k3"] > 0.0


TRUNCATED = {"score": (24, [1.5, -0.5, -0.5, -0.5]), "mask": (18, [1.5, -0.5, -0.5, -0.5]),
             "exclude": (18, [2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), 0.0])}


@pytest.mark.parametrize("rule", TRUNCATED)
def test_an_answer_cut_at_the_limit_counts_as_its_rule_says(rule):
    [group] = random_groups(0, n_groups=1, lengths=[6] * 4, rewards=[1, 0, 0, 0])
    cut = replace(group.trajectories[3], finish_reason="length")
    batch = stages.assemble(rows_of([replace(group, trajectories=(*group.trajectories[:3], cut))]))
    stages.mask_truncated(batch, rule)
    stages.number_tokens(batch)
    stages.add_advantages(batch, GroupAdvantage())
    tokens, expected = TRUNCATED[rule]
    assert int(batch["loss_mask"].sum()) == tokens
    np.testing.assert_allclose(batch["trajectory", "advantage"], expected, atol=1e-5)


def test_a_stage_without_its_columns_is_refused_by_name():
    batch = stages.assemble(rows_of(random_groups(0)))
    with pytest.raises(KeyError, match=r"add_advantages reads .*present"):
        stages.add_advantages(batch, GroupAdvantage())


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_an_update_that_is_not_finite_is_skipped_counted_and_ends_the_run_when_it_goes_on(tmp_path):
    config = settings(advantage=GroupAdvantage(normalize_by_std=False)).model_copy(
        update={"failure": Config().failure.model_copy(update={"max_skipped_updates": 1})})
    run = new_run(tmp_path, config, steps=0)
    huge = [1e38, -1e38, 0.0, 0.0]
    for step in range(3):
        rewards = None if step == 1 else huge
        groups = [all_by(step, group) for group in random_groups(step, rewards=rewards)]
        stock = AutoModelForCausalLM.from_pretrained(run.model)
        claim_groups(run, config, step, [sampled_by(stock, group) for group in groups])
    learner = started(run, config)
    before = learner.tensors()[0]
    first = learner.train(0)
    assert first is not None and first.metrics["train/skipped_updates"] == 1.0
    assert math.isnan(first.metrics["train/grad_norm"])
    assert digest_tensors(learner.tensors()[0].items()) == digest_tensors(before.items()) == first.weights_digest
    second = learner.train(1)
    assert second is not None and second.metrics["train/skipped_updates"] == 0.0
    learner.checkpoint()
    third = learner.train(2)
    assert third is not None and third.metrics["train/skipped_updates"] == 1.0
    claim_groups(run, config, 3, [all_by(0, group) for group in random_groups(3, rewards=huge)])
    with pytest.raises(NonFiniteTraining, match="2 updates in a row"):
        learner.train(3)


def test_an_engine_that_disagrees_about_the_model_ends_the_run_before_anything_is_updated(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=1, stock_behavior=False)
    learner = started(run, config)
    before = digest_tensors(learner.tensors()[0].items())
    with pytest.raises(EngineMismatch, match=r"step 0: mean .* nats over"):
        learner.train(0)
    assert digest_tensors(learner.tensors()[0].items()) == before
    assert not run.record(0).exists()


def test_a_step_that_is_not_the_next_one_is_refused(tmp_path):
    config = settings()
    learner = started(new_run(tmp_path, config, steps=2), config)
    with pytest.raises(ValueError, match=r"asked to train step 1, but the next step of its state is 0"):
        learner.train(1)


def test_steps_that_are_sent_ahead_are_read_meanwhile_and_trained_in_their_order(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=5)
    with ThreadPoolExecutor(5) as calls:
        learner = started(run, config)
        records = [call.result() for call in [calls.submit(learner.train, step) for step in range(5)]]
    assert [record.step for record in records] == list(range(5))
    assert [record.weights_digest for record in records] == [fold_claims(str(run.root), config, n) for n in range(1, 6)]


def test_what_is_wrong_with_a_step_that_was_sent_ahead_is_told_at_its_turn(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=1)
    writer = claim_groups(run, config, 1, random_groups(1))
    [shard] = {run.shard(group.stream, group.seq) for group in writer.groups}
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    with ThreadPoolExecutor(2) as calls:
        learner = started(run, config)
        first, second = (calls.submit(learner.train, step) for step in range(2))
        assert first.result() is not None
        with pytest.raises(ClaimedShardCorrupt):
            second.result()


def test_a_learner_of_an_older_attempt_trains_and_publishes_nothing(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=1)
    learner = started(run, config)
    start_attempt(run, 2)
    for call in (lambda: learner.train(0), learner.publish_current, learner.checkpoint):
        with pytest.raises(StaleAttempt):
            call()
    assert not run.record(0).exists()
    record = learner.train(0, attempt=2)
    assert record is not None and record.attempt == 2


class Overtaken(Learner):
    """A newer attempt begins while it trains: the step has computed its update, and not recorded it."""

    def _after(self, step: int, *, write: bool) -> After:
        after = super()._after(step, write=write)
        start_attempt(self._run, 2)
        return after


def test_a_step_that_a_newer_attempt_overtakes_leaves_no_record(tmp_path):
    config = settings(publish_every=2)  # step 0 publishes nothing, whose own fence it would meet
    run = new_run(tmp_path, config, steps=1)
    learner = Overtaken(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
    learner.restore()
    learner.publish_current()
    with pytest.raises(StaleAttempt, match="attempt 1 is over"):
        learner.train(0)
    assert not run.records.exists()
    again = learner_of(run, config, attempt=2)
    assert again.restore() == 0
    record = again.train(0)
    assert record is not None and record.attempt == 2


def test_two_token_weights_are_refused_before_anything_starts(tmp_path):
    config = settings(loss=PpoClipLoss(name="decoupled_ppo"), correction=CorrectionConfig(weights="token_truncate"))
    with pytest.raises(ConfigError, match="at most once"):
        learner_of(RunDir(tmp_path), config)


# -- decoupled ---------------------------------------------------------------------------------------------------------


def test_decoupled_weights_are_capped_at_five_and_measured(tmp_path):
    config = settings(loss=PpoClipLoss(name="decoupled_ppo"), passes=2)
    run = new_run(tmp_path, config, steps=1)
    learner = started(run, config)
    learner.train(0)
    stock = AutoModelForCausalLM.from_pretrained(run.model)
    claim_groups(run, config, 1, [sampled_by(stock, all_by(0, g), noise=1.5) for g in random_groups(1)])
    record = learner.train(1)
    assert record is not None
    assert record.metrics["train/weight_max"] > 5.0
    assert 0.0 < record.metrics["train/weight_truncated"] < 0.5
    assert record.metrics["train/effective_samples"] < 0.9
    assert record.metrics["train/ratio_drift"] <= 1e-6


def test_the_loglinear_proximal_is_measured_against_the_recomputed_one(tmp_path):
    config = settings(loss=PpoClipLoss(name="decoupled_ppo", proximal="loglinear"), passes=2)
    run = new_run(tmp_path, config, steps=2)
    learner = started(run, config)
    first, second = learner.train(0), learner.train(1)
    assert first is not None and second is not None
    # version 0 at step 0: prox = mu = the policy; at step 1 it lies half way, so off by half the drift
    assert first.metrics["train/loglinear_error"] < 1e-6
    drift = second.metrics["train/mismatch_stale_abs"]
    assert second.metrics["train/loglinear_error"] == pytest.approx(drift / 2, rel=1e-3)
    assert math.isnan(first.metrics["train/ratio_drift"])


# -- restart -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("publish_every", "at"), [(1, 3), (2, 3), (2, 4)], ids=["K 1", "K 2, odd", "K 2, even"])
def test_a_restored_learner_goes_on_bit_for_bit(tmp_path, publish_every, at):
    config = settings(publish_every=publish_every, passes=2, minibatch_groups=3)
    run = new_run(tmp_path, config, steps=6)
    learner = started(run, config)
    digests = []
    for step in range(6):
        record = learner.train(step)
        assert record is not None
        digests.append(record.weights_digest)
        if step + 1 == at:
            assert learner.checkpoint() == at
    weights, moments = learner.tensors()
    versions = read_versions(run)

    start_attempt(run, 2)
    again = learner_of(run, config, attempt=2)
    assert again.next_step() == -1
    assert again.restore() == at == again.next_step()
    for step in range(at, 6):
        replayed = again.train(step)
        assert replayed is not None and (replayed.attempt, replayed.weights_digest) == (1, digests[step])
    assert read_versions(run) == versions
    for before, now in ((weights, again.tensors()[0]), (moments, again.tensors()[1])):
        assert before.keys() == now.keys()
        assert all(torch.equal(before[name], now[name]) for name in before)
    adopted = again.publish_current()
    assert adopted == max(versions.values(), key=lambda version: version.v)
    assert sorted(run.records.iterdir()) == [run.record(step) for step in range(6)]


def test_after_a_restart_the_last_scheduled_version_is_offered_even_if_its_bytes_are_gone(tmp_path):
    config = settings(publish_every=2)
    run = new_run(tmp_path, config, steps=3)
    learner = started(run, config)
    for step in range(3):
        learner.train(step)
    learner.checkpoint()
    shutil.rmtree(run.weights_root)
    again = learner_of(run, config)
    assert again.restore() == 3
    offered = again.publish_current()
    assert offered is not None and (offered.v, offered.step, offered.idx) == (1, 2, 1)
    assert digest_tensors(load_weights(run.weights(1), offered).items()) == read_record(run, 1).weights_digest


def test_with_damaged_checkpoints_only_the_run_is_replayed_from_the_initial_model(tmp_path, caplog):
    config = settings(passes=2)
    run = new_run(tmp_path, config, steps=3)
    learner = started(run, config)
    digests = []
    for step in range(3):
        record = learner.train(step)
        digests.append(record and record.weights_digest)
        if step < 2:
            learner.checkpoint()
    for n in (1, 2):
        (run.checkpoint(n) / "parameters.safetensors").write_bytes(b"rot")
    versions = read_versions(run)
    start_attempt(run, 2)
    again = learner_of(run, config, attempt=2)
    assert again.restore() == 0
    assert "the run goes on from the initial model" in caplog.text
    assert [again.train(step).weights_digest for step in range(3)] == digests
    assert not any(run.divergent_record(step, 2).exists() for step in range(3))
    assert again.publish_current() == versions[3] and read_versions(run) == versions


def test_a_replay_with_other_numbers_keeps_the_stored_record_and_leaves_its_own_beside_it(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=2)
    learner = started(run, config)
    stored = [learner.train(step) for step in range(2)]
    start_attempt(run, 2)
    other = settings(lr=5e-4)
    again = learner_of(run, other, attempt=2)
    again.restore()
    for step in range(2):
        assert same(again.train(step), stored[step])
    assert run.divergent_record(1, 2).exists()
    offered = again.publish_current()
    assert offered is not None and (offered.v, offered.step) == (3, 2)
    assert stored[1] is not None and offered.digest != stored[1].weights_digest


def test_the_fold_of_the_claims_gives_the_recorded_weights_and_writes_nothing(tmp_path):
    config = settings(passes=2)
    run = new_run(tmp_path, config, steps=4)
    learner = started(run, config)
    digests = []
    for step in range(2):
        record = learner.train(step)
        digests.append(record and record.weights_digest)
    learner.checkpoint()
    again = learner_of(run, config)
    assert again.restore() == 2
    record = again.train(2)
    assert record is not None
    before = sorted(path for path in run.root.rglob("*"))
    assert fold_claims(str(run.root), config) == record.weights_digest
    assert fold_claims(str(run.root), config, steps=2) == digests[1]
    assert sorted(path for path in run.root.rglob("*")) == before


def test_a_voided_step_trains_nothing_and_keeps_its_place_in_the_schedule(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=3)
    learner = started(run, config)
    first = learner.train(0)
    void_step(run, 1, reason="test", attempt=1)
    assert learner.train(1) is None
    third = learner.train(2)
    assert first is not None and third is not None and third.published is not None
    assert [version.step for version in read_versions(run).values()] == [0, 1, 2, 3]
    assert read_versions(run)[2].digest == first.weights_digest
    assert fold_claims(str(run.root), config) == third.weights_digest


# -- two ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_two_gloo_ranks_train_as_one_does(tmp_path, recompute):
    """Loss, gradient norm and weights over two steps of two minibatches with uneven micro-batches, and a checkpoint."""
    config = settings(token_budget=60, minibatch_groups=3, passes=2)
    two = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 2, "recompute": recompute})})
    alone = new_run(tmp_path, config, steps=2, name="alone")
    learner = started(alone, config)
    expected = [learner.train(step) for step in range(2)]
    weights, moments = learner.tensors()

    run = new_run(tmp_path, two, steps=2, name="together")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train_as_rank, args=(
        rank, 2, str(run.root), two, str(tmp_path / "rendezvous"), 2, str(tmp_path / "rank"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0, 0]
    for step, one in enumerate(expected):
        found = read_record(run, step)
        assert one is not None
        for name, tolerance in (("train/policy_loss", 1e-5), ("train/grad_norm", 1e-5), ("train/entropy", 1e-5),
                                ("train/loss_tokens", 0.0), ("reward/mean", 0.0), ("staleness/update_lag_mean", 0.0),
                                ("train/kl_proximal", 1e-3), ("train/mismatch_current_abs", 1e-1)):
            assert found.metrics[name] == pytest.approx(one.metrics[name], rel=tolerance, abs=1e-7, nan_ok=True), name
    for rank in range(2):
        saved = torch.load(tmp_path / f"rank-{rank}.pt")
        for mine, theirs in ((weights, saved["weights"]), (moments, saved["moments"])):
            assert mine.keys() == theirs.keys()
            for name in mine:
                np.testing.assert_allclose(theirs[name], mine[name], atol=2e-5, err_msg=name)

    assert learner_of(run, config).restore() == 2  # the checkpoint of two ranks is one rank's too


def test_at_a_barrier_rank_0_may_write_for_longer_than_a_collective_takes(tmp_path):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=meet_late, args=(rank, str(tmp_path / "rendezvous"), 6.0)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    assert [process.exitcode for process in ranks] == [0, 0]


def test_bfloat16_compute_keeps_float32_weights_and_agrees_to_its_precision(tmp_path):
    found = []
    for dtype in ("float32", "bfloat16"):
        config = settings(dtype=dtype)
        run = new_run(tmp_path, config, steps=1, name=dtype)
        learner = started(run, config)
        found.append(learner.train(0))
        assert {tensor.dtype for tensor in learner.tensors()[0].values()} == {torch.float32}
    full, half = found
    assert full is not None and half is not None
    assert half.metrics["train/grad_norm"] == pytest.approx(full.metrics["train/grad_norm"], rel=0.05)
    assert 1e-4 < half.metrics["train/mismatch_current_abs"] < 0.05
    assert (half.metrics["train/mismatch_alarm"], half.metrics["train/mismatch_bound"]) == (0.0, 0.05)


def test_a_learner_whose_step_failed_must_be_restored_before_it_goes_on(tmp_path):
    config = settings()
    run = new_run(tmp_path, config, steps=1)
    learner = started(run, config)
    first = learner.train(0)
    writer = claim_groups(run, config, 1, random_groups(1))
    [shard] = {run.shard(group.stream, group.seq) for group in writer.groups}
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"\0")
    with pytest.raises(ClaimedShardCorrupt):
        learner.train(1)
    shard.write_bytes(whole)
    assert (learner.next_step(), learner.restore()) == (-1, 0)
    assert same(learner.train(0), first)
    run.records.rename(run.root / "elsewhere")
    run.records.write_text("not a directory")
    with pytest.raises(OSError):
        learner.train(1)
    run.records.unlink()
    (run.root / "elsewhere").rename(run.records)
    assert (learner.next_step(), learner.restore()) == (-1, 0)
    assert same(learner.train(0), first)
    second = learner.train(1)
    assert second is not None and second.published == read_versions(run)[2]


def test_one_buffer_moves_the_batch_to_the_device_unchanged():
    batch = stages.assemble(rows_of(random_groups(0)))
    moved = batch.consolidate().to("cpu")
    for name in batch.keys(include_nested=True, leaves_only=True):
        assert torch.equal(moved[name].nan_to_num(7), batch[name].nan_to_num(7)), name


def test_a_record_names_the_environment_and_what_differs_between_two(tmp_path):
    config = settings()
    record = started(new_run(tmp_path, config, steps=1), config).train(0)
    assert record is not None
    assert {"torch", "blas", "cpu", "isa", "deterministic", "dtype", "device", "commit"} <= set(record.env)
    assert (record.env["threads"], record.env["deterministic"], record.env["ranks"]) == ("1", "True", "1")
    assert environment(config, 1) == record.env
    assert {type(value) for value in record.env.values()} == {str}, "else who reads a record imports what it is made of"
    other = environment(config, 2)
    assert other["env_digest"] != record.env["env_digest"]
    assert differing_fields(record.env, other) == {"ranks": ("1", "2")}
