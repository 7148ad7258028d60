"""What tests of the engine over real servers share: publications, requests, and log-probs by transformers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.rollout.sglang.wire import MODEL_INFO
from rl_core.types import Completion, GenerateRequest, Sampling, WeightVersion
from rl_core.weights import WEIGHTS_FILE, digest_tensors, read_tensors, write_weights

Publish = Callable[[int], tuple[WeightVersion, Path]]


def endless(model_dir: Path, directory: Path, context: int | None = None) -> Path:
    """The same model without an end token, and with another longest context."""
    shutil.copytree(model_dir, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": []}')
    if context is not None:
        config = (directory / "config.json").read_text()
        assert config.count('"max_position_embeddings": 2048') == 1
        (directory / "config.json").write_text(config.replace('"max_position_embeddings": 2048',
                                                              f'"max_position_embeddings": {context}'))
    return directory


def publication(model_dir: Path, root: Path, idx: int, share: float = 0.1) -> tuple[WeightVersion, Path]:
    """Version `idx`: the model's weights, each off by about `share` of itself; index 0 is the model as it is."""
    generator = torch.Generator().manual_seed(idx)
    tensors = read_tensors(model_dir / WEIGHTS_FILE)
    if idx:
        tensors = {name: tensor * (1 + share * torch.randn(tensor.shape, generator=generator))
                   for name, tensor in tensors.items()}
    directory = root / f"v-{idx:08d}"
    if not directory.exists():
        write_weights(directory, tensors)
    return WeightVersion(v=idx, step=idx, idx=idx, attempt=1, digest=digest_tensors(tensors.items())), directory


def request(i: int, tokens: int = 64, prompt: int = 12, **sampling: Any) -> GenerateRequest:
    """Prompts of like numbers have nothing in common."""
    ids = np.random.default_rng(i).integers(6, 58, size=prompt).astype(np.int32)
    return GenerateRequest(request_id=f"r{i}", token_ids_P=ids, seed=i,
                           sampling=Sampling(**{"max_new_tokens": tokens, **sampling}))


def runs(answer: Completion) -> list[tuple[int, int]]:
    """`(end, version)` of each run."""
    found = answer.version_runs
    return list(zip(found.end_R.tolist(), found.version_R.tolist(), strict=True))


def is_whole(answer: Completion, tokens: int) -> bool:
    """As long as asked for, every token with a log-prob and a version, versions never running backwards."""
    found = runs(answer)
    return (len(answer.token_ids_L) == len(answer.logprobs_L) == tokens and answer.finish_reason == "length"
            and found[-1][0] == tokens and found == sorted(found) and [v for _, v in found] == sorted({
                v for _, v in found}))


def load(model_dir: Path, weights: Path | None = None) -> Any:
    """The model of transformers, with other weights if they are given."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(read_tensors(weights / WEIGHTS_FILE), strict=False)
        model.tie_weights()
    return model


@torch.inference_mode()
def plain_logprobs(model: Any, prompt: NDArray[np.int32], ids: NDArray[np.int32],
                   temperature: float = 1.0) -> NDArray[np.float32]:
    """Of each token of the answer, by one forward pass."""
    context = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]
    logits = model(context, use_cache=False).logits[0, len(prompt) - 1:-1] / temperature
    return logits.log_softmax(-1).gather(-1, context[0, len(prompt):, None])[:, 0].numpy()


@torch.inference_mode()
def swapped_logprobs(before: Any, after: Any, prompt: NDArray[np.int32], ids: NDArray[np.int32],
                     boundary: int) -> NDArray[np.float32]:
    """Of each token of an answer whose token `boundary` is the first one that `after` sampled, over the key/value cache
    that `before` has made."""
    context = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]
    cut = len(prompt) + boundary - 1
    first = before(context[:, :cut], use_cache=True)
    second = after(context[:, cut:], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits, second.logits], dim=1)[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1).gather(-1, context[0, len(prompt):, None])[:, 0].numpy()


def wait_for(reached: Callable[[], bool], deadline_s: float = 120) -> None:
    until = time.monotonic() + deadline_s
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.005)


def version_at(url: str) -> str | None:
    """What the server at this address says that it serves."""
    return ask(url, MODEL_INFO).fields.get("weight_version")


def count(engine: SglangEngine, name: str) -> float:
    """A counter, over all servers."""
    return sum(counters[name] for counters in engine.counters().values())
