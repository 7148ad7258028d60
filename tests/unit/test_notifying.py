"""Notes go to an address that is named, never written; whoever does not take them is a word of the log."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rl_core.errors import ConfigError
from tasks.notifying import check_address, notify
from tasks.servers import free_port

SECRET = "s3cr3t-token"


@contextmanager
def webhook(status: int = 200, leads_to: str | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Address of a server on loopback, and what it was sent."""
    taken: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            if leads_to is not None:
                self.send_header("Location", leads_to)
            self.end_headers()

        def do_GET(self) -> None:  # of who follows a 301 to an address that answers
            self.send_response(200)
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


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_one_that_leads_elsewhere_has_not_taken_the_words(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with webhook() as (elsewhere, taken), webhook(status, elsewhere) as (url, asked):
        monkeypatch.setenv("HOOK", url)
        assert notify("env:HOOK", {"text": "all is well"}) == f"it answered {status}; give the address it leads to"
    assert (len(asked), taken) == (1, [])


def test_a_block_whose_address_leads_elsewhere_has_not_sent_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's Webhook does not follow it either, and says nothing of that."""
    moved = SimpleNamespace(call=lambda words: SimpleNamespace(status_code=301))
    monkeypatch.setattr("tasks.notifying._load", lambda name: moved)
    assert notify("block:webhook/morning", {}) == "it answered 301; give the address it leads to"


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
