"""Claims over real shards: order, drops, duplicates, restart, ends; and how fast the index is."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.errors import (
    DeadlinePassed,
    NothingToTrainOn,
    RunEnded,
    StaleAttempt,
    StalenessStarvation,
)
from rl_core.experience import known
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.index import Index, Rows, Shard, group_key, group_keys
from rl_core.experience.ledger import (
    EndOfData,
    claims,
    drop_files,
    group_ids_digest,
    put_claim,
    read_drops,
    segments_of,
)
from rl_core.experience.outcomes import outcome_ids, put_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.experience.staleness import StalenessRule
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent, to_json
from rl_core.types import Claim, ClaimedGroup, Drop, Outcome, WeightVersion
from rl_core.versions import put_version
from tests.builders import make_group

B = 4


def make_config(**over: Any) -> Config:
    return Config.model_validate({"groups_per_step": B, "group_size": 4, "total_steps": 50,
                                  "storage": {"fsync": False}} | over)


def start(run: RunDir, config: Config | None = None, **over: Any) -> Experience:
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    return Experience(run, config or make_config(), attempt, **over)


def writer(run: RunDir, name: str = "rollout-0", **digests: str) -> ShardWriter:
    return ShardWriter(run, name, 1, digests, False)


def ids(claim: Claim | EndOfData | None) -> list[str]:
    assert isinstance(claim, Claim)
    return [group.group_id for group in claim.groups]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# -- what is claimed


def test_the_oldest_are_claimed_and_listed_in_training_order(run: RunDir) -> None:
    w = writer(run)
    w.land([make_group(9, lease_no=3, versions=[1]), make_group(5, lease_no=9, versions=[0])])
    w.land([make_group(7, lease_no=1, versions=[1]), make_group(2, lease_no=4, versions=[1]),
            make_group(1, lease_no=8, versions=[1])])
    experience = start(run)
    put_claim(run, empty_claim(0))
    claim = experience.claim(1, 5)
    assert ids(claim) == ["e0-p2-t0", "e0-p5-t0", "e0-p7-t0", "e0-p9-t0"], "position 1 was leased last"
    assert isinstance(claim, Claim)
    assert [(g.seq, g.row) for g in claim.groups] == [(1, 1), (0, 1), (1, 0), (0, 0)]


def test_the_reward_of_what_was_sampled_counts_every_answer_that_lands_once(run: RunDir) -> None:
    w = writer(run)
    w.land([make_group(0, rewards=[9.0] * 4)])
    experience = start(run)
    experience.discover(full=True)
    assert np.isnan(experience.take_sampled()), "what a start finds was sampled before it"
    w.land([make_group(1, rewards=[1.0, 0.0, 0.0, 0.0]), make_group(2, n=2, n_expected=4, rewards=[1.0, 1.0])])
    w.land([make_group(3, rewards=[0.0] * 4)])
    experience.discover()
    assert experience.take_sampled() == pytest.approx(3 / 10)
    assert np.isnan(experience.take_sampled())


def empty_claim(step: int) -> Claim:
    return Claim(step=step, idx=step, attempt=1, consumer="learner", eta="2", hard_max=8, policy="keep", groups=(),
                 group_ids_digest=group_ids_digest([]), shard_digests={}, masked=(), dropped=(), revision=0, ts_us=0)


def test_the_batch_does_not_depend_on_the_order_of_arrival(tmp_path: Any) -> None:
    batches: list[list[str]] = []
    for name, order in (("a", [3, 1, 2, 0, 5, 4]), ("b", [4, 5, 0, 2, 1, 3])):
        run = RunDir(tmp_path / name)
        w = writer(run)
        for i in order:
            w.land([make_group(i)])
        batches.append(ids(start(run).claim(0, 5)))
    assert batches[0] == batches[1] == [f"e0-p{i}-t0" for i in range(4)]


def test_groups_over_the_limit_are_dropped_with_the_claim(run: RunDir) -> None:
    config = make_config(staleness={"bound": 1, "policy": "drop"})
    experience = start(run, config)
    for step in range(3):
        put_claim(run, empty_claim(step))
    writer(run).land([make_group(0, versions=[1]), *(make_group(i, versions=[2 + i % 2]) for i in range(1, 6))])
    claim = experience.claim(3, 5)
    assert isinstance(claim, Claim) and ids(claim) == ["e0-p1-t0", "e0-p2-t0", "e0-p3-t0", "e0-p4-t0"]
    dropped = make_group(0, versions=[1])
    n_tokens = 6 + sum(len(t.token_ids_L) for t in dropped.trajectories)
    assert claim.dropped == (Drop(group_id="e0-p0-t0", reason="stale", n_tokens=n_tokens),)
    assert (claim.idx, claim.eta, claim.hard_max, claim.policy) == (3, "1", 4, "drop")
    assert experience.L == 1


def test_tokens_over_the_limit_are_masked_and_counted(run: RunDir) -> None:
    experience = start(run, make_config(staleness={"bound": 1, "policy": "mask"}))
    for v, idx in ((0, 0), (1, 1), (2, 2), (3, 3), (4, 3)):
        put_version(run, WeightVersion(v=v, step=idx, idx=idx, attempt=1, digest=str(v)))
    for step in range(3):
        put_claim(run, empty_claim(step))
    mixed = make_group(0, versions=[1, 4], idx=[1, 3], lengths=[8, 8, 8, 8])
    writer(run).land([mixed, *(make_group(i, versions=[3]) for i in (1, 2, 3)), make_group(4, versions=[1])])
    claim = experience.claim(3, 5)
    assert isinstance(claim, Claim)
    assert ids(claim) == [f"e0-p{i}-t0" for i in range(4)]
    assert claim.masked == ((0, 16),), "version 4 is of publication 3: half of 32 tokens are of publication 1"
    assert [(drop.group_id, drop.reason) for drop in claim.dropped] == [("e0-p4-t0", "all_masked")]


def test_of_two_rows_of_one_id_the_younger_is_judged_and_the_other_is_a_duplicate(run: RunDir) -> None:
    experience = start(run)
    for step in range(2):
        put_claim(run, empty_claim(step))
    first, second = writer(run, "rollout-0"), writer(run, "rollout-1")
    first.land([make_group(0, versions=[0]), make_group(1, versions=[2])])
    second.land([make_group(0, versions=[2], seed=1), make_group(1, versions=[1]), make_group(2, versions=[2]),
                 make_group(3, versions=[2])])
    claim = experience.claim(2, 5)
    assert isinstance(claim, Claim)
    assert [(g.stream, g.row) for g in claim.groups] == [(second.stream, 0), (first.stream, 1), (second.stream, 2),
                                                         (second.stream, 3)]
    report = audit(run)
    assert report.holds and (report.rows["claimed"], report.rows["duplicate"]) == (4, 2)


def test_a_group_that_lands_again_after_its_claim_is_a_duplicate(run: RunDir) -> None:
    writer(run).land([make_group(i) for i in range(4)])
    experience = start(run)
    experience.claim(0, 5)
    writer(run).land([make_group(i, seed=1) for i in range(4)])
    experience.discover()
    assert experience.L == 0 and start(run).poll(1, 0) is None
    assert audit(run).rows["duplicate"] == 4


def test_groups_without_spread_are_filtered_and_their_position_is_finished(run: RunDir) -> None:
    experience = start(run, make_config(rollout={"no_spread": "drop"}, data={"epochs": 1}))
    experience.attach(6, lambda epoch, position: position)
    writer(run).land([make_group(i, rewards=[1.0] * 4 if i == 1 else None) for i in range(5)])
    claim = experience.claim(0, 5)
    assert isinstance(claim, Claim) and [(d.group_id, d.reason) for d in claim.dropped] == [("e0-p1-t0", "filtered")]
    experience.serves("rollout-0", 0)
    experience.leases_known()
    assert [lease.group_id for lease in experience.grant(["rollout-0"])] == ["e0-p5-t0"]
    assert audit(run).positions["filtered"] == 1


def test_a_shard_made_with_another_model_is_never_claimed(run: RunDir) -> None:
    put_if_absent(run.inputs, to_json({"digests": {"model": "m1", "tokenizer": "t1"}}))
    good = writer(run, "rollout-0", model="m1", tokenizer="t1")
    bad = writer(run, "rollout-1", model="m2", tokenizer="t1")
    good.land([make_group(i) for i in range(4)])
    bad.land([make_group(i, lease_no=0) for i in range(4, 8)])
    assert ids(start(run).claim(0, 5)) == [f"e0-p{i}-t0" for i in range(4)]
    assert "made with model m2, the run has m1" in run.quarantined(bad.stream, 0).read_text()


@pytest.mark.parametrize("spoil", ["truncated", "zeroed", "bit", "foreign", "misnamed", "empty"])
def test_a_bad_file_among_the_shards_is_quarantined_and_the_run_goes_on(run: RunDir, spoil: str) -> None:
    w = writer(run)
    w.land([make_group(i) for i in range(4)])
    w.land([make_group(i) for i in range(4, 8)])
    path = run.shard(w.stream, 0)
    data = bytearray(path.read_bytes())
    if spoil == "truncated":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif spoil == "zeroed":
        middle = len(data) // 2
        data[middle : middle + 500] = bytes(500)
        path.write_bytes(data)
    elif spoil == "bit":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif spoil == "foreign":
        path.write_bytes(b"not an arrow file")
    elif spoil == "misnamed":
        os.rename(path, run.stream(w.stream) / "hello.txt")
        shutil.copy(run.shard(w.stream, 1), path)
    else:
        path.write_bytes(b"")
    experience = start(run)
    assert ids(experience.claim(0, 5)) == [f"e0-p{i}-t0" for i in range(4, 8)]
    assert run.quarantined(w.stream, 0).exists()
    assert run.foreign(w.stream, "hello.txt").exists() == (spoil == "misnamed")
    assert start(run).poll(1, 0) is None, "a restart leaves it excluded"
    report = audit(run)
    assert report.holds and report.rows["quarantined"] >= 1


def test_shards_behind_a_gap_are_found_by_a_full_listing(run: RunDir) -> None:
    w = writer(run)
    for i in range(3):
        w.land([make_group(4 * i + j) for j in range(4)])
    path = run.shard(w.stream, 1)
    os.rename(path, run.root / "aside")
    experience = start(run)
    experience.discover(full=True)
    assert experience.L == 8
    os.rename(run.root / "aside", path)
    experience.discover()
    assert experience.L == 12


@contextmanager
def no_maps_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where a process has all the maps that it may have."""
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refused)
        yield


