"""One SGLang server over HTTP: the stream of an answer, and the calls that control the server.

Every call has a deadline. What goes wrong comes as one of three: `ReplicaFailed` (died, silent, or no sound answer),
`BadAnswer` (a ReplicaFailed: not of the known shape), `ServerRefused` (it answered, and said no).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import aiohttp

from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.wire import ReplicaFailed, ServerRefused

CONNECT_S = 2.0
CALL_S = 30.0
"""A control call that moves no weights."""
LOOK_S = 2.0
"""Asking whether a server lives."""
PauseMode = Literal["in_place", "retract", "abort"]


def open_session() -> aiohttp.ClientSession:
    """Connections to all servers of one engine; made inside its loop. Proxies of the environment are not asked."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=False), trust_env=False,
                                 auto_decompress=True)


class SglangClient:
    """`SglangClient("http://127.0.0.1:30000", session, silence_s=120)`; all methods belong to the session's loop."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, silence_s: float) -> None:
        self.url = url
        self._session = session
        self._silence_s = silence_s

    # -- answers

    async def generate(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """Payloads of the events of one answer, as they come, until the server says that it is done.

        Raises ReplicaFailed for a stream that breaks off or is silent for `silence_s`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._silence_s)
        events = wire.Events()
        try:
            async with self._session.post(self.url + wire.GENERATE, json=body, timeout=timeout) as response:
                if response.status != 200:
                    await self._raise_refusal(wire.GENERATE, response)
                async for chunk in response.content.iter_any():
                    for payload in events.feed(chunk):
                        if payload == wire.DONE:
                            return
                        yield payload
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaFailed(f"{self.url}{wire.GENERATE}: {_words(error, self._silence_s)}") from error
        raise ReplicaFailed(f"{self.url}{wire.GENERATE}: the stream broke off")

    async def abort(self, rid: str) -> None:
        """End one request; its stream then says the tokens so far. An unknown id is ignored by the server.

        Ids are compared by their beginning: no id may be the beginning of another.
        """
        await self._post(wire.ABORT, {"rid": rid}, CALL_S)

    async def abort_all(self) -> None:
        """End all requests, whoever has sent them."""
        await self._post(wire.ABORT, {"rid": "", "abort_all": True}, CALL_S)

    # -- control

    async def model_info(self, deadline_s: float = LOOK_S) -> wire.ModelInfo:
        """Cheap; also answered while the server is paused."""
        return wire.read_model_info(await self._get(wire.MODEL_INFO, deadline_s))

    async def server_info(self, deadline_s: float = CALL_S) -> wire.ServerInfo:
        return wire.read_server_info(await self._get(wire.SERVER_INFO, deadline_s))

    async def load(self, deadline_s: float = LOOK_S) -> wire.Load:
        return wire.read_loads(await self._get(wire.LOADS + "?include=core", deadline_s))

    async def pause(self, mode: PauseMode, deadline_s: float = CALL_S) -> None:
        await self._post(wire.PAUSE, {"mode": mode}, deadline_s)

    async def resume(self, deadline_s: float = CALL_S) -> None:
        await self._post(wire.RESUME, {}, deadline_s)

    async def update_from_disk(self, path: str, version: int, *, flush_cache: bool, deadline_s: float) -> None:
        """Raises ServerRefused when the server keeps its weights."""
        await self._done(wire.UPDATE_FROM_DISK, wire.update_body(path, version, flush_cache=flush_cache), deadline_s)

    async def checksums(self, deadline_s: float = CALL_S) -> dict[str, str]:
        """Of every tensor as the server holds it, by the server's names."""
        return wire.read_checksums(await self._post(wire.CHECKSUMS, {"action": "checksum"}, deadline_s))

    # -- weights over a process group (collective.py)

    async def join_group(self, host: str, port: int, *, world: int, group: str, backend: str,
                         deadline_s: float) -> None:
        """Answers when all have joined; the sender is rank 0, the server's ranks come behind it."""
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world,
                "group_name": group, "backend": backend}
        await self._done(wire.JOIN_GROUP, body, deadline_s)

    async def begin_update(self, deadline_s: float) -> None:
        await self._done(wire.BEGIN_UPDATE, {}, deadline_s)

    async def update_from_group(self, group: str, part: Mapping[str, Any], version: int | None, *, flush_cache: bool,
                                deadline_s: float) -> None:
        """Receive these tensors (`names`, `dtypes`, `shapes`); with the last ones comes the version."""
        body = {**part, "group_name": group, "flush_cache": flush_cache,
                "weight_version": None if version is None else str(version)}
        await self._done(wire.UPDATE_FROM_GROUP, body, deadline_s)

    async def end_update(self, deadline_s: float) -> None:
        await self._done(wire.END_UPDATE, {}, deadline_s)

    # -- how calls are made

    async def _done(self, route: str, body: Mapping[str, Any], deadline_s: float) -> None:
        answer = await self._post(route, body, deadline_s)
        if answer.get("success") is not True:
            raise ServerRefused(self.url + route, 200, wire.read_message(answer))

    async def _get(self, route: str, deadline_s: float) -> dict[str, Any]:
        return await self._call("GET", route, None, deadline_s)

    async def _post(self, route: str, body: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        return await self._call("POST", route, body, deadline_s)

    async def _call(self, method: str, route: str, body: Mapping[str, Any] | None,
                    deadline_s: float) -> dict[str, Any]:
        """The JSON object that it answers, empty for an empty answer."""
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(method, self.url + route, json=body, timeout=timeout) as response:
                if response.status != 200:
                    await self._raise_refusal(route, response)
                payload = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaFailed(f"{self.url}{route}: {_words(error, deadline_s)}") from error
        return wire.as_object(payload) if payload.strip() else {}

    async def _raise_refusal(self, route: str, response: aiohttp.ClientResponse) -> None:
        """4xx: it understood and said no. 5xx: it is not well."""
        payload = await response.read()
        try:
            message = wire.read_message(wire.as_object(payload))
        except wire.BadAnswer:
            message = payload[:500].decode(errors="replace")
        if response.status >= 500:
            raise ReplicaFailed(f"{self.url}{route}: status {response.status}: {message}")
        raise ServerRefused(f"{self.url}{route}", response.status, message)


def _words(error: BaseException, deadline_s: float) -> str:
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return f"no word for {deadline_s:g} s"
    return f"{type(error).__name__}: {error}"
