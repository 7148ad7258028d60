"""What the viewer says of a step's tokens is what the learner made of them: the same masks, the same advantages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_core.config import Config
from rl_core.experience.reader import ClaimRows, read_claim_rows
from rl_core.experience.shards import ShardWriter
from rl_core.learner import batch as stages
from rl_core.learner.advantages.estimate import is_per_token
from rl_core.learner.token_states import (
    CUT,
    IN_LOSS,
    NOT_SAMPLED,
    TOO_OLD,
    Sampled,
    advantages_need,
    token_advantages,
    token_states,
)
from rl_core.run_dir import RunDir
from rl_core.types import Claim, ShardRef
from tests.builders import make_claim, make_group, make_versions

LEARNER: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {"advantage": {"name": "rloo"}},
    "by token": {"advantage": {"name": "reinforce_plus_plus", "gamma": 0.9}},
    "whitened over the claim": {"advantage": {"name": "reinforce_plus_plus_baseline"}},
    "parts": {"advantage": {"name": "gdpo"}},
    "parts by name": {"advantage": {"name": "gdpo", "parts": [{"part": "b", "weight": -0.5}, {"part": "a"}]}},
    "cut answers masked": {"loss": {"truncated": "mask"}},
    "cut answers absent": {"loss": {"truncated": "exclude"}},
    "long answers penalised": {"loss": {"truncated": "penalty", "overlong_buffer": 6, "overlong_factor": 0.5}},
}


def claimed(run: RunDir, policy: str) -> tuple[Claim, ClaimRows, Sampled]:
    """A claim of three groups with cut answers, masked tokens, tokens of four versions and reward parts."""
    groups = []
    for i in range(3):
        group = make_group(i, versions=((0, 3), (2,), (1, 2, 3))[i], lengths=[3, 7, 12, 5],
                           rewards=[0.0, 1.0, 0.5, 2.0])
        answers = [replace(one, finish_reason="length" if j == 2 else "stop",
                           score=replace(one.score, parts={"a": float(j), "b": float(i * j % 2)}))
                   for j, one in enumerate(group.trajectories)]
        mask = answers[1].loss_mask_L.copy()
        mask[2:4] = 0
        answers[1] = replace(answers[1], loss_mask_L=mask, behavior_logprobs_L=answers[1].behavior_logprobs_L * mask)
        groups.append(replace(group, trajectories=tuple(answers)))
    landed = ShardWriter(run, "w", 1, {}, False).land(groups)
    claim = replace(make_claim(run, [ShardRef(stream=landed.stream, seq=landed.seq)], step=3, eta="1"), policy=policy)
    rows = read_claim_rows(run, claim, rank=0, ranks=1, versions=make_versions(4))
    return claim, rows, Sampled(
        group_N=rows.group_N.astype(np.int64), reward_N=rows.reward_N, length_N=rows.length_N.astype(np.int64),
        finish_N=rows.finish_N, loss_mask_T=rows.loss_mask, idx_T=rows.version_idx, parts=rows.parts)


def learned(claim: Claim, rows: ClaimRows, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """(in the loss, advantage) of every answer token, as the learner's own stages have it."""
    batch = stages.assemble(rows)
    if claim.policy == "mask":
        stages.mask_by_age(batch, idx=claim.idx, limit=1)
    loss = config.learner.loss
    stages.mask_truncated(batch, loss.truncated)
    if loss.overlong_buffer is not None:
        stages.penalize_overlong(batch, longest=config.sampling.max_new_tokens, buffer=loss.overlong_buffer,
                                 factor=loss.overlong_factor)
    stages.number_tokens(batch)
    stages.add_advantages(batch, config.learner.advantage)
    cu, prompt_M = stages.column(batch, "cu_seqlens"), stages.column(batch, "prompt_length")
    answer_T = torch.cat([torch.arange(int(cu[i] + prompt_M[i]), int(cu[i + 1])) for i in range(len(prompt_M))])
    if is_per_token(config.learner.advantage):
        advantage_T = batch["advantage"][answer_T]
    else:
        advantage_T = stages.column(batch, "trajectory", "advantage").repeat_interleave(torch.tensor(rows.length_N))
    return stages.column(batch, "loss_mask")[answer_T], advantage_T


@pytest.mark.parametrize("policy", ["keep", "mask"])
@pytest.mark.parametrize("learner", LEARNER.values(), ids=LEARNER)
def test_masks_and_advantages_are_those_of_the_learner(tmp_path: Path, learner: dict[str, Any], policy: str) -> None:
    config = Config.model_validate({"learner": learner, "sampling": {"max_new_tokens": 12}})
    claim, rows, sampled = claimed(RunDir(tmp_path), policy)
    state_T = token_states(sampled, claim, config)
    in_loss_T, advantage_T = learned(claim, rows, config)
    assert ((state_T == IN_LOSS) == in_loss_T.numpy()).all() and (state_T == IN_LOSS).any()
    found_T = token_advantages(sampled, state_T, config)
    assert np.isnan(found_T[state_T != IN_LOSS]).all()
    np.testing.assert_array_equal(found_T[state_T == IN_LOSS], advantage_T.numpy()[state_T == IN_LOSS])


def test_advantages_of_weighted_rewards_are_those_of_the_same_parts_by_name(tmp_path: Path) -> None:
    named = {"learner": {"advantage": {"name": "gdpo", "parts": [{"part": "a", "weight": -0.01}]}}}
    weighted = {"learner": {"advantage": {"name": "gdpo"}},
                "scoring": {"parts": [{"part": "a", "reward": "exact", "weight": -0.01}]}}
    claim, _, sampled = claimed(RunDir(tmp_path), "keep")
    by_name, by_weight = (token_advantages(sampled, token_states(sampled, claim, config), config)
                          for config in map(Config.model_validate, (named, weighted)))
    np.testing.assert_array_equal(by_weight, by_name)
    assert np.nanmax(np.abs(by_weight)) > 0.5


def test_a_token_says_why_it_is_not_in_the_loss(tmp_path: Path) -> None:
    config = Config.model_validate({"learner": {"loss": {"truncated": "mask"}}})
    claim, _, sampled = claimed(RunDir(tmp_path), "mask")
    state_T = token_states(sampled, claim, config)
    first = state_T[:27]  # of the first group: half of each answer by version 0, at step 3 with a bound of 1
    assert first.tolist() == [
        TOO_OLD, IN_LOSS, IN_LOSS,
        TOO_OLD, TOO_OLD, NOT_SAMPLED, NOT_SAMPLED, IN_LOSS, IN_LOSS, IN_LOSS,
        *[TOO_OLD] * 6, *[CUT] * 6,
        TOO_OLD, TOO_OLD, IN_LOSS, IN_LOSS, IN_LOSS]


@pytest.mark.parametrize(("learner", "need"), {
    "grpo": ({}, None),
    "a baseline of every token": ({"advantage": {"name": "optimal_token_baseline"}}, "the learner said of every token"),
}.values(), ids=lambda value: None)
def test_what_a_claim_does_not_hold_is_said(learner: dict[str, Any], need: str | None) -> None:
    found = advantages_need(Config.model_validate({"learner": learner}))
    assert found is None if need is None else found is not None and need in found
