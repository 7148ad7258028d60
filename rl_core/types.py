"""The nouns of Headway: small, frozen, keyword-only. Importable without torch.

Shape suffixes on arrays: `_P` prompt tokens, `_L` tokens of one response, `_R` version runs of one response.

A group on its way from prompt to gradient:

    Prompt -> Lease -> GenerateRequest -> Completion -> Trajectory -> TrajectoryGroup -> shard row -> Claim
        -> StepRecord
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
"""Format number in every JSON file of a run directory; a newer one is refused by name."""

FinishReason = Literal["stop", "length", "environment", "cancelled"]
FINISH_CODES: dict[str, int] = {"stop": 0, "length": 1, "environment": 2}
"""Codes of the shard column `finish_reason`. Cancelled answers never land."""

DropReason = Literal["stale", "all_masked", "partial", "filtered", "fenced"]
OutcomeKind = Literal["failed", "poison", "given_up", "filtered"]


def group_id(dataset_epoch: int, prompt_idx: int, try_no: int) -> str:
    """The exactly-once key of a group: `group_id(0, 12, 1)` -> `"e0-p12-t1"`."""
    return f"e{dataset_epoch}-p{prompt_idx}-t{try_no}"


def parse_group_id(text: str) -> tuple[int, int, int]:
    """`parse_group_id("e0-p12-t1")` -> `(0, 12, 1)`: dataset epoch, prompt index, try."""
    epoch, prompt, try_no = text.split("-")
    return int(epoch[1:]), int(prompt[1:]), int(try_no[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How answers are sampled. Log-probs are of exactly this distribution.

    Example: `Sampling(temperature=1.0, max_new_tokens=8)`.
    """

    temperature: float = 1.0
    """0 = greedy (validation only)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    """Beside the end tokens of the model, which always end an answer."""
    stop: tuple[str, ...] = ()
    """Stop strings: trimmed from text, never from ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of the data set at one place of the order f(seed, epoch).

    Example: `Prompt(dataset_epoch=0, position=3, prompt_idx=12, token_ids_P=..., answer="12345", data_source="sort")`.
    """

    dataset_epoch: int
    position: int
    """Place in the order of this dataset epoch, from 0."""
    prompt_idx: int
    """Of its row, from 0; another one for each time that a weight takes the row (data.md section 4)."""
    token_ids_P: NDArray[np.int32]
    answer: str
    """Ground truth handed to the reward."""
    data_source: str
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """The row's other columns, for rewards that read them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right, and the duty, of one worker to land one group. Has no clock (experience-store.md 3.6)."""

    prompt: Prompt
    try_no: int
    lease_no: int
    """Order of leasing over the whole run; used instead of clocks."""
    idx_dispatch: int
    """Publication index that the worker served when the lease was given."""
    n_expected: int
    """Sessions asked for; without `rollout.session` each is one response."""
    min_group: int
    """Fewer finished responses than this is a failed group; between this and n_expected it lands as partial."""
    sampling: Sampling
    attempt: int

    @property
    def group_id(self) -> str:
        return group_id(self.prompt.dataset_epoch, self.prompt.prompt_idx, self.try_no)


