"""The one state of every position, row and shard of a run, and why it is in it; pure functions of `Facts`.

Nothing is read here: `audit_facts.py` reads, `audit.py` checks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from rl_core.experience.audit_facts import Facts, Place, Row
from rl_core.types import group_id, parse_group_id

POSITION_STATES: Final = (
    "trained", "voided", "filtered", "dropped", "failed", "poison", "given_up", "pending", "leased", "unleased",
    "absent", "lost")
"""`dropped` and `failed` wait for another try. No file names the last four: `leased` is in flight, or about to be
leased again, while the run has an owner; `unleased` is what an owner that is gone had in flight, first to be leased by
the next one; `absent` is what no shard holds that a run has taken from another one (offline.md); `lost` is what nobody
leases again, since the data has ended: a violation."""
ENDED: Final = ("trained", "voided", "filtered", "poison", "given_up", "pending")
"""States that the end of the data leaves; `pending` are the groups that were too few for a step."""
ROW_STATES: Final = (
    "unverified", "claimed", "void", "dropped", "filtered", "duplicate", "fenced", "eligible", "quarantined")
"""`dropped` holds rows whose group has an outcome, too."""
SHARD_STATES: Final = ("eligible", "claimed", "dropped", "duplicate", "quarantined", "unverified", "retired")
"""A shard is what the first of these says that fits any of its rows: a row waits, is claimed (or its step void), has
ended otherwise; all are duplicates. A retired one is not there any more."""
NO_SPREAD: Final = "no_spread"
"""Reason of a group that landed and that a filter then dropped."""

Claims = Mapping[str, tuple[str, int, int]]
"""Group id -> (shard, row, step) of its claim."""


class Standing(NamedTuple):
    """Where a position is: `Standing("trained", "e0-p12-t1", 3)`."""

    state: str
    group_id: str
    """The try that says so."""
    step: int | None = None
    """The training step that has claimed it."""


class AuditedPrompt(NamedTuple):
    """All that became of one position of a dataset epoch."""

    dataset_epoch: int
    position: int
    group_id: str | None
    """Its last try, or the one that was claimed; None where no file names the position."""
    state: str
    """One of POSITION_STATES."""
    step: int | None
    """Training step of `trained` and `voided`."""
    reason: str | None
    """Why it is filtered, dropped, failed, poison or given_up; None in other states."""
    tries: int
    """Tries up to `group_id`, that one included."""
    before: list[str | None]
    """Why each try before that one was not trained, in their order; None where nothing says so, a violation."""


class AuditedShard(NamedTuple):
    """All that became of one shard."""

    shard: str
    """`<stream>/<number>`: `w-4f2a/12`."""
    state: str
    """One of SHARD_STATES."""
    steps: list[int]
    """Training steps that claim rows of it, ascending; those of void ones included."""
    rows: dict[str, int]
    """State of ROW_STATES -> rows, without zeros."""
    reason: str | None
    """Why it is quarantined or does not verify."""


# -- rows and shards


def states_of_rows(facts: Facts, claimed: Claims) -> list[tuple[Row, str]]:
    """Every row of a shard that verifies, or did before it was retired, with its state."""
    states: list[tuple[Row, str]] = []
    judged: dict[str, Row] = {}
    for row in sorted(facts.rows, key=lambda r: (-r.idx_min, r.shard, r.row)):
        if row.group_id in claimed:
            shard, number, step = claimed[row.group_id]
            mine = (row.shard, row.row) == (shard, number)
            states.append((row, "duplicate" if not mine else "void" if step in facts.voided else "claimed"))
        elif row.group_id in judged:
            states.append((row, "duplicate"))
        else:
            judged[row.group_id] = row
            reason = facts.dropped.get(row.group_id)
            ended = "dropped" if row.group_id in facts.outcomes or reason else "eligible"
            states.append((row, reason if reason in ("filtered", "fenced") else ended))
    return states


def count_rows(facts: Facts, judged: Iterable[tuple[Row, str]]) -> Counter[str]:
    """Rows by state, those of shards that cannot be read included, as far as these say how many they are."""
    states = Counter(state for _, state in judged)
    states["unverified"] = sum(facts.unverified.values())
    states["quarantined"] = sum(facts.quarantined.values())
    return states


def states_of_shards(facts: Facts, judged: Iterable[tuple[Row, str]]) -> dict[str, str]:
    """Every shard with its state."""
    of_rows: dict[str, set[str]] = defaultdict(set)
    for row, state in judged:
        of_rows[row.shard].add(state)
    states = {shard: "eligible" if "eligible" in found else "claimed" if found & {"claimed", "void"}
              else "duplicate" if found == {"duplicate"} else "dropped" for shard, found in of_rows.items()}
    for state, shards in (("retired", facts.retired), ("unverified", facts.unverified),
                          ("quarantined", facts.quarantined)):
        states.update(dict.fromkeys(shards, state))
    return states


def list_shards(facts: Facts, judged: Iterable[tuple[Row, str]], claimed: Claims) -> list[AuditedShard]:
    """Every shard, in order of stream and number."""
    judged = list(judged)
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    steps: dict[str, set[int]] = defaultdict(set)
    for row, state in judged:
        rows[row.shard][state] += 1
        if state in ("claimed", "void"):
            steps[row.shard].add(claimed[row.group_id][2])
    for state, bad in (("unverified", facts.unverified), ("quarantined", facts.quarantined)):
        rows.update((shard, Counter({state: n})) for shard, n in bad.items())
    return [AuditedShard(shard=shard, state=state, steps=sorted(steps[shard]), reason=facts.damage.get(shard),
                         rows={each: rows[shard][each] for each in ROW_STATES if rows[shard][each]})
            for shard, state in sorted(states_of_shards(facts, judged).items(), key=lambda each: _in_order(each[0]))]


def _in_order(shard: str) -> tuple[str, int]:
    """`"w-4f2a/12"` -> `("w-4f2a", 12)`."""
    stream, seq = shard.rsplit("/", 1)
    return stream, int(seq)


# -- positions


def states_of_positions(facts: Facts) -> dict[Place, Standing]:
    """Every position that a file names with its one state; a second one is a violation."""
    found: dict[Place, dict[str, Standing]] = defaultdict(dict)
    latest: dict[Place, tuple[int, str, str]] = {}
    for claim in facts.claims:
        state = "voided" if claim.step in facts.voided else "trained"
        for group in claim.groups:
            found[group.dataset_epoch, group.position][state] = Standing(state, group.group_id, claim.step)
    for name, outcome in facts.outcomes.items():
        place = (outcome.dataset_epoch, outcome.position)
        if outcome.kind == "failed":
            _later(latest, place, name, "failed")
        else:
            found[place][outcome.kind] = Standing(outcome.kind, name)
    for row in facts.rows:
        reason = facts.dropped.get(row.group_id)
        if reason == "filtered":
            found[row.place]["filtered"] = Standing("filtered", row.group_id)
        elif row.group_id not in facts.outcomes:
            _later(latest, row.place, row.group_id, "dropped" if reason else "pending")
    standings: dict[Place, Standing] = {}
    for place in latest.keys() | found.keys():
        final = found.get(place, {})
        if len(final) > 1:
            facts.violations.append(f"dataset epoch {place[0]} position {place[1]} is {' and '.join(sorted(final))}")
        standings[place] = final[min(final)] if final else Standing(*latest[place][1:])
    return standings


def _later(latest: dict[Place, tuple[int, str, str]], place: Place, name: str, state: str) -> None:
    """The highest try says in which state a position is that is not finished."""
    latest[place] = max(latest.get(place, (-1, "", "")), (parse_group_id(name)[2], state, name))


def list_prompts(facts: Facts, standing: Mapping[Place, Standing], nameless: Mapping[int, list[int]],
                 nameless_state: str) -> list[AuditedPrompt]:
    """Every position below the frontier, in the order of the data. `nameless`: dataset epoch -> positions that no file
    names."""
    prompts = [AuditedPrompt(epoch, position, None, nameless_state, None, None, 0, [])
               for epoch, missing in nameless.items() for position in missing]
    for (dataset_epoch, position), (state, name, step) in standing.items():
        epoch, prompt_idx, try_no = parse_group_id(name)
        before = [_why_ended(facts, group_id(epoch, prompt_idx, i)) for i in range(try_no)]
        reason = None if step is not None or state == "pending" else _why_ended(facts, name)
        prompts.append(AuditedPrompt(dataset_epoch, position, name, state, step, reason, try_no + 1, before))
    return sorted(prompts, key=lambda prompt: prompt[:2])


def _why_ended(facts: Facts, name: str) -> str | None:
    """Why a try was not trained; None where nothing says so."""
    if name in facts.outcomes:
        return facts.outcomes[name].reason
    reason = facts.dropped.get(name)
    return NO_SPREAD if reason == "filtered" else reason


# -- reasons


def count_filtered(facts: Facts) -> dict[str, int]:
    """Reason -> groups that a filter left out."""
    reasons = Counter(o.reason for o in facts.outcomes.values() if o.kind == "filtered")
    reasons += Counter(NO_SPREAD for reason in facts.dropped.values() if reason == "filtered")
    return dict(sorted(reasons.items()))


def count_dropped(facts: Facts) -> dict[str, int]:
    """Reason -> groups that landed and that no step takes, without those that a filter left out."""
    return dict(sorted(Counter(reason for reason in facts.dropped.values() if reason != "filtered").items()))


def count_failed_groups(facts: Facts) -> dict[str, int]:
    """Reason -> tries of groups that ended without a row."""
    return dict(sorted(Counter(o.reason for o in facts.outcomes.values() if o.kind != "filtered").items()))


def as_json(rows: Iterable[AuditedPrompt | AuditedShard] | None) -> list[dict[str, Any]] | None:
    """The objects of `headway audit --json`."""
    return None if rows is None else [row._asdict() for row in rows]
