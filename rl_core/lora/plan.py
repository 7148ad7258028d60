"""What cannot work with an adapter, and what it weighs, known before anything starts. Importable without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from rl_core.config import Config, LearnerConfig, SglangEngineConfig
from rl_core.errors import ConfigError, refuse
from rl_core.lora.settings import LoraConfig


class Linear(NamedTuple):
    """A linear layer inside a decoder block: `Linear("model.layers.0.self_attn.q_proj", 128, 128)`."""

    name: str
    outputs: int
    inputs: int

    @property
    def last_name(self) -> str:
        """`q_proj`"""
        return self.name.rpartition(".")[2]


def check_lora(learner: LearnerConfig) -> None:
    """Raises ConfigError for settings of an adapter that nothing trains, and for what an adapter cannot do."""
    lora = learner.lora
    if not lora.used:
        for name, info in LoraConfig.model_fields.items():
            if name != "rank" and getattr(lora, name) != info.default:
                refuse(f"learner.lora.{name}", getattr(lora, name), "there is no adapter; set learner.lora.rank, too, "
                       "or leave it out")
        return
    if lora.dropout:
        refuse("learner.lora.dropout", lora.dropout, "the learner's log-probs would be of another distribution than "
               "the one that the engine samples from, and of another one in every pass; use 0")
    if learner.reference.refresh_every is not None:
        refuse("learner.reference.refresh_every", learner.reference.refresh_every, "with learner.lora the reference "
               "policy is the base under the adapter, which never changes; leave one of the two out")


def check_publication(config: Config) -> None:
    """Raises ConfigError for engines that cannot be given an adapter alone."""
    if config.learner.lora.publish == "adapter" and isinstance(config.rollout.engine, SglangEngineConfig) \
            and not config.offline:
        refuse("learner.lora.publish", "adapter", "servers are given whole weights: that a server with a loaded "
               "adapter serves it, and from which token on, is not verified; use merged")


def check_layers(lora: LoraConfig, layers: Sequence[Linear]) -> None:
    """Raises ConfigError where the model has no such layers, or where the rank is above what they can have.

    `layers`: of the model.
    """
    if lora.rank is None:
        return
    names = {layer.last_name for layer in layers}
    for target in lora.target_modules:
        if target not in names:
            refuse("learner.lora.target_modules", target, "no linear layer of the model's blocks has this name; there "
                   f"are {', '.join(sorted(names)) or 'none'}")
    if not layers:
        refuse("learner.lora.rank", lora.rank, "the model has no linear layers in numbered blocks that could have an "
               "adapter")
    smallest = min(targets(lora, layers), key=lambda layer: min(layer.outputs, layer.inputs))
    if lora.rank > min(smallest.outputs, smallest.inputs):
        refuse("learner.lora.rank", lora.rank, f"{smallest.name} is {smallest.outputs} x {smallest.inputs}, and no "
               f"change of it has a higher rank than {min(smallest.outputs, smallest.inputs)}; use at most that, or "
               "learner.lora.target_modules without it")


def check_installed(lora: LoraConfig) -> None:
    """Raises ConfigError where an adapter is asked for and its package is not there."""
    if lora.used and importlib.util.find_spec("peft") is None:
        raise ConfigError(f"learner.lora.rank: needs the package peft (got {lora.rank}); pip install 'headway[lora]'")


def targets(lora: LoraConfig, layers: Sequence[Linear]) -> list[Linear]:
    """The layers that get an adapter."""
    return [layer for layer in layers if not lora.target_modules or layer.last_name in lora.target_modules]


def adapter_parameters(lora: LoraConfig, layers: Sequence[Linear]) -> int:
    """Values of the adapter: rank (outputs + inputs) of each layer; 0 without one."""
    return sum((lora.rank or 0) * (layer.outputs + layer.inputs) for layer in targets(lora, layers))


def lora_words(lora: LoraConfig) -> str:
    """`adapter of rank 16 (alpha 32) on q_proj, v_proj, published merged`"""
    where = ", ".join(lora.target_modules) or "every linear layer"
    return f"adapter of rank {lora.rank} (alpha {lora.alpha:g}) on {where}, published {lora.publish}"
