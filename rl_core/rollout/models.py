"""Forward passes over rows: what the embedded engine runs, one call for all requests.

A request lives in one row; the running ones are rows 0..n-1. `prefill` reads whole contexts into the next rows,
`decode` adds one token to every row, `move` fills the rows of requests that ended with those of the last ones, so that
every step works on views and gathers nothing.

`decoder.FunctionalModel` runs Llama, Qwen2 and Qwen3; `RecomputeModel` here runs any other causal model of transformers
by whole forward passes without a cache: right, and slow for long answers.

Shapes: `_N` rows, `_V` vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from rl_core.errors import ConfigError, WeightsDamaged
from rl_core.rollout.decoder import FIRST_CAPACITY, FunctionalModel, Prepared, has_fast_path
from rl_core.rollout.tensors import on_device

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOGITS_AT_ONCE = 1 << 26
"""Most logits (values) that RecomputeModel holds at a time."""


class SlotModel(Protocol):
    """What the engine asks of a model. One thread only, except `prepare`, which touches nothing."""

    vocabulary: int
    context: int
    """Longest context, tokens."""

    def prefill(self, contexts: Sequence[NDArray[np.int32]], owner_N: Sequence[int], first: int) -> Tensor:
        """Read contexts into rows first..first+N-1, row i taking `contexts[owner_N[i]]` (equal prompts are read once).
        Returns the logits of the next token [N, V], float32."""
        ...

    def decode(self, token_N: NDArray[np.int64], position_N: NDArray[np.int64]) -> Tensor:
        """Add one token to rows 0..N-1, each at its position. Returns the logits of the next token [N, V], float32."""
        ...

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64], length: int) -> None:
        """Copy the first `length` places of the source rows over the target rows."""
        ...

    def prepare(self, named: Mapping[str, Tensor]) -> Prepared:
        """The named parameters in the model's own form. Raises WeightsDamaged if names or shapes do not fit."""
        ...

    def install(self, prepared: Prepared) -> None:
        """Serve these weights from now on. What the rows hold is kept."""
        ...


def load_model(directory: Path, *, slots: int, dtype: Dtype, device: str, max_context: int | None = None) -> SlotModel:
    """The model of a Hugging Face directory, with its weights. Raises ConfigError for one that cannot be run."""
    from transformers import AutoConfig

    config = cast(Any, AutoConfig).from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    limit = int(config.get_text_config().max_position_embeddings)
    context = min(limit, max_context or limit)
    place = torch.device(device)
    if has_fast_path(config):
        return FunctionalModel(config, read_model_tensors(directory), slots, DTYPES[dtype], place, context)
    return RecomputeModel(directory, slots, DTYPES[dtype], place, context)


def read_model_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of the directory's safetensors files by name, on the host."""
    index = directory / "model.safetensors.index.json"
    names: list[str] = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for file in names for name, tensor in load_file(directory / file).items()}


class RecomputeModel:
    """Any causal model of transformers, by forward passes over whole contexts: no cache, quadratic in the length."""

    def __init__(self, directory: Path, slots: int, dtype: torch.dtype, device: torch.device, context: int) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model = cast(Any, AutoModelForCausalLM).from_pretrained(directory, dtype=dtype, local_files_only=True,
                                                                    trust_remote_code=False)
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(f"model.path: {str(directory)!r} cannot be loaded ({error})") from error
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._parameters = cast(dict[str, Tensor], dict(self._model.named_parameters()))
        self.vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self.context = context
        self._tokens = np.zeros((slots, FIRST_CAPACITY), np.int64)
        self._lengths = np.zeros(slots, np.int64)
        self._dtype, self._device = dtype, device

    def prepare(self, named: Mapping[str, Tensor]) -> Prepared:
        ready = {name: named[name] for name in self._parameters if name in named}
        wrong = [name for name, own in self._parameters.items() if name not in ready or ready[name].shape != own.shape]
        if wrong:
            raise WeightsDamaged(f"weights do not fit the model: {wrong[0]} is absent or has another shape")
        return {name: tensor.to(self._device, self._dtype) for name, tensor in ready.items()}

    def install(self, prepared: Prepared) -> None:
        for name, tensor in prepared.items():
            self._parameters[name].copy_(tensor)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64], length: int) -> None:
        self._tokens[target] = self._tokens[source]
        self._lengths[target] = self._lengths[source]

    def prefill(self, contexts: Sequence[NDArray[np.int32]], owner_N: Sequence[int], first: int) -> Tensor:
        self._widen(max(map(len, contexts)))
        for row, owner in enumerate(owner_N, start=first):
            self._tokens[row, :len(contexts[owner])] = contexts[owner]
            self._lengths[row] = len(contexts[owner])
        # Equal contexts are read once: by the first row that has each.
        firsts = [first + owner_N.index(owner) for owner in range(len(contexts))]
        return self._logits(np.array(firsts))[torch.as_tensor(owner_N, device=self._device)]

    def decode(self, token_N: NDArray[np.int64], position_N: NDArray[np.int64]) -> Tensor:
        rows = np.arange(len(token_N))
        self._widen(int(position_N.max()) + 1)
        self._tokens[rows, position_N] = token_N
        self._lengths[rows] = position_N + 1
        return self._logits(rows)

    def _widen(self, length: int) -> None:
        if length > self._tokens.shape[1]:
            extra = np.zeros((len(self._tokens), length), np.int64)
            self._tokens = np.concatenate([self._tokens, extra], axis=1)

    def _logits(self, rows: NDArray[np.int64]) -> Tensor:
        """Logits behind the last token of these rows [N, V]; few rows at a time, since all places have logits."""
        chunk = max(1, LOGITS_AT_ONCE // (self.vocabulary * int(self._lengths[rows].max())))
        parts: list[Tensor] = []
        for begin in range(0, len(rows), chunk):
            some = rows[begin:begin + chunk]
            lengths = on_device(self._lengths[some], self._device)
            ids = on_device(self._tokens[some, :int(lengths.max())], self._device)
            mask = torch.arange(ids.shape[1], device=self._device) < lengths[:, None]
            logits = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
            parts.append(logits[torch.arange(len(some), device=self._device), lengths - 1].float())
        return torch.cat(parts)
