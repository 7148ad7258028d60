"""What is known of a run's groups: claims, drops, outcomes, verified shards, leases, told in any order.

Every fact is durable but the leases; each has its effect on the index (what waits), on the positions (what is leased
next) and on the budgets. A claim counts more than an outcome or a drop, and these count more than a waiting row.
Not thread-safe: `Experience` guards it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.errors import FailureBudgetSpent
from rl_core.experience.health import Health
from rl_core.experience.index import Index, group_key, group_keys
from rl_core.experience.leases import LeaseBook
from rl_core.experience.ledger import RetiredRow, read_retired
from rl_core.experience.lost_leases import put_lost, read_lost
from rl_core.experience.outcomes import outcome_ids, put_outcome, read_outcome
from rl_core.experience.positions import Positions, Slot
from rl_core.experience.shards import ShardInfo
from rl_core.experience.snapshots import read_past
from rl_core.experience.staleness import LEASED_AGAIN, is_drop, judge, rule_of
from rl_core.run_dir import RunDir
from rl_core.types import Claim, Drop, Outcome, OutcomeKind, group_id, parse_group_id

LOG = logging.getLogger("headway.experience")


class Known:
    """Reads the ledger and the outcomes of the run; shards are added as they are verified.

    Raises BrokenFile where the ledger has a gap, ValueError for a policy that cannot work.
    """

    def __init__(self, run: RunDir, config: Config, attempt: int, *, consumer: str, clock: Callable[[], float]) -> None:
        self._run, self._config, self._attempt = run, config, attempt
        self.index = Index(rule_of(config))
        self.positions = Positions()
        self.leases = LeaseBook(attempt, read_lost(run))
        self.health = Health(config, clock)
        self._final: set[int] = set()
        """Groups that ended for good: their position is finished."""
        self._outcomes: set[str] = set()
        self._spent: FailureBudgetSpent | None = None
        self.landed: dict[int, tuple[int, int, int, float, float]] = {}
        """Where `data.sampler` is set, by group key: dataset epoch, prompt index, try, mean reward, spread."""
        self.filtered = 0
        """Groups that a filter was found to have left out in this start."""
        past, retired = read_past(run, consumer), read_retired(run, consumer)
        self.next_step = past.claimed.steps
        """First step without a claim."""
        self.rows_by_shard = past.claimed.rows_by_shard
        """Rows that were claimed before this start."""
        self.retired = retired.shards
        """Shards that were retired before this start."""
        self.passed_over = past.passed_over
        """Snapshots that this start could not use, with the reason."""
        for epoch, n_prompts in past.closed.items():
            self.index.closed.add(epoch)
            self.positions.close(epoch, n_prompts)
        if past.closed:
            self._outcomes.update(name for name in outcome_ids(run) if parse_group_id(name)[0] in past.closed)
        self._note_claimed(past.claimed.groups_G4)
        self._note_dropped(past.claimed.dropped)
        for outcome in past.outcomes.values():
            self._note_outcome(outcome)
        for row in retired.rows:
            self._note_retired(row)
        self.filtered = 0  # what a start finds was filtered before it

    # -- facts

    def add_claim(self, claim: Claim) -> None:
        """The claim of `next_step`."""
        rows = [(g.dataset_epoch, g.position, g.try_no, g.prompt_idx) for g in claim.groups]
        self._note_dropped(claim.dropped)
        self._note_claimed(np.array(rows, np.int64).reshape(-1, 4))
        self.next_step = claim.step + 1
        self.health.judged(len(rows), claim.dropped)

    def add_drops(self, drops: Sequence[Drop]) -> None:
        """A drops file that was written now."""
        self._note_dropped(drops)
        self.health.judged(0, drops)

    def add_shard(self, info: ShardInfo) -> None:
        """A verified shard: its groups wait, unless they are claimed, ended or duplicates. Ends their leases."""
        rows, waits_G = self.index.add_shard(info)
        if self._config.data.sampler is not None:
            columns = (rows.key, rows.dataset_epoch, rows.prompt_idx, rows.try_no, info.reward_mean, rows.spread)
            for key, *row in zip(*(column.tolist() for column in columns), strict=True):
                self.landed.setdefault(key, tuple(row))
        verdict_G = judge(self._config.idx(self.next_step), self.index.rule, idx_min_G=rows.idx_min,
                          idx_max_G=rows.idx_max, n_responses_G=rows.n_responses, spread_G=rows.spread)
        for i, name in enumerate(info.group_id):
            slot = Slot(dataset_epoch=int(rows.dataset_epoch[i]), position=int(rows.position[i]),
                        try_no=int(rows.try_no[i]))
            self.leases.end(name)
            self.positions.known(slot)
            key = int(rows.key[i])
            if key in self.index.ended and key not in self.index.claimed:
                self._note_ended(slot, key)
        self.health.verified((~is_drop(verdict_G[waits_G])).tolist())

    def untold_outcomes(self) -> list[Outcome]:
        """Those that lie in the run directory and are not known. The one method that needs no guard: it takes as long
        as there are many, and what is added meanwhile is no news then."""
        return [read_outcome(self._run, name) for name in outcome_ids(self._run) if name not in self._outcomes]

    def add_outcome(self, outcome: Outcome) -> bool:
        """A group that ended in this attempt without a row. True if that is news."""
        if outcome.group_id in self._outcomes:
            return False
        self._note_outcome(outcome)
        try:
            self.health.failed(outcome)
        except FailureBudgetSpent as error:
            self._spent = error
        return True

    def put_outcome(self, slot: Slot, name: str, kind: OutcomeKind, reason: str, error: str) -> None:
        """Write an outcome that the owner decides, and add it."""
        outcome = Outcome(group_id=name, kind=kind, reason=reason, error=error, try_no=slot.try_no,
                          position=slot.position, dataset_epoch=slot.dataset_epoch)
        put_outcome(self._run, outcome)
        self.add_outcome(outcome)

    # -- leases that end without a fact

    def lose(self, names: Sequence[str]) -> None:
        """Leases that left no trace: the same try is leased again, at most `max_leases` times over all attempts, then
        it is poison."""
        again: list[str] = []
        for name in names:
            if (lease := self.leases.by_id.get(name)) is None:
                continue
            if (times := self.leases.lose(name)) < self._config.failure.max_leases:
                self.positions.lost(lease.slot)
                again.append(name)
            else:
                self.put_outcome(lease.slot, name, "poison", "max_leases",
                                 f"{times} workers died with this group in flight, or lost it")
        if again:
            self._note_lost(again)

    def end_missing(self, name: str) -> None:
        """A live worker neither has the group in flight, nor landed it in a shard that can be read: another try."""
        if (lease := self.leases.by_id.get(name)) is not None:
            self.put_outcome(lease.slot, name, "failed", "lost",
                             f"{lease.worker} does not name it any more, and no readable shard holds it")

    def settle(self, prompt_idx: Callable[[int, int], int] | None) -> None:
        """Record positions that used up their tries as given up. Raises FailureBudgetSpent if failures say so.

        The outcome `given_up` stands under the id of the try that is not made, so that it never hides another one. Not
        possible before all streams were listed, or while the order of prompts is unknown (None).
        """
        limit = self._config.failure.max_tries
        for slot in self.positions.over(limit) if prompt_idx is not None else ():
            assert prompt_idx is not None
            name = group_id(slot.dataset_epoch, prompt_idx(slot.dataset_epoch, slot.position), slot.try_no)
            self.put_outcome(slot, name, "given_up", "max_tries", f"{slot.try_no} tries (failure.max_tries {limit})")
        if self._spent is not None:
            raise self._spent

    # -- effects

    def _note_lost(self, names: Sequence[str]) -> None:
        """For the owners after this one. Without it they begin to count at 0, which no full disk may end a run for."""
        try:
            put_lost(self._run, self._attempt, names, fsync=self._config.storage.fsync)
        except OSError as error:
            LOG.warning("%d lost leases count in this start only: %s", len(names), error)

    def _note_claimed(self, groups_G4: NDArray[np.int64]) -> None:
        """Columns dataset_epoch, position, try, prompt_idx."""
        if groups_G4.size:
            epoch, position, try_no, prompt_idx = groups_G4.T
            self.positions.known_array(epoch.astype(np.int32), position)
            self.index.add_claimed(group_keys(epoch, prompt_idx, try_no))

    def _note_dropped(self, drops: Sequence[Drop]) -> None:
        """Where the row of a drop is not known (yet), its position follows when the row is found."""
        keys = [group_key(drop.group_id) for drop in drops]
        self.filtered += sum(drop.reason == "filtered" for drop in drops)
        for drop, key in zip(drops, keys, strict=True):
            if drop.reason not in LEASED_AGAIN:
                self._final.add(key)
            if (slot := self.index.slot_of(key)) is not None:
                self._note_ended(slot, key)
        self.index.add_ended(keys)

    def _note_outcome(self, outcome: Outcome) -> None:
        self._outcomes.add(outcome.group_id)
        self.filtered += outcome.kind == "filtered"
        self.leases.end(outcome.group_id)
        key = group_key(outcome.group_id)
        if key not in self.index.claimed:
            if outcome.kind != "failed":
                self._final.add(key)
            self.index.add_ended([key])
            self._note_ended(Slot(dataset_epoch=outcome.dataset_epoch, position=outcome.position,
                                  try_no=outcome.try_no), key)

    def _note_retired(self, row: RetiredRow) -> None:
        """The row of a dropped group whose shard is gone: it tells the position that was dropped. (Of a claimed group,
        of a closed dataset epoch, or of a past that a fork has left behind, it tells nothing.)"""
        key = group_key(row.group_id)
        if key in self.index.ended and key not in self.index.claimed:
            slot = Slot(dataset_epoch=row.dataset_epoch, position=row.position, try_no=parse_group_id(row.group_id)[2])
            self.positions.known(slot)
            self._note_ended(slot, key)

    def _note_ended(self, slot: Slot, key: int) -> None:
        if key in self._final:
            self.positions.finished(slot)
        else:
            self.positions.ended(slot)
