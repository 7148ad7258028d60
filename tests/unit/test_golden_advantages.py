"""Every advantage estimator against the plain reference of tests/golden/advantages.py, small numbers worked out by
hand, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.advantage_settings import AdvantageConfig
from rl_core.errors import ConfigError
from rl_core.learner.advantages.answers import Answers, whiten
from rl_core.learner.advantages.estimate import advantages, answers_of, is_per_token, needs_policy, needs_values
from rl_core.learner.advantages.gae import ValueFacts, estimate_from_values, gae
from rl_core.learner.advantages.optimal_token_baseline import PolicyFacts
from rl_core.learner.advantages.remax import remax
from rl_core.learner.advantages.resampling import resampled, resampling_weights
from rl_core.learner.overlong import overlong_penalty
from rl_core.variants import variants
from tests.golden.advantages import REFERENCES, Claim, gae_of_answer, mates, random_claim, values_to_go

ESTIMATORS = variants(AdvantageConfig)
CASES = {f"{name} {options or ''}": (name, options) for name, (_, cases) in REFERENCES.items() for options in cases}
OF_GROUPS = ("grpo", "rloo", "grpo_passk", "opo", "gpg", "lite_ppo", "maxrl", "reinforce_plus_plus_baseline")


def flat(lists: list[list[float]]) -> np.ndarray:
    return np.array([value for one in lists for value in one], np.float64)


def answers_in(claim: Claim) -> Answers:
    greedy = {g: claim.greedy.get(g, 0.0) for g in claim.group}
    return answers_of(np.array(claim.reward), np.array(claim.group), length_N=np.array(claim.length),
                      tokens_N=np.array(claim.tokens), parts={k: np.array(v) for k, v in claim.parts.items()},
                      baseline_N=np.array([greedy[g] for g in claim.group], np.float32))


def values_in(claim: Claim) -> ValueFacts:
    """Of the loss tokens alone, as a pass through the critic has them."""
    value = [[one[t] for t in places] for one, places in zip(claim.value, claim.position, strict=True)]
    return ValueFacts(value_K=flat(value), behind_N=np.array(claim.behind), cut_N=np.array(claim.cut, np.bool_))


def estimated(name: str, claim: Claim, **options) -> np.ndarray:
    config = ESTIMATORS[name](name=name, **options)
    answers = answers_in(claim)
    if needs_values(config):
        return estimate_from_values(answers, values_in(claim), config)[0]
    policy = PolicyFacts(logprob_K=flat(claim.logprob), squares_K=flat(claim.squares), weight_K=flat(claim.weight),
                         position_K=flat(claim.position).astype(np.int64)) if needs_policy(config) else None
    return advantages(answers, config, policy=policy)


def at(claim: Claim, order: list[int]) -> Claim:
    """The answers of these numbers, in this order."""
    def those(values):
        return [values[i] for i in order]

    return replace(claim, reward=those(claim.reward), group=those(claim.group), length=those(claim.length),
                   tokens=those(claim.tokens), parts={k: those(v) for k, v in claim.parts.items()},
                   position=those(claim.position), logprob=those(claim.logprob), squares=those(claim.squares),
                   weight=those(claim.weight), value=those(claim.value), behind=those(claim.behind),
                   cut=those(claim.cut))


def claim_of(rewards, groups, *, lengths=None) -> Claim:
    lengths = lengths or [1] * len(rewards)
    return Claim(reward=[float(r) for r in rewards], group=groups, length=lengths, tokens=lengths)


def test_every_estimator_has_a_reference():
    assert set(REFERENCES) | {"function"} == set(ESTIMATORS), "function: test_hooks.py"


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES.keys())
def test_an_estimator_agrees_with_its_reference(name, options):
    for seed in range(3):
        claim = random_claim(seed)
        expected = REFERENCES[name][0](claim, **options)
        found = estimated(name, claim, **options)
        assert found.dtype == np.float32
        expected = flat(expected) if is_per_token(ESTIMATORS[name](name=name)) else np.array(expected)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


ROOT3 = math.sqrt(3)
BY_HAND = {
    # name: estimator, options, rewards, groups, lengths, advantages
    "grpo_passk, sigma 0.5": ("grpo_passk", {}, [1, 0, 0, 0], [0] * 4, None, [2, 0, 0, 0]),
    "grpo_passk, two best": ("grpo_passk", {}, [1, 1, 0], [0] * 3, None, [0, 0, 0]),
    "grpo_passk, not normalised": ("grpo_passk", {"normalize_by_std": False}, [3, 7, 5], [0] * 3, None, [0, 2, 0]),
    "opo, b = (1*3 + 0*1) / 4": ("opo", {}, [1, 0], [0, 0], [3, 1], [0.25, -0.75]),
    "gpg, half of the answers have a reward": ("gpg", {}, [1, 0, 1, 0], [0, 0, 1, 1], None, [1, -1, 1, -1]),
    "gpg, none has": ("gpg", {}, [0, 0], [0, 0], None, [0, 0]),
    "lite_ppo, sigma of 1 0 1 0 is 1/sqrt 3": ("lite_ppo", {}, [1, 0, 1, 0], [0, 0, 1, 1], None,
                                              [ROOT3 / 2, -ROOT3 / 2, ROOT3 / 2, -ROOT3 / 2]),
    "maxrl, mean 0.25": ("maxrl", {}, [1, 0, 0, 0], [0] * 4, None, [3, -1, -1, -1]),
    "maxrl, nothing right": ("maxrl", {}, [0, 0], [0, 0], None, [0, 0]),
    "reinforce_plus_plus_baseline, 1 and 3 tokens": (
        # +-0.5, mean over tokens -0.25, variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25
        "reinforce_plus_plus_baseline", {}, [1, 0], [0, 0], [1, 3], [1.5, -0.5]),
    "reinforce_plus_plus, rewards 1 and 0 at 1 and 3 tokens": (
        # mean 0.25, variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25
        "reinforce_plus_plus", {}, [1, 0], [0, 0], [1, 3], [1.5, -0.5, -0.5, -0.5]),
    "reinforce_plus_plus, gamma 0.5": (
        # returns 2, 4 and 0: mean 2, variance 4
        "reinforce_plus_plus", {"gamma": 0.5}, [4, 0], [0, 0], [2, 1], [0, 1, -1]),
}


@pytest.mark.parametrize(("name", "options", "rewards", "groups", "lengths", "expected"), BY_HAND.values(),
                         ids=BY_HAND.keys())
def test_small_claims_have_the_advantages_worked_out_by_hand(name, options, rewards, groups, lengths, expected):
    found = estimated(name, claim_of(rewards, groups, lengths=lengths), **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gdpo_normalises_every_part_by_itself():
    claim = Claim(reward=[0, 0], group=[0, 0], length=[1, 1], tokens=[1, 1],
                  parts={"right": [1, 0], "size": [100.0, 300.0]})
    # each part gives +-0.7071; summed with weights 1 and 0.5 +-0.3536; whitened over two tokens +-0.7071
    parts = ({"part": "right", "weight": 1.0}, {"part": "size", "weight": 0.5})
    np.testing.assert_allclose(estimated("gdpo", claim, parts=parts), [0.7071, -0.7071], atol=1e-4)


def test_a_part_of_gdpo_with_a_negative_weight_takes_away():
    claim = Claim(reward=[0, 0], group=[0, 0], length=[1, 1], tokens=[1, 1],
                  parts={"right": [1, 0], "size": [300.0, 100.0]})
    # each part gives +-0.7071; summed with weights 1 and -2 -+0.7071, so that the long right answer is the worse one
    parts = ({"part": "right", "weight": 1.0}, {"part": "size", "weight": -2.0})
    np.testing.assert_allclose(estimated("gdpo", claim, parts=parts), [-0.7071, 0.7071], atol=1e-4)


@pytest.mark.parametrize(("parts", "told"), [((), "the claim has none;"), (({"part": "x"},), "not \\['x'\\]")])
def test_gdpo_without_its_parts_is_refused_by_name(parts, told):
    with pytest.raises(ConfigError, match=f"learner.advantage.parts: .*{told}"):
        estimated("gdpo", claim_of([1, 0], [0, 0]), parts=parts)


def test_maxrl_refuses_a_negative_reward_by_place():
    with pytest.raises(ConfigError, match=r"answer 1 of the claim has reward -0\.5"):
        estimated("maxrl", claim_of([1, -0.5], [0, 0]))


def test_the_optimal_token_baseline_of_two_answers_is_as_worked_out_by_hand():
    half = [math.log(0.5)]
    claim = Claim(reward=[1.0, 0.0], group=[0, 0], length=[2, 1], tokens=[2, 1], position=[[0, 1], [0]],
                  logprob=[half * 2, half], squares=[[0.5, 0.5], [0.75]], weight=[[1, 1], [1]])
    # energies 0.5, 0.5 and 0.75; W at 0 is 0.5 and 0.75, so B_0 = 0.5 / 1.25; only the first is longer: B_1 = 0
    np.testing.assert_allclose(estimated("optimal_token_baseline", claim), [0.6, 1.0, -0.4], rtol=1e-6)


def test_gae_of_three_tokens_is_as_worked_out_by_hand():
    # gamma 1, lam 1: A_t = reward to go - V_t
    reward, value, every = np.array([0, 0, 1.0]), np.array([0.5, 0.25, 0.75]), np.ones(3, bool)
    np.testing.assert_allclose(gae(reward, value, every)[0], [0.5, 0.75, 0.25])
    # gamma 0.5, lam 0.5: deltas 0 + 0.125 - 0.5, 0 + 0.375 - 0.25, 1 - 0.75
    advantage, returns = gae(reward, value, every, gamma=0.5, lam=0.5)
    np.testing.assert_allclose(advantage, [-0.375 + 0.25 * 0.1875, 0.125 + 0.25 * 0.25, 0.25])
    np.testing.assert_allclose(returns, advantage + value)


def test_gae_carries_the_next_value_through_masked_tokens_and_bootstraps_a_cut_answer():
    with_gap = gae(np.array([0, 9.0, 1]), np.array([0.5, 7.0, 0.75]), np.array([True, False, True]), gamma=0.5)
    without = gae(np.array([0, 1.0]), np.array([0.5, 0.75]), np.ones(2, bool), gamma=0.5)
    for gap, plain in zip(with_gap, without, strict=True):
        np.testing.assert_allclose(gap, [plain[0], 0.0, plain[1]])
    assert gae(np.array([0.0]), np.array([0.5]), np.ones(1, bool), last_value=2.0)[0].item() == 1.5


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_of_answers_with_masked_tokens_and_the_returns_of_a_claim_are_those_of_the_reference(gamma, lam):
    for seed in range(3):
        claim, rng = random_claim(seed), np.random.default_rng(seed)
        for value, places, behind in zip(claim.value, claim.position, claim.behind, strict=True):
            reward, mask = rng.normal(size=len(value)), np.isin(np.arange(len(value)), places)
            found, returns = gae(reward, np.array(value), mask, gamma=gamma, lam=lam, last_value=behind)
            expected = gae_of_answer(reward.tolist(), value, mask.tolist(), behind, gamma, lam)
            np.testing.assert_allclose(found, expected, atol=1e-12)
            np.testing.assert_allclose(returns, np.where(mask, found + value, 0.0), atol=1e-12)
        config = ESTIMATORS["gae"](name="gae", gamma=gamma, lam=lam)
        returned = estimate_from_values(answers_in(claim), values_in(claim), config)[1]
        np.testing.assert_allclose(returned, flat([r for _, r in values_to_go(claim, gamma, lam)]), atol=1e-5)


def test_remax_is_the_lead_over_the_greedy_answer_token_by_token():
    # two answers of 3 and 2 tokens; what is left of their rewards is 1, 0.5, 0.75 and 0, 0.5; the greedy one got 0.25
    given = np.array([0.5, -0.25, 0.75, -0.5, 0.5]), np.array([3, 2]), np.array([0.25, 0.25])
    np.testing.assert_allclose(remax(*given), [0.75, 0.25, 0.5, -0.25, 0.25])


def test_remax_needs_no_group_and_no_spread():
    alone = Claim(reward=[1.0, 0.5, 0.5], group=[0, 1, 1], length=[2, 1, 1], tokens=[2, 1, 1],
                  greedy={0: 0.5, 1: 1.0})
    assert estimated("remax", alone).tolist() == [0.5, 0.5, -0.5, -0.5]


def test_remax_of_a_group_without_a_greedy_answer_is_refused_by_place():
    answers = answers_of(np.ones(3), np.array([0, 1, 1]), baseline_N=np.array([0.5, np.nan, np.nan]))
    for case in (answers, answers_of(np.ones(1), np.zeros(1, int))):
        with pytest.raises(ConfigError, match=r"learner.advantage.name: remax needs .*1 groups of the claim have none"):
            advantages(case, ESTIMATORS["remax"](name="remax"))


@pytest.mark.parametrize(("method", "expected"), [("pow", [4, 0, 1]), ("max_min", [1, 0, 1]),
                                                  ("max_random", [0.4, 0.1, 0.1])])
def test_resampling_weights_are_as_worked_out_by_hand(method, expected):
    assert resampling_weights(np.array([2.0, 0.0, -1.0]), method).tolist() == expected


def test_resampling_draws_as_many_answers_as_there_are_and_the_same_ones_again():
    counts = resampled(np.array([4.0, 0.0, 1.0, 1.0]), seed=3)
    assert counts.sum() == 4 and counts[1] == 0 and counts.tolist() == resampled(np.array([4.0, 0, 1, 1]), 3).tolist()
    assert resampled(np.zeros(3), seed=1).tolist() == [1, 1, 1]


def test_the_overlong_penalty_grows_over_its_buffer():
    found = overlong_penalty(np.array([0, 6, 8, 10]), longest=10, buffer=4, factor=2.0)
    assert found.tolist() == [0.0, 0.0, -1.0, -2.0]


def test_whitening_has_mean_0_and_deviation_1_over_tokens_and_leaves_one_token_alone():
    values, tokens = np.array([3.0, -1.0, 7.0]), np.array([2, 3, 0])
    found = np.repeat(whiten(values, tokens), tokens)
    assert found.mean() == pytest.approx(0.0, abs=1e-12) and found.std(ddof=1) == pytest.approx(1.0, rel=1e-6)
    assert whiten(values, np.array([1, 0, 0])).tolist() == values.tolist()


# -- properties

claims = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=14).map(
    lambda rows: Claim(reward=[float(r) for r, _, _ in rows],
                       group=np.unique([g for _, g, _ in rows], return_inverse=True)[1].tolist(),
                       length=[n for _, _, n in rows], tokens=[n for _, _, n in rows]))


@pytest.mark.parametrize("name", REFERENCES)
def test_the_order_of_answers_does_not_matter(name):
    for seed in range(3):
        claim = random_claim(seed)
        order = np.random.default_rng(seed).permutation(len(claim.reward)).tolist()
        found = estimated(name, at(claim, order))
        before = estimated(name, claim)
        if is_per_token(ESTIMATORS[name](name=name)):
            parts = np.split(before, np.cumsum(claim.tokens)[:-1])
            before = np.concatenate([parts[i] for i in order])
        else:  # of equal best answers of grpo_passk each is ahead by 0
            before = before[order]
        np.testing.assert_allclose(found, before, rtol=1e-4, atol=1e-5)


# What an estimator makes of rewards a S + b, a > 0, from what it makes of S. `of` is the estimator, by claim.


def moved(claim: Claim, scale: float, shift: float) -> Claim:
    """Rewards, those of greedy answers, and every part, each part with a scale of its own."""
    return replace(claim, reward=[scale * r + shift for r in claim.reward],
                   greedy={g: scale * r + shift for g, r in claim.greedy.items()},
                   parts={k: [(i + 1) * scale * v + shift for v in values]
                          for i, (k, values) in enumerate(claim.parts.items())})


def the_same(of, claim, scale, shift):
    return of(claim)


def scaled(of, claim, scale, shift):
    return scale * of(claim)


def linear(of, claim, scale, shift):
    """a A(S) + b A(1), where A(1) is 0 as long as all answers of the group go on."""
    return scale * of(claim) + shift * of(replace(claim, reward=[1.0] * len(claim.reward)))


def scale_divided_out(of, claim, scale, shift):
    return of(moved(claim, 1.0, shift / scale))


def by_share_of_rewards(of, claim, scale, shift):
    there, after = (sum(r != 0 for r in c.reward) for c in (claim, moved(claim, scale, shift)))
    return scale * of(claim) * there / max(1, after)


def by_mean_of_group(of, claim, scale, shift):
    mean = np.array([np.mean([claim.reward[j] for j in mates(claim, i)]) for i in range(len(claim.reward))])
    return of(claim) * scale * mean / (scale * mean + abs(shift))


MOVED = {
    # name: estimator, options, what it makes of a S + b
    "grpo: the mean takes b, the deviation a": ("grpo", {}, the_same),
    "grpo without the deviation: a stays": ("grpo", {"normalize_by_std": False}, scaled),
    "rloo: the mean of the others takes b": ("rloo", {}, scaled),
    "grpo_passk: the second best takes b, the deviation a": ("grpo_passk", {}, the_same),
    "grpo_passk without the deviation: a stays": ("grpo_passk", {"normalize_by_std": False}, scaled),
    "gdpo: of every part by itself": ("gdpo", {}, the_same),
    "reinforce_plus_plus: b stands at every token, whitening takes both": ("reinforce_plus_plus", {}, the_same),
    "reinforce_plus_plus with a discount: b is not the same at all tokens": (
        "reinforce_plus_plus", {"gamma": 0.9}, scale_divided_out),
    "reinforce_plus_plus_baseline: the mean takes b, whitening a": ("reinforce_plus_plus_baseline", {}, the_same),
    "opo: a mean by length takes b": ("opo", {}, scaled),
    "gpg: the mean takes b, but alpha counts what is not 0": ("gpg", {}, by_share_of_rewards),
    "lite_ppo: the mean takes b, the deviation of the claim a": ("lite_ppo", {}, the_same),
    "maxrl: the mean takes a and b, and divides by both": ("maxrl", {}, by_mean_of_group),
    "optimal_token_baseline: answers that have ended get no b": ("optimal_token_baseline", {}, linear),
    "tir_optimal_token_baseline: the same": ("tir_optimal_token_baseline", {}, linear),
    "remax: the greedy answer takes b": ("remax", {}, scaled),
}
MOVED_ELSEWHERE = {"gae": "needs values: test_gae_scales_with_rewards_and_values...",
                   "function": "the formula is somebody else's"}


@pytest.mark.parametrize(("name", "options", "expected"), MOVED.values(), ids=MOVED)
def test_scale_and_shift_of_rewards_do_what_the_formula_says(name, options, expected):
    for seed, (scale, shift) in enumerate([(0.5, 0.0), (4.0, 0.0), (1.0, 1.7), (1.0, -1.0), (3.0, -1.3)]):
        claim = random_claim(seed)
        after = moved(claim, scale, abs(shift) if name == "maxrl" else shift)  # whose rewards are at least 0
        found = expected(lambda one: estimated(name, one, **options), claim, scale, shift)
        # eps, and 1e-8 under the root of whitening, are not scaled: they show where the deviation is about as small
        np.testing.assert_allclose(estimated(name, after, **options), found, rtol=1e-3, atol=2e-3)


def test_what_scale_and_shift_do_is_said_of_every_estimator():
    assert {name for name, _, _ in MOVED.values()} | set(MOVED_ELSEWHERE) == set(ESTIMATORS)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_shift_of_rewards_does_not_move_token_baselines_where_all_answers_go_on(name):
    rng, length = np.random.default_rng(0), [4] * 6
    claim = Claim(reward=[1.0, 0.0, 2.0, 0.5, 0.0, 1.0], group=[0, 0, 0, 1, 1, 1], length=length, tokens=length,
                  position=[[0, 1, 2, 3]] * 6, logprob=(-rng.exponential(1.0, (6, 4))).tolist(),
                  squares=rng.uniform(0.1, 1.0, (6, 4)).tolist(), weight=[[1.0] * 4] * 6)
    np.testing.assert_allclose(estimated(name, moved(claim, 2.0, 7.0)), 2 * estimated(name, claim), atol=1e-5)


def test_gae_scales_with_rewards_and_values_and_is_whitened_free_of_a_shift_of_the_rewards():
    rng, every = np.random.default_rng(0), np.ones(5, np.bool_)
    reward, value = np.array([0.0, 0, 0, 0, 1.5]), rng.normal(size=5)
    np.testing.assert_allclose(gae(3 * reward, 3 * value, every, gamma=0.9, lam=0.8)[0],
                               3 * gae(reward, value, every, gamma=0.9, lam=0.8)[0])
    before, after = (gae(given, value, every)[0] for given in (reward, reward + np.array([0, 0, 0, 0, 2.0])))
    np.testing.assert_allclose(after, before + 2.0, err_msg="gamma and lam are 1")
    np.testing.assert_allclose(whiten(after, np.ones(5, int)), whiten(before, np.ones(5, int)), atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(claims)
def test_groups_without_spread_and_groups_of_one_have_advantage_zero(claim):
    level = Claim(reward=[float(g) for g in claim.group], group=claim.group, length=claim.length, tokens=claim.tokens)
    for name in OF_GROUPS:
        np.testing.assert_allclose(estimated(name, level), 0.0, atol=1e-6, err_msg=name)
    single = Claim(reward=claim.reward, group=list(range(len(claim.group))), length=claim.length, tokens=claim.tokens)
    for name in OF_GROUPS:
        assert not estimated(name, single).any(), name


@pytest.mark.parametrize("name", REFERENCES)
def test_empty_claims_empty_answers_and_masked_answers_give_no_nan(name):
    nothing = Claim(reward=[], group=[], length=[], tokens=[], parts={"a": []})
    assert len(estimated(name, nothing)) == 0
    none = [[], []]
    empty = Claim(reward=[1.0, 0.0], group=[0, 0], length=[0, 0], tokens=[0, 0], parts={"a": [1.0, 0.0]},
                  position=none, logprob=none, squares=none, weight=none, value=none, behind=[0.5, 0.5],
                  cut=[True, False])
    assert np.isfinite(estimated(name, empty)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_place(bad):
    with pytest.raises(ValueError, match="trajectory 1 is not finite"):
        estimated("grpo", claim_of([0.0, bad], [0, 0]))


@pytest.mark.parametrize("name", REFERENCES)
def test_an_absent_answer_is_as_if_it_were_not_there(name):
    claim, config = random_claim(4), ESTIMATORS[name](name=name)
    away = 5
    rest = [i for i in range(len(claim.reward)) if i != away]
    fewer = at(claim, rest)
    masked = Claim(reward=claim.reward, group=claim.group, length=claim.length, parts=claim.parts,
                   tokens=[0 if i == away else n for i, n in enumerate(claim.tokens)], greedy=claim.greedy)
    answers = answers_in(masked)
    policy = PolicyFacts(logprob_K=flat(fewer.logprob), squares_K=flat(fewer.squares), weight_K=flat(fewer.weight),
                         position_K=flat(fewer.position).astype(np.int64))
    present = np.arange(len(claim.reward)) != away
    if needs_values(config):  # which an answer without a loss token has no part in
        values = replace(values_in(fewer), behind_N=np.array(claim.behind), cut_N=np.array(claim.cut))
        found = estimate_from_values(answers, values, config)[0]
    else:
        found = advantages(answers, config, present_N=present, policy=policy)
    expected = estimated(name, fewer)
    np.testing.assert_allclose(found if is_per_token(config) else found[present], expected, atol=1e-6)