def test_a_shard_that_cannot_be_mapped_now_is_looked_at_again(run: RunDir, monkeypatch: pytest.MonkeyPatch,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    """Neither is it quarantined, nor has what it holds failed, nor are the data at their end."""
    experience = start(run, make_config(data={"epochs": 1}))
    experience.attach(B, lambda epoch, position: position)
    experience.discover(full=True)
    experience.serves("w", 0)
    experience.leases_known()
    granted = [lease.group_id for lease in experience.grant(["w"])]
    w = writer(run)
    hint = w.land([make_group(i) for i in range(B)])
    for lease in experience.leases.by_id.values():
        lease.missing = True  # the worker names it no more
    with no_maps_left(monkeypatch):
        experience.discover([hint])
        experience.discover()
        assert experience.F == B and "1 landed shards cannot be read now: " in experience.stall_report()
        assert experience.poll(0, 0.0) is None
    assert caplog.text.count("cannot be read now, and is looked at again") == 1
    assert not run.quarantine.exists() and outcome_ids(run) == []
    experience.discover()
    assert ids(experience.claim(0, 5)) == granted and experience.F == 0
    assert experience.discovery.landed_groups == B and audit(run).holds


def test_shards_are_not_spent_while_one_cannot_be_mapped(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    writer(run).land([make_group(i) for i in range(B)])
    experience = start(run, make_config(data={"shards_from": "first"}))
    with no_maps_left(monkeypatch):
        assert experience.poll(0, 0.0) is None
    assert len(ids(experience.claim(0, 5))) == B


# -- outcomes


def too_easy(position: int) -> Outcome:
    return Outcome(group_id=f"e0-p{position}-t0", kind="filtered", reason="too_easy", error="", try_no=0,
                   position=position, dataset_epoch=0)


def test_outcomes_are_listed_where_a_worker_may_not_have_told_them_and_nobody_waits_for_it(
        run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    experience = start(run)
    experience.attach(100, lambda epoch, position: position)
    experience.discover(full=True)
    experience.serves("w", 0)
    experience.leases_known()
    granted = [lease.group_id for lease in experience.grant(["w"])]
    listed: list[bool] = []

    def noting(of: RunDir) -> list[str]:
        with ThreadPoolExecutor(1) as other:  # the lock is its own thread's to take again
            listed.append(other.submit(lambda: experience.lock.acquire(timeout=2) and not experience.lock.release()
                                       ).result())
        return outcome_ids(of)

    monkeypatch.setattr(known, "outcome_ids", noting)
    for position in range(3):
        put_outcome(run, too_easy(position))
    experience.outcome(too_easy(0))
    experience.discover()
    assert listed == [] and len(granted) - 1 == experience.F
    experience.leases.by_id["e0-p1-t0"].missing = True
    experience.discover()
    assert listed == [True] and len(granted) - 3 == experience.F
    put_outcome(run, too_easy(3))
    experience.discover(full=True)
    assert listed == [True] * 2 and len(granted) - 4 == experience.F
    assert experience.take_filtered() == 4


# -- drops


def test_drops_do_not_need_a_full_claim_and_lead_to_another_try(run: RunDir) -> None:
    clock = Clock()
    experience = start(run, make_config(staleness={"bound": 0}), clock=clock)
    put_claim(run, empty_claim(0))
    writer(run).land([make_group(i, versions=[0]) for i in range(3)])
    experience.attach(100, lambda epoch, position: position)
    assert experience.poll(1, 0.0) is None and drop_files(run) == []
    assert experience.poll(1, 2.0) is None
    assert [drop.reason for drop in read_drops(drop_files(run)[0])] == ["stale"] * 3
    experience.serves("w", 1)
    experience.leases_known()
    assert [lease.group_id for lease in experience.grant(["w"])] == ["e0-p0-t1", "e0-p1-t1", "e0-p2-t1", "e0-p3-t0"]
    again = start(run, make_config(staleness={"bound": 0}))
    again.attach(100, lambda epoch, position: position)
    again.discover(full=True)
    again.serves("w", 1)
    again.leases_known()
    assert [lease.group_id for lease in again.grant(["w"])] == ["e0-p0-t1", "e0-p1-t1", "e0-p2-t1", "e0-p3-t0"]
    assert audit(run).positions["dropped"] == 3


def test_a_position_is_given_up_after_max_tries_and_stays_so(run: RunDir) -> None:
    config = make_config(failure={"max_tries": 2})
    for try_no in range(2):
        put_outcome(run, Outcome(group_id=f"e0-p0-t{try_no}", kind="failed", reason="reward_error", error="x",
                                 try_no=try_no, position=0, dataset_epoch=0))
    for _ in range(2):
        experience = start(run, config)
        experience.attach(10, lambda epoch, position: position)
        experience.discover(full=True)
        experience.serves("w", 0)
        experience.leases_known()
        assert experience.grant(["w"])[0].group_id == "e0-p1-t0"
        assert outcome_ids(run) == ["e0-p0-t0", "e0-p0-t1", "e0-p0-t2"]
    assert audit(run).positions["given_up"] == 1


# -- restart, rivals


def test_a_restart_finds_the_same_claims_and_the_same_rest(run: RunDir) -> None:
    w, experience = writer(run), start(run)
    w.land([make_group(i) for i in range(6)])
    first = experience.claim(0, 5)
    w.land([make_group(i) for i in range(6, 9)])
    again = start(run)
    assert again.claim(0, 5) == first
    assert ids(again.claim(1, 5)) == [f"e0-p{i}-t0" for i in range(4, 8)]
    assert again.L == 1


def test_shards_that_claims_used_up_are_not_read_again(run: RunDir) -> None:
    w = writer(run)
    w.land([make_group(i) for i in range(4)])
    w.land([make_group(i) for i in range(4, 9)])
    experience = start(run)
    experience.claim(0, 5)
    experience.claim(1, 5)
    again = start(run)
    again.discover(full=True)
    assert [shard.seq for shard in again.index.shards] == [1]
    assert again.L == 1 and again.discovery.landed_groups == 9
    assert again.discovery.landed_bytes == sum(p.stat().st_size for p in run.stream(w.stream).glob("*.arrow"))


def test_a_zombie_ends_instead_of_claiming(run: RunDir) -> None:
    writer(run).land([make_group(i) for i in range(8)])
    zombie = start(run)
    zombie.claim(0, 5)
    owner = start(run)
    with pytest.raises(StaleAttempt):
        zombie.claim(1, 5)
    with pytest.raises(StaleAttempt):
        zombie.try_claim(1)
    assert isinstance(owner.claim(1, 5), Claim)


def test_three_rivals_agree_on_every_claim_and_train_nothing_twice(run: RunDir) -> None:
    """All three believe to be attempt 1, as after a lost lock: the link decides."""
    writer(run).land([make_group(i, lengths=[2] * 4) for i in range(64)])
    start(run)
    config = make_config(total_steps=16, staleness={"bound": 16})
    rivals = [Experience(run, config, 1) for _ in range(3)]
    got: list[list[Claim | EndOfData]] = [[], [], []]

    def play(me: int) -> None:
        got[me] = [rivals[me].claim(step, 20) for step in range(16)]

    threads = [threading.Thread(target=play, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got[0] == got[1] == got[2] == list(claims(run))
    report = audit(run)
    assert report.holds and report.rows["claimed"] == 64


# -- ends


def test_the_steps_end_with_a_record(run: RunDir) -> None:
    writer(run).land([make_group(i) for i in range(6)])
    experience = start(run, make_config(total_steps=1))
    experience.claim(0, 5)
    assert experience.claim(1, 5) == EndOfData(step=1, reason="steps", left_over=2)


def test_a_step_out_of_order_is_refused(run: RunDir) -> None:
    with pytest.raises(ValueError, match="step 2 cannot be claimed before step 0 is"):
        start(run).claim(2, 1)


def test_a_claim_in_vain_ends_by_its_deadline(run: RunDir) -> None:
    writer(run).land([make_group(0)])
    with pytest.raises(DeadlinePassed, match=r"needs 4 usable groups: 1 landed, 0 in flight. No pump is running"):
        start(run).claim(0, 0.1)


def test_a_failure_or_a_close_ends_a_claim_that_waits(run: RunDir) -> None:
    for act, error in ((lambda e: e.fail(RuntimeError("boom")), RuntimeError), (lambda e: e.close(), RunEnded)):
        experience = start(run)
        threading.Timer(0.1, act, args=(experience,)).start()
        began = time.monotonic()
        with pytest.raises(error):
            experience.claim(0, 10)
        assert time.monotonic() - began < 0.5


def test_too_many_stale_drops_for_too_long_are_starvation(run: RunDir) -> None:
    clock = Clock()
    config = make_config(staleness={"bound": 0}, failure={"drop_share_deadline_s": 100.0})
    experience = start(run, config, clock=clock)
    put_claim(run, empty_claim(0))
    w = writer(run)
    for i in range(5):
        w.land([make_group(4 * i + j, versions=[0]) for j in range(4)])
        experience.discover()
        assert experience.poll(1, 2.0) is None
    clock.now = 99.0
    assert experience.poll(1, 2.0) is None
    clock.now = 101.0
    with pytest.raises(StalenessStarvation, match="16 of the last 16 judged groups were over the limit, for 101 s"):
        experience.poll(1, 2.0)


def test_many_groups_without_a_usable_one_end_the_run(run: RunDir) -> None:
    config = make_config(rollout={"no_spread": "drop"}, failure={"barren_groups": 10})
    experience, w = start(run, config), writer(run)
    w.land([make_group(i, rewards=[0.0] * 4) for i in range(9)])
    assert experience.poll(0, 0.0) is None
    w.land([make_group(9, rewards=[0.0] * 4)])
    experience.discover()
    with pytest.raises(NothingToTrainOn, match=r"10 verified groups in a row.*waiting now: 10 filtered"):
        experience.poll(0, 0.0)


# -- many of them (how fast: tests/benchmarks/store_claims.py)


def many_rows(n: int) -> Rows:
    rng = np.random.default_rng(1)
    i = np.arange(n, dtype=np.int64)
    zeros = np.zeros(n, np.int32)
    return Rows(key=group_keys(zeros, i, zeros), dataset_epoch=zeros, position=i, prompt_idx=i, try_no=zeros,
                lease_no=rng.permutation(n).astype(np.int64), n_responses=zeros + 8,
                idx_min=rng.integers(0, 9, n).astype(np.int32), idx_max=zeros + 9, n_tokens=zeros + 100,
                spread=np.ones(n, np.float32), shard=zeros, row=i.astype(np.int32))


def test_of_many_waiting_groups_the_oldest_are_selected() -> None:
    index = Index(StalenessRule(policy="keep", limit=10, hard_max=10, min_responses=4))
    index.shards, index.waiting = [Shard(stream="w", seq=0, digest="d")], many_rows(200_000)
    selection = index.select(9, 512, {})
    assert selection is not None
    w = index.waiting
    want = sorted(np.lexsort((w.lease_no, w.idx_min))[:512].tolist())
    assert [group.position for group in selection.groups] == want


def test_group_keys_are_unique_and_refuse_what_does_not_fit() -> None:
    assert group_key("e3-p1234-t2") == int(group_keys(np.array([3]), np.array([1234]), np.array([2]))[0])
    with pytest.raises(ValueError, match="try is 2048; the index holds 0 to 2047"):
        group_keys(np.array([0]), np.array([0]), np.array([2048]))


def test_many_claims_are_read_at_a_start(run: RunDir) -> None:
    for step in range(200):
        groups = tuple(ClaimedGroup(dataset_epoch=0, position=64 * step + i, try_no=0, prompt_idx=64 * step + i,
                                    stream="w", seq=step, row=i) for i in range(64))
        put_claim(run, replace(empty_claim(step), groups=groups, shard_digests={f"w/{step}": "d"},
                               group_ids_digest=group_ids_digest(g.group_id for g in groups)), fsync=False)
    experience = start(run)
    assert experience.next_step == 200 and len(experience.index.claimed) == 200 * 64
    assert segments_of(groups)[0].hi == 64
