"""The tiny model: its shape, and the supervised warm-up that gives it three habits of which one is right.

Source: models.md section 2. A Qwen3 of 0.4 M parameters is taught to answer `sort 31245` with the right answer
(`12345`, probability `warmup_mix`), else with its reverse or with a plain copy. It can do all three afterwards, and
reinforcement learning picks the one that is rewarded, as in post-training of real models. From random weights, or after
a short clean warm-up, the same learning does not get off the ground (measured there). With `tail` it also learns to go
on behind its answer, briefly or for long by chance: answers as long-tailed as those of models that reason.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from rl_core.config import TinyModel
from rl_core.errors import DeadlinePassed
from rl_core.rollout.environments.sort import sort_rows
from rl_core.seeds import derive
from rl_core.tokenizer import IM_END, PAD, VOCABULARY, character_tokenizer, encode_chat, write_tokenizer

HEAD_DIM = 32
CONTEXT = 2048
BATCH = 64
MICRO_BATCH = 16
"""Rows of like length that are read together where lengths have a long tail."""
RAMP_STEPS = 20
POOL = 4096
"""Distinct questions that the warm-up draws from."""
IGNORED = -100
TAIL_SIGMA, MOST_COPIES = 0.9, 32
"""Lognormal, as the lengths of answers that reason are (models.md section 2)."""
TAIL_WEIGHT = 0.1
BLANK = VOCABULARY.index(" ")


def tiny_config(layers: int, hidden: int) -> Qwen3Config:
    """Qwen3 with heads of 32, half as many key/value heads, tied embeddings, and exactly the tokenizer's vocabulary."""
    heads = hidden // HEAD_DIM
    return Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2 if heads % 2 == 0 else 1, head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=VOCABULARY.index(IM_END), pad_token_id=VOCABULARY.index(PAD), dtype="float32")


def make_tiny_model(directory: Path, tiny: TinyModel, seed: int, held_out: Collection[str], deadline_s: float,
                    progress: Callable[[int, int], None]) -> None:
    """Write a warmed-up tiny model into `directory`: config, generation config, safetensors, tokenizer, template.

    A pure function of the settings and `seed` on one machine: one thread, generators of its own. `held_out` are prompts
    that no warm-up row may be. `progress(done, total)` is called after every step. Raises DeadlinePassed.
    """
    with _one_thread():
        model = _random_model(tiny, seed)
        if tiny.warmup_steps:
            _warm_up(model, tiny, seed, held_out, deadline_s, progress)
    write_tokenizer(directory, CONTEXT)
    model.config.architectures = [type(model).__name__]
    cast(Any, model.config).save_pretrained(directory)
    generation = GenerationConfig(eos_token_id=VOCABULARY.index(IM_END), pad_token_id=VOCABULARY.index(PAD),
                                  do_sample=True)
    cast(Any, generation).save_pretrained(directory)
    # Not `model.save_pretrained`, which draws a progress bar. The tied head is stored once, as the embedding.
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, directory / "model.safetensors",
              metadata={"format": "pt"})


