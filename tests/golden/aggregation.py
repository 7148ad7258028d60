"""Every aggregation once more, in plain Python, one answer at a time, from docs/algorithms.md 6.

A minibatch is its loss tokens: the loss of each, and which answer it is of. An answer without a loss token is not in
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Minibatch:
    """Loss tokens of all answers, in mixed order."""

    loss: list[float]
    answer: list[int]
    longest: int
    """sampling.max_new_tokens"""


def random_minibatch(seed: int, tokens: int = 60, answers: int = 11) -> Minibatch:
    """Answers of many lengths; numbers 3 and 7 have no loss token left."""
    rng = np.random.default_rng(seed)
    there = [a for a in range(answers) if a not in (3, 7)]
    answer = rng.permutation([*there, *rng.choice(there[:5], tokens - len(there))]).tolist()
    return Minibatch(loss=rng.normal(0, 2, tokens).tolist(), answer=answer, longest=16)


def aggregated(minibatch: Minibatch, name: str) -> float:
    answers = [[loss for loss, a in zip(minibatch.loss, minibatch.answer, strict=True) if a == here]
               for here in sorted(set(minibatch.answer))]
    total = sum(sum(answer) for answer in answers)
    return {"token_sum": total, "token_mean": total / len(minibatch.loss), "seq_mean_token_sum": total / len(answers),
            "seq_mean_token_sum_norm": total / (len(answers) * minibatch.longest),
            "seq_mean_token_mean": sum(sum(answer) / len(answer) for answer in answers) / len(answers)}[name]


def slopes(minibatch: Minibatch, name: str) -> list[float]:
    """Its derivative by the loss of each token: what it is of a loss of 1 there and 0 elsewhere."""
    count = len(minibatch.loss)
    return [aggregated(Minibatch(np.eye(count)[t].tolist(), minibatch.answer, minibatch.longest), name)
            for t in range(count)]
