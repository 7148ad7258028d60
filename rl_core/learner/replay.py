"""Replay: a recorded step trained again, offline, from its claim and a kept checkpoint (replay.md).

    consumes:      claims, the shards they name, checkpoints, records
    waits for:     nothing
    writes:        nothing

One process, one rank, no engines. The state before step k is folded from the nearest whole checkpoint at or before k;
the initial model counts as checkpoint 0. Each step is trained by the settings of its claim's revision, and in the
environment that its record names (threads, dtypes, token budget), as far as this machine has it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rl_core.checkpoint import Checkpoint, checkpoints, initial_model_damage, is_whole, read_checkpoint
from rl_core.combinations import check_combination
from rl_core.config import Config, field_kinds
from rl_core.env_digest import as_recorded, differing_fields, environment
from rl_core.errors import (
    BrokenFile,
    CheckpointDamaged,
    ClaimedShardCorrupt,
    ConfigError,
    ReplayUnavailable,
    ShardRetired,
)
from rl_core.experience.ledger import claim_digest, read_claim, read_retired
from rl_core.experience.reader import Staging, open_claim
from rl_core.learner.fold import Fold, Trained, changed_for_engines, make_deterministic
from rl_core.learner.ranks import Ranks
from rl_core.learner.state import TrainState
from rl_core.metrics import BY_NAME, is_of_step
from rl_core.plan import check, differing, resolve
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import RunDir, file_numbers, numbered, read_json
from rl_core.schedules import is_scheduled_publication
from rl_core.types import StepRecord
from rl_core.weights import digest_tensors

NAN = float("nan")
RELATIVE = 0.01
"""Tolerance of a metric in another environment, as a share of the larger value. Other instruction sets moved metrics by
less than 1e-4 of it over 40 steps (replay.md 2)."""
ABSOLUTE = 1e-6
"""Tolerance where both values are small."""
ABSOLUTE_SHARE = 2e-3
"""Tolerance of a share: one token of hundreds may fall on the other side of a clip."""
CHANGED = "weights/changed"
ACTS_ON_A_STEP = ("learner.", "total_steps", "sampling.max_new_tokens")
"""Training fields that a claimed step still depends on (beginnings of their names). All others act before the claim."""
Verdict = Literal["identical", "within_tolerance", "differs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayable:
    """Whether a step can be replayed: `Replayable(step=17, checkpoint=10, why=None)`."""

    step: int
    checkpoint: int | None
    """The whole checkpoint that a replay begins with: so many steps are behind it. None where there is none."""
    why: str | None
    """What keeps it from being replayed; None = it can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A step that was trained again, beside its record."""

    step: int
    checkpoint: int
    """Where the fold began."""
    digests: tuple[str, str]
    """Of the weights behind the step: (recorded, replayed)."""
    claims: tuple[str, str]
    """Digest of the claim: (recorded, as it lies there now)."""
    metrics: dict[str, tuple[float, float]]
    """Every metric that is a function of the step: (recorded, replayed)."""
    environment: dict[str, tuple[str, str]]
    """Fields that differ between a record from the checkpoint to this step and here: (recorded, here)."""
    seconds: float
    """Of this step: reading, training, digest and metrics."""
    roles: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Digest of the weights of every model beside the policy that learns: (recorded, replayed)."""

    @property
    def differing(self) -> dict[str, tuple[float, float]]:
        """The metrics that are not the same bits. NaN is the same as NaN."""
        return {name: pair for name, pair in self.metrics.items() if not same(*pair)}

    @property
    def beyond(self) -> dict[str, tuple[float, float]]:
        """The metrics that differ by more than the tolerance."""
        return {name: pair for name, pair in self.differing.items() if not close(name, *pair)}

    @property
    def verdict(self) -> Verdict:
        """`within_tolerance` is for another environment only: in the same one every bit must be the same."""
        if self.claims[0] != self.claims[1]:
            return "differs"
        if all(recorded == now for recorded, now in (self.digests, *self.roles.values())) and not self.differing:
            return "identical"
        return "within_tolerance" if self.environment and not self.beyond else "differs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What a step would have been with other settings, from the recorded state before it."""

    step: int
    checkpoint: int
    changed: dict[str, tuple[Any, Any]]
    """Field -> (of the step's revision, tried)."""
    digests: tuple[str, str]
    """Of the weights behind the step: (recorded, tried)."""
    metrics: dict[str, tuple[float, float]]
    """Every metric that is a function of the step: (recorded, tried)."""
    environment: dict[str, tuple[str, str]]
    """As of Replayed: where it is not empty, the state before the step is not the recorded one, bit for bit."""


