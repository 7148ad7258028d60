"""Writers and rival consumers of one run are killed at every point of their protocols, over and over; nothing landed is
lost, nothing is claimed twice, nothing torn stands under a final name."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import claims
from rl_core.experience.shards import ShardWriter, sweep_tmp, verify_shard
from rl_core.run_dir import RunDir
from rl_core.types import Claim
from tests.builders import make_group

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, GROUPS_PER_STEP = 95, 8
WRITER_POINTS = ("tmp-created", "tmp-half", "tmp-written", "linked", "unlinked")
CONSUMER_POINTS = ("before-claim", "after-claim")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(name: str, when: Callable[[str], bool]) -> None:
    """Die right after the call of `os` whose last path argument satisfies `when`."""
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if when(str(args[-1] if name == "link" else args[0])):
            die()
        return result

    setattr(os, name, call)


def arm(point: str) -> None:
    """Make this process kill itself at a point of the protocol."""
    real_link, real_write, real_unlink = os.link, os.writev, Path.unlink

    def link(source: Any, target: Any) -> None:
        if "ledger" in str(target):
            die()
        real_link(source, target)

    def half(fd: int, pieces: list[memoryview]) -> int:
        real_write(fd, pieces[:len(pieces) // 2])
        die()
        return 0

    def written(fd: int, pieces: list[memoryview]) -> int:
        real_write(fd, pieces)
        die()
        return 0

    def unlink(path: Path, missing_ok: bool = False) -> None:
        there = path.exists()
        real_unlink(path, missing_ok=missing_ok)
        if there and ".tmp" in str(path):
            die()

    match point:
        case "tmp-created":
            kill_after("open", lambda path: "/.tmp/" in path)
        case "tmp-half":
            os.writev = half
        case "tmp-written":
            os.writev = written
        case "linked":
            kill_after("link", lambda path: path.endswith(".arrow"))
        case "unlinked":
            Path.unlink = unlink  # pyright: ignore[reportAttributeAccessIssue]
        case "before-claim":
            os.link = link  # pyright: ignore[reportAttributeAccessIssue]
        case "after-claim":
            kill_after("link", lambda path: "ledger" in path)
        case _:
            pass


def settings() -> Config:
    base = Config(groups_per_step=GROUPS_PER_STEP, group_size=2, total_steps=10_000, publish_every=10_000)
    return base.model_copy(update={"storage": base.storage.model_copy(update={"fsync": False})})


def write(run: RunDir, positions: list[int]) -> None:
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    for at in range(0, len(positions), 3):
        writer.land([make_group(i, n=2) for i in positions[at:at + 3]])


def consume(run: RunDir) -> None:
    experience = Experience(run, settings(), 1)
    experience.discover(full=True)
    while isinstance(experience.try_claim(experience.next_step), Claim):
        pass


def fork(work: Callable[[], None], point: str) -> int:
    """Run `work` in a child that kills itself at `point`; returns its pid."""
    pid = os.fork()
    if pid == 0:
        arm(point)
        try:
            work()
        finally:
            os._exit(0)
    return pid


def host(root: str, seed: int) -> None:
    """The world: every round two writers and two rival consumers, most of them killed. Prints its coverage."""
    run, rng, hit = RunDir(Path(root)), random.Random(seed), Counter[str]()
    again: list[int] = []
    next_position = 0
    for _ in range(ROUNDS):
        jobs: dict[int, tuple[str, list[int]]] = {}
        for _ in range(2):
            fresh = [next_position + i for i in range(rng.randint(1, 7))]
            next_position += len(fresh)
            positions, again = again[:4] + fresh, again[4:]
            point = rng.choice((*WRITER_POINTS, "any time", "never"))
            jobs[fork(lambda p=positions: write(run, p), point)] = (point, positions)
        for _ in range(2):
            point = rng.choice((*CONSUMER_POINTS, "any time", "never", "never"))
            jobs[fork(lambda: consume(run), point)] = (point, [])
        time.sleep(rng.uniform(0, 0.03))
        for pid, (point, positions) in jobs.items():
            if point == "any time":
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                hit[point] += 1
                again += positions
    print(json.dumps(hit))


def test_nothing_is_lost_torn_or_claimed_twice_over_two_hundred_kills(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    hit: Counter[str] = Counter()
    for seed in range(6):
        code = f"from tests.chaos.test_store_kills import host; host({str(run.root / str(seed))!r}, {seed})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300,
                              check=False)
        assert done.returncode == 0, done.stderr
        hit += Counter(json.loads(done.stdout.splitlines()[-1]))
        check(RunDir(run.root / str(seed)))
        if hit.total() >= 200 and all(hit[point] for point in (*WRITER_POINTS, *CONSUMER_POINTS)):
            break
    assert hit.total() >= 200, hit
    assert all(hit[point] for point in (*WRITER_POINTS, *CONSUMER_POINTS, "any time")), hit


def check(run: RunDir) -> None:
    """The audit: rows on disk against claims, before and after a last consumer has taken what is left."""
    landed: Counter[str] = Counter()
    for path in run.streams.glob("*/*.arrow"):
        landed.update(verify_shard(path).group_id)
    assert max(landed.values()) > 1, "no group landed twice: the test did not reach that"
    before = list(claims(run))
    consume(run)
    after = list(claims(run))
    assert after[:len(before)] == before
    taken = Counter(group.group_id for claim in after for group in claim.groups)
    assert max(taken.values()) == 1
    assert set(taken) <= set(landed)
    assert len(landed) - len(taken) < GROUPS_PER_STEP
    assert sweep_tmp(run, []) > 0
    assert set(run.streams.glob("*/.tmp/*")) == set()