@dataclass(frozen=True, slots=True)
class Span:
    """What a part did from one moment to another, by its own clock. `Span("update", 1_700_000_000_000_000,
    1_700_000_000_250_000, 12)`: a quarter of a second in step 12. For people only: nothing is decided by it."""

    name: str
    begin_us: int
    """Microseconds since 1970 UTC."""
    end_us: int
    of: int | None = None
    """Number of what it was about: training step, weight version, shard, training steps behind a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One response to sample. Token ids in, token ids and log-probs out."""

    request_id: str
    token_ids_P: NDArray[np.int32]
    """Prompt, and on a resumed answer the tokens so far behind it."""
    sampling: Sampling
    seed: int
    """Of this response alone: tokens do not depend on what else is running."""
    trained: bool = True
    """Whether it is data. Of one that is not (a greedy baseline) the log-probs are nobody's, and any sampling goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRuns:
    """Which weight version sampled which tokens of one response, run-length encoded.

    Example: 5 tokens by version 3 then 2 by version 4: `VersionRuns(end_R=[5, 7], version_R=[3, 4])`.
    """

    end_R: NDArray[np.int32]
    """Cumulative ends; the last one is the response length."""
    version_R: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine answers to a GenerateRequest, also when it was cancelled (then the tokens so far)."""

    request_id: str
    token_ids_L: NDArray[np.int32]
    """Sampled tokens, a sampled end token included."""
    logprobs_L: NDArray[np.float32]
    """Of the distribution that was sampled (temperature and truncation applied), nats."""
    version_runs: VersionRuns
    finish_reason: FinishReason
    stop_text: str | None = None
    """The stop string that ended the answer, if one did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a reward function found out about one answer."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict[str, float])
    correct: float | None = None
    """Accuracy apart from the shaped reward; None where the reward does not say."""
    extracted: str | None = None
    """The answer as extracted from the text (maj@k)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One answer with all the facts the learner needs. Several turns are one trajectory."""

    token_ids_L: NDArray[np.int32]
    behavior_logprobs_L: NDArray[np.float32]
    """0.0 where loss_mask is 0."""
    loss_mask_L: NDArray[np.uint8]
    """1 = sampled by the model."""
    version_runs: VersionRuns
    turn_end: NDArray[np.int32]
    """Ends of turns; one entry for a single turn."""
    score: Score
    """Of the session that it is of."""
    finish_reason: FinishReason
    seed: int
    session: int | None = None
    """Number of its session among those of the group, from 0; None: it is a session of its own."""
    prompt_ids_P: NDArray[np.int32] | None = None
    """What it answers; None: the group's prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGroup:
    """One prompt's n sessions, of one trajectory each or of several in order: the unit of advantage, of staleness and
    of consumption. A session has one reward, which each of its trajectories carries."""

    lease: Lease
    trajectories: tuple[Trajectory, ...]
    idx_min: int
    """Publication index of the oldest version among the sampled tokens."""
    idx_max: int
    dispatched_at_us: int
    """Microseconds since 1970 UTC; written, never compared."""
    finished_at_us: int
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    """Small facts (retries, tool statistics)."""
    baseline_reward: float | None = None
    """Reward of a greedy answer to the same prompt (remax), which is not in the group; None where none was asked for.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightVersion:
    """The name of one publication's bytes. `v` is only a name; every formula uses `idx`."""

    v: int
    step: int
    """Training steps behind these weights: version of the initial weights has step 0."""
    idx: int
    """step // publish_every."""
    attempt: int
    digest: str
    """Of the tensors' bytes by name (weights.py), never of a file."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ShardRef:
    """Name of one immutable Arrow file: `streams/<stream>/<seq:08d>.arrow`."""

    stream: str
    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Rows [lo, hi) of one shard."""

    stream: str
    seq: int
    lo: int
    hi: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedGroup:
    """One group of a claim, in training order (dataset_epoch, position, try_no)."""

    dataset_epoch: int
    position: int
    try_no: int
    prompt_idx: int
    stream: str
    seq: int
    row: int

    @property
    def group_id(self) -> str:
        return group_id(self.dataset_epoch, self.prompt_idx, self.try_no)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A group that no claim will take, and why."""

    group_id: str
    reason: DropReason
    n_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The immutable record of which groups training step k consumes (experience-store.md 3.5)."""

    step: int
    idx: int
    attempt: int
    consumer: str
    eta: str
    """The bound as decimal text: floats are not compared."""
    hard_max: int
    policy: Literal["keep", "mask", "drop", "wait", "offline", "exact"]
    """`offline`: the groups are another run's, sampled by versions that this one does not have; they have no age."""
    groups: tuple[ClaimedGroup, ...]
    group_ids_digest: str
    shard_digests: dict[str, str]
    """`"<stream>/<seq>"` -> digest over the shard's column digests."""
    masked: tuple[tuple[int, int], ...]
    """(ordinal of the group in `groups`, tokens of it that leave the loss by age)."""
    dropped: tuple[Drop, ...]
    revision: int
    """Config revision that this claim was made under: its step is trained by the settings of that one."""
    ts_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What training step k did: written once by learner rank 0, before the step returns."""

    step: int
    idx: int
    attempt: int
    claim_digest: str
    weights_digest: str
    """After the step's last update."""
    metrics: dict[str, float]
    """By the names of rl_core/metrics.py."""
    env: dict[str, str]
    """env_digest and the fields behind it (experience-store.md 3.10)."""
    published: WeightVersion | None
    revision: int
    seconds: dict[str, float]
    """Wall seconds by stage: read, build, update, publish; and since_update, from the last update of the step before to
    this step's first forward (NaN for the first step of a process)."""
    ts_us: int
    by_source: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Data source -> n (answers), reward_mean, correct (share), length_mean (tokens), of the claim."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Mean of every reward part of the claim by its name; the first ones are metrics, too."""
    roles: dict[str, str] = field(default_factory=dict[str, str])
    """Digest of the weights, behind the step, of every model beside the policy that learns: critic, reference."""
    spans: tuple[Span, ...] = ()
    """What rank 0 did since the record before: states of its interval ledger, and the stages of steps (timeline.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a leased group ended without a landed row."""

    group_id: str
    kind: OutcomeKind
    reason: str
    """Short name: reward_error, reward_timeout, group_deadline, engine_error, wait_timeout, partial, poison ..."""
    error: str
    try_no: int
    position: int
    dataset_epoch: int
    tokens_wasted: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Landed:
    """Hint that a shard landed. A hint is not a fact: it costs latency when lost, never data."""

    stream: str
    seq: int
    group_ids: tuple[str, ...]
    n_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """What a rollout worker answers when it is adopted, and with every batch of events."""

    worker: str
    """Stable name, `rollout-0`."""
    stream: str
    """Stream of this incarnation."""
    served: WeightVersion | None
    in_flight: tuple[str, ...]
    """Group ids leased and neither landed nor given an outcome."""
    running: int
    """Responses being generated now."""
    tokens_generated: int
    """Since this incarnation started."""
    tokens_wasted: int
    seconds: dict[str, float]
    """Interval ledger of this worker since its start: busy, waiting, syncing, paused; sums to its age."""
    servers: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Counters of its engine's servers since its start, by server; empty for an embedded engine (Engine.counters)."""
    tokens_greedy: int = 0
    """Of greedy baselines (remax), generated and wasted, too: their rewards land, their tokens never do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEvents:
    """Answer of a worker's long poll: what happened since the last one."""

    status: WorkerStatus
    landed: tuple[Landed, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    cancelled: tuple[str, ...] = ()
    """Groups that ended by cancel: neither landed nor failed."""
