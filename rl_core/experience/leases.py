"""Leases: which groups are in flight at which worker (F). Memory only: a restart asks the workers, and is told how
often each group was lost before it.

A lease has no clock. It ends when its group is verified, when its outcome is written, or when its worker is dead.
Not thread-safe: `Experience` guards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rl_core.experience.positions import Slot

LEASES_PER_ATTEMPT_BITS = 24


@dataclass(kw_only=True, slots=True)
class Leased:
    """A group in flight: leased, and neither verified nor ended."""

    group_id: str
    slot: Slot
    worker: str
    idx_dispatch: int
    """Publication index that the worker served; no token of the group is older."""
    lease_no: int
    sent_at: float | None = None
    """Clock when the worker had confirmed the lease."""
    missing: bool = False
    """The worker does not name it any more: after the next listing it has landed, or is lost."""
    cancel: bool = False
    """Policy `wait`: the worker shall be told to cancel it."""
    cancel_sent: bool = False


class LeaseBook:
    """Groups in flight by id; how often each was leased; what every live worker serves."""

    def __init__(self, attempt: int, lost: Mapping[str, int]) -> None:
        """`lost`: how often the leases of a group have left no trace under earlier owners."""
        self.by_id: dict[str, Leased] = {}
        self.served: dict[str, int] = {}
        """Publication index that each live worker has acknowledged; -1 = none yet."""
        self.known = False
        """All live workers have said what they have in flight, and all streams were listed since."""
        self._attempt = attempt
        self._granted = 0
        self._count = dict(lost)

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, name: str, slot: Slot, worker: str, *, idx_dispatch: int, sent_at: float | None = None) -> Leased:
        """Lease numbers grow over the whole run without being stored: attempt first, then the order in this attempt."""
        self._granted += 1
        lease = Leased(group_id=name, slot=slot, worker=worker, idx_dispatch=idx_dispatch, sent_at=sent_at,
                       lease_no=(self._attempt << LEASES_PER_ATTEMPT_BITS) + self._granted)
        self.by_id[name] = lease
        self._count[name] = self._count.get(name, 0) + 1
        return lease

    def end(self, name: str) -> None:
        """The group is verified or has an outcome."""
        self.by_id.pop(name, None)
        self._count.pop(name, None)

    def lose(self, name: str) -> int:
        """The lease left no trace. Returns how often this try was leased so far, and lost under earlier owners."""
        self.by_id.pop(name, None)
        return self._count.get(name, 0)

    def of(self, worker: str) -> list[Leased]:
        return [lease for lease in self.by_id.values() if lease.worker == worker]

    def note_in_flight(self, worker: str, in_flight: Iterable[str], asked_at: float) -> bool:
        """A worker said, to a question asked at `asked_at`, what it has in flight. True if something is missing there.

        Leases that it had not confirmed before the question say nothing yet.
        """
        names, found = set(in_flight), False
        for lease in self.of(worker):
            if lease.sent_at is not None and lease.sent_at < asked_at and lease.group_id not in names:
                lease.missing = found = True
        return found

    def missing(self) -> list[str]:
        return [lease.group_id for lease in self.by_id.values() if lease.missing]
