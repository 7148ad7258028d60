"""A small run directory of real files, with a group in every state, for whatever looks at runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from rl_core.config import Config
from rl_core.experience.ledger import group_ids_digest, put_claim, put_drops
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.metrics import names
from rl_core.observations import put_observation
from rl_core.records import put_record
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.run_identity import open_identity
from rl_core.tokenizer import character_tokenizer, encode_chat, write_tokenizer
from rl_core.types import Drop, Outcome, ShardRef, StepRecord, TrajectoryGroup, VersionRuns, WeightVersion
from rl_core.versions import put_version
from tests.builders import make_claim, make_group

STEPS = 3
"""Recorded; step 3 is claimed only."""
T0 = 1_790_000_000
ANSWERS = ("13", "31", "1", "311")
REWARDS = (1.0, 0.25, 0.0, -0.5)


def spoken_group(position: int, *, versions: tuple[int, ...] = (0,), bonus: float = 0.0) -> TrajectoryGroup:
    """Four answers to "sort 31" in the tiny model's alphabet, with rewards REWARDS + bonus and a part `digits`."""
    tokenizer = character_tokenizer()
    group = make_group(position, versions=versions, rewards=[reward + bonus for reward in REWARDS])
    answers = []
    for text, trajectory in zip(ANSWERS, group.trajectories, strict=True):
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        ends = np.linspace(0, len(ids), len(versions[-len(ids):]) + 1).astype(np.int32)[1:]
        score = replace(trajectory.score, parts={"digits": len(text) / 2}, correct=float(text == "13"), extracted=text)
        answers.append(replace(
            trajectory, token_ids_L=ids, behavior_logprobs_L=np.full(len(ids), -0.5, np.float32),
            loss_mask_L=np.ones(len(ids), np.uint8), turn_end=np.array([len(ids)], np.int32), score=score,
            version_runs=VersionRuns(end_R=ends, version_R=np.array(versions[-len(ids):], np.int32)),
            finish_reason="length" if text == "311" else "stop"))
    prompt = replace(group.lease.prompt, token_ids_P=np.array(encode_chat(tokenizer, "sort 31"), np.int32),
                     data_source="sort" if position % 2 == 0 else "chat")
    return replace(group, trajectories=tuple(answers), lease=replace(group.lease, prompt=prompt))


def record(step: int, **metrics: float) -> StepRecord:
    """Of the learner's metrics those not given are 0."""
    return StepRecord(step=step, idx=step, attempt=1, claim_digest="", weights_digest=f"w{step}", env={}, revision=0,
                      metrics=dict.fromkeys(names("learner"), 0.0) | metrics, seconds={"update": 0.5},
                      published=WeightVersion(v=step + 1, step=step + 1, idx=step + 1, attempt=1, digest=f"w{step}"),
                      ts_us=(T0 + step) * 1_000_000, parts={"digits": 1.0},
                      by_source={"chat": {"n": 4, "reward_mean": 0.25, "correct": 0.25, "length_mean": 2.0},
                                 "sort": {"n": 4, "reward_mean": 0.5, "correct": 0.25, "length_mean": 2.0}})


