"""What the files of one run say about its groups, for the audit: claims, drops, outcomes, rows, each read by itself.

Nothing is taken from `Index`, `Positions` or `Known`, whose decisions the audit checks.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

from rl_core.errors import BrokenFile, ShardCorrupt
from rl_core.experience.discovery import SHARD_NAME, stream_names
from rl_core.experience.ledger import (
    CONSUMER,
    EndOfData,
    claimed_steps,
    drop_files,
    read_claim,
    read_drops,
    read_end,
    read_retired,
    voided_steps,
)
from rl_core.experience.outcomes import outcome_ids, read_outcome
from rl_core.experience.shards import map_shard, shard_key, verify_shard
from rl_core.run_dir import RunDir, file_numbers, read_json
from rl_core.types import Claim, Drop, Outcome

Place = tuple[int, int]
"""(dataset epoch, position)."""


Gone = dict[str, tuple[list[int], int]]
"""Stream -> (its shards that are absent, the last one that was listed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A landed group: one row of one shard that verifies."""

    group_id: str
    place: Place
    idx_min: int
    shard: str
    row: int


@dataclass(kw_only=True, slots=True)
class Facts:
    """All that the files of one run say about groups, and in `violations` what cannot be."""

    end: EndOfData | None
    """Of the current revision."""
    ends: dict[int, EndOfData] = field(default_factory=dict[int, EndOfData])
    """By config revision: an amended run goes on behind the end of the revision before."""
    claims: list[Claim] = field(default_factory=list[Claim])
    voided: set[int] = field(default_factory=set[int])
    rows: list[Row] = field(default_factory=list[Row])
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Shard -> digest, of the shards that verify."""
    unverified: dict[str, int] = field(default_factory=dict[str, int])
    """Shard that does not verify and is not in quarantine -> rows (at least)."""
    retired: set[str] = field(default_factory=set[str])
    """Shards that retention has removed; their rows are in `rows`, as claims and the ledger tell of them."""
    quarantined: dict[str, int] = field(default_factory=dict[str, int])
    damage: dict[str, str] = field(default_factory=dict[str, str])
    """Shard -> why it is in quarantine, or does not verify."""
    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    failed: Counter[str] = field(default_factory=Counter[str])
    """Reason -> tries of answers that failed in groups that landed all the same, of the shards that verify."""
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    """Group id -> reason."""
    dropped_before: frozenset[str] = frozenset()
    """Those that were dropped before any row was read: each has its row."""
    violations: list[str] = field(default_factory=list[str])

    @property
    def data_ended(self) -> bool:
        return self.end is not None and self.end.reason == "data"


def read_facts(run: RunDir, consumer: str = CONSUMER) -> Facts:
    """A live run writes meanwhile. What follows from something is read after it, so that nothing seems to be missing:
    claims after the ends and revisions before them, rows after the claims that name them, the ends of tries after the
    rows of later tries."""
    newest = max(file_numbers(run.revisions, r"rev-(\d{6})\.json"), default=0)
    ends = {r: end for r in range(newest + 1) if (end := read_end(run, r, consumer)) is not None}
    facts = Facts(end=ends.get(newest), ends=ends)
    _read_claims(run, facts, consumer)
    if any(claim.revision > newest for claim in facts.claims) and run.settings(newest + 1).exists():
        facts.end = None  # amended meanwhile: it goes on
    files = drop_files(run, consumer)
    for path in files:
        _add_drops(facts, path.name, read_drops(path))
    facts.dropped_before = frozenset(facts.dropped)
    gone = _read_shards(run, facts)
    facts.outcomes = {name: read_outcome(run, name) for name in outcome_ids(run)}
    for path in drop_files(run, consumer):
        if path not in files:
            _add_drops(facts, path.name, read_drops(path))
    newer, meanwhile = len(facts.claims), set[str]()
    while not facts.violations and run.claim(newer, consumer).exists():
        claim = read_claim(run, newer, consumer)
        _add_drops(facts, f"claim {newer}", claim.dropped)
        meanwhile.update(group.group_id for group in claim.groups)
        newer += 1
    _add_retired(run, facts, gone, meanwhile, consumer)
    facts.voided = set(voided_steps(run, consumer))
    return facts


def _add_retired(run: RunDir, facts: Facts, gone: Gone, meanwhile: set[str], consumer: str) -> None:
    """Shards that are not there though they were: retired, or a violation. Every row of a retired one is claimed
    (`meanwhile`: by a claim that is newer than `facts`) or has ended."""
    retired = read_retired(run, consumer)  # after the shards: it is written before they are removed
    for stream, (seqs, last) in gone.items():
        if lost := [seq for seq in seqs if (stream, seq) not in retired.shards]:
            facts.violations.append(f"stream {stream}: shard {ranges(lost)} is gone, shard {last} is there")
    there = facts.digests.keys() | facts.unverified.keys() | facts.quarantined.keys()
    facts.retired = {key for shard in retired.shards if (key := shard_key(*shard)) not in there}
    told: dict[tuple[str, int], Row] = {}
    ended = facts.dropped.keys() | facts.outcomes.keys() | meanwhile
    for claim in facts.claims:
        for group in claim.groups:
            ended.add(group.group_id)
            if (key := shard_key(group.stream, group.seq)) in facts.retired:
                told[key, group.row] = Row(group_id=group.group_id, place=(group.dataset_epoch, group.position),
                                           idx_min=0, shard=key, row=group.row)
    for row in retired.rows:
        key = shard_key(row.stream, row.seq)
        if key not in facts.retired or (key, row.row) in told:
            continue
        if row.group_id not in ended:
            facts.violations.append(f"shard {key} was retired, but {row.group_id} in its row {row.row} waits")
        told[key, row.row] = Row(group_id=row.group_id, place=(row.dataset_epoch, row.position), idx_min=row.idx_min,
                                 shard=key, row=row.row)
    facts.rows += told.values()


def _read_claims(run: RunDir, facts: Facts, consumer: str) -> None:
    try:
        facts.claims = [read_claim(run, step, consumer) for step in claimed_steps(run, consumer)]
    except BrokenFile as error:
        facts.violations.append(str(error))
    for claim in facts.claims:
        _add_drops(facts, f"claim {claim.step}", claim.dropped)


def _add_drops(facts: Facts, where: str, drops: tuple[Drop, ...]) -> None:
    for drop in drops:
        if drop.group_id in facts.dropped:
            facts.violations.append(f"{drop.group_id} is dropped again by {where}")
        facts.dropped[drop.group_id] = drop.reason


def _read_shards(run: RunDir, facts: Facts) -> Gone:
    missing: Gone = {}
    reports = [read_json(path) for path in sorted(run.quarantine.glob("*.json"))]
    bad = {shard_key(report["stream"], report["seq"]): str(report["error"]) for report in reports if "seq" in report}
    for stream in stream_names(run.streams):
        listed = [int(hit.group(1)) for name in stream_names(run.stream(stream)) if (hit := SHARD_NAME.fullmatch(name))]
        gone = [seq for seq in set(range(max(listed, default=0))).difference(listed)
                if not run.shard(stream, seq).exists()]  # a listing may miss what lands meanwhile
        for seq in listed:
            try:
                _read_shard(run, facts, stream, seq, bad.get(shard_key(stream, seq)))
            except FileNotFoundError:  # retired meanwhile
                gone.append(seq)
        if gone:
            missing[stream] = sorted(gone), max(listed)
    return missing


def _read_shard(run: RunDir, facts: Facts, stream: str, seq: int, damage: str | None) -> None:
    """`damage`: what its report in quarantine says; None where there is none."""
    key = shard_key(stream, seq)
    try:
        info = verify_shard(run.shard(stream, seq))
        metas = cast("list[str]", map_shard(run.shard(stream, seq))[0].column("meta_json").to_pylist())
    except ShardCorrupt as error:
        (facts.unverified if damage is None else facts.quarantined)[key] = _stated_rows(run, key)
        facts.damage[key] = damage or str(error)
        return
    if damage is not None:
        facts.quarantined[key], facts.damage[key] = info.rows, damage
        return
    facts.digests[key] = info.shard_digest
    for meta in metas:
        facts.failed.update(failed_tries(meta))
    facts.rows += [Row(group_id=info.group_id[i], place=(int(info.dataset_epoch[i]), int(info.position[i])),
                        idx_min=int(info.idx_min[i]), shard=key, row=i) for i in range(info.rows)]


def failed_tries(meta_json: str) -> dict[str, int]:
    """Reason -> failed tries of a landed group: `{"reward_error": 2}`. A row of before reasons were counted has their
    number and the last one, which stands for all of them; a row of another writer has none."""
    try:
        meta: Any = json.loads(meta_json)
        counted: dict[Any, Any] = meta.get("failed") or ({meta["last_failure"]: meta["failures"]}
                                                         if "last_failure" in meta else {})
        return {str(reason): int(tries) for reason, tries in counted.items()}
    except (ValueError, TypeError, AttributeError, KeyError):
        return {}


def _stated_rows(run: RunDir, key: str) -> int:
    """Rows that a bad shard says it has; 1 if it cannot even say."""
    stream, seq = key.rsplit("/", 1)
    try:
        return int(map_shard(run.shard(stream, int(seq)))[1].get("rl.groups", "1"))
    except (ShardCorrupt, ValueError):
        return 1


def ranges(numbers: list[int]) -> str:
    """`[3, 4, 5, 9]` -> "3-5, 9"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
