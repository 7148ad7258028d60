"""From a claim to arrays: every rank reads its own rows, from shards whose digests are checked again.

Shards are mapped, verified, and their token columns copied once, at about the speed of memcpy, into staging buffers
that are reused from claim to claim. Mapped memory never leaves this module: a write into it would be a SIGSEGV.

Shape suffixes: `_N` trajectories of the whole claim, `_G` groups of the claim; flat token arrays hold this rank's
trajectories only, in claim order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl_core.errors import BrokenFile, ClaimedShardCorrupt, ShardCorrupt, ShardRetired
from rl_core.experience.columns import digest_of_digests
from rl_core.experience.facts import ClaimFacts, starts_of
from rl_core.experience.ledger import read_retired, retired_below
from rl_core.experience.schema import SESSION, TOKEN_DTYPES
from rl_core.experience.split import split_by_length, split_by_prompt
from rl_core.experience.staging import Staging
from rl_core.experience.staleness import OFFLINE
from rl_core.experience.verify import digested_batch, shard_key
from rl_core.run_dir import RunDir
from rl_core.types import FINISH_CODES, Claim, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClaimRows:
    """One rank's view of a claim. Flat token arrays lie in the Staging that was given: valid until its next read.

    Example, 2 groups of 2 answers on one rank: `group_N = [0, 0, 1, 1]`, `length_N = [3, 2, 4, 1]`, `mine_N` all True,
    `offsets = [0, 3, 5, 9, 10]`; the tokens of answer 2 are `response_ids[5:9]`, its prompt is
    `prompt_ids[prompt_offsets[1]:prompt_offsets[2]]`.
    """

    prompt_ids: NDArray[np.int32]
    """Prompts of all groups, flat; behind them those that trajectories have of their own."""
    prompt_offsets: NDArray[np.int32]
    """[prompts + 1], prompt g that of group g."""
    context_N: NDArray[np.int32]
    """Number of the prompt that the trajectory answers; its group's ordinal, but for prompts of their own."""
    session_N: NDArray[np.int32]
    """Ordinal of the trajectory's session in the claim; sessions and their trajectories lie in order."""
    n_expected_G: NDArray[np.int32]
    n_responses_G: NDArray[np.int32]
    idx_min_G: NDArray[np.int32]
    idx_max_G: NDArray[np.int32]
    temperature_G: NDArray[np.float32]
    """Temperature that the answers were sampled at."""
    baseline_G: NDArray[np.float32]
    """Reward of a greedy answer to the group's prompt; NaN where there is none."""
    group_N: NDArray[np.int32]
    """Ordinal of the trajectory's group in the claim."""
    reward_N: NDArray[np.float32]
    correct_N: NDArray[np.float32]
    """NaN where the reward does not say."""
    length_N: NDArray[np.int32]
    """Response tokens."""
    finish_N: NDArray[np.int8]
    """FINISH_CODES: 0 stop, 1 length, 2 environment end."""
    parts: dict[str, NDArray[np.float32]]
    """Reward parts by name, one entry per trajectory; NaN where an answer has no such part."""
    sources: tuple[str, ...]
    """Data sources of the claim, sorted."""
    source_G: NDArray[np.int32]
    """Number of each group's source in `sources`."""
    mine_N: NDArray[np.bool_]
    """This rank's trajectories; every trajectory belongs to exactly one rank."""
    offsets: NDArray[np.int32]
    """[mine + 1]: tokens of this rank's j-th trajectory, in claim order, are [offsets[j], offsets[j + 1])."""
    response_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    """1 = sampled by the model."""
    behavior_logprobs: NDArray[np.float32]
    """Nats, of the sampled distribution; 0.0 where loss_mask is 0."""
    run_version_idx_R: NDArray[np.int32]
    """Publication index of the version that sampled each run of tokens, in the order of the tokens; offline the id of
    that version, which is another run's and says only which tokens were sampled by the same one."""
    run_tokens_R: NDArray[np.int32]
    """Tokens of each of these runs."""

    @property
    def version_idx(self) -> NDArray[np.int32]:
        """`run_version_idx_R` token by token: new memory."""
        return np.repeat(self.run_version_idx_R, self.run_tokens_R)

    @property
    def first_N(self) -> NDArray[np.bool_]:
        """The first trajectory of every session."""
        return np.diff(self.session_N, prepend=-1) != 0

    @property
    def groups(self) -> int:
        return self.n_responses_G.size


def _open(path: Path, claim: Claim, expected: str | None) -> pa.RecordBatch:
    """Map one claimed shard and check that its data are what was verified and claimed."""
    try:
        batch, digests = digested_batch(path)
    except (ShardCorrupt, FileNotFoundError) as error:
        raise ClaimedShardCorrupt(f"claim of step {claim.step}: {error}") from error
    if (found := digest_of_digests(digests.items())) != expected:
        raise ClaimedShardCorrupt(f"claim of step {claim.step}: {path} has digest {found}, the claim says {expected}")
    return batch


