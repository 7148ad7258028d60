"""Estimates from answers to held-out prompts, each with its interval: functions of the answers alone.

Formulas and sources: docs/validation.md 2.

Several answers of one prompt are not independent: a prompt that is hard is hard for all of them. So every estimate is a
mean of one value per prompt, and its interval counts prompts, not answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rl_core.seeds import derive

Z95 = NormalDist().inv_cdf(0.975)
"""1.96: a standard normal variable is within it with probability 0.95."""

MOST_EXACT = 64
"""Votes of one prompt up to which maj@k is counted exactly, in at most 10 ms."""
DRAWS = 1000
"""Draws of k votes above that: a standard error of at most 0.016 a prompt, which averages out over prompts."""

Vote = tuple[str | None, float]
"""The answer as extracted from a text, and how right it is. None: nothing could be extracted, which is no vote."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval. `Estimate(0.75, 0.4093, 0.9285)`: 6 right of 8."""

    value: float
    lo: float
    hi: float


def wilson(share: float, n: float) -> Estimate:
    """A share of `n` independent trials: Wilson's score interval (J. Am. Stat. Assoc. 22, 1927).

    With z = 1.96: centre (p + z^2/2n) / (1 + z^2/n), half width z / (1 + z^2/n) sqrt(p (1-p)/n + z^2/4n^2). Within
    [0, 1], and no point at shares of 0 and 1. `n` need not be whole. Example: 6 of 8 -> 0.75 [0.4093, 0.9285].
    """
    if not (0.0 <= share <= 1.0 and n > 0):
        raise ValueError(f"a share is within [0, 1], of more than 0 trials (got {share!r} of {n!r})")
    wide = Z95**2 / n
    half = Z95 * math.sqrt(share * (1 - share) / n + wide / (4 * n)) / (1 + wide)
    centre = (share + wide / 2) / (1 + wide)
    return Estimate(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def over_prompts(values: Sequence[float], most: float) -> Estimate | None:
    """The mean of one value per prompt. `most`: independent trials behind all of them at most. None without a value.

    Values within [0, 1] have Wilson's interval at the effective number of trials P m (1-m) / var, where m and var are
    mean and variance over the P values (Dean and Pagano, J. Surv. Stat. Methodol. 3, 2015): P where answers of one
    prompt are all alike, `most` where they differ as answers of different prompts do. With all values 0, or all 1, it
    is P: nothing tells them apart. Other values have m +- z sqrt(var / (P - 1)).

    Example: values 1, 1, 0.5, 0 of two answers each: m = 0.625, var = 0.171875, 5.45 trials -> [0.258, 0.888].
    """
    if not values:
        return None
    prompts, mean = len(values), math.fsum(values) / len(values)
    var = math.fsum((value - mean) ** 2 for value in values) / prompts
    if min(values) < 0.0 or max(values) > 1.0:
        half = Z95 * math.sqrt(var / (prompts - 1)) if prompts > 1 else math.inf
        return Estimate(mean, mean - half, mean + half)
    mean = min(1.0, max(0.0, mean))  # whatever the rounding
    spread = mean * (1 - mean)
    trials = prompts if spread == 0.0 else most if var == 0.0 else prompts * spread / var
    return wilson(mean, max(prompts, min(most, trials)))


def mean_at_n(answers: Sequence[Sequence[float]]) -> Estimate | None:
    """mean@n: the mean over prompts of the mean over a prompt's answers; prompts without an answer are left out.

    `mean_at_n([[1, 1], [0, 1]])` -> 0.75.
    """
    asked = [each for each in answers if each]
    return over_prompts([math.fsum(each) / len(each) for each in asked], sum(map(len, asked)))


def paired_difference(mine: Sequence[float], base: Sequence[float], most: float) -> Estimate | None:
    """`mine - base`, means of one value per prompt over the same prompts; None without any. `most`: see `over_prompts`.

    With the two intervals [l, u] of `over_prompts`, the one of the difference d ends at
    d - sqrt(a^2 - 2 r a b + b^2), a = mine - l_mine, b = u_base - base, and the other end likewise, where r is the
    correlation of the values. The covariance in r loses 1/2P where it is positive, down to 0: two sets of weights that
    did the same on P prompts are not known to be the same on all. For values 0 and 1 this is method 10 of Newcombe,
    Stat. Med. 17 (1998) 2635, for any others the way of Zou and Donner, Stat. Med. 27 (2008).

    Example: of 50 prompts 36 right by both, 12 by `mine` alone, 2 by `base` alone -> 0.2 [0.0569, 0.3404].
    """
    if not mine:
        return None
    mine_P, base_P = np.array(mine, np.float64), np.array(base, np.float64)
    one, other = over_prompts(mine, most), over_prompts(base, most)
    assert one is not None and other is not None
    covariance = float(((mine_P - mine_P.mean()) * (base_P - base_P.mean())).mean())
    if covariance > 0:
        covariance = max(0.0, covariance - 1 / (2 * len(mine)))
    spread = float(mine_P.std() * base_P.std())
    r = max(-1.0, min(1.0, covariance / spread)) if spread > 0 else 0.0

    def apart(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * r * a * b + b * b)) if math.isfinite(a + b) else math.inf

    d = one.value - other.value
    return Estimate(d, d - apart(one.value - one.lo, other.hi - other.value),
                    d + apart(one.hi - one.value, other.value - other.lo))


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that at least one of k answers is right, from `right` of n: 1 - C(n - right, k) / C(n, k).

    Unbiased for any n >= k; 1 - (1 - right/n)^k is not (Chen et al., arXiv 2107.03374, section 2.1).
    `pass_at_k(4, 1, 2)` -> 0.5: of 6 pairs, 3 hold the right one.
    """
    if not (0 <= right <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= right <= n and 1 <= k <= n (got n={n}, right={right}, k={k})")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def mean_pass_at_k(answers: Sequence[Sequence[bool]], k: int) -> Estimate | None:
    """pass@k averaged over the prompts with at least k answers; None where none has.

    `mean_pass_at_k([[True, False], [False, False]], 1)` -> 0.25.
    """
    asked = [each for each in answers if len(each) >= k]
    return over_prompts([pass_at_k(len(each), sum(each), k) for each in asked], sum(len(each) // k for each in asked))


def best_at_k(values: Sequence[float], k: int) -> float:
    """The largest of k of the n values: the mean over all ways to draw k of them, without replacement.

    With x_1 <= ... <= x_n it is sum_i x_i C(i - 1, k - 1) / C(n, k): the largest of a draw is x_i in as many draws as
    there are ways to take the others from those below. Unbiased for any n >= k, and pass@k where the values are 0 and
    1. `best_at_k([0, 1, 2, 5], 2)` -> (1 + 2 + 5 + 2 + 5 + 5) / 6.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"best@k needs 1 <= k <= n (got n={n}, k={k})")
    ways, drawn = 1, 0.0  # C(i - 1, k - 1) for i = k, k + 1, ...
    for i, value in enumerate(sorted(values)[k - 1:], start=k):
        drawn += value * (ways / math.comb(n, k))
        ways = ways * i // (i - k + 1)
    return min(max(drawn, min(values)), max(values))  # whatever the rounding


