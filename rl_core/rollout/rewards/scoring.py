"""From a run's `reward` setting to something that scores answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rl_core.config import Config
from rl_core.errors import ConfigError, RewardError
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.rewards.function import FunctionScorer, allowed_imports
from rl_core.types import Completion, Prompt, Score


class Scorer(Protocol):
    """`scorer(prompt, text)` -> Score. Raises RewardError by its deadline where it cannot, never scores 0 instead."""

    def __call__(self, prompt: Prompt, text: str) -> Score: ...

    def close(self) -> None: ...


class Rows(Protocol):
    """What a trial of the reward asks of the data set."""

    def first(self) -> tuple[Prompt, str]:
        """The first row, and where it stands: `file:line`."""
        ...

    def without(self, column: str) -> str | None:
        """Where the first row without this column stands, held-out rows included; None if all have it."""
        ...


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


def check_reward(config: Config, *, cwd: Path | None = None, rows: Rows | None = None) -> None:
    """Load the run's reward once, in a process of its own, and try it on the first row with the row's own answer.

    Raises ConfigError if that cannot work: no function, columns that some row lacks, an answer by no deadline, no
    finite number. Without `rows` it is loaded only.
    """
    if config.reward == "exact":
        return
    cwd = cwd or Path.cwd()
    scorer = FunctionScorer(config.reward, cwd=cwd, deadline_s=config.deadlines.reward_s, allowed=allowed_imports(),
                            quiet=True)
    try:
        columns = scorer.start()
        if rows is not None:
            _try_on(scorer, config.reward, columns, rows)
    finally:
        scorer.close()


def _try_on(scorer: FunctionScorer, reward: str, columns: Sequence[str], rows: Rows) -> None:
    for column in columns:
        if (where := rows.without(column)) is not None:
            raise ConfigError(f"reward: {reward} asks for the column {column!r}, and {where} has none; give the "
                              "parameter a default, or the rows the column")
    prompt, where = rows.first()
    try:
        scorer(prompt, prompt.answer)
    except RewardError as error:
        raise ConfigError(f"{error}\nreward: that was a trial on {where}, with the row's own answer "
                          f"{prompt.answer[:80]!r}; mend the function, it must give every answer a number") from error


def answer_text(decoded: str, completion: Completion) -> str:
    """The text that is scored: stop strings are trimmed from text, never from ids."""
    if not completion.stop_text:
        return decoded
    cut = decoded.rfind(completion.stop_text)
    return decoded if cut < 0 else decoded[:cut]
