"""The engine's half of transport `collective`: a server receives published weights over a process group.

The swap stays as it is (swapping.py); only the bytes take another way. A `Channel` belongs to one incarnation of one
server: its group is joined once, before any pause, and each swap sends the buckets of one version through it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

from rl_core.errors import WeightsDamaged
from rl_core.rollout.sglang.client import SglangClient
from rl_core.rollout.sglang.sending import GROUP_S, Address
from rl_core.rollout.sglang.wire import ReplicaFailed, ServerRefused, as_object
from rl_core.types import WeightVersion

LINE_BYTES = 64 * 2**20


class NobodySends(Exception):
    """The learner that sent weights is gone, and no other one has come yet."""


class Channel:
    """`channel = await open_channel(...)`; for each swap `prepare` before the pause, and `send` inside it."""

    def __init__(self, client: SglangClient, address: Address, group: str, reader: asyncio.StreamReader,
                 writer: asyncio.StreamWriter) -> None:
        self.address = address
        self._client, self.group, self._reader, self._writer = client, group, reader, writer
        self._parts: list[dict[str, Any]] = []

    @property
    def open(self) -> bool:
        """Whether the sender has not hung up, as far as is known."""
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def prepare(self, version: WeightVersion, deadline_s: float) -> None:
        """The sender reads and verifies the version. Raises WeightsDamaged, ReplicaFailed."""
        told = await self.ask({"version": version.v}, deadline_s)
        if told.get("digest") != version.digest:
            raise ReplicaFailed(f"the sender holds digest {told.get('digest')} for version {version.v}, which is "
                                f"{version.digest}")
        self._parts = cast("list[dict[str, Any]]", told["buckets"])

    async def send(self, version: WeightVersion, *, flush_cache: bool, deadline_s: float) -> None:
        """The server holds the prepared version afterwards. Raises ServerRefused before anything was sent (it keeps its
        old weights); ReplicaFailed after that: it may hold parts of both."""
        await self._client.begin_update(deadline_s)
        try:
            for number, part in enumerate(self._parts):
                last = number == len(self._parts) - 1
                await asyncio.gather(
                    self.ask({"bucket": number}, deadline_s),
                    self._client.update_from_group(self.group, part, version.v if last else None,
                                                   flush_cache=flush_cache and last, deadline_s=deadline_s))
            await self._client.end_update(deadline_s)
        except (ReplicaFailed, ServerRefused) as error:
            raise ReplicaFailed(f"{self._client.url}: weights of version {version.v} arrived in part: "
                                f"{error}") from error

    async def ask(self, question: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """One answer of the sender. Raises as `hear`."""
        try:
            self._writer.write(json.dumps(question).encode() + b"\n")
            await self._writer.drain()
        except OSError as error:
            raise ReplicaFailed(f"the sender of weights: {type(error).__name__}: {error}") from error
        return await self.hear(deadline_s)

    async def hear(self, deadline_s: float) -> dict[str, Any]:
        """What the sender says next. Raises WeightsDamaged where the bytes of a version are, ReplicaFailed for what
        else it could not do, and when it is gone or silent."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), deadline_s)
        except (OSError, TimeoutError, ValueError) as error:
            raise ReplicaFailed(f"the sender of weights: {type(error).__name__}: {error}") from error
        if not line:
            raise ReplicaFailed("the sender of weights hung up: its learner is gone")
        answer = as_object(line)
        if "damaged" in answer:
            raise WeightsDamaged(f"the sender of weights: {answer['damaged']}")
        if "error" in answer:
            raise ReplicaFailed(f"the sender of weights: {answer['error']}")
        return answer

    def close(self) -> None:
        """The sender leaves the group then."""
        self._writer.close()


async def open_channel(client: SglangClient, address: Address, *, backend: str, ranks: int) -> Channel:
    """Server and sender join a group of their own. `ranks`: of the server (tensor parallelism). Raises NobodySends,
    ReplicaFailed, ServerRefused."""
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=LINE_BYTES)
    except OSError as error:
        raise NobodySends(f"no sender of weights listens at {address.host}:{address.port}: {error}") from error
    channel = Channel(client, address, f"headway-{secrets.token_hex(8)}", reader, writer)
    with ExitStack() as undo:
        undo.callback(channel.close)
        hello = {"backend": backend, "world": 1 + ranks, "group": channel.group}
        try:
            told = await channel.ask({"secret": address.secret, "hello": hello}, GROUP_S)
        except ReplicaFailed as error:  # another program listens there by now
            raise NobodySends(f"{address.host}:{address.port}: {error}") from error
        joining = asyncio.create_task(client.join_group(address.host, int(told["port"]), world=1 + ranks,
                                                        group=channel.group, backend=backend, deadline_s=GROUP_S))
        undo.callback(joining.cancel)
        joined = await channel.hear(GROUP_S)
        await joining
        if joined.get("joined") is not True:
            raise ReplicaFailed(f"the sender of weights did not join: {joined}")
        undo.pop_all()
    return channel
