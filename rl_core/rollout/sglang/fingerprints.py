"""What a server should say of its weights, tensor by tensor, computed from the weights that were published.

A server answers 16 hex digits per tensor: on a CPU the first 8 bytes of the SHA-256 of its bytes. It holds some tensors
otherwise than the file: attention's and the MLP's inputs joined, the vocabulary filled up to a multiple of 64, another
dtype. Which of its names can be computed is found out at its start, on weights that are known (`computable`); the
others, and all names of servers whose hash is another one (GPU) or that hold a share each (tensor parallelism), must
only change with a version, and be the same on all servers that serve it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rl_core.weights import tensor_bytes

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""A server's name of several tensors, one below the other."""
VOCABULARY_MULTIPLE = 64
HASHED = 16


def tensor_hash(tensor: Tensor) -> str:
    """As a CPU server computes it."""
    return hashlib.sha256(tensor_bytes(tensor).data).hexdigest()[:HASHED]


def expected(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> set[str]:
    """The hashes that a CPU server may answer for one of its names; empty where the tensors do not say."""
    return {tensor_hash(tensor.to(dtype)) for tensor in _as_held(name, tensors)}


def _as_held(name: str, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    if name in tensors:
        tensor = tensors[name]
        yield tensor
        missing = -tensor.shape[0] % VOCABULARY_MULTIPLE if tensor.dim() == 2 else 0
        if missing:
            yield torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])])
        return
    for joined, parts in JOINED.items():
        names = [name.replace(f".{joined}.", f".{part}.") for part in parts]
        if f".{joined}." in name and all(part in tensors for part in names):
            yield torch.cat([tensors[part] for part in names])


def computable(checksums: Mapping[str, str], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> frozenset[str]:
    """The server's names whose hash can be computed: those that agree on weights that it is known to hold."""
    return frozenset(name for name, said in checksums.items() if said in expected(name, tensors, dtype))


def differing(checksums: Mapping[str, str], names: frozenset[str], tensors: Mapping[str, Tensor],
              dtype: torch.dtype) -> list[str]:
    """Those of `names` that the server does not hold as published."""
    return sorted(name for name in names if checksums.get(name) not in expected(name, tensors, dtype))


def overall(checksums: Mapping[str, str]) -> str:
    """One word for all tensors of a server."""
    text = "".join(f"{name}={said}\n" for name, said in sorted(checksums.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
