"""Requests that wait for a server with room, and the servers that they may go to. Belongs to the engine's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from rl_core.rollout.sglang.answering import Answering
from rl_core.rollout.sglang.router import Router
from rl_core.rollout.sglang.supervision import Replica
from rl_core.rollout.sglang.wire import NO_VERSION


class Queue:
    """Oldest first; a continued answer goes before new ones.

    consumes: requests (`placed`), servers that come (`add`) and go (`remove`), room (`give_back`)
    waits for: a server with room, whose weights are not older than the answer's last token
    unblocked by: `dispatch`, which all of these call, and the engine where weights have changed

    `index_of`: publication index of a version, None for one that was never offered.
    """

    def __init__(self, replicas: Sequence[Replica], index_of: Callable[[int], int | None]) -> None:
        self._replicas, self._index_of = replicas, index_of
        self._router = Router()
        self._waiting: deque[tuple[Answering, asyncio.Future[Replica | None]]] = deque()

    def add(self, replica: Replica, *, limit: int, most: int) -> None:
        """A server that takes requests from now on: at most `most`, and tokens up to `limit`."""
        self._router.add(replica.place, limit, most)
        self.dispatch()

    def remove(self, replica: Replica) -> None:
        """It takes nothing more; what runs there is not ended."""
        self._router.remove(replica.place)

    def outstanding(self, replica: Replica) -> int:
        """Tokens that are booked on it."""
        return self._router.outstanding(replica.place)[0]

    async def placed(self, work: Answering) -> Replica | None:
        """The server that takes it, booked; None once it is cancelled."""
        slot: asyncio.Future[Replica | None] = asyncio.get_running_loop().create_future()
        if work.made:
            self._waiting.appendleft((work, slot))
        else:
            self._waiting.append((work, slot))
        self.dispatch()
        return await slot

    def give_back(self, place: str, work: Answering) -> None:
        """A request that was placed there has ended there."""
        self._router.give_back(place, work.weight)
        self.dispatch()

    def dispatch(self) -> None:
        """Give waiting requests to servers with room."""
        still: list[tuple[Answering, asyncio.Future[Replica | None]]] = []
        while self._waiting:
            work, slot = self._waiting.popleft()
            if slot.done() or work.closed:
                continue
            if work.cancelled:
                slot.set_result(None)
                continue
            name = self._router.choose(work.session, work.weight, self._unfit(work))
            replica = None if name is None else self.at(name)
            if name is None or replica is None:
                still.append((work, slot))
                if self._router.full:
                    break
                continue
            self._router.take(name, work.session, work.weight)
            work.place = name
            slot.set_result(replica)
        self._waiting.extendleft(reversed(still))

    def _unfit(self, work: Answering) -> list[str]:
        """Servers whose weights are older than the last token of this answer, or that change theirs now."""
        newest = None if work.newest is None else self._index_of(work.newest)
        unfit: list[str] = []
        for replica in self._replicas:
            index = NO_VERSION if replica.version is None else replica.version.idx
            older = newest is not None and index < newest
            if older or replica.swapping:
                unfit.append(replica.place)
        return unfit

    def at(self, place: str) -> Replica | None:
        """The live server of this place."""
        return next((replica for replica in self._replicas if place and replica.place == place and replica.up), None)
