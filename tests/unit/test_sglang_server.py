"""Servers as processes: started, refused with the tail of their log, and gone with whoever started them.

The processes are real; what they run is a stand-in that answers the three routes of a start. The real server is in
tests/contract/test_sglang.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.config import SglangEngineConfig
from rl_core.errors import EngineStartFailed
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.server import SglangServer
from tasks import keeper

pytestmark = pytest.mark.skipif(not keeper.PROC, reason="tells processes by /proc")

STAND_IN = '''
import argparse, http.server, json, mmap, os, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
for flag in ("--port", "--served-model-name", "--do", "--note"):
    parser.add_argument(flag)
args, _ = parser.parse_known_args()
if args.do == "serve":
    shared = open(f"/dev/shm/sglang_loads_test_{os.getpid()}.shm", "wb+")
    shared.truncate(4096)
    held = mmap.mmap(shared.fileno(), 4096)
child = subprocess.Popen(["sleep", "60"])
print("child", child.pid, flush=True)
assert os.path.isdir(os.environ["TMPDIR"])
note = pathlib.Path(args.note)
note.write_text((note.read_text() if note.exists() else "") + args.port + " ")
if args.do == "fail":
    sys.exit("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
if args.do == "leave":
    print("x" * 5000, flush=True)
    sys.exit(3)
if args.do == "hang":
    time.sleep(60)
if args.do == "taken" and len(note.read_text().split()) < 3:
    sys.exit("[Errno 98] error while attempting to bind on address: address already in use")
if args.do == "other":
    args.served_model_name = "mine"


class Answer(http.server.BaseHTTPRequestHandler):
    def say(self, payload):
        raw = json.dumps(payload).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        self.say({"data": [{"id": args.served_model_name}], "weight_version": "default"})

    def do_POST(self):
        self.say({"text": "x"})

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(args.port)), Answer).serve_forever()
'''
START_S = 20.0


@pytest.fixture
def started() -> Iterator[list[SglangServer]]:
    """Servers to end with the test."""
    servers: list[SglangServer] = []
    yield servers
    for server in servers:
        server.stop(grace_s=0.0)


def make(place: Path, do: str = "serve", **settings: object) -> SglangServer:
    place.mkdir(exist_ok=True)
    script = place / "stand_in.py"
    script.write_text(STAND_IN)
    config = SglangEngineConfig.model_validate({
        "type": "sglang", "python": sys.executable, "script": str(script), "device": "cpu", "start_s": START_S,
        "server_args": ["--do", do, "--note", str(place / "ports")], **settings})
    return SglangServer(place / "model", config=config, log=place / "logs" / "server.log")


def child_of(server: SglangServer) -> int:
    return int(server.log_tail().split("child ")[1].split()[0])


def scratch(pid: int) -> list[Path]:
    """What servers of this owner have for their sockets."""
    return sorted(Path(tempfile.gettempdir()).glob(f"headway-sglang-{pid}-*"))


def wait_gone(*pids: int, deadline_s: float = 5.0) -> list[int]:
    """Those that are still there after the deadline."""
    until = time.monotonic() + deadline_s
    while (left := [pid for pid in pids if keeper.start_time(pid) is not None]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def test_a_server_serves_until_it_is_stopped_and_leaves_nothing(tmp_path: Path, started: list[SglangServer]) -> None:
    started.append(server := make(tmp_path))
    url = server.start()
    assert (server.url, server.alive()) == (url, True)
    assert ask(url, "/model_info").fields["weight_version"] == "default"
    child = child_of(server)
    assert len(scratch(os.getpid())) == 1
    shared = Path(f"/dev/shm/sglang_loads_test_{server.pid}.shm")
    assert shared.exists()
    server.stop()
    assert scratch(os.getpid()) == [] and not shared.exists()
    assert not server.alive() and wait_gone(server.pid, child, deadline_s=0.5) == []
    server.stop()


def test_a_dead_server_is_seen_and_started_again_elsewhere(tmp_path: Path, started: list[SglangServer]) -> None:
    started.append(server := make(tmp_path))
    server.start()
    first, child = server.pid, child_of(server)
    os.kill(first, signal.SIGKILL)
    assert wait_gone(first, child, deadline_s=3.0) == []
    assert not server.alive() and "ended: signal 9" in server.log_tail()
    server.start()
    assert server.alive() and server.pid != first
    assert f"{first}" not in server.log_tail(), "the tail is that of the process that runs"
    assert len(scratch(os.getpid())) == 1


def test_how_a_server_ended_stands_in_its_log_however_soon_it_is_swept_up(tmp_path: Path,
                                                                         started: list[SglangServer]) -> None:
    """A client sees a dead server's port refuse before its warden has looked."""
    started.append(server := make(tmp_path))
    for _ in range(3):
        server.start()
        os.kill(server.pid, signal.SIGKILL)
        server.stop(grace_s=0.0)
        assert server.log_tail().endswith(f"the server (pid {server.pid}) ended: signal 9")
    server.start()
    server.stop(grace_s=0.0)
    assert server.log_tail().endswith("ended: killed by its warden")


