"""What the ledger and the outcomes of a run say of its groups, gap by gap, without looking into shards.

For people (summary, frames). The audit reads by itself, strictly (experience-store.md 3.11).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from rl_core.experience.ledger import drop_files, read_claim_file, read_drops, voided_steps
from rl_core.experience.outcomes import outcome_ids, read_outcome
from rl_core.gaps import Gaps, found
from rl_core.records import recorded_steps
from rl_core.run_dir import RunDir, numbered
from rl_core.types import Claim, Drop, Outcome


@dataclass(kw_only=True, slots=True)
class GroupFacts:
    """Claims by step, drops and outcomes by group id."""

    recorded: set[int] = field(default_factory=set[int])
    voided: set[int] = field(default_factory=set[int])
    claims: dict[int, Claim] = field(default_factory=dict[int, Claim])
    drops: dict[str, Drop] = field(default_factory=dict[str, Drop])
    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])

    def state_of(self, step: int) -> str:
        """Of a claimed step and so of its groups: trained, void, or claimed (it has no record yet)."""
        return "trained" if step in self.recorded else "void" if step in self.voided else "claimed"

    @property
    def trained_groups(self) -> int:
        """Groups of the recorded steps."""
        return sum(len(claim.groups) for step, claim in self.claims.items() if step in self.recorded)


def read_group_facts(run: RunDir, *, step: int | None = None, outcomes: bool = True,
                     gaps: Gaps | None = None) -> GroupFacts:
    """Read them, the records before the claims they follow from: a live run writes meanwhile.

    With `step`, that step's claim alone. Without `gaps`, whatever cannot be read raises.
    """
    facts = GroupFacts(recorded=set(recorded_steps(run)))
    facts.voided = set(found(partial(voided_steps, run), str(run.ledger()), gaps) or {})
    paths = dict(numbered(run.ledger(), r"step-(\d{9})\.json"))
    steps = range(max([*paths, *facts.recorded, -1]) + 1) if step is None else [step]
    for k in steps:
        claim = found(partial(read_claim_file, run.claim(k)), str(run.claim(k)), gaps)
        if claim is not None:
            facts.claims[k] = claim
            facts.drops.update((drop.group_id, drop) for drop in claim.dropped)
    if step is None:
        for path in drop_files(run):
            for drop in found(partial(read_drops, path), str(path), gaps) or ():
                facts.drops.setdefault(drop.group_id, drop)
        for name in outcome_ids(run) if outcomes else ():
            outcome = found(partial(read_outcome, run, name), str(run.outcome(name)), gaps)
            if outcome is not None:
                facts.outcomes[name] = outcome
    return facts
