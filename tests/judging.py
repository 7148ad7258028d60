"""A judge for tests: a server of OpenAI's chat completions that says what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[BaseHTTPRequestHandler], None]


class Judge:
    """A server that gives these replies one after the other, the last one again and again, and keeps what it was asked.
    """

    def __init__(self, replies: list[Reply]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[BaseHTTPRequestHandler, dict[str, Any], int], None] = lambda handler, asked, n: None
        """Without replies: told the handler, what was asked, and how often that was."""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                judge.asked.append(json.loads(body) | {"path": self.path})
                judge.headers.append(dict(self.headers))
                if replies:
                    replies[min(len(judge.asked), len(replies)) - 1](self)
                else:
                    judge.answer(self, judge.asked[-1], len(judge.asked))

            def log_message(self, *args: Any) -> None:
                """Nothing is printed."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def sends(payload: Any, status: int = 200) -> Reply:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return reply


def says(text: str | None, **message: Any) -> Reply:
    finish = message.pop("finish_reason", "stop")
    return sends({"choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}]})
