"""What another staleness policy would have made of the groups that a run has landed (replay.md 4). Reads only.

Every landed group that the run has judged, at the step where a claim took it or where it was dropped, is judged again
at that very step, by the same code (staleness.py, index.py) and another rule. What this cannot say: another policy
would have claimed other groups at other steps, so the learner would have had other weights, and the workers would have
sampled other answers, at other ages. It says what the rule does to this data, not what a run under it would have been.
Importable without torch.

Suffix `_G`: one entry per judged group; `_N` per answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.errors import BrokenFile, ConfigError
from rl_core.experience.columns import nested_offsets
from rl_core.experience.discovery import SHARD_NAME, stream_names
from rl_core.experience.index import Index, Rows, group_key, no_rows, rows_of
from rl_core.experience.ledger import CONSUMER, claims, drop_files, drop_number, read_drops, voided_steps
from rl_core.experience.staleness import DROP_REASONS, MASK, STALE, Policy, StalenessRule, judge, masked_tokens, rule_of
from rl_core.experience.verify import ShardInfo, map_shard, verify_shard
from rl_core.plan import check
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import RunDir
from rl_core.types import Claim, DropReason
from rl_core.versions import read_versions

OF_THE_RULE: frozenset[DropReason] = frozenset(reason for reason in DROP_REASONS.values() if reason != "fenced")
"""Drops that a rule judges. Fenced groups belong to another history whatever the policy, and a group that timed out
while the run waited has not landed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Answer lengths, tokens: `Lengths(mean=11.5, p50=9.0, p95=30.0, max=64)`; None of no answers."""

    mean: float | None
    p50: float | None
    p95: float | None
    max: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Some of the judged groups."""

    groups: int
    answers: int
    tokens: int
    """Of their answers."""
    length: Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """What one policy makes of the judged groups: each is trained or dropped."""

    trained: Share
    dropped: Share
    masked_groups: int
    """Of the trained ones: those with tokens that leave the loss by age."""
    masked_tokens: int
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    """Reason -> dropped groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReport:
    """The run's own policy beside another one, on the same groups at the same steps."""

    steps: int
    """Steps with a claim."""
    judged: int
    own: Outcomes
    other: Outcomes
    admitted_instead: Share
    """Groups that the run has dropped and the other policy would have trained."""
    thrown_away_instead: Share
    """Groups that the run has trained and the other policy would have dropped."""
    rules: dict[str, dict[str, Any]]
    """`own` and `other`: policy, bound, hard_max of the newest revision."""
    left_out: dict[str, int]
    """Landed groups that were not judged, by state: waiting, duplicate, fenced, voided; and `unreadable`, the claimed
    and dropped ones whose shard is gone or does not verify."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def other_rule(config: Config, *, policy: Policy | None, bound: Decimal | None, hard_max: int | None) -> Config:
    """The settings with another staleness policy. What is None stays as it is, but for `hard_max`: without it, another
    bound brings its own. Raises ConfigError for what a run would refuse."""
    now = config.staleness
    if hard_max is None and bound is None:
        hard_max = now.hard_max
    given: dict[str, Any] = {"policy": policy or now.policy, "bound": now.bound if bound is None else bound,
                             "hard_max": hard_max, "exact": None}
    try:
        staleness = type(now).model_validate(now.model_dump() | given)
    except ValueError as error:  # pydantic's, with its own words for each field
        raise ConfigError(f"--policy, --bound, --hard-max: {'; '.join(str(error).splitlines()[1:3])}") from error
    changed = config.model_copy(update={"staleness": staleness})
    check(changed)
    return changed


def other_policy(run: RunDir, *, policy: Policy | None = None, bound: Decimal | None = None,
                 hard_max: int | None = None, consumer: str = CONSUMER) -> PolicyReport:
    """Judge the run's landed groups by another policy, at the steps where they were claimed or dropped.

    Raises ConfigError for a policy that cannot be, BrokenFile where claims, drops or versions cannot be read.
    """
    newest = current_revision(run)
    if config_of(run, newest).offline:
        raise ConfigError("explain: this run trains on another run's shards, which have no age in it; explain that run")
    own = {r: config_of(run, r) for r in range(newest + 1)}
    other = {r: other_rule(config, policy=policy, bound=bound, hard_max=hard_max) for r, config in own.items()}
    ledger = _Ledger(run, consumer)
    landed = _Landed(run, ledger)
    idx_of = {v: version.idx for v, version in read_versions(run).items()}

    verdict_G, masked_G = _judged(landed, other, ledger, newest, idx_of)
    trained_G, own_trained_G = verdict_G < STALE, landed.claimed_G
    own_masked_G = np.array([ledger.masked.get(place, 0) for place in landed.places], np.int64)
    own_reasons = [ledger.reasons[key] for key, trained in zip(landed.rows.key.tolist(), own_trained_G.tolist(),
                                                               strict=True) if not trained]
    other_reasons = [DROP_REASONS[int(verdict)] for verdict in verdict_G[~trained_G]]
    return PolicyReport(
        steps=len(ledger.idx), judged=len(landed.rows),
        own=_outcomes(landed, own_trained_G, own_masked_G, own_reasons),
        other=_outcomes(landed, trained_G, masked_G, other_reasons),
        admitted_instead=landed.share(trained_G & ~own_trained_G),
        thrown_away_instead=landed.share(own_trained_G & ~trained_G),
        rules={"own": _words(own[newest]), "other": _words(other[newest])}, left_out=landed.left_out)


def _words(config: Config) -> dict[str, Any]:
    rule = rule_of(config)
    return {"policy": rule.policy, "bound": str(config.staleness.bound), "hard_max": rule.hard_max}


def _outcomes(landed: _Landed, trained_G: NDArray[np.bool_], masked_G: NDArray[np.int64],
              reasons: Sequence[str]) -> Outcomes:
    masked_G = np.where(trained_G, masked_G, 0)
    return Outcomes(trained=landed.share(trained_G), dropped=landed.share(~trained_G),
                    masked_groups=int(np.count_nonzero(masked_G)), masked_tokens=int(masked_G.sum()),
                    reasons=dict(sorted(Counter(reasons).items())))


class _Ledger:
    """What the claims and drops of a run say, by group."""

    def __init__(self, run: RunDir, consumer: str) -> None:
        self.idx: dict[int, int] = {}
        """Step -> its publication index."""
        self.revision: dict[int, int] = {}
        self.claimed: dict[tuple[str, int, int], int] = {}
        """(stream, seq, row) -> step."""
        self.masked: dict[tuple[str, int, int], int] = {}
        self.dropped: dict[int, int] = {}
        """Key of a group -> step."""
        self.reasons: dict[int, DropReason] = {}
        self.keys: list[int] = []
        """Of claimed groups."""
        for claim in claims(run, consumer=consumer):
            self._add(claim)
        for path in drop_files(run, consumer):
            for drop in read_drops(path):
                self._drop(drop.group_id, drop.reason, drop_number(path)[0])
        self.voided = set(voided_steps(run, consumer))

    def _add(self, claim: Claim) -> None:
        self.idx[claim.step], self.revision[claim.step] = claim.idx, claim.revision
        masked = dict(claim.masked)
        for ordinal, group in enumerate(claim.groups):
            self.claimed[group.stream, group.seq, group.row] = claim.step
            self.keys.append(group_key(group.group_id))
            if ordinal in masked:
                self.masked[group.stream, group.seq, group.row] = masked[ordinal]
        for drop in claim.dropped:
            self._drop(drop.group_id, drop.reason, claim.step)

    def _drop(self, name: str, reason: DropReason, step: int) -> None:
        self.dropped[group_key(name)], self.reasons[group_key(name)] = step, reason


class _Landed:
    """The judged groups: their columns, the step of each, and the lengths of their answers.

    Of several rows of one dropped id the index says which one was judged, as it did for the run.
    """

    def __init__(self, run: RunDir, ledger: _Ledger) -> None:
        self.infos: list[ShardInfo] = []
        self._lengths: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
        """By shard: lengths of all answers, first answer of each row."""
        self.left_out: dict[str, int] = dict.fromkeys(("waiting", "duplicate", "fenced", "voided", "unreadable"), 0)
        index = Index(StalenessRule(policy="keep", limit=0, hard_max=0))  # of its verdicts none is asked for
        index.add_claimed(np.array(ledger.keys, np.int64))
        parts, steps = [no_rows()], list[int]()
        total = 0
        for info in _verified(run):
            index.add_shard(info)
            self._add(run, info)
            mine, total = rows_of(info, len(self.infos) - 1), total + info.rows
            found = [ledger.claimed.get((info.ref.stream, info.ref.seq, row)) for row in range(info.rows)]
            at = [row for row, step in enumerate(found) if step is not None and step not in ledger.voided]
            self.left_out["voided"] += sum(step in ledger.voided for step in found if step is not None)
            parts.append(mine.take(np.array(at, np.intp)))
            steps += [step for step in found if step is not None and step not in ledger.voided]
        claimed = len(steps)
        keys: list[int] = index.waiting.key.tolist()
        dropped = [i for i, key in enumerate(keys) if ledger.reasons.get(key) in OF_THE_RULE]
        self.left_out["fenced"] = sum(ledger.reasons.get(key) == "fenced" for key in keys)
        self.left_out["waiting"] = sum(key not in ledger.reasons for key in keys)
        self.left_out["duplicate"] = total - claimed - self.left_out["voided"] - len(keys)
        wanted = sum(step not in ledger.voided for step in ledger.claimed.values()) + sum(
            reason in OF_THE_RULE for reason in ledger.reasons.values())
        self.left_out["unreadable"] = wanted - claimed - len(dropped)
        self.rows = _joined([*parts, index.waiting.take(np.array(dropped, np.intp))])
        self.step_G = np.array(steps + [ledger.dropped[keys[i]] for i in dropped], np.int64)
        self.claimed_G: NDArray[np.bool_] = np.arange(len(self.rows)) < claimed
        self.places: list[tuple[str, int, int]] = [
            (self.infos[int(shard)].ref.stream, self.infos[int(shard)].ref.seq, int(row))
            for shard, row in zip(self.rows.shard, self.rows.row, strict=True)]

    def _add(self, run: RunDir, info: ShardInfo) -> None:
        batch, _ = map_shard(run.shard(info.ref.stream, info.ref.seq))
        outer, inner = nested_offsets(batch.column("response_ids"))
        self.infos.append(info)
        self._lengths.append((np.diff(inner), outer.copy()))

    def lengths(self, at: int) -> NDArray[np.int32]:
        """Of the answers of one judged group, tokens."""
        lengths_N, first = self._lengths[int(self.rows.shard[at])]
        row = int(self.rows.row[at])
        return lengths_N[first[row]:first[row + 1]]

    def runs(self, at: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(version ids, sampled tokens by each) of one judged group."""
        info, row = self.infos[int(self.rows.shard[at])], int(self.rows.row[at])
        mine = slice(int(info.version_offsets[row]), int(info.version_offsets[row + 1]))
        return info.version[mine], info.version_tokens[mine]

    def share(self, chosen_G: NDArray[np.bool_]) -> Share:
        """Counts and answer lengths of some of the groups."""
        parts = [self.lengths(at) for at in np.flatnonzero(chosen_G).tolist()]
        lengths_N = np.concatenate([np.zeros(0, np.int32), *parts])
        empty = not lengths_N.size
        p50, p95 = (None, None) if empty else (float(p) for p in np.percentile(lengths_N, (50, 95)))
        return Share(groups=len(parts), answers=lengths_N.size, tokens=int(lengths_N.sum()), length=Lengths(
            mean=None if empty else float(lengths_N.mean()), p50=p50, p95=p95,
            max=None if empty else int(lengths_N.max())))


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(**{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Rows)})


