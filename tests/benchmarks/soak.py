"""`make soak`: a long run of the preset `tiny-cpu` that learns nothing, watched for what grows.

HEADWAY_SOAK_STEPS steps (2,000 unless set) at a learning rate that changes no weight, with `retention.replay=window`.
The first tenth of the steps warms everything up, the second tenth is what the last tenth is compared with:

* resident memory of each process: median of the last tenth against that of the second one
* bytes that retention bounds (shards, checkpoints, weights): the largest of the last tenth against the largest of the
  second one
* all other bytes of the run directory (claims, records ...): they grow with the steps, by so much for each
* processor seconds of all processes per trained token: last tenth against the second one

Not part of `make bench`: 2,000 steps take five minutes on two cores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir
from tests.benchmarks.measure import figure
from tests.runs import Command, Home, processes_of

STEPS = int(os.environ.get("HEADWAY_SOAK_STEPS", "2000"))
WARM, COMPARED = STEPS // 10, STEPS // 5
LAST = STEPS - STEPS // 10
SETTINGS = (f"total_steps={STEPS}", "learner.lr=1e-30", "learner.decay=constant", "learner.warmup_steps=0",
            "retention.replay=window", f"checkpoint.every={max(1, STEPS // 40)}", "checkpoint.best=null",
            f"validation.every={max(1, STEPS // 10)}")
EVERY_S = 1.0
REST_EVERY = 5
"""Looks between two at all of the run directory: there are several files for each step."""
REST_BYTES = 8192
"""Claim, record, observation and version of a step, and its share of validations and logs."""
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
NAMES = {"raylet/raylet": "raylet", "gcs_server": "gcs", "prefect": "prefect", "keeper.py": "keeper",
         "flows.cli": "owner", "ray": "ray"}


@dataclass(slots=True)
class Watched:
    """What was seen at each look, by the number of recorded steps."""

    memory: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Process -> (steps, resident bytes)."""
    kept: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(steps, bytes of shards, checkpoints and weights)."""
    rest: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(steps, all other bytes of the run directory), now and then."""
    cpu: list[tuple[int, dict[str, float]]] = field(default_factory=list[tuple[int, dict[str, float]]])
    """(steps, processor seconds of each process until then)."""
    spent: dict[str, float] = field(default_factory=dict[str, float])
    """Processor seconds by process, also of those that have ended."""

    def look(self, home: Home, run: RunDir) -> None:
        steps = len(recorded_steps(run))
        for pid, command in processes_of(home).items():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                name = name_of(pid, command, run)
            except OSError:
                continue
            self.spent[f"{name} ({pid})"] = (int(fields[11]) + int(fields[12])) / TICKS
            self.memory[f"{name} ({pid})"].append((steps, int(fields[21]) * PAGE))
        self.cpu.append((steps, dict(self.spent)))
        kept = (run.streams, run.checkpoints, run.weights_root)
        self.kept.append((steps, sum(map(bytes_in, kept))))
        if steps and len(self.kept) % REST_EVERY == 0:
            self.rest.append((steps, sum(bytes_in(path) for path in run.root.iterdir() if path not in kept)))


def bytes_in(path: Path) -> int:
    """Of a file, or of the files below a directory; what is removed meanwhile counts 0."""
    files = [path] if path.is_file() else [Path(root) / name for root, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def name_of(pid: int, command: str, run: RunDir) -> str:
    """An actor by its log, another process by its command."""
    log = Path(os.readlink(f"/proc/{pid}/fd/1"))
    if log.parent == run.logs:
        return log.stem
    return next((name for part, name in NAMES.items() if part in command), command.split()[0] if command else "?")


def within(seen: list[tuple[int, Any]], first: int, last: int) -> list[Any]:
    """Looks of these steps, without the end of the run: its figures and its goodbye are no part of a step."""
    return [value for steps, value in seen if first <= steps <= min(last, STEPS - 1)]


def watch(home: Home) -> tuple[Command, Watched]:
    command, watched = home.train("soak", *SETTINGS), Watched()
    try:
        while command.process.poll() is None:
            watched.look(home, command.run)
            time.sleep(EVERY_S)
        assert command.wait() == 0, command.said
    finally:
        command.process.terminate()  # nothing where it has ended
        command.process.wait()
    return command, watched


def soak() -> Iterator[dict[str, Any]]:
    """One run, its figures."""
    with tempfile.TemporaryDirectory(prefix="headway-soak-") as name:
        home, begun = Home(Path(name)), time.monotonic()
        command, seen = watch(home)
        run = command.run
        yield figure("soak/steps", STEPS, "steps", seconds=round(time.monotonic() - begun))
        for process, looks in seen.memory.items():
            warm, end = within(looks, WARM, COMPARED), within(looks, LAST, STEPS)
            if warm and end:
                grown = 100 * (statistics.median(end) / statistics.median(warm) - 1)
                yield figure(f"soak/memory_growth {process}", grown, "%", "<= 5",
                             megabytes=[round(statistics.median(some) / 2**20, 1) for some in (warm, end)])
        before, after = (max(within(seen.kept, *span)) for span in ((WARM, COMPARED), (LAST, STEPS)))
        yield figure("soak/kept_bytes", after / before, "x", "<= 1.25",
                     megabytes=[round(some / 2**20, 2) for some in (before, after)])
        (first, few), *_, (last, many) = [look for look in seen.rest if WARM <= look[0] < STEPS]
        yield figure("soak/other_bytes_per_step", (many - few) / (last - first), "bytes", f"<= {REST_BYTES}")
        early, late = cost(run, seen, WARM, COMPARED), cost(run, seen, LAST, STEPS)
        sums = [sum(of.values()) for of in (early, late)]
        yield figure("soak/cpu_per_token_change", abs(100 * (sums[1] / sums[0] - 1)), "%", "<= 10",
                     microseconds=[round(1e6 * each, 1) for each in sums],
                     by_process={name: [round(1e6 * of.get(name, 0.0), 1) for of in (early, late)]
                                 for name in late if 1e6 * max(early.get(name, 0.0), late[name]) >= 1})


def cost(run: RunDir, seen: Watched, first: int, last: int) -> dict[str, float]:
    """Processor seconds of each process per token in the loss, between two looks in this span of steps."""
    looks = within([(steps, (steps, spent)) for steps, spent in seen.cpu], first, last)
    (begin, before), (end, after) = looks[0], looks[-1]
    tokens = sum(read_record(run, step).metrics["train/loss_tokens"] for step in range(begin, end))
    return {name: (spent - before.get(name, 0.0)) / tokens for name, spent in after.items()}


if __name__ == "__main__":
    lines = list(soak())
    print(*map(json.dumps, lines), sep="\n")
    sys.exit(any(line["ok"] is False for line in lines))
