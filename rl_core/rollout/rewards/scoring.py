"""From a run's `reward` setting to something that scores answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from rl_core.advantage_settings import PartsAdvantage
from rl_core.config import Config
from rl_core.errors import ConfigError, RewardError, RewardNegative, refuse
from rl_core.reward_settings import single_rewards
from rl_core.rollout.rewards.code import CodeLimits
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.rewards.function import FunctionScorer, allowed_imports, is_own
from rl_core.rollout.rewards.gsm8k import gsm8k
from rl_core.rollout.rewards.judge import JudgeScorer
from rl_core.rollout.rewards.leftovers import Notes, leftovers
from rl_core.rollout.rewards.pool import ScorerPool
from rl_core.rollout.rewards.reward_model import ModelTask, check_classifier
from rl_core.rollout.rewards.weighted import WeightedScorer, add_up
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


IN_PLACE: dict[str, Callable[[Prompt, str], Score]] = {"exact": exact, "gsm8k": gsm8k}
"""Rewards by name that take no time worth a process: `regex`, `math_verify` and `reasoning_gym:<name>` do."""


class InlineScorer:
    """A function of Headway's own that does not hang, called in place."""

    def __init__(self, function: Callable[[Prompt, str], Score]) -> None:
        self._function = function

    def __call__(self, prompt: Prompt, text: str) -> Score:
        return self._function(prompt, text)

    def close(self) -> None:
        """Nothing to end."""


class AtLeastZero:
    """A reward of which the estimator takes none below 0: such a one fails its answer by name, before it lands."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def __call__(self, prompt: Prompt, text: str) -> Score:
        score = self._scorer(prompt, text)
        if score.reward < 0:
            raise RewardNegative(f"the reward is {score.reward:g}, and learner.advantage.name=maxrl takes rewards of "
                                 "at least 0")
        return score

    def close(self) -> None:
        """End the reward's processes. Idempotent."""
        self._scorer.close()


def make_training_scorer(config: Config, *, cwd: Path | None = None, allowed: Sequence[str] | None = None) -> Scorer:
    """`make_scorer` for answers that are trained on: under maxrl a reward below 0 is a failure."""
    scorer = make_scorer(config, cwd=cwd, allowed=allowed)
    return AtLeastZero(scorer) if config.learner.advantage.name == "maxrl" else scorer


def make_scorer(config: Config, *, cwd: Path | None = None, allowed: Sequence[str] | None = None) -> Scorer:
    """The run's reward, `scoring.workers` calls side by side. `cwd` is the working directory of the command, which a
    process elsewhere must be told.

    Raises ConfigError for a function that may not be run or a package that is not installed.
    """
    if not config.scoring.parts and config.scoring.weight == 1:
        return _one_scorer(config, cwd, allowed)
    main, *more = (_one_scorer(each, cwd, allowed) for each in single_rewards(config))
    return WeightedScorer(main, config.scoring.weight, [
        (part.part, part.weight, scorer) for part, scorer in zip(config.scoring.parts, more, strict=True)])


def _one_scorer(config: Config, cwd: Path | None, allowed: Sequence[str] | None) -> Scorer:
    if config.reward in IN_PLACE:
        return InlineScorer(IN_PLACE[config.reward])
    if config.reward == "judge":  # waits for an answer over the network: as many at once as threads call it
        return JudgeScorer(config.scoring.judge, deadline_s=config.deadlines.reward_s)

    def make() -> FunctionScorer:
        return function_scorer(config, cwd=cwd, allowed=allowed)

    return make() if config.scoring.workers == 1 else ScorerPool(make, config.scoring.workers)


def function_scorer(config: Config, *, cwd: Path | None = None, allowed: Sequence[str] | None = None,
                    quiet: bool = False, watch: bool = False) -> FunctionScorer:
    """The reward that `reward` names, in one child process, whose start and notes can be asked for. Raises ConfigError.
    """
    code = cast(CodeLimits, config.scoring.code.model_dump()) if config.reward == "code" else None
    model = cast(ModelTask, config.scoring.model.model_dump()) if config.reward == "reward_model" else None
    if model is not None and quiet:  # a trial: who plans a run need not have the GPUs of its workers
        model["device"] = "cpu"
    return FunctionScorer(config.reward, cwd=cwd or Path.cwd(), deadline_s=config.deadlines.reward_s,
                          allowed=allowed_imports() if allowed is None else allowed, quiet=quiet,
                          signature=config.scoring.signature, answer_key=config.data.answer_key,
                          pattern=config.scoring.pattern, code=code, model=model, watch=watch)


