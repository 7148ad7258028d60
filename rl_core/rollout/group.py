"""One leased group on its way from requests to a row: what is finished, what is tried again, when it is over.

No threads, no engine, no files: the worker holds its lock around every call and acts on what comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rl_core.rollout.assembly import Answer, as_group, request_of
from rl_core.types import GenerateRequest, Lease, Outcome, OutcomeKind, TrajectoryGroup

Verdict = Literal["waiting", "complete", "lost"]


@dataclass(slots=True)
class GroupInFlight:
    """`phase` goes running -> landing or running -> ending, once.

    Example, two answers with two tries each: `begin(0)`, `begin(1)`, `finish(request of 0, answer)`,
    `fail(request of 1, ...)` -> True, `begin(1)`, `fail(...)` -> False, `verdict` -> "complete" if min_group is 1.
    """

    lease: Lease
    serial: int
    """Number of this lease in this worker."""
    run_seed: int
    max_tries: int
    """Of one response (failure.trajectory_tries)."""
    started: float
    """Monotonic seconds."""
    dispatched_at_us: int
    answered_at_us: int = 0
    """When the engine gave the last of its answers so far."""
    pending: dict[str, int] = field(default_factory=dict[str, int])
    """Request id -> response being sampled or scored now."""
    tries: dict[int, int] = field(default_factory=dict[int, int])
    """Tries begun, by response."""
    answers: dict[int, Answer] = field(default_factory=dict[int, Answer])
    """Finished ones, by response."""
    failures: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(reason, error) of every failed try, oldest first."""
    tokens_wasted: int = 0
    """Of failed tries."""
    lost: int = 0
    """Responses whose tries are used up."""
    phase: Literal["running", "landing", "ending"] = "running"

    def begin(self, response: int) -> GenerateRequest:
        """The request for the next try of a response, pending from now on."""
        request = request_of(self.lease, self.run_seed, response, self.tries.get(response, 0), self.serial)
        self.tries[response] = self.tries.get(response, 0) + 1
        self.pending[request.request_id] = response
        return request

    def finish(self, request_id: str, answer: Answer, answered_at_us: int = 0) -> bool:
        """Keep a finished answer. False if nobody waits for this request any more."""
        response = self.pending.pop(request_id, None)
        if response is None:
            return False
        self.answered_at_us = max(self.answered_at_us, answered_at_us)
        self.answers[response] = answer
        return True

    def fail(self, request_id: str, reason: str, error: str, tokens: int) -> bool:
        """Book a failed try. True if the response is to be tried again."""
        response = self.pending.pop(request_id)
        self.failures.append((reason, error))
        self.tokens_wasted += tokens
        if self.tries[response] < self.max_tries:
            return True
        self.lost += 1
        return False

    @property
    def verdict(self) -> Verdict:
        """`complete`: lands now, whole or partial. `lost`: cannot reach min_group any more."""
        if self.lease.n_expected - self.lost < self.lease.min_group:
            return "lost"
        return "waiting" if self.pending else "complete"

    @property
    def tokens(self) -> int:
        """Of the finished answers."""
        return sum(len(answer.trajectory.token_ids_L) for answer in self.answers.values())

    def whole(self, now_us: int) -> TrajectoryGroup:
        """The group as it lands, answers in order of their numbers."""
        meta: dict[str, Any] = {"answered_at_us": self.answered_at_us} if self.answered_at_us else {}
        if self.failures:
            meta |= {"failures": len(self.failures), "last_failure": self.failures[-1][0]}
        return as_group(self.lease, [self.answers[response] for response in sorted(self.answers)],
                        dispatched_at_us=self.dispatched_at_us, finished_at_us=now_us, meta=meta)

    def outcome(self, kind: OutcomeKind, reason: str, error: str) -> Outcome:
        """How it ends without a row; every token that it took is wasted."""
        return Outcome(group_id=self.lease.group_id, kind=kind, reason=reason, error=error, try_no=self.lease.try_no,
                       position=self.lease.prompt.position, dataset_epoch=self.lease.prompt.dataset_epoch,
                       tokens_wasted=self.tokens_wasted + self.tokens)
