"""What can be found out about the inputs before anything starts: model directory, prompts, reward, devices.

Every refusal names the field, or the file and line. Imports transformers (chat templates), loads no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_core.config import Config, DataSource, LocalModel, SglangEngineConfig, TinyModel
from rl_core.engine_plan import missing_programs
from rl_core.errors import ConfigError
from rl_core.hooks.trial import check_hooks
from rl_core.lora.plan import Linear, adapter_parameters, check_installed, check_layers
from rl_core.memory import activation_bytes, cache_bytes
from rl_core.model_setup import ModelFacts, check_model, is_kept_elsewhere, loaded_bytes, model_directory
from rl_core.packaged_models import missing_packaged, packaged_model
from rl_core.plan import InputFacts
from rl_core.roles.models import check_role_contexts, check_role_models, copied_role_bytes, role_bytes
from rl_core.rollout.data_warnings import warnings_of
from rl_core.rollout.group_filter import check_group_filter
from rl_core.rollout.prompts import PromptSource, Tokenizer, load_tokenizer
from rl_core.rollout.rewards.scoring import check_reward
from rl_core.rollout.sessions import check_session
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


def left_to_set(config: Config) -> list[str]:
    """What a preset leaves to be set (`local-model-cpu`), a line for each: an empty text is no path."""
    path = config.model.path if isinstance(config.model, LocalModel) else None
    given = {"model.path": (path, "a directory with a Hugging Face causal language model"),
             "data.train": (_first(config.data.train), "a JSONL, CSV or Parquet file, or a task"),
             "data.validation": (_first(config.data.validation), "a file, a task, or null")}
    return [f"{name}: must be set (got ''); add --set {name}=..., {what}"
            for name, (value, what) in given.items() if value == ""]


def not_fetched(config: Config, models: Path, placed: Path | None) -> list[str]:
    """A line for a model of a package that `headway fetch` has not taken out yet (packaged_models.py).

    `models`, `placed`: as `inspect_inputs` takes them.
    """
    model = packaged_model("model.path", config.model.path) if isinstance(config.model, LocalModel) else None
    if model is None or (placed is not None and placed.is_dir()):
        return []
    return [line for line in [missing_packaged("model.path", model, models)] if line is not None]


def devices(config: Config) -> dict[str, str]:
    """The device of each role here, by the name of its field: servers that are there already have their own, and a run
    on another run's shards has no engine but that of its validation."""
    engine = config.rollout.engine
    elsewhere = config.offline or (isinstance(engine, SglangEngineConfig) and engine.urls)
    elsewhere = elsewhere and (config.data.validation is None or config.validates_lent)
    return {"learner.device": config.learner.device} | ({} if elsewhere else {"rollout.engine.device": engine.device})


def missing_devices(wanted: Mapping[str, str]) -> list[str]:
    """Devices, by the name of their field, that this machine does not have: a line for each."""
    asked = [name for name, device in wanted.items() if device == "cuda"]
    if not asked:
        return []
    import torch  # only where a device must be looked for

    if torch.cuda.is_available():
        return []
    return [f"{name}: this machine has no CUDA device that torch can use (got 'cuda'); use cpu" for name in asked]


