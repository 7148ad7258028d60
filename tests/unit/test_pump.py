"""The pump with its real threads, a real run directory and real shards, over workers that live in this process.

`Worker` has the signature of a rollout worker and the habits that a test gives it: how long a group takes, whether it
answers, dies, or loses things.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_core.config import Config
from rl_core.errors import DeadlinePassed, FailureBudgetSpent, RewardError, WeightsDamaged, WorkerDead
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import EndOfData, claims
from rl_core.experience.outcomes import outcome_ids, put_outcome, read_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.rollout.pump import VERSION_LOOK_S, CancelAnswer, Pump
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent, to_json
from rl_core.types import (
    Claim,
    Landed,
    Lease,
    Outcome,
    Prompt,
    TrajectoryGroup,
    WeightVersion,
    WorkerEvents,
    WorkerStatus,
)
from rl_core.versions import put_version
from rl_core.weights import WEIGHTS_FILE, load_weights
from rl_core.weights import publish as publish_bytes
from tests.builders import make_prompt, make_trajectory

B = 4


class Prompts:
    """Position p of every dataset epoch is row (7 p) mod n."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.error: Exception | None = None

    def __len__(self) -> int:
        return self.n

    def at(self, dataset_epoch: int, position: int) -> Prompt:
        if self.error is not None:
            raise self.error
        return make_prompt(position, dataset_epoch=dataset_epoch, prompt_idx=self.prompt_idx(dataset_epoch, position))

    def prompt_idx(self, dataset_epoch: int, position: int) -> int:
        return 7 * position % self.n


class Worker:
    """A rollout worker in this process: its own landing thread, a stream of its own."""

    def __init__(self, run: RunDir, name: str, *, group_s: float = 0.005) -> None:
        self.run, self._name, self.group_s = run, name, group_s
        self.writer = ShardWriter(run, name, 1, {}, False)
        self.served: WeightVersion | None = None
        self.in_flight: dict[str, tuple[Lease, float]] = {}
        self.changed = threading.Condition()
        self.landed: list[Landed] = []
        self.outcomes: list[Outcome] = []
        self.leased: list[str] = []
        self.cancel_calls: list[str] = []
        self.swaps: list[int] = []
        self.dead = self.mute = self.silent = self.killed = False
        self.error: Exception | None = None
        self.hang = threading.Event()
        """Set = `events` and `lease` block, as a call to a stopped process does, until the deadline of the call."""
        self.failing: Callable[[Lease], bool] = lambda lease: False
        self.losing: Callable[[Lease], bool] = lambda lease: False
        self.digest: str | None = None
        threading.Thread(target=self._generate, daemon=True).start()

    @property
    def name(self) -> str:
        return self._name

    def lease(self, leases: list[Lease]) -> None:
        self._answer()
        with self.changed:
            for lease in leases:
                self.leased.append(lease.group_id)
                if not self.losing(lease):
                    self.in_flight[lease.group_id] = (lease, time.monotonic() + self.group_s)
            self.changed.notify_all()

    def events(self, timeout_s: float) -> WorkerEvents:
        self._answer()
        with self.changed:
            self.changed.wait_for(lambda: self.landed or self.outcomes or self.dead or self.error, timeout_s)
            self._answer()
            if self.error is not None:
                raise self.error
            landed, self.landed = self.landed, []
            outcomes, self.outcomes = self.outcomes, []
            status = WorkerStatus(worker=self.name, stream=self.writer.stream, served=self.served, running=0,
                                  in_flight=tuple(self.in_flight), tokens_generated=100, tokens_wasted=0, seconds={})
        return WorkerEvents(status=status, landed=() if self.mute else tuple(landed), outcomes=tuple(outcomes))

    def cancel(self, group_ids: list[str]) -> dict[str, CancelAnswer]:
        self._answer()
        with self.changed:
            self.cancel_calls += group_ids
            return {g: "cancelled" if self.in_flight.pop(g, None) else "unknown" for g in group_ids}

    def swap(self, version: WeightVersion) -> str:
        self._answer()
        self.swaps.append(version.v)
        with self.changed:
            self.served = version
        return self.digest or version.digest

    def kill(self) -> None:
        self.killed = True
        self.die()

    def die(self) -> None:
        self.dead = True
        self.hang.clear()
        with self.changed:
            self.changed.notify_all()

    def _answer(self) -> None:
        end = time.monotonic() + 30.0
        while self.hang.is_set() and time.monotonic() < end:
            time.sleep(0.01)
        if self.dead:
            raise WorkerDead(f"{self.name} is gone")

    def _generate(self) -> None:
        while not self.dead:
            with self.changed:
                due = [lease for lease, end in self.in_flight.values() if end <= time.monotonic()]
                if not due:
                    self.changed.wait(0.005)
                    continue
            for lease in due[:8]:
                self._finish(lease)

    def _finish(self, lease: Lease) -> None:
        assert self.served is not None
        if self.failing(lease):
            outcome = Outcome(group_id=lease.group_id, kind="failed", reason="reward_error", error="reward raised",
                              try_no=lease.try_no, position=lease.prompt.position,
                              dataset_epoch=lease.prompt.dataset_epoch)
            put_outcome(self.run, outcome)
            with self.changed:
                self.in_flight.pop(lease.group_id, None)
                self.outcomes.append(outcome)
                self.changed.notify_all()
            return
        rng, v = np.random.default_rng(lease.lease_no), self.served
        answers = tuple(make_trajectory(rng, 4, versions=[v.v], reward=float(i)) for i in range(2))
        group = TrajectoryGroup(lease=lease, trajectories=answers, idx_min=v.idx, idx_max=v.idx, dispatched_at_us=0,
                                finished_at_us=0)
        with self.changed:
            if lease.group_id not in self.in_flight or self.dead:
                return
            hint = self.writer.land([group])
            del self.in_flight[lease.group_id]
            self.landed.append(hint)
            self.changed.notify_all()


