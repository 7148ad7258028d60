"""One leased group on its way from requests to a row: what is finished, what is tried again, when it is over.

No threads, no engine, no files: the worker holds its lock around every call and acts on what comes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rl_core.rollout.assembly import GREEDY, Turn, as_answer, as_group, request_of
from rl_core.types import GenerateRequest, Lease, Outcome, OutcomeKind, Score, TrajectoryGroup

Verdict = Literal["waiting", "complete", "lost"]


@dataclass(frozen=True, slots=True)
class Session:
    """A finished one: its answers, and the score that all of them have. Without `rollout.session` it has one answer."""

    turns: tuple[Turn, ...]
    score: Score

    @property
    def tokens(self) -> int:
        return tokens_of(self.turns)


def tokens_of(turns: Iterable[Turn]) -> int:
    """Sampled tokens of these answers."""
    return sum(len(turn.completion.token_ids_L) for turn in turns)


@dataclass(slots=True)
class GroupInFlight:
    """`phase` goes running -> landing or running -> ending, once.

    Example, two answers with two tries each: `begin(0)`, `begin(1)`, `finish(request of 0, turn, score)`,
    `fail(request of 1, ...)` -> True, `begin(1)`, `fail(...)` -> False, `verdict` -> "complete" if min_group is 1.

    A response is a session: `go_on` in place of `finish` keeps its answer and what it is asked next.
    """

    lease: Lease
    serial: int
    """Number of this lease in this worker."""
    run_seed: int
    max_tries: int
    """Of one answer (failure.trajectory_tries)."""
    started: float
    """Monotonic seconds."""
    dispatched_at_us: int
    greedy: bool = False
    """Whether a greedy answer to the same prompt is asked for, as the baseline of all others (remax)."""
    extra: int = 0
    """Responses begun beyond n_expected (rollout.over_sampling): the first n_expected that finish land."""
    answered_at_us: int = 0
    """When the engine gave the last of its answers so far."""
    pending: dict[str, int] = field(default_factory=dict[str, int])
    """Request id -> response being sampled or scored now."""
    tries: dict[int, int] = field(default_factory=dict[int, int])
    """Tries begun, by response, of all its answers."""
    failed: dict[int, int] = field(default_factory=dict[int, int])
    """Tries of its next answer that have failed, by response."""
    turns: dict[int, list[Turn]] = field(default_factory=dict[int, list[Turn]])
    """Answers of sessions that go on, by response."""
    contexts: dict[int, NDArray[np.int32]] = field(default_factory=dict[int, NDArray[np.int32]])
    """What they answer next, token ids."""
    answers: dict[int, Session] = field(default_factory=dict[int, Session])
    """Finished ones, by response."""
    failures: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(reason, error) of every failed try, oldest first."""
    baseline_reward: float | None = None
    """Of the greedy answer, once it is there."""
    tokens_greedy: int = 0
    """Of the greedy answer: its reward lands, they never do."""
    tokens_wasted: int = 0
    """Of failed tries, and of the greedy answer."""
    lost: int = 0
    """Responses whose tries are used up."""
    greedy_lost: bool = False
    """The tries of the greedy answer are used up."""
    phase: Literal["running", "landing", "ending"] = "running"

    def begin(self, response: int) -> GenerateRequest:
        """The request for the next try of a response, pending from now on."""
        request = request_of(self.lease, self.run_seed, response, self.tries.get(response, 0), self.serial,
                             self.contexts.get(response))
        self.tries[response] = self.tries.get(response, 0) + 1
        self.pending[request.request_id] = response
        return request

    def asked(self, response: int) -> Any:
        """What its next answer answers, as the row or the session function has it."""
        turns = self.turns.get(response)
        return turns[-1].following if turns else self.lease.prompt.columns.get("prompt")

    def go_on(self, request_id: str, turn: Turn, next_ids_P: NDArray[np.int32], answered_at_us: int = 0) -> int:
        """Keep an answer whose session goes on with these token ids. Returns its response, to be begun again."""
        response = self.pending.pop(request_id)
        self.answered_at_us = max(self.answered_at_us, answered_at_us)
        self.turns.setdefault(response, []).append(turn)
        self.contexts[response], self.failed[response] = next_ids_P, 0
        return response

    def finish(self, request_id: str, turn: Turn, score: Score, answered_at_us: int = 0) -> int:
        """Keep the last answer of a session, and the score of it. Returns how many tokens of it will never land: all
        of the greedy session, of which only the reward does, and of one more than n_expected."""
        response = self.pending.pop(request_id)
        self.answered_at_us = max(self.answered_at_us, answered_at_us)
        session = Session((*self.turns.pop(response, []), turn), score)
        if response == GREEDY:
            self.baseline_reward, self.tokens_greedy = score.reward, session.tokens
        elif len(self.answers) < self.lease.n_expected:
            self.answers[response] = session
            return 0
        self.tokens_wasted += session.tokens
        return session.tokens

    def abandon(self) -> int:
        """Let go of sessions that will not be finished. Returns their tokens, which are wasted."""
        tokens = sum(map(tokens_of, self.turns.values()))
        self.turns.clear()
        self.tokens_wasted += tokens
        return tokens

    def fail(self, request_id: str, reason: str, error: str, tokens: int) -> bool:
        """Book a failed try. True if the response is to be tried again."""
        response = self.pending.pop(request_id)
        self.failures.append((reason, error))
        self.tokens_wasted += tokens
        self.failed[response] = self.failed.get(response, 0) + 1
        if self.failed[response] < self.max_tries:
            return True
        if response == GREEDY:
            self.greedy_lost = True
        else:
            self.lost += 1
        return False

    @property
    def verdict(self) -> Verdict:
        """`complete`: lands now, whole or partial. `lost`: cannot reach min_group any more, or has no baseline."""
        if self.lease.n_expected + self.extra - self.lost < self.lease.min_group or self.greedy_lost:
            return "lost"
        whole = len(self.answers) == self.lease.n_expected and (not self.greedy or self.baseline_reward is not None)
        return "complete" if whole or not self.pending else "waiting"

    @property
    def missing(self) -> int:
        """Answers that are not there yet, the greedy one among them."""
        return self.lease.n_expected - len(self.answers) + (self.greedy and self.baseline_reward is None)

    @property
    def may_land(self) -> bool:
        """Whether what is there now makes a row, if nothing more comes."""
        return len(self.answers) >= self.lease.min_group and (not self.greedy or self.baseline_reward is not None)

    @property
    def tokens(self) -> int:
        """Of the answers that are there."""
        return sum(session.tokens for session in self.answers.values()) + sum(map(tokens_of, self.turns.values()))

    def whole(self, now_us: int) -> TrajectoryGroup:
        """The group as it lands, answers in order of their numbers."""
        meta: dict[str, Any] = {"answered_at_us": self.answered_at_us} if self.answered_at_us else {}
        if self.failures:
            meta |= {"failures": len(self.failures), "last_failure": self.failures[-1][0],
                     "failed": dict(sorted(Counter(reason for reason, _ in self.failures).items()))}
        if self.greedy:
            meta["greedy_tokens"] = self.tokens_greedy
        several = any(len(session.turns) > 1 for session in self.answers.values())
        answers = [as_answer(turn, self.answers[response].score, number if several else None)
                   for number, response in enumerate(sorted(self.answers)) for turn in self.answers[response].turns]
        return as_group(self.lease, answers, dispatched_at_us=self.dispatched_at_us, finished_at_us=now_us, meta=meta,
                        baseline_reward=self.baseline_reward)

    def outcome(self, kind: OutcomeKind, reason: str, error: str) -> Outcome:
        """How it ends without a row; every token that it took is wasted."""
        return Outcome(group_id=self.lease.group_id, kind=kind, reason=reason, error=error, try_no=self.lease.try_no,
                       position=self.lease.prompt.position, dataset_epoch=self.lease.prompt.dataset_epoch,
                       tokens_wasted=self.tokens_wasted + self.tokens)
