"""Model FLOPs of a training step, and the peak that they are a share of: MFU (frames.md section 4).

Counted is what the model must compute, whatever the implementation does: a group's prompt once and every answer, all
matrix products forward and backward, attention over the places that a causal mask leaves. Recomputation, padding and a
prompt that is computed once per pack do not count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rl_core.model_setup import EXPERTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.experience.reader import ClaimRows

TRIES = 5
SIDES = {"cpu": 512, "cuda": 4096}
"""Rows and columns of the product that the peak is measured with."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What FLOPs are counted by. `ModelSize(parameters=10**6, layers=2, width=128)`."""

    parameters: int
    """In matrix products: all but the input embeddings, unless the head shares them."""
    layers: int
    width: int
    """Query heads times head dimension."""

    def forward_flops(self, tokens: float, pairs: float) -> float:
        """Of one forward over `tokens`, which see `pairs` of (token, token before or itself): 2 N T + 4 l d pairs."""
        return 2.0 * self.parameters * tokens + 4.0 * self.layers * self.width * pairs


def model_size(model: PreTrainedModel) -> ModelSize | None:
    """None where it cannot be known: experts, of which a token sees some, or a configuration without the usual names.

    To be asked before the model is sharded.
    """
    config, whole = cast(Any, model.config), cast(Any, model)
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    experts = max(getattr(config, name, None) or 0 for name in EXPERTS)
    hidden = getattr(config, "hidden_size", None)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)) or experts > 1:
        return None
    embeddings, head = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
    looked_up = 0 if head is embeddings else embeddings.numel()
    return ModelSize(parameters=sum(p.numel() for p in model.parameters()) - looked_up, layers=layers,
                     width=heads * (getattr(config, "head_dim", None) or hidden // heads))


def claim_places(rows: ClaimRows) -> tuple[float, float]:
    """`(tokens, pairs)` of a claim: prompts once and all answers; an answer sees its prompt and itself.

    A prompt of 4 with answers of 2 and 3: 9 tokens; 8 + (8 + 2) + (12 + 4.5) = 34.5 pairs.
    """
    prompt_G = np.diff(rows.prompt_offsets).astype(np.float64)
    answer_N = rows.length_N.astype(np.float64)
    pairs = (prompt_G**2).sum() / 2 + (prompt_G[rows.context_N] * answer_N + answer_N**2 / 2).sum()
    return float(prompt_G.sum() + answer_N.sum()), float(pairs)


def step_flops(size: ModelSize, tokens: float, pairs: float, *, passes: int, proximal: bool,
               frozen: bool = False) -> float:
    """Of one training step: a backward is two forwards, so `passes` of updates are 3 each, a proximal pass is 1.

    `frozen`: under an adapter a backward is one forward, since the base has no gradient.
    """
    return ((2 if frozen else 3) * passes + int(proximal)) * size.forward_flops(tokens, pairs)


@cache
def measured_peak(device: str, dtype: str, threads: int) -> float:
    """FLOP/s of a large matrix product here, the best of a few: 20 ms on a CPU, once per process and setting."""
    side = SIDES[device]
    values = torch.ones(side, side, device=device, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    best = float("inf")
    for _ in range(TRIES):
        begun = time.perf_counter()
        product = values @ values
        float(product[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begun)
    return 2.0 * side**3 / best
