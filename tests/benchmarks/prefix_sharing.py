"""Training steps that compute a group's prompt once, against plain packing, where every answer has its own: see
docs/speed.md 2.

The same claim, the same `training_step`, one thread, processor seconds; only `learner.share_prefixes` differs. Prompts
are as long as three answers, which are long-tailed. Both are measured at the token budget that suits them best.
Learning rate 0: every round has the same loss.

`ideal`: places that plain packing computes for each one with shared prompts; `reached`: the share of it that was
measured. Logits are computed for answers only, and are the same work on both sides.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tensordict import TensorDict
from transformers import LlamaConfig

from rl_core.learner import batch as stages
from rl_core.tiny_model import tiny_config
from tests.benchmarks import long_tails
from tests.benchmarks.measure import figure, side_by_side
from tests.benchmarks.packing import Packed, staged
from tests.builders import VOCAB, make_group

GROUPS, GROUP_SIZE = 8, 8
PROMPT_OF_ANSWERS = 3.0
SWEEP = (0.1, 0.5, 1.0, 3.0, 10.0)
BUDGETS = (1024, 2048, 4096, 8192)
ROUNDS = 5
LARGER = LlamaConfig(vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
                     num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True,
                     max_position_embeddings=2048, eos_token_id=1, pad_token_id=1, bos_token_id=None)
"""14 M parameters, where matrix products are nearly all of the work."""


def figures() -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    tiny = tiny_config(2, 128)
    tiny.vocab_size = VOCAB
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        directory = long_tails.random_model(Path(name) / "tiny", tiny)
        yield from against_plain(directory)
        yield by_length_of_prompts(directory)
        yield larger(long_tails.random_model(Path(name) / "larger", LARGER))


def claim(groups: int, size: int, prompt_of_answers: float) -> TensorDict:
    """A claim of long-tailed answers to prompts that are so many times as long as their mean."""
    lengths = long_tails.lengths(groups * size).reshape(groups, size)
    prompt = max(1, round(prompt_of_answers * float(lengths.mean())))
    return staged([make_group(i, n=size, lengths=lengths[i].tolist(), prompt_length=prompt) for i in range(groups)])


def ideal(batch: TensorDict) -> float:
    """Places of plain packing for each one with shared prompts."""
    layout = stages.layout_of(batch)
    _, first = np.unique(layout.context_M, return_index=True)
    answers = int(layout.answer_M.sum())
    return (int(layout.prompt_M.sum()) + answers) / (int(layout.prompt_M[first].sum()) + answers)


def runs(directory: Path, batch: TensorDict, budget: int, groups: int) -> list[Packed]:
    """A step with shared prompts, and one of plain packing."""
    return [Packed(directory, batch, budget, share_prefixes=share, groups=groups) for share in (True, False)]


def against_plain(directory: Path) -> Iterator[dict[str, Any]]:
    batch = claim(GROUPS, GROUP_SIZE, PROMPT_OF_ANSWERS)
    tokens = int(batch["loss_mask"].sum())
    pairs = {budget: runs(directory, batch, budget, GROUPS) for budget in BUDGETS}
    rates = {budget: [tokens / s for s in side_by_side(*pair, rounds=2, clock=time.process_time)]
             for budget, pair in pairs.items()}
    best = [max(rates, key=lambda budget: rates[budget][side]) for side in range(2)]
    shared, plain = pairs[best[0]][0], pairs[best[1]][1]
    ours, theirs = (tokens / s for s in side_by_side(shared, plain, rounds=ROUNDS, clock=time.process_time))
    yield figure("prefix_sharing/trained_tokens_vs_plain", ours / theirs, "x", ">= 2", ours=round(ours),
                 theirs=round(theirs), rate="useful tokens/CPU-s", ideal=round(ideal(batch), 3),
                 reached=round(ours / theirs / ideal(batch), 3), group_size=GROUP_SIZE, token_budget=best,
                 sweep={str(budget): [round(rate) for rate in pair] for budget, pair in rates.items()})
    yield figure("prefix_sharing/loss_difference", abs(shared.result.loss / plain.result.loss - 1), "share", "<= 1e-5",
                 shared=shared.result.loss, plain=plain.result.loss)
    yield figure("prefix_sharing/gradient_norm_difference", abs(shared.result.norm / plain.result.norm - 1), "share",
                 "<= 1e-5", shared=shared.result.norm, plain=plain.result.norm)


def by_length_of_prompts(directory: Path) -> dict[str, Any]:
    """The same where prompts are shorter and longer: that sharing costs nothing where there is little to share."""
    found = {}
    for times in SWEEP:
        batch = claim(GROUPS, GROUP_SIZE, times)
        seconds = side_by_side(*runs(directory, batch, 4096, GROUPS), rounds=3, clock=time.process_time)
        found[str(times)] = {"gain": round(seconds[1] / seconds[0], 2), "ideal": round(ideal(batch), 2)}
    return figure("prefix_sharing/least_gain", min(each["gain"] for each in found.values()), "x",
                  by_prompt_of_answers=found)


def larger(directory: Path) -> dict[str, Any]:
    """A model of 14 M parameters, two groups."""
    batch = claim(2, GROUP_SIZE, PROMPT_OF_ANSWERS)
    seconds = side_by_side(*runs(directory, batch, 4096, 2), rounds=2, clock=time.process_time)
    gain = seconds[1] / seconds[0]
    return figure("prefix_sharing/trained_tokens_vs_plain_14m", gain, "x", ">= 2", ideal=round(ideal(batch), 3),
                  reached=round(gain / ideal(batch), 3))
