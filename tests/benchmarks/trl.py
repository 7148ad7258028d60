"""Samples per second of Headway against TRL 1.16, on the same model, task, batch and two cores (docs/speed.md 4).

16 prompts x 8 answers a step, one update a step, learning rate 1e-6, so that answers stay as long as they are. Two
kinds of work: `short` is the preset `tiny-cpu` (answers of 4 to 7 tokens), `long` the preset `longtail-cpu` (up to 256,
a mean of 40). Headway by its command, asynchronous with bound 2, one core a side; TRL by `GRPOTrainer.train` with two
threads, with the micro-batch that suits it best (tests/peer/trl_train.py). In turn, ROUNDS times; of each the fastest.
Samples count from step to step in the middle of a run; starting and ending are not in it.

*ideal*: g and t are seconds of one core for a step's generation and training by Headway's own engine and learner, alone
in this process. No overlap of the two on a core each makes more than 128 / max(g, t) samples a second, and no two cores
make more than 2 x 128 / (g + t). Both are given over TRL's rate; `share` is what is reached of the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_core.config import Config
from rl_core.learner import batch as stages
from rl_core.learner.optimizer import make_optimizer
from rl_core.learner.plan import StepPlan
from rl_core.learner.policy import load_policy
from rl_core.learner.ranks import Ranks
from rl_core.learner.step import training_step
from rl_core.rollout.environments.sort import sort_rows
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.run_dir import RunDir
from rl_core.run_identity import read_identity
from rl_core.tokenizer import character_tokenizer, encode_chat
from rl_core.types import Completion, GenerateRequest, Sampling, TrajectoryGroup
from tests.benchmarks import asynchronous
from tests.benchmarks.measure import figure, timed
from tests.builders import make_group
from tests.learning import all_by, rows_of
from tests.runs import Home

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SCRIPT = ROOT / "tests" / "peer" / "trl_train.py"
ROUNDS = 2
SCALE = float(os.environ.get("HEADWAY_TRL_SCALE", "1"))
"""Of the numbers of steps: less than 1 tries whether everything runs, and measures nothing."""
GROUPS, GROUP_SIZE = 16, 8
BATCH = GROUPS * GROUP_SIZE
LR = 1e-6
UNGENERATED = 4
"""Steps at the end of a run, while nothing is generated any more."""
MOST_APART = 0.15
"""By how much mean lengths may differ: else the two did not do the same work, and there is no figure."""
RUN_S = 900
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kind of work: how both sides are told of it, and for how long it is measured."""

    preset: str
    pattern: str | None
    """What of an answer is scored; None = all of it."""
    max_new_tokens: int
    bar: str
    aim: float
    warm: int
    """Steps of Headway before those that are measured."""
    headway_steps: int
    trl_steps: int
    micro_batches: tuple[int, ...]
    """Of TRL, answers: the best is taken."""
    batches: int
    """Steps' worth of answers that g is measured on."""


WORKS = {
    "short": Work(preset="tiny-cpu", pattern=None, max_new_tokens=8, bar=">= 1.5", aim=2.0, warm=15,
                  headway_steps=80, trl_steps=40, micro_batches=(128, 64), batches=12),
    "long": Work(preset="longtail-cpu", pattern=r"^\d+", max_new_tokens=256, bar=">= 3", aim=4.0, warm=6,
                 headway_steps=20, trl_steps=6, micro_batches=(64, 16), batches=4),
}


def figures() -> Iterator[dict[str, Any]]:
    if not PYTHON.exists():
        for name, work in WORKS.items():
            yield figure(f"trl/{name}/samples_vs_trl", None, "x", work.bar,
                         reason="no environment with TRL: `make bench BENCH=trl` makes it")
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as place:
        for name, work in WORKS.items():
            yield from compare(name, work, Home(Path(place)))


def compare(name: str, work: Work, home: Home) -> Iterator[dict[str, Any]]:
    """Both sides in turn, and what bounds the ratio."""
    ours: list[asynchronous.Measured] = []
    theirs: list[dict[str, Any]] = []
    run = RunDir(home.path)
    for i in range(ROUNDS):
        run, found = headway(home, f"{name}-{i}", work)
        ours.append(found)
        theirs.append(trl(home.path / f"{name}-{i}", run, work, [one["micro_batch"] for one in theirs]))
    mine, peer = max(ours, key=lambda one: one.samples), max(theirs, key=lambda one: one["samples"])
    g, t = parts(run, work)
    apart = mine.length / peer["length"]
    same_work = abs(apart - 1) <= MOST_APART
    ratio, ideal = mine.samples / peer["samples"], BATCH / max(g, t) / peer["samples"]
    yield figure(f"trl/{name}/samples_vs_trl", ratio if same_work else None, "x", work.bar, aim=work.aim,
                 ideal=round(ideal, 2), share=round(ratio / ideal, 3),
                 ideal_of_two_cores=round(2 * BATCH / (g + t) / peer["samples"], 2), length_ratio=round(apart, 3),
                 **({} if same_work else {"reason": f"answers differ in length by more than {MOST_APART:.0%}"}))
    yield figure(f"trl/{name}/headway/samples_per_s", mine.samples, "answers/s", step_s=round(mine.step_s, 4),
                 training_s=round(mine.training_s, 4), g_s=round(g, 4), t_s=round(t, 4),
                 mean_length=round(mine.length, 2), staleness=round(mine.age, 2),
                 rounds=[round(one.samples) for one in ours])
    yield figure(f"trl/{name}/trl/samples_per_s", peer["samples"], "answers/s", step_s=round(peer["step_s"], 4),
                 generation_s=round(peer["generation_s"], 4), training_s=round(peer["training_s"], 4),
                 mean_length=round(peer["length"], 2), micro_batch=peer["micro_batch"], threads=peer["threads"],
                 tried={size: round(rate, 1) for size, rate in theirs[0]["tried"].items()},
                 rounds=[round(one["samples"]) for one in theirs], version=peer["version"])