def same(recorded: float, now: float) -> bool:
    """Equal, NaN being equal to itself. A record has no word for infinity: it is NaN there."""
    return recorded == now or (not math.isfinite(recorded) and not math.isfinite(now))


def close(name: str, recorded: float, now: float) -> bool:
    """Equal within the tolerance of another environment, for a metric of this name."""
    absolute = ABSOLUTE_SHARE if name in BY_NAME and BY_NAME[name].unit == "share" else ABSOLUTE
    if name == "train/learning_rate":  # of settings alone, and often below every tolerance
        absolute = 0.0
    return same(recorded, now) or math.isclose(recorded, now, rel_tol=RELATIVE, abs_tol=absolute)


# -- which steps


class Sources:
    """What a run directory still has for a replay. Asks each file once; `deep` also reads shards, to verify them."""

    def __init__(self, run: RunDir, *, deep: bool = False) -> None:
        self._run, self._deep = run, deep
        self._recorded = set(recorded_steps(run))
        self._made = checkpoints(run)
        self._whole: dict[int, bool] = {}
        self._initial_damage: str | None = None
        """Empty: it is whole; None: not looked at yet."""
        self._retired_shards: frozenset[tuple[str, int]] | None = None
        self._trouble: dict[int, str | None] = {}
        self._clear: dict[int, int] = {}
        """Checkpoint -> the first step behind it that is not known to be trainable."""

    def steps(self) -> list[int]:
        """Every step with a claim or a record."""
        claimed = set(file_numbers(self._run.ledger(), r"step-(\d{9})\.json"))
        return sorted(claimed | self._recorded)

    def of(self, step: int) -> Replayable:
        """Whether step k can be replayed, and from which checkpoint."""
        if (why := self._of_itself(step)) is not None:
            return Replayable(step=step, checkpoint=None, why=why)
        begin = self.checkpoint(step)
        if begin is None:
            return Replayable(step=step, checkpoint=None, why="no checkpoint at or before it is whole, and "
                                                              f"{self._initial_damage}")
        clear = self._clear.get(begin, begin)
        while clear < step and self._training_trouble(clear) is None:
            clear += 1
        self._clear[begin] = clear
        why = None if clear >= step else f"step {clear}, which comes before it from checkpoint {begin} on, cannot be " \
                                         f"trained again: {self._training_trouble(clear)}"
        return Replayable(step=step, checkpoint=begin, why=why)

    def checkpoint(self, step: int) -> int | None:
        """The nearest whole checkpoint at or before step k; 0 is the initial model. None where none is whole."""
        for n in reversed([n for n in self._made if n <= step]):
            if n not in self._whole:
                self._whole[n] = is_whole(self._run.checkpoint(n))
            if self._whole[n]:
                return n
        if self._initial_damage is None:
            self._initial_damage = initial_model_damage(self._run)
        return None if self._initial_damage else 0

    def open(self, n: int) -> Checkpoint | None:
        """The checkpoint that `checkpoint` named, or None for the initial model. Raises CheckpointDamaged for one that
        was removed or damaged since; it is not named again."""
        if not self._whole.get(n, False):
            return None
        try:
            return read_checkpoint(self._run, n)
        except CheckpointDamaged:
            self._whole[n] = False
            raise

    def _of_itself(self, step: int) -> str | None:
        if self._run.void(step).exists():
            return "voided: it trained nothing"
        if step not in self._recorded:
            return "no record: nothing to compare with" if self._run.claim(step).exists() else "no claim and no record"
        return self._training_trouble(step)

    def _training_trouble(self, step: int) -> str | None:
        """Why the step cannot be trained again; None for one that can, or that trained nothing."""
        if step not in self._trouble:
            self._trouble[step] = None if self._run.void(step).exists() else self._data_trouble(step)
        return self._trouble[step]

    def _retired(self) -> frozenset[tuple[str, int]]:
        if self._retired_shards is None:
            self._retired_shards = read_retired(self._run).shards
        return self._retired_shards

    def _data_trouble(self, step: int) -> str | None:
        try:
            claim = read_claim(self._run, step)
        except FileNotFoundError:
            return f"its claim {self._run.claim(step)} is absent"
        except BrokenFile as error:
            return str(error)
        for stream, seq in sorted({(group.stream, group.seq) for group in claim.groups}):
            if not self._run.shard(stream, seq).exists():
                return f"shard {self._run.shard(stream, seq)} " + (
                    "was retired (retention.replay)" if (stream, seq) in self._retired() else "is gone")
        if self._deep:
            try:
                open_claim(self._run, claim)
            except (ClaimedShardCorrupt, ShardRetired) as error:
                return str(error)
        return None


