"""What the policy says of the canary's prompts, with its adapter and without (lora/canary.py). `_S` prompts."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from rl_core.learner.adapter import without_adapter
from rl_core.learner.attention import Call, Rows
from rl_core.learner.policy import PackInputs, Policy
from rl_core.learner.ranks import reshard, to_list
from rl_core.lora.canary import Place, Probe

PROMPTS, PROMPT_TOKENS, LIKELY = 16, 8, 8


@torch.no_grad()
def adapter_probe(policy: Policy, room: int) -> Probe:
    """The probe of the weights as they are, at temperature 1: the same prompts in every version. Collective.

    `room`: tokens of a prompt with its answer that engines take, at least 2.
    """
    prompts = fixed_prompts(policy.vocabulary, min(PROMPT_TOKENS, room - 1))
    inputs = _inputs(prompts, next(policy.parameters()).device)
    likely = (LIKELY, policy.vocabulary)
    mine_SK = cast(Tensor, policy(inputs, likely=likely).likely_ids_SK)
    with without_adapter(policy):
        theirs_SK = cast(Tensor, policy(inputs, likely=likely).likely_ids_SK)
        ids_SK = torch.cat([mine_SK, theirs_SK], dim=1)
        base_SK = cast(Tensor, policy(inputs, others_SK=ids_SK).others_SK)
    adapter_SK = cast(Tensor, policy(inputs, others_SK=ids_SK).others_SK)
    reshard(policy)
    return Probe(tuple(
        Place(prompt=_whole(prompt), token_ids=_whole(ids), adapter=tuple(to_list(adapter)), base=tuple(to_list(base)))
        for prompt, ids, adapter, base in zip(prompts, ids_SK, adapter_SK, base_SK, strict=True)))


def _whole(values: Tensor) -> tuple[int, ...]:
    return tuple(map(int, to_list(values)))


def fixed_prompts(vocabulary: int, length: int) -> Tensor:
    """Token ids `[PROMPTS, length]` all over the vocabulary; no text."""
    rows, places = torch.arange(PROMPTS)[:, None], torch.arange(length)[None]
    return (7 * places + 11 * rows + places * places + rows * rows * places) % vocabulary


def _inputs(prompts: Tensor, device: torch.device) -> PackInputs:
    rows, length = prompts.shape
    home_P = torch.arange(rows * length, device=device)
    index = home_P.view(rows, length)
    return PackInputs(prompts.reshape(-1).to(device), torch.arange(length, device=device).repeat(rows),
                      Rows((Call(index),), home_P), index[:, -1], torch.zeros(rows, dtype=torch.int64, device=device),
                      torch.ones(rows, device=device))
