"""Random worlds around the real ledger, index, leases and files: always progress, or a named error; never a group
over the hard limit, nothing trained twice, and the audit holds (experience-store.md 3.7, last line).

Time is simulated; the run directory, the shards and the claims are real. The world does what pump and flow do, in
one thread and in a random order of events: leases, landings with and without hints, failed groups, dying workers,
swaps that lag, and an owner that crashes and starts again beside workers that live on.
"""

from __future__ import annotations

import heapq
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.config import Config
from rl_core.errors import DiskQuotaTooSmall, NothingToTrainOn, RunEnded, StalenessStarvation
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.index import group_key
from rl_core.experience.leases import Leased
from rl_core.experience.ledger import EndOfData, claims
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.run_dir import OwnerLock, RunDir
from rl_core.types import Lease, Outcome, Sampling, TrajectoryGroup, WeightVersion
from rl_core.versions import put_version
from tests.builders import make_prompt, make_trajectory

STEP_S, POLL_S, LIST_S, LIMIT_S = 8.0, 0.5, 2.0, 20_000.0


@dataclass(frozen=True)
class World:
    """One random world; `seed` draws everything that is not named here."""

    seed: int
    groups_per_step: int
    publish_every: int
    eta: str
    policy: str
    hard_max_over: int | None
    """hard_max - ceil(eta); None takes the default."""
    filtered: float
    """Share of groups without reward spread; they are dropped."""
    spread: float
    """Sigma of the log-normal time of a group."""
    swap_lag_s: float
    workers: int
    prompts: int
    epochs: int | None
    total_steps: int
    failing: float
    """Share of groups that end with an outcome `failed`."""
    forgetting: float
    """Share of leases that a live worker loses without a trace."""
    deaths: int
    """Some of the dead are not: they go on landing what was leased again elsewhere."""
    crashes: int
    hints: bool
    small_disk: bool
    exact: int | None = None

    def config(self) -> Config:
        staleness: dict[str, Any] = {"bound": self.eta, "policy": self.policy, "exact": self.exact,
                                     "wait_deadline_s": 5.0}
        if self.hard_max_over is not None:
            staleness["hard_max"] = -int(-float(self.eta) // 1) + self.hard_max_over
        return Config.model_validate({
            "seed": self.seed, "groups_per_step": self.groups_per_step, "publish_every": self.publish_every,
            "group_size": 2, "total_steps": self.total_steps, "data": {"epochs": self.epochs, "max_prompt_tokens": 8},
            "sampling": {"max_new_tokens": 8}, "staleness": staleness, "rollout": {"no_spread": "drop"},
            "storage": {"fsync": False, "bytes_quota": 64 * 2**20 + (60_000 if self.small_disk else 2**30)},
            "failure": {"drop_share_deadline_s": 200.0, "reward_failures": 60}})


class Worker:
    """A live process: groups in flight, a stream of its own, a served version."""

    def __init__(self, world: Simulation, name: str) -> None:
        self.world, self.name, self.served = world, name, -1
        self.writer = ShardWriter(world.run, name, world.attempt, {}, False)
        self.gone = False
        self.in_flight: dict[str, tuple[Lease, list[int]]] = {}
        """Group -> its lease and the publication indices that sampled it so far."""
        self.ready: dict[str, TrajectoryGroup] = {}
        """Finished, not landed yet."""

    def lease(self, lease: Lease) -> None:
        if self.world.rng.random() < self.world.world.forgetting:
            return
        self.in_flight[lease.group_id] = (lease, [self.served])
        duration = float(np.exp(self.world.rng.normal(1.0, self.world.world.spread)))
        self.world.at(duration, self.finish, lease.group_id)

    def swap(self, idx: int) -> None:
        self.served = idx
        for _, used in self.in_flight.values():
            used.append(idx)

    def finish(self, name: str) -> None:
        if self.gone or name not in self.in_flight:
            return
        lease, used = self.in_flight[name]
        if self.world.rng.random() < self.world.world.failing:
            del self.in_flight[name]
            outcome = Outcome(group_id=name, kind="failed", reason="reward_error", error="boom", try_no=lease.try_no,
                              position=lease.prompt.position, dataset_epoch=lease.prompt.dataset_epoch)
            put_outcome(self.world.run, outcome)
            if self.world.world.hints:
                self.world.experience.outcome(outcome)
            return
        self.ready[name] = self.group(lease, used)
        if len(self.ready) == 1:
            self.world.at(0.5, self.land)

    def land(self) -> None:
        """What has become ready meanwhile lands in one shard of at most 32 groups."""
        self.ready = {name: group for name, group in self.ready.items() if name in self.in_flight}
        groups = list(self.ready.values())[:32]
        if self.gone or not groups:
            return
        self.ready = dict(list(self.ready.items())[32:])
        if self.ready:
            self.world.at(0.5, self.land)
        hint = self.writer.land(groups)
        for group in groups:
            del self.in_flight[group.lease.group_id]
        if self.world.world.hints and self.world.rng.random() < 0.8:
            self.world.experience.discover([hint])

    def group(self, lease: Lease, used: list[int]) -> TrajectoryGroup:
        same = self.world.rng.random() < self.world.world.filtered
        rewards = (0.0, 0.0) if same else (0.0, 1.0)
        answers = tuple(make_trajectory(self.world.rng, 4 + len(used), versions=used, reward=r) for r in rewards)
        return TrajectoryGroup(lease=lease, trajectories=answers, idx_min=min(used), idx_max=max(used),
                               dispatched_at_us=0, finished_at_us=0)


class Simulation:
    """Version v has publication index v: one version per publication."""

    def __init__(self, world: World, run: RunDir) -> None:
        self.world, self.run, self.config = world, run, world.config()
        self.rng = np.random.default_rng(world.seed)
        self.now, self.attempt, self.trained, self.published = 0.0, 0, 0, -1
        self.events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.order = count()
        self.workers: dict[str, Worker] = {}
        self.waiting_since: float | None = None
        self.end: EndOfData | None = None
        self.swapping = False
        self.publish(0)
        self.start_owner()
        for i in range(world.workers):
            self.workers[f"w{i}"] = Worker(self, f"w{i}")
            self.experience.serves(f"w{i}", -1)
        self.experience.leases_known()
        for _ in range(world.deaths):
            self.at(float(self.rng.uniform(0, 60)), self.worker_dies)
        for _ in range(world.crashes):
            self.at(float(self.rng.uniform(0, 60)), self.owner_crashes)
        self.at(0.0, self.poll_claim)
        self.at(LIST_S, self.list_streams)

    def at(self, delay: float, what: Any, *args: Any) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), what, args))

    def play(self) -> EndOfData:
        while self.end is None:
            assert self.events, self.experience.stall_report()
            self.now, _, what, args = heapq.heappop(self.events)
            assert self.now < LIMIT_S, f"no progress: {self.experience.stall_report()}"
            what(*args)
            self.pump()
        return self.end

    # -- what the pump does

    def pump(self) -> None:
        bound = self.config.max_outstanding
        for leased in self.experience.grant(list(self.experience.leases.served)):
            outstanding = self.experience.F + self.experience.L
            assert outstanding <= bound, f"{outstanding} out against a bound of {bound}"
            self.workers[leased.worker].lease(self.lease_of(leased))
            leased.sent_at = self.now
        in_flight = [name for worker in self.workers.values() for name in worker.in_flight if not self.is_known(name)]
        assert len(in_flight) <= self.config.max_groups, "the workers have more in flight than was leased to them"
        held = list(self.experience.leases.by_id.values())
        for leased in [lease for lease in held if lease.cancel and not lease.cancel_sent]:
            leased.cancel_sent = True
            worker = self.workers[leased.worker]
            if leased.group_id in worker.in_flight and self.rng.random() < 0.7:
                del worker.in_flight[leased.group_id]
                self.experience.cancelled(leased.group_id)
            elif leased.group_id in worker.in_flight:
                worker.finish(leased.group_id)
        offered = self.experience.offered(self.published)
        if not self.swapping and (behind := [w for w in self.workers.values() if w.served < offered]):
            worker, self.swapping = min(behind, key=lambda w: (w.served, w.name)), True
            self.at(self.world.swap_lag_s * float(self.rng.uniform(0.5, 1.5)), self.swap, worker, offered)

    def lease_of(self, leased: Leased) -> Lease:
        slot = leased.slot
        return Lease(prompt=make_prompt(slot.position, dataset_epoch=slot.dataset_epoch,
                                        prompt_idx=self.prompt_idx(slot.dataset_epoch, slot.position)),
                     try_no=slot.try_no, lease_no=leased.lease_no, idx_dispatch=leased.idx_dispatch, n_expected=2,
                     min_group=2, sampling=Sampling(max_new_tokens=8), attempt=self.attempt)

    def prompt_idx(self, dataset_epoch: int, position: int) -> int:
        return (position * 7 + dataset_epoch) % self.world.prompts if self.world.prompts % 7 else position

    def swap(self, worker: Worker, idx: int) -> None:
        self.swapping = False
        if self.workers.get(worker.name) is worker:
            worker.swap(idx)
            self.experience.serves(worker.name, idx)

    def list_streams(self) -> None:
        for worker in self.workers.values():
            self.experience.leases.note_in_flight(worker.name, worker.in_flight, self.now)
        self.experience.discover(full=bool(self.rng.random() < 0.2))
        self.at(LIST_S, self.list_streams)

    def worker_dies(self) -> None:
        name = self.replace_worker()
        self.experience.discover(full=True)
        self.experience.worker_ended(name)
        self.experience.serves(name, -1)

    def is_known(self, name: str) -> bool:
        """The group has landed or ended elsewhere: a worker that was believed dead has had it, too."""
        key, index = group_key(name), self.experience.index
        return key in index.claimed or key in index.ended or index.waits(key)

    def replace_worker(self) -> str:
        name = str(self.rng.choice(sorted(self.workers)))
        self.workers[name].gone = bool(self.rng.random() < 0.7)
        self.workers[name] = Worker(self, name)
        return name

    # -- what the flow does

    def start_owner(self) -> None:
        lock = OwnerLock(self.run)
        self.attempt = lock.next_attempt(self.trained, None)
        lock.release()
        self.experience = Experience(self.run, self.config, self.attempt, clock=lambda: self.now)
        self.experience.attach(self.world.prompts, self.prompt_idx)

    def owner_crashes(self) -> None:
        """Workers live on; what they have in flight is adopted, or cancelled where no claim would take it."""
        if self.rng.random() < 0.3:
            self.replace_worker()
        self.start_owner()
        self.experience.discover(full=True)
        for worker in self.workers.values():
            for name in list(worker.in_flight):
                if not self.experience.adopt(worker.name, name, max(worker.served, 0)):
                    del worker.in_flight[name]
            self.experience.serves(worker.name, worker.served)
        self.experience.leases_known()
        self.waiting_since = None

    def poll_claim(self) -> None:
        self.waiting_since = self.now if self.waiting_since is None else self.waiting_since
        answer = self.experience.poll(self.trained, self.now - self.waiting_since)
        if isinstance(answer, EndOfData):
            self.end = answer
        elif answer is None:
            self.at(POLL_S, self.poll_claim)
        else:
            self.waiting_since = None
            self.at(STEP_S * float(self.rng.uniform(0.2, 1.2)), self.step_done, answer.step)

    def step_done(self, step: int) -> None:
        self.trained = step + 1
        if self.trained % self.config.publish_every == 0:
            self.publish(self.config.idx(self.trained))
        self.poll_claim()

    def publish(self, idx: int) -> None:
        self.published = idx
        put_version(self.run, WeightVersion(v=idx, step=idx * self.config.publish_every, idx=idx, attempt=1,
                                            digest=str(idx)))


