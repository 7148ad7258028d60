"""A run that fails in the middle, at a step whose data is known: shards of a claim without a record get a flipped byte.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.experience.ledger import claimed_steps, read_claim
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir


@dataclass
class Spoiled:
    """Shards of the claims that had no record, with a flipped byte, until `mend` puts it back."""

    run: RunDir
    shards: dict[Path, bytes] = field(default_factory=dict[Path, bytes])

    def spoil(self) -> None:
        until = time.monotonic() + 60
        while not self.run.result.exists() and time.monotonic() < until:
            step = claimed_steps(self.run)[-1]
            for group in () if self.run.record(step).exists() else read_claim(self.run, step).groups:
                path = self.run.shard(group.stream, group.seq)
                if path not in self.shards:
                    self.shards[path] = path.read_bytes()
                    raw = bytearray(self.shards[path])
                    raw[len(raw) // 2] ^= 1
                    path.write_bytes(raw)

    def mend(self) -> None:
        for path, raw in self.shards.items():
            path.write_bytes(raw)


def written(run: RunDir) -> dict[int, tuple[int, int]]:
    """Recorded step -> (when its record was written, by which attempt)."""
    return {step: (run.record(step).stat().st_mtime_ns, read_record(run, step).attempt) for step in recorded_steps(run)}
