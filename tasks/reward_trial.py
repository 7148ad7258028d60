"""A reward tried on some rows before a run is built on it: `headway reward test`.

Each row's own ground truth is scored as if it were the answer, and the row's `completion` or `response` where it has
one; then another row's ground truth and an empty answer. Nothing is started but the reward's own process.
"""

from __future__ import annotations

import ast
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.config import REWARDS, Config
from rl_core.errors import ConfigError, RewardError, RewardTimeout
from rl_core.preflight import left_to_set
from rl_core.reward_settings import check_scoring
from rl_core.rollout.dataset import Dataset, training_data
from rl_core.rollout.rewards.function import FunctionScorer, is_own
from rl_core.rollout.rewards.leftovers import leftovers
from rl_core.rollout.rewards.scoring import IN_PLACE, Scorer, function_scorer, make_scorer, missing_columns
from rl_core.types import Prompt, Score

OWN, ANOTHER, EMPTY = "ground truth", "another row's", "empty"
ANSWER_COLUMNS = ("completion", "response")
USUAL_NAMES = ("compute_score", "score", "reward")
MOST_TIMEOUTS = 2
"""Calls that hang before the trial ends: each takes deadlines.reward_s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One answer and what became of it."""

    row: str
    """`file:line`."""
    of: str
    """Where the answer is from: OWN, a column, ANOTHER, EMPTY."""
    answer: str
    score: Score | None
    error: str | None
    ms: float
    notes: dict[str, Any] = field(default_factory=dict[str, Any])


