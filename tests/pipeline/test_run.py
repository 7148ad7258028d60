"""One short run from the command to MLflow, and everything that a person looks at afterwards.

It is at bound 0, where Headway is the synchronous algorithm: a plain loop over the same functions gives the same run.
The run goes through Prefect, Ray, the pump, shards and claims; the loop, at the end of this file, through none of them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.experience.ledger import read_claim
from rl_core.experience.reader import ClaimRows, read_claim_rows, read_groups
from rl_core.experience.shards import ShardWriter
from rl_core.learner import batch as stages
from rl_core.learner.learner import fold_claims
from rl_core.learner.ranks import Ranks
from rl_core.learner.state import TrainState
from rl_core.learner.step import StepPlan, training_step
from rl_core.metrics import STATES, tracked_names
from rl_core.observations import observed_steps, read_observation
from rl_core.records import read_record, recorded_steps
from rl_core.rollout.assembly import Turn, as_answer, as_group, check_completion, request_of
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
from tests.runs import Command, Home, wait_until_gone

STEPS = 12
SETTINGS = (f"total_steps={STEPS}", "staleness.bound=0", "validation.every=6", "checkpoint.every=5",
            "learner.decay_steps=180")
SUMMARY_KEYS = ["run_key", "status", "steps", "accuracy_start", "accuracy_end", "wall_s", "groups_trained",
                "groups_dropped", "staleness_max", "staleness_mean", "update_lag_mean", "samples_per_s",
                "mlflow_run_id"]


@pytest.fixture(scope="module")
def finished(home: Home) -> Command:
    command = home.train("short", *SETTINGS)
    assert command.wait() == 0, command.said
    return command


def test_the_last_line_is_the_summary(finished: Command) -> None:
    summary = finished.json
    assert list(summary) == SUMMARY_KEYS
    assert (summary["run_key"], summary["status"], summary["steps"]) == ("short", "completed", STEPS)
    assert summary["groups_trained"] == STEPS * 16
    assert (summary["staleness_mean"], summary["staleness_max"], summary["update_lag_mean"]) == (0.0, 0, 0.0)
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
    assert audit.process.returncode == 0, audit.said
    assert audit.json["holds"] is True
    step = home.call("inspect", "short", "--step", "3", "--json").json
    assert len(step["groups"]) == 16
    for group in step["groups"]:
        assert group["prompt"].startswith("user\nsort ") and len(group["answers"]) == 8
        assert all(answer["reward"] in (0.0, 1.0) for answer in group["answers"])
    status = home.call("status", "short", "--json").json
    assert (status["state"], status["alive"], status["steps"]) == ("completed", False, STEPS)


def test_recorded_steps_are_replayed_bit_for_bit_and_nothing_is_written(finished: Command, home: Home) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.run.root.rglob("*")}
    replayed = home.call("replay", "short", "--steps", "4:6", "--step", "11", "--json")
    assert replayed.process.returncode == 0, replayed.said
    steps = {step["step"]: step for step in replayed.json["steps"]}
    assert [step["verdict"] for step in steps.values()] == ["identical"] * 3
    assert steps[11]["checkpoint"] == 10 and all(step["environment"] == {} for step in steps.values())
    explained = home.call("explain", "short", "--policy", "drop", "--bound", "0", "--json").json
    assert explained["own"]["trained"]["groups"] == STEPS * 16
    assert explained["other"]["trained"]["groups"] + explained["other"]["dropped"]["groups"] == explained["judged"]
    assert {path: path.stat().st_mtime_ns for path in finished.run.root.rglob("*")} == before


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
    pages = home.path / "mlflow" / "artifacts" / run_id / "artifacts"
    assert {path.name for path in pages.glob("viewer/*")} == {
        *(f"validation-{k:09d}.html" for k in (0, 6, 12)), *(f"step-{k:09d}.html" for k in (5, 11))}
    assert {path.name for path in pages.glob("timeline/*")} == {"timeline.html", "trace.json"}
    assert not finished.run.screens.exists(), "no page failed"


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
    again = home.train("short", *SETTINGS)
    assert again.wait(60) == 0, again.said
    assert again.json == finished.json
    assert recorded_steps(finished.run) == list(range(STEPS))


def test_other_identity_fields_are_refused_by_name(finished: Command, home: Home) -> None:
    other = home.train("short", f"total_steps={STEPS}", "group_size=4")
    assert other.wait(60) == 2
    assert "group_size is 8, asked for 4" in other.err


# -- the same by a plain loop


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
    stages.number_tokens(batch)
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
        texts = [decode(c.token_ids_L, skip_special_tokens=True) for c in done]
        scored = [as_answer(Turn(completion=c, span=check_completion(c, {version.v: version}), seed=request.seed,
                                 prompt=None, text=text), exact(lease.prompt, text))
                  for c, request, text in zip(done, asked, texts, strict=True)]
        groups.append(as_group(lease, scored, dispatched_at_us=0, finished_at_us=0, meta={}))
    return groups


def group_facts(run: RunDir, claim: Claim) -> list[tuple[Any, ...]]:
    """Of each group in training order: its id, its prompt, and tokens, reward and seed of every answer."""
    facts = ("ids", "reward", "finish_reason", "seed")
    return [(group["group_id"], group["prompt_ids"],
             [[answer[fact] for fact in facts] for answer in group["responses"]]) for group in read_groups(run, claim)]


def test_losses_and_weights_are_bit_equal_when_the_loop_is_fed_the_recorded_shards(finished: Command) -> None:
    run, config = finished.run, read_identity(finished.run).config
    state, ranks = start_learner(run, config)
    for step in range(STEPS):
        rows = read_claim_rows(run, read_claim(run, step), rank=0, ranks=1, versions=read_versions(run))
        record = read_record(run, step)
        assert learn(state, ranks, rows, config, step) == record.metrics["train/policy_loss"]
        assert digest_tensors(state.weights().items()) == record.weights_digest


def test_tokens_rewards_and_order_are_those_of_a_loop_that_generates_itself(finished: Command,
                                                                            tmp_path: Path) -> None:
    run, config = finished.run, read_identity(finished.run).config
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
