"""Audit: conservation is a partition, not a sum (experience-store.md 3.11).

Every position below the frontier is in exactly one state, and every landed row is in exactly one state. Read from the
run directory alone, independently of `Index` and `Positions`: what they decided is checked against the files.

A file that is gone shows where another one tells that it was there: a claim names its rows, the shards of a stream have
no gap, a try follows the recorded end of the one before it, and the end of the data leaves every position finished.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Set
from dataclasses import dataclass, field, fields
from typing import Any

from rl_core.experience.audit_facts import Facts, Place, Row, ranges, read_facts
from rl_core.experience.audit_states import (
    ENDED,
    POSITION_STATES,
    ROW_STATES,
    SHARD_STATES,
    AuditedPrompt,
    AuditedShard,
    Standing,
    as_json,
    count_dropped,
    count_failed_groups,
    count_filtered,
    count_rows,
    list_prompts,
    list_shards,
    states_of_positions,
    states_of_rows,
    states_of_shards,
)
from rl_core.experience.ledger import CONSUMER
from rl_core.experience.shards import shard_key
from rl_core.offline import Taken, read_taken
from rl_core.records import recorded_steps
from rl_core.rescoring import origin_of, rescored_shards
from rl_core.revisions import read_config
from rl_core.run_dir import RunDir, owner_is_alive
from rl_core.types import Claim, ClaimedGroup, group_id, parse_group_id


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
    """Retired ones included."""
    shard_states: dict[str, int]
    filtered: dict[str, int] = field(default_factory=dict[str, int])
    """Groups that a filter left out, by reason: `no_spread` (landed, then dropped), or what the filter said of a group
    that has not landed. Each has finished its position."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Groups that landed and that no step takes, by reason (DropReason), without those that a filter left out. Each is
    followed by another try of its position, or by the end of its tries."""
    failed: dict[str, int] = field(default_factory=dict[str, int])
    """Tries of answers that failed and were sampled again, or left a partial group, in groups that landed, by reason;
    those of retired shards are not known any more."""
    failed_groups: dict[str, int] = field(default_factory=dict[str, int])
    """Tries of groups that ended without a row, by reason: outcomes that are not `filtered`."""
    origin: dict[str, Any] | None = None
    """Of a run on another run's shards: `run_key` and `run_uuid` of that one, whether they are `rescored`, and
    `shards`: each of this run -> the one there."""
    violations: list[str] = field(default_factory=list[str])
    each_prompt: list[AuditedPrompt] | None = None
    """Every position below the frontier, in the order of the data; None where it was not asked for."""
    each_shard: list[AuditedShard] | None = None
    """Every shard, in order of stream and number; None where it was not asked for."""

    @property
    def holds(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        """The object of `headway audit --json`, with `holds`."""
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "holds": self.holds,
                "each_prompt": as_json(self.each_prompt), "each_shard": as_json(self.each_shard)}


def audit(run: RunDir, *, n_prompts: int | None = None, epochs: int | None = None, consumer: str = CONSUMER,
          each_prompt: bool = False, each_shard: bool = False) -> AuditReport:
    """Check a run directory, live or not. Reads and verifies every shard.

    `n_prompts`: positions of a dataset epoch; `epochs`: how many there are. With them, positions that no file names are
    counted at the end of a dataset epoch too. None: not known, or endless. `each_prompt` and `each_shard`: with these
    lists, as long as the run; they are made of what has been read for the counts.
    """
    facts = read_facts(run, consumer)
    claimed = _check_claims(facts)
    _check_revisions(run, facts)
    _check_tries(facts)
    _check_dropped(facts)
    judged = states_of_rows(facts, claimed)
    rows, shards = count_rows(facts, judged), Counter(states_of_shards(facts, judged).values())
    standing = states_of_positions(facts)
    nameless = _without_trace(standing.keys(), n_prompts, epochs if facts.data_ended else None)
    positions, taken = Counter(at.state for at in standing.values()), read_taken(run)
    nameless_state = \
        "absent" if taken else "lost" if facts.data_ended else "leased" if owner_is_alive(run) else "unleased"
    positions[nameless_state] = sum(len(missing) for missing in nameless.values())
    origin = None if taken is None else _origin(run, facts, taken)
    _check_end(facts, standing, nameless)
    records = recorded_steps(run)
    facts.violations += [f"step {k} has a record but no claim" for k in records if not run.claim(k, consumer).exists()]
    facts.violations += [f"step {k} is void but has a record" for k in records if k in facts.voided]
    last = max(standing, default=(0, -1))
    return AuditReport(
        positions={state: positions[state] for state in POSITION_STATES},
        rows={state: rows[state] for state in ROW_STATES}, frontier=(last[0], last[1] + 1), claims=len(facts.claims),
        recorded=len(records), violations=facts.violations, shards=shards.total(),
        shard_states={state: shards[state] for state in SHARD_STATES}, filtered=count_filtered(facts),
        dropped=count_dropped(facts), failed=dict(sorted(facts.failed.items())),
        failed_groups=count_failed_groups(facts), origin=origin,
        each_prompt=list_prompts(facts, standing, nameless, nameless_state) if each_prompt else None,
        each_shard=list_shards(facts, judged, claimed) if each_shard else None)


# -- shards of another run


def _origin(run: RunDir, facts: Facts, taken: Taken) -> dict[str, Any]:
    """Which shard comes from which. Every one that was taken is here, or was retired, or is seen to be damaged; none is
    here that was not taken."""
    known = facts.digests.keys() | facts.unverified.keys() | facts.quarantined.keys() | facts.retired
    if taken.rescored:
        of = {key: origin_of(run, *_parts(key)) for key in facts.digests}
        placed = rescored_shards(run) if run.rescored.exists() else dict[str, str | None]()
        shards = {new: key for key, new in placed.items() if new is not None} | {k: o for k, o in of.items() if o}
        foreign, lost = [key for key, o in of.items() if o not in taken.shards], [k for k in shards if k not in known]
    else:
        shards = {key: key for key in taken.shards}
        foreign = [key for key, digest in facts.digests.items() if taken.shards.get(key) != digest]
        lost = [key for key in shards if key not in known]
    facts.violations += [f"shard {key} is not one that was taken from run {taken.run_key}" for key in foreign]
    facts.violations += [f"shard {key}, of {shards[key]} of run {taken.run_key}, is gone" for key in lost]
    return {"run_key": taken.run_key, "run_uuid": taken.run_uuid, "rescored": taken.rescored, "shards": shards}


def _parts(key: str) -> tuple[str, int]:
    stream, seq = key.rsplit("/", 1)
    return stream, int(seq)


# -- claims


def _check_claims(facts: Facts) -> dict[str, tuple[str, int, int]]:
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


def _check_group(claim: Claim, group: ClaimedGroup, key: str, row: Row | None, facts: Facts) -> list[str]:
    if key in facts.unverified or key in facts.quarantined:
        return [f"claim {claim.step}: shard {key} does not verify any more"]
    if row is None:
        return [f"claim {claim.step}: {group.group_id} is not in shard {key} row {group.row}"]
    if row.group_id != group.group_id or row.place != (group.dataset_epoch, group.position):
        return [f"claim {claim.step}: shard {key} row {group.row} holds {row.group_id}, not {group.group_id}"]
    if key not in facts.retired and claim.shard_digests.get(key) != facts.digests[key]:
        return [f"claim {claim.step}: the digest of shard {key} is not the one that was claimed"]
    return []


def _check_revisions(run: RunDir, facts: Facts) -> None:
    """Config revisions never fall from claim to claim, each that a claim names is there and judged it, and none claims
    behind the end that was recorded for it."""
    before, rules = 0, dict[int, tuple[str, int, str]]()
    for claim in facts.claims:
        here, stored = f"claim {claim.step} is of revision {claim.revision}", run.settings(claim.revision)
        if claim.revision < before:
            facts.violations.append(f"{here}, the one before it of revision {before}")
        before = claim.revision
        if claim.revision not in rules and stored.exists():
            config = read_config(stored)
            staleness = config.staleness
            rules[claim.revision] = (str(staleness.bound), staleness.effective_hard_max, config.claim_policy)
        elif claim.revision not in rules and claim.revision:
            facts.violations.append(f"{here}, which is not there")
        judged = (claim.eta, claim.hard_max, claim.policy)
        if (rule := rules.get(claim.revision, judged)) != judged:
            facts.violations.append(f"{here}, whose bound, hard_max and policy are {rule}, not {judged}")
        end = facts.ends.get(claim.revision)
        if end is not None and end is not facts.end and claim.step >= end.step:
            facts.violations.append(f"{here}, which ended at step {end.step}")


def _check_tries(facts: Facts) -> None:
    """A try is leased only after the one before it has its drop or its outcome on disk."""
    highest: dict[Place, tuple[int, int]] = {}
    named = [(row.place, row.group_id) for row in facts.rows]
    named += [((o.dataset_epoch, o.position), name) for name, o in facts.outcomes.items()]
    named += [((g.dataset_epoch, g.position), g.group_id) for claim in facts.claims for g in claim.groups]
    for place, name in named:
        _, prompt_idx, try_no = parse_group_id(name)
        highest[place] = max(highest.get(place, (0, prompt_idx)), (try_no, prompt_idx))
    for place, (last, prompt_idx) in sorted(highest.items()):
        for name in (group_id(place[0], prompt_idx, try_no) for try_no in range(last)):
            if name not in facts.outcomes and name not in facts.dropped:
                facts.violations.append(f"dataset epoch {place[0]} position {place[1]} has a try {last}, but nothing "
                                        f"ended {name}")


def _check_dropped(facts: Facts) -> None:
    """Only what has landed is dropped. A shard that cannot be read may hold what is missed."""
    if not facts.unverified and not facts.quarantined:
        absent = facts.dropped_before.difference(row.group_id for row in facts.rows)
        facts.violations += [f"{name} is dropped as {facts.dropped[name]}, but no shard holds it"
                             for name in sorted(absent)]


def _without_trace(places: Set[Place], n_prompts: int | None, epochs: int | None) -> dict[int, list[int]]:
    """Dataset epoch -> positions below the frontier that no file names; of `epochs` whole ones if given."""
    above: dict[int, int] = {}
    for epoch, position in places:
        above[epoch] = max(above.get(epoch, 0), position + 1)
    newest = max(above, default=0)
    missing: dict[int, list[int]] = {}
    for epoch in range(newest + 1 if epochs is None else epochs):
        whole = n_prompts is not None and (epochs is not None or epoch < newest)
        n = n_prompts if n_prompts is not None and whole else above.get(epoch, 0)
        missing[epoch] = [position for position in range(n) if (epoch, position) not in places]
    return missing


def _check_end(facts: Facts, standing: dict[Place, Standing], nameless: dict[int, list[int]]) -> None:
    """What the record of the end says of the claims, and of every position once the data has ended."""
    if facts.end is None:
        return
    if facts.end.step != len(facts.claims):
        facts.violations.append(f"the run ended at step {facts.end.step}, but {len(facts.claims)} steps have a claim")
    if not facts.data_ended:
        return
    unfinished: dict[tuple[int, str], list[int]] = defaultdict(list)
    for (epoch, position), at in standing.items():
        if at.state not in ENDED:
            unfinished[epoch, at.state].append(position)
    unfinished.update(((epoch, "lost"), missing) for epoch, missing in nameless.items() if missing)
    facts.violations += [f"dataset epoch {epoch} position {ranges(positions)} is {state}, but the data has ended"
                         for (epoch, state), positions in sorted(unfinished.items())]
    pending = sum(at.state == "pending" for at in standing.values())
    if pending != facts.end.left_over:
        facts.violations.append(f"{pending} groups wait, but the data ended with {facts.end.left_over} left over")
