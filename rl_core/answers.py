"""Scored answers to held-out prompts: what a validation's record and its table say of them. Pure functions.

Accuracy is of `correct`, never of a shaped reward (algorithms.md 10); the estimates are those of docs/validation.md 2.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from rl_core.correctness import RIGHT, is_known_everywhere, known_correctness
from rl_core.estimates import (
    Estimate,
    Vote,
    mean_at_n,
    mean_best_at_k,
    mean_maj_at_k,
    mean_maj_at_n,
    mean_pass_at_k,
    mean_std_at_n,
    mean_worst_at_k,
    over_prompts,
)
from rl_core.types import Prompt, Score

Mode = Literal["greedy", "sampled"]
TABLE_SAMPLES = 8
"""Sampled answers of one prompt that a table shows at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer to one held-out prompt.

    Example: `Answer(prompt=3, mode="sampled", data_source="sort", score=Score(reward=1.0, correct=1.0), length=6,
    finish_reason="stop")`.
    """

    prompt: int
    """Place among the prompts, from 0."""
    mode: Mode
    data_source: str
    score: Score | None
    """None where the reward failed."""
    length: int
    """Tokens."""
    finish_reason: str
    text: str = ""
    """Kept for the table only, as are the tokens."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of each token, by the weights that answered, nats."""


Judged = tuple[Answer, float | None]
"""An answer, and how right it is; None where that is not known."""


def correctness(answers: Sequence[Answer]) -> list[float | None]:
    """How right each answer is; None where that is not known: the reward failed, or does not say it of this answer.

    By the rule of rl_core/correctness.py, data source by data source, greedy and sampled answers together: a shaped
    reward that happens to give 0 to all greedy ones is no accuracy of them. None for all answers of a mode where
    nothing is known of one of its sources: what is right among the others is not the accuracy of all.
    """
    sources = {source: number for number, source in enumerate(dict.fromkeys(each.data_source for each in answers))}
    source_N = np.array([sources[answer.data_source] for answer in answers], np.int64)
    scores = [answer.score for answer in answers]
    reward_N = np.array([math.nan if score is None else score.reward for score in scores], np.float64)
    correct_N = np.array([math.nan if score is None or score.correct is None else score.correct for score in scores],
                         np.float64)
    known_N = known_correctness(reward_N, correct_N, source_N)
    for mode in get_args(Mode):
        mine_N = np.array([answer.mode == mode for answer in answers], np.bool_)
        if not is_known_everywhere(known_N[mine_N], source_N[mine_N]):
            known_N[mine_N] = math.nan
    return [None if math.isnan(known) else known for known in known_N.tolist()]


def mean_reward(answers: Sequence[Answer]) -> float | None:
    """Mean reward of the answers that could be scored; None where none could."""
    return _mean(answer.score.reward for answer in answers if answer.score is not None)


def fields_of(answers: Sequence[Answer], passes: Sequence[int]) -> dict[str, Any]:
    """What a record says of these answers: n (prompts), then the fields of each mode that was asked for.

    `passes`: the k of pass@k and maj@k. Shares and intervals `[lo, hi]` are None where nothing is known
    (docs/validation.md 1).
    """
    judged = list(zip(answers, correctness(answers), strict=True))
    greedy = [(answer, correct) for answer, correct in judged if answer.mode == "greedy"]
    sampled = [(answer, correct) for answer, correct in judged if answer.mode == "sampled"]
    record: dict[str, Any] = {"n": len({answer.prompt for answer in answers})} | _common("greedy", greedy)
    known = _known(greedy)
    record |= {"greedy_interval": _interval(over_prompts(known, len(known)))}  # of a share: Wilson's
    return record | (_common("sampled", sampled) | _estimates(sampled, passes) if sampled else {})


