"""Programs of a model's can harm nothing, and each end that they come to has a name."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.rollout.rewards import sandbox
from rl_core.rollout.rewards.sandbox import CHILD, Ended, Limits, NotStarted, SandboxMissing, check_sandbox, run_program
from tasks import keeper

LIMITS = Limits(time_s=1.0, memory_bytes=256 << 20, output_bytes=1 << 16)
HERE = os.getpid()
HAS_LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0

ENDS: dict[str, tuple[str, Ended]] = {
    "a sum": ("print(int(input()) + 1)", "finished"),
    "leaves in order": ("import sys\nprint(42)\nsys.exit(0)", "finished"),
    "reads its input by name": ("print(int(open('/dev/stdin').read()) + 1)", "finished"),
    "threads": ("import threading\nt = threading.Thread(target=print, args=(42,))\nt.start()\nt.join()", "finished"),
    "an event loop": ("import asyncio\nasync def f(): print(42)\nasyncio.run(f())", "finished"),
    "an error": ("1 / 0", "error"),
    "no Python": ("def (", "error"),
    "exit code 1": ("import sys\nsys.exit(1)", "error"),
    "too deep": ("def f(): f()\nf()", "error"),
    "never ends": ("while True: pass", "time"),
    "sleeps": ("import time\ntime.sleep(1000)", "time"),
    "closes its pipes and goes on": ("import os\nos.closerange(0, 30)\nwhile True: pass", "time"),
    "prints gigabytes": ("while True: print('x' * 10000)", "output"),
    "takes all memory": ("a = []\nwhile True: a.append(bytearray(10 ** 7))", "memory"),
    "forks for ever": ("import os\nwhile True: os.fork()", "processes"),
    "starts a program": ("import subprocess\nsubprocess.run(['/bin/true'])", "processes"),
    "becomes a program": ("import os\nos.execv('/bin/true', ['true'])", "processes"),
    "ten thousand threads": ("import threading, time\nfor i in range(10000): threading.Thread(target=time.sleep, "
                             "args=(9,)).start()", "processes"),
    "asks the network": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "network"),
    "sends a datagram": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "network"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "crashed"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "crashed"),
    "kills another process": (f"import os\nos.kill({HERE}, 15)", "error"),
    "raises its limits": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "error"),
    "says that it has finished": ("import os\nfor i in range(3, 30):\n    try: os.write(i, b'finished')\n    except "
                                  "OSError: pass\nos._exit(0)", "error"),
    "says that it is not confined": ("import os\nfor i in range(3, 30):\n    try: os.write(i, b'unconfined')\n    "
                                     "except OSError: pass\nos._exit(0)", "error"),
}


@pytest.mark.parametrize(("source", "ended"), ENDS.values(), ids=ENDS)
def test_every_end_has_its_name(source: str, ended: Ended) -> None:
    begun = time.monotonic()
    done = run_program(source, limits=LIMITS, stdin="41\n")
    assert done.ended == ended, done
    assert done.output == "42\n" if ended == "finished" else len(done.output) <= LIMITS.output_bytes
    assert time.monotonic() - begun < 8.0


def test_no_file_is_made_changed_or_removed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("here")
    tries = ["open(mine, 'w')", "open(mine, 'a')", "open(mine, 'r+b')", "os.unlink(mine)", "os.rename(mine, '/tmp/x')",
             "os.truncate(mine, 0)", "os.chmod(mine, 0)", "os.utime(mine)", "os.mkdir(mine + '2')",
             "os.symlink('/', mine + '2')", "os.link(mine, mine + '2')", "os.mknod(mine + '2')",
             "os.rmdir(os.path.dirname(mine))", "os.memfd_create('x')",
             "os.open('/tmp', os.O_RDWR | os.O_TMPFILE)"]
    program = f"""
import os
mine = {str(mine)!r}
for each in {tries!r}:
    try:
        eval(each)
        print(each, "did it")
    except OSError as error:
        print(each, error.errno)
open(mine, "w")
"""
    done = run_program(program, limits=replace(LIMITS, time_s=5.0))
    assert done.output.splitlines() == [f"{each} {errno.EROFS}" for each in tries] and done.ended == "files"
    assert mine.read_text() == "here" and mine.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


READS = """
import os
for place in places:
    try:
        (os.listdir if os.path.isdir(place) else open)(place)
        print("read")
    except OSError as error:
        print(error.errno)