def worst_at_k(values: Sequence[float], k: int) -> float:
    """The smallest of k of the n values, likewise: `worst_at_k([0, 1, 2, 5], 2)` -> (0 + 0 + 0 + 1 + 1 + 2) / 6."""
    return -best_at_k([-value for value in values], k)


def mean_best_at_k(values: Sequence[Sequence[float]], k: int) -> Estimate | None:
    """best@k averaged over the prompts with at least k values; None where none has."""
    asked = [each for each in values if len(each) >= k]
    return over_prompts([best_at_k(each, k) for each in asked], sum(len(each) // k for each in asked))


def mean_worst_at_k(values: Sequence[Sequence[float]], k: int) -> Estimate | None:
    """worst@k averaged over the prompts with at least k values; None where none has."""
    asked = [each for each in values if len(each) >= k]
    return over_prompts([worst_at_k(each, k) for each in asked], sum(len(each) // k for each in asked))


def mean_std_at_n(values: Sequence[Sequence[float]]) -> float | None:
    """std@n: how far the values of one prompt are apart, sqrt(sum (x - mean)^2 / n), averaged over the prompts with at
    least two values; None where none has. `mean_std_at_n([[0, 1], [1, 1], [1]])` -> 0.25."""
    apart = [float(np.std(each)) for each in values if len(each) > 1]
    return math.fsum(apart) / len(apart) if apart else None


def maj_at_k(votes: Sequence[Vote], k: int) -> float | None:
    """How right the most frequent of k answers is: the mean over all ways to draw k of the n votes.

    Exact for n <= MOST_EXACT, and for k = n; else the mean over DRAWS random ones, a function of the votes.

    Answers that are tied for the most votes share: the value is their mean, which is what a fair draw among them gives
    on average. A vote of None counts as drawn and is for nobody; where nobody has a vote, the value is 0. An extracted
    answer is as right as the mean of its votes says (they agree, unless the reward sees more than what it extracted).
    None where no vote at all was extracted: a reward that extracts nothing has no majority (Wang et al., arXiv
    2203.11171).

    `maj_at_k([("7", 1), ("7", 1), ("9", 0)], 3)` -> 1.0; with k = 2: of 3 pairs one is tied at 1/2 in each of two
    -> (1 + 0.5 + 0.5) / 3.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n (got n={n}, k={k})")
    worth: dict[str, list[float]] = {}
    for extracted, right in votes:
        if extracted is not None:
            worth.setdefault(extracted, []).append(right)
    if not worth:
        return None
    answers = sorted(((len(each), math.fsum(each) / len(each)) for each in worth.values()), reverse=True)
    counts, means = [count for count, _ in answers], [mean for _, mean in answers]
    if k == n:
        first = [mean for mean, count in zip(means, counts, strict=True) if count == counts[0]]
        return math.fsum(first) / len(first)
    found = _over_all_draws(counts, means, n, k) if n <= MOST_EXACT else _over_some_draws(counts, means, n, k)
    return min(max(found, min(0.0, *means)), max(0.0, *means))  # whatever the rounding


def _over_all_draws(counts: Sequence[int], means: Sequence[float], n: int, k: int) -> float:
    """maj@k over all draws of k of n votes. `counts`: votes of each answer, the most first; the rest is for nobody."""
    most, second, silent = counts[0], counts[1] if len(counts) > 1 else 0, n - sum(counts)
    alone = sum(math.comb(most, top) * math.comb(n - most, k - top) for top in range(second + 1, min(most, k) + 1))
    parts = [means[0] * float(alone)]  # with more votes than any other answer has
    fill = np.array([math.comb(silent, k - given) for given in range(k + 1)], np.float64)
    for top in range(1, min(second, k) + 1):
        share = 1 / np.arange(1, k // top + 1)
        parts.append(float(fill @ _won_with(counts, means, top, k)[:, 1:] @ share))
    return math.fsum(parts) / math.comb(n, k)


def _won_with(counts: Sequence[int], means: Sequence[float], top: int, k: int) -> NDArray[np.float64]:
    """Draws in which no answer has over `top` votes, each weighted by how right those with `top` are together.

    [votes that were given, 0 to k; answers with `top` of them, 0 to k // top]. The draws are counted answer by answer.
    """
    ways = np.zeros((k + 1, k // top + 1))
    ways[0, 0] = 1.0
    right = np.zeros_like(ways)
    for count, mean in zip(counts, means, strict=True):
        more_ways, more_right = np.zeros_like(ways), np.zeros_like(ways)
        for votes in range(min(count, top - 1) + 1):
            n = float(math.comb(count, votes))
            more_ways[votes:] += n * ways[:k + 1 - votes]
            more_right[votes:] += n * right[:k + 1 - votes]
        if count >= top:
            n = float(math.comb(count, top))
            more_ways[top:, 1:] += n * ways[:k + 1 - top, :-1]
            more_right[top:, 1:] += n * (right[:k + 1 - top, :-1] + mean * ways[:k + 1 - top, :-1])
        ways, right = more_ways, more_right
    return right


def _over_some_draws(counts: Sequence[int], means: Sequence[float], n: int, k: int) -> float:
    """maj@k over DRAWS draws of k of n votes, without replacement; the same ones for the same counts."""
    rng = np.random.default_rng(derive("maj@k", k, n, *counts))
    drawn = rng.multivariate_hypergeometric([*counts, n - sum(counts)], k, size=DRAWS, method="marginals")[:, :-1]
    top = drawn.max(axis=1, keepdims=True)
    tied = (drawn == top) & (top > 0)
    return float((tied @ np.array(means) / np.maximum(1, tied.sum(axis=1))).mean())


def mean_maj_at_k(votes: Sequence[Sequence[Vote]], k: int) -> Estimate | None:
    """maj@k averaged over the prompts with at least k votes; None where none has, or nothing was extracted of any.

    A prompt of which nothing was extracted counts 0. `mean_maj_at_k([[("7", 1), ("9", 0)], [("7", 1), ("7", 1)]], 2)`
    -> 0.75.
    """
    asked = [each for each in votes if len(each) >= k]
    return _majorities([maj_at_k(each, k) for each in asked], sum(len(each) // k for each in asked))


def mean_maj_at_n(votes: Sequence[Sequence[Vote]]) -> Estimate | None:
    """maj@n over prompts, each by all its votes; None where no answer of any prompt was extracted.

    A prompt without votes is left out; one of which nothing was extracted counts 0.
    """
    values = [maj_at_k(each, len(each)) for each in votes if each]
    return _majorities(values, len(values))


def _majorities(values: Sequence[float | None], most: int) -> Estimate | None:
    return None if all(value is None for value in values) else over_prompts([value or 0.0 for value in values], most)
