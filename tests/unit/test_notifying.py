"""Notes go to an address that is named, never written; whoever does not take them is a word of the log."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_core.errors import ConfigError
from tasks.notifying import check_address, notify
from tasks.servers import free_port

SECRET = "s3cr3t-token"


@contextmanager
def webhook(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Address of a server on loopback, and what it was sent."""
    taken: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{SECRET}", taken
    finally:
        server.shutdown()
        server.server_close()


def test_words_reach_the_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook() as (url, taken):
        monkeypatch.setenv("HOOK", url)
        check_address("env:HOOK")
        assert notify("env:HOOK", {"text": "all is well"}) is None
    assert taken == [{"text": "all is well"}]


@pytest.mark.parametrize(("status", "why"), [(500, "it answered 500"), (404, "it answered 404")])
def test_one_that_refuses_is_told_without_the_address(monkeypatch: pytest.MonkeyPatch, status: int, why: str) -> None:
    with webhook(status) as (url, _):
        monkeypatch.setenv("HOOK", url)
        assert notify("env:HOOK", {}) == why


def test_one_that_is_not_there_is_told_without_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{free_port()}/{SECRET}")
    trouble = notify("env:HOOK", {})
    assert trouble == "no answer (ConnectionRefusedError)"


REFUSED = {
    "an address": f"https://hooks.example/{SECRET}", "a bare name": "HOOK", "no variable": "env:NOT_THERE",
    "a variable without an address": "env:HOOK", "a block without a type": "block:morning"}


@pytest.mark.parametrize("address", REFUSED.values(), ids=REFUSED)
def test_what_is_no_name_of_an_address_is_refused_without_saying_it(monkeypatch: pytest.MonkeyPatch, address: str
                                                                    ) -> None:
    monkeypatch.setenv("HOOK", SECRET)
    with pytest.raises(ConfigError, match="notify: ") as refused:
        check_address(address)
    assert SECRET not in str(refused.value) and "env:NAME" in str(refused.value)


def test_what_is_no_name_is_not_repeated_either_where_it_is_used() -> None:
    assert notify(f"https://hooks.example/{SECRET}", {}) == "no name of an address"