class Pool:
    def __init__(self, run: RunDir, *workers: Worker) -> None:
        self.run, self.workers = run, {worker.name: worker for worker in workers}
        self.restarted: list[str] = []

    def links(self) -> list[Any]:
        return list(self.workers.values())

    def restart(self, name: str) -> Worker:
        self.restarted.append(name)
        self.workers[name] = Worker(self.run, name)
        return self.workers[name]


def make_config(**over: Any) -> Config:
    base: dict[str, Any] = {"groups_per_step": B, "group_size": 2, "total_steps": 50, "storage": {"fsync": False},
                            "data": {"max_prompt_tokens": 16}, "sampling": {"max_new_tokens": 16}}
    return Config.model_validate(base | over)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    publish(run, 0)
    return run


def publish(run: RunDir, v: int, idx: int | None = None) -> WeightVersion:
    idx = v if idx is None else idx
    version = WeightVersion(v=v, step=idx, idx=idx, attempt=1, digest=f"d{v}")
    put_version(run, version)
    return version


def next_attempt(run: RunDir) -> int:
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    return attempt


@contextmanager
def pumping(run: RunDir, config: Config, pool: Pool, *, prompts: Prompts | None = None,
            expect: type[BaseException] | None = None) -> Iterator[tuple[Experience, Pump]]:
    """A pump in its thread; at the end it must stop within 2 s, with the expected error if any."""
    attempt = next_attempt(run)
    experience = Experience(run, config, attempt)
    pump, stop = Pump(run, config, prompts or Prompts(1000), experience, pool, attempt), threading.Event()
    ended: list[BaseException | None] = []

    def body() -> None:
        try:
            pump.run(stop)
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield experience, pump
    finally:
        start = time.monotonic()
        stop.set()
        thread.join(5)
        assert not thread.is_alive() and time.monotonic() - start < 2.0
    if expect is None:
        assert ended == [None]
    else:
        assert isinstance(ended[0], expect)