def retired_shards(run: RunDir, claim: Claim) -> frozenset[tuple[str, int]]:
    """The shards of a claim that retention has removed."""
    absent = [key for key in {(group.stream, group.seq) for group in claim.groups} if not run.shard(*key).exists()]
    return read_retired(run, claim.consumer).shards.intersection(absent) if absent else frozenset()


def ensure_not_retired(run: RunDir, claim: Claim) -> None:
    """Raises ShardRetired where retention has removed a shard of the claim: the step cannot be trained again here."""
    if gone := retired_shards(run, claim):
        raise ShardRetired(f"claim of step {claim.step}: {run.shard(*min(gone))} was retired"
                           + (f", and {len(gone) - 1} more" if len(gone) > 1 else "")
                           + ": the step lies before the window that retention.replay keeps, and cannot be trained "
                           f"again; steps from {retired_below(run, claim.consumer)} on can")


def open_claim(run: RunDir, claim: Claim) -> tuple[list[pa.RecordBatch], NDArray[np.int64], NDArray[np.int64]]:
    """The mapped shards of a claim, verified again, and where its groups lie: (batches, shard of group, row of group).

    Raises ShardRetired for a shard that retention has removed, ClaimedShardCorrupt for one that is gone, has changed,
    or does not hold the claimed groups.
    """
    keys = sorted({(group.stream, group.seq) for group in claim.groups})
    place = {key: i for i, key in enumerate(keys)}
    try:
        batches = [_open(run.shard(*key), claim, claim.shard_digests.get(shard_key(*key))) for key in keys]
    except ClaimedShardCorrupt:
        ensure_not_retired(run, claim)  # one that is not there: looked for only then, since every step comes this way
        raise
    ids: list[list[str]] = [batch.column("group_id").to_pylist() for batch in batches]
    shard_G = [place[group.stream, group.seq] for group in claim.groups]
    for shard, group in zip(shard_G, claim.groups, strict=True):
        found = ids[shard][group.row] if 0 <= group.row < len(ids[shard]) else "absent"
        if found != group.group_id:
            raise ClaimedShardCorrupt(f"claim of step {claim.step}: row {group.row} of "
                                      f"{run.shard(group.stream, group.seq)} is {found}, not {group.group_id}")
    return batches, np.array(shard_G, np.int64), np.array([group.row for group in claim.groups], np.int64)


def read_claim_rows(run: RunDir, claim: Claim, *, rank: int, ranks: int, versions: Mapping[int, WeightVersion],
                    staging: Staging | None = None, sharing_groups: int | None = None) -> ClaimRows:
    """Read what `rank` of `ranks` needs of a claim: facts of all its groups, tokens of its own trajectories.

    `versions` is the run's (`rl_core.versions.read_versions`). Without `staging` the buffers are new and the caller's
    own. `sharing_groups`: the ranks share out the answers of so many groups at a time, those to one prompt together
    (`split_by_prompt`); None = all by length alone. Raises ClaimedShardCorrupt for a shard that is gone or has changed
    since it was claimed, BrokenFile for a token of a version that the run does not know.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    batches, shard_G, row_G = open_claim(run, claim)
    return stage_claim(batches, shard_G, row_G, claim, rank=rank, ranks=ranks, versions=versions,
                       staging=staging or Staging(), sharing_groups=sharing_groups)


def token_places(run: RunDir, claim: Claim) -> tuple[
        list[pa.RecordBatch], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Where the tokens of a claim lie: verified shards, and shard, first token and length of each trajectory."""
    batches, shard_G, row_G = open_claim(run, claim)
    facts = ClaimFacts(batches, shard_G, row_G)
    return batches, facts.shard_N, facts.begin_N, facts.length_N


