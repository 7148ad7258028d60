"""The servers of one engine: started, watched, started again, and never asked before they serve the current weights.

A server is up when it has answered, was checked, and holds the engine's current weights. It is lost when its process is
gone, its port refuses, it is silent for HANGS looks, it says another version than it was told, or the engine condemns
it. One that Headway started is ended and started again, on a new port, `restarts` times; one that was there already is
asked until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from typing import Protocol

import aiohttp

from rl_core.errors import ConfigError, DeadPart, EngineStartFailed, WeightsDamaged
from rl_core.rollout.sglang.client import SglangClient
from rl_core.rollout.sglang.collective import Channel
from rl_core.rollout.sglang.swapping import Held
from rl_core.rollout.sglang.wire import ReplicaFailed, ServerInfo, ServerRefused
from rl_core.types import WeightVersion

WATCH_S = 0.5
"""Between two looks at a server: a death is seen in 3 s, the deadline of a look included."""
HANGS = 5
"""Looks in a row without a word (client.LOOK_S each), before a server that takes connections is given up."""
AGAIN_S = 1.0
"""Between two tries to bring a server up."""
FAILURES = 16
"""Requests that fail in a row on a server before it is given up, though it answers when it is looked at."""
TAIL_LINES = 20


class Process(Protocol):
    """A server that Headway runs: server.py."""

    def start(self) -> str: ...

    def alive(self) -> bool: ...

    def stop(self, grace_s: float = ...) -> None: ...

    def log_tail(self, lines: int = ...) -> str: ...


@dataclass(slots=True)
class Counts:
    """What one server has done since the engine began, over all its incarnations."""

    tokens: int = 0
    """Sampled, as they arrived."""
    bytes_read: int = 0
    """Of streamed answers, with the framing of events."""
    context_tokens: int = 0
    """Of prompts and continued answers that were sent."""
    cached_tokens: int = 0
    """Of those, found in its prefix cache."""
    swaps: int = 0
    paused_s: float = 0.0
    """Generation stood still for swaps."""
    reread_tokens: int = 0
    """Read again because of a swap or a death: contexts whose cache was given up."""
    thrown_tokens: int = 0
    """Arrived and dropped: their version is not known, or they may end in a part of a stop string."""
    restarts: int = 0
    retries: int = 0
    """Requests sent again after a failure."""
    running: int = 0
    queued: int = 0
    """Both as the server said last."""

    def as_floats(self) -> dict[str, float]:
        return {each.name: float(getattr(self, each.name)) for each in fields(self)}


@dataclass(slots=True, eq=False)
class Replica:
    """One server, over its incarnations."""

    name: str
    process: Process | None
    """None: somebody else runs it."""
    url: str = ""
    place: str = ""
    """Its name in the router, another one for every incarnation, and behind every loan."""
    client: SglangClient | None = None
    channel: Channel | None = None
    """Transport `collective`: how weights reach it; of one incarnation."""
    info: ServerInfo | None = None
    held: Held = field(default_factory=Held)
    version: WeightVersion | None = None
    """What it serves; None: the weights that it started with."""
    up: bool = False
    """It takes requests of this engine: it is there, and not lent."""
    swapping: bool = False
    failures: int = 0
    """Requests in a row."""
    condemned: ReplicaFailed | None = None
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    counts: Counts = field(default_factory=Counts)
    serial: itertools.count[int] = field(default_factory=itertools.count)

    def take_place(self) -> None:
        """A name in the router that no server has had before."""
        self.place = f"{self.name}#{next(self.serial)}"

    def condemn(self, error: ReplicaFailed) -> None:
        """It is not to be asked any more; the watch ends it."""
        self.condemned = self.condemned or error
        self.suspected.set()

    def failed(self, error: ReplicaFailed) -> None:
        """A request failed on it: it is looked at now."""
        self.failures += 1
        if self.failures >= FAILURES:
            self.condemn(ReplicaFailed(f"{self.url}: {FAILURES} requests failed in a row; the last one: {error}"))
        self.suspected.set()

    def connected(self) -> SglangClient:
        """Raises ReplicaFailed for one that was never reached."""
        if self.client is None:
            raise ReplicaFailed(f"{self.name} is not there")
        return self.client

    def hang_up(self) -> None:
        """Leave the process group, if there is one."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def words(self) -> str:
        """The last lines of its log, for an error."""
        if self.process is None:
            return ""
        tail = self.process.log_tail(TAIL_LINES)
        return f"\nIts log ends with:\n{tail}" if tail else ""


Join = Callable[[Replica], Awaitable[None]]
"""Checks a server that answers and gives it the current weights; raises ReplicaFailed, ServerRefused, ConfigError."""


