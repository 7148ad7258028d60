"""Attention over packed tokens, as a Hugging Face attention function: no N x N mask, on CPU too.

Stock models keep packed sequences apart only through a dense mask, and only with `use_cache=False`; this function never
sees a mask or a cache. What the pack (packing.py) wants arrives as the keyword `headway_rows`, straight through the
model's forward. Rows of like length are one `scaled_dot_product_attention` call, padded on the right, where a causal
row needs no mask at all. An answer that shares its prompt is a row of its own queries over the keys of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "headway_packed"
"""Name of the function in `config._attn_implementation`. Not known to the mask functions, so models build no mask."""


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call of a pack, on the device of the model (packing.py `Attention`)."""

    query: Tensor
    """`[R, Q]` int64"""
    key: Tensor | None = None
    """`[R, K]` int64; None: the queries, causal."""
    before_R: Tensor | None = None
    """`[R]` or `[1]` int64: keys in front of the first query."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Attention of one pack. `Rows((Call(here[None]),), here)` is one sequence, where `here` counts its tokens."""

    calls: tuple[Call, ...]
    home_P: Tensor
    """int64: where each place finds its result in the flattened, concatenated queries."""
    masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(
        default_factory=dict[tuple[int, "int | None", torch.dtype], Tensor], repr=False)
    """Of one forward, whose layers share them: by number of the call, window and dtype."""

    def afresh(self) -> Rows:
        """For another forward."""
        return replace(self, masks={})

    def mask(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the logits of a call, `[R or 1, 1, Q, K]`: 0 or minus infinity. None: causal, no window."""
        call = self.calls[number]
        queries, keys = call.query.shape[1], (call.query if call.key is None else call.key).shape[1]
        if call.before_R is None and (window is None or keys <= window):
            return None
        found = self.masks.get((number, window, dtype))
        if found is None:
            device = self.home_P.device
            before_R = torch.zeros(1, dtype=torch.int64, device=device) if call.before_R is None else call.before_R
            distance = (before_R[:, None, None] + torch.arange(queries, device=device)[:, None]
                        - torch.arange(keys, device=device)[None])
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            found = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]
            self.masks[number, window, dtype] = found
        return found


def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                     scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
                     headway_rows: Rows | None = None, **others: Any) -> tuple[Tensor, None]:
    """Attention of every row to its prompt and to itself.

    Args:
        query: `[1, heads, P, head_dim]`; key and value may have fewer heads (grouped queries).
        sliding_window: keys farther back than this are not seen.
        headway_rows: of the pack; required.

    Returns `[1, P, heads, head_dim]` and no weights. Raises ValueError for what it cannot do (soft caps, sinks, masks).
    """
    refused = [name for name in ("softcap", "s_aux", "sinks") if others.get(name) is not None]
    if headway_rows is None or attention_mask is not None or refused or dropout:
        raise ValueError(f"packed attention takes rows and no mask, cap, sink or dropout (got rows: "
                         f"{headway_rows is not None}, mask: {attention_mask is not None}, dropout {dropout}, "
                         f"{refused})")
    grouped = query.shape[1] != key.shape[1]
    shared_by = query.shape[1] // key.shape[1]
    of_query, of_key, of_value = (_Places(x) for x in (query, key, value))
    outputs: list[Tensor] = []
    for number, call in enumerate(headway_rows.calls):
        keys = call.query if call.key is None else call.key
        mask = headway_rows.mask(number, sliding_window, query.dtype)
        keys_here, values_here = of_key.at(keys), of_value.at(keys)
        if (spread := grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32)):
            # No kernel but the plain one, which keeps all weights, takes grouped queries so on CUDA.
            keys_here, values_here = (x.repeat_interleave(shared_by, dim=1) for x in (keys_here, values_here))
        out = scaled_dot_product_attention(of_query.at(call.query), keys_here, values_here, attn_mask=mask,
                                           is_causal=mask is None, scale=scaling, enable_gqa=grouped and not spread)
        outputs.append(out.transpose(1, 2).reshape(call.query.numel(), -1))
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return together.index_select(0, headway_rows.home_P).view(1, -1, query.shape[1], value.shape[-1]), None


class _Places:
    """Values of every place, `[P, heads * head_dim]`: whole rows are gathered, which is far faster than by element."""

    def __init__(self, values: Tensor) -> None:
        """`values`: `[1, heads, P, head_dim]`."""
        self._shape = values.shape[1], values.shape[3]
        self._flat = values[0].transpose(0, 1).flatten(1)

    def at(self, places: Tensor) -> Tensor:
        """`[R, L]` -> `[R, heads, L, head_dim]`."""
        return self._flat.index_select(0, places.flatten()).view(*places.shape, *self._shape).transpose(1, 2)


# transformers names no type for the function.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)  # pyright: ignore[reportUnknownMemberType]
