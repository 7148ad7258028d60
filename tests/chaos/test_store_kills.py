"""The store tier: writers, an owner and a rival claimant of one run are killed at every point of their protocols, over
and over; nothing landed is lost, nothing is claimed or trained twice, nothing torn stands under a final name.

Plain processes over the real store. The learner is the smallest that has its protocol: its weights are a hash chain
over the claims, so that a step that took effect twice, never, or with other data leaves other weights for ever.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor

from rl_core.checkpoint import (
    CheckpointState,
    checkpoints,
    newest_whole,
    read_checkpoint,
    sweep_aside,
    write_checkpoint,
)
from rl_core.config import CheckpointConfig, Config
from rl_core.errors import ConfigError, StaleAttempt
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import claim_digest, claims, read_retired
from rl_core.experience.retention import first_needed
from rl_core.experience.shards import GroupCommit, ShardWriter, sweep_tmp, verify_shard
from rl_core.fork import make_fork
from rl_core.records import put_record, read_record, recorded_steps
from rl_core.run_dir import OwnerLock, RunDir, newest_attempt
from rl_core.run_identity import open_identity, read_identity
from rl_core.types import Claim, Landed, StepRecord
from rl_core.versions import read_versions
from rl_core.weights import digest_tensors, load_weights, publish
from tests.builders import make_group
from tests.chaos.points import ANY_TIME, CLAIMANT, FORKER, NEVER, OWNER, WRITER, Point, arm

ROOT = Path(__file__).resolve().parents[2]
GROUPS_PER_STEP, CHECKPOINT_EVERY, SHARD_GROUPS = 6, 3, 3
SETTINGS = Config.model_validate({
    "groups_per_step": GROUPS_PER_STEP, "group_size": 2, "total_steps": 100_000, "staleness": {"bound": 1000},
    "rollout": {"no_spread": "drop"}, "checkpoint": {"every": CHECKPOINT_EVERY, "keep": 2, "best": None}})
KEEP = CheckpointConfig(every=CHECKPOINT_EVERY, keep=2, best=None)


# -- the processes


@dataclass(frozen=True, slots=True)
class Pipes:
    """`(read end, write end)` each: hints from writers to owners, and what owners did again."""

    hints: tuple[int, int]
    again: tuple[int, int]


def write(run: RunDir, positions: list[int], pipes: Pipes) -> None:
    """A rollout worker: lands its groups, each shard with its hint."""
    def hint(landed: Landed) -> None:
        os.write(pipes.hints[1], json.dumps([landed.stream, landed.seq, landed.group_ids]).encode() + b"\n")

    def refused(*_: object) -> None:
        raise AssertionError("no group is too large, and the disk is not full")

    commit = GroupCommit(ShardWriter(run, "rollout-0", 1, {}), on_landed=hint, on_refused=refused, on_error=refused,
                         cap_groups=SHARD_GROUPS)
    for i in positions:
        commit.put(make_group(i, n=2, rewards=None if is_trained(i) else [1.0, 1.0]))
    commit.close(30.0)


def is_trained(position: int) -> bool:
    """Every fifth group has no spread, and is dropped."""
    return position % 5 != 4


def read_hints(fd: int, wait_s: float) -> list[Landed]:
    if not select.select([fd], [], [], wait_s)[0]:
        return []
    lines = [json.loads(line) for line in os.read(fd, 1 << 16).splitlines() if line.endswith(b"]")]
    return [Landed(stream=stream, seq=seq, group_ids=tuple(ids), n_tokens=0) for stream, seq, ids in lines]


def claim(run: RunDir, pipes: Pipes) -> None:
    """A rival that believes to be the owner, as after a lost lock: claims until a newer attempt is there."""
    experience = Experience(run, SETTINGS, newest_attempt(run))
    experience.discover(full=True)
    while isinstance(experience.try_claim(experience.next_step), Claim):
        pass


def effect(weights: Tensor, claimed: Claim) -> Tensor:
    """The weights behind a step: a hash over those before it and its data."""
    text = weights.numpy().tobytes() + claim_digest(claimed).encode()
    return torch.frombuffer(bytearray(xxhash.xxh3_128(text).digest()), dtype=torch.int64)


def own(run: RunDir, pipes: Pipes) -> None:
    """The owner and its learner: restore, replay the recorded steps, then claim, train, publish, record, checkpoint."""
    attempt = OwnerLock(run).next_attempt(0, None)
    for directory in (run.checkpoints, run.weights_root):
        sweep_aside(directory)
    saved = newest_whole(run)
    weights, step = (torch.zeros(2, dtype=torch.int64), 0) if saved is None else (saved.parameters["w"], saved.state.n)
    experience = Experience(run, SETTINGS, attempt)
    experience.discover(full=True)
    while True:
        if (claimed := experience.try_claim(step)) is None:
            if not (hints := read_hints(pipes.hints[0], 0.03)):
                return
            experience.discover(hints)
            continue
        recorded = run.record(step).exists()
        if recorded or claimed.attempt < attempt:
            os.write(pipes.again[1], b"r" if recorded else b"c")
        weights, step = effect(weights, claimed), step + 1
        version = None if recorded else publish(run, {"w": weights}, step, step, attempt, SETTINGS)
        digest = digest_tensors([("w", weights)])
        put_record(run, StepRecord(step=step - 1, idx=step - 1, attempt=attempt, claim_digest=claim_digest(claimed),
                                   weights_digest=digest, metrics={}, env={}, published=version, revision=0, seconds={},
                                   ts_us=0))
        if step % CHECKPOINT_EVERY == 0:
            state = CheckpointState(n=step, revision=0, weights_digest=digest, version_step=step, version_digest=digest,
                                    skipped_in_a_row=0)
            write_checkpoint(run, state, parameters={"w": weights}, optimizer={}, version=None, attempt=attempt,
                             settings=KEEP)
            experience.retire(first_needed(checkpoints(run), KEEP.keep))


def branch(run: RunDir) -> None:
    """A fork of the run from its last step but one, beside an owner that goes on."""
    if len(done := recorded_steps(run)) > CHECKPOINT_EVERY:
        make_fork(run, run.root.name, done[-2], SETTINGS)


ROLES = {"writer": WRITER, "owner": OWNER, "rival": CLAIMANT, "forker": FORKER}
"""Role -> the points at which it is killed. A rival meets those of an owner's claim."""


