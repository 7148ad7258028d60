"""Experience: all that is known of a run's groups, under one Condition, for the flow (claims) and the pump (leases).

All of it is rebuilt from the run directory and from what live workers say; nothing is carried that a restart resets.
Whoever changes something notifies `changed`; whoever waits, waits on it:

| loop | consumes | waits for | unblocked by |
| --- | --- | --- | --- |
| `claim(step)`, training side | usable groups | `groups_per_step` of them | a verified shard, the end, `fail` |
| the pump, rollout side | positions | capacity | a claim, a served version, an ended lease |
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from rl_core.config import Config
from rl_core.errors import BrokenFile, DeadlinePassed, DiskQuotaTooSmall, FailureBudgetSpent, RunEnded, ShardsSpent
from rl_core.experience import admission
from rl_core.experience.admission import AdmissionState
from rl_core.experience.discovery import RESERVE_BYTES, Discovery, reserve_bytes
from rl_core.experience.exact import ExactOrder
from rl_core.experience.index import group_key
from rl_core.experience.known import Known
from rl_core.experience.leases import Leased
from rl_core.experience.ledger import (
    CONSUMER,
    EndOfData,
    group_ids_digest,
    put_claim,
    put_drops,
    put_end,
    read_claim,
    read_end,
)
from rl_core.experience.positions import Slot
from rl_core.experience.retirement import Retirement, finish_retirement, retire
from rl_core.experience.snapshots import put_snapshot
from rl_core.experience.staleness import DROP_REASONS
from rl_core.run_dir import RunDir, check_attempt
from rl_core.types import Claim, Landed, Outcome, WeightVersion, group_id, parse_group_id
from rl_core.versions import learn_versions

LOG = logging.getLogger("headway.experience")
POLL_S = 0.5
"""A claim that waits looks at its deadlines this often, and lists the streams itself while no pump does."""

EndOrClaim = Claim | EndOfData


class Experience:
    """Thread-safe. One per start of the run's owner."""

    def __init__(self, run: RunDir, config: Config, attempt: int, revision: int = 0, *, consumer: str = CONSUMER,
                 clock: Callable[[], float] = time.monotonic, goal: int | None = None) -> None:
        """`goal`: usable groups that shall wait, of a start that trains nothing (`gather`); bound and steps do not stop
        admission before. Reads the ledger and the outcomes; shards are found by the first `discover`.

        Raises BrokenFile where the ledger has a gap, ValueError for a policy that cannot work.
        """
        self.run, self.config, self.attempt, self.revision, self.consumer = run, config, attempt, revision, consumer
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._known = Known(run, config, attempt, consumer=consumer, clock=clock)
        self.index, self.positions, self.leases = self._known.index, self._known.positions, self._known.leases
        # A sampler sees rewards of what has landed, claimed or not: then shards that claims have used up are read, too.
        used_up = self._known.rows_by_shard if config.data.sampler is None else {}
        self.discovery = Discovery(run, claimed_rows=used_up, retired=self._known.retired)
        self._clock = clock
        self._listing = threading.Lock()
        self._listed = False
        self._failure: BaseException | None = None
        self._closed = False
        self._prompt_idx: Callable[[int, int], int] | None = None
        self._known_versions: dict[int, WeightVersion] = {}
        self._idx_of_version: dict[int, int] = {}
        self._hold: tuple[int, float] | None = None
        self._goal = goal
        self._exact = ExactOrder.of(config)
        self._reserve = RESERVE_BYTES
        self._free = shutil.disk_usage(run.root).free
        self.makes_room = False
        """Somebody makes room when `short_of_room` says so (`made_room`); without, a lack of disk ends the run."""
        self.short_of_room: int | None = None
        """The step whose claim waits for nothing but bytes on the disk."""
        self._no_room_at: int | None = None
        self._sampled = (0.0, 0)

    @property
    def next_step(self) -> int:
        """First step without a claim."""
        return self._known.next_step

    def _settle(self) -> None:
        """After news: what it leads to, and wake everybody."""
        try:
            self._known.settle(self._prompt_idx if self._listed else None)
        except FailureBudgetSpent as error:
            self.fail(error)
        self.changed.notify_all()

    # -- discovery

    def discover(self, hints: Sequence[Landed] = (), *, full: bool = False) -> int:
        """Find, verify and index new shards and outcomes. Returns the number of new shards.

        With hints only the streams they name are looked at. Without, leases that their live worker does not name any
        more, and that are not found now, have failed. Of outcomes the workers tell; they are listed only with all
        streams, where such a lease may have one, and where no pump hears the workers. Verification and listing run
        outside the lock.
        """
        with self._listing:
            full = full or not self._listed
            if not self._listed:
                finish_retirement(self.run, self.consumer)
            if not hints:
                self._free = shutil.disk_usage(self.run.root).free
            with self.changed:
                missing = [] if hints else self.leases.missing()
            found = self.discovery.new(hints, full=full)
            for ref in found:
                if (info := self.discovery.read(ref)) is not None:
                    with self.changed:
                        self._known.add_shard(info)
                        if self._listed:  # what a start finds was sampled before it
                            total, answers = self._sampled
                            self._sampled = (total + float(info.reward_mean @ info.n_responses),
                                             answers + int(info.n_responses.sum()))
                        self._settle()
            if full:
                self._reserve = reserve_bytes(self.run)
            untold = self._known.untold_outcomes() if not hints and (full or missing or not self.pumped) else []
            with self.changed:
                self._listed = True
                for outcome in untold:
                    self._known.add_outcome(outcome)
                for name in missing if not self.discovery.unread else ():  # it may have landed in one of these
                    self._known.end_missing(name)
                if found or untold or missing or full:
                    self._settle()
            return len(found)

    # -- training side

    def claim(self, step: int, deadline_s: float) -> EndOrClaim:
        """The claim of step k: the one that exists, or a new one as soon as `groups_per_step` usable groups wait.

        Raises DeadlinePassed with the stall report, StalenessStarvation, NothingToTrainOn, DiskQuotaTooSmall,
        StaleAttempt, or what `fail` was given. ValueError for a step whose predecessor has no claim.
        """
        check_attempt(self.run, self.attempt)
        start = self._clock()
        while (answer := self.poll(step, self._clock() - start)) is None:
            waited = self._clock() - start
            if waited >= deadline_s:
                raise DeadlinePassed(f"claim of step {step}: waited {waited:.0f} s (deadlines.claim_s). "
                                     + self.stall_report(step))
            if not self.pumped:
                self.discover()
            with self.changed:
                if (claim := self.try_claim(step)) is not None:
                    answer = claim
                    break
                self.changed.wait(min(POLL_S, deadline_s - waited))
        self._snapshot_if_due(answer)
        return answer

    def _snapshot_if_due(self, answer: EndOrClaim) -> None:
        """Every `retention.snapshot_every` claims; one that cannot be written costs the next start some time only."""
        done = answer.step + 1
        if isinstance(answer, EndOfData) or done != self.next_step or done % self.config.retention.snapshot_every:
            return
        try:
            put_snapshot(self.run, done, attempt=self.attempt, consumer=self.consumer)
        except (OSError, BrokenFile) as error:
            LOG.warning("no snapshot below step %d: %s", done, error)

    def retire(self, below: int) -> Retirement:
        """Remove the shards that no step from `below` on needs. Raises what `retirement.retire` does."""
        archive = self.config.retention.archive
        gone = retire(self.run, below, attempt=self.attempt, consumer=self.consumer,
                      archive=None if archive is None else Path(archive).expanduser())
        if gone.shards:
            with self._listing, self.changed:
                self.discovery.retire(gone.shards)
                self._free = shutil.disk_usage(self.run.root).free
                self.changed.notify_all()
        return gone

    def made_room(self, freed: int) -> None:
        """Somebody has answered `short_of_room`: so many bytes were freed. 0: the claim ends with DiskQuotaTooSmall."""
        with self.changed:
            self._no_room_at, self.short_of_room = self.short_of_room if freed == 0 else None, None
            self.changed.notify_all()

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Snapshots that this start could not use, with the reason."""
        return self._known.passed_over

    def poll(self, step: int, waited_s: float) -> EndOrClaim | None:
        """One look of a claim that has waited for `waited_s` so far: the claim, the end, or None = wait on."""
        if not self._listed:
            self.discover(full=True)
        with self.changed:
            if (claim := self.try_claim(step)) is not None:
                return claim
            if (end := self._ended(step)) is not None:
                return end
            self._known.health.check(self._unusable_text())
            if waited_s >= self.config.staleness.drops_after_s and self._record_drops(step):
                return None
            self._check_disk(step)
            if not self._source_ended():
                return None
        self.discover(full=True)
        with self.changed:
            if self._record_drops(step) or not self._source_ended() or self._enough(step):
                return None
            if self.config.offline:  # the start has counted them: shards were lost or have rotted since
                raise ShardsSpent(f"step {step} needs {self.config.groups_per_step} groups, and {self.L} of those of "
                                  f"run {self.config.data.shards_from} are left; see `headway audit`, and quarantine")
            return self._put_end(step, "data")

    def try_claim(self, step: int) -> Claim | None:
        """The claim of step k if it exists or can be made now; never waits."""
        with self.changed:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise RunEnded(f"nothing more is claimed: the session of attempt {self.attempt} has ended")
            self._adopt_claims()
            if step < self.next_step:
                return read_claim(self.run, step, self.consumer)
            if step > self.next_step:
                raise ValueError(f"step {step} cannot be claimed before step {self.next_step} is")
            if step >= self.config.total_steps or not self._enough(step) or self._held(step):
                return None
            return self._make_claim(step)

    def _make_claim(self, step: int) -> Claim:
        idx, config = self.config.idx(step), self.config
        selection = self.index.select(idx, config.groups_per_step, self._versions())
        assert selection is not None
        claim = put_claim(self.run, Claim(
            step=step, idx=idx, attempt=self.attempt, consumer=self.consumer, eta=str(config.staleness.bound),
            hard_max=config.staleness.effective_hard_max, policy=config.claim_policy, groups=selection.groups,
            group_ids_digest=group_ids_digest(g.group_id for g in selection.groups),
            shard_digests=selection.shard_digests, masked=selection.masked, dropped=selection.dropped,
            revision=self.revision, ts_us=time.time_ns() // 1000), fsync=config.storage.fsync)
        self._apply_claim(claim)
        return claim

    def _adopt_claims(self) -> None:
        """Claims that another attempt has made since: whoever made it, it is the claim."""
        while self.run.claim(self.next_step, self.consumer).exists():
            check_attempt(self.run, self.attempt)
            self._apply_claim(read_claim(self.run, self.next_step, self.consumer))

    def _apply_claim(self, claim: Claim) -> None:
        self._known.add_claim(claim)
        self._hold = None
        self._settle()

    def _record_drops(self, step: int) -> bool:
        """Write what no claim will take any more. True if there was something."""
        drops = self.index.drops(self.config.idx(step))
        if drops:
            put_drops(self.run, step, drops, attempt=self.attempt, consumer=self.consumer,
                      fsync=self.config.storage.fsync)
            self._known.add_drops(drops)
            self._settle()
        return bool(drops)

    def _versions(self) -> dict[int, int]:
        """Publication index by version id; read only where tokens are masked by age."""
        if self.index.rule.policy == "mask" and len(learn_versions(self.run, self._known_versions)) > len(
                self._idx_of_version):
            self._idx_of_version = {v: version.idx for v, version in self._known_versions.items()}
        return self._idx_of_version

    def _enough(self, step: int) -> bool:
        return self.index.usable(self.config.idx(step)) >= self.config.groups_per_step

    def _held(self, step: int) -> bool:
        """Policy `wait`: a group in flight would be over the limit one step later; in the end it is cancelled. Under
        `staleness.exact`: a publication that lacks groups would lose its weights."""
        if self._exact is not None:
            here = self.index.held_by_publication(self.config.idx(step))
            return self._exact.holds(step, here)
        if self.index.rule.policy != "wait":
            return False
        late = [lease for lease in self.leases.by_id.values()
                if self.config.idx(step + 1) - lease.idx_dispatch > self.index.rule.limit]
        if not late:
            self._hold = None
        elif self._hold is None or self._hold[0] != step:
            self._hold = (step, self._clock())
        elif self._clock() - self._hold[1] >= self.config.staleness.wait_deadline_s:
            for lease in late:
                lease.cancel = True
            self.changed.notify_all()
        return bool(late)

    def gather(self, deadline_s: float, check: Callable[[], None]) -> int:
        """Wait until the goal of usable groups waits, or the source has ended. Returns how many there are then.

        Raises DeadlinePassed with the stall report `deadline_s` after the last one that was new, NothingToTrainOn, what
        `fail` was given, and what `check` raises.
        """
        assert self._goal is not None
        have, since = -1, self._clock()
        while True:
            check()
            with self.changed:
                if self._failure is not None:
                    raise self._failure
                if have < self.L:
                    have, since = self.L, self._clock()
                if have >= self._goal or self._source_ended():
                    return self.L
                self._known.health.check(self._unusable_text())
                if self._clock() - since >= deadline_s:
                    raise DeadlinePassed(f"rollout: no new group for {deadline_s:.0f} s (deadlines.claim_s). "
                                         + self.stall_report())
                self.changed.wait(POLL_S)

    # -- ends

    def fail(self, error: BaseException) -> None:
        """End every wait with this error; the first one stands."""
        with self.changed:
            if self._failure is None:
                self._failure = error
            self.changed.notify_all()

    def close(self) -> None:
        """The owner has ended its session: a claim that still waits on another thread ends with RunEnded."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def wake(self) -> None:
        """Something outside changed (a version was published): everybody looks again."""
        with self.changed:
            self.changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def _ended(self, step: int) -> EndOfData | None:
        if step >= self.config.total_steps:
            return self._put_end(step, "steps")
        stored = read_end(self.run, self.revision, self.consumer)
        return stored if stored is not None and stored.step == step else None

    def _put_end(self, step: int, reason: Literal["data", "steps"]) -> EndOfData:
        end = EndOfData(step=step, reason=reason, left_over=self.index.held(self.config.idx(step)))
        return put_end(self.run, end, revision=self.revision, attempt=self.attempt, consumer=self.consumer)

    def _source_ended(self) -> bool:
        """No position is unleased, no try waits, F is known and 0, every shard is read. Offline nothing is ever leased.
        """
        if self.discovery.unread:
            return False
        return self.config.offline or (self.leases.known and not len(self.leases) and self.positions.exhausted)

    def _check_disk(self, step: int) -> None:
        """The byte term alone stops admission, nothing is in flight and a claim is not full: nothing can free bytes."""
        if not self.leases.known or len(self.leases) or self._enough(step) or self.positions.exhausted:
            return
        state = self.admission(max(self.leases.served.values(), default=-1))
        if admission.terms(state)["disk"] >= 1 or self._record_drops(step):
            return
        if self.makes_room and self._no_room_at != step:
            self.short_of_room = step  # until `made_room`; the owner looks at it while it waits for this claim
            return
        raise DiskQuotaTooSmall(
            f"storage.bytes_quota is {state.bytes_quota}: {state.landed_bytes} bytes of shards and a reserve of "
            f"{state.reserve} leave no room for a group of {state.group_bytes}, and {state.landed} of "
            f"{state.groups_per_step} groups wait; {state.free_bytes} bytes of the file system are free; no shard can "
            "be retired; raise storage.bytes_quota, or make room")

    # -- rollout side

    def attach(self, n_prompts: int, prompt_idx: Callable[[int, int], int]) -> None:
        """A pump starts. `prompt_idx(dataset_epoch, position)` is the order of the prompts.

        F is unknown, and nothing is leased, until `leases_known`.
        """
        with self.changed:
            self.positions.open(n_prompts, self.config.data.epochs)
            self._prompt_idx = prompt_idx
            self.leases.known = False
            self.leases.served.clear()
            for lease in list(self.leases.by_id.values()):
                self.leases.lose(lease.group_id)
                self.positions.lost(lease.slot)

    def detach(self) -> None:
        """The pump has stopped; what its workers still land is found by listing."""
        with self.changed:
            self._prompt_idx = None
            self.leases.known = False
            self.changed.notify_all()

    @property
    def pumped(self) -> bool:
        return self._prompt_idx is not None

    def adopt(self, worker: str, name: str, idx_dispatch: int) -> bool:
        """Count a group that a live worker has in flight as leased to it.

        False if no claim will take it (claimed, dropped, given up, landed, a later try known): it is to be cancelled.
        """
        epoch, prompt_idx, try_no = parse_group_id(name)
        key = group_key(name)
        with self.changed:
            assert self._prompt_idx is not None
            done = key in self.index.claimed or key in self.index.ended or self.index.waits(key)
            if done or name in self.leases.by_id:
                return False
            for position in self.positions.candidates(epoch, try_no):
                if self._prompt_idx(epoch, position) == prompt_idx:
                    slot = Slot(dataset_epoch=epoch, position=position, try_no=try_no)
                    self.positions.known(slot)
                    self.leases.add(name, slot, worker, idx_dispatch=idx_dispatch, sent_at=self._clock())
                    return True
            return False

    def leases_known(self) -> None:
        """Every live worker was asked and all streams were listed since: F is known, capacity opens."""
        with self.changed:
            self.leases.known = True
            self._settle()

    def serves(self, worker: str, idx: int) -> None:
        """A live worker has acknowledged this publication index; -1 = it serves nothing yet."""
        with self.changed:
            self.leases.served[worker] = idx
            self.changed.notify_all()

    def offered(self, newest_idx: int) -> int:
        """Publication index that workers are to serve: the newest, but under `staleness.exact` the first that lacks
        groups."""
        if self._exact is None or self._goal is not None:
            return newest_idx
        with self.changed:
            here = self.index.held_by_publication(self.config.idx(self.next_step))
            return self._exact.offered(self.next_step, newest_idx, here)

    def grant(self, workers: Sequence[str]) -> list[Leased]:
        """Lease as many positions as capacity lets, each to the least loaded of these workers that has room."""
        with self.changed:
            if self._prompt_idx is None or not self.leases.known:
                return []
            room = {w: admission.capacity(self.admission(self.leases.served.get(w, -1))) for w in workers}
            load = {w: len(self.leases.of(w)) for w in workers}
            granted: list[Leased] = []
            while (able := [w for w in workers if room[w] > 0]) and (slot := self.positions.take()) is not None:
                worker = min(able, key=lambda w: (load[w], w))
                name = group_id(slot.dataset_epoch, self._prompt_idx(slot.dataset_epoch, slot.position), slot.try_no)
                granted.append(self.leases.add(name, slot, worker, idx_dispatch=self.leases.served[worker]))
                load[worker] += 1
                room = {w: n - 1 for w, n in room.items()}  # every term of the formula falls by one with F
            return granted

    def outcome(self, outcome: Outcome) -> bool:
        """A worker says that a group ended without a row. True if that is news.

        Should there be a row all the same (a worker that was believed dead), a claim counts more, a waiting row less:
        the next try is on its way.
        """
        with self.changed:
            if news := self._known.add_outcome(outcome):
                self._settle()
            return news

    def cancelled(self, name: str) -> None:
        """A worker has cancelled a group. By policy `wait` it has failed (`wait_timeout`) and is leased again as its
        next try; else as the same one."""
        with self.changed:
            if (lease := self.leases.by_id.get(name)) is None:
                return
            if lease.cancel:
                self._known.put_outcome(lease.slot, name, "failed", "wait_timeout",
                                        f"in flight since publication {lease.idx_dispatch}, held a claim for "
                                        f"{self.config.staleness.wait_deadline_s:g} s")
            else:
                self._known.lose([name])
            self._settle()

    def worker_ended(self, worker: str) -> None:
        """The worker is dead (killed first) and its stream was listed since: what it had in flight is leased again."""
        with self.changed:
            self.leases.served.pop(worker, None)
            self._known.lose([lease.group_id for lease in self.leases.of(worker)])
            self._settle()

    # -- views

    @property
    def L(self) -> int:
        """Groups that wait for the next unclaimed step or, under `staleness.exact`, for a later one."""
        return self.index.held(self.config.idx(self.next_step))

    @property
    def F(self) -> int:
        """Groups in flight."""
        return len(self.leases)

    def take_sampled(self) -> float:
        """Mean reward of the answers found since this was last asked, trained or not; NaN where there are none."""
        with self.changed:
            (total, answers), self._sampled = self._sampled, (0.0, 0)
            return total / answers if answers else math.nan

    def landed_groups(self) -> list[tuple[int, int, int, float, float]]:
        """(dataset epoch, prompt index, try, mean reward, spread) of all groups that have landed, for a sampler."""
        with self.changed:
            return list(self._known.landed.values())

    def take_filtered(self) -> int:
        """Groups that were filtered since this was last asked."""
        with self.changed:
            count, self._known.filtered = self._known.filtered, 0
            return count

    def admission(self, served_idx: int) -> AdmissionState:
        """The state behind the capacity of a worker that serves this publication index."""
        config, found = self.config, self.discovery
        worst = admission.worst_group_bytes(
            group_size=config.group_size, max_prompt_tokens=config.data.max_prompt_tokens,
            max_new_tokens=config.sampling.max_new_tokens)
        with self.changed:
            extra, total_steps = config.admission_extra, config.total_steps
            if self._goal is not None:
                extra = self._goal - config.groups_per_step * (config.publish_every * (served_idx + 1) - self.next_step)
                total_steps = self.next_step + math.ceil(self._goal / config.groups_per_step)
            return AdmissionState(
                groups_per_step=config.groups_per_step, publish_every=config.publish_every, extra=extra,
                total_steps=total_steps, max_groups=config.max_groups,
                step=self.next_step, served_idx=served_idx, landed=self.L, leased=self.F,
                bytes_quota=config.storage.bytes_quota, reserve=self._reserve, landed_bytes=found.landed_bytes,
                free_bytes=self._free, group_bytes=admission.bytes_per_group(
                    landed_groups=found.landed_groups, landed_bytes=found.measured_bytes, worst_case=worst,
                    groups_per_step=config.groups_per_step))

    def budgets(self) -> dict[str, tuple[int, int]]:
        """What is spent of the budgets of failure.*, and what is allowed. To be asked under the lock."""
        return self._known.health.budgets()

    def stall_report(self, step: int | None = None) -> str:
        """Which side starves whom, in one paragraph for people."""
        with self.changed:
            step = self.next_step if step is None else step
            have, unusable = self.index.usable(self.config.idx(step)), self._unusable_text()
            lines = [f"Step {step} needs {self.config.groups_per_step} usable groups: {have} landed, {self.F} in flight"
                     + (f", landed but unusable: {unusable}." if unusable else ".")]
            if self._exact is not None:
                lines.append(self._exact.explain(step, self.index.held_by_publication(self.config.idx(step))))
            if unread := list(self.discovery.unread.values()):
                lines.append(f"{len(unread)} landed shards cannot be read now: {unread[0]}.")
            if self._hold is not None:
                lines.append("Held by staleness.policy wait: a group in flight would be over the limit one step later.")
            if not self.pumped:
                return " ".join([*lines, "No pump is running."])
            if not self.leases.known:
                return " ".join([*lines, "Waiting for the live workers to say what they have in flight."])
            for worker, idx in sorted(self.leases.served.items()):
                lines.append(f"{worker} serves publication {idx} with {len(self.leases.of(worker))} groups in flight; "
                             f"{admission.explain(self.admission(idx))}.")
            if not self.leases.served:
                lines.append("No rollout worker is alive.")
            if self.positions.exhausted:
                lines.append("No prompt is left to lease.")
            return " ".join(lines)

    def _unusable_text(self) -> str:
        verdict_G = self.index.verdicts(self.config.idx(self.next_step))
        named = {name: int(np.count_nonzero(verdict_G == code)) for code, name in DROP_REASONS.items()}
        return ", ".join(f"{n} {name}" for name, n in named.items() if n)