# -- the two sides


def headway(home: Home, key: str, work: Work) -> tuple[RunDir, asynchronous.Measured]:
    """A whole run by the command, and what its records say."""
    last = work.warm + max(2, round(work.headway_steps * SCALE))
    steps = last + UNGENERATED
    run = asynchronous.train(home, key, (
        f"total_steps={steps}", f"checkpoint.every={steps}", f"learner.lr={LR}", "staleness.bound=2",
        f"learner.minibatch_groups={GROUPS}"), work.preset)
    return run, asynchronous.measure(run, work.warm, last)


def trl(place: Path, run: RunDir, work: Work, best: list[int]) -> dict[str, Any]:
    """A run of TRL on the model that Headway's run began with. `best`: micro-batches that were found best before."""
    place.mkdir()
    job = {"model": str(run.model), "rows": sort_rows(4096, 1), "pattern": work.pattern, "groups": GROUPS,
           "group_size": GROUP_SIZE, "max_new_tokens": work.max_new_tokens, "lr": LR, "seed": 1, "threads": 2,
           "micro_batches": best[-1:] or work.micro_batches, "warm": 2, "steps": max(2, round(work.trl_steps * SCALE))}
    (place / "job.json").write_text(json.dumps(job))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMP_"))}
    done = subprocess.run([str(PYTHON), str(SCRIPT), str(place / "job.json"), str(place / "result.json")],
                          env=environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}, capture_output=True, text=True,
                          timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((place / "result.json").read_text())


# -- what bounds it: engine and learner by themselves, one core each


def parts(run: RunDir, work: Work) -> tuple[float, float]:
    """(g, t): processor seconds of one step's answers, and of one training step on such answers; one thread."""
    config = read_identity(run).config
    answers, g = generated(run.model, config, work)
    groups = [group_of(i, answers[i * GROUP_SIZE:(i + 1) * GROUP_SIZE]) for i in range(GROUPS)]
    return g, trained(run.model, config, groups)


def generated(model: Path, config: Config, work: Work) -> tuple[list[tuple[list[int], Completion]], float]:
    """Prompts with their answers, several steps of them one behind the other as a run asks for them, and the processor
    seconds of one step."""
    tokenizer = character_tokenizer()
    rows = sort_rows(GROUPS * work.batches, 2)
    prompts = [encode_chat(tokenizer, row["prompt"]) for row in rows for _ in range(GROUP_SIZE)]
    engine = TorchEngine(model, slots=config.rollout.engine.slots)
    requests = [GenerateRequest(request_id=str(i), token_ids_P=np.array(prompt, np.int32), seed=i,
                                sampling=Sampling(max_new_tokens=work.max_new_tokens))
                for i, prompt in enumerate(prompts)]
    made: list[Completion] = []

    def answer() -> None:
        made.extend(future.result(600) for future in [engine.submit(request) for request in requests])

    seconds = timed(answer, time.process_time)
    engine.close()
    return list(zip(prompts, made, strict=True)), seconds / work.batches


def group_of(i: int, answers: list[tuple[list[int], Completion]]) -> TrajectoryGroup:
    """The group that these answers of one prompt make; rewards in turn, since it is their cost that counts."""
    prompt = answers[0][0]
    group = all_by(0, make_group(i, n=len(answers), lengths=[len(answer.token_ids_L) for _, answer in answers],
                                 prompt_length=len(prompt)))
    lease = replace(group.lease, prompt=replace(group.lease.prompt, token_ids_P=np.array(prompt, np.int32)))
    return replace(group, lease=lease, trajectories=tuple(
        replace(t, token_ids_L=answer.token_ids_L, behavior_logprobs_L=answer.logprobs_L)
        for t, (_, answer) in zip(group.trajectories, answers, strict=True)))


def trained(model: Path, config: Config, groups: list[TrajectoryGroup]) -> float:
    """Median processor seconds of the learner's step on one claim, from its rows to the updated weights."""
    learner = config.learner
    policy = load_policy(model, logits_chunk=learner.logits_chunk, dtype=torch.float32, device=CPU)
    optimizer = make_optimizer(policy, learner)
    ranks = Ranks(rank=0, ranks=1, rendezvous="", device=CPU, deadline_s=60, barrier_s=60)
    plan = StepPlan(step=1, idx=1, learning_rate=LR, groups=GROUPS, minibatch_groups=GROUPS,
                    max_new_tokens=config.sampling.max_new_tokens, learner=learner, skipped_in_a_row=0, max_skipped=3)

    def step() -> None:
        batch = stages.assemble(rows_of(groups))
        stages.mark_tokens(batch, step=1, publish_every=1, updates_per_step=1)
        stages.mask_truncated(batch, learner.loss.truncated)
        stages.number_tokens(batch)
        stages.add_advantages(batch, learner.advantage)
        training_step(policy, optimizer, ranks, batch, plan)

    step()
    return float(np.median([timed(step, time.process_time) for _ in range(7)]))