# -- the world


def start(work: Callable[[], None], point: str, points: dict[str, Point]) -> int:
    """Run `work` in a child that kills itself at `point`; returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            arm(point, points)
            work()
            code = 0
        except StaleAttempt:
            code = 0
        except ConfigError as error:  # a step of the past cannot be replayed any more: no fork
            code = 0 if "--from-step" in str(error) or "fork" in str(error) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


@dataclass(slots=True)
class Job:
    """A process of this round."""

    role: str
    point: str
    positions: list[int]
    """What a writer has been leased."""


class World:
    """A run, and every round two writers, an owner, a rival and now and then a forker, most of them killed. What a
    killed writer had is leased again. `attic` keeps every shard that was ever seen, whatever is retired."""

    def __init__(self, runs: Path, seed: int, each: int) -> None:
        self.run, self.attic = RunDir(runs / "run"), RunDir(runs / "attic")
        self.rng, self.each = random.Random(seed), each
        self.met: dict[str, Counter[str]] = {role: Counter() for role in ROLES}
        self.pipes = Pipes(os.pipe(), os.pipe())
        self.rounds, self.again, self.next_position = 0, list[int](), 0

    @property
    def kills(self) -> int:
        return sum(counter.total() for counter in self.met.values())

    def missing(self) -> list[str]:
        """Points that were met less often than asked for."""
        return [f"{role}: {name}" for role, points in ROLES.items() for name in points
                if self.met[role][name] < self.each]

    def point(self, role: str) -> str:
        """The one that was met least often, until all were met as often as asked for; then, and now and then before,
        no kill, a kill at any time, or any point."""
        short = [name for name in ROLES[role] if self.met[role][name] < self.each]
        if short and self.rng.random() < 0.75:
            return min(short, key=lambda name: (self.met[role][name], self.rng.random()))
        return self.rng.choice((NEVER, NEVER, ANY_TIME, *ROLES[role]))

    def lease(self) -> list[int]:
        fresh = [self.next_position + i for i in range(self.rng.randint(2, 7))]
        self.next_position += len(fresh)
        positions, self.again = self.again[:4] + fresh, self.again[4:]
        return positions

    def round(self) -> None:
        self.rounds += 1
        works: list[tuple[str, list[int], Callable[[], None]]] = []
        for positions in (self.lease(), self.lease()):
            works.append(("writer", positions, lambda p=positions: write(self.run, p, self.pipes)))
        works += [("owner", [], lambda: own(self.run, self.pipes)), ("rival", [], lambda: claim(self.run, self.pipes))]
        if self.rounds % 2 == 0:
            works.append(("forker", [], lambda: branch(self.run)))
        jobs: dict[int, Job] = {}
        for role, positions, work in works:
            point = self.point(role)
            jobs[start(work, point, ROLES[role])] = Job(role, point, positions)
        time.sleep(self.rng.uniform(0, 0.05))
        for pid, job in jobs.items():
            if job.point == ANY_TIME:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                self.met[job.role][job.point] += 1
                self.again += job.positions
            elif os.WEXITSTATUS(status):
                raise SystemExit(f"a {job.role} ended by an error, see above")
        self.keep()

    def keep(self) -> None:
        """Every shard that is there has its bytes in the attic, too."""
        for path in self.run.streams.glob("*/*.arrow"):
            kept = self.attic.shard(path.parent.name, int(path.stem))
            kept.parent.mkdir(parents=True, exist_ok=True)
            if not kept.exists():
                os.link(path, kept)

    def end(self) -> None:
        """The last owner, undisturbed, takes what is left."""
        if os.waitpid(start(lambda: own(self.run, self.pipes), NEVER, OWNER), 0)[1]:
            raise SystemExit("the last owner ended by an error, see above")
        self.keep()


def host(runs: str, seed: int, kills: int, each: int) -> None:
    """Rounds until there were enough kills and every point was met. Prints how often, and which steps were done again:
    r, a recorded one; c, one that another owner had claimed."""
    torch.set_num_threads(1)
    world = World(Path(runs), seed, each)
    world.run.model.mkdir(parents=True)
    open_identity(world.run, "run", "tiny-cpu", SETTINGS)
    while (world.kills < kills or world.missing()) and world.rounds < 2 * kills:
        world.round()
    world.end()
    os.close(world.pipes.again[1])
    done_again = Counter(os.read(world.pipes.again[0], 1 << 20).decode())
    hit = {f"{role}: {name}": count for role, counter in world.met.items() for name, count in sorted(counter.items())}
    print(json.dumps({"hit": hit, "rounds": world.rounds, "again": done_again, "missing": world.missing()}))


def check(run: RunDir, attic: RunDir) -> dict[str, int]:
    """Nothing is lost, torn, or trained twice: shards, claims, records, versions, checkpoints against each other."""
    landed: Counter[str] = Counter()
    for path in attic.streams.glob("*/*.arrow"):
        landed.update(verify_shard(path).group_id)
    retired = read_retired(run).shards
    made = list(claims(run))
    taken = Counter(group.group_id for claimed in made for group in claimed.groups)
    dropped = Counter(drop.group_id for claimed in made for drop in claimed.dropped)
    assert max(taken.values()) == max(dropped.values()) == 1, "trained or dropped twice"
    assert not set(taken) & set(dropped)
    assert all(group.group_id in landed or (group.stream, group.seq) in retired
               for claimed in made for group in claimed.groups), "trained what never landed"
    pending = set(landed) - set(taken) - set(dropped)
    assert len([name for name in pending if is_trained(int(name.split("-")[1][1:]))]) < GROUPS_PER_STEP, "lost"
    assert [claimed.step for claimed in made] == recorded_steps(run)
    assert list(run.records.glob("*divergent*")) == []
    digests = fold(run)
    versions = read_versions(run)
    assert len({version.step for version in versions.values()}) == len(versions)
    for version in versions.values():
        assert version.digest == digests[version.step]
        if run.weights(version.v).exists():
            load_weights(run.weights(version.v), version)
    for n in checkpoints(run):
        assert read_checkpoint(run, n).state.weights_digest == digests[n]
    report = audit(run)
    assert report.holds, report.violations
    assert report.rows["claimed"] == len(taken)
    assert report.rows["duplicate"] > 0, "no group landed twice: the test did not reach that"
    assert sweep_tmp(run, []) > 0
    assert set(run.streams.glob("*/.tmp/*")) == set()
    assert not any(run.shard(*shard).exists() for shard in retired)
    return {"groups": len(landed), "duplicates": report.rows["duplicate"], "steps": len(made),
            "retired shards": len(retired), "forks": check_forks(run, made)}


def fold(run: RunDir) -> dict[int, str]:
    """Digest of the weights by the number of steps behind them; every record has that of its step."""
    weights, digests = torch.zeros(2, dtype=torch.int64), dict[int, str]()
    for claimed in claims(run):
        weights = effect(weights, claimed)
        digests[claimed.step + 1] = digest_tensors([("w", weights)])
        record = read_record(run, claimed.step)
        assert record.claim_digest == claim_digest(claimed)
        assert record.weights_digest == digests[claimed.step + 1], "not the fold of the claims"
    return digests


def check_forks(run: RunDir, made: list[Claim]) -> int:
    """Every fork is whole and has the past of its run; what half a fork left is swept by the next one."""
    branch(run)
    assert list(run.root.parent.glob(".run~*")) == []
    forks = [RunDir(path) for path in run.root.parent.glob("run~*")]
    for forked in forks:
        origin = read_identity(forked).forked_from
        assert origin is not None
        assert list(claims(forked)) == made[:origin.step] and recorded_steps(forked) == list(range(origin.step))
        assert (report := audit(forked)).holds, report.violations
        assert all(read_checkpoint(forked, n) for n in checkpoints(forked))
    return len(forks)


TIERS = {
    "short": (110, 1),
    "whole": (330, 3),
}
"""Tier -> (least kills, how often each point is met at least)."""


@pytest.mark.parametrize("tier", ["short", pytest.param("whole", marks=pytest.mark.slow)])
def test_nothing_is_lost_torn_or_trained_twice_wherever_a_process_is_killed(tmp_path: Path, tier: str) -> None:
    kills, each = TIERS[tier]
    begun = time.monotonic()
    code = f"from tests.chaos.test_store_kills import host; host({str(tmp_path)!r}, 1, {kills}, {each})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600,
                          check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    hit: dict[str, int] = said["hit"]
    found = check(RunDir(tmp_path / "run"), RunDir(tmp_path / "attic"))
    print(*(f"{name:<45} {count:>4}" for name, count in hit.items()), sep="\n")
    print(f"{sum(hit.values())} kills in {said['rounds']} rounds, {time.monotonic() - begun:.0f} s; {found}; steps "
          f"done again: {said['again']}; lost 0, trained twice 0")
    assert said["missing"] == [], f"not met {each} times: {said['missing']}"
    assert sum(hit.values()) >= kills
    assert sum(hit.get(f"{role}: {ANY_TIME}", 0) for role in ("writer", "owner")) >= each
    assert said["again"]["r"] > 0, "no recorded step was replayed"
    assert said["again"]["c"] > 0, "no claim of a dead owner was trained by the next one"
