"""A training run of TRL's GRPOTrainer that is timed: samples/s between two of its steps.

    .venv-trl/bin/python tests/peer/trl_train.py JOB.json RESULT.json

Runs in the environment of `make trl`, which has no Headway in it. TRL as it is quickest on processors: float32, no
gradient checkpointing, nothing written or logged, generation by `generate` (its continuous batching is slower there),
and of the given micro-batches the best, tried first. The loss is its default.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

TRIED_STEPS = 2
"""Of every micro-batch, behind one that warms up."""


class Timed(GRPOTrainer):
    """The trainer, and the seconds that it spends generating."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generation_s: list[float] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        made = super()._generate_single_turn(*args, **kwargs)
        self.generation_s.append(time.perf_counter() - begun)
        return made


class Ends(TrainerCallback):
    """When every step ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at.append(time.perf_counter())


class Scored:
    """A reward function: 1 for the right answer. Keeps the lengths of what it has seen."""

    __name__ = "right"

    def __init__(self, pattern: str | None) -> None:
        self.pattern = None if pattern is None else re.compile(pattern)
        self.lengths: list[int] = []

    def __call__(self, completions: Any, completion_ids: Any, answer: list[str], **columns: Any) -> list[float]:
        self.lengths += map(len, completion_ids)
        return [float(self.said(message[0]["content"]) == right)
                for message, right in zip(completions, answer, strict=True)]

    def said(self, text: str) -> str:
        found = None if self.pattern is None else self.pattern.search(text)
        return text if found is None else found.group()


def timed(job: dict[str, Any], place: str, micro_batch: int, warm: int, steps: int) -> dict[str, Any]:
    """A run of warm + steps steps, and its rate over the last `steps` of them."""
    batch = job["groups"] * job["group_size"]
    args = GRPOConfig(
        output_dir=place, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=job["seed"], learning_rate=job["lr"],
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=batch // micro_batch,
        num_generations=job["group_size"], max_completion_length=job["max_new_tokens"], temperature=1.0,
        max_steps=warm + steps)
    ends, scored = Ends(), Scored(job["pattern"])
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in job["rows"]]
    trainer = Timed(AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32), scored, args=args,
                    train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(job["model"]),
                    callbacks=[ends])
    trainer.train()
    seconds = ends.at[-1] - ends.at[warm - 1]
    lengths = scored.lengths[-steps * batch:]
    generation = sum(trainer.generation_s[-steps:]) / steps
    return {"samples": steps * batch / seconds, "step_s": seconds / steps, "generation_s": generation,
            "training_s": seconds / steps - generation, "length": sum(lengths) / len(lengths),
            "micro_batch": micro_batch, "threads": torch.get_num_threads(), "version": trl.__version__}


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as place:
        sizes = job["micro_batches"]
        tried = {size: timed(job, place, size, 1, TRIED_STEPS)["samples"] for size in sizes if len(sizes) > 1}
        best = max(tried, key=tried.__getitem__) if tried else sizes[0]
        result = timed(job, place, best, job["warm"], job["steps"])
    Path(result_path).write_text(json.dumps(result | {"tried": tried}))


if __name__ == "__main__":
    main(*sys.argv[1:])
