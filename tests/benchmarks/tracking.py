"""What tracking costs a run: one step with every scalar that there can be, into MLflow's database on sqlite.

`ms_per_step`: from the commit of a step until MLflow has it, each step by itself, as where a step takes longer than a
pass of the tracker; `cpu_ms_per_step` is the processor time of it. `batched_ms_per_step`: processor time where steps
are shorter, and go together.
`owner_ms_per_step`: what the owner waits, which is all that is on a step's path. `owner_hung_ms_per_step`: the same
while the tracking server takes connections and never answers.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.metrics import MAX_PARTS, MAX_SCALARS, MAX_SOURCES, names, part_metrics, tracked_names
from rl_core.records import put_record
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.types import StepRecord
from tasks.destination import Destination, destination
from tasks.tracking import Tracker
from tests.benchmarks.measure import figure, timed

STEPS = 100
DEADLINE_S = 120.0
CONFIG = Config.model_validate({"isolated": True, "data": {"validation": None}})


class Hangs(BaseHTTPRequestHandler):
    """Takes the request and never answers."""

    released = threading.Event()

    def do_GET(self) -> None:
        self.released.wait(60)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def figures() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        home = Path(name)
        where = destination(CONFIG, home, {})
        single, processor, owner = one_by_one(RunDir(home / "single"), where)
        yield figure("tracking.ms_per_step", 1000 * single, "ms", "<= 30", scalars=scalars(), steps=STEPS)
        yield figure("tracking.cpu_ms_per_step", 1000 * processor, "ms CPU", "<= 30", scalars=scalars(), steps=STEPS)
        yield figure("tracking.owner_ms_per_step", 1000 * owner, "ms", "<= 2", scalars=scalars(), steps=STEPS)
        together = all_together(RunDir(home / "together"), where)
        yield figure("tracking.batched_ms_per_step", 1000 * together, "ms CPU", "<= 30", steps=STEPS)
        hung = while_it_hangs(RunDir(home / "hung"))
        yield figure("tracking.owner_hung_ms_per_step", 1000 * hung, "ms", "<= 2", steps=STEPS)


def scalars() -> int:
    """Of one step, validation included: all that are tracked, with as many reward parts and data sources as can be."""
    found = sum(len(tracked_names(writer)) for writer in ("learner", "owner", "validator")) + MAX_PARTS + MAX_SOURCES
    assert found <= MAX_SCALARS
    return found


def commit(run: RunDir, step: int) -> None:
    """What the learner and the validator leave of a step; not the owner's work."""
    parts = part_metrics({f"part {n}": step / (n + 1) for n in range(MAX_PARTS)})
    ts_us = time.time_ns() // 1000
    put_record(run, StepRecord(
        step=step, idx=step, attempt=1, claim_digest="c", weights_digest="w", env={}, published=None, revision=0,
        metrics={name: step + i / 7 for i, name in enumerate(names("learner"))} | parts, seconds={}, ts_us=ts_us))
    measured = {name.partition("/")[2]: step / 3 for name in names("validator")}
    by_source = {f"source-{n}": {"greedy_accuracy": step / (n + 2)} for n in range(MAX_SOURCES)}
    put_if_absent(run.validation(step), to_json({"step": step, "v": step, "ts_us": ts_us, "by_source": by_source,
                                                 **measured}))


def observe(tracker: Tracker, step: int) -> None:
    """All that the owner's thread does for tracking when a step has ended."""
    tracker.observe(step, {name: step / (i + 1) for i, name in enumerate(names("owner"))})
    tracker.wake()


def one_by_one(run: RunDir, where: Destination) -> tuple[float, float, float]:
    """Median seconds of a step until MLflow has it, processor seconds of the process meanwhile, seconds of the owner.
    """
    tracker = Tracker(run, CONFIG, where, run_uuid="single", run_key="single")
    tracker.start()
    assert tracker.flush(DEADLINE_S)  # MLflow is imported, its database is made
    whole: list[float] = []
    processor: list[float] = []
    owner: list[float] = []
    for step in range(STEPS):
        commit(run, step)
        begun, spent = time.perf_counter(), time.process_time()
        owner.append(timed(lambda step=step: observe(tracker, step)))
        assert tracker.flush(DEADLINE_S)
        whole.append(time.perf_counter() - begun)
        processor.append(time.process_time() - spent)
    assert tracker.finish("FINISHED", DEADLINE_S)
    return statistics.median(whole), statistics.median(processor), statistics.median(owner)


def all_together(run: RunDir, where: Destination) -> float:
    """Processor seconds of this process for each step, where all steps wait and go as fast as they can."""
    for step in range(STEPS):
        commit(run, step)
    tracker = Tracker(run, CONFIG, where, run_uuid="together", run_key="together")
    for step in range(STEPS):
        observe(tracker, step)
    begun = time.process_time()
    tracker.start()
    assert tracker.flush(DEADLINE_S)
    taken = time.process_time() - begun
    assert tracker.finish("FINISHED", DEADLINE_S)
    return taken / STEPS


def while_it_hangs(run: RunDir) -> float:
    """Median seconds of the owner, while the tracker waits for an answer."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = Destination(uri=f"http://127.0.0.1:{server.server_port}", artifacts=None, why="benchmark")
    tracker = Tracker(run, CONFIG, where, run_uuid="hung", run_key="hung", report=lambda text: None)
    tracker.start()
    try:
        taken: list[float] = []
        for step in range(STEPS):
            commit(run, step)
            taken.append(timed(lambda step=step: observe(tracker, step)))
        return statistics.median(taken)
    finally:
        Hangs.released.set()
        server.shutdown()
        server.server_close()
