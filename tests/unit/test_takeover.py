"""Taking a run over from a live owner: real processes hold the lock; exactly the holder is ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_core.errors import RunIsAlive
from rl_core.run_dir import OwnerLock, RunDir, holder, owner_is_alive, refuse_if_alive
from tasks.takeover import take_over

ROOT = Path(__file__).resolve().parents[2]
OWNS = """
    import signal, sys, time
    from pathlib import Path
    from rl_core.run_dir import OwnerLock, RunDir
    {handler}
    lock = OwnerLock(RunDir(Path(sys.argv[1])))
    print("owns", flush=True)
    for _ in range(600):  # a signal between two bytecodes is handled before the next sleep
        time.sleep(0.1)
"""
POLITE = ""
LATE = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.4), sys.exit(143)))"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "k")


@contextmanager
def owner(run: RunDir, handler: str = POLITE) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the run and says so."""
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNS.format(handler=handler)), str(run.root)],
                               cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "owns\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_that_nobody_owns_is_nobodys_to_end(run: RunDir) -> None:
    assert take_over(run) is None
    OwnerLock(run).release()
    assert take_over(run) is None and not owner_is_alive(run)


ENDS = {"at once": (POLITE, -signal.SIGTERM), "in its own time": (LATE, 143),
        "deaf to SIGTERM": (DEAF, -signal.SIGKILL)}


@pytest.mark.parametrize(("handler", "code"), ENDS.values(), ids=ENDS)
def test_the_holder_is_ended_and_the_run_is_free(run: RunDir, handler: str, code: int) -> None:
    said: list[str] = []
    with owner(run, handler) as process:
        told = f"owned by pid {process.pid} on {socket.gethostname()}; stop it first, end it with --take-over, or"
        with pytest.raises(RunIsAlive, match=told):
            refuse_if_alive(run)
        ended = take_over(run, grace_s=1.0, say=said.append)
        assert ended is not None and ended.pid == process.pid
        assert process.wait(1) == code, "its own end, or SIGKILL after the grace"
    assert said[0] == f"ending {ended}, which owns the run" and len(said) == (2 if handler == DEAF else 1)
    lock = OwnerLock(run)
    mine = holder(run)
    assert mine is not None and (mine.pid, mine.here) == (os.getpid(), True)
    lock.release()


def test_a_stopped_holder_is_woken_to_end_in_its_own_way(run: RunDir) -> None:
    with owner(run, LATE) as process:
        os.kill(process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        take_over(run, grace_s=10.0)
        assert process.wait(1) == 143 and time.monotonic() - begun < 5


OTHERS = {"host": {"host": "elsewhere"}, "boot": {"place": "another boot"}}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_holder_that_is_not_here_is_refused_with_what_to_do(run: RunDir, other: dict[str, str]) -> None:
    with owner(run) as process:
        first, second = run.owner_lock.read_text().splitlines()
        run.owner_lock.write_text(f"{first}\n{json.dumps(json.loads(second) | other)}\n")
        with pytest.raises(RunIsAlive, match=f"another machine, boot or container .*kill -TERM {process.pid}"):
            take_over(run)
        assert process.poll() is None and owner_is_alive(run)


def test_a_pid_that_somebody_else_has_now_is_not_signalled(run: RunDir) -> None:
    """The lock is held by a child that was forked with it; the holder's pid belongs to another process."""
    with owner(run) as process, subprocess.Popen(["sleep", "60"]) as stranger:
        first, second = run.owner_lock.read_text().splitlines()
        run.owner_lock.write_text(f"{first}\n{json.dumps(json.loads(second) | {'pid': stranger.pid})}\n")
        with pytest.raises(RunIsAlive, match="still holds the lock"):
            take_over(run, grace_s=0.3)
        assert stranger.poll() is None and process.poll() is None
        stranger.kill()


def test_a_lock_that_does_not_say_who_has_it_is_refused(run: RunDir) -> None:
    with owner(run) as process:
        run.owner_lock.write_text("pid 1 on somewhere\n")
        with pytest.raises(RunIsAlive, match="does not say which process has it"):
            take_over(run)
        assert process.poll() is None
