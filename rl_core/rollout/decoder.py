"""Llama, Qwen2 and Qwen3 as plain functions over the parameter tensors, with a key/value cache by rows.

A step is few and large tensor operations: query, key and value in one product, gate and up in one, rotation as one
complex product, attention over the cache written out. Prompts are packed: attention alone sees padding.

Rows do not see each other, down to the bit: in float32 a row of a matrix product has the same bits for every number of
rows from 4 on, and attention has the same bits for every padding to a multiple of 16 (tests check both). So what a
request samples depends on weights, prompt, settings and seed alone.

Shapes: `_N` rows, `_C` contexts, `_T` packed tokens, `_W` written places, `_V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rl_core.errors import WeightsDamaged
from rl_core.rollout.tensors import on_device

FAST_TYPES = ("llama", "qwen2", "qwen3")
FAST_ROPE = ("default", "linear", "llama3", "yarn")
MIN_ROWS = 4
"""Fewer rows than this run through other kernels, with other bits."""
ALIGN = 16
"""Attention lengths are multiples of this, for the same reason."""
FIRST_CAPACITY = 64

Prepared = dict[str, Tensor]
"""Weights in the form that a model runs: cast, joined, reordered."""
Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, rotated queries and keys [T, heads + kv heads, d], values [T, kv heads, d]) -> mixed values [T, heads d]."""


def has_fast_path(config: Any) -> bool:
    """Whether FunctionalModel computes this architecture."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (config.model_type in FAST_TYPES and config.hidden_act == "silu" and layer_types == {"full_attention"}
            and config.rope_parameters.get("rope_type", "default") in FAST_ROPE
            and getattr(config, "quantization_config", None) is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The numbers of a decoder that its weights do not tell."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool

    @property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers configuration."""
        heads = int(config.num_attention_heads)
        return cls(layers=int(config.num_hidden_layers), heads=heads, kv_heads=int(config.num_key_value_heads or heads),
                   head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
                   eps=float(config.rms_norm_eps), tied=bool(config.tie_word_embeddings))


def rotations(config: Any, shape: Shape, context: int) -> Tensor:
    """Rotary embedding as unit complex numbers [context, 1, head_dim / 2], from transformers' own frequencies."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies, scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
    return (torch.complex(angles.cos(), angles.sin()) * scaling)[:, None, :]


def pair_order(head_dim: int) -> Tensor:
    """Order of a head's rows that puts the two halves which rotate together side by side: 0, d/2, 1, d/2 + 1, ...

    Queries and keys are reordered alike, so their products stay; the rotation becomes one complex product.
    """
    half = head_dim // 2
    return torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).reshape(-1)


def prepare_decoder(named: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype, device: torch.device) -> Prepared:
    """Query, key and value weights joined and reordered, gate and up joined, norm weights times sqrt(size).

    The factor belongs to `_normalize`, which divides by the root of the sum of squares instead of their mean.
    """
    order = pair_order(shape.head_dim)

    def get(name: str) -> Tensor:
        return named[name].to(device).to(dtype)

    def by_pairs(tensor: Tensor) -> Tensor:
        return tensor.view(-1, shape.head_dim, *tensor.shape[1:])[:, order].reshape(tensor.shape)

    def norm(name: str) -> Tensor:
        return get(name) * math.sqrt(named[name].shape[-1])

    ready: Prepared = {"embed": get("model.embed_tokens.weight"), "norm": norm("model.norm.weight")}
    if not shape.tied:
        ready["head"] = get("lm_head.weight")
    for i in range(shape.layers):
        layer, attention = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        for kind in ("weight", "bias"):
            if attention + "q_proj." + kind in named:
                q, k, v = (get(f"{attention}{part}_proj.{kind}") for part in "qkv")
                ready[f"{i}.qkv.{kind}"] = torch.cat([by_pairs(q), by_pairs(k), v])
            if attention + "o_proj." + kind in named:
                ready[f"{i}.out.{kind}"] = get(attention + "o_proj." + kind)
            if layer + "mlp.gate_proj." + kind in named:
                ready[f"{i}.gate_up.{kind}"] = torch.cat([get(f"{layer}mlp.{p}_proj.{kind}") for p in ("gate", "up")])
                ready[f"{i}.down.{kind}"] = get(layer + "mlp.down_proj." + kind)
        if attention + "q_norm.weight" in named:
            q, k = (norm(f"{attention}{part}_norm.weight")[order] for part in "qk")
            ready[f"{i}.qk_norm"] = torch.cat([q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)])
        ready[f"{i}.norm1"] = norm(layer + "input_layernorm.weight")
        ready[f"{i}.norm2"] = norm(layer + "post_attention_layernorm.weight")
    return {name: tensor.to(device).contiguous() for name, tensor in ready.items()}


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer. Views of the prepared tensors: `install` copies into them."""

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm2: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, weights: Prepared, i: int) -> Layer:
        """Layer `i` of the prepared weights."""
        get = weights.get
        return cls(norm1=weights[f"{i}.norm1"], qkv=weights[f"{i}.qkv.weight"], qkv_bias=get(f"{i}.qkv.bias"),
                   qk_norm=get(f"{i}.qk_norm"), out=weights[f"{i}.out.weight"].t(), out_bias=get(f"{i}.out.bias"),
                   norm2=weights[f"{i}.norm2"], gate_up=weights[f"{i}.gate_up.weight"],
                   gate_up_bias=get(f"{i}.gate_up.bias"), down=weights[f"{i}.down.weight"].t(),
                   down_bias=get(f"{i}.down.bias"))


