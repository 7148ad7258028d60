"""The running requests of the embedded engine, by row: what was sampled so far, and when an answer ends.

Host side only (NumPy). Rows 0..n-1 are running; `remove` fills the gaps with the last rows, so they stay in front. One
step handles all rows at once; Python looks at single rows only where one ends or has stop conditions of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.rollout.sampling import Truncation, uniforms
from rl_core.types import Completion, FinishReason, GenerateRequest, VersionRuns

NO_VERSION = -1
"""In `version_R` of tokens sampled before the first swap."""
FIRST_WIDTH = 64
Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""

COLUMNS = np.dtype([
    ("token", np.int64), ("position", np.int64), ("made", np.int64), ("limit", np.int64), ("top_k", np.int64),
    ("seed", np.uint64), ("temperature", np.float32), ("top_p", np.float32), ("min_p", np.float32),
    ("watched", np.bool_), ("truncated", np.bool_)], align=True)
"""token: the last one sampled; position: its place in the context; made: tokens sampled; limit: most of them."""


class StopStrings:
    """Finds stop strings in a growing answer, across token boundaries."""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0
        """Tokens whose text is in `_tail`."""
        self._tail = ""
        self._reach = max(map(len, stop)) - 1

    def push(self, token: int) -> str | None:
        """The stop string that this token completed, if one did; the first to begin, of several.

        Text of the new tokens is decoded behind a few earlier ones, since a token may decode otherwise at the
        beginning; bytes that are no whole character yet wait for the next token.
        """
        self._ids.append(token)
        begin = max(0, self._read - 4)
        known, grown = self._decode(self._ids[begin:self._read]), self._decode(self._ids[begin:])
        if grown.endswith("\ufffd"):
            return None
        text = self._tail + grown[len(known):]
        self._tail, self._read = text[-self._reach:] if self._reach else "", len(self._ids)
        hits = [(text.find(stop), stop) for stop in self._stop if stop in text]
        return min(hits)[1] if hits else None


@dataclass(slots=True, eq=False)
class Work:
    """One submitted request."""

    request: GenerateRequest
    future: Future[Completion]
    watch: StopStrings | None = None
    stop_text: str | None = None
    stopped: bool = False


class Rows:
    """All running requests. `slots` of them at most."""

    def __init__(self, slots: int, vocabulary: int, eos_token_ids: Collection[int], context: int) -> None:
        self.n = 0
        self.work: list[Work] = []
        self.slots = slots
        self._context = context
        self._columns = np.zeros(slots, COLUMNS)
        self.token, self.position = self._columns["token"], self._columns["position"]
        self._made, self._limit = self._columns["made"], self._columns["limit"]
        self._tokens = np.zeros((slots, FIRST_WIDTH), np.int32)
        self._logprobs = np.zeros((slots, FIRST_WIDTH), np.float32)
        self._versions = np.zeros((slots, FIRST_WIDTH), np.int32)
        self._ends = np.zeros(vocabulary, np.bool_)
        self._ends[[token for token in eos_token_ids if token < vocabulary]] = True

    def append(self, works: Sequence[Work]) -> None:
        """Take requests into the next rows."""
        for row, work in enumerate(works, start=self.n):
            sampling, prompt = work.request.sampling, len(work.request.token_ids_P)
            limit = min(sampling.max_new_tokens, self._context - prompt)
            greedy = sampling.temperature == 0
            truncated = not greedy and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
            watched = bool(sampling.stop_token_ids) or work.watch is not None
            # Position counts up as tokens are made: the first one will lie behind the prompt.
            self._columns[row] = (0, prompt - 1, 0, limit, sampling.top_k, work.request.seed & (2**64 - 1),
                                  sampling.temperature, sampling.top_p, sampling.min_p, watched, truncated)
        self.work.extend(works)
        self.n += len(works)

    def temperatures(self, lo: int) -> NDArray[np.float32]:
        return self._columns["temperature"][lo:self.n]

    def uniforms(self, lo: int) -> NDArray[np.float64]:
        """Noise of the next token of rows lo..n-1, by the place it will have in the context."""
        return uniforms(self._columns["seed"][lo:self.n], self.position[lo:self.n] + 1)

    def truncation(self, lo: int) -> Truncation | None:
        """None where no row leaves out anything."""
        columns = self._columns[lo:self.n]
        cut = columns["truncated"]
        if not cut.any():
            return None
        return Truncation(row_M=np.flatnonzero(cut), top_p_M=columns["top_p"][cut], top_k_M=columns["top_k"][cut],
                          min_p_M=columns["min_p"][cut])

    def record(self, lo: int, token_N: NDArray[np.int64], logprob_N: NDArray[np.float32],
               version: int) -> NDArray[np.int64]:
        """Store the next token of rows lo..n-1. Returns the rows that ended with it."""
        rows, made = np.arange(lo, self.n), self._made[lo:self.n]
        self._widen(int(made.max()) + 1)
        self._tokens[rows, made] = token_N
        self._logprobs[rows, made] = logprob_N
        self._versions[rows, made] = version
        self.token[lo:self.n] = token_N
        self.position[lo:self.n] += 1
        made += 1
        ended = self._ends[token_N] | (made >= self._limit[lo:self.n])
        for row in np.flatnonzero(self._columns["watched"][lo:self.n]):
            ended[row] |= self._stops(self.work[lo + row], int(token_N[row]))
        return lo + np.flatnonzero(ended)

    def _stops(self, work: Work, token: int) -> bool:
        """Stop conditions of this request alone."""
        if work.watch is not None:
            work.stop_text = work.watch.push(token)
        work.stopped = token in work.request.sampling.stop_token_ids or work.stop_text is not None
        return work.stopped

    def _widen(self, width: int) -> None:
        have = self._tokens.shape[1]
        if width > have:
            grown = max(width, 2 * have)
            for name in ("_tokens", "_logprobs", "_versions"):
                column = getattr(self, name)
                wider = np.zeros((self.slots, grown), column.dtype)
                wider[:, :have] = column
                setattr(self, name, wider)

    def completion(self, row: int, *, cancelled: bool = False) -> Completion:
        """The answer of a row as it stands; arrays are copies."""
        work, made = self.work[row], int(self._made[row])
        reason: FinishReason = "length"
        if cancelled:
            reason = "cancelled"
        elif work.stopped or self._ends[self.token[row]]:
            reason = "stop"
        return Completion(request_id=work.request.request_id, token_ids_L=self._tokens[row, :made].copy(),
                          logprobs_L=self._logprobs[row, :made].copy(),
                          version_runs=version_runs(self._versions[row, :made]), finish_reason=reason,
                          stop_text=work.stop_text)

    def remove(self, gone: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Drop rows and fill the gaps in front. Returns (source rows, target rows) of what moved."""
        n = self.n - len(gone)
        target = gone[gone < n]
        source = np.setdiff1d(np.arange(n, self.n), gone, assume_unique=True)
        for column in (self._columns, self._tokens, self._logprobs, self._versions):
            column[target] = column[source]
        for a, b in zip(source, target, strict=True):
            self.work[b] = self.work[a]
        del self.work[n:]
        self.n = n
        return source, target

    def longest(self) -> int:
        """Places used by the longest context, the last sampled token included."""
        return int(self.position[:self.n].max(initial=0)) + 1


def version_runs(version_L: NDArray[np.int32]) -> VersionRuns:
    """Run lengths: `[3, 3, 4]` -> ends `[2, 3]`, versions `[3, 4]`."""
    changes = np.flatnonzero(version_L[1:] != version_L[:-1]) + 1
    ends = np.append(changes, len(version_L)) if len(version_L) else changes
    return VersionRuns(end_R=ends.astype(np.int32), version_R=version_L[ends - 1].astype(np.int32))
