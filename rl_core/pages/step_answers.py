"""The answers of a training step as columns of a page, from its claim and the shards that it names, gap by gap.

What a shard holds is shown as it is. Masks and advantages follow from it and the settings that the step was trained by;
log-probs of the learner do not: they take its weights, so they are there only where somebody has computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.experience.facts import ClaimFacts
from rl_core.experience.reader import copy_tokens, token_views
from rl_core.experience.staging import Staging
from rl_core.experience.staleness import OFFLINE
from rl_core.gaps import Gaps, found
from rl_core.landed_answers import FINISH_NAMES, claimed_shards, truth_of
from rl_core.learner.token_states import (
    NOT_SAMPLED,
    Sampled,
    StepLogprobs,
    advantages_need,
    token_advantages,
    token_states,
)
from rl_core.pages.columns import AnswerColumns, Group, no_answers
from rl_core.run_dir import RunDir
from rl_core.types import Claim, ClaimedGroup
from rl_core.versions import read_versions


def step_answers(run: RunDir, claim: Claim, config: Config, gaps: Gaps,
                 learner: StepLogprobs | None = None) -> AnswerColumns:
    """All answers of the claim whose shards can be read, in training order. `config`: what the step is trained by.

    `learner`: of the whole claim; it is left out where a shard of it is not there any more.
    """
    batches = claimed_shards(run, claim, gaps)
    groups = [group for group in claim.groups if (group.stream, group.seq) in batches]
    if not groups:
        return no_answers()
    keys = sorted({(group.stream, group.seq) for group in groups})
    place = {key: i for i, key in enumerate(keys)}
    shard_G = np.array([place[group.stream, group.seq] for group in groups], np.int64)
    row_G = np.array([group.row for group in groups], np.int64)
    opened = [batches[key] for key in keys]
    facts = ClaimFacts(opened, shard_G, row_G)
    every_N = np.ones(len(facts.length_N), np.bool_)
    version_R, run_tokens_R = facts.runs(every_N)
    runs_N = _runs_per_answer(facts.length_N.astype(np.int64), run_tokens_R)
    tokens = copy_tokens(token_views(opened), facts.shard_N, facts.begin_N, facts.length_N, Staging())
    group_N = np.repeat(np.arange(len(groups)), facts.n_responses_G)
    idx_R = _indices(run, version_R, claim, gaps)
    sampled = Sampled(group_N=group_N, reward_N=facts.by_response("reward"), length_N=facts.length_N.astype(np.int64),
                      finish_N=facts.by_response("finish_reason"), loss_mask_T=tokens["loss_mask"],
                      idx_T=np.repeat(idx_R, run_tokens_R), parts=facts.parts(), baseline_N=facts.baseline()[group_N],
                      session_N=facts.sessions())
    finish_codes: list[int] = sampled.finish_N.tolist()
    state_T = token_states(sampled, claim, config)
    values = {"behavior": np.where(state_T == NOT_SAMPLED, np.nan, tokens["behavior_logprobs"]).astype(np.float32)}
    if len(groups) == len(claim.groups):  # of some answers alone an advantage would be another one
        if advantages_need(config) is None:
            values["advantage"] = token_advantages(sampled, state_T, config)
        if learner is not None:
            values |= {"proximal": learner.proximal_T, "policy": learner.policy_T}
    return AnswerColumns(
        groups=_groups(groups, opened, shard_G, facts, idx_R, runs_N, group_N, claim), group_N=group_N,
        reward_N=sampled.reward_N, correct_N=facts.correct(), length_N=sampled.length_N,
        finish_N=tuple(map(FINISH_NAMES.__getitem__, finish_codes)),
        extracted_N=_extracted(groups, opened, shard_G, facts), mode_N=(), text_N=(), parts=sampled.parts,
        runs_N=runs_N, run_tokens_R=run_tokens_R, run_version_R=version_R, token_ids_T=tokens["response_ids"],
        state_T=state_T, values=values)


def _runs_per_answer(length_N: NDArray[np.int64], run_tokens_R: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many of the version runs belong to each answer: runs end where answers do."""
    ends = np.searchsorted(np.cumsum(run_tokens_R), np.cumsum(length_N)) + 1
    return np.diff(ends, prepend=0)


def _indices(run: RunDir, version_R: NDArray[np.int32], claim: Claim, gaps: Gaps) -> NDArray[np.int32]:
    """Publication of each version run; -1 where it is not known, or another run's."""
    if claim.policy == OFFLINE:
        return np.full(len(version_R), -1, np.int32)
    versions = found(partial(read_versions, run), str(run.versions), gaps) or {}
    used, at_R = np.unique(version_R, return_inverse=True)
    return np.array([versions[v].idx if v in versions else -1 for v in used.tolist()], np.int32)[at_R]


def _groups(groups: Sequence[ClaimedGroup], opened: Sequence[pa.RecordBatch], shard_G: NDArray[np.int64],
            facts: ClaimFacts, idx_R: NDArray[np.int32], runs_N: NDArray[np.int64], group_N: NDArray[np.int64],
            claim: Claim) -> tuple[Group, ...]:
    """What the answers of each group share. Its age is that of its oldest token (experience-store.md 3.6)."""
    group_R = np.repeat(group_N, runs_N)
    oldest_G = np.full(len(groups), np.iinfo(np.int32).max, np.int64)
    np.minimum.at(oldest_G, group_R, idx_R)
    prompt_ids, offsets = facts.prompts()
    sources, source_G = facts.texts("data_source")
    metas: list[list[str]] = [batch.column("meta_json").to_pylist() for batch in opened]
    made: list[Group] = []
    for ordinal, group in enumerate(groups):
        truth = truth_of(metas[int(shard_G[ordinal])][group.row])
        made.append(Group(group_id=group.group_id, source=sources[int(source_G[ordinal])], truth=truth,
                          age=None if oldest_G[ordinal] < 0 else int(claim.idx - oldest_G[ordinal]),
                          prompt_ids=prompt_ids[offsets[ordinal]:offsets[ordinal + 1]]))
    return tuple(made)


def _extracted(groups: Sequence[ClaimedGroup], opened: Sequence[pa.RecordBatch], shard_G: NDArray[np.int64],
               facts: ClaimFacts) -> tuple[str | None, ...]:
    """The answer as the reward has read it, of every answer; None where it says none."""
    said: list[list[list[str | None] | None]] = [batch.column("extracted").to_pylist() for batch in opened]
    listed: list[str | None] = []
    for ordinal, group in enumerate(groups):
        of_group = said[int(shard_G[ordinal])][group.row]
        listed += [None] * int(facts.n_responses_G[ordinal]) if of_group is None else of_group
    return tuple(listed)
