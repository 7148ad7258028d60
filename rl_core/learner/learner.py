"""The learner: from claims to weights. One object per rank; ranks run the same steps in the same order.

    consumes:      claims and the shards they name
    waits for:     nothing but the other ranks (the claim exists before `train` is called)
    unblocked by:  the owner's call of `train`

State is a fold over the claims: `restore` takes the newest whole checkpoint n, the owner calls `train` for n, n + 1,
... again, and recorded steps are recomputed, compared with their records and published nowhere (experience-store.md
3.8).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core.checkpoint import CheckpointState, newest_whole, sweep_aside, write_checkpoint
from rl_core.combinations import check_combination
from rl_core.config import Config
from rl_core.env_digest import environment
from rl_core.errors import BrokenFile, WeightsDamaged
from rl_core.experience.ledger import claim_digest, claimed_steps
from rl_core.experience.reader import Staging
from rl_core.learner.flops import claim_places, measured_peak, step_flops
from rl_core.learner.fold import Fold, Read, Trained, changed_for_engines, make_deterministic
from rl_core.learner.invariants import FIRST_STEPS
from rl_core.learner.ranks import Ranks, named_collectives
from rl_core.learner.step_metrics import by_source, part_means
from rl_core.lora.canary import Probe
from rl_core.metrics import MAX_SPANS, IntervalLedger, utilization
from rl_core.records import put_record, recorded_steps
from rl_core.revisions import config_of
from rl_core.rollout.sglang.sending import open_sender
from rl_core.run_dir import RunDir, check_attempt, newest_attempt
from rl_core.schedules import is_scheduled_publication, last_scheduled
from rl_core.types import Span, StepRecord, WeightVersion
from rl_core.weights import WEIGHTS_FILE, digest_tensors, make_weights_root, publish, read_tensors

LOG = logging.getLogger("headway.learner")
NAN = float("nan")
TURN_S = 2.0
"""Longest wait of a step that was sent ahead for the step before it to arrive."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The last scheduled publication: weights behind `step` steps. `tensors` None: the ones the learner has now."""

    step: int
    digest: str
    """Of what is trained: of an adapter, where the publication may be of all weights."""
    tensors: dict[str, Tensor] | None
    probe: Probe | None = None
    """Of an adapter."""


@dataclass(frozen=True, slots=True)
class After:
    """What became of the weights of a step."""

    digest: str
    """Empty on other ranks than 0."""
    published: WeightVersion | None
    changed: float


