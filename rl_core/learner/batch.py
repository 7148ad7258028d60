"""One TensorDict per claim and rank: packed columns, and a child with one row per trajectory of the claim.

    input_ids, position_ids, loss_mask, behavior_logprobs, version   [T]  prompt and answer of each of this rank's rows
    cu_seqlens, mine                                                 [M+1], [M]
    trajectory: reward, correct, group, length, finish, temperature, baseline, session, context
                                                                     [N]  of the whole claim, on every rank
    parts: reward parts by name                                      [N]  NaN where an answer has no such part

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
from rl_core.learner.advantages.answers import Answers
from rl_core.learner.advantages.estimate import advantages, answers_of, is_per_token, needs_policy, needs_values
from rl_core.learner.overlong import overlong_penalty
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
    length_M, context_M, mine = rows.length_N[rows.mine_N], rows.context_N[rows.mine_N], np.flatnonzero(rows.mine_N)
    answer_M, context_M = length_M.astype(np.int64), context_M.astype(np.int64)
    prompt_start = rows.prompt_offsets[:-1].astype(np.int64)
    prompt_M = np.diff(rows.prompt_offsets).astype(np.int64)[context_M]
    cu = np.concatenate([np.zeros(1, np.int64), np.cumsum(prompt_M + answer_M)])
    answer_T = ragged_arange(cu[:-1] + prompt_M, answer_M)
    total = int(cu[-1])
    input_ids = np.empty(total, np.int64)
    input_ids[ragged_arange(cu[:-1], prompt_M)] = rows.prompt_ids[ragged_arange(prompt_start[context_M], prompt_M)]
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
        "temperature": (np.float32, temperature_N), "baseline": (np.float32, rows.baseline_G[rows.group_N]),
        "session": (np.int64, rows.session_N), "context": (np.int64, rows.context_N)}
    trajectory = {name: to_tensor(np.array(values, dtype)) for name, (dtype, values) in per_trajectory.items()}
    return TensorDict({**tokens, "cu_seqlens": to_tensor(cu), "mine": to_tensor(mine),
                       "prompt_length": to_tensor(prompt_M),
                       "parts": TensorDict({name: to_tensor(np.array(values)) for name, values in rows.parts.items()},
                                           batch_size=[len(rows.reward_N)]),
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


@reads("version", "cu_seqlens", "prompt_length")
def mark_foreign_tokens(batch: TensorDict) -> None:
    """`mark_tokens` where another run has sampled the tokens: how many updates lie between its weights and these is not
    defined, so `lag` is 1 everywhere, that is not those of this step; `swapped` as there."""
    version, cu = column(batch, "version"), column(batch, "cu_seqlens")
    first_M = version[cu[:-1] + column(batch, "prompt_length")]
    batch["lag"] = torch.ones_like(version)
    batch["swapped"] = version != first_M.repeat_interleave(cu.diff())


@reads("loss_mask", "cu_seqlens", "mine", ("trajectory", "finish"), ("trajectory", "session"))
def mask_truncated(batch: TensorDict, rule: Literal["score", "mask", "exclude", "penalty"]) -> None:
    """What an answer cut at the limit counts for; adds ("trajectory", "present").

    score, penalty: like any other. mask: no loss, still in its group's statistics. exclude: as if absent, with the
    whole session that it is of.
    """
    cut_N = column(batch, "trajectory", "finish") == FINISH_CODES["length"]
    if rule == "exclude":
        cut_N = of_session(cut_N.long(), column(batch, "trajectory", "session")) > 0
    batch["trajectory", "present"] = ~cut_N if rule == "exclude" else torch.ones_like(cut_N)
    if rule in ("mask", "exclude"):
        cut_T = cut_N[column(batch, "mine")].repeat_interleave(column(batch, "cu_seqlens").diff())
        batch["loss_mask"] = column(batch, "loss_mask") & ~cut_T


@reads(("trajectory", "reward"), ("trajectory", "length"), ("trajectory", "session"))
def penalize_overlong(batch: TensorDict, *, longest: int, buffer: int, factor: float) -> None:
    """`truncated: penalty`: takes from every reward what its answer's length costs (overlong.py), from that of a
    session what all its trajectories cost."""
    reward, length = column(batch, "trajectory", "reward"), column(batch, "trajectory", "length").numpy()
    penalty = overlong_penalty(length, longest=longest, buffer=buffer, factor=factor).astype(np.float32)
    batch["trajectory", "reward"] = reward + of_session(to_tensor(penalty), column(batch, "trajectory", "session"))


def of_session(values_N: Tensor, session_N: Tensor) -> Tensor:
    """Sum over the session of each trajectory, `[N]`."""
    return torch.zeros_like(values_N).index_add(0, session_N, values_N)[session_N]


@reads(("trajectory", "session"), ("trajectory", "tokens"))
def session_tokens(batch: TensorDict, tokens_N: Tensor | None = None) -> Tensor:
    """Loss tokens of the session of every trajectory of the claim, `[N]`; of `tokens_N` where they are given."""
    tokens_N = column(batch, "trajectory", "tokens") if tokens_N is None else tokens_N
    return of_session(tokens_N, column(batch, "trajectory", "session"))


@reads(("trajectory", "session"))
def sessions_with(batch: TensorDict, chosen_N: Tensor) -> int:
    """How many sessions have one of these trajectories (bool `[N]`)."""
    return len(np.unique(column(batch, "trajectory", "session")[chosen_N].numpy()))


@reads("loss_mask", "cu_seqlens")
def loss_tokens(batch: TensorDict) -> NDArray[np.int64]:
    """Loss tokens of each of this rank's trajectories, `[M]`; after all masks."""
    cu = column(batch, "cu_seqlens").numpy()
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(column(batch, "loss_mask").numpy(), dtype=np.int64)])
    return before[cu[1:]] - before[cu[:-1]]


