"""Several children of one reward: `scoring.workers` calls run side by side, each with its own process and deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rl_core.errors import RewardError
from rl_core.rollout.rewards.function import FunctionScorer
from rl_core.types import Prompt, Score


class ScorerPool:
    """Scores with whichever of its scorers is free. Thread-safe; a call that hangs holds up one scorer only.

    A call waits while all scorers are taken, each for its deadline at most. The scorer that was used last is taken
    first, so that no more processes start than calls run at once.
    """

    def __init__(self, make: Callable[[], FunctionScorer], workers: int) -> None:
        self._scorers = [make() for _ in range(workers)]
        self._free = list(self._scorers)
        self._changed = threading.Condition()  # guards _free, _closed
        self._closed = False

    def __call__(self, prompt: Prompt, text: str) -> Score:
        scorer = self._take()
        try:
            return scorer(prompt, text)
        finally:
            with self._changed:
                self._free.append(scorer)
                self._changed.notify()

    def close(self) -> None:
        """End all children, also in the middle of calls (which raise RewardError). Idempotent, quick."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for scorer in self._scorers:
            scorer.close()

    def _take(self) -> FunctionScorer:
        with self._changed:
            while not self._free and not self._closed:
                self._changed.wait()  # ended by a call's end, which has a deadline, or by `close`
            if self._closed:
                raise RewardError("the scorer is closed")
            return self._free.pop()