def stage_claim(batches: Sequence[pa.RecordBatch], shard_G: NDArray[np.int64], row_G: NDArray[np.int64],
                claim: Claim, *, rank: int, ranks: int, versions: Mapping[int, WeightVersion],
                staging: Staging, sharing_groups: int | None = None) -> ClaimRows:
    """The part of `read_claim_rows` after verification: choose, copy into staging, name versions."""
    facts = ClaimFacts(batches, shard_G, row_G)
    prompt_ids, prompt_offsets, context_N = facts.contexts()
    group_N = np.repeat(np.arange(row_G.size, dtype=np.int32), facts.n_responses_G)
    prompt_N = (prompt_offsets[1:] - prompt_offsets[:-1])[context_N]
    rank_N = split_by_length(facts.length_N + prompt_N, ranks) if sharing_groups is None else split_by_prompt(
        facts.length_N, prompt_N, context_N, group_N // sharing_groups, ranks)
    mine_N = rank_N == rank
    offsets = starts_of(facts.length_N[mine_N]).astype(np.int32)
    version, run_tokens = facts.runs(mine_N)
    sources, source_G = facts.texts("data_source")
    run_idx = version if claim.policy == OFFLINE else _idx_of(version, versions, claim)
    return ClaimRows(
        prompt_ids=prompt_ids, prompt_offsets=prompt_offsets, context_N=context_N, session_N=facts.sessions(),
        n_responses_G=facts.n_responses_G.astype(np.int32), n_expected_G=facts.by_group("n_expected"),
        idx_min_G=facts.by_group("idx_min"), idx_max_G=facts.by_group("idx_max"),
        temperature_G=facts.by_group("sampling", "temperature"), baseline_G=facts.baseline(), group_N=group_N,
        reward_N=facts.by_response("reward"),
        correct_N=facts.correct(), length_N=facts.length_N, finish_N=facts.by_response("finish_reason"), mine_N=mine_N,
        parts=facts.parts(), sources=sources, source_G=source_G, offsets=offsets, run_version_idx_R=run_idx,
        run_tokens_R=run_tokens,
        **copy_tokens(token_views(batches), facts.shard_N[mine_N], facts.begin_N[mine_N], facts.length_N[mine_N],
                      staging))


def token_views(batches: Sequence[pa.RecordBatch]) -> dict[str, list[NDArray[Any]]]:
    """The values of every token column, shard by shard, where they lie: read-only, never to leave the reader."""
    return {name: [np.frombuffer(batch.column(name).buffers()[-1], dtype) for batch in batches]
            for name, dtype in TOKEN_DTYPES.items()}


def copy_tokens(views: Mapping[str, list[NDArray[Any]]], shard_M: NDArray[np.int64], begin_M: NDArray[np.int32],
                length_M: NDArray[np.int32], staging: Staging) -> dict[str, NDArray[Any]]:
    """Copy the tokens [begin, begin + length) of each chosen response, in order, into the staging buffers.

    Responses that lie behind one another in one shard are one copy per column.
    """
    end_M = begin_M + length_M
    joined = (shard_M[1:] == shard_M[:-1]) & (begin_M[1:] == end_M[:-1])
    first = np.flatnonzero(np.append(True, ~joined)) if shard_M.size else np.zeros(0, np.int64)
    last = np.append(first[1:], shard_M.size) - 1 if shard_M.size else first
    spans = list(zip(shard_M[first].tolist(), begin_M[first].tolist(), end_M[last].tolist(), strict=True))
    total = int(length_M.sum(dtype=np.int64))
    out: dict[str, NDArray[Any]] = {}
    for name, dtype in TOKEN_DTYPES.items():
        sources = views[name]
        out[name] = column = staging.take(name, total, dtype)
        at = 0
        for shard, begin, end in spans:
            column[at:at + end - begin] = sources[shard][begin:end]
            at += end - begin
    return out


def _idx_of(version: NDArray[np.int32], versions: Mapping[int, WeightVersion], claim: Claim) -> NDArray[np.int32]:
    """Publication index of each version id."""
    table = np.full(max(versions, default=0) + 2, -1, np.int32)
    for v, known in versions.items():
        table[v] = known.idx
    idx = table[np.where((version >= 0) & (version < table.size), version, -1)]
    if idx.size and idx.min() < 0:
        raise BrokenFile(f"claim of step {claim.step}: tokens of version {int(version[np.argmin(idx)])}, which has no "
                         "manifest in this run")
    return idx


_FINISH_NAMES = {code: name for name, code in FINISH_CODES.items()}


def read_groups(run: RunDir, claim: Claim) -> list[dict[str, Any]]:
    """The groups of a claim for people, in training order: plain Python values, verified like any read.

    Each is `{group_id, position, lease_no, data_source, meta, prompt_ids, idx_min, idx_max, temperature, responses}`,
    each response `{ids, reward, parts, correct, extracted, finish_reason, versions: [[end, version], ...], seed}`, and
    where its group has such, `session` and `prompt_ids` of its own.
    Not for the hot path.
    """
    batches, shard_G, row_G = open_claim(run, claim)
    return [_for_people(batches[int(shard)], int(row)) for shard, row in zip(shard_G, row_G, strict=True)]


def _for_people(batch: pa.RecordBatch, at: int) -> dict[str, Any]:
    row: dict[str, Any] = batch.slice(at, 1).drop_columns(["dispatched_at", "finished_at"]).to_pylist()[0]
    responses = [{"ids": ids, "reward": row["reward"][j], "parts": {k: v[j] for k, v in row["reward_parts"].items()},
                  "correct": None if row["correct"] is None else row["correct"][j],
                  "extracted": None if row["extracted"] is None else row["extracted"][j],
                  "finish_reason": _FINISH_NAMES[row["finish_reason"][j]],
                  "versions": [list(pair) for pair in zip(row["ver_run_end"][j], row["ver_run_value"][j], strict=True)],
                  "seed": row["sampling_seed"][j]} for j, ids in enumerate(row["response_ids"])]
    for name, own in (("session", row.get(SESSION)), ("prompt_ids", row["response_prompt_ids"])):
        if own is not None:
            responses = [response | {name: value} for response, value in zip(responses, own, strict=True)]
    return {"group_id": row["group_id"], "position": row["position"], "lease_no": row["lease_no"],
            "data_source": row["data_source"], "meta": json.loads(row["meta_json"]), "prompt_ids": row["prompt_ids"],
            "idx_min": row["idx_min"], "idx_max": row["idx_max"], "temperature": row["sampling"]["temperature"],
            "responses": responses}
