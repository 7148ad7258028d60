"""In front of a server of this machine: requests of its own pages, and of those who are no page. Imports nothing, since
the server's process loads it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class OwnPages:
    """ASGI middleware: whatever comes from a page of an origin that is none of `origins` is answered 403, whatever it
    asks for. Programs say no origin."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], origins: Sequence[str]) -> None:
        self._app, self._origins = app, frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        foreign = scope["type"] == "http" and any(
            name == b"origin" and origin not in self._origins for name, origin in scope["headers"])
        if not foreign:
            return await self._app(scope, receive, send)
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"refused: a page of another origin"})
