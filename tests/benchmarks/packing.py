"""Packed training steps against padded ones, on answers with long tails (docs/speed.md 2).

The same claim, the same loss, the same optimizer, one thread, processor seconds. Packed is the learner's own
`training_step`. Padded is what one writes without packing: the stock model over right-padded micro-batches in the
order of the claim, no attention mask (a causal model needs none for padding on the right), log-probs of the real answer
tokens only. Both are measured at the micro-batch that suits them best. Learning rate 0: every round has the same loss.

`_sorted`: padded micro-batches of like length, which a padded trainer can make as well. No bar.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from rl_core.advantage_settings import GroupAdvantage
from rl_core.config import CorrectionConfig, LearnerConfig
from rl_core.learner import batch as stages
from rl_core.learner.aggregation import Denominators, aggregate
from rl_core.learner.correction import token_weights, truncate
from rl_core.learner.logprobs import chosen_logprobs
from rl_core.learner.losses.ppo_clip import ppo_clip
from rl_core.learner.plan import StepPlan
from rl_core.learner.policy import load_policy
from rl_core.learner.ranks import Ranks, gradient_norm
from rl_core.learner.step import training_step
from rl_core.tiny_model import tiny_config
from rl_core.types import TrajectoryGroup
from tests.benchmarks import long_tails
from tests.benchmarks.measure import figure, side_by_side
from tests.builders import VOCAB, make_group
from tests.learning import LiveLogits, rows_of

GROUPS, GROUP_SIZE = 16, 8
BUDGETS = (512, 1024, 2048, 4096, 8192)
MICRO_BATCHES = (1, 2, 4, 8, 16)
ROUNDS = 5
CPU = torch.device("cpu")
CHUNK = 64
"""`logits_chunk` where memory is watched: a step has about 80 times as many loss tokens."""
COPIES = 6
"""Tensors as wide as the vocabulary that one chunk needs at once: logits, scaled, log-probs, and gradients of those."""


def figures() -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        config = tiny_config(2, 128)
        config.vocab_size = VOCAB
        directory = long_tails.random_model(Path(name) / "model", config)
        batch = claim()
        tokens = int(batch["loss_mask"].sum())
        yield from speed(directory, batch, tokens)
        yield from memory(directory, batch, tokens)


def claim(groups: int = GROUPS, group_size: int = GROUP_SIZE) -> TensorDict:
    """A claim of long-tailed answers."""
    lengths = long_tails.lengths(groups * group_size).reshape(groups, group_size)
    prompts = np.random.default_rng(6).integers(8, 25, groups)
    return staged([make_group(i, n=group_size, lengths=lengths[i].tolist(), prompt_length=int(prompts[i]))
                   for i in range(groups)])


def staged(groups: Sequence[TrajectoryGroup]) -> TensorDict:
    """A claim of these groups, as it is when its step begins."""
    batch = stages.assemble(rows_of(groups))
    stages.mark_tokens(batch, step=1, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, "score")
    stages.number_tokens(batch)
    stages.add_advantages(batch, GroupAdvantage())
    return batch


@dataclass
class Result:
    """What one step found."""

    loss: float = 0.0
    norm: float = 0.0


def speed(directory: Path, batch: TensorDict, tokens: int) -> Iterator[dict[str, Any]]:
    """Useful trained tokens per processor second, and whether both found the same loss and gradient norm."""
    packed = {budget: Packed(directory, batch, budget) for budget in BUDGETS}
    padded = {size: Padded(directory, batch, size) for size in MICRO_BATCHES}
    ordered = {size: Padded(directory, batch, size, by_length=True) for size in MICRO_BATCHES}
    sweep, best = {}, {}
    for which, runs in {"packed": packed, "padded": padded, "sorted": ordered}.items():
        rates = {size: tokens / side_by_side(run, rounds=2, clock=time.process_time)[0] for size, run in runs.items()}
        best[which] = max(rates, key=rates.__getitem__)
        sweep[which] = {str(size): round(rate) for size, rate in rates.items()}
    one, other = packed[best["packed"]], padded[best["padded"]]
    seconds = side_by_side(one, other, ordered[best["sorted"]], rounds=ROUNDS, clock=time.process_time)
    ours, theirs, by_length = (tokens / s for s in seconds)
    yield figure("packing/trained_tokens_vs_padded", ours / theirs, "x", ">= 1.8", ours=round(ours),
                 theirs=round(theirs), rate="useful tokens/CPU-s", token_budget=best["packed"],
                 micro_batch=best["padded"], sweep=sweep)
    yield figure("packing/trained_tokens_vs_padded_sorted", ours / by_length, "x", theirs=round(by_length),
                 micro_batch=best["sorted"])
    yield figure("packing/loss_difference", abs(one.result.loss / other.result.loss - 1), "share", "<= 1e-5",
                 packed=one.result.loss, padded=other.result.loss)
    yield figure("packing/gradient_norm_difference", abs(one.result.norm / other.result.norm - 1), "share", "<= 1e-5",
                 packed=one.result.norm, padded=other.result.norm)


def memory(directory: Path, batch: TensorDict, tokens: int) -> Iterator[dict[str, Any]]:
    """Rows of logits during a whole step whose micro-batch holds far more loss tokens than a chunk."""
    step = Packed(directory, batch, 1 << 20, chunk=CHUNK)
    with LiveLogits(cast(Any, step.policy.model).lm_head.weight) as watched:
        step()
    yield figure("packing/logits_rows", watched.widest, "rows", f"<= {CHUNK}", loss_tokens=tokens)
    yield figure("packing/logits_rows_alive", watched.peak / CHUNK, "chunks", f"<= {COPIES}")


# -- the two ways to train


def settings(chunk: int = 2048, budget: int = 4096, share_prefixes: bool = True) -> LearnerConfig:
    """Token weights against the behavior policy, so that the loss depends on every log-prob."""
    return LearnerConfig(correction=CorrectionConfig(weights="token_truncate"), logits_chunk=chunk,
                         token_budget=budget, share_prefixes=share_prefixes)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)


class Packed:
    """One call is one `training_step`."""

    def __init__(self, directory: Path, batch: TensorDict, budget: int, chunk: int = 2048, *,
                 dtype: torch.dtype = torch.float32, groups: int = GROUPS, share_prefixes: bool = True) -> None:
        self.policy = load_policy(directory, logits_chunk=chunk, dtype=dtype, device=CPU)
        self.optimizer, self.batch, self.result = optimizer_of(self.policy), batch, Result()
        self.ranks = Ranks(rank=0, ranks=1, rendezvous="", device=CPU, deadline_s=60, barrier_s=60)
        self.plan = StepPlan(step=1, idx=1, learning_rate=0.0, groups=groups, minibatch_groups=groups,
                             max_new_tokens=long_tails.MAX_TOKENS, skipped_in_a_row=0,
                             learner=settings(chunk, budget, share_prefixes), max_skipped=0)

    def __call__(self) -> None:
        found = training_step(self.policy, self.optimizer, self.ranks, self.batch, self.plan)
        self.result = Result(found.losses[0], found.gradient_norms[0])


class Padded:
    """One call is one step of the stock model over padded micro-batches, by the same loss functions."""

    def __init__(self, directory: Path, batch: TensorDict, size: int, *, by_length: bool = False,
                 dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.narrow = dtype == torch.bfloat16
        self.optimizer, self.batch, self.result = optimizer_of(self.model), batch, Result()
        self.learner = settings()
        layout = stages.layout_of(batch)
        self.start_M, self.prompt_M = layout.start_M, layout.prompt_M
        self.length_M = np.diff(stages.column(batch, "cu_seqlens").numpy())
        order = np.argsort(-self.length_M, kind="stable") if by_length else np.arange(len(self.length_M))
        self.parts = [order[lo:lo + size] for lo in range(0, len(order), size)]
        answers = torch.from_numpy(self.length_M - self.prompt_M)
        self.tokens_M, self.denominators = answers, Denominators(tokens=int(answers.sum()), sequences=len(answers))

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = sum(self._backward(rows) for rows in self.parts)
        parameters = list(self.model.parameters())
        norm = gradient_norm(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, self.learner.max_grad_norm, norm)
        self.optimizer.step()
        self.result = Result(float(loss), float(norm))

    def _backward(self, rows_N: NDArray[np.int64]) -> float:
        column: Callable[..., Tensor] = lambda *name: stages.column(self.batch, *name)  # noqa: E731
        width = int(self.length_M[rows_N].max())
        where = torch.from_numpy(self.start_M[rows_N])[:, None] + torch.arange(width)
        real = torch.arange(width) < torch.from_numpy(self.length_M[rows_N])[:, None]
        where = torch.where(real, where, 0)
        ids = torch.where(real, column("input_ids")[where], 0)
        answer = real & (torch.arange(width) >= torch.from_numpy(self.prompt_M[rows_N])[:, None])
        before = F.pad(answer, (0, 1))[:, 1:]  # places that predict an answer token
        row_S = torch.from_numpy(rows_N).repeat_interleave(answer.sum(1))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.narrow):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[before])
        policy_S, _ = chosen_logprobs(logits, ids[answer], torch.ones(len(row_S)), entropy_gradient=False)
        proximal_S = policy_S.detach()
        advantage_S = column("trajectory", "advantage")[row_S]
        loss_S = ppo_clip(policy_S, proximal_S, advantage_S).loss_S * truncate(
            token_weights(proximal_S, column("behavior_logprobs")[where[answer]]), self.learner.correction.cap)
        loss = aggregate(loss_S, row_S, self.tokens_M, self.denominators, "token_mean",
                         max_new_tokens=long_tails.MAX_TOKENS)
        cast(Any, loss).backward()
        return float(loss.detach())
