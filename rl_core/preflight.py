"""What can be found out about the inputs before anything starts: model directory, prompts, reward, devices.

Every refusal names the field, or the file and line. Imports transformers (chat templates), loads no weights.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from rl_core.config import Config, LocalModel, TinyModel
from rl_core.errors import ConfigError
from rl_core.model_setup import ModelFacts, check_model, loaded_bytes
from rl_core.plan import InputFacts
from rl_core.rollout.prompts import PromptSource, load_tokenizer
from rl_core.rollout.rewards.scoring import check_reward
from rl_core.tokenizer import VOCABULARY, write_tokenizer

TINY_CONTEXT = 2048
"""Longest sequence of the tiny model, tokens (max_position_embeddings in tiny_model.py)."""
TINY_HEAD = 32
"""Its head size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The prompts of a run, tokenised, and what is known of them and of the model."""

    prompts: PromptSource
    facts: InputFacts


def inspect_inputs(config: Config) -> Inputs:
    """Check everything that the settings point at. Raises ConfigError or DataError; starts nothing that stays."""
    _check_given(config)
    _check_devices(config)
    if isinstance(config.model, LocalModel):
        directory = Path(config.model.path).expanduser()
        model, copied = check_model(directory), loaded_bytes(directory)
        prompts = PromptSource(config, load_tokenizer(directory), vocab_size=model.vocabulary)
    else:
        model = tiny_facts(config.model)
        copied = 4 * model.parameters
        prompts = _tiny_prompts(config, model)
    check_reward(config, rows=prompts)
    lengths = prompts.lengths
    facts = InputFacts(rows=len(prompts), longest_prompt=int(lengths.max(initial=0)),
                       mean_prompt=float(lengths.mean()) if len(lengths) else 0.0,
                       validation_rows=len(prompts.validation()), model_bytes=4 * model.parameters,
                       copied_bytes=copied, context=model.context, vocabulary=model.vocabulary)
    return Inputs(prompts=prompts, facts=facts)


def tiny_facts(tiny: TinyModel) -> ModelFacts:
    """Facts of the tiny model before it is made: Qwen3 shapes of tiny_model.py, counted."""
    h, vocabulary = tiny.hidden, len(VOCABULARY)
    heads = h // TINY_HEAD
    kv = TINY_HEAD * (heads // 2 if heads % 2 == 0 else 1)
    layer = 2 * h * h + 2 * h * kv + 2 * TINY_HEAD + 3 * h * 3 * h + 2 * h
    return ModelFacts(parameters=vocabulary * h + tiny.layers * layer + h, context=TINY_CONTEXT, vocabulary=vocabulary,
                      eos_token_ids=(VOCABULARY.index("<|im_end|>"),))


def _tiny_prompts(config: Config, model: ModelFacts) -> PromptSource:
    with tempfile.TemporaryDirectory(prefix="headway-") as name:
        write_tokenizer(Path(name), model.context)
        return PromptSource(config, load_tokenizer(Path(name)), vocab_size=model.vocabulary)


def _check_given(config: Config) -> None:
    """Refuse, all at once, what a preset leaves to be set (`local-model-cpu`): an empty text is no path."""
    path = config.model.path if isinstance(config.model, LocalModel) else None
    given = {"model.path": (path, "a directory with a Hugging Face causal language model"),
             "data.train": (config.data.train, "a JSONL file, or sort"),
             "data.validation": (config.data.validation, "a JSONL file, sort, or null")}
    empty = [f"{name}: must be set (got ''); add --set {name}=..., {what}"
             for name, (value, what) in given.items() if value == ""]
    if empty:
        raise ConfigError("\n".join(empty))


def _check_devices(config: Config) -> None:
    wanted = {"learner.device": config.learner.device, "rollout.engine.device": config.rollout.engine.device}
    asked = [name for name, device in wanted.items() if device == "cuda"]
    if asked:
        import torch  # only where a device must be looked for

        if not torch.cuda.is_available():
            raise ConfigError(f"{asked[0]}: this machine has no CUDA device that torch can use (got 'cuda'); use cpu")
