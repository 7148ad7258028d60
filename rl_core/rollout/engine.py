"""The engine protocol: all that a rollout worker asks of whatever samples tokens.

As small as it can be: submit, cancel, swap, close. The embedded engine (torch_engine.py) implements it in process; an
HTTP engine implements it over a server. Engines know token ids only: no text, no rewards, no groups.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rl_core.types import Completion, GenerateRequest, WeightVersion


class Engine(Protocol):
    """Thread-safe: every method may be called from any thread."""

    @property
    def served(self) -> WeightVersion | None:
        """The version that samples the next token; None before the first swap."""
        ...

    @property
    def running(self) -> int:
        """Requests submitted and not finished."""
        ...

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Start one request. The future resolves with the whole answer, or with the tokens so far after `cancel`
        (finish_reason "cancelled"). It raises ValueError for a token id outside the vocabulary or a prompt that does
        not fit the context, DeadPart when the engine died."""
        ...

    def cancel(self, request_id: str) -> None:
        """End one request; its future resolves with the tokens so far. Unknown ids are ignored."""
        ...

    def swap(self, version: WeightVersion, weights_dir: Path) -> str:
        """Serve `version` from now on. Requests in flight go on with their tokens; every later token carries the new
        version. Blocks until served; returns the digest of the weights as served. Raises WeightsDamaged (and keeps the
        old weights) when the bytes do not match `version.digest`."""
        ...

    def counters(self) -> dict[str, dict[str, float]]:
        """What each server behind it has done since it began, by server and name; empty for an embedded engine."""
        ...

    def close(self) -> None:
        """Cancel what runs and free everything. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Loan:
    """One server of an engine, out of its rollout and at one version until it is given back."""

    id: str
    url: str
    version: WeightVersion
    """What it serves, loaded and compared by the lender."""


@runtime_checkable
class Lender(Protocol):
    """An engine of several servers, which can do without one for a while."""

    def lend(self, version: WeightVersion, weights_dir: Path, *, wait_s: float, for_s: float) -> Loan:
        """Take one server out of rollout and let it serve `version`, which may be an earlier one; its requests go on at
        the others. Waits `wait_s` at most for one that can be spared, and takes it back by itself after `for_s`, or
        when the next one is lent. Raises DeadlinePassed where none can be spared, DeadPart, WeightsDamaged."""
        ...

    def take_back(self, loan_id: str) -> None:
        """It serves rollout again, with the current weights. A loan that is over is no error."""
        ...
