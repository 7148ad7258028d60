"""Admission: how many more groups may be leased now (experience-store.md 3.7). Pure functions of durable state.

    capacity = min( C_max - F,
                    B K (V + 1) - B k + E - (L + F),
                    B total_steps - (B k + L + F),
                    floor((bytes_quota - reserve - landed_unretired_bytes) / g) - F,
                    floor((free bytes of the file system - reserve) / g) - F )

No counter is carried: a restart computes the same number. Reverb's SampleToInsertRatio and AReaL's staleness manager
are the relatives; theirs live in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Term = Literal["max_groups", "staleness", "total_steps", "disk"]

TERM_TEXT: dict[Term, str] = {
    "max_groups": "all groups that may be in flight are (rollout.max_groups)",
    "staleness": "rollouts are as far ahead as staleness.bound lets them: waiting for a claim or a weight swap",
    "total_steps": "all groups that the remaining steps need are leased or landed",
    "disk": "storage.bytes_quota, or what is free of the file system, leaves no room for another group",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionState:
    """The letters of the formula. At the start with B 16, K 1, eta 2: served_idx 0, step 0, extra 32 -> 48 leases."""

    groups_per_step: int
    """B."""
    publish_every: int
    """K."""
    extra: int
    """E = floor(B K eta), from eta's decimal text."""
    total_steps: int
    max_groups: int
    """C_max."""
    step: int
    """k: the next unclaimed step."""
    served_idx: int
    """V: publication index acknowledged by the worker that would take the lease; -1 = serves nothing yet."""
    landed: int
    """L: verified, distinct, unclaimed groups that policy and filter would take at step k."""
    leased: int
    """F: leased groups that are neither verified, quarantined nor ended by an outcome."""
    bytes_quota: int
    reserve: int
    """One checkpoint + one version + 64 MiB."""
    landed_bytes: int
    """Bytes of all shards that are not retired."""
    group_bytes: int
    """g of `bytes_per_group`."""
    free_bytes: int = 2**63 - 1
    """Of the file system that holds the run directory; by default so many that they do not bind."""


def terms(state: AdmissionState) -> dict[Term, int]:
    """Every term of the minimum by name, so that a stall report can say which one binds."""
    B, outstanding = state.groups_per_step, state.landed + state.leased
    allowed = B * state.publish_every * (state.served_idx + 1) - B * state.step + state.extra
    return {
        "max_groups": state.max_groups - state.leased,
        "staleness": allowed - outstanding,
        "total_steps": B * state.total_steps - (B * state.step + outstanding),
        "disk": (min(state.bytes_quota - state.landed_bytes, state.free_bytes) - state.reserve)
        // max(1, state.group_bytes) - state.leased,
    }


def capacity(state: AdmissionState) -> int:
    """Groups that may be leased now; below 1 = none. A version that nobody serves opens nothing."""
    return min(terms(state).values()) if state.served_idx >= 0 else 0


def binding(state: AdmissionState) -> Term:
    """The smallest term; of equal ones the first in the order of the formula."""
    named = terms(state)
    return min(named, key=lambda name: named[name])


def explain(state: AdmissionState) -> str:
    """`capacity 0 (max_groups 3, staleness 0, total_steps 80, disk 900): rollouts are as far ahead as ...`."""
    numbers = ", ".join(f"{name} {value}" for name, value in terms(state).items())
    if state.served_idx < 0:
        return f"capacity 0 ({numbers}): the worker serves no weights yet"
    return f"capacity {capacity(state)} ({numbers}): {TERM_TEXT[binding(state)]}"


def bytes_per_group(*, landed_groups: int, landed_bytes: int, worst_case: int, groups_per_step: int) -> int:
    """g: the mean bytes of a landed group; until 4 B groups have landed at least half the worst case."""
    mean = landed_bytes // landed_groups if landed_groups else 0
    if landed_groups >= 4 * groups_per_step:
        return max(1, mean)
    return max(1, mean, worst_case // 2)


def worst_group_bytes(*, group_size: int, max_prompt_tokens: int, max_new_tokens: int) -> int:
    """Upper bound of one group's bytes in a shard: 9 bytes a token and about 1 KB of scalars and offsets."""
    return 4 * max_prompt_tokens + group_size * (9 * max_new_tokens + 64) + 1024
