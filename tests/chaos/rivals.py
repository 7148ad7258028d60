"""Rivals that each believe to own a run: processes that claim the same steps at once, each with other content.

What a rival holds afterwards is what its learner would train, so it is held against what the ledger says.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

from rl_core.errors import BrokenFile
from rl_core.experience.ledger import put_claim, read_claim
from rl_core.run_dir import OwnerLock, RunDir
from rl_core.types import Claim

RIVALS = 3
DEADLINE_S = 120.0
"""For all rivals at one step, and for the end of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """What came of it."""

    disagreements: int
    """Steps of which some rival holds another claim than the one that stands, or read a torn one."""
    winners: dict[int, int]
    """How many rivals hold the claim of their own -> at so many steps."""
    adopted: int
    """How often a rival holds the claim of another one, and it stands."""
    won: list[int]
    """Of each rival: steps that stand as it claimed them."""


def race(run: RunDir, steps: int, claim_of: Callable[[int, int, int], Claim], *, fsync: bool) -> Race:
    """Let three processes claim steps 0 .. steps - 1, each step behind a barrier, all under one attempt, as where a
    lock was lost. `claim_of`: (rival, step, attempt) -> what this rival wants that step to be."""
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    wanted = [[claim_of(me, step, attempt) for step in range(steps)] for me in range(RIVALS)]
    places = [run.root / f"rival-{me}" for me in range(RIVALS)]
    context = multiprocessing.get_context("fork")  # what a mutant has replaced here is replaced in them
    barrier = context.Barrier(RIVALS)
    rivals = [context.Process(target=_rival, args=(run, mine, place, barrier, fsync), daemon=True)
              for mine, place in zip(wanted, places, strict=True)]
    try:
        for process in rivals:
            process.start()
        for process in rivals:
            process.join(DEADLINE_S)
        assert [process.exitcode for process in rivals] == [0] * RIVALS, "a rival ended by an error, or not at all"
    finally:
        for process in rivals:
            if process.is_alive():
                process.kill()
    return _found([_standing(run, step) for step in range(steps)], wanted,
                  [pickle.loads(place.read_bytes()) for place in places])


def _rival(run: RunDir, mine: list[Claim], place: Path, barrier: Barrier, fsync: bool) -> None:
    """Claim every step, and leave what was got back in `place`; None for a claim that was torn when it was read."""
    held: list[Claim | None] = []
    for claim in mine:
        barrier.wait(DEADLINE_S)
        try:
            held.append(put_claim(run, claim, fsync=fsync))
        except BrokenFile:
            held.append(None)
    place.write_bytes(pickle.dumps(held))


def _standing(run: RunDir, step: int) -> Claim | None:
    try:
        return read_claim(run, step)
    except BrokenFile:
        return None


def _found(stand: list[Claim | None], wanted: list[list[Claim]], held: list[list[Claim | None]]) -> Race:
    """`wanted` and `held` by rival, then by step."""
    disagreements, adopted, winners = 0, 0, Counter[int]()
    for claim, own, got in zip(stand, zip(*wanted, strict=True), zip(*held, strict=True), strict=True):
        disagreements += any(one is None or one != claim for one in got)
        adopted += sum(one is not None and one == claim and one != mine for mine, one in zip(own, got, strict=True))
        winners[sum(one == mine for mine, one in zip(own, got, strict=True))] += 1
    won = [sum(claim == mine for claim, mine in zip(stand, own, strict=True)) for own in wanted]
    return Race(disagreements=disagreements, winners=dict(winners), adopted=adopted, won=won)
