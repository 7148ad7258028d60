"""The embedded engine against Hugging Face `generate` in static batches, on answers with long tails (docs/speed.md 1).

Same model, same prompts, same answer lengths, one thread, processor seconds. `generate` gets batches in the order in
which requests come, left-padded, until the longest answer of the batch is done; it samples, and is not asked for
log-probs, which the engine always returns. Both are measured at the batch size that suits them best. Useful tokens are
those of an answer up to its length; what a batch makes behind the end of a row is not counted.

`_sorted`: batches of like length, from an oracle that knows all lengths ahead. No bar: nobody has that oracle.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, Qwen3Config

from rl_core.rollout.models import load_model
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.types import Completion, GenerateRequest, Sampling
from tests.benchmarks import long_tails
from tests.benchmarks.measure import figure, side_by_side

ANSWERS = 512
BATCHES = (16, 32, 64, 128, 256)
SMALL_ANSWERS = 96
CHECKED = 48
"""Answers whose log-probs are compared with a plain forward, the longest ones among them."""
ROUNDS = 3


def figures() -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        root = Path(name)
        yield from tiny(long_tails.tiny_qwen3(root / "tiny"))
        for family in ("llama", "qwen2"):
            yield from small(family, long_tails.random_family(root / family, family), "<= 1e-5")
        gpt2 = GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256, resid_pdrop=0.0,
                          embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
        yield from small("other_by_plain_forward", long_tails.random_model(root / "gpt2", gpt2), "<= 1e-5")
        yield from larger(root / "larger")


def tiny(directory: Path) -> Iterator[dict[str, Any]]:
    """The figure with the bar: the model of the presets."""
    work = Work(directory, ANSWERS)
    ours = {slots: work.rate(work.engine(slots)) for slots in BATCHES}
    theirs = {batch: work.rate(work.generate(batch)) for batch in BATCHES}
    slots, batch = max(ours, key=ours.__getitem__), max(theirs, key=theirs.__getitem__)
    yield from compare("engine", work, slots, batch, ">= 2.5",
                       sweep={str(size): [round(ours[size]), round(theirs[size])] for size in BATCHES})
    yield from accuracy("engine", directory, work, "<= 1e-5")
    yield from limits("engine", directory, slots)


def small(name: str, directory: Path, bar: str) -> Iterator[dict[str, Any]]:
    """One architecture: how it compares, and whether its log-probs are right."""
    work = Work(directory, SMALL_ANSWERS, longest=160)
    yield from compare(f"engine/{name}", work, 32, 32, None, rounds=1, oracle=False)
    yield from accuracy(f"engine/{name}", directory, work, bar)


def larger(directory: Path) -> Iterator[dict[str, Any]]:
    """A model of 29 M parameters, where products cost more than the calls around them."""
    config = Qwen3Config(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
                         num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
                         tie_word_embeddings=True)
    long_tails.random_model(directory, config)
    work = Work(directory, SMALL_ANSWERS)
    yield from compare("engine/29m", work, 32, 32, None, rounds=1, oracle=False)
    yield from limits("engine/29m", directory, 32)


class Work:
    """Requests with their lengths, and the ways to answer them."""

    def __init__(self, directory: Path, answers: int, longest: int = long_tails.MAX_TOKENS) -> None:
        self.directory = directory
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
        self.lengths = long_tails.lengths(answers, longest=longest)
        self.prompts = long_tails.prompts(answers, int(self.model.config.vocab_size))
        self.answers: list[Completion] = []
        """Of the engine's last run."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def rate(self, run: Callable[[], None]) -> float:
        """Useful tokens per processor second of one run."""
        (seconds,) = side_by_side(run, rounds=1, clock=time.process_time)
        return self.tokens / seconds

    def engine(self, slots: int) -> Callable[[], None]:
        requests = [GenerateRequest(request_id=str(i), token_ids_P=prompt, seed=i,
                                    sampling=Sampling(max_new_tokens=int(length)))
                    for i, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True))]

        def run() -> None:
            engine = TorchEngine(self.directory, slots=slots)
            self.answers = [future.result(600) for future in [engine.submit(request) for request in requests]]
            engine.close()
            assert [len(answer.token_ids_L) for answer in self.answers] == self.lengths.tolist()

        return run

    def generate(self, batch: int, *, oracle: bool = False) -> Callable[[], None]:
        order = np.argsort(self.lengths, kind="stable") if oracle else np.arange(len(self.lengths))
        batches = [order[lo:lo + batch] for lo in range(0, len(order), batch)]

        def run() -> None:
            for rows in batches:
                self._static_batch(rows)

        return run

    @torch.inference_mode()
    def _static_batch(self, rows: NDArray[np.int64]) -> None:
        ids, mask = left_padded([self.prompts[row] for row in rows])
        longest = int(self.lengths[rows].max())
        config = GenerationConfig(max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                  pad_token_id=0)
        made = self.model.generate(ids, attention_mask=mask, generation_config=config)
        assert made.shape[1] == ids.shape[1] + longest


