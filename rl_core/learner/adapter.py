"""Low-rank adapters in a loaded model, by peft: put in, named, and switched off for a while.

peft replaces linear layers in place; the model stays a stock Hugging Face model, so packed attention, log-probs of the
head and sharding know nothing of it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rl_core.errors import ConfigError
from rl_core.lora.plan import Linear, check_layers, targets
from rl_core.lora.settings import LoraConfig
from rl_core.seeds import derive

NAME = "default"
"""Of the adapter, within peft."""
UP, DOWN = f".lora_B.{NAME}.weight", f".lora_A.{NAME}.weight"
BASE = ".base_layer."


def add_adapter(model: nn.Module, lora: LoraConfig, *, seed: int, directory: Path) -> None:
    """Put an adapter that does nothing yet into the model and freeze all else: B is 0, A is drawn by layer.

    Raises ConfigError for layers that cannot have one, and where peft is not installed.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"learner.lora.rank: needs the package peft ({error}); pip install 'headway[lora]'"
                          ) from error
    assert lora.rank is not None
    layers = linear_layers(model)
    check_layers(lora, layers)
    chosen = [layer.name for layer in targets(lora, layers)]
    if not chosen:
        raise ConfigError(f"learner.lora.rank: {directory} has no linear layers that could have an adapter")
    model.requires_grad_(False)
    with cast(Any, torch.random).fork_rng(devices=[]):  # peft draws A, too; its lots count for nothing
        cast(Any, inject_adapter_in_model)(
            PeftConfig(r=lora.rank, lora_alpha=cast(int, lora.alpha), target_modules=chosen, lora_dropout=0.0,
                       bias="none"), model, adapter_name=NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(DOWN):
                lots = torch.Generator().manual_seed(derive(seed, "lora", name.removesuffix(DOWN)))
                bound = parameter.shape[1] ** -0.5  # as nn.Linear, whose bound peft takes
                parameter.copy_((torch.rand(parameter.shape, generator=lots) * 2 - 1) * bound)
            elif name.endswith(UP):
                parameter.zero_()


def linear_layers(model: nn.Module) -> list[Linear]:
    """The linear layers inside the blocks of a model: all whose name has a number in it, the head left out."""
    head = cast(Any, model).get_output_embeddings()
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return [Linear(name, module.out_features, module.in_features) for name, module in modules
            if isinstance(module, nn.Linear) and module is not head and any(part.isdigit() for part in name.split("."))]


def adapter_weights(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The adapter's parameters of those of a model, by names without peft's own name for it."""
    return {name.replace(f".{NAME}.weight", ".weight"): parameter for name, parameter in named
            if name.endswith((UP, DOWN))}


def base_weights(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The other parameters, by the names that they have in the model without an adapter."""
    return {name.replace(BASE, "."): parameter for name, parameter in named if not name.endswith((UP, DOWN))}


@contextmanager
def without_adapter(model: nn.Module) -> Generator[None, None, None]:
    """The model is its base while this lasts: for passes without gradient.

    By the scale of each layer and not by peft's own switch, which takes the gradient from the parameters meanwhile: a
    sharded model that is gathered then would keep them so.
    """
    layers = [cast("dict[str, float]", module.scaling) for module in model.modules() if hasattr(module, "lora_A")]
    scales = [layer[NAME] for layer in layers]
    try:
        for layer in layers:
            layer[NAME] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer[NAME] = scale
