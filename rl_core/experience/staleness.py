"""Staleness: a property of the data, judged once, when a group is claimed (experience-store.md 3.6). Pure functions.

    age(g, k) = idx(k) - idx of the oldest version among the group's sampled tokens

0 = sampled by the newest weights published before step k. Any earlier look at an age (admission, the policy `wait`) is
an optimisation; the verdict at the claim is the guarantee. The future counts as not belonging to this history: a group
with a token of a version newer than idx(k) is `fenced`.

Suffix `_G`: one entry per group; `_R`: one per version run of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.types import DropReason

Policy = Literal["keep", "mask", "drop", "wait"]
EXACT: Final = "exact"
"""Takes groups of one age alone (exact.py); for studies."""
OFFLINE: Final = "offline"
"""Judges groups that another run has sampled: its versions are not this one's, so none has an age (offline.md 3)."""

KEEP: Final = 0
MASK: Final = 1
"""The group is trained, its tokens older than the limit leave the loss."""
STALE: Final = 2
ALL_MASKED: Final = 3
FENCED: Final = 4
FILTERED: Final = 5
PARTIAL: Final = 6
YOUNG: Final = 7
"""Under EXACT: waits for the step that it is old enough for; neither usable now nor dropped."""

DROP_REASONS: dict[int, DropReason] = {STALE: "stale", ALL_MASKED: "all_masked", FENCED: "fenced", FILTERED: "filtered",
                                       PARTIAL: "partial"}
"""Verdicts that are drops. A verdict below STALE is usable, YOUNG is later."""
LEASED_AGAIN: frozenset[str] = frozenset({"stale", "all_masked", "partial", "fenced"})
"""Drop reasons after which the position is tried again; a `filtered` one is finished in its dataset epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessRule:
    """The policy as numbers. Bound 1.5 with policy keep: `StalenessRule(policy="keep", limit=2, hard_max=6)`."""

    policy: Policy | Literal["offline", "exact"]
    limit: int
    """ceil(eta); under `exact` the age that groups are trained at."""
    hard_max: int
    """Oldest age that `keep` and `wait` train."""
    min_responses: int = 1
    """A group with fewer landed answers is dropped as `partial`."""
    drop_no_spread: bool = False
    """The group filter: groups whose rewards are all equal are dropped as `filtered`."""

    def __post_init__(self) -> None:
        if self.policy in ("keep", "wait") and self.hard_max < self.limit:
            raise ValueError(f"staleness.hard_max is {self.hard_max}, below ceil(staleness.bound) = {self.limit}: "
                             "groups within the bound would be dropped; raise hard_max or lower the bound")

    @property
    def oldest(self) -> int:
        """The largest age of a token that this rule lets into a loss."""
        return self.hard_max if self.policy in ("keep", "wait") else self.limit


def rule_of(config: Config) -> StalenessRule:
    """Raises ValueError where hard_max is below the limit."""
    return StalenessRule(
        policy=config.claim_policy, limit=config.staleness.limit, hard_max=config.staleness.effective_hard_max,
        min_responses=config.min_group, drop_no_spread=config.rollout.no_spread == "drop")


def judge(idx_step: int, rule: StalenessRule, *, idx_min_G: NDArray[np.int32], idx_max_G: NDArray[np.int32],
          n_responses_G: NDArray[np.int32] | None = None,
          spread_G: NDArray[np.float32] | None = None) -> NDArray[np.int8]:
    """Verdict per group [G] at a step of publication index `idx_step`.

    Example: idx_step 5, keep with limit 1 and hard_max 4, idx_min [5, 4, 1, 0] -> [KEEP, KEEP, KEEP, STALE].
    `wait` is a delay, never content of a claim: it judges as `keep`.
    """
    age_G = idx_step - idx_min_G
    verdict_G = np.full(idx_min_G.shape, KEEP, np.int8)
    if rule.policy == OFFLINE:
        pass  # publications of two runs are not compared
    elif rule.policy == EXACT:
        wanted = wanted_publication(idx_step, rule.limit)
        verdict_G[idx_min_G < wanted] = STALE
        verdict_G[idx_min_G > wanted] = YOUNG
    elif rule.policy == "mask":
        verdict_G[age_G > rule.limit] = MASK
        verdict_G[idx_step - idx_max_G > rule.limit] = ALL_MASKED
    else:
        verdict_G[age_G > rule.oldest] = STALE
    if spread_G is not None and rule.drop_no_spread:
        verdict_G[spread_G == 0.0] = FILTERED
    if n_responses_G is not None:
        verdict_G[n_responses_G < rule.min_responses] = PARTIAL
    if rule.policy != OFFLINE:
        verdict_G[idx_max_G > idx_step] = FENCED
    return verdict_G


def is_drop(verdict_G: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Which verdicts [G] are drops: no claim from this one on takes the group."""
    return (verdict_G >= STALE) & (verdict_G != YOUNG)


def wanted_publication(idx_step: int, exact: int) -> int:
    """The publication that a step of publication index `idx_step` is trained on under EXACT: `exact` before it, the
    initial weights where there is none yet."""
    return max(0, idx_step - exact)


def masked_tokens(idx_step: int, rule: StalenessRule, *, idx_R: NDArray[np.int32], tokens_R: NDArray[np.int32]) -> int:
    """Sampled tokens of one group that leave the loss by age: `tokens_R[r]` are of publication index `idx_R[r]`."""
    if rule.policy != "mask":
        return 0
    return int(tokens_R[idx_step - idx_R > rule.limit].sum())


def explain(rule: StalenessRule, age: int) -> str:
    """One sentence on what happens to a group of this age, for people."""
    if age < 0:
        return f"age {age}: sampled by weights that this history does not have at this step; dropped as fenced"
    if rule.policy == EXACT and age != rule.limit:
        return f"age {age}: over {rule.limit}; dropped as stale under staleness.exact" if age > rule.limit else \
            f"age {age}: waits until it is {rule.limit} publications old; of the initial weights it is trained"
    if age <= rule.limit:
        return f"age {age}: within the bound of {rule.limit}; trained"
    if rule.policy == "mask":
        return f"age {age}: over the bound of {rule.limit}; tokens older than {rule.limit} leave the loss"
    if age <= rule.oldest:
        return f"age {age}: over the bound of {rule.limit}, up to {rule.oldest} is trained under policy {rule.policy}"
    return f"age {age}: over {rule.oldest}; dropped as stale under policy {rule.policy}"