class FunctionalModel:
    """Llama, Qwen2 and Qwen3 by functions over tensors, with a key/value cache by rows."""

    def __init__(self, config: Any, named: Mapping[str, Tensor], slots: int, dtype: torch.dtype, device: torch.device,
                 context: int) -> None:
        self.shape = Shape.of(config)
        self.context = context
        self._slots, self._dtype, self._device = max(slots, MIN_ROWS), dtype, device
        self._expected: dict[str, torch.Size] | None = None
        self._weights = self.prepare(named)
        self._expected = {name: tensor.shape for name, tensor in self._weights.items()}
        self._layers = [Layer.of(self._weights, i) for i in range(self.shape.layers)]
        self._embed, self._norm = self._weights["embed"], self._weights["norm"]
        self._head = self._embed if self.shape.tied else self._weights["head"]
        self.vocabulary = self._embed.shape[0]
        self._rotations = rotations(config, self.shape, context).to(device)
        self._scale = self.shape.head_dim**-0.5
        self._floors = {size: torch.tensor(math.sqrt(size * self.shape.eps), device=device)
                        for size in (self._norm.shape[0], self.shape.head_dim)}
        self._capacity = 0
        self._grow(FIRST_CAPACITY)

    # -- weights

    def prepare(self, named: Mapping[str, Tensor]) -> Prepared:
        try:
            ready = prepare_decoder(named, self.shape, self._dtype, self._device)
        except torch.OutOfMemoryError:
            raise
        except (KeyError, RuntimeError) as error:
            raise WeightsDamaged(f"weights do not fit the model: {error}") from error
        if self._expected is not None and {name: tensor.shape for name, tensor in ready.items()} != self._expected:
            raise WeightsDamaged("weights do not fit the model: other tensors or shapes than the model directory has")
        return ready

    def install(self, prepared: Prepared) -> None:
        for name, tensor in prepared.items():
            self._weights[name].copy_(tensor)

    # -- cache

    def _grow(self, length: int) -> None:
        """Room for `length` places a row: doubled, so that a long answer pays for the copy only log2 times."""
        if length <= self._capacity:
            return
        s = self.shape
        most = -(-self.context // ALIGN) * ALIGN
        capacity = min(most, max(FIRST_CAPACITY, 1 << (length - 1).bit_length()))
        cache = torch.zeros(s.layers, 2, self._slots, s.kv_heads, capacity, s.head_dim, dtype=self._dtype,
                            device=self._device)
        if self._capacity:
            cache[..., :self._capacity, :] = self._cache
        self._cache, self._capacity = cache, capacity
        self._flat = [(layer[0].view(-1, s.head_dim), layer[1].view(-1, s.head_dim)) for layer in cache]
        self._rows = [(layer[0].view(-1, capacity, s.head_dim), layer[1].view(-1, capacity, s.head_dim))
                      for layer in cache]
        self._row_start = torch.arange(self._slots * s.kv_heads, device=self._device) * capacity
        self._places = torch.arange(capacity, device=self._device)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64], length: int) -> None:
        src, dst = on_device(source, self._device), on_device(target, self._device)
        self._cache[:, :, dst, :, :length] = self._cache[:, :, src, :, :length]

    # -- forward

    def decode(self, token_N: NDArray[np.int64], position_N: NDArray[np.int64]) -> Tensor:
        s, n = self.shape, len(token_N)
        if n < MIN_ROWS:  # idle rows keep the kernels, and so the bits, the same
            token_N = np.concatenate([token_N, np.zeros(MIN_ROWS - n, np.int64)])
            position_N = np.concatenate([position_N, np.zeros(MIN_ROWS - n, np.int64)])
        rows, length = len(token_N), -(-(int(position_N.max()) + 1) // ALIGN) * ALIGN
        self._grow(length)
        token, position = on_device(token_N, self._device), on_device(position_N, self._device)
        each = position.repeat_interleave(s.kv_heads)
        place = self._row_start[:rows * s.kv_heads] + each
        # -inf behind each row's own position; scores get it added inside the product.
        hidden_places = (self._places[:length] > each[:, None])[:, None]
        bias = torch.zeros(hidden_places.shape, dtype=self._dtype, device=self._device)
        bias.masked_fill_(hidden_places, -torch.inf)

        def attend(i: int, qk: Tensor, v: Tensor) -> Tensor:
            (flat_k, flat_v), (rows_k, rows_v) = self._flat[i], self._rows[i]
            flat_k.index_copy_(0, place, qk[:, s.heads:].reshape(-1, s.head_dim))
            flat_v.index_copy_(0, place, v.reshape(-1, s.head_dim))
            query = qk[:, :s.heads].reshape(-1, s.groups, s.head_dim)
            keys, values = rows_k[:rows * s.kv_heads, :length], rows_v[:rows * s.kv_heads, :length]
            # Written out: this is faster than scaled_dot_product_attention for one query, and 16 times so in bfloat16.
            scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=self._scale)
            shares = torch.softmax(scores, -1, dtype=torch.float32).to(self._dtype)
            return torch.bmm(shares, values).view(rows, s.heads * s.head_dim)

        hidden = self._forward(token, self._rotations[position], attend)
        return F.linear(hidden, self._head)[:n].float()

    def prefill(self, contexts: Sequence[NDArray[np.int32]], owner_N: Sequence[int], first: int) -> Tensor:
        s = self.shape
        if sum(map(len, contexts)) < MIN_ROWS:  # a context of nobody keeps the kernels, and so the bits, the same
            contexts = [*contexts, np.zeros(MIN_ROWS, np.int32)]
        lengths = np.array([len(context) for context in contexts])
        width = -(-int(lengths.max()) // ALIGN) * ALIGN
        self._grow(width)
        to = self._device
        packed = pack(lengths, width, np.asarray(owner_N), to)
        token = on_device(np.concatenate(contexts).astype(np.int64), to)
        target = packed.row_position_W + (first + packed.row_W) * s.kv_heads * self._capacity
        place = (target[:, None] + torch.arange(s.kv_heads, device=to) * self._capacity).view(-1)

        def attend(i: int, qk: Tensor, v: Tensor) -> Tensor:
            flat_k, flat_v = self._flat[i]
            flat_k.index_copy_(0, place, qk[:, s.heads:][packed.row_token_W].reshape(-1, s.head_dim))
            flat_v.index_copy_(0, place, v[packed.row_token_W].reshape(-1, s.head_dim))
            padded = torch.zeros(len(contexts) * width, s.heads + 2 * s.kv_heads, s.head_dim, dtype=qk.dtype, device=to)
            padded.index_copy_(0, packed.padded_T, torch.cat([qk, v], dim=1))
            whole = padded.view(len(contexts), width, -1, s.head_dim).transpose(1, 2)
            query, keys, values = whole.split_with_sizes([s.heads, s.kv_heads, s.kv_heads], dim=1)
            # Padding is on the right and attention causal: no real token sees it.
            mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=s.groups > 1)
            return mixed.transpose(1, 2).reshape(len(contexts) * width, -1)[packed.padded_T]

        hidden = self._forward(token, self._rotations[packed.position_T], attend)
        last = hidden[packed.last_C]
        last = F.pad(last, (0, 0, 0, max(0, MIN_ROWS - len(last))))
        return F.linear(last, self._head)[torch.as_tensor(owner_N, device=to)].float()

    def _forward(self, token_T: Tensor, rotation_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden] behind the last norm. `attend(layer, qk, v)` mixes over places."""
        s = self.shape
        n_qk = s.heads + s.kv_heads
        x, tokens = F.embedding(token_T, self._embed), len(token_T)
        for i, w in enumerate(self._layers):
            qkv = F.linear(self._normalize(x, w.norm1), w.qkv, w.qkv_bias).view(tokens, -1, s.head_dim)
            qk = qkv[:, :n_qk]
            if w.qk_norm is not None:
                qk = self._normalize(qk, w.qk_norm)
            x = self._add(x, attend(i, _rotate(qk, rotation_T), qkv[:, n_qk:]), w.out, w.out_bias)
            gate, up = F.linear(self._normalize(x, w.norm2), w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
            x = self._add(x, F.silu(gate).mul_(up), w.down, w.down_bias)
        return self._normalize(x, self._norm)

    def _normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm: x / sqrt(mean(x^2) + eps) * w, with sqrt(size) inside the prepared weight; sums in float32.

        sqrt(sum + size eps) is one hypot of the vector norm; the product and the quotient are the only passes over x.
        """
        # torch names no types for its functions of linalg.
        size = cast(Tensor, torch.linalg.vector_norm(  # pyright: ignore[reportUnknownMemberType]
            x, dim=-1, keepdim=True, dtype=torch.float32))
        return (x / torch.hypot(size, self._floors[x.shape[-1]])).to(x.dtype).mul_(weight)

    @staticmethod
    def _add(x: Tensor, change: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        total = torch.addmm(x, change, weight)
        return total if bias is None else total.add_(bias)


def _rotate(x: Tensor, rotation_T: Tensor) -> Tensor:
    """Rotary embedding of heads whose halves lie in pairs: one complex product, in float32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation_T).view(x.shape).to(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Where the packed tokens of C contexts go. Index tensors; `_T` over tokens, `_W` over written places."""

    position_T: Tensor
    padded_T: Tensor
    """Place in a [C * width] layout."""
    last_C: Tensor
    """Token that is the last of its context."""
    row_W: Tensor
    """Row that takes the token, from 0."""
    row_token_W: Tensor
    row_position_W: Tensor


def pack(lengths_C: NDArray[np.int64], width: int, owner_N: NDArray[np.int64], device: torch.device) -> Packing:
    """Row i takes context `owner_N[i]`: `pack([3, 2], 16, [0, 0, 1])` writes the tokens 0 1 2, 0 1 2, 3 4."""
    starts = np.cumsum(lengths_C) - lengths_C
    position = _ranges(lengths_C)
    copied = lengths_C[owner_N]
    row_position = _ranges(copied)
    columns = {
        "position_T": position,
        "padded_T": np.repeat(np.arange(len(lengths_C)) * width, lengths_C) + position,
        "last_C": starts + lengths_C - 1,
        "row_W": np.repeat(np.arange(len(owner_N)), copied),
        "row_token_W": np.repeat(starts[owner_N], copied) + row_position,
        "row_position_W": row_position,
    }
    return Packing(**{name: on_device(column, device) for name, column in columns.items()})


def _ranges(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`_ranges([3, 2])` -> `[0, 1, 2, 0, 1]`."""
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