def whole_target(reward: str) -> str:
    """A reward as the setting takes it: `./reward.py` alone means its `compute_score`, `score`, `reward`, or the one
    public function in it.

    Raises ConfigError where a file has none of these or several others.
    """
    if reward in REWARDS or not reward.endswith(".py"):
        return reward
    try:
        tree = ast.parse(Path(reward).read_text("utf-8"), reward)
    except OSError as error:
        raise ConfigError(f"reward: {reward} cannot be read ({error.strerror})") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"reward: {reward} is not Python ({error})") from error
    names = [node.name for node in tree.body
             if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")]
    usual = [name for name in USUAL_NAMES if name in names] or names
    if len(usual) == 1 or usual[:1] == list(USUAL_NAMES[:1]):
        return f"{reward}:{usual[0]}"
    listed = f"there are {', '.join(names)}" if names else "there is none"
    raise ConfigError(f"reward: {reward}: which function? {listed}; write {reward}:NAME")


def try_reward(config: Config, wanted: int) -> dict[str, Any]:
    """Score up to `wanted` rows: {reward, signature, rows, problems, notes, holds}; JSON values.

    `problems` would fail answers in a run, `notes` would not; `holds` says that there are no problems. Raises
    ConfigError and DataError for a reward or rows that cannot be tried at all, DeadlinePassed for rows of the hub.
    """
    check_scoring(config)
    if empty := [line for line in left_to_set(config) if line.startswith("data.train")]:
        raise ConfigError("\n".join(empty))
    made = config.data.model_copy(update={"size": wanted})  # rows of a task; a file is looked through whole
    data = training_data(config.model_copy(update={"data": made}))
    prompts = _prompts(data, wanted)
    if config.reward in IN_PLACE:
        tried = list(_try_all(make_scorer(config), prompts))
        return _report(config.reward, "", tried, {}, [])
    scorer = function_scorer(config, quiet=True, watch=True)
    try:
        columns = scorer.start()
        loading = scorer.notes
        missing = missing_columns(config.reward, columns, data.without)
        tried = list(_try_all(scorer, prompts))
        return _report(config.reward, "" if is_own(config.reward) else scorer.signature, tried, loading,
                       missing)
    except ConfigError as error:  # of `start`: the constructor's is a reward that may not be run at all
        return _report(config.reward, "", [], {}, [str(error)])
    finally:
        scorer.close()


def _prompts(data: Dataset, wanted: int) -> list[tuple[str, Prompt]]:
    return [(row.where, Prompt(dataset_epoch=0, position=i, prompt_idx=i, token_ids_P=np.zeros(0, np.int32),
                               answer=row.answer, data_source=row.data_source,
                               columns={**row.columns, "prompt": row.prompt}))
            for i, row in enumerate(data.rows(range(min(wanted, len(data)))))]


def _answers(prompts: Sequence[tuple[str, Prompt]]) -> Iterator[tuple[str, Prompt, str, str]]:
    """(where, prompt, where the answer is from, answer): the rows' own, then two that should be wrong."""
    for where, prompt in prompts:
        yield where, prompt, OWN, prompt.answer
        for column in ANSWER_COLUMNS:
            if isinstance(text := prompt.columns.get(column), str):
                yield where, prompt, column, text
    where, first = prompts[0]
    other = next((prompt.answer for _, prompt in prompts if prompt.answer != first.answer), None)
    if other is not None:
        yield where, first, ANOTHER, other
    yield where, first, EMPTY, ""


def _try_all(scorer: Scorer, prompts: Sequence[tuple[str, Prompt]]) -> Iterator[Tried]:
    timeouts = 0
    for where, prompt, of, answer in _answers(prompts):
        start, score, error = time.perf_counter(), None, None
        try:
            score = scorer(prompt, answer)
        except RewardError as failure:
            error = str(failure)
            timeouts += isinstance(failure, RewardTimeout)
        ms = 1e3 * (time.perf_counter() - start)
        notes = scorer.notes if isinstance(scorer, FunctionScorer) else {}
        yield Tried(row=where, of=of, answer=answer, score=score, error=error, ms=ms, notes=notes)
        if timeouts >= MOST_TIMEOUTS:
            return


def _report(reward: str, signature: str, tried: Sequence[Tried], loading: dict[str, Any],
            problems: list[str]) -> dict[str, Any]:
    failures = Counter(each.error for each in tried if each.error is not None)
    first = {each.error: each for each in reversed(tried)}
    problems = problems + [f"{n} of {len(tried)} answers ({first[error].row}, {first[error].of}): {error}"
                           for error, n in failures.items()] + _all_equal(tried)
    return {"reward": reward, "signature": signature or None, "rows": [_as_json(each) for each in tried],
            "problems": problems, "notes": _notes(tried, loading), "holds": not problems}


def _all_equal(tried: Sequence[Tried]) -> list[str]:
    """A reward that is blind to the answer is no reward, often one whose parameters are not what their author meant."""
    scored = [(each.answer, each.score.reward) for each in tried if each.score is not None]
    if len({answer for answer, _ in scored}) < 2 or len({reward for _, reward in scored}) > 1:
        return []
    more = "" if any(each.of in ANSWER_COLUMNS for each in tried) else \
        "; a column `completion` in the rows tries it on real answers"
    return [f"gives every answer the reward {scored[0][1]:g}, right, wrong or empty: does it get the model's text "
            f"(docs/rewards.md section 2)? Groups of equal rewards teach nothing{more}"]


def _as_json(each: Tried) -> dict[str, Any]:
    score = {"reward": None, "parts": {}, "correct": None, "extracted": None} if each.score is None else \
        asdict(each.score)
    return {"row": each.row, "of": each.of, "answer": each.answer, **score, "error": each.error, "ms": each.ms}


def _notes(tried: Sequence[Tried], loading: dict[str, Any]) -> list[str]:
    """What a user should know of a reward that works."""
    calls = [each.notes for each in tried]
    notes = leftovers(loading, calls)
    if left := sorted({name for note in calls for name in note.get("left_out", [])}):
        notes.append(f"entries of its dict that are no numbers are left out: {', '.join(left)}")
    own = [each.score for each in tried if each.of == OWN and each.score is not None]
    if own and all(score.correct == 0 for score in own):
        notes.append("calls no row's own ground truth right: is it written as the reward expects it?")
    return notes
