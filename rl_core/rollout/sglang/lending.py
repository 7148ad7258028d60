"""One server of an engine at a time is lent: out of rollout and at one version, until it is given back.

What it answers for rollout moves on to the other servers with its tokens so far, no new request goes there, and
published weights pass it by. Whoever borrows it asks it by its address (borrowing.py). It comes back with the weights
that are current then: when it is given back, when its time is over, or when the next one is lent. A lent server that
dies is started again for rollout like any other. Belongs to the engine's loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_core.errors import DeadlinePassed, DeadPart, WeightsDamaged
from rl_core.rollout.engine import Loan
from rl_core.rollout.sglang.publishing import Publishing
from rl_core.rollout.sglang.queueing import Queue
from rl_core.rollout.sglang.serving import CANCEL_AGAIN_S, Requests
from rl_core.rollout.sglang.supervision import Replica
from rl_core.rollout.sglang.swapping import Published
from rl_core.rollout.sglang.wire import ReplicaFailed, ServerRefused

LOOK_S = 0.02
SPARE_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class _Lent:
    loan: Loan
    replica: Replica
    place: str
    """Of the incarnation that was lent: another one is rollout's."""
    ending: asyncio.TimerHandle

    @property
    def is_there(self) -> bool:
        """Whether that server still is the one that was lent."""
        return self.replica.place == self.place and self.replica.condemned is None


class Lending:
    """`loan = await lending.lend(published, wait_s=60, for_s=600)`, then `await lending.take_back(loan.id)`.

    `joined` is told of a server that takes requests again. Moving requests away takes `move_s` at most.
    """

    def __init__(self, replicas: Sequence[Replica], queue: Queue, requests: Requests, publishing: Publishing, *,
                 joined: Callable[[Replica], None], move_s: float) -> None:
        self._replicas, self._queue, self._requests, self._publishing = replicas, queue, requests, publishing
        self._joined, self._move_s = joined, move_s
        self._one = asyncio.Lock()
        self._lent: _Lent | None = None

    async def lend(self, published: Published, *, wait_s: float, for_s: float) -> Loan:
        """The server with the least to do, holding `published`. Raises DeadlinePassed where none can be spared in
        `wait_s`, DeadPart where it dies or is silent meanwhile (it is started again), WeightsRefused where it keeps its
        weights."""
        async with self._one:
            await self._end()
            replica = await self._spare(wait_s)
            loan = Loan(secrets.token_hex(8), replica.url, published.version)
            ending = asyncio.get_running_loop().call_later(
                for_s, lambda: self._requests.start(self.take_back(loan.id)))
            lent = self._lent = _Lent(loan, replica, replica.place, ending)
            replica.up = False
            self._queue.remove(replica)
            try:
                await self._move_away(lent)
                await self._publishing.give(replica, lent.place, published)
            except WeightsDamaged:  # it holds its own ones
                await self._end()
                raise
            except (ReplicaFailed, ServerRefused) as error:
                self._give_up(lent, error)
                raise DeadPart(f"{replica.url} cannot be lent at version {published.version.v}: {error}") from error
            return loan

    async def take_back(self, loan_id: str) -> None:
        """It serves rollout again; a loan that is over is no error."""
        async with self._one:
            if self._lent is not None and self._lent.loan.id == loan_id:
                await self._end()

    async def _end(self) -> None:
        lent, self._lent = self._lent, None
        if lent is None:
            return
        lent.ending.cancel()
        if not lent.is_there:
            return
        replica = lent.replica
        try:
            await replica.connected().abort_all()  # what a borrower that was ended has left
            await self._publishing.give_current(replica)
        except (ReplicaFailed, ServerRefused, WeightsDamaged) as error:
            self._give_up(lent, error)
            return
        if lent.is_there:
            replica.take_place()
            replica.up = True
            self._joined(replica)

    def _give_up(self, lent: _Lent, error: Exception) -> None:
        """It is started again, for rollout."""
        self._lent = None
        lent.ending.cancel()
        if lent.is_there:
            lent.replica.condemn(ReplicaFailed(str(error)))

    async def _spare(self, wait_s: float) -> Replica:
        """The server that rollout misses least, while others are there."""
        clock = asyncio.get_running_loop().time
        until = clock() + wait_s
        while True:
            self._requests.check()
            there = [replica for replica in self._replicas if replica.up]
            if len(there) > 1:
                return min(there, key=lambda replica: self._queue.outstanding(replica))
            if clock() >= until:
                raise DeadlinePassed(f"no server can be spared: {len(there)} of {len(self._replicas)} were there for "
                                     f"{wait_s:g} s")
            await asyncio.sleep(SPARE_LOOK_S)

    async def _move_away(self, lent: _Lent) -> None:
        """Until nothing is booked on it any more: ended there, each goes on elsewhere. A try that the server has not
        read yet is unknown to it, and is ended again."""
        replica, clock = lent.replica, asyncio.get_running_loop().time
        until, again = clock() + self._move_s, 0.0
        while works := self._requests.at(lent.place):
            if clock() >= until:
                raise ReplicaFailed(f"{replica.url}: {len(works)} requests did not end in {self._move_s:g} s")
            if clock() >= again:
                again = clock() + CANCEL_AGAIN_S
                await asyncio.gather(*(self._requests.abort_once(replica, work.rid) for work in works if work.rid))
            await asyncio.sleep(LOOK_S)
