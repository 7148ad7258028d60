"""One blocking question to a server, for its start and the checks there: `ask(url, "/model_info").get("version")`.

While the engine runs, its client asks (client.py). Standard library.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, cast

ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`Answer(status=200, payload={...})`; `status` is 0 where nothing answers, and `payload` then says why."""

    status: int
    payload: object
    """JSON, or text that is none."""

    @property
    def fields(self) -> dict[str, Any]:
        """Of an object; empty for any other answer."""
        payload: Any = self.payload
        return cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}

    @property
    def items(self) -> list[Any]:
        """Of a list; empty for any other answer."""
        payload: Any = self.payload
        return cast("list[Any]", payload) if isinstance(payload, list) else []

    @property
    def message(self) -> str:
        """What an answer says of an error, in whichever shape."""
        error: Any = self.fields.get("error", self.fields.get("message", self.payload))
        return str(cast("dict[str, Any]", error).get("message", error) if isinstance(error, dict) else error)[:500]


def ask(url: str, route: str, body: dict[str, Any] | None = None, timeout_s: float = ASK_S) -> Answer:
    """GET, or POST of a JSON body. Proxies of the environment are not asked."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + route, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return Answer(answer.status, _json(answer.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, _json(error.read()))
    except (OSError, ValueError) as error:  # nobody there, silence, or no HTTP at all
        return Answer(0, str(error))


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw[:500].decode(errors="replace")
