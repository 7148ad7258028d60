"""A server that answers as it was told to, and notes what it was asked. Where it was told of no answer, it hangs up."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tasks.servers import HOST


class Answering(http.server.ThreadingHTTPServer):
    """`answers`: `{"GET /flows/1": (200, {"name": "train"})}`; what is None is sent without a body."""

    def __init__(self, answers: Mapping[str, tuple[int, Any]]) -> None:
        super().__init__((HOST, 0), _Answer)
        self.answers = dict(answers)
        self.asked: list[str] = []

    @property
    def page(self) -> str:
        return f"http://{HOST}:{self.server_port}"


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Answering

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = f"{self.command} {self.path}"
        self.server.asked.append(asked)
        if asked not in self.server.answers:
            return
        code, body = self.server.answers[asked]
        self.send_response(code)
        self.end_headers()
        if body is not None:
            self.wfile.write(json.dumps(body).encode())

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(answers: Mapping[str, tuple[int, Any]]) -> Iterator[Answering]:
    with Answering(answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
