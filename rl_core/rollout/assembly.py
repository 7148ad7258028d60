"""From what an engine sampled to a group that may land: pure functions, each refusing what must never become data.

Shape suffixes: `_L` tokens of one response, `_R` version runs of one response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.seeds import derive
from rl_core.types import (
    FINISH_CODES,
    Completion,
    GenerateRequest,
    Lease,
    Sampling,
    Score,
    Trajectory,
    TrajectoryGroup,
    WeightVersion,
)

GREEDY = -1
"""Number of the greedy baseline among the responses of a group. It is no response: only its reward lands."""


class SampleRefused(Exception):
    """An engine's answer that must not become data: no version, an index that runs backwards, a log-prob that is not
    finite. A typed failure of this one trajectory, which is tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A trajectory and the publication indices of its oldest and newest token."""

    trajectory: Trajectory
    idx_min: int
    idx_max: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One answer of a session, before the session has its score."""

    completion: Completion
    span: tuple[int, int]
    """As of `check_completion`."""
    seed: int
    prompt: Any
    """What it answers, as it was asked."""
    text: str
    """The answer, as it is scored."""
    prompt_ids_P: NDArray[np.int32] | None = None
    """None: the group's prompt."""
    following: Any = None
    """What the session goes on with behind it; None: it ended with it."""


def sampling_seed(run_seed: int, group_id: str, response: int, try_of_response: int) -> int:
    """Seed of one response; another try of it is another sample."""
    return derive(run_seed, group_id, response, try_of_response, "sample")


def request_of(lease: Lease, run_seed: int, response: int, try_of_response: int, serial: int = 0,
               prompt_ids_P: NDArray[np.int32] | None = None) -> GenerateRequest:
    """The engine request for response number `response` of a group. `prompt_ids_P`: what it answers, where that is not
    the group's prompt.

    `serial` tells apart two leases of one group: the first one's cancelled requests may still be leaving the engine.
    """
    trained = response != GREEDY
    name = response if trained else "greedy"
    return GenerateRequest(request_id=f"{lease.group_id}/{name}/{try_of_response}/{serial}",
                           token_ids_P=lease.prompt.token_ids_P if prompt_ids_P is None else prompt_ids_P,
                           trained=trained,
                           sampling=lease.sampling if trained else greedy(lease.sampling),
                           seed=sampling_seed(run_seed, lease.group_id, response, try_of_response))


def greedy(sampling: Sampling) -> Sampling:
    """The likeliest token at every place, up to the same limit and the same ends."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def check_completion(completion: Completion, versions: Mapping[int, WeightVersion]) -> tuple[int, int]:
    """`(idx_min, idx_max)` of a finished answer. `versions` are those that this engine was ever told to serve.

    Raises SampleRefused: a sample without a version, or whose idx runs backwards, never lands (architecture.md 7).
    """
    length = len(completion.token_ids_L)
    ends, values = completion.version_runs.end_R.tolist(), completion.version_runs.version_R.tolist()
    if completion.finish_reason not in FINISH_CODES:
        raise SampleRefused(f"it ended as {completion.finish_reason!r}")
    if length == 0 or len(completion.logprobs_L) != length:
        raise SampleRefused(f"{length} tokens with {len(completion.logprobs_L)} log-probs")
    if not ends or len(ends) != len(values) or ends[-1] != length or any(b <= a for a, b in pairwise([0, *ends])):
        raise SampleRefused(f"tokens without a version: runs {values} end at {ends} of {length}")
    unknown = [v for v in values if v not in versions]
    if unknown:
        raise SampleRefused(f"sampled by versions {unknown}, which this engine was never told to serve")
    idx_R = [versions[v].idx for v in values]
    if any(later < earlier for earlier, later in pairwise(idx_R)):
        raise SampleRefused(f"the publication index runs backwards: {idx_R}")
    # A sampled token has a log-prob of at most 0; the smallest excess comes from rounding. NaN passes no comparison.
    smallest, largest = float(completion.logprobs_L.min()), float(completion.logprobs_L.max())
    if not (smallest > -math.inf and largest <= 1e-4):
        raise SampleRefused(f"log-probs are not those of a distribution: largest {largest}")
    return idx_R[0], idx_R[-1]


def as_answer(turn: Turn, score: Score, session: int | None = None) -> Answer:
    """One turn, every token sampled by the model; `session`: number of its session, where it is not one by itself."""
    completion, (idx_min, idx_max) = turn.completion, turn.span
    length = len(completion.token_ids_L)
    trajectory = Trajectory(
        token_ids_L=np.ascontiguousarray(completion.token_ids_L, np.int32),
        behavior_logprobs_L=np.ascontiguousarray(completion.logprobs_L, np.float32),
        loss_mask_L=np.ones(length, np.uint8), version_runs=completion.version_runs,
        turn_end=np.array([length], np.int32), score=score, finish_reason=completion.finish_reason, seed=turn.seed,
        session=session, prompt_ids_P=turn.prompt_ids_P)
    return Answer(trajectory=trajectory, idx_min=idx_min, idx_max=idx_max)


def as_group(lease: Lease, answers: Sequence[Answer], *, dispatched_at_us: int, finished_at_us: int,
             meta: dict[str, Any], baseline_reward: float | None = None) -> TrajectoryGroup:
    """The group of these answers, in order of response number; fewer than leased make a partial group."""
    return TrajectoryGroup(
        lease=lease, trajectories=tuple(answer.trajectory for answer in answers),
        idx_min=min(answer.idx_min for answer in answers), idx_max=max(answer.idx_max for answer in answers),
        dispatched_at_us=dispatched_at_us, finished_at_us=finished_at_us, meta=meta, baseline_reward=baseline_reward)