def replayable(run: RunDir) -> list[Replayable]:
    """Every claimed or recorded step of the run: can it be replayed, from which checkpoint, and why not. Reads and
    verifies every shard of every claim."""
    sources = Sources(run, deep=True)
    return [sources.of(step) for step in sources.steps()]


# -- settings


def tried_settings(stored: Config, changes: Mapping[str, Any]) -> Config:
    """The settings of a step's revision with `changes` on them. Raises ConfigError naming each field that a step does
    not depend on, or whose value cannot be."""
    now = resolve(stored.model_dump(mode="json"), changes)
    kinds = field_kinds()
    for name in _leaves_of(changes):
        if (kind := kinds.get(name)) != "training":
            raise ConfigError(f"--set {name}: is of kind {kind}; a replay changes how a step is trained, fields of "
                              "kind training only")
        if not name.startswith(ACTS_ON_A_STEP):
            raise ConfigError(f"--set {name}: acts before the claim, on what is sampled, scored and admitted; what "
                              "step N was trained on is a fact. A replay changes learner.*, total_steps and "
                              "sampling.max_new_tokens; for staleness.* see `headway explain`")
    check(now)
    check_combination(now.learner)
    return now


def _leaves_of(changes: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key, value in changes.items():
        if isinstance(value, Mapping) and prefix + key not in field_kinds():
            names += _leaves_of(value, f"{prefix}{key}.")  # pyright: ignore[reportUnknownArgumentType]  # JSON
        else:
            names.append(prefix + key)
    return names


# -- the fold


@dataclass(frozen=True, slots=True)
class _Done:
    """One step of the fold: what it computed, and the share of values that its publication changed (wanted steps)."""

    trained: Trained
    changed: float
    seconds: float


class _Recorded(NamedTuple):
    """Who trained a step, and where."""

    attempt: int
    env: dict[str, str]


class Walk:
    """The state of a run, from a checkpoint over the claims, always forwards."""

    def __init__(self, run: RunDir, steps: Sequence[int]) -> None:
        """Raises ReplayUnavailable, naming each of the steps that cannot be replayed."""
        self._run, self._sources, self._wanted = run, Sources(run), set(steps)
        refused = [one for one in map(self._sources.of, steps) if one.why is not None]
        if refused:
            raise ReplayUnavailable("\n".join(f"step {one.step}: {one.why}" for one in refused))
        revision = current_revision(run)
        self._config = _on_this_machine(config_of(run, revision), read_record(run, min(steps)))
        make_deterministic()
        deadlines = self._config.deadlines
        self.ranks = Ranks(rank=0, ranks=1, rendezvous="", device=torch.device(self._config.learner.device),
                            deadline_s=deadlines.collective_s, barrier_s=deadlines.step_s)
        self.fold = Fold(run, self._config, self.ranks, revision=revision)
        self.environment: dict[str, tuple[str, str]] = {}
        """Fields in which a record since the checkpoint differs from here: (recorded, here)."""
        self.begun = -1
        """The checkpoint that the fold began with."""
        self._at, self._aim, self._attempt = -1, -1, -1
        self._staging = Staging()
        self._divergent = _divergent_records(run)
        self._used: dict[int, int] = {}
        """Step of this fold -> attempt of the record whose environment it was trained in."""
        self._published: dict[str, Tensor] = {}
        """Weights of the last publication, where a wanted step makes the next one; else empty."""

    def go_to(self, step: int) -> None:
        """Fold until the state is the one before step k, from a later checkpoint if there is one.

        Where steps of the fold were not trained as the start that recorded step k did, it begins again.
        """
        self._aim, self._attempt = step, read_record(self._run, step).attempt
        if any(attempt != self._record_of(k).attempt for k, attempt in self._used.items()):
            self._at = self.begun = -1
        while self._is_nearer(nearest := self._sources.checkpoint(step)):
            if nearest is None:
                raise ReplayUnavailable(f"step {step}: {self._sources.of(step).why}")
            try:
                self._begin(self._sources.open(nearest))
            except CheckpointDamaged:  # removed by the run meanwhile: the one before it
                continue
        while self._at < step:
            self.train()

    def _is_nearer(self, checkpoint: int | None) -> bool:
        """Whether to begin from this checkpoint: it is ahead, or the fold over the steps before it was another one."""
        if checkpoint is None:
            return self._at < 0
        return checkpoint > self._at or (bool(self.environment) and checkpoint > self.begun)

    def _begin(self, saved: Checkpoint | None) -> None:
        self._at = self.begun = self.fold.load(saved)
        self.environment, self._used = {}, {}
        if saved is None:
            self._keep(self.fold.state.weights(), 0)
        else:
            self._keep(saved.version, saved.state.version_step)

    def train(self) -> _Done | None:
        """Train the next step; None for a voided one."""
        step, begin, done = self._at, time.monotonic(), None
        if not self._run.void(step).exists():
            config = self.settings(step)
            trained = self._compute(step, config)
            changed = self.changed(step, self.fold.state) if step in self._wanted else NAN
            done = _Done(trained, changed, time.monotonic() - begin)
        self._at = step + 1
        if is_scheduled_publication(step + 1, self._config):
            self._keep(self.fold.state.weights(), step + 1)
        return done

    def attempt(self, step: int, changes: Mapping[str, Any]) -> tuple[_Done, TrainState, Config, Config]:
        """Train step k with other settings on a copy of the state, which is returned with what the step computed, the
        settings of the step, and those tried. The state itself stays the one before step k."""
        begin, stored = time.monotonic(), self.settings(step)
        config, state = tried_settings(stored, changes), self.fold.copied_state()
        state.compute_as(config.learner)
        trained = self._compute(step, config, state)
        return _Done(trained, self.changed(step, state), time.monotonic() - begin), state, stored, config

    def _compute(self, step: int, config: Config, state: TrainState | None = None) -> Trained:
        try:
            return self.fold.compute(step, self._staging, config=config, state=state)
        except (ClaimedShardCorrupt, ShardRetired, FileNotFoundError) as error:
            before = "" if step == self._aim else f"step {step}, which comes before it from checkpoint {self.begun} " \
                                                  "on, cannot be trained again: "
            raise ReplayUnavailable(f"step {self._aim}: {before}{error}") from error

    def settings(self, step: int) -> Config:
        """What the step was trained by, in the environment of its record; process and state are set to it."""
        config = self.fold.config_of(read_claim(self._run, step).revision)
        record = self._record_of(step)
        self._used[step] = record.attempt
        config = as_recorded(config, record.env)
        torch.set_num_threads(config.learner.threads)  # sums of another number of threads have other bits
        self.fold.state.compute_as(config.learner)
        if record.env:
            self.environment |= differing_fields(record.env, environment(config, self.ranks.ranks))
        return config

    def _record_of(self, step: int) -> _Recorded:
        """The record of the training whose effect on the state the start had that recorded step `_aim`.

        A start that trained a recorded step again, in another environment, went on with what it had then, and left its
        own record beside the one that stands.
        """
        if step != self._aim:
            for attempt, path in reversed(self._divergent.get(step, [])):
                if attempt <= self._attempt:
                    return _Recorded(attempt, read_json(path)["env"])
        if not self._run.record(step).exists():
            return _Recorded(self._attempt, {})
        record = read_record(self._run, step)
        return _Recorded(record.attempt, record.env)

    def changed(self, step: int, state: TrainState) -> float:
        """Share of values that the publication behind step k changes; NaN where it publishes nothing."""
        if not is_scheduled_publication(step + 1, self._config) or not self._published:
            return NAN
        base = state.base()
        return changed_for_engines(state.served(self._published, base), state.served(state.weights(), base),
                                   self._config)

    def _keep(self, weights: Mapping[str, Tensor], published: int) -> None:
        """Remember the weights of a publication, if the step that makes the next one is wanted."""
        self._published = {}
        if published + self._config.publish_every - 1 in self._wanted:
            self._published = {name: tensor.cpu().clone() for name, tensor in weights.items()}


def _divergent_records(run: RunDir) -> dict[int, list[tuple[int, Path]]]:
    """Step -> (attempt, path) of the records beside the one that stands, ascending."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for step, path in numbered(run.records, r"step-(\d{9})\.divergent-\d{6}\.json"):
        found.setdefault(step, []).append((int(path.stem.rpartition("-")[2]), path))
    return found


def _on_this_machine(stored: Config, record: StepRecord) -> Config:
    """The settings of the run on the device of a record, if it is here; else on the CPU."""
    device = "cuda" if record.env.get("device", "").startswith("cuda") and torch.cuda.is_available() else "cpu"
    return stored.model_copy(update={"learner": stored.learner.model_copy(update={"device": device})})


def replay(run: RunDir, steps: Sequence[int]) -> Iterator[Replayed]:
    """Train these steps again, in ascending order, over one fold, and yield each beside its record.

    Raises ReplayUnavailable before anything is trained, naming every step that cannot be replayed and why; later for a
    shard whose bytes are not those that were claimed. RunEnded, as in the run, for what would end it.
    """
    walk = Walk(run, steps)
    for step in sorted(set(steps)):
        walk.go_to(step)
        done, record, begin = walk.train(), read_record(run, step), time.monotonic()
        assert done is not None  # a voided step was refused
        digest = digest_tensors(walk.fold.state.weights().items())
        found = {name: pair for name, pair in beside(record, walk.fold.metrics(done.trained, done.changed)).items()
                 if name in record.metrics}  # a Headway of before may not have known all of them
        yield Replayed(step=step, checkpoint=walk.begun, digests=(record.weights_digest, digest), metrics=found,
                       claims=(record.claim_digest, claim_digest(done.trained.claim)),
                       environment=dict(walk.environment), seconds=done.seconds + time.monotonic() - begin,
                       roles={name: (record.roles.get(name, ""), done.trained.roles.get(name, ""))
                              for name in {**record.roles, **done.trained.roles}})


def try_settings(run: RunDir, steps: Sequence[int], changes: Mapping[str, Any]) -> Iterator[Tried]:
    """What each of these steps would have been with `changes` (as of `parse_overrides`) on its settings, from the
    recorded state before it: the steps before it are trained as they were.

    Raises ConfigError for settings that cannot be tried, and what `replay` raises.
    """
    walk = Walk(run, steps)
    for step in sorted(set(steps)):
        tried_settings(walk.fold.config_of(read_claim(run, step).revision), changes)
    for step in sorted(set(steps)):
        walk.go_to(step)
        done, state, stored, config = walk.attempt(step, changes)
        record = read_record(run, step)
        yield Tried(step=step, checkpoint=walk.begun, changed=differing(stored, config, "training"),
                    digests=(record.weights_digest, digest_tensors(state.weights().items())),
                    metrics=beside(record, walk.fold.metrics(done.trained, done.changed)),
                    environment=dict(walk.environment))


def beside(record: StepRecord, now: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """(recorded, now) of every metric that is a function of the step; one that is in only one of the two is NaN in the
    other."""
    names = [name for name in {**record.metrics, **now} if is_of_step(name)]
    if math.isnan(record.metrics.get(CHANGED, NAN)):  # the bytes of the publication before it were not there then
        names.remove(CHANGED)
    return {name: (record.metrics.get(name, NAN), now.get(name, NAN)) for name in names}