class Supervisor:
    """`await start()`, then `watch()` as a task for each replica; all of it in the engine's loop.

    `joined(replica)`: it takes requests from now on. `lost(replica, error)`: it takes none from now on.
    `over(error)`: the engine is dead.
    """

    def __init__(self, replicas: list[Replica], session: aiohttp.ClientSession, *, silence_s: float, restarts: int,
                 start_s: float, join: Join, joined: Callable[[Replica], None],
                 lost: Callable[[Replica, ReplicaFailed], None], over: Callable[[DeadPart], None]) -> None:
        self._replicas, self._session = replicas, session
        self._silence_s, self._restarts, self._start_s = silence_s, restarts, start_s
        self._join, self._joined, self._lost, self._over = join, joined, lost, over

    async def start(self) -> None:
        """All servers, side by side. Raises the first error: EngineStartFailed, or what the checks refused."""
        starts = [asyncio.ensure_future(self._bring_up(replica)) for replica in self._replicas]
        try:
            await asyncio.gather(*starts)
        except (ReplicaFailed, ServerRefused) as error:
            raise EngineStartFailed(f"a server of SGLang cannot be used: {error}") from error
        finally:
            for start in starts:
                start.cancel()

    async def watch(self, replica: Replica) -> None:
        """consumes: the end of this server, however it is seen
        waits for: a look at it that fails
        unblocked by: the clock, `condemn`, a request that broke off
        """
        while True:
            error = await self._until_lost(replica)
            replica.up = False
            self._lost(replica, error)
            if not await self._again(replica, error):
                return

    async def _again(self, replica: Replica, error: ReplicaFailed) -> bool:
        """Bring it up once more; False when that is over."""
        cause: Exception = error
        since = asyncio.get_running_loop().time()
        while True:
            told = f"{replica.name} of the engine sglang: {cause}{replica.words()}"
            if replica.process is not None:
                if replica.counts.restarts >= self._restarts:
                    self._over(DeadPart(f"{told}\nNo restart is left (rollout.engine.restarts is {self._restarts})."))
                    return False
                await asyncio.to_thread(replica.process.stop, 0.0)
            elif self._alone(replica) and asyncio.get_running_loop().time() - since > self._start_s:
                self._over(DeadPart(f"{told}\nNo server was there for {self._start_s:g} s (rollout.engine.start_s)."))
                return False
            replica.counts.restarts += replica.process is not None
            try:
                await self._bring_up(replica)
                replica.counts.restarts += replica.process is None
                return True
            except (DeadPart, ServerRefused, WeightsDamaged, ConfigError) as failed:
                cause = failed
                await asyncio.sleep(AGAIN_S)

    def _alone(self, replica: Replica) -> bool:
        return not any(other.up for other in self._replicas if other is not replica)

    async def _bring_up(self, replica: Replica) -> None:
        if replica.process is not None:
            replica.url = await asyncio.to_thread(replica.process.start)
        replica.client = SglangClient(replica.url, self._session, silence_s=self._silence_s)
        replica.take_place()
        replica.held, replica.version, replica.condemned, replica.failures = Held(), None, None, 0
        replica.suspected.clear()
        replica.hang_up()
        replica.info = await replica.client.server_info()
        if not replica.info.incremental:
            raise ServerRefused(replica.url, 200, "it streams answers from their beginning again and again; start it "
                                                  "with --incremental-streaming-output")
        await self._join(replica)
        replica.up = True
        self._joined(replica)

    async def _until_lost(self, replica: Replica) -> ReplicaFailed:
        silent = 0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replica.suspected.wait(), WATCH_S)
            replica.suspected.clear()
            if replica.condemned is not None:
                return replica.condemned
            if replica.process is not None and not replica.process.alive():
                return ReplicaFailed(f"{replica.url}: its process has ended")
            try:
                before = replica.version
                info = await replica.connected().model_info()
                load = await replica.connected().load()
                replica.counts.running, replica.counts.queued = load.running, load.queued
                silent = 0
            except (ReplicaFailed, ServerRefused) as error:
                silent += 1
                if silent >= HANGS or _refuses(error):
                    return ReplicaFailed(f"{replica.url}: gone: {error}")
                continue
            told = replica.version
            if told is before and told is not None and not replica.swapping and info.version != str(told.v):
                return ReplicaFailed(f"{replica.url}: serves version {info.version!r} where it was told {told.v}: "
                                     "somebody else changes its weights")


def _refuses(error: Exception) -> bool:
    """Nobody listens there any more, in the words of aiohttp."""
    return isinstance(error.__cause__, aiohttp.ClientConnectorError)