def by_prompt_of(answers: Sequence[Answer], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What a record says of each prompt, so that two validations can be paired (docs/validation.md 1).

    `digest` of the prompts, then for each mode that was asked for how right the answers of each prompt are on the
    average, in order of prompts; None where that is not known.
    `{"digest": "5e...", "greedy": [1.0, 0.0], "sampled": [0.75, None]}`.
    """
    found: dict[str, Any] = {"digest": prompts_digest(prompts)}
    judged = list(zip(answers, correctness(answers), strict=True))
    for mode in get_args(Mode):
        known: dict[int, list[float]] = {}
        for answer, correct in judged:
            if answer.mode == mode and correct is not None:
                known.setdefault(answer.prompt, []).append(correct)
        if any(answer.mode == mode for answer in answers):
            found[mode] = [_mean(known.get(place, ())) for place in range(len(prompts))]
    return found


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Of what was asked and what is right, in order: data sources, token ids, ground truths."""
    digest = hashlib.sha256()
    for prompt in prompts:
        words = json.dumps([prompt.data_source, prompt.answer, prompt.token_ids_P.tolist()])
        digest.update(words.encode() + b"\n")
    return digest.hexdigest()


def _known(judged: Sequence[Judged]) -> list[float]:
    """How right the answers are of which it is known."""
    return [correct for _, correct in judged if correct is not None]


def _common(mode: Mode, judged: Sequence[Judged]) -> dict[str, Any]:
    """Fields of one mode, each name beginning with it."""
    answers = [answer for answer, _ in judged]
    return {
        f"{mode}_accuracy": _mean(_known(judged)),
        f"{mode}_reward": mean_reward(answers),
        f"{mode}_reward_interval": _interval(mean_at_n(rewards_of(answers))),
        f"{mode}_length": math.fsum(answer.length for answer in answers) / len(answers),
        f"{mode}_truncated": sum(answer.finish_reason == "length" for answer in answers) / len(answers),
        f"{mode}_failed": sum(answer.score is None for answer in answers),
    }


def _estimates(sampled: Sequence[Judged], passes: Sequence[int]) -> dict[str, Any]:
    known: dict[int, list[float]] = {}
    votes: dict[int, list[Vote]] = {}
    for answer, correct in sampled:
        if correct is not None and answer.score is not None:
            known.setdefault(answer.prompt, []).append(correct)
            votes.setdefault(answer.prompt, []).append((answer.score.extracted, correct))
    groups, polls = list(known.values()), list(votes.values())
    mean, majority = mean_at_n(groups), mean_maj_at_n(polls)
    rights = [[correct > RIGHT for correct in group] for group in groups]
    passed = {str(k): mean_pass_at_k(rights, k) for k in passes}
    voted = {str(k): mean_maj_at_k(polls, k) for k in passes}
    rewards = rewards_of([answer for answer, _ in sampled])
    best = {str(k): mean_best_at_k(rewards, k) for k in passes}
    worst = {str(k): mean_worst_at_k(rewards, k) for k in passes}
    return {
        "sampled_std": mean_std_at_n(rewards), "sampled_accuracy_std": mean_std_at_n(groups),
        "mean_at_n": _value(mean), "mean_at_n_interval": _interval(mean),
        "pass_at_k": {k: _value(each) for k, each in passed.items()},
        "pass_at_k_interval": {k: _interval(each) for k, each in passed.items()},
        "maj_at_n": _value(majority), "maj_at_n_interval": _interval(majority),
        "maj_at_k": {k: _value(each) for k, each in voted.items()},
        "maj_at_k_interval": {k: _interval(each) for k, each in voted.items()},
        "best_at_k": {k: _value(each) for k, each in best.items()},
        "best_at_k_interval": {k: _interval(each) for k, each in best.items()},
        "worst_at_k": {k: _value(each) for k, each in worst.items()},
        "worst_at_k_interval": {k: _interval(each) for k, each in worst.items()},
    }


def rewards_of(answers: Iterable[Answer]) -> list[list[float]]:
    """The rewards of each prompt's answers that could be scored, in order of prompts."""
    return [[answer.score.reward for answer in each if answer.score is not None] for each in by_prompt(answers)]


def by_prompt(answers: Iterable[Answer]) -> list[list[Answer]]:
    """The answers of each prompt, in order of prompts."""
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.prompt, []).append(answer)
    return [groups[prompt] for prompt in sorted(groups)]


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def _interval(estimate: Estimate | None) -> list[float] | None:
    return None if estimate is None or math.isinf(estimate.lo) else [estimate.lo, estimate.hi]


# -- the table


def table_prompts(prompts: Sequence[Prompt], size: int) -> set[int]:
    """Places of at most `size` prompts for the table: as many of each data source as may be, evenly over its prompts.

    A source with fewer prompts than its part leaves the rest to the others. A function of the prompts alone, so that
    two validations show the same ones. Example: sources a a a a b, size 3 -> {0, 2, 4}.
    """
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt.data_source, []).append(place)
    chosen: set[int] = set()
    left = size
    for i, source in enumerate(sorted(places, key=lambda source: len(places[source]))):  # the smallest first
        mine = places[source]
        part = min(len(mine), -(-left // (len(places) - i)))
        chosen.update(mine[j * len(mine) // part] for j in range(part))
        left -= part
    return chosen


def table_rows(answers: Sequence[Answer], prompts: Sequence[Prompt], texts: dict[int, str]) -> list[dict[str, Any]]:
    """Rows of the table: the answers of the prompts in `texts` (place -> prompt as text), by prompt, greedy first."""
    return [_row(answer, prompts[answer.prompt], texts[answer.prompt]) for answer in _shown(answers, texts)]


def table_details(answers: Sequence[Answer], texts: dict[int, str]) -> list[dict[str, Any]]:
    """What a page shows of each row of `table_rows` beside it: place of its prompt, reward parts, tokens and their
    log-probs (ten-thousandths of a nat). `{"prompt": 3, "parts": {"format": 1.0}, "ids": [5, 9], "logprobs": [-0.25,
    -1.5]}`."""
    return [{"prompt": answer.prompt, "parts": {} if answer.score is None else answer.score.parts,
             "ids": list(answer.token_ids), "logprobs": [round(value, 4) for value in answer.logprobs]}
            for answer in _shown(answers, texts)]


def _shown(answers: Sequence[Answer], texts: dict[int, str]) -> list[Answer]:
    """The answers of a table, in its order."""
    chosen = by_prompt(answer for answer in answers if answer.prompt in texts)
    return [answer for group in chosen for answer in group[:1 + TABLE_SAMPLES]]


def _row(answer: Answer, prompt: Prompt, text: str) -> dict[str, Any]:
    score = answer.score
    return {"data_source": answer.data_source, "prompt": text, "answer": prompt.answer, "mode": answer.mode,
            "text": answer.text, "reward": None if score is None else score.reward,
            "correct": None if score is None else score.correct,
            "extracted": None if score is None else score.extracted, "length": answer.length,
            "finish": answer.finish_reason}
