"""How a sampler of a user's is called, and what it may return (docs/hooks.md 3). Needs no NumPy: a child imports it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class OrderCalls:
    """A sampler that takes requests, in the form of `Bound` of rewards/signatures.py."""

    function: Callable[..., Any]
    signature: str = "sampler"

    @property
    def needs(self) -> list[str]:
        """No column of a row is needed to call it."""
        return []

    def call(self, request: dict[str, Any]) -> Any:
        """Random numbers of the process start from the seed and the epoch: the same ones after a restart."""
        random.seed(f"{request['seed']} {request['epoch']}")
        return self.function(epoch=request["epoch"], prompts=request["prompts"], rows=request["rows"],
                             seed=request["seed"], history=request["history"])

    def score(self, value: Any) -> dict[str, Any]:
        return {"order": as_order(value)}


def as_order(value: Any) -> list[int]:
    """What it returned as a list of integers. Raises ValueError naming the value."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise ValueError(f"the result is {repr(value)[:80]}; it must be a list of the prompts in another order")
    listed = cast("Sequence[Any]", items)
    if odd := [item for item in listed if isinstance(item, bool) or not hasattr(item, "__index__")]:
        raise ValueError(f"the result holds {repr(odd[0])[:80]}; it must be a list of the prompts in another order")
    return [int(item) for item in listed]


def is_order(order: Sequence[int], prompts: Sequence[int]) -> str | None:
    """Why this is not every prompt once; None if it is."""
    if len(order) != len(prompts):
        return f"has {len(order)} prompts and must have {len(prompts)}, each once"
    if sorted(order) == sorted(prompts):
        return None
    absent = sorted(set(prompts) - set(order))
    return f"is not every prompt once: {absent[0]} is not in it" if absent else "names a prompt twice"