"""


def started_by(monkeypatch: pytest.MonkeyPatch, directory: Path, before: str) -> None:
    """From now on the process of a program does this before it confines itself."""
    script = directory / "child.py"
    script.write_text(f"import sys, time\nsys.path.insert(0, {str(CHILD.parent)!r})\nimport sandbox_child\n"
                      f"del sys.path[0]\n{before}\nsandbox_child.main()\n")
    monkeypatch.setattr(sandbox, "CHILD", script)


@pytest.mark.skipif(not HAS_LANDLOCK, reason="this kernel has no Landlock")
def test_a_program_reads_libraries_and_nothing_else(tmp_path: Path) -> None:
    mine, limits = tmp_path / "mine", replace(LIMITS, time_s=10.0, memory_bytes=1 << 30)
    mine.write_text("here")
    places = [str(mine), str(tmp_path), str(Path(__file__).parents[2] / "README.md"), "/", "/etc/passwd",
              f"/proc/{HERE}/mem", f"/proc/{HERE}/environ", "/proc/self/maps"]
    done = run_program(f"places = {places!r}{READS}open(places[0])", limits=limits)
    assert done.output.splitlines() == [str(errno.EACCES)] * len(places) and done.ended == "files"
    imports = "import ssl, sqlite3, zoneinfo, numpy\nprint(numpy.arange(3).sum())"
    assert run_program(imports, limits=limits).output == "3\n"


def test_a_kernel_without_landlock_runs_programs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started_by(monkeypatch, tmp_path, "sandbox_child.LANDLOCK_CREATE = 4999")
    done = run_program(f"places = [{str(tmp_path)!r}]{READS}open('/tmp/x', 'w')", limits=replace(LIMITS, time_s=5.0))
    assert (done.output, done.ended) == ("read\n", "files")


def test_the_start_of_the_interpreter_is_none_of_the_programs_time(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    started_by(monkeypatch, tmp_path, "time.sleep(1.5)")
    done = run_program("print(int(input()) + 1)", limits=LIMITS, stdin="41\n")
    assert (done.ended, done.output) == ("finished", "42\n") and done.seconds < LIMITS.time_s
    assert run_program("while True: pass", limits=replace(LIMITS, time_s=0.2)).ended == "time"


LATE = {"never ready": ("time.sleep(60)", 0.5, r"was not ready within 0\.5 s"),
        "ends by itself": ("sys.exit(7)", 10.0, "ended with exit code 7 at its start"),
        "is killed": ("import os; os.kill(os.getpid(), 9)", 10.0, "ended with exit code -9 at its start")}


@pytest.mark.parametrize(("before", "start_s", "words"), LATE.values(), ids=LATE)
def test_a_process_that_never_gets_ready_is_no_end_of_the_program(before: str, start_s: float, words: str,
                                                                  tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    started_by(monkeypatch, tmp_path, before)
    monkeypatch.setattr(sandbox, "START_S", start_s)
    begun = time.monotonic()
    with pytest.raises(NotStarted, match=f"the process for a program {words}; the program was not run"):
        run_program("print(42)", limits=replace(LIMITS, time_s=60.0))
    assert time.monotonic() - begun < 8.0


def test_a_program_sees_neither_the_environment_nor_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SECRET", "x")
    done = run_program("import os, sys\nprint(sorted(os.environ), os.getcwd(), sys.argv[0][-16:])",
                       limits=replace(LIMITS, time_s=5.0))
    assert done.output == "['LANG', 'PATH', 'PYTHONHASHSEED'] / sandbox_child.py\n"


def test_tests_run_in_the_names_of_the_program_and_leaving_before_them_does_not_pass() -> None:
    limits = replace(LIMITS, time_s=5.0)
    program = "def twice(x):\n    return 2 * x"
    assert run_program(program, limits=limits, tests="assert twice(4) == 8").ended == "finished"
    failed = run_program(program, limits=limits, tests="assert twice(4) == 9")
    assert failed.ended == "error" and failed.detail.startswith("AssertionError")
    for leaves in ("import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise SystemExit", "quit()"):
        assert run_program(leaves, limits=limits, tests="assert False").ended == "error"


def test_much_input_is_given_and_input_that_nobody_reads_holds_up_nothing() -> None:
    limits = replace(LIMITS, time_s=5.0)
    lines = "7\n" * 300_000
    assert run_program("import sys\nprint(sum(map(int, sys.stdin)))", limits=limits, stdin=lines).output == "2100000\n"
    assert run_program("print(1)", limits=limits, stdin=lines).ended == "finished"


def test_no_descriptor_and_no_process_is_left(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def children() -> set[int]:
        return {pid for pid, known in keeper.processes().items() if known.parent == os.getpid()}

    gc.collect()  # what earlier tests left open
    before, threads, others = descriptors(), threading.active_count(), children()
    for source in ("print(1)", "while True: pass", "import os\nos.closerange(0, 30)", "while True: print('x' * 10000)"):
        run_program(source, limits=replace(LIMITS, time_s=0.2))
    assert descriptors() <= before and threading.active_count() <= threads
    assert children() <= others


def test_a_machine_without_the_sandbox_is_refused_and_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sandbox()
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxMissing, match="seccomp on Linux, x86_64; this is linux, riscv64"):
        check_sandbox()
