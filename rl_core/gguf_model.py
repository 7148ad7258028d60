"""A GGUF file of a Llama as a Hugging Face directory: dequantised tensors under their Hugging Face names, in bfloat16.

Written here, since transformers loads GGUF only with accelerate beside it, and refuses to save what it has loaded. What
is particular: the rows of query and key weights lie in another order in GGUF, pairs that rotate together side by side.
Needs the package gguf (extra `smollm`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.errors import BrokenFile

OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
           "output.weight": "lm_head.weight"}
IN_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
SHAPE = {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
         "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
         "num_key_value_heads": "attention.head_count_kv", "max_position_embeddings": "context_length",
         "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
         "vocab_size": "vocab_size"}
"""Our settings, and what they are called in the file, behind `llama.`."""
SPECIAL = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def convert_llama(source: Path, target: Path) -> None:
    """Write config, generation config, weights, tokenizer and chat template of the GGUF file into the directory.

    Raises BrokenFile for a file that is no GGUF, or of another architecture.
    """
    gguf: Any = importlib.import_module("gguf")
    try:
        reader: Any = gguf.GGUFReader(source)
        facts: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise BrokenFile(f"{source}: is no GGUF file that can be read ({error})") from error
    if facts.get("general.architecture") != "llama":
        raise BrokenFile(f"{source}: is a {facts.get('general.architecture')}; only Llamas are converted")
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    shape = {name: facts[f"llama.{key}"] for name, key in SHAPE.items()}
    special = {name: facts[f"tokenizer.ggml.{key}"] for name, key in SPECIAL.items()}
    tensors = {name: tensor for part in reader.tensors for name, tensor in _converted(
        part.name, gguf.dequantize(part.data, part.tensor_type), shape).items()}
    config: Any = cast(Any, LlamaConfig)(**shape, **special, tie_word_embeddings="lm_head.weight" not in tensors,
                                         architectures=["LlamaForCausalLM"], dtype="bfloat16")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    (target / "generation_config.json").write_text(json.dumps(special) + "\n")
    tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(source.parent, gguf_file=source.name,
                                                              local_files_only=True)
    tokenizer.save_pretrained(target)


def _converted(name: str, values: NDArray[np.float32], shape: Mapping[str, Any]) -> dict[str, Tensor]:
    """One tensor by its Hugging Face name: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in OUTSIDE:
        return {OUTSIDE[name]: _rounded(values)}
    _, layer, part, kind = name.split(".")
    heads = {"attn_q": shape["num_attention_heads"], "attn_k": shape["num_key_value_heads"]}.get(part)
    if heads is not None:
        values = in_halves(values, heads)
    return {f"model.layers.{layer}.{IN_LAYER[part]}.{kind}": _rounded(values)}


def in_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from GGUF's order (0, d/2, 1, d/2 + 1, ...) into that of transformers (0, 1, ..., d - 1)."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _rounded(values: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(np.array(values)).to(torch.bfloat16)  # pyright: ignore[reportUnknownMemberType]
