"""One program of a model's, run once in a process that can harm nothing (sandbox_child.py), and how it ended.

The parent's part: wall time, the size of the output, and a name for every end.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rl_core.rollout.rewards.sandbox_child import READY

Ended = Literal["finished", "error", "time", "memory", "output", "processes", "network", "files", "crashed"]
"""`finished`: to its end, whatever it printed. `error`: an error that it did not catch, or `exit` before its tests.
`time`, `memory`, `output`: over that limit. `processes`, `network`, `files`: an uncaught error of trying to start a
process, to open a socket, to write a file or to read one that is kept from it. `crashed`: by a signal."""
START_S = 10.0
"""The interpreter, until it has confined itself; counts apart from the program's time."""
CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one run of a program."""

    time_s: float
    memory_bytes: int
    """Of address space, the interpreter's included."""
    output_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """`Finished(ended="time", output="", detail="", seconds=4.0)`."""

    ended: Ended
    output: str
    """What it printed; of a program that printed too much, the beginning."""
    detail: str
    """The error, for people."""
    seconds: float
    """Of the program, without the start of its interpreter."""


class SandboxMissing(OSError):
    """This machine has no such sandbox: nothing was run."""


class NotStarted(OSError):
    """The process was not ready within START_S, or ended before: nothing was run, and nothing is known of the program.
    """


def check_sandbox() -> None:
    """Raises SandboxMissing where programs cannot be confined. Runs an empty one."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise SandboxMissing(f"programs are confined by seccomp on Linux, x86_64; this is {sys.platform}, "
                             f"{platform.machine()}")
    run_program("", limits=Limits(time_s=START_S, memory_bytes=1 << 30, output_bytes=1))


def run_program(source: str, *, limits: Limits, stdin: str = "", tests: str = "") -> Finished:
    """Run a Python program, and behind it `tests` in its names. Returns when its process is gone.

    Raises SandboxMissing if the process could not be confined, NotStarted if it did not come so far; then the program
    was not run.
    """
    token = secrets.token_hex(16)
    task = json.dumps({"source": source, "tests": tests, "token": token}).encode("utf-8", "surrogateescape")
    with _Child(limits, task, stdin.encode("utf-8", "replace")) as child:
        over = child.read(limits)
    code = child.process.returncode
    word, _, detail = child.said.decode("utf-8", "replace").removeprefix(READY).partition(" ")
    if child.began is None:
        if word == "unconfined":
            raise SandboxMissing(f"a program could not be confined: {detail}")
        why = f"was not ready within {START_S:g} s" if over == "time" else f"ended with exit code {code} at its start"
        raise NotStarted(f"the process for a program {why}; the program was not run")
    return Finished(ended=over or _ended(word, token, code), output=child.output.decode("utf-8", "replace"),
                    detail=detail, seconds=time.monotonic() - child.began)


def _ended(word: str, token: str, code: int) -> Ended:
    if word == token:
        return "finished"
    if word in get_args(Ended) and word != "finished":
        return word  # type: ignore[return-value]
    if code == -signal.SIGXCPU:
        return "time"
    return "crashed" if code < 0 else "error"


class _Child:
    """The process with its pipes."""

    def __init__(self, limits: Limits, task: bytes, stdin: bytes) -> None:
        self.output = self.said = b""
        self.began: float | None = None
        """When it was ready, and the program began (monotonic seconds)."""
        self._task, self._stdin = task, stdin
        given, self._give = os.pipe()
        self._say, saying = os.pipe()
        cpu_s = int(limits.time_s) + 2  # the wall clock comes first; this holds where nobody looks at it
        command = [sys.executable, "-I", "-B", str(CHILD), json.dumps(
            {"memory_bytes": limits.memory_bytes, "cpu_s": cpu_s, "given": given, "saying": saying})]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, pass_fds=(given, saying), cwd="/",
                                        env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"})
        os.close(given)
        os.close(saying)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        for descriptor in (self._give, self._say):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def read(self, limits: Limits) -> Ended | None:
        """Feed and read until it ends; which limit it went over, if any. `time` before `began`: that of its start."""
        deadline = time.monotonic() + START_S
        assert self.process.stdin is not None and self.process.stdout is not None
        stdin, stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        left = {self._give: self._task, stdin: self._stdin}
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._give, stdin):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_WRITE)
            for descriptor in (stdout, self._say):
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    return "time"
                for key, _ in ready:
                    if key.fd in left:
                        left[key.fd] = _write(key.fd, left[key.fd])
                        if not left[key.fd]:
                            selector.unregister(key.fd)
                            self._close(key.fd)
                        continue
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    elif key.fd == self._say:
                        self.said = (self.said + data)[:4096]
                        if self.began is None and self.said.startswith(READY.encode()):
                            self.began = time.monotonic()  # from now on it is the program's time
                            deadline = self.began + limits.time_s
                    else:
                        self.output += data
                        if len(self.output) > limits.output_bytes:
                            self.output = self.output[:limits.output_bytes]
                            return "output"
        return self._wait(deadline)

    def _wait(self, deadline: float) -> Ended | None:
        """Its pipes are closed; a program may close them and go on."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "time"
        return None

    def _close(self, descriptor: int) -> None:
        assert self.process.stdin is not None
        if descriptor == self._give:
            os.close(descriptor)
        else:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


def _write(descriptor: int, data: bytes) -> bytes:
    """What is left of it; nothing where nobody reads any more."""
    try:
        return data[os.write(descriptor, data[:1 << 16]):]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""