def check_claims(simulation: Simulation) -> int:
    """Ages, batch sizes and uniqueness of every claim; returns the number of claims."""
    config, rule, seen = simulation.config, simulation.experience.index.rule, set[str]()
    made = list(claims(simulation.run))
    for claim in made:
        assert len(claim.groups) == config.groups_per_step
        ids = {group.group_id for group in claim.groups}
        assert not ids & seen
        seen |= ids
        for ordinal, group in enumerate(claim.groups):
            versions = _versions_of(simulation.run, group.stream, group.seq, group.row)
            ages = claim.idx - np.array(sorted(versions))
            assert ages.min() >= 0
            masked = sum(versions[claim.idx - int(age)] for age in ages if age > rule.limit)
            if rule.policy == "mask":
                assert dict(claim.masked).get(ordinal, 0) == masked < sum(versions.values())
            else:
                assert ages.max() <= rule.oldest
    return len(made)


def _versions_of(run: RunDir, stream: str, seq: int, row: int) -> dict[int, int]:
    from rl_core.experience.shards import verify_shard

    info = verify_shard(run.shard(stream, seq))
    lo, hi = info.version_offsets[row], info.version_offsets[row + 1]
    return dict(zip(info.version[lo:hi].tolist(), info.version_tokens[lo:hi].tolist(), strict=True))


