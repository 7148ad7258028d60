"""Whether a server's log-probs are those of the learner's model: some answers are sampled, and read by the learner's
own forward pass. Blocking, at the start, while the server has the weights of the run's model directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rl_core.config import Config, SglangEngineConfig
from rl_core.errors import DeadPart, EngineMismatch
from rl_core.model_setup import tensor_shapes
from rl_core.rollout.prompts import read_vocab_size
from rl_core.rollout.sglang.asking import ASK_S, Answer, ask

BOUND = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |engine - learner| of one token's log-prob, nats, by the server's dtype. Measured: docs/sglang.md."""
SECOND_TEMPERATURE = 0.7
"""Beside the run's own: at 1.0 log-probs of the logits are those of the sampled distribution, whatever is computed."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 12, 24
MOST_PARAMETERS = 2**30
"""Of a model that is loaded for the comparison (float32, on the host). Of larger ones the learner says it in its first
step (`train/mismatch_current_abs`, EngineMismatch)."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens behind a prompt, with the log-probs that the server reports."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


def check_agreement(url: str, config: Config, model_dir: Path) -> dict[float, float]:
    """Temperature -> mean |engine - learner| of a token's log-prob, nats; the server has the weights of `model_dir`.

    At the run's temperature and at 0.7. Empty for a model of more than MOST_PARAMETERS. Raises EngineMismatch.
    """
    if sum(math.prod(shape) for shape in tensor_shapes(model_dir).values()) > MOST_PARAMETERS:
        return {}
    engine = cast(SglangEngineConfig, config.rollout.engine)
    temperatures = sorted({config.sampling.temperature, SECOND_TEMPERATURE})
    room = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    samples = {temperature: sample(url, temperature, read_vocab_size(model_dir), room) for temperature in temperatures}
    found = logprob_gaps(model_dir, samples)
    for temperature, gap in found.items():
        if not gap <= BOUND[engine.dtype]:
            raise EngineMismatch(
                f"server {url}: log-probs at temperature {temperature:g} are {gap:.2g} nats off those of the learner's "
                f"model on average; at most {BOUND[engine.dtype]:g} is rounding ({engine.dtype}). Does it serve the "
                f"weights of {model_dir}? Is SGLANG_RETURN_ORIGINAL_LOGPROB set in its environment?")
    return found


def sample(url: str, temperature: float, vocabulary: int, room: int) -> list[Sampled]:
    """A few answers of one length, in at most `room` tokens. Raises DeadPart where the server gives none."""
    length = min(PROMPT_TOKENS, room // 2)
    prompts = [[(7 * i + 11 * row + i * i) % vocabulary for i in range(length)] for row in range(PROMPTS)]
    body = {"input_ids": prompts, "return_logprob": True,
            "sampling_params": {"temperature": temperature, "max_new_tokens": min(NEW_TOKENS, room - length - 1),
                                "ignore_eos": True}}
    answer = ask(url, "/generate", body, timeout_s=12 * ASK_S)
    return [_sampled(url, prompt, part) for prompt, part in zip(prompts, _parts(url, answer), strict=True)]


def _parts(url: str, answer: Answer) -> Sequence[Any]:
    if answer.status != 200 or not answer.items:
        raise DeadPart(f"server {url}: /generate answers with status {answer.status} and {answer.message[:200]!r}")
    return answer.items


def _sampled(url: str, prompt: list[int], part: Any) -> Sampled:
    try:
        entries = cast("list[list[Any]]", part["meta_info"]["output_token_logprobs"])
        return Sampled(prompt, [int(entry[1]) for entry in entries], [float(entry[0]) for entry in entries])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DeadPart(f"server {url}: /generate gives no output_token_logprobs ({error!r}): "
                       f"{str(part)[:200]}") from error


def logprob_gaps(model_dir: Path, samples: Mapping[float, Sequence[Sampled]]) -> dict[float, float]:
    """Temperature -> mean |log-prob of the server - log-prob of the learner's model in float32|, nats."""
    import torch  # here: what only asks needs none of it

    from rl_core.learner.attention import Call, Rows
    from rl_core.learner.policy import PackInputs, load_policy

    policy = load_policy(model_dir, logits_chunk=512, dtype=torch.float32, device=torch.device("cpu"))

    def one(sampled: Sampled, temperature: float) -> float:
        ids = torch.tensor(sampled.prompt + sampled.token_ids)
        here = torch.arange(len(ids))
        predictor_S = here[len(sampled.prompt) - 1:-1]
        target_S = ids[len(sampled.prompt):]
        inputs = PackInputs(ids, here, Rows((Call(here[None]),), here), predictor_S, target_S,
                            torch.full((len(target_S),), temperature))
        return float((policy(inputs).logprob_S - torch.tensor(sampled.logprobs)).abs().mean())

    with torch.no_grad():
        return {temperature: sum(one(sampled, temperature) for sampled in of_it) / len(of_it)
                for temperature, of_it in samples.items()}
