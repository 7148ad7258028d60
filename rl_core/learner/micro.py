"""Minibatches and micro-batches of a claim: which answers an update sees, and the columns that its losses read.

Nothing random is drawn: minibatches are groups in claim order, which the data order has shuffled already.

`_S` loss tokens of one micro-batch, `_Q` its trajectories, `_M` trajectories of this rank, `_T` their tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from rl_core.learner.aggregation import Denominators
from rl_core.learner.attention import Call, Rows
from rl_core.learner.batch import column, layout_of, loss_tokens, sessions_with, to_device, to_tensor
from rl_core.learner.packing import Attention, Pack, micro_batches, pack
from rl_core.learner.policy import PackInputs
from rl_core.learner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-batch: inputs and the per-token columns that the losses read."""

    number: int
    """Among those of this rank's step."""
    inputs: PackInputs
    behavior_S: Tensor
    version_S: Tensor
    lag_S: Tensor
    swapped_S: Tensor
    advantage_S: Tensor
    reward_S: Tensor
    """Of the token's answer."""
    sequence_S: Tensor
    place_S: Tensor
    """Number of the token among the loss tokens of the whole claim."""
    position_S: Tensor
    """Its place in its answer, from 0."""
    order_Q: Tensor
    """The trajectories that a critic is asked for a value behind; empty without one."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one update is made from."""

    number: int
    """Its groups are those from `number * minibatch_groups` on."""
    micros: list[Micro]
    """Equally many on every rank."""
    denominators: Denominators


def minibatches_of(batch: TensorDict, ranks: Ranks, *, groups: int, minibatch_groups: int,
                   token_budget: int, share_prefixes: bool = True,
                   behind: bool = False) -> list[Minibatch]:
    """Minibatches that have a loss token on any rank, cut into equally many micro-batches on every rank.

    `share_prefixes`: a prompt is computed once for all answers to it that share a micro-batch. `behind`: a critic is
    asked for values behind the answers.
    """
    layout = replace(layout_of(batch), behind=behind)
    layout = layout if share_prefixes else layout.apart()
    tokens_M = loss_tokens(batch)
    count = math.ceil(groups / minibatch_groups)
    of_minibatch_N = column(batch, "trajectory", "group") // minibatch_groups
    of_minibatch_M = of_minibatch_N[column(batch, "mine")].numpy()
    members = [of_minibatch_M == i for i in range(count)]
    parts = [micro_batches(layout, members[i], token_budget) for i in range(count)]
    sums = ranks.sum([float(tokens_M[members[i]].sum()) for i in range(count)])
    there_N = column(batch, "trajectory", "tokens") > 0
    most = ranks.max([float(len(part)) for part in parts])
    nothing = np.zeros(0, np.int64)
    there = to_device(batch, ranks.device)
    minibatches: list[Minibatch] = []
    made = 0
    for i, part in enumerate(parts):
        tokens, sequences = int(sums[i]), sessions_with(batch, there_N & (of_minibatch_N == i))
        if tokens:
            padded = part + [nothing] * (int(most[i]) - len(part))
            micros = [_micro(there, pack(layout, sequences), made + j) for j, sequences in enumerate(padded)]
            made += len(micros)
            minibatches.append(Minibatch(i, micros, Denominators(tokens=tokens, sequences=sequences)))
    return minibatches


def attention_of(packed: Pack, device: torch.device) -> Rows:
    """The attention calls of a pack on the device of the model."""
    def index(values: NDArray[np.int64]) -> Tensor:
        return to_tensor(values).to(device, non_blocking=True)

    def call(one: Attention) -> Call:
        return Call(index(one.query), None if one.key is None else index(one.key),
                    None if one.before_R is None else index(one.before_R))

    return Rows(tuple(call(one) for one in packed.calls), index(packed.home_P))


def _micro(batch: TensorDict, packed: Pack, number: int) -> Micro:
    """Gather the columns of one pack on the device of the batch."""
    device = column(batch, "input_ids").device

    def index(values: NDArray[np.int64]) -> Tensor:
        return to_tensor(values).to(device, non_blocking=True)

    source_P, target_S, sequence_S = index(packed.source_P), index(packed.target_S), index(packed.sequence_S)
    row_S = column(batch, "mine")[sequence_S]
    input_ids = column(batch, "input_ids")
    inputs = PackInputs(
        input_ids_P=input_ids[source_P], position_ids_P=column(batch, "position_ids")[source_P],
        rows=attention_of(packed, device),
        predictor_S=index(packed.predictor_S), target_ids_S=input_ids[target_S],
        temperature_S=column(batch, "trajectory", "temperature")[row_S],
        behind_Q=index(packed.last_Q) if len(packed.last_Q) else None)
    per_token = "advantage" in set(cast(Any, batch).keys())
    return Micro(number=number, inputs=inputs, behavior_S=column(batch, "behavior_logprobs")[target_S],
                 version_S=column(batch, "version")[target_S], lag_S=column(batch, "lag")[target_S],
                 swapped_S=column(batch, "swapped")[target_S],
                 advantage_S=column(batch, "advantage")[target_S] if per_token else
                 column(batch, "trajectory", "advantage")[row_S],
                 reward_S=column(batch, "trajectory", "reward")[row_S], sequence_S=sequence_S,
                 place_S=column(batch, "place")[target_S],
                 position_S=target_S - (column(batch, "cu_seqlens")[:-1] + column(batch, "prompt_length"))[sequence_S],
                 order_Q=index(packed.order_Q))
