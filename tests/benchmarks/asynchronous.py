"""Asynchronous against synchronous training, whole runs of the preset `longtail-cpu` (docs/speed.md 3).

Runs of the same seed and the same number of steps, each by the real command: asynchronous (bound 2) and
synchronous (bound 0) with one core a side, and synchronous with both cores in each phase, in two ways: two threads on
both sides, and two rollout workers of one thread beside a learner of two threads. The faster of these two is what the
machine can do synchronously, and the honest comparison.

Samples per second count from record to record, between a step where all caches are warm and a step that is still
generated for while it trains; starting and ending are not in it.

The ideal (g + t) / max(g, t) is of the synchronous run: g from the first lease of a claim to its last finished answer,
t from reading the claim to the last update, medians over steps. It assumes that generation costs the same when it is
not drained at the end of every step; where it costs less, the measured ratio can be above it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.experience.ledger import read_claim
from rl_core.experience.reader import open_claim
from rl_core.records import read_record
from rl_core.run_dir import RunDir
from tests.benchmarks.measure import figure
from tests.runs import Home

ROUNDS = 2
STEPS = 30
FROM, TO = 5, STEPS - 4
"""Steps whose records the rate is taken between."""
COMMON = (f"total_steps={STEPS}", "data.validation=null", f"checkpoint.every={STEPS}", "learner.lr=1e-6")
"""A learning rate that changes little: as a model learns its answers become longer or shorter, and then two runs do not
do the same work."""
VARIANTS = {
    "asynchronous": ("staleness.bound=2",),
    "synchronous": ("staleness.bound=0",),
    "synchronous_2_threads": ("staleness.bound=0", "learner.threads=2", "rollout.engine.threads=2"),
    "synchronous_2_workers": ("staleness.bound=0", "learner.threads=2", "rollout.workers=2"),
}
BOTH_CORES = ("synchronous_2_threads", "synchronous_2_workers")
RUN_S = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run. Rates per wall second, times in seconds a step (median)."""

    samples: float
    tokens: float
    step_s: float
    generation_s: float
    """From the first lease of a claim to its last answer: in an asynchronous run they lie over several steps."""
    training_s: float
    length: float
    """Mean answer, tokens."""
    age: float
    """Mean staleness, publications."""


def figures() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        home = Home(Path(name))
        runs = measured(home)
    ours, other = runs["asynchronous"], runs["synchronous"]
    faster = max(BOTH_CORES, key=lambda variant: runs[variant].samples)
    both = runs[faster]
    g, t = other.generation_s, other.training_s
    yield figure("asynchronous/samples_vs_synchronous", ours.samples / other.samples, "x", ">= 1.5",
                 ideal=round((g + t) / max(g, t), 3), tokens_ratio=round(ours.tokens / other.tokens, 3),
                 staleness=round(ours.age, 2))
    yield figure("asynchronous/samples_vs_synchronous_on_both_cores", ours.samples / both.samples, "x", faster=faster,
                 tokens_ratio=round(ours.tokens / both.tokens, 3))
    for variant, run in runs.items():
        yield figure(f"asynchronous/{variant}/samples_per_s", run.samples, "answers/s", step_s=round(run.step_s, 3),
                     generation_s=round(run.generation_s, 3), training_s=round(run.training_s, 3),
                     mean_length=round(run.length, 1))


def measured(home: Home) -> dict[str, Measured]:
    """Every variant, ROUNDS times in turn; the fastest run of each, since a run that keeps both cores busy loses to
    everything else that the machine does, and one that leaves a core idle does not."""
    rounds = [{variant: measure(train(home, f"{variant}-{i}", settings)) for variant, settings in VARIANTS.items()}
              for i in range(ROUNDS)]
    return {variant: max((runs[variant] for runs in rounds), key=lambda run: run.samples) for variant in VARIANTS}


def train(home: Home, key: str, settings: tuple[str, ...], preset: str = "longtail-cpu") -> RunDir:
    """A whole run, to its end."""
    sets = [word for setting in (*COMMON, *settings) for word in ("--set", setting)]
    command = home.start("train", "--preset", preset, *sets, "--run-key", key, "--json", key=key)
    code = command.wait(RUN_S)
    assert code == 0, command.said
    return command.run


def measure(run: RunDir, first: int = FROM, last: int = TO) -> Measured:
    """What the records and shards of a run say about the steps between two of them."""
    records = [read_record(run, step) for step in range(first, last + 1)]
    claims = [read_claim(run, step) for step in range(first + 1, last + 1)]
    elapsed = (records[-1].ts_us - records[0].ts_us) / 1e6
    generation: list[float] = []
    answers = tokens = 0
    for claim in claims:
        batches, shard_G, row_G = open_claim(run, claim)
        facts = [batch.select(["dispatched_at", "finished_at", "n_responses"]).to_pylist() for batch in batches]
        rows = [facts[shard][row] for shard, row in zip(shard_G, row_G, strict=True)]
        begun, ended = (extreme(row[column].timestamp() for row in rows)
                        for extreme, column in ((min, "dispatched_at"), (max, "finished_at")))
        generation.append(ended - begun)
        answers += sum(row["n_responses"] for row in rows)
    lengths = [record.metrics["rollout/length_mean"] for record in records[1:]]
    tokens = answers * float(np.mean(lengths))
    return Measured(
        samples=answers / elapsed, tokens=tokens / elapsed, step_s=elapsed / len(claims),
        generation_s=statistics.median(generation),
        training_s=statistics.median(sum(record.seconds[part] for part in ("read", "build", "update"))
                                     for record in records[1:]),
        length=float(np.mean(lengths)), age=float(np.mean([r.metrics["staleness/mean"] for r in records[1:]])))
