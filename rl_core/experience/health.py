"""Health: whether what lands is of any use. Each budget that is spent is a named error, with its cause.

Kept in memory over one attempt: a restart gives a run the benefit of the doubt again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from rl_core.config import Config
from rl_core.errors import FailureBudgetSpent, NothingToTrainOn, StalenessStarvation
from rl_core.types import Drop, Outcome

STALE_REASONS = ("stale", "all_masked")


class Health:
    """Counts verdicts and failures. Not thread-safe: `Experience` guards it."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._judged: deque[bool] = deque(maxlen=4 * config.groups_per_step)
        """Of the last groups that were trained or dropped (filtered ones do not count): was it dropped as stale?"""
        self._starving_since: float | None = None
        self._barren = 0
        self._filtered: Counter[str] = Counter()
        """Groups that `rollout.group_filter` has left out since a usable one, by its reasons."""
        self._failed_answers = 0
        self._first_failure: Outcome | None = None

    def judged(self, trained: int, drops: Iterable[Drop]) -> None:
        """A claim or a drops file was written."""
        self._judged.extend([False] * trained)
        self._judged.extend(drop.reason in STALE_REASONS for drop in drops if drop.reason != "filtered")
        full = len(self._judged) == self._judged.maxlen
        if not full or sum(self._judged) <= self._config.failure.drop_share * len(self._judged):
            self._starving_since = None
        elif self._starving_since is None:
            self._starving_since = self._clock()

    def verified(self, usable_G: Sequence[bool]) -> None:
        """Groups were verified, in the order of landing."""
        self._failed_answers, self._first_failure = 0, None
        for usable in usable_G:
            self._barren = 0 if usable else self._barren + 1
            if usable:
                self._filtered.clear()

    def failed(self, outcome: Outcome) -> None:
        """A group ended without a row. One that failed stands for the answers that kept it from landing, one that a
        filter left out was scored and is of no use. Raises FailureBudgetSpent."""
        if outcome.kind == "filtered":
            self._failed_answers, self._first_failure = 0, None
            self._barren += 1
            self._filtered[outcome.reason] += 1
        if outcome.kind != "failed" or outcome.reason == "wait_timeout":
            return
        if self._first_failure is None or self._first_failure.reason != outcome.reason:
            self._failed_answers, self._first_failure = 0, outcome
        self._failed_answers += self._config.group_size - self._config.min_group + 1
        if self._failed_answers >= self._config.failure.reward_failures:
            first = self._first_failure
            raise FailureBudgetSpent(
                f"at least {self._failed_answers} answers in a row failed with {outcome.reason} and nothing landed "
                f"(failure.reward_failures {self._config.failure.reward_failures}); the first, in {first.group_id}: "
                f"{first.error}")

    def budgets(self) -> dict[str, tuple[int, int]]:
        """Spent and allowed, by the name of the setting in failure.*: `{"reward_failures": (3, 64), ...}`."""
        return {"reward_failures": (self._failed_answers, self._config.failure.reward_failures),
                "barren_groups": (self._barren, self._config.barren_groups)}

    def check(self, unusable: str) -> None:
        """Raises StalenessStarvation or NothingToTrainOn. `unusable` says in words what landed and is of no use."""
        since = self._starving_since
        if since is not None and self._clock() - since >= self._config.failure.drop_share_deadline_s:
            raise StalenessStarvation(
                f"{sum(self._judged)} of the last {len(self._judged)} judged groups were over the limit, for "
                f"{self._clock() - since:.0f} s (failure.drop_share {self._config.failure.drop_share}); raise "
                "staleness.bound, or use policy keep or wait")
        if self._barren >= self._config.barren_groups:
            said = ", ".join(f"{n} {reason}" for reason, n in sorted(self._filtered.items()))
            raise NothingToTrainOn(
                f"{self._barren} verified groups in a row without a usable one (failure.barren_groups "
                f"{self._config.barren_groups}); waiting now: {unusable or 'nothing'}"
                + (f"; left out by rollout.group_filter: {said}" if said else "")
                + ". Look at the reward function and at staleness.bound")