def _verified(run: RunDir) -> Iterator[ShardInfo]:
    """Every shard that verifies and is not in quarantine, in order of (stream, seq)."""
    for stream in stream_names(run.streams):
        for name in stream_names(run.stream(stream)):
            hit = SHARD_NAME.fullmatch(name)
            if hit is None or run.quarantined(stream, int(hit.group(1))).exists():
                continue
            try:
                yield verify_shard(run.shard(stream, int(hit.group(1))))
            except (BrokenFile, FileNotFoundError):
                continue  # its groups count as unreadable


def _judged(landed: _Landed, configs: dict[int, Config], ledger: _Ledger, newest: int,
            idx_of: dict[int, int]) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Verdict of each group at its step, and its tokens that leave the loss by age; by the rule of that step."""
    rows = landed.rows
    verdict_G, masked_G = np.zeros(len(rows), np.int8), np.zeros(len(rows), np.int64)
    for step in np.unique(landed.step_G).tolist():
        at = np.flatnonzero(landed.step_G == step)
        config = configs[ledger.revision.get(step, newest)]  # no claim yet: it would be made under the newest
        idx, rule = config.idx(step), rule_of(config)
        verdict_G[at] = judge(idx, rule, idx_min_G=rows.idx_min[at], idx_max_G=rows.idx_max[at],
                              n_responses_G=rows.n_responses[at], spread_G=rows.spread[at])
        for i in at[verdict_G[at] == MASK].tolist():
            versions, tokens_R = landed.runs(i)
            if unknown := set(versions.tolist()) - idx_of.keys():
                raise BrokenFile(f"step {step}: tokens of version {min(unknown)}, which has no manifest in this run")
            idx_R = np.array([idx_of[v] for v in versions.tolist()], np.int32)
            masked_G[i] = masked_tokens(idx, rule, idx_R=idx_R, tokens_R=tokens_R)
    return verdict_G, masked_G
