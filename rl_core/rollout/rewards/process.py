"""A child process that runs one function of a user, or one of Headway's that can hang (child.py).

Calls go one after the other, each with a deadline. A call that hangs is ended with its process, the next one gets a new
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import rl_core
from rl_core.errors import ConfigError
from rl_core.hub import ASKED_OFFLINE, OFFLINE
from rl_core.rollout.rewards.child import Task

START_DEADLINE_S = 60.0
"""A child that starts: interpreter and the imports of the user's file."""
QUIETED = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
"""What commands set for their own libraries, beside HF_HUB_OFFLINE; a person's function shall not have it from them."""


class FunctionProcess:
    """One function in a child process. Thread-safe; one call at a time.

    `what` names the function in errors, as in `reward ./reward.py:score`. `failed` is raised by a call that has no
    result, `timeout` by one that has not answered after `deadline_s` seconds.
    """

    def __init__(self, what: str, task: Task, *, deadline_s: float, failed: type[Exception],
                 timeout: type[Exception], quiet: bool = False) -> None:
        self._what, self._task, self._quiet = what, task, quiet
        self._deadline_s, self._failed, self._timeout = deadline_s, failed, timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._calls = threading.Lock()
        self._state = threading.Lock()
        self._closed = False
        self.ready: dict[str, Any] = {}
        """What the child says of the function that it has loaded."""

    def load(self) -> dict[str, Any]:
        """Load the function now, and return `ready`. Raises ConfigError with its error."""
        with self._calls:
            self._running(ConfigError)
            return self.ready

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the function says to this request. Loads it where it is not loaded."""
        with self._calls:
            child = self._running(self._failed)
            self.said({})
            self._send(child, request)
            reply = self._receive(child, self._deadline_s, self._failed, self._timeout)
            self.said(reply)
        if "error" in reply:
            raise self._failed(f"{self._what}: {reply['error']}")
        return reply["score"]

    def said(self, reply: dict[str, Any]) -> None:
        """For those who want more of a reply than its result; `{}` before a call."""

    def close(self) -> None:
        """End the child, also in the middle of a call (which raises). Idempotent, quick."""
        with self._state:
            self._closed = True
            if self._child is not None:
                _kill(self._child)

    # -- the child

    def _running(self, kind: type[Exception]) -> subprocess.Popen[bytes]:
        with self._state:
            if self._closed:
                raise kind(f"{self._what}: the scorer is closed")
            if self._child is not None and self._child.poll() is None:
                return self._child
            self._buffer = b""
            child = self._child = self._spawn()
        reply = self._receive(child, START_DEADLINE_S, kind, kind)
        if "error" in reply:
            _kill(child)
            raise kind(f"{self._what}: cannot be loaded: {reply['error']}")
        self.ready = reply
        self.said(reply)
        return child

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A group of its own, so that whatever the function starts ends with it; no user input ever reaches a shell.
        return subprocess.Popen(
            [sys.executable, "-m", "rl_core.rollout.rewards.child", json.dumps(self._task)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if self._quiet else None,
            env=child_environment(), cwd="/", start_new_session=True)

    def _send(self, child: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed(f"{self._what}: its process died before the call") from error

    def _receive(self, child: subprocess.Popen[bytes], limit_s: float, kind: type[Exception],
                 timeout: type[Exception]) -> dict[str, Any]:
        """One line from the child within `limit_s`; else the child is ended and `timeout` raised."""
        deadline = time.monotonic() + limit_s
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    _kill(child)
                    raise timeout(f"{self._what}: no answer within {limit_s:g} s; its process was ended")
                data = os.read(child.stdout.fileno(), 1 << 16)
                if not data:
                    _kill(child)
                    raise kind(f"{self._what}: its process ended with exit code {child.returncode}")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def child_environment() -> dict[str, str]:
    """This process's environment with Headway importable, and without what a command has set to quiet itself."""
    env = dict(os.environ)
    asked = env.pop(ASKED_OFFLINE, None)
    if asked is not None:
        ours = QUIETED | {OFFLINE: "1"}
        env = {name: value for name, value in env.items() if ours.get(name) != value}
        env |= {OFFLINE: asked} if asked else {}
    return env | {"PYTHONPATH": os.pathsep.join([str(Path(rl_core.__file__).parents[1]),
                                                 *filter(None, [env.get("PYTHONPATH")])])}


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
