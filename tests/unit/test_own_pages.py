"""A server that answers to its own pages alone, whatever is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from tasks.own_pages import OwnPages, Receive, Scope, Send

OWN = "http://127.0.0.1:5000"
FROM = {
    "no page": (None, 200), "its own page": (OWN, 200), "another origin": ("http://evil.example", 403),
    "another port of this machine": ("http://127.0.0.1:5001", 403), "a page without an origin": ("null", 403),
    "an origin that begins alike": (f"{OWN}.evil.example", 403)}


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(("origin", "status"), FROM.values(), ids=FROM)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_who_is_answered(method: str, origin: str | None, status: int) -> None:
    said: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        said.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError

    headers = [(b"host", b"127.0.0.1:5000"), *([(b"origin", origin.encode())] if origin else [])]
    scope = {"type": "http", "method": method, "path": "/v1/traces", "headers": headers}
    asyncio.run(OwnPages(application, [OWN])(scope, receive, send))
    assert said[0]["status"] == status
    assert not any(name.startswith(b"access-control") for name, _ in said[0]["headers"])
