"""At bound 0 Headway is the synchronous algorithm: a plain loop over the same functions gives the same run.

The run goes through Prefect, Ray, the pump, shards and claims; the loop below through none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.config import Config
from rl_core.experience.ledger import read_claim
from rl_core.experience.reader import ClaimRows, read_claim_rows, read_groups
from rl_core.experience.shards import ShardWriter
from rl_core.learner import batch as stages
from rl_core.learner.ranks import Ranks
from rl_core.learner.state import TrainState
from rl_core.learner.step import StepPlan, training_step
from rl_core.records import read_record
from rl_core.rollout.assembly import as_answer, as_group, check_completion, request_of
from rl_core.rollout.prompts import PromptSource, load_tokenizer
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.run_dir import RunDir
from rl_core.run_identity import read_identity
from rl_core.schedules import learning_rate
from rl_core.types import Claim, Lease, Sampling, ShardRef, TrajectoryGroup, WeightVersion
from rl_core.versions import newest_version, read_versions
from rl_core.weights import WEIGHTS_FILE, digest_tensors, publish, read_tensors
from tests.builders import make_claim
from tests.runs import Home

STEPS = 8
SETTINGS = (f"total_steps={STEPS}", "staleness.bound=0", "validation.every=100", "checkpoint.every=100",
            "learner.decay_steps=180")


@dataclass
class Synchronous:
    """The recorded run, and what a plain loop needs of it."""

    run: RunDir
    config: Config


@pytest.fixture(scope="module")
def recorded(home: Home) -> Synchronous:
    command = home.train("parity", *SETTINGS)
    assert command.wait() == 0, (command.out, command.err)
    assert (command.json["staleness_max"], command.json["update_lag_mean"]) == (0, 0.0)
    return Synchronous(command.run, read_identity(command.run).config)


def start_learner(run: RunDir, config: Config) -> tuple[TrainState, Ranks]:
    torch.set_num_threads(config.learner.threads)
    torch.use_deterministic_algorithms(True)
    ranks = Ranks(rank=0, ranks=1, rendezvous="none", device=torch.device("cpu"), deadline_s=60,
                  barrier_s=60)
    return TrainState(run.model, config, ranks), ranks


def learn(state: TrainState, ranks: Ranks, rows: ClaimRows, config: Config, step: int) -> float:
    """One on-policy step; returns the loss of its one update."""
    batch = stages.assemble(rows)
    stages.mark_tokens(batch, step=step, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, config.learner.loss.truncated)
    stages.add_advantages(batch, config.learner.advantage)
    plan = StepPlan(step=step, idx=step, learning_rate=learning_rate(step, config), groups=16, minibatch_groups=16,
                    max_new_tokens=config.sampling.max_new_tokens, learner=config.learner, skipped_in_a_row=0,
                    max_skipped=5)
    [loss] = training_step(state.policy, state.optimizer, ranks, batch, plan).losses
    return loss


def lease_of(config: Config, source: PromptSource, position: int) -> Lease:
    s = config.sampling
    return Lease(prompt=source.at(0, position), try_no=0, lease_no=position, idx_dispatch=0, attempt=1,
                 n_expected=config.group_size, min_group=config.min_group,
                 sampling=Sampling(temperature=s.temperature, max_new_tokens=s.max_new_tokens))


def generate(engine: TorchEngine, decode: Callable[..., str], leases: list[Lease], config: Config,
             version: WeightVersion) -> list[TrajectoryGroup]:
    """All answers of all prompts at once, scored, as groups in order of position."""
    requests = [[request_of(lease, config.seed, j, 0) for j in range(lease.n_expected)] for lease in leases]
    futures = [[engine.submit(request) for request in each] for each in requests]
    groups = []
    for lease, asked, answers in zip(leases, requests, futures, strict=True):
        done = [answer.result(timeout=60) for answer in answers]
        scored = [as_answer(c, check_completion(c, {version.v: version}),
                            exact(lease.prompt, decode(c.token_ids_L, skip_special_tokens=True)), request.seed)
                  for c, request in zip(done, asked, strict=True)]
        groups.append(as_group(lease, scored, dispatched_at_us=0, finished_at_us=0, meta={}))
    return groups


def group_facts(run: RunDir, claim: Claim) -> list[tuple[Any, ...]]:
    """Of each group in training order: its id, its prompt, and tokens, reward and seed of every answer."""
    facts = ("ids", "reward", "finish_reason", "seed")
    return [(group["group_id"], group["prompt_ids"],
             [[answer[fact] for fact in facts] for answer in group["responses"]]) for group in read_groups(run, claim)]


def test_losses_and_weights_are_bit_equal_when_the_loop_is_fed_the_recorded_shards(recorded: Synchronous) -> None:
    run, config = recorded.run, recorded.config
    state, ranks = start_learner(run, config)
    for step in range(STEPS):
        rows = read_claim_rows(run, read_claim(run, step), rank=0, ranks=1, versions=read_versions(run))
        record = read_record(run, step)
        assert learn(state, ranks, rows, config, step) == record.metrics["train/policy_loss"]
        assert digest_tensors(state.weights().items()) == record.weights_digest


def test_tokens_rewards_and_order_are_those_of_a_loop_that_generates_itself(recorded: Synchronous,
                                                                            tmp_path: Path) -> None:
    run, config = recorded.run, recorded.config
    own = RunDir(tmp_path / "own")
    state, ranks = start_learner(run, config)
    engine = TorchEngine(run.model, slots=config.rollout.engine.slots, threads=1,
                         max_context=config.data.max_prompt_tokens + config.sampling.max_new_tokens)
    source = PromptSource.of_model(config, run.model)
    decode = load_tokenizer(run.model).decode
    writer = ShardWriter(own, "loop", 1, {}, fsync=False)
    try:
        for step in range(STEPS):
            version = publish(own, state.weights(), step, step, 1, config, read_versions(own))
            engine.swap(version, own.weights(version.v))
            leases = [lease_of(config, source, position) for position in range(step * 16, step * 16 + 16)]
            groups = generate(engine, decode, leases, config, version)
            landed = writer.land(groups)
            mine = make_claim(own, [ShardRef(stream=landed.stream, seq=landed.seq)], step=step)
            assert group_facts(own, mine) == group_facts(run, read_claim(run, step))
            rows = read_claim_rows(own, mine, rank=0, ranks=1, versions=read_versions(own))
            loss = learn(state, ranks, rows, config, step)
            assert loss == pytest.approx(read_record(run, step).metrics["train/policy_loss"], rel=1e-5, abs=1e-9)
    finally:
        engine.close()
    newest = newest_version(run)
    assert newest is not None and newest.step == STEPS
    final = state.weights()
    for name, value in read_tensors(run.weights(newest.v) / WEIGHTS_FILE).items():
        torch.testing.assert_close(final[name], value, rtol=1e-5, atol=1e-7)