def inspect_inputs(config: Config, models: Path | None = None, placed: Path | None = None, *,
                   planned: bool = False) -> Inputs:
    """Check everything that the settings point at. Raises ConfigError or DataError; starts nothing that stays.

    `planned` looks for no device: the run will be started on another machine.
    `models`: the cache for a model of the hub. `placed`: the copy that the run keeps of its model, if it has begun; a
    name of the hub stands for that copy then, whatever the hub has by now.
    """
    if empty := left_to_set(config):
        raise ConfigError("\n".join(empty))
    if not planned:
        check_devices(devices(config))
        if missing := missing_programs(config):
            raise ConfigError("\n".join(missing))
    found = model_inputs(config, models, placed)
    model, lora = found.model, config.learner.lora
    check_layers(lora, model.layers)
    if not planned:
        check_installed(lora)
    roles = check_role_models(config, model, found.tokenizer)
    # Lengths are exact wherever the plan could refuse one.
    room = min(model.context, config.learner.token_budget, *(role.context for role in roles.values())) \
        - config.sampling.max_new_tokens
    prompts = PromptSource(config, found.tokenizer, vocab_size=model.vocabulary, exact_above=room)
    of_reward = check_reward(config, rows=prompts)
    check_group_filter(config)
    check_session(config, found.tokenizer)
    check_hooks(config)
    lengths, known, held_out = prompts.lengths, prompts.exact, prompts.held_out
    check_role_contexts(config, roles, longest=int(lengths.max(initial=0)) + config.sampling.max_new_tokens)
    facts = InputFacts(rows=len(prompts), longest_prompt=int(lengths.max(initial=0)),
                       mean_prompt=float(lengths[known].mean()) if known.any() else 0.0,
                       validation_rows=len(held_out.prompts), model_bytes=4 * model.parameters,
                       copied_bytes=found.copied_bytes + copied_role_bytes(config.learner),
                       role_bytes=role_bytes(config, roles, 4 * model.parameters),
                       activation_bytes=activation_bytes(model, config.learner), cache_bytes=cache_bytes(model, config),
                       adapter_bytes=4 * adapter_parameters(lora, model.layers),
                       longest_validation=max((len(prompt.token_ids_P) for prompt in held_out.prompts), default=0),
                       context=model.context, vocabulary=model.vocabulary, dropped=prompts.dropped,
                       dropped_validation=held_out.kept.dropped,
                       warnings=(*warnings_of(prompts, held_out), *of_reward, *routing_warnings(model)))
    return Inputs(prompts=prompts, facts=facts)


def routing_warnings(model: ModelFacts) -> tuple[str, ...]:
    """What a person should know of a mixture of experts (algorithms.md 16): a sentence for the plan."""
    if not model.experts:
        return ()
    return (f"model.path: a mixture of {model.experts} experts: the experts that sampled a token are not replayed when "
            "it is trained, and where the learner chooses others their log-probs are further apart than a dense "
            "model's (train/mismatch_current_k3); learner.loss.name=gspo and learner.correction bound what that does",)


def tiny_facts(tiny: TinyModel) -> ModelFacts:
    """Facts of the tiny model before it is made: Qwen3 shapes of tiny_model.py, counted."""
    h, vocabulary = tiny.hidden, len(VOCABULARY)
    heads = h // TINY_HEAD
    kv = TINY_HEAD * (heads // 2 if heads % 2 == 0 else 1)
    layer = 2 * h * h + 2 * h * kv + 2 * TINY_HEAD + 3 * h * 3 * h + 2 * h
    matrices = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
                "self_attn.o_proj": (h, h), "mlp.gate_proj": (3 * h, h), "mlp.up_proj": (3 * h, h),
                "mlp.down_proj": (h, 3 * h)}
    return ModelFacts(parameters=vocabulary * h + tiny.layers * layer + h, context=TINY_CONTEXT, vocabulary=vocabulary,
                      eos_token_ids=(VOCABULARY.index("<|im_end|>"),),
                      layers=tuple(Linear(f"model.layers.{i}.{name}", *shape) for i in range(tiny.layers)
                                   for name, shape in matrices.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """What prompts are measured with: `model_inputs(config).tokenizer`."""

    model: ModelFacts
    tokenizer: Tokenizer
    copied_bytes: int
    """Of the directory's files that a run keeps a copy of."""


def model_inputs(config: Config, models: Path | None = None, placed: Path | None = None) -> ModelInputs:
    """The model of these settings, checked, and its tokenizer. `models`, `placed`: as `inspect_inputs` takes them."""
    if not isinstance(config.model, LocalModel):
        model = tiny_facts(config.model)
        with tempfile.TemporaryDirectory(prefix="headway-") as name:
            write_tokenizer(Path(name), model.context)
            return ModelInputs(model=model, tokenizer=load_tokenizer(Path(name)), copied_bytes=4 * model.parameters)
    if placed is not None and placed.is_dir() and is_kept_elsewhere(config.model.path):
        directory = placed
    else:
        directory = model_directory(config, config.model, models)
    return ModelInputs(model=check_model(directory), tokenizer=load_tokenizer(directory),
                       copied_bytes=loaded_bytes(directory))


def _first(sources: tuple[DataSource, ...] | None) -> str | None:
    return None if sources is None else next((source.path for source in sources if not source.path), sources[0].path)


def check_devices(wanted: Mapping[str, str]) -> None:
    """Raises ConfigError for devices, by the name of their field, that this machine does not have."""
    if missing := missing_devices(wanted):
        raise ConfigError("\n".join(missing))