def small_run(path: Path, run_key: str = "small", *, bonus: float = 0.0) -> RunDir:
    """Steps 0 to 2 trained on groups 0 to 5, step 3 claimed with 6 and 7; 8 waits, 9 was dropped, 10 failed, and group
    0 has landed twice. `bonus` is added to every reward."""
    run = RunDir(path)
    open_identity(run, run_key, "tiny-cpu", Config())
    put_if_absent(run.attempt(1), to_json({"attempt": 1}))
    write_tokenizer(run.model, 64)
    for v in range(STEPS + 1):
        put_version(run, WeightVersion(v=v, step=v, idx=v, attempt=1, digest=f"w{v}"))
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    for step in range(STEPS + 1):
        fresh = (step - 1, step) if step else (0,)
        landed = writer.land([spoken_group(2 * step, versions=fresh, bonus=bonus),
                              spoken_group(2 * step + 1, versions=(0,), bonus=bonus)])
        claim = make_claim(run, [ShardRef(stream=landed.stream, seq=landed.seq)], step=step)
        dropped = (Drop(group_id="e0-p9-t0", reason="stale", n_tokens=20),) if step == 2 else ()
        digest = group_ids_digest(g.group_id for g in claim.groups)
        put_claim(run, replace(claim, dropped=dropped, group_ids_digest=digest), fsync=False)
    writer.land([spoken_group(8, versions=(3,), bonus=bonus), spoken_group(9, bonus=bonus),
                 spoken_group(0, bonus=bonus)])
    put_drops(run, 2, [Drop(group_id="e0-p9-t0", reason="stale", n_tokens=20)], attempt=1, fsync=False)
    put_outcome(run, Outcome(group_id="e0-p10-t0", kind="failed", reason="reward_error", error="raised", try_no=0,
                             position=10, dataset_epoch=0, tokens_wasted=7))
    for step in range(STEPS):
        put_record(run, record(step, **{
            "reward/mean": 0.25 * step + bonus, "reward/part_digits_mean": 1.0, "reward/correct": 0.25,
            "staleness/mean": step / 2, "staleness/max": float(step), "staleness/update_lag_mean": float(step),
            "train/loss_tokens": 16.0, "system/samples_per_s": (100.0, 200.0, 400.0)[step], "system/mfu": 0.125,
            "rollout/length_right": float("nan")}))
    put_observation(run, 1, dict.fromkeys(names("owner"), 0.5), ts_us=7)
    for step, share in ((0, 0.25), (2, 0.75), (3, 0.5)):
        put_if_absent(run.validation(step), to_json({
            "step": step, "v": step, "idx": step, "n": 8, "greedy_accuracy": share, "sampled_accuracy": None,
            "mean_length": 4.0, "mean_at_n": share, "mean_at_n_interval": [share - 0.125, share + 0.125],
            "pass_at_k": {"1": share, "2": 1.0}, "pass_at_k_interval": {"1": [0.0, 1.0], "2": [0.5, 1.0]},
            "by_source": {"sort": {"n": 8, "greedy_accuracy": share}}, "seconds": 0.25, "ts_us": 1}))
    put_if_absent(run.validation_table(3), to_json({"rows": [
        {"data_source": "sort", "prompt": "sort 31", "answer": "13", "mode": "greedy", "text": "13", "reward": 1.0,
         "correct": 1.0, "extracted": None, "length": 2, "finish": "stop"}]}))
    return run


def session_group(position: int) -> TrajectoryGroup:
    """Two sessions: "1", and then "13", which answers the prompt, "1" and a space; and "31" alone."""
    group = spoken_group(position)
    right, wrong, first, _ = group.trajectories
    tokenizer, prompt = character_tokenizer(), group.lease.prompt
    space = np.array(tokenizer.encode(" ", add_special_tokens=False).ids, np.int32)
    again = np.concatenate([prompt.token_ids_P, first.token_ids_L, space])
    return replace(group, trajectories=(
        replace(first, session=0, score=right.score), replace(right, session=0, prompt_ids_P=again),
        replace(wrong, session=1)))


def run_of_sessions(path: Path) -> RunDir:
    """Step 0 trained on a group of sessions, and was validated; nothing of that was kept but its record."""
    run = RunDir(path)
    open_identity(run, "sessions", "tiny-cpu", Config())
    write_tokenizer(run.model, 64)
    put_version(run, WeightVersion(v=0, step=0, idx=0, attempt=1, digest="w0"))
    landed = ShardWriter(run, "rollout-0", 1, {}, False).land([session_group(0)])
    put_claim(run, make_claim(run, [ShardRef(stream=landed.stream, seq=landed.seq)]), fsync=False)
    put_record(run, record(0))
    put_if_absent(run.validation(1), to_json({"step": 1, "v": 1, "idx": 1, "n": 8, "greedy_accuracy": 0.5,
                                              "sampled_accuracy": None, "mean_length": 4.0, "seconds": 0.25,
                                              "ts_us": 1}))
    return run