def check_end(simulation: Simulation, end: EndOfData | RunEnded) -> None:
    world, config = simulation.world, simulation.config
    report = audit(simulation.run, n_prompts=world.prompts)
    assert report.holds, report.violations
    made = check_claims(simulation)
    assert report.rows["claimed"] == made * config.groups_per_step == report.positions["trained"]
    if isinstance(end, EndOfData) and end.reason == "steps":
        assert made == config.total_steps
    elif isinstance(end, EndOfData):
        assert end.step == made and end.left_over < config.groups_per_step
        assert world.epochs is not None and simulation.experience.F == 0
        assert sum(report.positions.values()) == world.epochs * world.prompts
        assert report.positions["pending"] == end.left_over
        done = ("trained", "filtered", "given_up", "poison", "pending")
        assert sum(report.positions[state] for state in done) == world.epochs * world.prompts, report.positions
    elif isinstance(end, DiskQuotaTooSmall):
        assert world.small_disk
    elif isinstance(end, NothingToTrainOn):
        assert world.filtered > 0.7
    else:
        assert isinstance(end, StalenessStarvation), end
        assert world.policy in ("drop", "mask") or world.hard_max_over == 0


def play(world: World) -> EndOfData | RunEnded:
    with tempfile.TemporaryDirectory(prefix="headway-world-") as directory:
        simulation = Simulation(world, RunDir(Path(directory)))
        try:
            end: EndOfData | RunEnded = simulation.play()
        except RunEnded as error:
            end = error
        check_end(simulation, end)
        return end


WORLDS = st.builds(
    World, seed=st.integers(0, 2**31 - 1), groups_per_step=st.integers(1, 6), publish_every=st.integers(1, 4),
    eta=st.sampled_from(["0", "0.5", "1", "1.3", "2", "4"]), policy=st.sampled_from(["keep", "mask", "drop", "wait"]),
    hard_max_over=st.one_of(st.none(), st.integers(0, 2)), filtered=st.sampled_from([0.0, 0.0, 0.3, 0.9]),
    spread=st.sampled_from([0.0, 0.8, 1.5]), swap_lag_s=st.sampled_from([0.0, 0.5, 10.0]), workers=st.integers(1, 3),
    prompts=st.integers(3, 60), epochs=st.one_of(st.none(), st.integers(1, 3)), total_steps=st.integers(1, 12),
    failing=st.sampled_from([0.0, 0.0, 0.2]), forgetting=st.sampled_from([0.0, 0.0, 0.05]), deaths=st.integers(0, 3),
    crashes=st.integers(0, 3), hints=st.booleans(), small_disk=st.sampled_from([False, False, False, True]))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(WORLDS)
def test_every_world_makes_progress_or_ends_with_a_named_error(world: World) -> None:
    play(world)
