"""One request in flight: its tokens so far over all tries, who sampled them, and what is left of its budget.

No network, no clock. A server says which version sampled which token once, when an answer ends. For an answer that
broke off the engine knows what it told the server and when: `taken_over` notes each swap under way, and `broke_off`
counts every token that may still be of the older weights as of them, so that no token looks younger than it is.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from rl_core.rollout.sglang.wire import Delta, Finish, Span
from rl_core.types import Completion, FinishReason, GenerateRequest, VersionRuns


class Answering:
    """`limit`: most tokens of the answer, by its budget and by the context. `ends`: ids that end it.

        begin(version=3)              # a try begins; body of the request: `context`, `left`
        extend(delta)                 # tokens as they come
        attested(spans, behind=0)     # the server's own words at the end of the try
        completion("stop")
    """

    def __init__(self, request: GenerateRequest, future: Future[Completion], *, session: str, limit: int,
                 ends: frozenset[int]) -> None:
        self.request, self.future, self.session, self.limit = request, future, session, limit
        self.ends = ends | set(request.sampling.stop_token_ids)
        self.weight = len(request.token_ids_P) + limit
        """Tokens that a server is asked for."""
        self.cancelled = False
        self.closed = False
        """Its future is resolved."""
        self.rid = ""
        """Of the try under way; empty between two."""
        self.place = ""
        """Where it is booked."""
        self.stream: asyncio.Task[Delta] | None = None
        """Of the try under way."""
        self.renewed = False
        """Its try is ended by the engine, to begin again under other weights."""
        self.fruitless = 0
        """Tries in a row that brought no token."""
        self.last_error = ""
        self._ids, self._logprobs = array("i"), array("f")
        self._spans: list[Span] = []
        self._base = 0
        """Tokens before the try under way."""
        self._told: list[Span] = []
        """Of the try under way: what the server was told to serve, until which token at the latest."""

    @property
    def context(self) -> list[int]:
        """Prompt and tokens so far."""
        return [*self.request.token_ids_P.tolist(), *self._ids]

    @property
    def made(self) -> int:
        return len(self._ids)

    @property
    def made_now(self) -> int:
        """Tokens of the try under way."""
        return len(self._ids) - self._base

    @property
    def left(self) -> int:
        return self.limit - len(self._ids)

    @property
    def newest(self) -> int | None:
        """The version of its last token that is known; no older one may sample the next."""
        return self._spans[-1].version if self._spans else None

    def begin(self, rid: str, version: int) -> None:
        """A try begins on a server that serves `version`."""
        self.rid, self._base = rid, len(self._ids)
        self._told = [Span(self.limit, version)]

    def extend(self, delta: Delta) -> None:
        """Tokens of the try under way, as they come."""
        self._ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)

    def taken_over(self, version: int, slack: int) -> None:
        """The server serves `version` from now on; at most `slack` tokens of the older weights are still to come."""
        end = min(self.limit, len(self._ids) + slack)
        self._told[-1] = Span(end, self._told[-1].version)
        self._told.append(Span(self.limit, version))

    def attested(self, spans: Sequence[Span], behind: int, *, kept_cache: bool = False) -> None:
        """The try ended, and the server said which version sampled which of its tokens; a change of version inside
        begins `behind` tokens later than it said (ServerInfo.overlap).

        `kept_cache`: the server keeps its key/value cache over swaps. A try that began under another version than the
        first attested one has a context that was read by older weights, or a first token that was sampled by them and
        not counted yet: that token is booked to the version of its begin, so that nothing behind it counts as sampled
        by the newer weights alone."""
        if kept_cache and spans and spans[0].version != self._told[0].version:
            self._append(self._base + 1, self._told[0].version)
        for i, span in enumerate(spans):
            end = span.end if i == len(spans) - 1 else min(span.end + behind, self.made_now)
            self._append(self._base + end, span.version)
        self.broke_off()

    def broke_off(self) -> None:
        """The try ended; what no server attested is counted by what it was told."""
        for span in self._told:
            self._append(min(span.end, len(self._ids)), span.version)
        self.rid = ""

    def drop_try(self) -> int:
        """Forget the tokens of the try under way: they cannot be trusted. Returns how many they were."""
        dropped = self.made_now
        self._cut(self._base)
        self.rid = ""
        return dropped

    def back_off(self) -> int:
        """Before it is continued elsewhere: forget the tokens that may begin a stop string, which a server looks for
        in its own tokens only. Returns how many they were."""
        dropped = min(max(map(len, self.request.sampling.stop), default=0), len(self._ids))
        self._cut(len(self._ids) - dropped)
        return dropped

    def completion(self, reason: FinishReason, stop_text: str | None = None) -> Completion:
        """All tokens so far, as the answer."""
        spans = self._spans
        runs = VersionRuns(end_R=np.array([span.end for span in spans], np.int32),
                           version_R=np.array([span.version for span in spans], np.int32))
        return Completion(request_id=self.request.request_id, token_ids_L=np.array(self._ids, np.int32),
                          logprobs_L=np.array(self._logprobs, np.float32), version_runs=runs, finish_reason=reason,
                          stop_text=stop_text)

    def ended_by(self, finish: Finish) -> tuple[FinishReason, str | None] | None:
        """Reason and stop text if the server's word ends the answer; None: it is to be continued (aborted, cut before
        its budget, or ended by a token that ends an answer for the server's tokenizer and not for the model)."""
        if finish.kind == "stop" and isinstance(finish.matched, str):
            return "stop", finish.matched
        if self._ids and self._ids[-1] in self.ends:
            return "stop", None
        return ("length", None) if self.left <= 0 else None

    def whole(self) -> FinishReason | None:
        """How an answer ends that has all its tokens though the last word on it was lost; None: it has not, or its
        last token may have completed a stop string."""
        if self._ids and self._ids[-1] in self.ends:
            return "stop"
        return "length" if self.left <= 0 and not self.request.sampling.stop else None

    def _append(self, end: int, version: int) -> None:
        begin = self._spans[-1].end if self._spans else 0
        if end <= begin:
            return
        if self._spans and self._spans[-1].version == version:
            self._spans.pop()
        self._spans.append(Span(end, version))

    def _cut(self, length: int) -> None:
        del self._ids[length:], self._logprobs[length:]
        while self._spans and (self._spans[-2].end if len(self._spans) > 1 else 0) >= length:
            self._spans.pop()
        if self._spans and self._spans[-1].end > length:
            self._spans[-1] = Span(length, self._spans[-1].version)
