"""Positions: which (dataset epoch, position) is leased next, and under which try.

A position is unleased, known under its highest try, waiting to be tried again, or finished. All of it follows from
durable facts (rows, claims, drops, outcomes) and from the leases of live workers, told in any order.
Not thread-safe: `Experience` guards it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNLEASED = -1
FINISHED = np.iinfo(np.int16).max
"""Trained, voided, filtered, poison or given up: never leased again."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Slot:
    """What may be leased: `Slot(dataset_epoch=0, position=17, try_no=0)`."""

    dataset_epoch: int
    position: int
    try_no: int


class Positions:
    """Order of leasing: tries again first (lowest position first), then the positions never leased, in order."""

    def __init__(self) -> None:
        self.n_prompts: int | None = None
        """Positions of one dataset epoch; None until the prompts are known."""
        self.epochs: int | None = None
        """Passes; None = endless."""
        self._tries: list[NDArray[np.int16]] = []
        self._again: dict[tuple[int, int], int] = {}
        self._cursor = (0, 0)

    def open(self, n_prompts: int, epochs: int | None) -> None:
        self.n_prompts, self.epochs = n_prompts, epochs

    # -- facts, in any order

    def known(self, slot: Slot) -> None:
        """This try was leased: it is in flight, landed or ended."""
        column = self._column(slot)
        column[slot.position] = max(int(column[slot.position]), slot.try_no)
        if self._again.get((slot.dataset_epoch, slot.position), FINISHED) <= slot.try_no:
            del self._again[slot.dataset_epoch, slot.position]

    def known_array(self, dataset_epoch: NDArray[np.int32], position: NDArray[np.int64]) -> None:
        """Many finished positions at once, as at a restart."""
        for epoch in np.unique(dataset_epoch).tolist():
            at = position[dataset_epoch == epoch]
            self._column(Slot(dataset_epoch=epoch, position=int(at.max()), try_no=0))[at] = FINISHED
        if self._again:
            for pair in zip(dataset_epoch.tolist(), position.tolist(), strict=True):
                self._again.pop(pair, None)

    def close(self, dataset_epoch: int, n_prompts: int) -> None:
        """Every position of a dataset epoch is finished."""
        self._column(Slot(dataset_epoch=dataset_epoch, position=n_prompts - 1, try_no=0))[:n_prompts] = FINISHED

    def finished(self, slot: Slot) -> None:
        """Trained, filtered, poison or given up."""
        self._column(slot)[slot.position] = FINISHED
        self._again.pop((slot.dataset_epoch, slot.position), None)

    def ended(self, slot: Slot) -> None:
        """This try was dropped or failed: the next one is leased, unless a later one is known."""
        self.known(slot)
        if int(self._column(slot)[slot.position]) == slot.try_no:
            self._again[slot.dataset_epoch, slot.position] = slot.try_no + 1

    def lost(self, slot: Slot) -> None:
        """This try left no trace (its worker died): the same try is leased again."""
        column = self._column(slot)
        if int(column[slot.position]) == slot.try_no:
            column[slot.position] = slot.try_no - 1
            self._again[slot.dataset_epoch, slot.position] = slot.try_no

    # -- questions

    def try_of(self, dataset_epoch: int, position: int) -> int:
        """Highest known try, UNLEASED, or FINISHED."""
        column = self._column(Slot(dataset_epoch=dataset_epoch, position=position, try_no=0))
        return int(column[position])

    def take(self) -> Slot | None:
        """The next slot to lease, known from now on; None where no position is left (or the prompts are unknown)."""
        if self._again:
            (epoch, position), try_no = min(self._again.items())
            slot = Slot(dataset_epoch=epoch, position=position, try_no=try_no)
        elif (fresh := self._first_unleased()) is not None:
            slot = Slot(dataset_epoch=fresh[0], position=fresh[1], try_no=0)
        else:
            return None
        self.known(slot)
        return slot

    def over(self, max_tries: int) -> list[Slot]:
        """Positions that wait for a try which is not made any more: to be recorded as given up."""
        return [Slot(dataset_epoch=epoch, position=position, try_no=try_no)
                for (epoch, position), try_no in sorted(self._again.items()) if try_no >= max_tries]

    @property
    def exhausted(self) -> bool:
        """No position is unleased and no try waits to be leased."""
        return self.n_prompts is not None and not self._again and self._first_unleased() is None

    @property
    def waiting_again(self) -> int:
        return len(self._again)

    def candidates(self, dataset_epoch: int, try_no: int) -> list[int]:
        """Positions at which this try of a dataset epoch could be in flight, the likeliest first."""
        wanted = (dataset_epoch, try_no)
        again = sorted(position for (epoch, position), t in self._again.items() if (epoch, t) == wanted)
        if try_no > 0 or self.n_prompts is None:
            return again
        column = self._column(Slot(dataset_epoch=dataset_epoch, position=self.n_prompts - 1, try_no=0))
        return again + np.flatnonzero(column[:self.n_prompts] == UNLEASED).tolist()

    def _first_unleased(self) -> tuple[int, int] | None:
        if self.n_prompts is None:
            return None
        epoch, position = self._cursor
        while self.epochs is None or epoch < self.epochs:
            column = self._column(Slot(dataset_epoch=epoch, position=self.n_prompts - 1, try_no=0))
            while position < self.n_prompts and (column[position] != UNLEASED or (epoch, position) in self._again):
                position += 1
            self._cursor = (epoch, position)
            if position < self.n_prompts:
                return self._cursor
            epoch, position = epoch + 1, 0
        return None

    def _column(self, slot: Slot) -> NDArray[np.int16]:
        """Highest try by position of one dataset epoch, grown as needed."""
        while len(self._tries) <= slot.dataset_epoch:
            self._tries.append(np.full(64, UNLEASED, np.int16))
        column = self._tries[slot.dataset_epoch]
        if slot.position >= column.size:
            grown = np.full(max(2 * column.size, slot.position + 1), UNLEASED, np.int16)
            grown[:column.size] = column
            self._tries[slot.dataset_epoch] = column = grown
        return column
