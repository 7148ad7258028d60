"""Published weights over all servers of one engine: one server after the other, and each that comes back.

How one server takes them while it answers is swapping.py; here is which server, in which order, by which transport, and
what that means for the requests in flight. Belongs to the engine's loop.

    consumes: offered versions (`publish`), servers that come (`welcome`)
    waits for: one server that takes them, and at the end for one that holds them
    unblocked by: a server, `changed`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rl_core.config import SglangEngineConfig
from rl_core.errors import WeightsDamaged
from rl_core.model_setup import weight_files
from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.answering import Answering
from rl_core.rollout.sglang.collective import Channel, NobodySends, open_channel
from rl_core.rollout.sglang.fingerprints import computable
from rl_core.rollout.sglang.queueing import Queue
from rl_core.rollout.sglang.sending import Address
from rl_core.rollout.sglang.serving import Requests
from rl_core.rollout.sglang.supervision import Replica
from rl_core.rollout.sglang.swapping import Offered, Published, swap
from rl_core.rollout.sglang.wire import ReplicaFailed, ServerRefused
from rl_core.types import WeightVersion
from rl_core.weights import read_tensors

REMEMBERED = 64
"""Newest versions whose checksum is remembered."""
Sender = Callable[[], Address]
"""Says where weights are sent from (sending.py); raises FileNotFoundError while nobody sends."""


class Publishing:
    """Which weights the servers hold.

        await publishing.publish(published)      # raises WeightsRefused where a server keeps its old ones
        await publishing.welcome(replica)        # a server that came gets the current ones

    `model_dir`: the weights that servers start with. A server that takes longer than `swap_s` for a step of a swap is
    given up.
    """

    def __init__(self, replicas: Sequence[Replica], requests: Requests, queue: Queue, offered: Offered,
                 config: SglangEngineConfig, *, model_dir: Path, sender: Sender | None, swap_s: float) -> None:
        self._replicas, self._requests, self._queue, self._offered = replicas, requests, queue, offered
        self._config, self._model_dir, self._sender, self._swap_s = config, model_dir, sender, swap_s
        self._dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self._agreed: dict[str, str] = {}
        self._current: Published | None = None
        self._one = asyncio.Lock()
        self.served: WeightVersion | None = None
        self.changed = asyncio.Event()
        """A server came, or the engine ended."""

    @property
    def hashes_known(self) -> bool:
        """Whether a server's checksum can be computed here: fingerprints.py."""
        return self._config.device == "cpu" and self._config.tensor_parallel == 1

    async def publish(self, published: Published) -> None:
        """All servers that are up take these weights; returns when one serves them. Raises WeightsRefused where a
        server keeps its old weights (the others keep theirs, too), DeadPart when no server is left."""
        took = 0
        async with self._one:
            self._offered.add(published.version)
            for replica in self._replicas:
                if not replica.up:
                    continue
                try:
                    await self._give(replica, published)
                    took += 1
                except WeightsDamaged as refusal:
                    if not took:
                        raise
                    replica.condemn(ReplicaFailed(f"{refusal}, which another server took"))
                except (ReplicaFailed, ServerRefused) as error:
                    replica.condemn(ReplicaFailed(str(error)))
            self._current = published
        while not any(replica.up and replica.version == published.version for replica in self._replicas):
            self._requests.check()
            self.changed.clear()
            await self.changed.wait()
        self.served = published.version
        self._queue.dispatch()

    async def welcome(self, replica: Replica) -> None:
        """A server that came holds the current weights afterwards."""
        if self.hashes_known and (await replica.connected().model_info()).version == wire.UNNAMED:
            base = await asyncio.to_thread(self._base_tensors)
            replica.held.computable = computable(await replica.connected().checksums(), base, self._dtype)
        await self.give_current(replica)

    async def give_current(self, replica: Replica) -> None:
        async with self._one:
            if self._current is not None and replica.version != self._current.version:
                await self._give(replica, self._current)

    async def give(self, replica: Replica, place: str, published: Published) -> None:
        """This server alone takes these weights, whatever the others hold. Raises ReplicaFailed for another incarnation
        than that of `place`."""
        async with self._one:
            if replica.place != place:
                raise ReplicaFailed(f"{replica.name}: died, and came back meanwhile")
            if replica.version != published.version:
                await self._give(replica, published)

    def _base_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for file in weight_files(self._model_dir)
                for name, tensor in read_tensors(self._model_dir / file).items()}

    async def _give(self, replica: Replica, published: Published) -> None:
        """One server takes these weights; the caller holds the lock."""
        channel = await self._channel(replica) if self._config.transport == "collective" else None
        works: list[Answering] = []

        async def paused() -> None:
            works.extend(work for work in self._requests.at(replica.place) if work.rid)
            if self._config.pause == "in_place":
                await self._requests.begin_again(replica, works)

        replica.swapping = True
        try:
            paused_s = await swap(replica.connected(), published, replica.held, mode=self._config.pause,
                                  dtype=self._dtype, deadline_s=self._swap_s, agreed=self._agreed, channel=channel,
                                  while_paused=paused)
        finally:
            replica.swapping = False
        replica.version = published.version
        self._offered.add(published.version)
        while len(self._agreed) > REMEMBERED:
            del self._agreed[next(iter(self._agreed))]
        replica.counts.swaps += 1
        replica.counts.paused_s += paused_s
        for work in works:
            work.taken_over(published.version.v, 2 * self._config.stream_interval)
            if self._config.pause == "retract":
                replica.counts.reread_tokens += len(work.request.token_ids_P) + work.made
            elif work.renewed and work.rid:  # the server may have read it only now
                self._requests.start(self._requests.abort_once(replica, work.rid))
        self._queue.dispatch()

    async def _channel(self, replica: Replica) -> Channel | None:
        """How the learner that lives now reaches this server; None while none sends: then the server reads the file,
        if it can."""
        assert replica.info is not None
        try:
            address = await asyncio.to_thread(self._sender) if self._sender else None
        except FileNotFoundError:
            address = None
        if address is None:
            return None
        if replica.channel is not None and replica.channel.open and replica.channel.address == address:
            return replica.channel
        replica.hang_up()
        try:
            replica.channel = await open_channel(
                replica.connected(), address, backend="nccl" if self._config.device == "cuda" else "gloo",
                ranks=replica.info.tensor_parallel)
        except NobodySends:
            return None
        return replica.channel
