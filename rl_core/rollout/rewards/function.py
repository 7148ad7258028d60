"""A reward function in a process of its own: `./file.py:function`, `package.module:function`, or one of Headway's that
can hang or must not run in a thread (CHILD_REWARDS, `reasoning_gym:<name>`).

One child process per scorer; calls go one after the other, each with a deadline. A call that hangs is ended with its
process, the next one gets a new process. A function that raises, hangs or returns no finite number is a RewardError
with the function's name and the value, never a reward of 0.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rl_core
from rl_core.errors import ConfigError, RewardError, RewardTimeout
from rl_core.hub import ASKED_OFFLINE, OFFLINE
from rl_core.reward_settings import TASK
from rl_core.rollout.rewards.child import Task
from rl_core.types import Prompt, Score

START_DEADLINE_S = 60.0
"""A child that starts: interpreter and the imports of the user's file."""
ALLOWED_IMPORTS = "HEADWAY_ALLOWED_IMPORTS"
PACKAGES = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}
"""Module and package of what a reward of Headway's needs beside Headway: the extra `tasks`."""
QUIETED = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
"""What commands set for their own libraries, beside HF_HUB_OFFLINE; a person's function shall not have it from them."""
CHILD_REWARDS = ("regex", "math_verify")


def allowed_imports() -> tuple[str, ...]:
    """Top-level packages of HEADWAY_ALLOWED_IMPORTS (comma-separated)."""
    return tuple(name.strip() for name in os.environ.get(ALLOWED_IMPORTS, "").split(",") if name.strip())


def is_own(reward: str) -> bool:
    """Whether a reward that runs in a child process is one of Headway's, by its name."""
    return reward in CHILD_REWARDS or reward.startswith(TASK)


def check_package(reward: str) -> None:
    """Refuse, with ConfigError, a reward or task of Headway's whose package is not installed. Imports nothing."""
    module = reward.partition(":")[0]
    if module in PACKAGES and importlib.util.find_spec(module) is None:
        raise ConfigError(f"{reward}: needs the package {PACKAGES[module]}, which is not installed; pip install "
                          "'headway[tasks]'")


def check_target(reward: str, cwd: Path, allowed: Sequence[str]) -> None:
    """Refuse, with ConfigError naming the field, what is no function path or lies outside rl_core, `cwd` and `allowed`.

    Imports nothing.
    """
    place, _, name = reward.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"reward: {reward!r} is no function path; write `./file.py:function` or "
                          "`package.module:function`")
    if place.endswith(".py"):
        path = (cwd / place).resolve()
        if not path.is_relative_to(cwd.resolve()):
            raise ConfigError(f"reward: {path} lies outside the working directory {cwd}; start the command beside it")
        if not path.is_file():
            raise ConfigError(f"reward: no such file {path}")
        return
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"reward: {place!r} is neither a `.py` file nor a module")
    top = place.split(".")[0]
    if top != "rl_core" and top not in allowed and importlib.machinery.PathFinder.find_spec(top, [str(cwd)]) is None:
        raise ConfigError(f"reward: package {top!r} may not be imported: it is neither in {cwd} nor named by "
                          f"{ALLOWED_IMPORTS} ({','.join(allowed) or 'empty'})")


class FunctionScorer:
    """Scores by a function in a child process. Thread-safe; one call at a time.

    Raises ConfigError in the constructor for a path that may not be run or a package that is not installed; RewardError
    per call. `start()` loads the function now and raises ConfigError if that fails; otherwise the first call does
    (RewardError).
    """

    def __init__(self, reward: str, *, cwd: Path, deadline_s: float, allowed: Sequence[str] = (), quiet: bool = False,
                 signature: str = "auto", answer_key: str = "answer", pattern: str | None = None,
                 watch: bool = False) -> None:
        """`quiet` leaves out what the function prints; else it goes to this process's stderr. `signature`,
        `answer_key` and `pattern` are settings of the run. `watch` asks the child for `notes`."""
        if is_own(reward):
            check_package(reward)
        else:
            check_target(reward, cwd, allowed)
        self._quiet = quiet
        self._columns: tuple[str, ...] = ()
        self._target = reward
        self._task: Task = {"target": reward, "cwd": str(cwd.resolve()), "signature": signature,
                            "answer_key": answer_key, "pattern": pattern, "watch": watch}
        self._deadline_s = deadline_s
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._calls = threading.Lock()
        self._state = threading.Lock()
        self._closed = False
        self.signature = ""
        """How the function is called, once it is loaded: answer, verl or trl."""
        self.notes: dict[str, Any] = {}
        """With `watch`: what loading or the last call printed, left running, or gave in vain."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        columns = dict(prompt.columns)
        request = {"text": text, "truth": prompt.answer, "prompt": columns.pop("prompt", None),
                   "data_source": prompt.data_source, "columns": columns}
        with self._calls:
            child = self._running(RewardError)
            self.notes = {}
            self._send(child, request)
            reply = self._receive(child, self._deadline_s, RewardError, RewardTimeout)
            self.notes = reply["notes"]
        if "error" in reply:
            raise RewardError(f"reward {self._target}: {reply['error']}")
        return Score(**reply["score"])

    def start(self) -> tuple[str, ...]:
        """Load the function. Returns the columns that a row must have for it. Raises ConfigError with its error."""
        with self._calls:
            self._running(ConfigError)
            return self._columns

    def close(self) -> None:
        """End the child, also in the middle of a call (which raises RewardError). Idempotent, quick."""
        with self._state:
            self._closed = True
            if self._child is not None:
                _kill(self._child)

    # -- the child

    def _running(self, kind: type[ValueError]) -> subprocess.Popen[bytes]:
        with self._state:
            if self._closed:
                raise kind(f"reward {self._target}: the scorer is closed")
            if self._child is not None and self._child.poll() is None:
                return self._child
            self._buffer = b""
            child = self._child = self._spawn()
        reply = self._receive(child, START_DEADLINE_S, kind, kind)
        if "error" in reply:
            _kill(child)
            raise kind(f"reward {self._target}: cannot be loaded: {reply['error']}")
        self._columns = tuple(reply["columns"])
        self.signature, self.notes = reply["signature"], reply["notes"]
        return child

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A group of its own, so that whatever the function starts ends with it; no user input ever reaches a shell.
        return subprocess.Popen(
            [sys.executable, "-m", "rl_core.rollout.rewards.child", json.dumps(self._task)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if self._quiet else None,
            env=_environment(), cwd="/", start_new_session=True)

    def _send(self, child: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError as error:
            raise RewardError(f"reward {self._target}: its process died before the call") from error

    def _receive(self, child: subprocess.Popen[bytes], limit_s: float, kind: type[ValueError],
                 timeout: type[ValueError]) -> dict[str, Any]:
        """One line from the child within `limit_s`; else the child is ended and `timeout` raised."""
        deadline = time.monotonic() + limit_s
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    _kill(child)
                    raise timeout(f"reward {self._target}: no answer within {limit_s:g} s; its process was ended")
                data = os.read(child.stdout.fileno(), 1 << 16)
                if not data:
                    _kill(child)
                    raise kind(f"reward {self._target}: its process ended with exit code {child.returncode}")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def _environment() -> dict[str, str]:
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