def check_reward(config: Config, *, cwd: Path | None = None, rows: Rows | None = None) -> tuple[str, ...]:
    """Load the run's reward once, in a process of its own, and try it on the first row with the row's own answer.

    Returns what a person should know of a function of theirs that works: that it prints, or leaks threads. Raises
    ConfigError if it cannot work: no function, columns that some row lacks, an answer by no deadline, no finite number,
    no parts for gdpo, less than 0 for maxrl. Without `rows` it is loaded only.
    """
    tried = [_check_one(each, cwd, rows) for each in single_rewards(config)]
    notes = tuple(note for told, _ in tried for note in told)
    scores = [score for _, score in tried if score is not None]
    name = config.learner.advantage.name
    if rows is None or name not in ("gdpo", "maxrl"):
        return notes
    score, where = _whole_score(config, scores), rows.first()[1]
    if name == "gdpo":
        return (*notes, *_check_parts(config, score, where))
    if score.reward < 0:
        refuse("learner.advantage.name", name, f"takes rewards of at least 0, and it was {score.reward:g} in its trial "
               f"on {where}, of the row's own answer; let the reward return 0 or more, or use grpo")
    return notes


def _whole_score(config: Config, scores: Sequence[Score]) -> Score:
    """What `make_scorer` makes of the scores of `single_rewards`."""
    main, *more = scores
    if not config.scoring.parts and config.scoring.weight == 1:
        return main
    return add_up(main, config.scoring.weight, [(part.part, part.weight, score) for part, score in zip(
        config.scoring.parts, more, strict=True)])


def _check_parts(config: Config, score: Score, where: str) -> tuple[str, ...]:
    """Whether gdpo has parts to learn from. Raises ConfigError without any; of named ones that are not there, which
    another row's answer may have, it tells."""
    settings = config.learner.advantage
    assert isinstance(settings, PartsAdvantage)
    if not score.parts:
        refuse("learner.advantage.name", "gdpo", f"learns from the parts of a reward, and {config.reward} gave none in "
               f"its trial on {where}: let it return its parts in a dict, add rewards in scoring.parts, or use grpo")
    if absent := sorted({one.part for one in settings.parts} - set(score.parts)):
        return (f"learner.advantage.parts: the reward gave {', '.join(sorted(score.parts))} in its trial on {where}, "
                f"and not {', '.join(absent)}; a step ends the run if no answer of it has such a part",)
    return ()


def _check_one(config: Config, cwd: Path | None, rows: Rows | None) -> tuple[tuple[str, ...], Score | None]:
    """What a person should know of one reward, and its score of the first row's own answer."""
    if config.reward in IN_PLACE:
        return (), None if rows is None else _try_on(InlineScorer(IN_PLACE[config.reward]), config.reward, (), rows)
    if config.reward == "judge":
        return (), _try_judge(config, rows)
    if config.reward == "reward_model":
        check_classifier(config.scoring.model.path or "", config.scoring.model.label)
    scorer, score = function_scorer(config, cwd=cwd, quiet=True, watch=True), None
    try:
        columns = scorer.start()
        loading, calls = scorer.notes, list[Notes]()
        if rows is not None:
            score = _try_on(scorer, config.reward, columns, rows)
            calls.append(scorer.notes)
            if calls[0].get("threads"):  # a pool for all calls, or one more at each?
                _try_on(scorer, config.reward, (), rows)
                calls.append(scorer.notes)
    finally:
        scorer.close()
    told = () if is_own(config.reward) else leftovers(loading, calls)
    return tuple(f"reward: {config.reward} {each}" for each in told), score


def _try_judge(config: Config, rows: Rows | None) -> Score | None:
    """One question, unless there is no row to ask about."""
    judge = JudgeScorer(config.scoring.judge, deadline_s=config.deadlines.reward_s)
    try:
        return None if rows is None else _try_on(judge, config.reward, (), rows)
    finally:
        judge.close()


def _try_on(scorer: Scorer, reward: str, columns: Sequence[str], rows: Rows) -> Score:
    if missing := missing_columns(reward, columns, rows.without):
        raise ConfigError(missing[0])
    prompt, where = rows.first()
    try:
        return scorer(prompt, prompt.answer)
    except RewardError as error:
        remedy = "see that the judge answers at scoring.judge.url, and what it answers (docs/rewards.md 9)" \
            if reward == "judge" else "give the row another ground truth" if is_own(reward) or reward in IN_PLACE else \
            "mend the function, it must give every answer a number"
        raise ConfigError(f"{error}\nreward: that was a trial on {where}, with the row's own answer "
                          f"{prompt.answer[:80]!r}; {remedy}") from error


def missing_columns(reward: str, columns: Sequence[str], without: Callable[[str], str | None]) -> list[str]:
    """What is wrong with each column that the reward needs and some row lacks. `without`: as in Rows."""
    remedy = "they are those of data.train=" + reward if is_own(reward) else \
        "give the parameter a default, or the rows the column; if it is the model's text, call it `completion`"
    return [f"reward: {reward} asks for the column {column!r}, and {where} has none; {remedy}"
            for column in columns if (where := without(column)) is not None]


def answer_text(decoded: str, completion: Completion) -> str:
    """The text that is scored: stop strings are trimmed from text, never from ids."""
    if not completion.stop_text:
        return decoded
    cut = decoded.rfind(completion.stop_text)
    return decoded if cut < 0 else decoded[:cut]