def left_padded(contexts: Sequence[NDArray[np.int32]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask [N, width]."""
    width = max(map(len, contexts))
    ids, mask = torch.zeros(len(contexts), width, dtype=torch.long), torch.zeros(len(contexts), width, dtype=torch.long)
    for i, context in enumerate(contexts):
        ids[i, width - len(context):] = torch.from_numpy(context.astype(np.int64))
        mask[i, width - len(context):] = 1
    return ids, mask


def compare(name: str, work: Work, slots: int, batch: int, bar: str | None, *, rounds: int = ROUNDS,
            oracle: bool = True, **more: Any) -> Iterator[dict[str, Any]]:
    """Ratio of useful tokens per processor second, medians of rounds taken in turn."""
    runs = [work.engine(slots), work.generate(batch)] + ([work.generate(batch, oracle=True)] if oracle else [])
    seconds = side_by_side(*runs, rounds=rounds, clock=time.process_time)
    rates = [work.tokens / s for s in seconds]
    yield figure(f"{name}/useful_tokens_vs_generate", rates[0] / rates[1], "x", bar, ours=round(rates[0]),
                 theirs=round(rates[1]), rate="useful tokens/CPU-s", slots=slots, batch=batch, **more)
    if oracle:
        yield figure(f"{name}/useful_tokens_vs_generate_sorted", rates[0] / rates[2], "x", theirs=round(rates[2]))


@torch.inference_mode()
def accuracy(name: str, directory: Path, work: Work, bar: str) -> Iterator[dict[str, Any]]:
    """Largest difference between log-probs of the last engine run and those of a plain forward pass."""
    errors: list[float] = []
    for i in np.argsort(-work.lengths, kind="stable")[::max(1, len(work.lengths) // CHECKED)]:
        prompt, answer = work.prompts[i], work.answers[i]
        ids = torch.from_numpy(np.concatenate([prompt, answer.token_ids_L]).astype(np.int64))
        logits = work.model(ids[None], use_cache=False).logits[0, len(prompt) - 1:-1]
        plain = logits.log_softmax(-1).gather(-1, ids[len(prompt):, None])[:, 0]
        errors.append(float((plain - torch.from_numpy(answer.logprobs_L)).abs().max()))
    yield figure(f"{name}/logprob_error", max(errors), "nats", bar, answers=len(errors))


@torch.inference_mode()
def limits(name: str, directory: Path, rows: int) -> Iterator[dict[str, Any]]:
    """What one step of the full batch spends, beside its bare matrix products, and beside the products' own peak.

    The products are those of the step with the step's shapes, timed alone; the peak is a product of 1024 x 1024 x 1024.
    """
    model: Any = load_model(directory, slots=rows, dtype="float32", device="cpu")
    position = np.full(rows, 64, np.int64)
    token = np.arange(rows, dtype=np.int64) % model.vocabulary
    model.prefill([np.arange(64, dtype=np.int32) % model.vocabulary], [0] * rows, 0)
    unused = "embed" if "head" in model._weights else ""
    products = [tensor for key, tensor in model._weights.items()
                if tensor.dim() == 2 and "qk_norm" not in key and key != unused]
    inputs = [torch.randn(rows, tensor.shape[1]) for tensor in products]
    square = torch.randn(1024, 1024)
    operations = 2 * rows * sum(tensor.numel() for tensor in products)

    def step() -> None:
        for _ in range(20):
            model.decode(token, position)

    def bare() -> None:
        for _ in range(20):
            for x, weight in zip(inputs, products, strict=True):
                torch.nn.functional.linear(x, weight)

    step_s, bare_s, peak_s = side_by_side(step, bare, lambda: torch.mm(square, square), rounds=9,
                                          clock=time.process_time)
    peak = 2 * 1024**3 / peak_s
    yield figure(f"{name}/step_in_products", bare_s / step_s, "share", rows=rows, step_ms=round(50 * step_s, 3),
                 products_ms=round(50 * bare_s, 3))
    yield figure(f"{name}/step_of_peak", operations * 20 / step_s / peak, "share", peak_gflops=round(peak / 1e9, 1))
