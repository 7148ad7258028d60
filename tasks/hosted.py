"""The shell that a role's object lives in when it runs as an actor. Knows nothing of Ray and imports nothing heavy.

An ordinary class: `cluster.py` makes an actor of it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import StaleAttempt
from rl_core.run_dir import boot_id
from rl_core.run_log import STORY, RunLog, at_step
from tasks import keeper

TOLD = ("step", "version")
"""Parameters that a call has when it is told in the log: those that ask or say what is new come twice a second."""
CLOSE_S = 2.0
"""What `close` of a role may take before a silent owner's actor ends without it."""


def here() -> str:
    """This machine, boot and pid namespace: where a pid means the same process."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid') if keeper.PROC else os.uname().nodename}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which process an actor is, and whether it was made with the settings that were asked for."""

    pid: int
    started: int
    place: str
    same: bool

    @staticmethod
    def unknown() -> Identity:
        return Identity(pid=0, started=0, place="", same=False)

    @staticmethod
    def of_this_process(*, same: bool) -> Identity:
        started = keeper.start_time(os.getpid())
        assert started is not None
        return Identity(pid=os.getpid(), started=started, place=here(), same=same)

    def family(self) -> list[tuple[int, int]]:
        """`(pid, start time)` of the process and all that it started, if they are on this machine; else none."""
        return family(self.pid, self.started) if self.pid and self.place == here() else []


class Hosted:
    """Hosts one object: calls carry the owner's attempt, and an owner that falls silent ends the process.

    Thread-safe: calls run at once. The object is made by `make`, so that its constructor's exception reaches the caller
    as itself.
    """

    def __init__(self, *, label: str, attempt: int, digest: str, owner_timeout_s: float, threads: int,
                 nice: int, environ: dict[str, str], cwd: str, paths: list[str], log: str | None) -> None:
        self._label, self._attempt, self._digest = label, attempt, digest
        self._timeout_s, self._heard = owner_timeout_s, time.monotonic()
        self._lock = threading.Lock()
        self._hosted: Any = None
        self._log: RunLog | None = None
        # Before the role's modules are imported, which read these once.
        os.environ |= {**environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
                       "OPENBLAS_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        os.nice(nice)
        with suppress(OSError):  # a relative reward path means the owner's directory; another machine may lack it
            os.chdir(cwd)
        sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
        if log is not None:
            _redirect(log)
            self._open_log(Path(log))
        threading.Thread(target=self._watch, name="owner-watchdog", daemon=True).start()

    def make(self, attempt: int, factory: str, kwargs: dict[str, Any]) -> None:
        """Make the hosted object: `module:Class` with these arguments."""
        self._hear(attempt)
        module, _, name = factory.partition(":")
        self._hosted = getattr(importlib.import_module(module), name)(**kwargs)

    def adopt(self, attempt: int, digest: str) -> Identity:
        """Be owned by this attempt from now on. An object made with other settings, or not yet, is not the same."""
        made = self._hosted is not None
        self._hear(attempt)
        return Identity.of_this_process(same=made and digest == self._digest)

    def identity(self) -> Identity:
        return Identity.of_this_process(same=False)

    def beat(self, attempt: int) -> None:
        """The owner lives. Nothing more."""
        self._hear(attempt)

    def call(self, attempt: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the hosted object. Raises StaleAttempt for an owner that is no longer the newest."""
        self._hear(attempt)
        bound = getattr(self._hosted, method)
        parameters = inspect.signature(bound).parameters
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if "attempt" in parameters and "attempt" not in given:
            kwargs = {**kwargs, "attempt": attempt}
        with at_step(given.get("step")):
            return self._told(method, given, lambda: bound(*args, **kwargs))

    def _told(self, method: str, given: Mapping[str, Any], work: Callable[[], Any]) -> Any:
        """Do it, and say in the log how it ended."""
        begun = time.monotonic()
        try:
            answer = work()
        except Exception as error:
            STORY.error("%s failed after %.3f s: %s: %s", method, time.monotonic() - begun, type(error).__name__, error,
                        exc_info=error)
            raise
        if any(name in given for name in TOLD):
            version = f" v {getattr(given['version'], 'v', None)}" if "version" in given else ""
            STORY.info("%s%s: %.3f s", method, version, time.monotonic() - begun)
        return answer

    def _open_log(self, log: Path) -> None:
        """The structured one, beside what the process writes to stdout and stderr."""
        with suppress(OSError):
            self._log = RunLog(log.with_suffix(".jsonl"), run_key=log.parent.parent.name, component=log.stem,
                               attempt=lambda: self._attempt)
            STORY.info("pid %d, %s", os.getpid(), self._label)

    def close_log(self) -> None:
        """For a process that goes on; an actor ends with its log open."""
        if self._log is not None:
            self._log.close()

    def _hear(self, attempt: int) -> None:
        with self._lock:
            if attempt < self._attempt:
                raise StaleAttempt(f"{self._label}: attempt {attempt} is over, attempt {self._attempt} owns the run")
            self._attempt = attempt
            self._heard = time.monotonic()

    def _watch(self) -> None:
        """End this process when its owner is silent. Waits for the clock; unblocked by every owner call."""
        while (silent := time.monotonic() - self._heard) <= self._timeout_s:
            time.sleep(min(1.0, self._timeout_s / 10))
        print(f"{self._label}: no owner for {silent:.1f} s, ending", file=sys.stderr, flush=True)
        STORY.warning("no owner for %.1f s, ending", silent)
        if hasattr(self._hosted, "close"):
            closing = threading.Thread(target=self._hosted.close, name="close", daemon=True)
            closing.start()
            closing.join(CLOSE_S)
        me = Identity.of_this_process(same=True)
        end_family([process for process in me.family() if process[0] != me.pid])
        os._exit(1)


def end_family(processes: list[tuple[int, int]]) -> None:
    """SIGKILL these processes and wait until they are gone."""
    for pid, started in processes:
        keeper.signal_process(pid, started, signal.SIGKILL)
    until = time.monotonic() + 5.0
    while any(keeper.is_alive(*process) for process in processes) and time.monotonic() < until:
        time.sleep(0.01)


def family(pid: int, started: int) -> list[tuple[int, int]]:
    """`(pid, start time)` of the live process, its descendants, and what they left in its process group.

    Ray makes every worker the leader of a process group; the kernel gives its number to nobody else while it lasts.
    """
    held = keeper.stat(pid)
    if held is not None and held.started != started:
        return []
    live = keeper.processes()
    found = {member for member, p in live.items() if member == pid or (p.group == pid and p.started >= started)}
    while grown := {member for member, p in live.items() if p.parent in found and p.parent != 1} - found:
        found |= grown
    return [(member, live[member].started) for member in sorted(found)]


def _redirect(log: str) -> None:
    """Python's, and every library's, stdout and stderr go to this file."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    fd = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
