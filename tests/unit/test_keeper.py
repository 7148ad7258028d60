"""Processes as `ps` tells of them, for systems without /proc: the same as /proc says, but for the unit of the start."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tasks import keeper


@pytest.mark.skipif(not keeper.PROC, reason="compared with /proc")
def test_ps_says_what_proc_says() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        by_proc, by_ps = keeper.stat(child.pid), keeper.ps("-p", str(child.pid))[child.pid]
        assert by_proc is not None
        assert by_ps[1:4] == by_proc[1:4] == (os.getpid(), child.pid, child.pid)
        assert by_ps.alive and abs(by_ps.started - time.time()) < 5
        boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
        assert abs(by_ps.started - (boot + by_proc.started / os.sysconf("SC_CLK_TCK"))) < 2
        assert {os.getpid(), child.pid} <= set(keeper.ps("-A"))
    finally:
        child.kill()
    assert child.wait() < 0
    assert keeper.ps("-p", str(child.pid)) == {}


def test_without_proc_it_is_ps_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "PROC", False)
    known = keeper.Stat("S", 1, 7, 7, 1000)
    monkeypatch.setattr(keeper, "ps", lambda *which: {7: known, 8: known._replace(state="Z")})
    assert (keeper.stat(7), keeper.stat(9)) == (known, None)
    assert keeper.processes() == {7: known}
    assert keeper.is_alive(7, 1000) and not keeper.is_alive(7, 1001) and not keeper.is_alive(8, 1000)
    assert keeper.session_members(7, 1000) == [(7, 1000)]
