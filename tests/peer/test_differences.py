"""The differences to TRL are those that docs/algorithms.md 14 says, by their numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from rl_core.errors import ConfigError
from tests.learning import answer_logprobs
from tests.peer.batch import CUT, LENGTHS
from tests.peer.cases import EPS, GROUPS, SAME, SIZE
from tests.peer.differences import DIFFERENT, ONLY_THERE
from tests.peer.headway_step import config_of

GIVEN = "advantages given"
ANSWERS, TOKENS = GROUPS * SIZE, sum(map(sum, LENGTHS))


def sides(both: Any, name: str, way: str = GIVEN, **learner: Any) -> tuple[dict[str, Any], Any]:
    return both.trl(name, way), both.headway(DIFFERENT[name], way, **learner)


def apart(one: float, other: float) -> float:
    return abs(one / other - 1)


def policy_minus(both: Any, batch: str, other: str | None = None) -> list[np.ndarray]:
    """By answer: log-probs of the policy minus those of a reference, or of behavior."""
    policy = AutoModelForCausalLM.from_pretrained(both.model)
    reference = None if other is None else AutoModelForCausalLM.from_pretrained(both.references[other])
    found = []
    for group in both.batches[batch].groups:
        prompt = group.lease.prompt.token_ids_P.tolist()
        for t in group.trajectories:
            ids = t.token_ids_L.tolist()
            subtracted = (t.behavior_logprobs_L if reference is None
                          else answer_logprobs(reference, prompt, ids).numpy())
            found.append(answer_logprobs(policy, prompt, ids).double().numpy() - subtracted)
    return found


def test_bnpo_depends_on_the_micro_batches(both):
    theirs, ours = sides(both, "bnpo")
    whole = both.trl("bnpo, one micro-batch", GIVEN)
    assert (theirs["micro_batches"], whole["micro_batches"]) == (2, 1)
    assert apart(theirs["norm"], whole["norm"]) > 1e-3
    assert ours.norm == pytest.approx(whole["norm"], rel=1e-5)


@pytest.mark.parametrize("name", ["grpo, cut answers masked", "dr_grpo, cut answers masked"])
def test_a_masked_answer_counts_among_the_answers_there_and_not_here(both, name):
    theirs, ours = sides(both, name)
    share = (ANSWERS - len(CUT)) / ANSWERS
    assert theirs["loss"] == pytest.approx(ours.loss * share, rel=1e-5)
    assert theirs["norm"] == pytest.approx(ours.norm * share, rel=1e-5)


def test_the_ratio_of_an_answer_over_tokens_is_refused_here(both):
    assert math.isfinite(both.trl("gspo over tokens")["loss"])
    with pytest.raises(ConfigError, match="a sum over tokens would count it once a token"):
        both.headway(DIFFERENT["gspo over tokens"])


def test_the_bound_of_cispo_is_epsilon_high_itself_which_is_0_2_by_default(both):
    theirs, ours = sides(both, "cispo by default")
    assert apart(theirs["norm"], ours.norm) > 0.5
    low = both.headway(DIFFERENT["cispo by default"], GIVEN, loss={"name": "cispo", "ratio_high": 0.2})
    assert (low.loss, low.norm) == pytest.approx((theirs["loss"], theirs["norm"]), rel=1e-5)


def test_exponents_are_bounded_here_and_there_is_a_dual_clip(both):
    theirs, ours = sides(both, "far")
    advantage = np.array(both.batches["far"].advantages)
    first = np.array([difference[0] for difference in policy_minus(both, "far")])
    bad = advantage < 0
    assert (first > 20).all()
    assert theirs["loss"] == pytest.approx((np.exp(first) * -advantage)[bad].sum() / TOKENS, rel=1e-3)
    assert ours.loss == pytest.approx((math.exp(20) * -advantage)[bad].sum() / TOKENS, rel=1e-5)
    dual = both.headway(DIFFERENT["far"], GIVEN, loss={"name": "ppo_clip"})
    assert abs(dual.loss) < 3 * np.abs(advantage).max()


def test_k3_is_bounded_here(both):
    theirs, ours = sides(both, "KL of another model")
    k3 = np.concatenate([np.exp(-d) + d - 1 for d in policy_minus(both, "plain", "other")])
    assert (k3 > 10).sum() >= 5
    assert theirs["loss"] - ours.loss == pytest.approx((k3 - k3.clip(max=10)).mean(), rel=1e-4)


def test_the_weight_of_the_kl_has_a_gradient_there_which_makes_it_the_one_of_k2(both):
    """`k3` weighted has TRL's value and not its gradient; `k3+` weighted has both (cases.py)."""
    theirs = both.trl("KL, weighted", GIVEN)
    ours = both.headway(SAME["KL, weighted"], GIVEN, kl=SAME["KL, weighted"].kl | {"estimator": "k3"})
    assert ours.loss == pytest.approx(theirs["loss"], rel=1e-5)
    assert apart(ours.norm, theirs["norm"]) > 1e-3