@contextmanager
def _one_thread() -> Generator[None]:
    """Sums depend on the number of threads: one, wherever this runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _random_model(tiny: TinyModel, seed: int) -> Qwen3ForCausalLM:
    with cast(Any, torch.random).fork_rng(devices=[]):
        cast(Any, torch).manual_seed(derive(seed, "tiny model", "weights"))
        return Qwen3ForCausalLM(tiny_config(tiny.layers, tiny.hidden))


def _warm_up(model: Qwen3ForCausalLM, tiny: TinyModel, seed: int, held_out: Collection[str], deadline_s: float,
             progress: Callable[[int, int], None]) -> None:
    tokenizer = character_tokenizer()
    prompts = [row["prompt"] for row in sort_rows(POOL, derive(seed, "warm-up"), held_out)]
    draw = random.Random(derive(seed, "warm-up", "draws"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=tiny.warmup_lr, weight_decay=0.0, fused=True)
    begin = time.monotonic()
    model.train()
    for step in range(tiny.warmup_steps):
        if time.monotonic() - begin > deadline_s:
            raise DeadlinePassed(f"model warm-up: step {step} of {tiny.warmup_steps} after {deadline_s:.0f} s; raise "
                                 "deadlines.model_setup_s or lower model.warmup_steps")
        for parameters in optimizer.param_groups:
            parameters["lr"] = tiny.warmup_lr * min(1.0, (step + 1) / RAMP_STEPS)
        rows = [habit_row(tokenizer, draw.choice(prompts), tiny.warmup_mix, draw, tiny.tail) for _ in range(BATCH)]
        optimizer.zero_grad(set_to_none=True)
        if tiny.tail:
            _tail_backward(model, rows)
        else:
            loss = answer_loss(model, *pad_rows(rows))
            loss.backward()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
        progress(step + 1, tiny.warmup_steps)
    model.eval()


def habit_row(tokenizer: Tokenizer, prompt: str, mix: float, draw: random.Random,
              tail: float = 0.0) -> tuple[list[int], list[int]]:
    """(prompt ids, target ids with the end token): the right answer with probability `mix`, else reverse or copy.

    With `tail`, about that many copies of the question stand behind it: `12345 31245 31245`.
    """
    number = prompt.removeprefix("sort ")
    right = "".join(sorted(number))
    target = right if draw.random() < mix else draw.choice([right[::-1], number])
    if tail:
        copies = draw.lognormvariate(math.log(tail) - TAIL_SIGMA**2 / 2, TAIL_SIGMA)
        target += f" {number}" * min(round(copies), MOST_COPIES)
    return encode_chat(tokenizer, prompt), tokenizer.encode(target + IM_END, add_special_tokens=False).ids


def _tail_backward(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[int]]]) -> None:
    """Add the gradient of the mean cross-entropy over target tokens, where those behind the answer weigh TAIL_WEIGHT.

    MICRO_BATCH rows of like length at once: with such tails, padding all to the longest triples the work.
    """
    rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    total = math.fsum(sum(tail_weights(target)) for _, target in rows)
    for lo in range(0, len(rows), MICRO_BATCH):
        part = rows[lo:lo + MICRO_BATCH]
        ids, labels = pad_rows(part)
        chosen = labels != IGNORED
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        assert hidden is not None
        losses = F.cross_entropy(model.lm_head(hidden[chosen]).float(), labels[chosen], reduction="none")
        weights = torch.tensor([weight for _, target in part for weight in tail_weights(target)])
        loss = (losses * weights).sum() / total
        loss.backward()  # pyright: ignore[reportUnknownMemberType]  # untyped in torch


def tail_weights(target: Sequence[int]) -> list[float]:
    """Weight of each target token: 1 in the answer, and behind it the same small one for all, so that many do not drown
    the answer, and the chance to stop is learned as it is."""
    answer = target.index(BLANK) if BLANK in target else len(target) - 1
    return [1.0] * answer + [TAIL_WEIGHT] * (len(target) - answer)


def pad_rows(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Right-padded input ids [N, L] and labels [N, L], where label t is the answer token that follows position t."""
    width = max(len(prompt) + len(target) for prompt, target in rows) - 1
    ids = torch.full((len(rows), width), VOCABULARY.index(PAD))
    labels = torch.full((len(rows), width), IGNORED)
    for i, (prompt, target) in enumerate(rows):
        whole = prompt + target
        ids[i, :len(whole) - 1] = torch.tensor(whole[:-1])
        labels[i, len(prompt) - 1:len(whole) - 1] = torch.tensor(target)
    return ids, labels


def answer_loss(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over answer tokens. Right padding needs no mask under causal attention."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    chosen = labels != IGNORED
    assert hidden is not None
    return F.cross_entropy(model.lm_head(hidden[chosen]).float(), labels[chosen])
