"""Replay of 50 steps of a short real run, against what the learner was busy with the same steps (replay.md 3).

The run is tiny-cpu by the real command: 60 steps, of which 5 to 54 are replayed, over one fold from the initial model.
The learner's busy time is that of its interval ledger, as the records have it: its share of the
time since the record before. A rollout worker kept the other core busy then, and nothing does now.

Replay is timed as `headway replay` reports it: from the run directory to the last comparison, loading the model and
folding the steps before the first one included; importing torch is not. The whole command is shown beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl_core.records import read_record
from rl_core.run_dir import RunDir
from tests.benchmarks.measure import figure
from tests.runs import Home

TOTAL, FIRST, BEHIND = 60, 5, 55
RUN_S = 300


def figures() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        home = Home(Path(name))
        command = home.train("replayed", f"total_steps={TOTAL}", "data.validation=null", f"checkpoint.every={TOTAL}")
        code = command.wait(RUN_S)
        assert code == 0, command.said
        begun = time.monotonic()
        replayed = home.call("replay", "replayed", "--steps", f"{FIRST}:{BEHIND}", "--json")
        whole = time.monotonic() - begun
        assert replayed.process.returncode == 0, replayed.said
        busy = busy_s(command.run, FIRST, BEHIND)
    found = replayed.json
    assert found["identical"] == BEHIND - FIRST, found
    spent = found["seconds"]["replay"]
    yield figure("replay/50_steps_vs_learner_busy", spent / busy, "x", "<= 1.1", replay_s=round(spent, 3),
                 busy_s=round(busy, 3), steps_alone_s=round(sum(step["seconds"] for step in found["steps"]), 3))
    yield figure("replay/whole_command", whole, "s", steps=BEHIND - FIRST)


def busy_s(run: RunDir, first: int, behind: int) -> float:
    """Seconds that the learner was busy between the record of step first - 1 and that of step behind - 1."""
    records = [read_record(run, step) for step in range(first - 1, behind)]
    return sum(record.metrics["utilization/learner_busy"] * (record.ts_us - before.ts_us) / 1e6
               for before, record in pairwise(records))