def test_the_entropy_bonus_is_a_mean_over_tokens_there_and_aggregated_like_the_loss_here(both):
    theirs, ours = sides(both, "entropy bonus by answer", "own advantages")
    stock = AutoModelForCausalLM.from_pretrained(both.model)
    entropies = []
    for group in both.batches["plain"].groups:
        prompt = group.lease.prompt.token_ids_P.tolist()
        for t in group.trajectories:
            ids = torch.tensor([[*prompt, *t.token_ids_L.tolist()]])
            with torch.no_grad():
                logits = stock(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1]
            entropies.append(torch.distributions.Categorical(logits=logits).entropy().double().numpy())
    assert theirs["loss"] == pytest.approx(-np.concatenate(entropies).mean(), rel=1e-5)
    assert ours.loss == pytest.approx(-np.mean([answer.mean() for answer in entropies]), rel=1e-5)


def test_tokens_of_high_entropy_are_those_of_a_micro_batch_there_and_of_the_minibatch_here(both):
    theirs, ours = sides(both, "high entropy, four micro-batches")
    assert apart(theirs["norm"], ours.norm) > 1e-3
    assert ours.norm == pytest.approx(both.trl("high entropy only, one micro-batch", GIVEN)["norm"], rel=1e-5)


def test_a_share_of_tokens_that_is_no_whole_number_is_one_token_less_there(both):
    theirs, ours = sides(both, "high entropy, a share between")
    assert theirs["norm"] == both.trl("high entropy only, one micro-batch", GIVEN)["norm"], "20 of 100 tokens"
    assert ours.norm == pytest.approx(both.trl("high entropy, the next token", GIVEN)["norm"], rel=1e-5), "21 of them"


def summed_parts(batch: Any) -> np.ndarray:
    """The sum over rewards, each normalised in its group."""
    total = np.zeros(ANSWERS)
    for values in batch.parts.values():
        groups = np.array(values).reshape(GROUPS, SIZE)
        total += ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + EPS)).ravel()
    return total


@pytest.mark.parametrize("name", ["two rewards", "two rewards, answers of one length"])
def test_several_rewards_are_normalised_over_answers_there_and_over_tokens_here(both, name):
    theirs, ours = sides(both, name, "own advantages")
    batch = both.batches[DIFFERENT[name].batch]
    total = summed_parts(batch)
    tokens = np.array([len(t.token_ids_L) for group in batch.groups for t in group.trajectories])
    of_tokens = np.repeat(total, tokens)
    assert theirs["advantages"] == pytest.approx((total - total.mean()) / (total.std(ddof=1) + EPS), rel=1e-4, abs=1e-6)
    assert ours.advantages == pytest.approx((total - of_tokens.mean()) / of_tokens.std(ddof=1), rel=1e-4, abs=1e-6)


def test_rloo_has_one_ratio_for_an_answer_there_and_the_same_gradient_in_the_first_update(both):
    theirs, ours = sides(both, "rloo", "own advantages")
    advantages, lengths = np.array(ours.advantages), np.array(LENGTHS).ravel()
    assert ours.advantages == pytest.approx(theirs["advantages"], rel=1e-5)
    assert ours.norm == pytest.approx(theirs["norm"], rel=1e-5)
    assert theirs["loss"] == pytest.approx(-advantages.mean(), abs=1e-6)
    assert ours.loss == pytest.approx(-(advantages * lengths).sum() / ANSWERS, rel=1e-5)


def test_the_kl_in_the_reward_of_rloo_is_k1_in_the_reward_here(both):
    theirs, ours = sides(both, "rloo, KL in the reward", "own advantages")
    assert ours.norm == pytest.approx(theirs["norm"], rel=1e-5)
    assert apart(theirs["norm"], both.trl("rloo")["norm"]) > 1e-4, "the KL was heard"


def test_deviations_get_1e_4_there_and_1e_6_here_by_default(both):
    theirs = np.array(both.trl("dapo")["advantages"])
    ours = np.array(both.headway(SAME["dapo"], advantage={}).advantages)
    deviation = np.array(both.batches["plain"].parts["reward"]).reshape(GROUPS, SIZE).std(1, ddof=1).repeat(SIZE)
    expected = (deviation + 1e-4) / (deviation + 1e-6)
    assert (ours / theirs)[theirs != 0] == pytest.approx(expected[theirs != 0], rel=1e-6)


@pytest.mark.parametrize("name", ONLY_THERE)
def test_what_only_trl_has_is_heard_there(both, name):
    _, without = ONLY_THERE[name]
    assert apart(both.trl(name, GIVEN)["norm"], both.trl(without, GIVEN)["norm"]) > 1e-4


def test_vespo_is_refused_here():
    with pytest.raises(ValidationError, match="vespo"):
        config_of({"loss": {"name": "vespo"}})
