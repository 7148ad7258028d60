"""An adapter as named tensors: `<layer>.lora_A.weight` [rank, inputs] and `<layer>.lora_B.weight` [outputs, rank],
where the model has `<layer>.weight`. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rl_core.errors import WeightsDamaged

A, B = ".lora_A.weight", ".lora_B.weight"


def is_adapter(names: Iterable[str]) -> bool:
    """Whether these are the tensors of an adapter, and not those of a model."""
    return any(name.endswith((A, B)) for name in names)


def merged(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """All weights of the model with the adapter in them: W + scale B A in float32 where it has an adapter, else the
    tensors of `base` themselves, also where B is 0.

    Example: `merged({"q.weight": W}, {"q.lora_A.weight": A, "q.lora_B.weight": B}, 2.0)["q.weight"]` -> W + 2 B A.

    Raises WeightsDamaged for an adapter of another model.
    """
    whole = dict(base)
    for name, up_OR in adapter.items():
        if name.endswith(A):
            continue
        layer = name.removesuffix(B)
        weight_OI, down_RI = base.get(layer + ".weight"), adapter.get(layer + A)
        if layer == name or weight_OI is None or down_RI is None \
                or weight_OI.shape != (up_OR.shape[0], down_RI.shape[1]) or up_OR.shape[1] != down_RI.shape[0]:
            raise WeightsDamaged(f"an adapter of another model: {name} {tuple(up_OR.shape)} has no layer of its shape")
        if bool(up_OR.any()):
            with torch.no_grad():
                up_OR, down_RI = (part.to(weight_OI.device, torch.float32) for part in (up_OR, down_RI))
                whole[layer + ".weight"] = weight_OI.float() + scale * (up_OR @ down_RI)
    return whole
