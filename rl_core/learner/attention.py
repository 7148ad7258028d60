"""Per-sequence attention over packed tokens, as a Hugging Face attention function: no N x N mask, on CPU too.

Stock models keep packed sequences apart only through a dense mask, and only with `use_cache=False`; this function never
sees a mask or a cache. The rows of the pack (packing.py) arrive as the keyword `headway_rows`, straight through the
model's forward. Rows of like length are one causal `scaled_dot_product_attention` call, padded on the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "headway_packed"
"""Name of the function in `config._attn_implementation`. Not known to the mask functions, so models build no mask."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Attention rows of one pack on the device of the model."""

    index: tuple[Tensor, ...]
    """One `[R, L]` int64 per call."""
    home_P: Tensor
    """int64: where each place finds its result in the flattened, concatenated calls."""


def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                     scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
                     headway_rows: Rows | None = None, **others: Any) -> tuple[Tensor, None]:
    """Attention of every row to itself alone.

    Args:
        query: `[1, heads, P, head_dim]`; key and value may have fewer heads (grouped queries).
        sliding_window: keys farther back than this are not seen (a band mask per call).
        headway_rows: of the pack; required.

    Returns `[1, P, heads, head_dim]` and no weights. Raises ValueError for what it cannot do (soft caps, sinks, masks).
    """
    refused = [name for name in ("softcap", "s_aux", "sinks") if others.get(name) is not None]
    if headway_rows is None or attention_mask is not None or refused or dropout:
        raise ValueError(f"packed attention takes rows and no mask, cap, sink or dropout (got rows: "
                         f"{headway_rows is not None}, mask: {attention_mask is not None}, dropout {dropout}, "
                         f"{refused})")
    grouped = query.shape[1] != key.shape[1]
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]
    outputs: list[Tensor] = []
    for index in headway_rows.index:
        rows, length = index.shape
        at = index.reshape(-1)
        q, k, v = (x[at].view(rows, length, *x.shape[1:]).transpose(1, 2) for x in flat)
        band = _band(length, sliding_window, query.device)
        out = scaled_dot_product_attention(q, k, v, attn_mask=band, is_causal=band is None, scale=scaling,
                                           enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).reshape(rows * length, *out.shape[1::2]))
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return together[headway_rows.home_P][None], None


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """`[L, L]` bool mask of a sliding window; None where the window covers the row."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance < window)


# transformers names no type for the function.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)  # pyright: ignore[reportUnknownMemberType]
