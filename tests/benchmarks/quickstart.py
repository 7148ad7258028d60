"""The quickstart as a newcomer runs it: a fresh HEADWAY_HOME, the real command, seeds 1, 2 and 3.

Memory is the peak over the run of the sum of PSS over all processes that were told of this home: command, Prefect
server, Ray, actors, watchdogs. The gap between steps comes from the records of the same runs: from the last update of
one step to the first forward of the next, where a full batch was waiting (its claim is older than the step before's
record), with rollouts running.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.experience.ledger import read_claim
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, read_json
from tests.benchmarks.measure import figure
from tests.runs import Home, processes_of

SEEDS = (1, 2, 3)
SAMPLE_S = 4.0
"""Reading a process's PSS holds up its page faults for milliseconds: enough for a plateau, too seldom to be timed."""
FIRST_LINES = 5
STEADY_FROM = 10
"""Steps before this one warm caches up and are left out of the gaps."""


def figures() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        yield figure("console/first_line", _first_line(Home(Path(name))), "s", "<= 1.5")
        gaps: list[float] = []
        for seed in SEEDS:
            home = Home(Path(name) / f"seed-{seed}")
            home.path.mkdir()
            yield from _run(home, seed, gaps)
        median, late = statistics.median(gaps), statistics.quantiles(gaps, n=20)[-1]
        yield figure("orchestration/gap_p50", 1e3 * median, "ms", "<= 40", steps=len(gaps))
        yield figure("orchestration/gap_p95", 1e3 * late, "ms", "<= 80", steps=len(gaps))


def _run(home: Home, seed: int, gaps: list[float]) -> Iterator[dict[str, Any]]:
    begun = time.monotonic()
    command = home.train("bench", f"seed={seed}")
    peak = Peak(home)
    code = command.wait(600)
    wall = time.monotonic() - begun
    peak.stop()
    assert code == 0, command.said
    stages = dict(read_json(command.run.status)["stages"])
    outside = wall - stages["training"] - stages["model"]
    gaps += waiting_gaps(command.run)
    summary = command.json
    yield figure(f"quickstart/seed-{seed}/wall", wall, "s", "<= 180")
    yield figure(f"quickstart/seed-{seed}/outside_warmup_and_training", outside, "s", "<= 30")
    yield figure(f"quickstart/seed-{seed}/peak_pss", peak.bytes / 1e9, "GB", "<= 3")
    yield figure(f"quickstart/seed-{seed}/accuracy_start", summary["accuracy_start"], "share", "<= 0.45")
    yield figure(f"quickstart/seed-{seed}/accuracy_end", summary["accuracy_end"], "share", ">= 0.80")


def _first_line(home: Home) -> float:
    """Median seconds from the start of the command to its first line; it is ended while it plans."""
    taken: list[float] = []
    for _ in range(FIRST_LINES):
        begun = time.monotonic()
        command = home.train("first-line")
        assert command.process.stdout is not None and command.process.stdout.readline().startswith("headway ")
        taken.append(time.monotonic() - begun)
        command.process.kill()
        command.process.communicate()
    return statistics.median(taken)


def waiting_gaps(run: RunDir) -> list[float]:
    """Seconds from update to forward of the steps whose claim was there before the step before had ended."""
    gaps: list[float] = []
    for step in recorded_steps(run)[STEADY_FROM:]:
        if read_claim(run, step).ts_us <= read_record(run, step - 1).ts_us:
            gaps.append(read_record(run, step).seconds["since_update"])
    assert len(gaps) >= 50, f"only {len(gaps)} steps had a full batch waiting"
    return gaps


class Peak:
    """Samples the sum of PSS over the home's processes on a thread."""

    def __init__(self, home: Home) -> None:
        self.bytes = 0
        self._home, self._over = home, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, sum(_pss(pid) for pid in processes_of(self._home)))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def _pss(pid: int) -> int:
    """Bytes; 0 for a process that ended meanwhile."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
