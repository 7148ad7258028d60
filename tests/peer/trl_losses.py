"""TRL's own trainers over a batch that was given: loss, gradient norm and advantages of one step per case.

    .venv-trl/bin/python tests/peer/trl_losses.py JOB.json RESULT.json

Runs in the environment of `make trl`, which has no Headway in it. Each case is one real `train()` of one optimizer step
with learning rate 0. Given are, in place of what TRL would have made: the answers with their log-probs (GRPOTrainer's
`rollout_func`; RLOOTrainer has none, so its generation is answered for), rewards, and where the case says so the
advantages and the log-probs of the ratio's denominator. All else is TRL's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer  # noqa: E402

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "gmpo": (GMPOTrainer, GMPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
COMMON: dict[str, Any] = {
    "max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 1e9, "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False, "shuffle_dataset": False, "remove_unused_columns": False, "report_to": "none",
    "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}


def watched(trainer: type) -> type:
    """The trainer, with what was given put in, and what it computes written down."""

    class Watched(trainer):
        given: dict[str, list[float] | list[list[float]]]
        batch: dict[str, Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.losses: list[float] = []
            self.advantages: list[float] = []
            super().__init__(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            self.advantages = made["advantages"].tolist()
            if "advantages" in self.given:
                made["advantages"] = torch.tensor(self.given["advantages"])
            if "old" in self.given:
                width = made["completion_ids"].shape[1]
                made["old_per_token_logps"] = torch.tensor(
                    [[*row, *[0.0] * (width - len(row))] for row in self.given["old"]])
            return made

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(float(loss))
            return loss

        # RLOOTrainer has no rollout_func: its prompts and answers are given here.
        if trainer is RLOOTrainer:
            def _tokenize_prompts(self, prompts: Any) -> Any:
                return rows_of(prompts, self.batch)[0], None, {}

            def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
                return self.batch["answers"]

    return Watched


class Norm(TrainerCallback):
    """The norm of the gradient of a whole step."""

    def __init__(self) -> None:
        self.value = float("nan")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.value = float(torch.stack([p.grad.double().square().sum() for p in model.parameters()
                                        if p.grad is not None]).sum().sqrt())


def rows_of(prompts: list[str], batch: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """(token ids of each prompt, numbers of the answers): a prompt is the number of its group."""
    size = len(batch["answers"]) // len(batch["prompts"])
    groups = [int(prompt) for prompt in prompts]
    assert groups == [i // size for i in range(len(batch["answers"]))], groups
    return [batch["prompts"][group] for group in groups], list(range(len(groups)))


def rollout_of(batch: dict[str, Any]) -> Any:
    """A `rollout_func` that answers with the batch."""
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids, _ = rows_of(prompts, batch)
        return {"prompt_ids": prompt_ids, "completion_ids": batch["answers"], "logprobs": batch["behavior"],
                "env_mask": batch["mask"], "answer_no": list(range(len(prompts)))}
    return rollout


def reward_of(name: str, values: list[float]) -> Any:
    """A reward function that knows the rewards by the number of the answer."""
    def reward(completions: Any, answer_no: list[int] | None = None, **columns: Any) -> list[float]:
        return values if answer_no is None else [values[i] for i in answer_no]
    reward.__name__ = name
    return reward


def run(case: dict[str, Any], job: dict[str, Any], place: str) -> dict[str, Any]:
    """One step of one case."""
    trainer, config = TRAINERS[case["trainer"]]
    batch = job["batches"][case["batch"]]
    settings = dict(case["settings"])
    corrected = settings.pop("use_vllm", False)
    args = config(output_dir=place, **COMMON, **settings)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    norm = Norm()
    more = {} if case["trainer"] == "rloo" else {"rollout_func": rollout_of(batch)}
    made = watched(trainer)(
        model, [reward_of(name, values) for name, values in batch["rewards"].items() if name in case["rewards"]],
        args=args, train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(batch["prompts"]))]}),
        processing_class=AutoTokenizer.from_pretrained(job["model"]), callbacks=[norm], **more)
    made.batch = batch
    made.given = {name: batch[name] for name in case["given"]}
    if corrected:  # as if vLLM had answered: its log-probs, too, are the batch's
        made.use_vllm, made._last_loaded_step = True, 0
    if made.ref_model is not None:
        other = AutoModelForCausalLM.from_pretrained(job["references"][case["reference"]], dtype=torch.float32)
        made.ref_model.load_state_dict(other.state_dict())
    made.train()
    return {"loss": sum(made.losses), "norm": norm.value, "advantages": made.advantages,
            "micro_batches": len(made.losses)}


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as place:
        for name, case in job["cases"].items():
            results[name] = run(case, job, place)
    Path(result_path).write_text(json.dumps({"version": trl.__version__, "cases": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
