"""A killed night is told by Prefect's server: the automation follows the `notify` that is deployed."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2 import Environment

from flows.deploying import nightly_parameters
from rl_core.errors import ConfigError, DeadPart
from tasks import silent_runs
from tasks.crash_notices import NAME, SUBJECT, WORDS, check, ensure
from tests.answering import answering

BLOCKS = {
    "webhook/morning": {"id": "b1", "block_type": {"slug": "webhook"}, "block_schema": {"capabilities": []}},
    "slack-webhook/team": {"id": "b2", "block_type": {"slug": "slack-webhook"},
                           "block_schema": {"capabilities": ["notify"]}},
    "s3/store": {"id": "b3", "block_type": {"slug": "s3"}, "block_schema": {"capabilities": ["read-path"]}}}


class Server(http.server.ThreadingHTTPServer):
    """What Prefect's server answers about blocks and automations."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.kept: dict[str, dict[str, Any]] = {}
        self.changes: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(http.server.BaseHTTPRequestHandler):
    server: Server

    def _body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def _say(self, code: int, answer: Any = None) -> None:
        self.send_response(code)
        self.end_headers()
        if answer is not None:
            self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        _, _, _, slug, _, _, name = self.path.split("/")
        block = BLOCKS.get(f"{slug}/{name}")
        self._say(200, block) if block else self._say(404)

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/automations/filter":
            [wanted] = body["automations"]["name"]["any_"]
            return self._say(200, [one for one in self.server.kept.values() if one["name"] == wanted])
        self.server.changes.append("made")
        self.server.kept["a1"] = {**body, "id": "a1"}
        return self._say(201, self.server.kept["a1"])

    def do_PUT(self) -> None:
        self.server.changes.append("changed")
        self.server.kept["a1"] = {**self._body(), "id": "a1"}
        self._say(204)

    def do_DELETE(self) -> None:
        self.server.changes.append("removed")
        del self.server.kept["a1"]
        self._say(204)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True).start()
        yield one
        one.shutdown()


def test_the_automation_is_made_changed_and_removed_as_notify_is(server: Server) -> None:
    def is_now(notify: str | None) -> dict[str, Any] | None:
        ensure(server.url, None, notify)
        return server.kept.get("a1")

    assert is_now(None) is None and is_now("env:HOOK") is None and server.changes == []
    made = is_now("block:webhook/morning")
    assert made is not None and (made["name"], made["enabled"]) == (NAME, True)
    assert made["trigger"]["expect"] == ["prefect.flow-run.Crashed"]
    assert made["trigger"]["match_related"] == {"prefect.resource.role": "flow", "prefect.resource.name": "nightly"}
    [action] = made["actions"]
    assert (action["type"], action["block_document_id"]) == ("call-webhook", "b1")
    assert is_now("block:webhook/morning") == made and server.changes == ["made"], "again changes nothing"
    made["enabled"] = False
    changed = is_now("block:slack-webhook/team")
    assert changed is not None and changed["enabled"] is False, "what a person has switched off stays off"
    assert (changed["actions"][0]["type"], changed["actions"][0]["subject"]) == ("send-notification", SUBJECT)
    assert is_now("block:s3/store") is None, "a block that tells nobody"
    assert is_now("block:webhook/morning") is not None and is_now("env:HOOK") is None
    assert server.changes == ["made", "changed", "removed", "made", "removed"]


def test_a_block_that_is_not_there_is_refused_before_anything_is_registered(server: Server) -> None:
    for notify in (None, "env:HOOK", "block:webhook/morning"):
        check(server.url, None, notify)
    with pytest.raises(ConfigError, match="--param notify=block:webhook/evening: there is no such block"):
        check(server.url, None, "block:webhook/evening")


def test_a_server_without_automations_has_not_taken_one() -> None:
    block = "/block_types/slug/webhook/block_documents/name/morning"
    with answering({"POST /automations/filter": (404, None), "POST /automations/": (404, None),
                    f"GET {block}": (200, BLOCKS["webhook/morning"])}) as prefect:
        for asked in (lambda: silent_runs.ensure(prefect.page, None),
                      lambda: ensure(prefect.page, None, "block:webhook/morning")):
            with pytest.raises(DeadPart, match="has no automations"):
                asked()


def test_what_the_page_says_removes_it_is_taken(server: Server) -> None:
    ensure(server.url, None, "block:webhook/morning")
    said = server.kept["a1"]["description"]
    assert "--param notify=null`" in said and nightly_parameters(["notify=null"]) == {"notify": None}


def test_what_is_sent_is_json_whatever_the_state_says() -> None:
    """Prefect's server renders it by jinja; tests/services/test_nightly.py has it do so."""
    why = 'no "heartbeat" for <90> s\n\nmore'
    sent = json.loads(Environment().from_string(WORDS).render(flow_run={"name": "n-1", "state": {"message": why}}))
    assert sent == {"subject": "n-1: crashed", "text": f"n-1: crashed: {why}", "night": "n-1", "verdict": "crashed",
                    "reasons": [why]}