class Learner:
    """One rank of the learner group. `Learner(root=..., config=..., attempt=1, rank=0, ranks=1, rendezvous="")`.

    `config` holds the settings of config revision `revision`, the run's current one. A step is trained by those of its
    claim's revision: of `config` it then has what is no training field (`trained_by`).

    Calls from several threads run one after the other, `status` at any time. Raises ConfigError for settings that make
    no sense together.
    """

    def __init__(self, *, root: str, config: Config, attempt: int, rank: int, ranks: int, rendezvous: str,
                 revision: int = 0) -> None:
        check_combination(config.learner)
        make_deterministic()
        self._run = RunDir(Path(root))
        self._config, self._attempt = config, attempt
        device = torch.device(config.learner.device, rank % max(1, torch.cuda.device_count())
                              ) if config.learner.device == "cuda" else torch.device("cpu")
        self._ranks = Ranks(rank=rank, ranks=ranks, rendezvous=rendezvous, device=device,
                            deadline_s=config.deadlines.collective_s, barrier_s=config.deadlines.step_s)
        self._fold = Fold(self._run, config, self._ranks, revision=revision)
        self._lock = threading.Condition(threading.Lock())
        self._stagings: queue.SimpleQueue[Staging] = queue.SimpleQueue()
        """Those that no step has in use: one is read into while another one is trained from."""
        self._ledger = IntervalLedger()
        self._reading, self._read_at = self._ledger.seconds(), time.monotonic()
        self._stages: list[Span] = []
        """Of steps and publications since the last record that was written; all spans of those that were replayed."""
        self._busy_since: float | None = None
        self._next = -1
        self._revision = 0
        self._scheduled = Scheduled(-1, "", None)
        self._sender = open_sender(self._run, config, device) if rank == 0 else None

    # -- what the owner calls

    def next_step(self, attempt: int | None = None) -> int:
        """The step that `train` expects, once the running call has ended; -1: `restore` is needed first (nothing is
        loaded, or a step failed on its way)."""
        with self._owned(attempt):
            return self._next

    def restore(self, attempt: int | None = None) -> int:
        """Take up the newest whole checkpoint, or the initial model; returns the next step.

        A damaged checkpoint: the one before it. Raises CheckpointDamaged if none is whole, unless the initial model
        counts as one (`newest_whole`).
        """
        with self._owned(attempt):
            if self._ranks.rank == 0:
                make_weights_root(self._run, self._config)
                for directory in (self._run.checkpoints, self._run.weights_root):
                    sweep_aside(directory)
            self._ranks.barrier()
            self._load()
            self._reading, self._read_at = self._ledger.seconds(), time.monotonic()
            return self._next

    def train(self, step: int, attempt: int | None = None) -> StepRecord | None:
        """Train the claimed step and record it; rank 0 returns the record that stands, others None.

        The record is durable before this returns. A step that has one already is recomputed for its effect on the
        state: nothing is published, and other weights than the record's are kept beside it as a divergence. A voided
        step trains nothing and returns None. Raises ValueError if `step` is not the next one, FileNotFoundError
        without a claim, StaleAttempt, ClaimedShardCorrupt, EngineMismatch, NonFiniteTraining.
        """
        with self._lent_staging() as staging:
            ahead = self._read_ahead(step, staging)  # before the lock, which the step before it holds
            return self._train_at_its_turn(step, attempt, staging, ahead)

    def _train_at_its_turn(self, step: int, attempt: int | None, staging: Staging,
                           ahead: Read | None) -> StepRecord | None:
        with self._owned(attempt, alike=True) as attempt:
            if step > self._next >= 0:  # sent ahead of the step before it: that one's turn comes first
                self._lock.wait_for(lambda: self._next in (step, -1), timeout=TURN_S)
            self._check_turn(step, attempt)
            self._busy_since = time.monotonic()
            try:
                with self._ledger.during("busy", step):
                    return self._train(step, staging, ahead)
            except BaseException:
                self._next = -1  # the update may be half in the state: only `restore` makes it usable again
                raise
            finally:
                self._busy_since = None
                self._lock.notify_all()

    def _check_turn(self, step: int, attempt: int) -> None:
        """That this is the next step, and of the newest attempt, decided on all ranks alike: of two that decide by
        themselves one could wait for the other in a collective. Raises StaleAttempt, ValueError."""
        stale, astray = self._ranks.max([float(newest_attempt(self._run) > attempt), float(step != self._next)])
        if stale:
            check_attempt(self._run, attempt)  # what one rank has seen is there for all
        if step != self._next:
            raise ValueError(f"learner: asked to train step {step}, but the next step of its state is {self._next}")
        if astray:
            raise ValueError(f"learner: asked to train step {step}, which is not the next one of another rank's state")

    def publish_current(self, attempt: int | None = None) -> WeightVersion | None:
        """Make the last scheduled publication real if it is not yet, its bytes in place, and return it (rank 0; others
        None): what engines are offered at a start, after the recorded steps were replayed. The version of the same step
        and digest is adopted; other bytes get a new v and are reported as a divergence."""
        with self._owned(attempt), self._ledger.during("syncing"):
            begun = time.monotonic()
            weights = self._weights() if self._config.publish_every == 1 else self._scheduled.tensors
            state = self._fold.state
            base = state.base(keep=self._ranks.rank == 0)
            version = None if weights is None or self._ranks.rank else self._publish(state.published(weights, base))
            if version is not None:
                self._note("publish", begun, time.monotonic(), version.v)
            self._ranks.barrier()
            return version

    def checkpoint(self, attempt: int | None = None) -> int:
        """Write checkpoint n aside, manifest last; returns n, the number of steps behind it."""
        with self._owned(attempt), self._ledger.during("paused", self._next):
            state = self._fold.state
            first = self._ranks.rank == 0
            weights = self._weights()
            optimizer, roles = state.optimizer_tensors(keep=first), state.roles.tensors(keep=first)
            if first:
                write_checkpoint(
                    self._run, CheckpointState(
                        n=self._next, revision=self._revision, weights_digest=digest_tensors(weights.items()),
                        version_step=self._scheduled.step, version_digest=self._scheduled.digest,
                        skipped_in_a_row=state.skipped_in_a_row, roles=state.roles.numbers()),
                    parameters=weights, optimizer=optimizer, roles=roles,
                    version=None if self._scheduled.step == self._next else self._scheduled.tensors,
                    attempt=self._attempt, settings=self._config.checkpoint, fsync=self._config.storage.fsync,
                    spans=self._ledger.spans)
            self._ranks.barrier()
            return self._next

    def status(self) -> dict[str, Any]:
        """Next step, seconds that the running step takes so far (None: idle), and where the time went."""
        since = self._busy_since
        return {"rank": self._ranks.rank, "ranks": self._ranks.ranks, "next_step": self._next,
                "busy_s": None if since is None else time.monotonic() - since,
                "scheduled_step": self._scheduled.step, "seconds": self._ledger.seconds()}

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Full parameters and optimizer state by name (a collective); copies."""
        state = self._fold.state
        return ({name: tensor.clone() for name, tensor in state.weights().items()},
                {name: tensor.clone() for name, tensor in state.optimizer_tensors().items()})

    def role_tensors(self) -> dict[str, Tensor]:
        """What the models beside the policy have become (a collective); copies."""
        return {name: tensor.clone() for name, tensor in self._fold.state.roles.tensors().items()}

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._ranks.close()

    # -- one step

    @contextmanager
    def _lent_staging(self) -> Generator[Staging, None, None]:
        """Buffers that nobody else has while the block lasts."""
        try:
            staging = self._stagings.get_nowait()
        except queue.Empty:
            staging = Staging()
        try:
            yield staging
        finally:
            self._stagings.put(staging)

    def _read_ahead(self, step: int, staging: Staging) -> Read | None:
        """The claim of a step that was sent ahead, read while the one before it trains; None where none does.

        What is wrong with it is raised when its turn comes.
        """
        if self._busy_since is None or step <= self._next:
            return None
        try:
            return self._fold.read(step, staging, dict(self._fold.versions))
        except (BrokenFile, OSError):
            return None

    def _train(self, step: int, staging: Staging, ahead: Read | None) -> StepRecord | None:
        begin = time.monotonic()
        replayed = self._run.record(step).exists()
        voided = self._run.void(step).exists()
        trained = None if voided else self._fold.compute(step, staging, ahead)
        before_publication = time.monotonic()
        after = self._after(step, write=not replayed)
        self._next = step + 1
        if trained is None:
            return None
        claim, self._revision = trained.claim, trained.claim.revision
        if self._ranks.rank:
            return None
        seconds = trained.seconds | {"publish": time.monotonic() - before_publication}
        self._note_stages(trained, before_publication, after.published)
        metrics = self._metrics(trained, after.changed, seconds, time.monotonic() - begin)
        spans = (*self._ledger.take_spans(), *self._stages)
        record = put_record(self._run, StepRecord(
            step=step, idx=claim.idx, attempt=self._attempt, claim_digest=claim_digest(claim),
            weights_digest=after.digest, metrics=metrics, env=environment(self._config, self._ranks.ranks),
            published=after.published, revision=claim.revision, seconds=seconds, ts_us=time.time_ns() // 1000,
            by_source=by_source(trained.rows), parts=part_means(trained.rows), roles=trained.roles,
            spans=spans))
        self._stages = list(spans[-MAX_SPANS:]) if replayed else []  # a record that stood does not say them
        if step < FIRST_STEPS:
            self._fold.first_mismatch[step] = record.metrics["train/mismatch_current_abs"]
        return record

    def _note_stages(self, trained: Trained, before_publication: float, published: WeightVersion | None) -> None:
        """For the record: when the stages of the step were."""
        end = trained.begun_s
        for name in ("read", "build", "update"):
            begin, end = end, end + trained.seconds[name]
            self._note(name, begin, end, trained.claim.step)
        self._note("publish", before_publication, time.monotonic(), None if published is None else published.v)

    def _note(self, name: str, begin_s: float, end_s: float, of: int | None) -> None:
        begin, end = (self._ledger.wall_us(int(moment * 1e9)) for moment in (begin_s, end_s))
        self._stages.append(Span(name, begin, end, of))

    def fold(self, until: int) -> str:
        """Digest of the weights behind steps 0 .. until - 1, from the initial model, writing nothing."""
        torch.set_num_threads(self._config.learner.threads)  # sums of another number of threads have other bits
        self._next, staging = self._fold.load(None), Staging()
        for step in range(until):
            if not self._run.void(step).exists():
                self._fold.compute(step, staging)
        return digest_tensors(self._weights().items())

    def _after(self, step: int, *, write: bool) -> After:
        """Digest of the new weights; where a publication is scheduled, make it (unless `write` is False)."""
        weights = self._weights()
        digest = digest_tensors(weights.items()) if self._ranks.rank == 0 else ""
        if not is_scheduled_publication(step + 1, self._config):
            return After(digest, None, NAN)
        before = self._scheduled
        self._schedule(step + 1, digest, weights)
        if not write:
            return After(digest, None, NAN)
        with self._ledger.during("syncing"):
            state = self._fold.state
            base = state.base(keep=self._ranks.rank == 0)
            if self._ranks.rank:
                return After(digest, None, NAN)
            changed = self._changed(before, weights, base)
            return After(digest, self._publish(state.published(weights, base)), changed)

    def _metrics(self, trained: Trained, changed: float, seconds: dict[str, float], step_s: float) -> dict[str, float]:
        """All of `names("learner")`, and the reward parts. Time and utilization count from the record before."""
        now, at = self._ledger.seconds(), time.monotonic()
        before, since = self._reading, at - self._read_at
        self._reading, self._read_at = now, at
        rows = trained.rows
        return {
            **self._fold.metrics(trained, changed), **utilization("learner", before, now),
            "system/step_s": step_s, "system/waiting_s": now["waiting"] - before["waiting"],
            "system/proximal_s": trained.result.proximal_s, "system/roles_s": trained.result.roles_s,
            "system/update_s": trained.result.updated_s - trained.result.first_forward_s - trained.result.proximal_s
            - trained.result.roles_s,
            "system/publish_s": seconds["publish"], "system/samples_per_s": len(rows.reward_N) / since,
            "system/tokens_per_s": float(rows.length_N.sum()) / since, "system/mfu": self._mfu(trained)}

    def _mfu(self, trained: Trained) -> float:
        """Share of the ranks' peak that the model FLOPs of this step's passes are; NaN where one is unknown."""
        size, result, learner = self._fold.state.size, trained.result, trained.config.learner
        if size is None or result.updates == 0:
            return NAN
        peak = measured_peak(self._ranks.device.type, learner.dtype, learner.threads) \
            if learner.peak_tflops is None else learner.peak_tflops * 1e12
        flops = step_flops(size, *claim_places(trained.rows), passes=learner.passes, proximal=result.proximal_s > 0,
                           frozen=learner.lora.used)
        took_s = result.updated_s - result.first_forward_s - result.roles_s
        return flops / (took_s * peak * self._ranks.ranks)

    # -- state and weights

    @contextmanager
    def _owned(self, attempt: int | None, *, alike: bool = False) -> Generator[int, None, None]:
        """One call at a time, of the newest attempt (else StaleAttempt), which it gives. A newer owner takes over what
        still runs, published and recorded in its name, but nothing that waits. `alike`: whose attempt it is is asked
        inside, by `_check_turn`."""
        attempt = self._attempt if attempt is None else attempt
        if not alike:
            check_attempt(self._run, attempt)
        self._attempt = max(self._attempt, attempt)
        with self._lock, named_collectives(self._ranks.rank):
            if not alike:
                check_attempt(self._run, attempt)  # its owner may be over since: it may have waited here
            torch.set_num_threads(self._config.learner.threads)
            yield attempt

    def _load(self) -> None:
        saved = newest_whole(self._run, self._config.retention.replay)
        self._next = -1  # until it is loaded: the state before is gone then
        self._next = self._fold.load(saved)
        if saved is None:
            self._revision = 0
            self._schedule(0, None, self._weights())
        else:
            self._revision = saved.state.revision
            self._schedule(saved.state.version_step, saved.state.version_digest, saved.version)
        assert self._scheduled.step == last_scheduled(self._next, self._config)

    def _weights(self) -> dict[str, Tensor]:
        """Full parameters by name on the host (a collective); on one rank without a GPU they are the policy's own
        memory. On other ranks than 0 none, but for those of an adapter, which its probe needs on all."""
        state = self._fold.state
        return state.weights(keep=self._ranks.rank == 0 or state.lora.used)

    def _schedule(self, step: int, digest: str | None, weights: dict[str, Tensor]) -> None:
        """Remember the last scheduled publication (a collective). Its bytes are kept only where the learner moves on
        before the next one (publish_every > 1), or where they are an adapter's: one copy of what is trained in the host
        memory of rank 0."""
        state, kept = self._fold.state, None
        if (self._config.publish_every > 1 or state.lora.used) and self._ranks.rank == 0:
            own = self._ranks.ranks == 1 and self._ranks.device.type == "cpu"  # the policy's memory, which changes
            kept = {name: tensor.clone() for name, tensor in weights.items()} if own else weights
        if digest is None:
            digest = digest_tensors(weights.items()) if self._ranks.rank == 0 else ""
        room = self._config.data.max_prompt_tokens + self._config.sampling.max_new_tokens
        self._scheduled = Scheduled(step, digest, kept, state.probe(weights, room))

    def _publish(self, weights: Mapping[str, Tensor]) -> WeightVersion:
        """Make `weights`, in the form that engines are given, the version of the last scheduled publication. Rank 0
        alone."""
        step, digest = self._scheduled.step, None if self._fold.state.lora.used else self._scheduled.digest
        version = publish(self._run, weights, step, self._config.idx(step), self._attempt, self._config,
                          self._fold.versions, self._scheduled.probe, digest)
        self._fold.versions[version.v] = version
        others = [other.v for other in self._fold.versions.values()
                  if other.step == step and other.digest != version.digest]
        if others:
            LOG.warning("weights behind step %d diverge: version %d has digest %s, unlike versions %s of the same step",
                        step, version.v, version.digest, others)
        return version

    def _changed(self, before: Scheduled, weights: dict[str, Tensor], base: Mapping[str, Tensor]) -> float:
        """Share of values that differ from the publication before, in the engine's dtype; NaN if its bytes are gone. Of
        an adapter: of all weights with it. `base`: those under it."""
        known = [version.v for version in self._fold.versions.values()
                 if (version.step, version.digest) == (before.step, before.digest)]
        tensors = before.tensors
        if tensors is None and known:
            with suppress(WeightsDamaged):
                tensors = read_tensors(self._run.weights(known[-1]) / WEIGHTS_FILE)
        if tensors is None:
            return NAN
        state = self._fold.state
        return changed_for_engines(state.served(tensors, base), state.served(weights, base), self._config)


def fold_claims(root: str, config: Config | None = None, steps: int | None = None) -> str:
    """Digest of the weights after the initial model was folded over the run's claims, in one process, writing nothing.

    Each by the settings of its config revision. `config`: those of revision 0, with the threads and the device to fold
    on; None: as they are stored. `steps`: how many; by default every recorded step, or every claim of a run without
    records. Equal to the last record's weights digest exactly if each claim took effect once, in order, whatever was
    killed, restarted and amended.
    """
    run = RunDir(Path(root))
    recorded = recorded_steps(run)
    until = steps if steps is not None else recorded[-1] + 1 if recorded else len(claimed_steps(run))
    learner = Learner(root=root, config=config_of(run, 0) if config is None else config, attempt=newest_attempt(run),
                      rank=0, ranks=1, rendezvous="")
    return learner.fold(until)