FAILURES = {
    "out of memory": ("fail", {}, [r"^out of memory\? rollout.engine.server_args takes", "ended before it served",
                                   "Not enough memory", "exit code 1"]),
    "leaves": ("leave", {}, [r"^server of SGLang \(pid \d+\): ended before it served", "x" * 300 + "\n",
                             "exit code 3"]),
    "hangs": ("hang", {"start_s": 1.5}, ["did not serve in 1.5 s; raise rollout.engine.start_s", "child "]),
    "another server answers": ("other", {"start_s": 1.5}, ["did not serve in 1.5 s"]),
    "no interpreter": ("serve", {"python": "no-such-python"}, [r"^rollout.engine.python: .*no-such-python",
                                                               "make sglang"]),
    "no script": ("serve", {"script": "no/such.py"}, [r"^rollout.engine.script: there is no such file .*no/such.py"]),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_server_that_does_not_come_is_named_with_the_tail_of_its_log(case: str, tmp_path: Path,
                                                                      started: list[SglangServer]) -> None:
    do, settings, said = FAILURES[case]
    started.append(server := make(tmp_path, do, **settings))
    with pytest.raises(EngineStartFailed) as raised:
        server.start()
    for words in said:
        assert re.search(words, str(raised.value)), words
    assert len(str(raised.value)) < 2000
    assert not server.alive()
    if server.pid:
        assert wait_gone(server.pid, child_of(server)) == []


def test_a_port_that_somebody_took_meanwhile_costs_another_try(tmp_path: Path, started: list[SglangServer]) -> None:
    started.append(server := make(tmp_path, "taken"))
    server.start()
    ports = (tmp_path / "ports").read_text().split()
    assert len(ports) == 3 and server.url.endswith(ports[-1])


OWNER = """
import sys, time
from pathlib import Path
from tests.unit.test_sglang_server import make
server = make(Path(sys.argv[1]), sys.argv[2])
if sys.argv[2] == "serve":
    server.start()
    print(server.pid, flush=True)
    time.sleep(60)
server.start()
"""


@pytest.mark.parametrize("do", ["serve", "hang"])
def test_a_server_ends_with_its_owner_however_that_went(do: str, tmp_path: Path, started: list[SglangServer]) -> None:
    """SIGKILL of the owner, while the server runs, and while it starts."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), do], stdout=subprocess.PIPE, text=True,
                          cwd=Path(__file__).parents[2]) as owner:
        assert owner.stdout is not None
        log = tmp_path / "logs" / "server.log"
        if do == "serve":
            owner.stdout.readline()
        until = time.monotonic() + START_S
        while not (log.exists() and "child " in log.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        live = keeper.processes()
        [warden] = [pid for pid, known in live.items() if known.parent == owner.pid]
        family = [pid for pid, known in live.items() if known.group == warden]
        assert len(family) == 3
        owner.kill()
        owner.wait()
        assert wait_gone(*family, deadline_s=3.0) == []
    assert len(scratch(owner.pid)) == 1, "nobody was left to remove it"
    started.append(make(tmp_path / "next"))
    started[0].start()
    assert scratch(owner.pid) == []


def test_a_server_ends_with_its_warden(tmp_path: Path, started: list[SglangServer]) -> None:
    started.append(server := make(tmp_path))
    server.start()
    known = keeper.stat(server.pid)
    assert known is not None
    os.kill(known.parent, signal.SIGKILL)
    assert wait_gone(server.pid) == [] and not server.alive()
    server.stop()
    assert wait_gone(child_of(server)) == []
