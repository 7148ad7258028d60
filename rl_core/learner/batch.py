"""One TensorDict per claim and rank: packed columns, and a child with one row per trajectory of the claim.

    input_ids, position_ids, loss_mask, behavior_logprobs, version   [T]  prompt and answer of each of this rank's rows
    cu_seqlens, mine                                                 [M+1], [M]
    trajectory: reward, correct, group, length, finish, temperature  [N]  of the whole claim, on every rank

`_T` tokens of this rank, `_M` its trajectories, `_N` trajectories of the claim, `_G` groups. `mine` names the row of
each of this rank's trajectories in the child. Stages add columns and declare what they read; nothing is sliced jagged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from rl_core.config import AdvantageConfig
from rl_core.learner.advantages import advantages
from rl_core.learner.packing import Layout, last_loss_token, ragged_arange
from rl_core.types import FINISH_CODES

if TYPE_CHECKING:
    from rl_core.experience.reader import ClaimRows

Column = str | tuple[str, ...]
P = ParamSpec("P")
R = TypeVar("R")


def reads(*columns: Column) -> Callable[[Callable[Concatenate[TensorDict, P], R]],
                                        Callable[Concatenate[TensorDict, P], R]]:
    """Declare the columns that a stage reads: a batch without them is refused by name (KeyError)."""
    def declare(stage: Callable[Concatenate[TensorDict, P], R]) -> Callable[Concatenate[TensorDict, P], R]:
        @wraps(stage)
        def run(batch: TensorDict, *args: P.args, **kwargs: P.kwargs) -> R:
            there = set(cast(Any, batch).keys(include_nested=True))
            absent = [column for column in columns if column not in there]
            if absent:
                raise KeyError(f"stage {stage.__name__} reads {absent}, which no stage before it has added")
            return stage(batch, *args, **kwargs)
        return run
    return declare


def assemble(rows: ClaimRows) -> TensorDict:
    """Facts of the claim as one TensorDict on the host. Nothing in it aliases the staging buffers of the reader."""
    length_M, group_M, mine = rows.length_N[rows.mine_N], rows.group_N[rows.mine_N], np.flatnonzero(rows.mine_N)
    answer_M, group_M = length_M.astype(np.int64), group_M.astype(np.int64)
    prompt_start_G = rows.prompt_offsets[:-1].astype(np.int64)
    prompt_M = np.diff(rows.prompt_offsets).astype(np.int64)[group_M]
    cu = np.concatenate([np.zeros(1, np.int64), np.cumsum(prompt_M + answer_M)])
    answer_T = ragged_arange(cu[:-1] + prompt_M, answer_M)
    total = int(cu[-1])
    input_ids = np.empty(total, np.int64)
    input_ids[ragged_arange(cu[:-1], prompt_M)] = rows.prompt_ids[ragged_arange(prompt_start_G[group_M], prompt_M)]
    input_ids[answer_T] = rows.response_ids
    columns = {"loss_mask": (np.bool_, rows.loss_mask), "behavior_logprobs": (np.float32, rows.behavior_logprobs),
               "version": (np.int64, rows.version_idx)}
    tokens: dict[str, Any] = {"input_ids": to_tensor(input_ids),
                              "position_ids": to_tensor(np.arange(total) - np.repeat(cu[:-1], np.diff(cu)))}
    for name, (dtype, answers) in columns.items():
        whole = np.zeros(total, dtype)
        whole[answer_T] = answers
        tokens[name] = to_tensor(whole)
    temperature_N = rows.temperature_G[rows.group_N]
    per_trajectory: dict[str, tuple[Any, NDArray[Any]]] = {
        "reward": (np.float32, rows.reward_N), "correct": (np.float32, rows.correct_N),
        "group": (np.int64, rows.group_N), "length": (np.int64, rows.length_N), "finish": (np.int64, rows.finish_N),
        "temperature": (np.float32, temperature_N)}
    trajectory = {name: to_tensor(np.array(values, dtype)) for name, (dtype, values) in per_trajectory.items()}
    return TensorDict({**tokens, "cu_seqlens": to_tensor(cu), "mine": to_tensor(mine),
                       "prompt_length": to_tensor(prompt_M),
                       "trajectory": TensorDict(trajectory, batch_size=[len(rows.reward_N)])}, batch_size=[])


def to_tensor(values: NDArray[Any]) -> Tensor:
    """A tensor over the memory of the array."""
    return torch.from_numpy(values)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch


def column(batch: TensorDict, *name: str) -> Tensor:
    """`column(batch, "lag")`, `column(batch, "trajectory", "reward")`."""
    return cast(Tensor, cast(Any, batch)[name])


@reads("loss_mask", "version", "cu_seqlens")
def mask_by_age(batch: TensorDict, *, idx: int, limit: int) -> int:
    """Staleness policy `mask`: tokens sampled more than `limit` publications before `idx` leave the loss.

    Returns how many did, on this rank.
    """
    mask, version = column(batch, "loss_mask"), column(batch, "version")
    too_old = mask & (idx - version > limit)
    batch["loss_mask"] = mask & ~too_old
    return int(too_old.sum())


@reads("version", "cu_seqlens", "prompt_length")
def mark_tokens(batch: TensorDict, *, step: int, publish_every: int, updates_per_step: int | Sequence[int]) -> None:
    """Adds `lag` (int64: optimizer updates between the weights that sampled a token and those at the start of the step)
    and `swapped` (bool: the token lies behind a weight swap inside its answer). `[T]`, meaningful on answer tokens.

    `updates_per_step`: of every step before this one, or of each, newest first, back to the oldest version."""
    version, cu = column(batch, "version"), column(batch, "cu_seqlens")
    first_M = version[cu[:-1] + column(batch, "prompt_length")]
    behind = (step - version * publish_every).clamp(min=0)
    if isinstance(updates_per_step, int):
        batch["lag"] = behind * updates_per_step
    else:
        made = np.cumsum([0, *updates_per_step], dtype=np.int64)  # in the last 0, 1, 2, ... steps
        batch["lag"] = to_tensor(made)[behind.clamp(max=len(made) - 1)]
    batch["swapped"] = version > first_M.repeat_interleave(cu.diff())


@reads("loss_mask", "cu_seqlens", "mine", ("trajectory", "finish"))
def mask_truncated(batch: TensorDict, rule: Literal["score", "mask", "exclude"]) -> None:
    """What an answer cut at the limit counts for; adds ("trajectory", "present").

    score: like any other. mask: no loss, still in its group's statistics. exclude: as if absent.
    """
    cut_N = column(batch, "trajectory", "finish") == FINISH_CODES["length"]
    batch["trajectory", "present"] = ~cut_N if rule == "exclude" else torch.ones_like(cut_N)
    if rule != "score":
        cut_T = cut_N[column(batch, "mine")].repeat_interleave(column(batch, "cu_seqlens").diff())
        batch["loss_mask"] = column(batch, "loss_mask") & ~cut_T


@reads(("trajectory", "reward"), ("trajectory", "group"), ("trajectory", "present"))
def add_advantages(batch: TensorDict, config: AdvantageConfig) -> None:
    """Adds ("trajectory", "advantage") over the whole claim, float32."""
    reward, group, present = (column(batch, "trajectory", name).numpy() for name in ("reward", "group", "present"))
    batch["trajectory", "advantage"] = to_tensor(advantages(reward, group, config, present_N=present))


@reads("loss_mask", "cu_seqlens", "mine", "prompt_length", ("trajectory", "group"))
def layout_of(batch: TensorDict) -> Layout:
    """Where this rank's trajectories lie, for packing; after all masks."""
    cu, prompt_M = column(batch, "cu_seqlens").numpy(), column(batch, "prompt_length").numpy()
    loss_T = column(batch, "loss_mask").numpy()
    start_M, length_M = cu[:-1], np.diff(cu) - prompt_M
    return Layout(start_M=start_M, prompt_M=prompt_M, used_M=last_loss_token(loss_T, start_M, prompt_M, length_M),
                  group_M=column(batch, "trajectory", "group")[column(batch, "mine")].numpy(), loss_T=loss_T)


def to_device(batch: TensorDict, device: torch.device) -> TensorDict:
    """The batch where the model is: one copy, from one consolidated buffer."""
    return batch if device.type == "cpu" else cast(TensorDict, cast(Any, batch).consolidate().to(device))
