"""Builders of real random groups, leases and runs for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import group_ids_digest
from rl_core.experience.verify import ShardInfo, shard_key, verify_shard
from rl_core.run_dir import OwnerLock, RunDir
from rl_core.types import (
    Claim,
    ClaimedGroup,
    FinishReason,
    Lease,
    Prompt,
    Sampling,
    Score,
    ShardRef,
    Trajectory,
    TrajectoryGroup,
    VersionRuns,
    WeightVersion,
)

VOCAB = 97


def make_prompt(i: int, *, dataset_epoch: int = 0, prompt_idx: int | None = None, length: int = 6) -> Prompt:
    """Prompt at position `i`; its row of the data set is `i` too unless given."""
    ids = np.random.default_rng([i, dataset_epoch, 1]).integers(0, VOCAB, length).astype(np.int32)
    return Prompt(dataset_epoch=dataset_epoch, position=i, prompt_idx=i if prompt_idx is None else prompt_idx,
                  token_ids_P=ids, answer=str(i), data_source="sort")


def make_lease(i: int, *, dataset_epoch: int = 0, try_no: int = 0, lease_no: int | None = None, n: int = 4,
               idx: int = 0, attempt: int = 1, temperature: float = 1.0, prompt_length: int = 6) -> Lease:
    """Lease of the prompt at position `i` for `n` responses, dispatched at publication index `idx`."""
    return Lease(prompt=make_prompt(i, dataset_epoch=dataset_epoch, length=prompt_length), try_no=try_no,
                 lease_no=i if lease_no is None else lease_no, idx_dispatch=idx, n_expected=n, min_group=max(1, n // 2),
                 sampling=Sampling(temperature=temperature, max_new_tokens=64), attempt=attempt)


def make_runs(length: int, versions: Sequence[int]) -> VersionRuns:
    """`length` tokens cut into one run per version, as even as it goes; fewer runs when there are too few tokens."""
    used = list(versions)[-length:]
    ends = np.linspace(0, length, len(used) + 1).astype(np.int32)[1:]
    return VersionRuns(end_R=ends, version_R=np.array(used, np.int32))


def make_trajectory(rng: np.random.Generator, length: int, *, versions: Sequence[int] = (0,), reward: float = 0.0,
                    parts: dict[str, float] | None = None, mask: NDArray[np.uint8] | None = None,
                    finish_reason: FinishReason = "stop") -> Trajectory:
    """One answer of random tokens and log-probs."""
    mask_L = np.ones(length, np.uint8) if mask is None else mask
    logprobs = -rng.exponential(1.0, length).astype(np.float32) * mask_L
    return Trajectory(token_ids_L=rng.integers(0, VOCAB, length).astype(np.int32), behavior_logprobs_L=logprobs,
                      loss_mask_L=mask_L, version_runs=make_runs(length, versions),
                      turn_end=np.array([length], np.int32),
                      score=Score(reward=reward, parts=parts or {}, correct=float(reward > 0), extracted=None),
                      finish_reason=finish_reason, seed=int(rng.integers(2**62)))


def make_group(i: int, *, n: int = 4, n_expected: int | None = None, versions: Sequence[int] = (0,),
               idx: Sequence[int] | None = None, rewards: Sequence[float] | None = None,
               lengths: Sequence[int] | None = None, dataset_epoch: int = 0, try_no: int = 0,
               lease_no: int | None = None, attempt: int = 1, prompt_length: int = 6, lease: Lease | None = None,
               seed: int = 0) -> TrajectoryGroup:
    """Group at position `i`. `versions` are the version runs of each answer; `idx` their indices (default: the same
    numbers). Rewards default to 0, 1, 0, 1, ... Without `lengths` answers have 1 to 12 tokens."""
    rng = np.random.default_rng([seed, i, dataset_epoch, try_no, 2])
    lease = lease or make_lease(i, dataset_epoch=dataset_epoch, try_no=try_no, lease_no=lease_no, n=n_expected or n,
                                idx=min(idx or versions), attempt=attempt, prompt_length=prompt_length)
    sizes = [int(x) for x in rng.integers(1, 13, n)] if lengths is None else list(lengths)
    given = [float(j % 2) for j in range(n)] if rewards is None else list(rewards)
    answers = tuple(make_trajectory(rng, sizes[j], versions=versions, reward=given[j]) for j in range(n))
    used = [int(v) for t in answers for v in t.version_runs.version_R]
    to_idx = dict(zip(versions, idx or versions, strict=True))
    return TrajectoryGroup(lease=lease, trajectories=answers, idx_min=min(to_idx[v] for v in used),
                           idx_max=max(to_idx[v] for v in used), dispatched_at_us=1_700_000_000_000_000 + i,
                           finished_at_us=1_700_000_001_000_000 + i, meta={})


def make_run(path: Path) -> RunDir:
    """A run directory with nothing in it."""
    path.mkdir(parents=True, exist_ok=True)
    return RunDir(path)


def store_config(**over: Any) -> Config:
    """Four groups of four a step, without fsync."""
    return Config.model_validate({"groups_per_step": 4, "group_size": 4, "total_steps": 50,
                                  "storage": {"fsync": False}} | over)


def next_owner(run: RunDir, config: Config | None = None) -> Experience:
    """The experience of the run's next attempt."""
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    return Experience(run, config or store_config(), attempt)


def make_claim(run: RunDir, shards: Sequence[ShardRef], *, step: int = 0, eta: str = "2", hard_max: int = 8) -> Claim:
    """A claim of every row of these shards, in (dataset_epoch, position, try) order."""
    infos: list[ShardInfo] = [verify_shard(run.shard(ref.stream, ref.seq)) for ref in shards]
    groups = [ClaimedGroup(dataset_epoch=int(info.dataset_epoch[row]), position=int(info.position[row]),
                           try_no=int(info.try_no[row]), prompt_idx=int(info.prompt_idx[row]), stream=info.ref.stream,
                           seq=info.ref.seq, row=row) for info in infos for row in range(info.rows)]
    groups.sort(key=lambda g: (g.dataset_epoch, g.position, g.try_no))
    return Claim(step=step, idx=step, attempt=1, consumer="learner", eta=eta, hard_max=hard_max, policy="keep",
                 groups=tuple(groups), group_ids_digest=group_ids_digest(g.group_id for g in groups), masked=(),
                 dropped=(), revision=0, ts_us=0,
                 shard_digests={shard_key(info.ref.stream, info.ref.seq): info.shard_digest for info in infos})


def make_versions(n: int, *, publish_every: int = 1) -> dict[int, WeightVersion]:
    """Versions 0 .. n - 1, one per publication."""
    return {v: WeightVersion(v=v, step=v * publish_every, idx=v, attempt=1, digest=f"{v:032x}") for v in range(n)}


def long_groups(count: int, *, n: int = 8, seed: int = 0) -> list[TrajectoryGroup]:
    """Groups as long as a reasoning run's: lognormal(7.3, 0.8) tokens per answer, 200 to 8000, about 16 k a group."""
    rng = np.random.default_rng([seed, 3])
    lengths = np.clip(rng.lognormal(7.3, 0.8, (count, n)), 200, 8000).astype(int)
    prompts = rng.integers(50, 201, count)
    return [make_group(i, n=n, versions=(3,) if i % 8 else (3, 4), lengths=lengths[i].tolist(),
                       prompt_length=int(prompts[i]), seed=seed) for i in range(count)]
