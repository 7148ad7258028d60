"""Audit: conservation is a partition, not a sum (experience-store.md 3.11).

Every position below the frontier is in exactly one state, and every landed row is in exactly one state. Read from the
run directory alone, independently of `Index` and `Positions`: what they decided is checked against the files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rl_core.errors import BrokenFile, ShardCorrupt
from rl_core.experience.discovery import SHARD_NAME, stream_names
from rl_core.experience.ledger import CONSUMER, claimed_steps, drop_files, read_claim, read_drops, voided_steps
from rl_core.experience.outcomes import outcome_ids, read_outcome
from rl_core.experience.shards import map_shard, shard_key, verify_shard
from rl_core.records import recorded_steps
from rl_core.run_dir import RunDir, read_json
from rl_core.types import Claim, ClaimedGroup, Outcome, parse_group_id

POSITION_STATES: Final = (
    "trained", "voided", "filtered", "dropped", "failed", "poison", "given_up", "pending", "leased")
"""`dropped` and `failed` wait for another try; `leased` also holds what is to be leased again without a trace."""
ROW_STATES: Final = (
    "unverified", "claimed", "void", "dropped", "filtered", "duplicate", "fenced", "eligible", "quarantined")
"""`dropped` holds rows whose group has an outcome, too."""

Place = tuple[int, int]
"""(dataset epoch, position)."""


@dataclass(kw_only=True)
class AuditReport:
    """`positions` and `rows` count every state; the partition holds iff `violations` is empty."""

    positions: dict[str, int]
    rows: dict[str, int]
    frontier: Place
    """(dataset epoch, position) of the first position above all that left a trace."""
    claims: int
    recorded: int
    """Steps with a record."""
    shards: int
    violations: list[str] = field(default_factory=list[str])

    @property
    def holds(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    group_id: str
    place: Place
    idx_min: int
    shard: str
    row: int


@dataclass(kw_only=True, slots=True)
class _Facts:
    """All that the files of one run say about groups."""

    claims: list[Claim]
    voided: set[int]
    rows: list[_Row]
    digests: dict[str, str]
    """Shard -> digest, of the shards that verify."""
    unverified: dict[str, int]
    """Shard that does not verify and is not in quarantine -> rows (at least)."""
    quarantined: dict[str, int]
    outcomes: dict[str, Outcome]
    dropped: dict[str, str]
    """Group id -> reason."""
    violations: list[str]


def audit(run: RunDir, *, n_prompts: int | None = None, consumer: str = CONSUMER) -> AuditReport:
    """Check a run directory, live or not. Reads and verifies every shard.

    `n_prompts`: positions of a dataset epoch, so that those at the end of a closed one are counted without a trace.
    """
    facts = _read(run, consumer)
    claimed = _check_claims(facts)
    rows = _row_states(facts, claimed)
    positions, frontier = _position_states(facts, n_prompts)
    records = recorded_steps(run)
    facts.violations += [f"step {k} has a record but no claim" for k in records if k >= len(facts.claims)]
    facts.violations += [f"step {k} is void but has a record" for k in records if k in facts.voided]
    return AuditReport(
        positions={state: positions[state] for state in POSITION_STATES},
        rows={state: rows[state] for state in ROW_STATES}, frontier=frontier, claims=len(facts.claims),
        recorded=len(records), violations=facts.violations,
        shards=len(facts.digests) + len(facts.unverified) + len(facts.quarantined))


# -- reading


def _read(run: RunDir, consumer: str) -> _Facts:
    facts = _Facts(claims=[], voided=set(voided_steps(run, consumer)), rows=[], digests={}, unverified={},
                   quarantined={}, outcomes={name: read_outcome(run, name) for name in outcome_ids(run)}, dropped={},
                   violations=[])
    try:
        facts.claims = [read_claim(run, step, consumer) for step in claimed_steps(run, consumer)]
    except BrokenFile as error:
        facts.violations.append(str(error))
    for where, drops in [(f"claim {claim.step}", claim.dropped) for claim in facts.claims] + [
            (path.name, read_drops(path)) for path in drop_files(run, consumer)]:
        for drop in drops:
            if drop.group_id in facts.dropped:
                facts.violations.append(f"{drop.group_id} is dropped again by {where}")
            facts.dropped[drop.group_id] = drop.reason
    _read_shards(run, facts)
    return facts


def _read_shards(run: RunDir, facts: _Facts) -> None:
    reports = [read_json(path) for path in sorted(run.quarantine.glob("*.json"))]
    bad = {shard_key(report["stream"], report["seq"]) for report in reports if "seq" in report}
    for stream in stream_names(run.streams):
        for name in stream_names(run.stream(stream)):
            if (hit := SHARD_NAME.fullmatch(name)) is None:
                continue
            key = shard_key(stream, int(hit.group(1)))
            path = run.shard(stream, int(hit.group(1)))
            try:
                info = verify_shard(path)
            except ShardCorrupt:
                (facts.quarantined if key in bad else facts.unverified)[key] = _stated_rows(run, key)
                continue
            if key in bad:
                facts.quarantined[key] = info.rows
                continue
            facts.digests[key] = info.shard_digest
            facts.rows += [_Row(group_id=info.group_id[i], place=(int(info.dataset_epoch[i]), int(info.position[i])),
                                idx_min=int(info.idx_min[i]), shard=key, row=i) for i in range(info.rows)]


def _stated_rows(run: RunDir, key: str) -> int:
    """Rows that a bad shard says it has; 1 if it cannot even say."""
    stream, seq = key.rsplit("/", 1)
    try:
        return int(map_shard(run.shard(stream, int(seq)))[1].get("rl.groups", "1"))
    except (ShardCorrupt, ValueError):
        return 1


# -- claims


def _check_claims(facts: _Facts) -> dict[str, tuple[str, int, int]]:
    """Group id -> (shard, row, step) of all claims; whatever contradicts the shards or another claim is a violation."""
    claimed: dict[str, tuple[str, int, int]] = {}
    places: dict[Place, int] = {}
    stored = {(row.shard, row.row): row for row in facts.rows}
    for claim in facts.claims:
        order = [(g.dataset_epoch, g.position, g.try_no) for g in claim.groups]
        if order != sorted(order):
            facts.violations.append(f"claim {claim.step}: groups are not in training order")
        for group in claim.groups:
            place, key = (group.dataset_epoch, group.position), shard_key(group.stream, group.seq)
            if place in places:
                facts.violations.append(f"dataset epoch {place[0]} position {place[1]} is claimed by steps "
                                        f"{places[place]} and {claim.step}")
            places[place] = claim.step
            claimed[group.group_id] = (key, group.row, claim.step)
            facts.violations += _check_group(claim, group, key, stored.get((key, group.row)), facts)
    facts.violations += [f"{name} is claimed by step {claimed[name][2]} and dropped as {reason}"
                         for name, reason in facts.dropped.items() if name in claimed]
    return claimed


def _check_group(claim: Claim, group: ClaimedGroup, key: str, row: _Row | None, facts: _Facts) -> list[str]:
    if key in facts.unverified or key in facts.quarantined:
        return [f"claim {claim.step}: shard {key} does not verify any more"]
    if row is None:
        return [f"claim {claim.step}: {group.group_id} is not in shard {key} row {group.row}"]
    if row.group_id != group.group_id or row.place != (group.dataset_epoch, group.position):
        return [f"claim {claim.step}: shard {key} row {group.row} holds {row.group_id}, not {group.group_id}"]
    if claim.shard_digests.get(key) != facts.digests[key]:
        return [f"claim {claim.step}: the digest of shard {key} is not the one that was claimed"]
    return []


# -- states


def _row_states(facts: _Facts, claimed: dict[str, tuple[str, int, int]]) -> Counter[str]:
    states: Counter[str] = Counter(unverified=sum(facts.unverified.values()))
    states["quarantined"] = sum(facts.quarantined.values())
    judged: dict[str, _Row] = {}
    for row in sorted(facts.rows, key=lambda r: (-r.idx_min, r.shard, r.row)):
        if row.group_id in claimed:
            shard, number, step = claimed[row.group_id]
            mine = (row.shard, row.row) == (shard, number)
            states["duplicate" if not mine else "void" if step in facts.voided else "claimed"] += 1
        elif row.group_id in judged:
            states["duplicate"] += 1
        else:
            judged[row.group_id] = row
            reason = facts.dropped.get(row.group_id)
            ended = "dropped" if row.group_id in facts.outcomes or reason else "eligible"
            states[reason if reason in ("filtered", "fenced") else ended] += 1
    return states


def _position_states(facts: _Facts, n_prompts: int | None) -> tuple[Counter[str], Place]:
    """Every position with a trace has one state; those between without a trace are leased."""
    found: dict[Place, set[str]] = defaultdict(set)
    latest: dict[Place, tuple[int, str]] = {}
    for claim in facts.claims:
        for group in claim.groups:
            state = "voided" if claim.step in facts.voided else "trained"
            found[group.dataset_epoch, group.position].add(state)
    for name, outcome in facts.outcomes.items():
        place = (outcome.dataset_epoch, outcome.position)
        if outcome.kind == "failed":
            _later(latest, place, parse_group_id(name)[2], "failed")
        else:
            found[place].add(outcome.kind)
    for row in facts.rows:
        reason, try_no = facts.dropped.get(row.group_id), parse_group_id(row.group_id)[2]
        if reason == "filtered":
            found[row.place].add("filtered")
        elif row.group_id not in facts.outcomes:
            _later(latest, row.place, try_no, "dropped" if reason else "pending")
    states: Counter[str] = Counter()
    for place in latest.keys() | found.keys():
        final = found.get(place, set())
        if len(final) > 1:
            facts.violations.append(f"dataset epoch {place[0]} position {place[1]} is {' and '.join(sorted(final))}")
        states[min(final) if final else latest[place][1]] += 1
    places = latest.keys() | found.keys()
    states["leased"] += _without_trace(places, n_prompts)
    last = max(places, default=(0, -1))
    return states, (last[0], last[1] + 1)


def _later(latest: dict[Place, tuple[int, str]], place: Place, try_no: int, state: str) -> None:
    """The highest try says in which state a position is that is not finished."""
    latest[place] = max(latest.get(place, (-1, "")), (try_no, state))


def _without_trace(places: set[Place], n_prompts: int | None) -> int:
    """Positions below the frontier that no file names."""
    above: dict[int, int] = {}
    for epoch, position in places:
        above[epoch] = max(above.get(epoch, 0), position + 1)
    newest = max(above, default=0)
    closed = [above.get(epoch, 0) if n_prompts is None else n_prompts for epoch in range(newest)]
    return sum(closed) + above.get(newest, 0) - len(places)