def claim(experience: Experience, step: int, deadline_s: float = 20.0) -> Claim:
    answer = experience.claim(step, deadline_s)
    assert isinstance(answer, Claim)
    return answer


def wait_for(what: Callable[[], Any], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_steps_are_fed_and_staleness_stays_in_the_bound(run: RunDir) -> None:
    pool = Pool(run, Worker(run, "rollout-0"), Worker(run, "rollout-1"))
    with pumping(run, make_config(staleness={"bound": 1}), pool) as (experience, pump):
        for step in range(12):
            assert claim(experience, step).step == step
            publish(run, step + 1)
            experience.wake()
        wait_for(lambda: pump.snapshot()["workers"]["rollout-0"]["served_idx"] == 12)
        assert pump.snapshot()["step"] == 12
    assert all(worker.leased for worker in pool.workers.values())
    report = audit(run)
    assert report.holds and report.positions["trained"] == 12 * B
    assert not any(made.dropped or made.masked for made in claims(run))


def test_bound_zero_trains_only_what_the_newest_weights_sampled(run: RunDir) -> None:
    worker = Worker(run, "rollout-0")
    with pumping(run, make_config(staleness={"bound": 0}), Pool(run, worker)) as (experience, _):
        for step in range(5):
            claim(experience, step)
            time.sleep(0.05)
            assert len(worker.leased) == B * (step + 1), "nothing is leased before the next version is served"
            publish(run, step + 1)
            experience.wake()
        wait_for(lambda: len(worker.leased) == 6 * B)


def test_with_an_exact_staleness_every_publication_samples_its_share_before_the_next(run: RunDir) -> None:
    pool = Pool(run, Worker(run, "rollout-0", group_s=0.03), Worker(run, "rollout-1"))
    config = make_config(total_steps=10, staleness={"bound": 2, "exact": 2})
    with pumping(run, config, pool) as (experience, _):
        for step in range(10):
            made = claim(experience, step)
            assert (made.policy, made.dropped, made.masked) == ("exact", (), ())
            publish(run, step + 1)  # at once: the workers are behind it
            experience.wake()
    assert [worker.swaps for worker in pool.workers.values()] == [sorted(worker.swaps) for worker in
                                                                  pool.workers.values()]
    ages = [made.idx - sampled_by(run, group.stream, group.seq, group.row) for made in claims(run)
            for group in made.groups]
    assert ages == [0] * B + [1] * B + [2] * 8 * B
    assert audit(run).holds


def sampled_by(run: RunDir, stream: str, seq: int, row: int) -> int:
    from rl_core.experience.shards import verify_shard

    info = verify_shard(run.shard(stream, seq))
    assert info.idx_min[row] == info.idx_max[row]
    return int(info.idx_min[row])


def test_a_landed_hint_wakes_the_claim_at_once(run: RunDir) -> None:
    worker = Worker(run, "rollout-0")
    lags: list[float] = []
    with pumping(run, make_config(staleness={"bound": 0}), Pool(run, worker)) as (experience, _):
        for step in range(15):
            claim(experience, step)
            lags.append(time.monotonic() - max(path.stat().st_mtime + (time.monotonic() - time.time())
                                               for path in run.stream(worker.writer.stream).glob("*.arrow")))
            publish(run, step + 1)
            experience.wake()
    assert sorted(lags)[7] < 0.03, lags


def test_without_hints_listing_finds_what_landed(run: RunDir) -> None:
    worker = Worker(run, "rollout-0")
    worker.mute = True
    with pumping(run, make_config(), Pool(run, worker)) as (experience, _):
        claim(experience, 0)


@pytest.mark.parametrize("when", ["serving", "at the start"])
def test_run_returns_within_2_s_although_a_worker_hangs(run: RunDir, when: str) -> None:
    worker = Worker(run, "rollout-0")
    if when == "at the start":
        worker.hang.set()
    with pumping(run, make_config(), Pool(run, worker)) as (experience, _):
        if when == "serving":
            claim(experience, 0)
            worker.hang.set()
        time.sleep(0.6)
    worker.die()


def test_groups_of_a_dead_worker_are_leased_again_under_the_same_try(run: RunDir) -> None:
    first = Worker(run, "rollout-0", group_s=60)
    pool = Pool(run, first)
    with pumping(run, make_config(), pool) as (experience, pump):
        wait_for(lambda: len(first.leased) == 3 * B)
        first.die()
        claim(experience, 0)
        assert pool.restarted == ["rollout-0"] and first.killed
        assert pump.snapshot()["restarts"] == 1
    second = pool.workers["rollout-0"]
    assert set(first.leased) <= set(second.leased)
    assert {made.group_id for made in next(claims(run)).groups} == set(first.leased[:B])


def test_an_outcome_that_a_dead_worker_could_not_tell_is_found(run: RunDir) -> None:
    first = Worker(run, "rollout-0", group_s=60)
    pool = Pool(run, first)
    with pumping(run, make_config(), pool) as (experience, _):
        wait_for(lambda: len(first.leased) == 3 * B)
        name = first.leased[0]
        lease, _ = first.in_flight[name]
        put_outcome(run, Outcome(group_id=name, kind="poison", reason="prompt_refused", error="too long", try_no=0,
                                 position=lease.prompt.position, dataset_epoch=0))
        first.die()
        claim(experience, 0)
    assert set(first.leased) - set(pool.workers["rollout-0"].leased) == {name}


def test_workers_that_keep_dying_spend_the_budget_and_wake_the_claim(run: RunDir) -> None:
    class Dying(Pool):
        def restart(self, name: str) -> Worker:
            worker = super().restart(name)
            worker.dead = True
            return worker

    pool = Dying(run, Worker(run, "rollout-0", group_s=60))
    config = make_config(failure={"worker_restarts": 3})
    with pumping(run, config, pool, expect=FailureBudgetSpent) as (experience, _):
        wait_for(lambda: experience.F)
        pool.workers["rollout-0"].die()
        with pytest.raises(FailureBudgetSpent, match=r"failure\.worker_restarts 3.*rollout-0 is gone") as spent:
            experience.claim(0, 10)
    assert pool.restarted == ["rollout-0"] * 3
    assert isinstance(spent.value.__cause__, WorkerDead), "it knows the log of the part"


def test_a_try_that_kills_its_workers_becomes_poison_and_the_run_goes_on(run: RunDir) -> None:
    class Killing(Pool):
        def restart(self, name: str) -> Worker:
            worker = super().restart(name)
            arm(worker)
            return worker

    def arm(worker: Worker) -> None:
        def finish(lease: Lease) -> bool:
            if lease.prompt.position == 2:
                threading.Timer(0.02, worker.die).start()
                time.sleep(0.1)
            return False

        worker.failing = finish

    worker = Worker(run, "rollout-0")
    arm(worker)
    pool = Killing(run, worker)
    with pumping(run, make_config(failure={"max_leases": 2}, rollout={"max_groups": 1}), pool) as (experience, _):
        claim(experience, 0)
        claim(experience, 1)
    assert read_outcome(run, "e0-p14-t0").kind == "poison"
    assert audit(run).positions["poison"] == 1


def test_a_new_pump_adopts_what_live_workers_have_in_flight(run: RunDir) -> None:
    worker = Worker(run, "rollout-0", group_s=60)
    pool, config = Pool(run, worker), make_config(staleness={"bound": 1})
    with pumping(run, config, pool):
        wait_for(lambda: len(worker.leased) == 2 * B)
    worker.in_flight["e0-p999-t5"] = (next(iter(worker.in_flight.values()))[0], time.monotonic() + 60)
    with pumping(run, config, pool) as (experience, _):
        wait_for(lambda: experience.leases.known and worker.cancel_calls)
        time.sleep(0.2)
        assert experience.F == 2 * B and len(worker.leased) == 2 * B, "41 groups out against a bound of 32, once"
        assert worker.cancel_calls == ["e0-p999-t5"]
        assert worker.swaps == [0], "a worker that serves the newest version is not swapped again"
        with worker.changed:
            worker.in_flight = {name: (lease, 0.0) for name, (lease, _) in worker.in_flight.items()}
        claim(experience, 0)
        claim(experience, 1)
    assert audit(run).holds


def test_groups_that_landed_between_two_pumps_are_found_and_not_leased_again(run: RunDir) -> None:
    worker = Worker(run, "rollout-0", group_s=60)
    pool, config = Pool(run, worker), make_config(staleness={"bound": 0})
    with pumping(run, config, pool):
        wait_for(lambda: len(worker.leased) == B)
    with worker.changed:
        worker.in_flight = {name: (lease, 0.0) for name, (lease, _) in worker.in_flight.items()}
    wait_for(lambda: not worker.in_flight)
    with pumping(run, config, pool) as (experience, _):
        claim(experience, 0)
        assert len(worker.leased) == B


def test_a_worker_that_does_not_answer_at_the_start_is_killed_before_anything_is_leased(run: RunDir) -> None:
    class Mute(Worker):
        def events(self, timeout_s: float) -> WorkerEvents:
            time.sleep(0.3)
            raise DeadlinePassed(f"{self.name}: no answer")

    mute, good = Mute(run, "rollout-0"), Worker(run, "rollout-1")
    with pumping(run, make_config(), Pool(run, mute, good)) as (experience, _):
        time.sleep(0.2)
        assert not good.leased and not mute.killed
        claim(experience, 0)
        assert mute.killed and not mute.leased


def test_engines_swap_one_after_the_other_the_oldest_first_to_the_newest_version(run: RunDir) -> None:
    running, order = threading.Semaphore(1), list[tuple[str, int]]()

    class Slow(Worker):
        def swap(self, version: WeightVersion) -> str:
            assert running.acquire(blocking=False), "two engines swap at once"
            time.sleep(0.05)
            order.append((self.name, version.v))
            running.release()
            return super().swap(version)

    pool = Pool(run, *(Slow(run, f"rollout-{i}") for i in range(3)))
    with pumping(run, make_config(), pool) as (experience, _):
        wait_for(lambda: len(order) == 3)
        publish(run, 1)
        experience.wake()
        wait_for(lambda: len(order) == 4)
        publish(run, 2)
        experience.wake()
        wait_for(lambda: min(worker.swaps[-1] for worker in pool.workers.values()) == 2)
    assert order[:4] == [("rollout-0", 0), ("rollout-1", 0), ("rollout-2", 0), ("rollout-0", 1)]
    served = dict.fromkeys(pool.workers, 0)
    for name, v in order[3:]:
        assert served[name] == min(served.values()), "one that is ahead waits until the others have caught up"
        served[name] = v


class Reading(Worker):
    """Takes no bytes but those of the version, as every engine."""

    def swap(self, version: WeightVersion) -> str:
        load_weights(self.run.weights(version.v), version)
        return super().swap(version)


def trained(run: RunDir, step: int) -> WeightVersion:
    """The version behind `step` training steps, with its bytes."""
    return publish_bytes(run, {"w": torch.full((64,), float(step))}, step, step, 1, make_config(weights={"keep": 9}))


SPOILED: dict[str, Callable[[Path], object]] = {
    "torn": lambda weights: (weights / WEIGHTS_FILE).write_bytes(b"\0" * 300),
    "gone": shutil.rmtree,
}
"""What a power loss leaves of a version that was published right before, or a reboot in shared memory."""


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_version_ahead_of_the_records_is_offered_once_its_step_has_made_its_bytes_again(
        tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    run = RunDir(tmp_path)
    versions = [trained(run, step) for step in range(3)]
    put_if_absent(run.record(0), to_json({"step": 0}))
    spoil(run.weights(2))
    fresh, other = Reading(run, "rollout-0"), Reading(run, "rollout-1")
    other.served = versions[2]  # another machine, which went on
    with pumping(run, make_config(), Pool(run, fresh, other)) as (experience, _):
        wait_for(lambda: fresh.swaps == [1])
        time.sleep(2 * VERSION_LOOK_S)
        assert (fresh.swaps, other.swaps) == ([1], []), "what it serves is whole there"
        assert trained(run, 2) == versions[2]  # a voided step does no more than this
        experience.wake()
        wait_for(lambda: fresh.swaps == [1, 2])
        put_if_absent(run.record(1), to_json({"step": 1}))
        trained(run, 3)
        experience.wake()
        wait_for(lambda: (fresh.swaps, other.swaps) == ([1, 2, 3], [3]))


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_damaged_bytes_that_no_step_makes_again_end_the_run(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    run = RunDir(tmp_path)
    for step in range(2):
        trained(run, step)
    put_if_absent(run.record(0), to_json({"step": 0}))
    spoil(run.weights(1))
    with pumping(run, make_config(), Pool(run, Reading(run, "rollout-0")), expect=WeightsDamaged) as (experience, _):
        wait_for(lambda: experience.failure is not None)


def test_a_worker_that_serves_other_bytes_is_killed_and_gets_no_lease(run: RunDir) -> None:
    worker = Worker(run, "rollout-0")
    worker.digest = "other"
    pool = Pool(run, worker)
    with pumping(run, make_config(), pool) as (experience, _):
        claim(experience, 0)
    assert worker.killed and not worker.leased and pool.restarted == ["rollout-0"]


def test_failed_groups_get_another_try_and_are_given_up_after_max_tries(run: RunDir) -> None:
    worker = Worker(run, "rollout-0")
    worker.failing = lambda lease: lease.prompt.position == 1
    with pumping(run, make_config(failure={"max_tries": 3}), Pool(run, worker)) as (experience, _):
        claim(experience, 0)
        wait_for(lambda: "e0-p7-t3" in outcome_ids(run))
    assert [name for name in worker.leased if name.startswith("e0-p7-")] == ["e0-p7-t0", "e0-p7-t1", "e0-p7-t2"]
    assert read_outcome(run, "e0-p7-t3").kind == "given_up"
    report = audit(run)
    assert report.holds and report.positions["given_up"] == 1


def test_the_same_failure_too_often_ends_the_run_with_its_first_cause(run: RunDir) -> None:
    worker = Worker(run, "rollout-0")
    worker.failing = lambda lease: True
    config = make_config(failure={"reward_failures": 6})
    with (pumping(run, config, Pool(run, worker), expect=FailureBudgetSpent) as (experience, _),
          pytest.raises(FailureBudgetSpent, match=r"reward_error.*first, in e0-p0-t0: reward raised")):
        experience.claim(0, 10)


def test_an_error_that_ended_a_worker_ends_the_run_at_once(run: RunDir) -> None:
    worker = Worker(run, "rollout-0", group_s=60)
    with pumping(run, make_config(), Pool(run, worker), expect=RewardError) as (experience, _):
        wait_for(lambda: worker.leased)
        worker.error = RewardError("reward `f` returned nan")
        start = time.monotonic()
        with pytest.raises(RewardError, match="returned nan"):
            experience.claim(0, 10)
        assert time.monotonic() - start < 1.0


def test_an_error_in_the_pump_wakes_the_claim_at_once(run: RunDir) -> None:
    prompts = Prompts(100)
    prompts.error = RuntimeError("boom")
    with pumping(run, make_config(), Pool(run, Worker(run, "rollout-0")), prompts=prompts,
                 expect=RuntimeError) as (experience, _):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="boom"):
            experience.claim(0, 10)
        assert time.monotonic() - start < 1.0


def test_a_group_that_its_live_worker_forgot_gets_another_try(run: RunDir) -> None:
    worker = Worker(run, "rollout-0")
    worker.losing = lambda lease: lease.group_id == "e0-p0-t0"
    with pumping(run, make_config(), Pool(run, worker)) as (experience, _):
        claim(experience, 0)
        wait_for(lambda: "e0-p0-t1" in worker.leased)
    assert read_outcome(run, "e0-p0-t0").reason == "lost"


def test_a_corrupt_shard_is_quarantined_and_its_groups_get_another_try(run: RunDir) -> None:
    class Rotting(ShardWriter):
        def land(self, groups: Any) -> Landed:
            hint = super().land(groups)
            if hint.seq == 1:
                path = run.shard(hint.stream, hint.seq)
                data = bytearray(path.read_bytes())
                data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
                path.write_bytes(data)
            return hint

    worker = Worker(run, "rollout-0")
    worker.writer = Rotting(run, "rollout-0", 1, {}, False)
    with pumping(run, make_config(staleness={"bound": 0}), Pool(run, worker)) as (experience, _):
        claim(experience, 0)
    assert run.quarantined(worker.writer.stream, 1).exists()
    assert len(worker.leased) == B + 1 and worker.leased[-1].endswith("-t1")
    report = audit(run)
    assert report.holds and report.rows["quarantined"] == 1


@pytest.mark.parametrize("total", [2 * B, 2 * B + 3], ids=["whole steps", "with a rest"])
def test_the_end_of_the_data_is_a_record_and_no_short_batch_is_trained(run: RunDir, total: int) -> None:
    worker = Worker(run, "rollout-0")
    config = make_config(data={"epochs": 1, "max_prompt_tokens": 16})
    with pumping(run, config, Pool(run, worker), prompts=Prompts(total)) as (experience, _):
        claim(experience, 0)
        claim(experience, 1)
        start = time.monotonic()
        assert experience.claim(2, 10) == EndOfData(step=2, reason="data", left_over=total - 2 * B)
        assert time.monotonic() - start < 2.0
    assert run.end(0).exists()
    again = Experience(run, config, next_attempt(run))
    assert again.claim(2, 1) == EndOfData(step=2, reason="data", left_over=total - 2 * B)
    assert sum(audit(run, n_prompts=total).positions.values()) == total


def test_wait_holds_the_claim_and_cancels_the_straggler_in_the_end(run: RunDir) -> None:
    worker = Worker(run, "rollout-0")
    config = make_config(staleness={"bound": 1, "policy": "wait", "wait_deadline_s": 0.5}, failure={"max_tries": 2})
    slow = "e0-p0-t0"
    original = worker.lease

    def lease(leases: list[Lease]) -> None:
        original(leases)
        with worker.changed:
            if slow in worker.in_flight:
                worker.in_flight[slow] = (worker.in_flight[slow][0], time.monotonic() + 60)

    worker.lease = lease
    with pumping(run, config, Pool(run, worker)) as (experience, _):
        claim(experience, 0)
        publish(run, 1)
        experience.wake()
        start = time.monotonic()
        claim(experience, 1)
        assert 0.4 < time.monotonic() - start < 3.0
        assert worker.cancel_calls == [slow]
    assert read_outcome(run, slow).reason == "wait_timeout"
    assert max(made.idx for made in claims(run)) == 1


def test_a_claim_that_waits_in_vain_says_which_side_starves_whom(run: RunDir) -> None:
    worker = Worker(run, "rollout-0", group_s=60)
    with pumping(run, make_config(staleness={"bound": 0}), Pool(run, worker)) as (experience, _):
        wait_for(lambda: experience.F == B)
        with pytest.raises(DeadlinePassed, match=(
                r"claim of step 0: waited 1 s.*needs 4 usable groups: 0 landed, 4 in flight.*rollout-0 serves "
                r"publication 0 with 4 groups in flight; capacity 0 \(max_groups 0")):
            experience.claim(0, 1.0)
