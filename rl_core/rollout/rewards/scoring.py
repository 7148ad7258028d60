"""From a run's `reward` setting to something that scores answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rl_core.config import Config
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.rewards.function import FunctionScorer, allowed_imports
from rl_core.types import Completion, Prompt, Score


class Scorer(Protocol):
    """`scorer(prompt, text)` -> Score. Raises RewardError by its deadline where it cannot, never scores 0 instead."""

    def __call__(self, prompt: Prompt, text: str) -> Score: ...

    def close(self) -> None: ...


class InlineScorer:
    """A function of Headway's own that neither hangs nor raises, called in place."""

    def __init__(self, function: Callable[[Prompt, str], Score]) -> None:
        self._function = function

    def __call__(self, prompt: Prompt, text: str) -> Score:
        return self._function(prompt, text)

    def close(self) -> None:
        """Nothing to end."""


def make_scorer(config: Config, *, cwd: Path | None = None, allowed: Sequence[str] | None = None) -> Scorer:
    """The run's reward. `cwd` is the working directory of the command, which a process elsewhere must be told.

    Raises ConfigError for a function that may not be run.
    """
    if config.reward == "exact":
        return InlineScorer(exact)
    return FunctionScorer(config.reward, cwd=cwd or Path.cwd(), deadline_s=config.deadlines.reward_s,
                          allowed=allowed_imports() if allowed is None else allowed)


def check_reward(config: Config, *, cwd: Path | None = None) -> None:
    """Load the run's reward once, in a process of its own. Raises ConfigError if that cannot work."""
    scorer = make_scorer(config, cwd=cwd)
    try:
        if isinstance(scorer, FunctionScorer):
            scorer.start()
    finally:
        scorer.close()


def answer_text(decoded: str, completion: Completion) -> str:
    """The text that is scored: stop strings are trimmed from text, never from ids."""
    if not completion.stop_text:
        return decoded
    cut = decoded.rfind(completion.stop_text)
    return decoded if cut < 0 else decoded[:cut]