@reads("loss_mask", "cu_seqlens", "mine", ("trajectory", "reward"))
def number_tokens(batch: TensorDict, sum_over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts) -> None:
    """Adds ("trajectory", "tokens"), the loss tokens of every trajectory of the claim, and `place` [T]: the number of
    each loss token among those of the whole claim, in claim order; -1 where the loss mask is 0. After all masks."""
    counts_N = torch.zeros(len(column(batch, "trajectory", "reward")), dtype=torch.float64)
    counts_M = loss_tokens(batch)
    counts_N[column(batch, "mine")] = to_tensor(counts_M).double()
    tokens_N = sum_over_ranks(counts_N).long()
    batch["trajectory", "tokens"] = tokens_N
    first_M = (tokens_N.cumsum(0) - tokens_N)[column(batch, "mine")].numpy()
    mask_T = column(batch, "loss_mask").numpy()
    place_T = np.full(len(mask_T), -1, np.int64)
    place_T[mask_T] = ragged_arange(first_M, counts_M)
    batch["place"] = to_tensor(place_T)


@reads("parts", ("trajectory", "reward"), ("trajectory", "group"), ("trajectory", "length"), ("trajectory", "tokens"),
       ("trajectory", "baseline"), ("trajectory", "session"))
def answers_in(batch: TensorDict) -> Answers:
    """What an estimator reads of the claim, one answer a session. Raises ValueError for a reward that is not finite,
    or not that of its session."""
    reward, group, length, tokens, baseline = (column(batch, "trajectory", name).numpy()
                                               for name in ("reward", "group", "length", "tokens", "baseline"))
    parts = {name: values.numpy() for name, values in cast(dict[str, Tensor], cast(Any, batch)["parts"]).items()}
    return answers_of(reward, group, length_N=length, tokens_N=tokens, parts=parts,
                      baseline_N=baseline).by_session(column(batch, "trajectory", "session").numpy())


def present_in(batch: TensorDict) -> NDArray[np.bool_]:
    """Whether a session counts (`truncated: exclude`), one entry for each answer of `answers_in`."""
    first_N = np.diff(column(batch, "trajectory", "session").numpy(), prepend=-1) != 0
    return column(batch, "trajectory", "present").numpy()[first_N]


@reads("place", ("trajectory", "present"), ("trajectory", "tokens"))
def add_advantages(batch: TensorDict, config: AdvantageConfig) -> None:
    """Adds ("trajectory", "advantage") over the whole claim, float32, or `advantage` [T] where it differs from token to
    token. One that needs the proximal policy or a critic is made in the step (credit.py), and is 0 until then."""
    answers, present = answers_in(batch), present_in(batch)
    session_N = column(batch, "trajectory", "session")
    if not is_per_token(config):
        batch["trajectory", "advantage"] = to_tensor(advantages(answers, config, present_N=present))[session_N]
        return
    batch["trajectory", "advantage"] = torch.zeros(len(session_N))
    place_T, advantage_T = column(batch, "place"), torch.zeros(len(column(batch, "place")))
    if not needs_policy(config) and not needs_values(config):
        found_K = to_tensor(advantages(answers, config, present_N=present))
        advantage_T[place_T >= 0] = found_K[place_T[place_T >= 0]]
    batch["advantage"] = advantage_T


@reads("loss_mask", "cu_seqlens", "mine", "prompt_length", ("trajectory", "context"))
def layout_of(batch: TensorDict) -> Layout:
    """Where this rank's trajectories lie, for packing; after all masks. Those of one context share its prompt."""
    cu, prompt_M = column(batch, "cu_seqlens").numpy(), column(batch, "prompt_length").numpy()
    loss_T = column(batch, "loss_mask").numpy()
    start_M, length_M = cu[:-1], np.diff(cu) - prompt_M
    return Layout(start_M=start_M, prompt_M=prompt_M, used_M=last_loss_token(loss_T, start_M, prompt_M, length_M),
                  context_M=column(batch, "trajectory", "context")[column(batch, "mine")].numpy(), loss_T=loss_T)


def to_device(batch: TensorDict, device: torch.device) -> TensorDict:
    """The batch where the model is: one copy, from one consolidated buffer."""
    if device.type == "cpu":
        return batch
    return cast(TensorDict, cast(Any, batch).exclude("parts").consolidate().to(device))
