"""mean@n, pass@k and maj@k against enumeration, intervals against published numbers and by how often they hold."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from rl_core.estimates import (
    Estimate,
    Vote,
    best_at_k,
    maj_at_k,
    mean_at_n,
    mean_best_at_k,
    mean_maj_at_k,
    mean_maj_at_n,
    mean_pass_at_k,
    mean_std_at_n,
    mean_worst_at_k,
    over_prompts,
    pass_at_k,
    wilson,
    worst_at_k,
)

NEWCOMBE = {
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    "81 of 263": (81, 263, 0.2553, 0.3662),
    "15 of 148": (15, 148, 0.0624, 0.1605),
    "0 of 20": (0, 20, 0.0, 0.1611),
    "1 of 29": (1, 29, 0.0061, 0.1718),
}


@pytest.mark.parametrize(("right", "n", "lo", "hi"), NEWCOMBE.values(), ids=NEWCOMBE)
def test_wilson_intervals_are_the_published_ones(right: int, n: int, lo: float, hi: float) -> None:
    found = wilson(right / n, n)
    assert found.value == right / n
    assert (found.lo, found.hi) == pytest.approx((lo, hi), abs=5e-5)
    mirrored = wilson((n - right) / n, n)
    assert (mirrored.lo, mirrored.hi) == pytest.approx((1 - found.hi, 1 - found.lo))


def test_what_is_no_share_is_refused() -> None:
    for share, n in ((1.2, 3), (-0.1, 3), (0.5, 0)):
        with pytest.raises(ValueError, match=r"a share is within \[0, 1\]"):
            wilson(share, n)


def test_one_answer_per_prompt_has_wilsons_interval() -> None:
    found, plain = mean_at_n([[1.0]] * 7 + [[0.0]] * 3), wilson(0.7, 10)
    assert found is not None and (found.value, found.lo, found.hi) == pytest.approx((plain.value, plain.lo, plain.hi))


def test_answers_of_one_prompt_that_are_all_alike_count_once() -> None:
    once, eight = mean_at_n([[1.0], [0.0], [1.0], [1.0]]), mean_at_n([[1.0] * 8, [0.0] * 8, [1.0] * 8, [1.0] * 8])
    assert once == eight
    same = mean_at_n([[1.0] * 8] * 4)
    assert same is not None and same.hi == 1.0 and same.lo == pytest.approx(wilson(1.0, 4).lo), "nothing tells apart"


def test_answers_that_differ_as_those_of_different_prompts_do_count_each() -> None:
    """Every prompt has the same share of right answers: no more than all answers are counted, though nothing varies."""
    found, plain = mean_at_n([[1.0, 0.0, 0.0, 0.0]] * 10), wilson(0.25, 40)
    assert found is not None and (found.lo, found.hi) == pytest.approx((plain.lo, plain.hi))


def test_the_worked_example() -> None:
    found = over_prompts([1.0, 1.0, 0.5, 0.0], 8)
    assert found is not None and (found.value, found.lo, found.hi) == pytest.approx((0.625, 0.2579, 0.8888), abs=5e-5)


def test_prompts_without_an_answer_are_left_out() -> None:
    assert mean_at_n([[1.0, 0.0], [], [1.0]]) == mean_at_n([[1.0, 0.0], [1.0]])
    assert mean_at_n([[], []]) is None and mean_at_n([]) is None


def test_values_that_are_no_shares_have_the_normal_interval() -> None:
    found = over_prompts([-1.0, 0.0, 2.0, 3.0], 4)
    half = 1.959964 * np.std([-1.0, 0.0, 2.0, 3.0], ddof=1) / math.sqrt(4)
    assert found is not None and (found.value, found.hi) == pytest.approx((1.0, 1.0 + half))
    alone = over_prompts([7.0], 1)
    assert alone == Estimate(7.0, -math.inf, math.inf)


def test_the_interval_holds_as_often_as_it_says_where_counting_answers_does_not() -> None:
    """Prompts of their own difficulty (Beta(0.3, 0.3)), 64 of them, 16 answers each, 400 validations."""
    rng = np.random.default_rng(7)
    holds = naive = 0
    for _ in range(400):
        rights = rng.binomial(16, rng.beta(0.3, 0.3, 64)).tolist()
        found = mean_at_n([[1.0] * right + [0.0] * (16 - right) for right in rights])
        every = wilson(sum(rights) / (64 * 16), 64 * 16)
        assert found is not None
        holds += found.lo <= 0.5 <= found.hi
        naive += every.lo <= 0.5 <= every.hi
    assert 0.92 <= holds / 400 <= 0.98
    assert naive / 400 < 0.6


# -- pass@k


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int) -> None:
    for right in range(n + 1):
        answers = [i < right for i in range(n)]
        for k in range(1, n + 1):
            drawn = [any(subset) for subset in combinations(answers, k)]
            assert pass_at_k(n, right, k) == pytest.approx(sum(drawn) / len(drawn)), (n, right, k)


def test_pass_at_k_is_exact_for_many_answers() -> None:
    assert pass_at_k(1024, 1, 512) == 0.5
    assert pass_at_k(1024, 1024, 1) == 1.0 and pass_at_k(1024, 0, 1024) == 0.0


def test_pass_at_k_over_prompts_takes_those_with_enough_answers() -> None:
    found = mean_pass_at_k([[True, False, False, False], [False] * 4, [True]], 2)
    assert found is not None and found.value == 0.25  # (1/2 + 0) / 2; the prompt with one answer says nothing of two
    assert mean_pass_at_k([[True]], 2) is None
    first = mean_pass_at_k([[True, False], [False, False]], 1)
    assert first is not None and first.value == 0.25


@pytest.mark.parametrize(("n", "right", "k"), [(2, 1, 3), (2, 1, 0), (2, 3, 1)])
def test_pass_at_k_that_is_none_is_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"got n={n}, right={right}, k={k}"):
        pass_at_k(n, right, k)


# -- maj@k


def majority(subset: tuple[Vote, ...], worth: dict[str, float]) -> float:
    """One draw, by hand: the mean over the answers with the most votes, 0 where none has one."""
    counts = Counter(extracted for extracted, _ in subset if extracted is not None)
    first = [worth[extracted] for extracted, votes in counts.items() if votes == max(counts.values())]
    return sum(first) / len(first) if first else 0.0


VOTES: dict[str, list[Vote]] = {
    "two of three": [("7", 1.0), ("7", 1.0), ("9", 0.0)],
    "a tie": [("7", 1.0), ("9", 0.0)],
    "a tie of three": [("7", 1.0), ("9", 0.0), ("8", 0.0), ("7", 1.0), ("9", 0.0), ("8", 0.0)],
    "without an answer": [(None, 0.0), ("7", 1.0), (None, 0.0), ("9", 0.0), ("9", 0.0), ("7", 1.0)],
    "one that is partly right": [("a", 0.5), ("b", 1.0), ("a", 0.5), ("c", 0.0), ("b", 1.0), ("c", 0.0), ("d", 0.25)],
    "the wrong one wins": [("9", 0.0)] * 5 + [("7", 1.0)] * 3,
}


@pytest.mark.parametrize("votes", VOTES.values(), ids=VOTES)
def test_maj_at_k_is_the_mean_over_all_draws(votes: list[Vote]) -> None:
    worth = {extracted: right for extracted, right in votes if extracted is not None}
    for k in range(1, len(votes) + 1):
        draws = [majority(subset, worth) for subset in combinations(votes, k)]
        assert maj_at_k(votes, k) == pytest.approx(sum(draws) / len(draws)), k


RIGHT = {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.0}
POLLS = {
    "a close race": list("aaaaabbbb"),
    "three of a kind": list("aaabbbccc"),
    "many once": list("abcd") + [None] * 3 + list("ab"),
}


@pytest.mark.parametrize("poll", POLLS.values(), ids=POLLS)
def test_draws_of_many_votes_tend_to_the_exact_mean_and_are_the_same_again(
        poll: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    votes: list[Vote] = [(name, RIGHT[name] if name else 0.0) for name in poll]
    exact = [maj_at_k(votes, k) for k in range(1, len(votes))]
    monkeypatch.setattr("rl_core.estimates.MOST_EXACT", 0)
    drawn = [maj_at_k(votes, k) for k in range(1, len(votes))]
    assert drawn == [maj_at_k(votes[::-1], k) for k in range(1, len(votes))], "whatever their order"
    assert drawn != exact and max(abs(a - b) for a, b in zip(exact, drawn, strict=True) if a and b) < 0.05
    assert maj_at_k(votes, len(votes)) == pytest.approx(majority(tuple(votes), RIGHT)), "of all votes there is one draw"


def test_many_votes_are_counted_without_going_through_all_draws() -> None:
    """C(64, 32) is 1.8e18. Of two answers with 32 votes each one wins as often as the other."""
    assert maj_at_k([("7", 1.0)] * 32 + [("9", 0.0)] * 32, 32) == pytest.approx(0.5)
    assert maj_at_k([(str(i), float(i < 16)) for i in range(64)], 32) == pytest.approx(0.25)
    assert maj_at_k([("7", 1.0)] * 60 + [("9", 0.0)] * 4, 16) == 1.0


def test_maj_at_k_over_prompts_is_of_those_with_k_votes() -> None:
    sure, torn = [("7", 1.0)] * 4, [("7", 1.0), ("9", 0.0)]
    one, two = mean_maj_at_k([sure, torn], 1), mean_maj_at_k([sure, torn], 2)
    assert one is not None and two is not None and one.value == two.value == 0.75
    assert (one.lo, one.hi) != (two.lo, two.hi), "six answers, and three draws of two"
    four = mean_maj_at_k([sure, torn], 4)
    assert four is not None and four.value == 1.0
    assert mean_maj_at_k([sure, torn], 8) is None and mean_maj_at_k([[(None, 1.0)]], 1) is None
    silent = mean_maj_at_k([sure, [(None, 0.0)] * 4], 4)
    assert silent is not None and silent.value == 0.5, "nothing extracted counts as wrong"


def test_a_tie_is_shared_and_where_nothing_was_extracted_there_is_no_majority() -> None:
    assert maj_at_k([("7", 1.0), ("9", 0.0)], 2) == 0.5
    assert maj_at_k([(None, 1.0), (None, 0.0)], 2) is None
    assert maj_at_k([("7", 1.0)], 1) == 1.0
    with pytest.raises(ValueError, match="got n=1, k=2"):
        maj_at_k([("7", 1.0)], 2)


def test_maj_at_n_over_prompts_counts_prompts_without_a_vote_as_wrong() -> None:
    found = mean_maj_at_n([[("7", 1.0), ("7", 1.0), ("9", 0.0)], [(None, 0.0)] * 3, [("1", 0.0), ("2", 1.0)], []])
    plain = wilson(0.5, 3)
    assert found is not None and found.value == 0.5
    assert (found.lo, found.hi) == pytest.approx((plain.lo, plain.hi)), "one vote a prompt"
    assert mean_maj_at_n([[(None, 1.0)], [(None, 0.0)]]) is None


BEST = {
    # values, k, best@k, worst@k; by hand
    "of one": ([0.25], 1, 0.25, 0.25),
    "k = 1 is the mean": ([0.0, 1.0, 2.0, 5.0], 1, 2.0, 2.0),
    "six pairs": ([5.0, 0.0, 2.0, 1.0], 2, 20 / 6, 4 / 6),
    "four triples": ([0.0, 1.0, 2.0, 5.0], 3, (2 + 5 + 5 + 5) / 4, (0 + 0 + 0 + 1) / 4),
    "k = n": ([0.0, 1.0, 2.0, 5.0], 4, 5.0, 0.0),
    "all alike": ([-0.5, -0.5, -0.5], 2, -0.5, -0.5),
    "below zero": ([-1.0, -3.0, 0.5], 2, (0.5 + 0.5 - 1) / 3, (-3 - 3 - 1) / 3),
}


@pytest.mark.parametrize(("values", "k", "best", "worst"), BEST.values(), ids=BEST)
def test_best_and_worst_of_k_by_hand(values: list[float], k: int, best: float, worst: float) -> None:
    assert best_at_k(values, k) == pytest.approx(best)
    assert worst_at_k(values, k) == pytest.approx(worst)


def test_best_and_worst_of_k_are_the_means_over_all_subsets() -> None:
    rng = np.random.default_rng(3)
    for n, k in ((5, 2), (7, 4), (9, 9), (8, 1)):
        values = rng.normal(size=n).tolist()
        assert best_at_k(values, k) == pytest.approx(np.mean([max(each) for each in combinations(values, k)]))
        assert worst_at_k(values, k) == pytest.approx(np.mean([min(each) for each in combinations(values, k)]))
    big = rng.normal(size=1024).tolist()
    assert np.mean(big) < best_at_k(big, 8) < best_at_k(big, 512) <= max(big), "no number is too large"


def test_best_of_k_is_pass_at_k_where_rewards_are_zero_and_one() -> None:
    for n, right, k in ((8, 3, 2), (16, 1, 8), (4, 0, 4), (5, 5, 3)):
        values = [1.0] * right + [0.0] * (n - right)
        assert best_at_k(values, k) == pytest.approx(pass_at_k(n, right, k))
        assert worst_at_k(values, k) == pytest.approx(math.comb(right, k) / math.comb(n, k))


def test_the_standard_deviation_is_of_the_values_of_one_prompt_averaged_over_prompts() -> None:
    assert mean_std_at_n([[0.0, 1.0], [1.0, 1.0], [9.0]]) == 0.25, "one value is not apart from others"
    assert mean_std_at_n([[1.0, 2.0, 6.0]]) == pytest.approx(math.sqrt((4 + 1 + 9) / 3))
    assert mean_std_at_n([[5.0, 5.0], [-5.0, -5.0]]) == 0.0, "far apart from prompt to prompt only"
    assert mean_std_at_n([[1.0], []]) is None and mean_std_at_n([]) is None


def test_best_of_k_over_prompts_counts_those_with_k_values() -> None:
    found = mean_best_at_k([[0.0, 3.0], [1.0, 1.0, 4.0], [9.0]], 2)
    assert found is not None and found.value == pytest.approx((3 + 3) / 2) == pytest.approx((found.lo + found.hi) / 2)
    lowest = mean_worst_at_k([[0.0, 1.0], [1.0, 1.0]], 2)
    assert lowest is not None and lowest == over_prompts([0.0, 1.0], 2)
    assert mean_best_at_k([[1.0]], 2) is None and mean_worst_at_k([], 1) is None
    for k in (0, 3):
        with pytest.raises(ValueError, match="best@k needs 1 <= k <= n"):
            best_at_k([0.0, 1.0], k)
