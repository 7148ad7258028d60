"""What makes no sense together is refused by field; what is chosen takes its own defaults along and nothing foreign."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from flows.presets import load_preset
from rl_core.advantage_settings import AdvantageConfig
from rl_core.combinations import PLAIN_AT_RATIO_1, check_rewards_landed
from rl_core.config import Config, field_kinds
from rl_core.correction_settings import KlConfig, RuleName, Weights
from rl_core.errors import ConfigError
from rl_core.idle_settings import READ_BY
from rl_core.learner.advantages.estimate import advantages, answers_of, estimator_module, is_per_token
from rl_core.learner.advantages.gae import ValueFacts, estimate_from_values
from rl_core.learner.advantages.optimal_token_baseline import PolicyFacts
from rl_core.learner.losses.tokens import Tokens, loss_module
from rl_core.learner.replay import tried_settings
from rl_core.loss_settings import Aggregation, LossConfig
from rl_core.no_spread import HAS_A_GRADIENT, HAS_A_LITTLE
from rl_core.plan import check, flatten, make_plan, parse_overrides, resolve
from rl_core.revisions import trained_by
from rl_core.variants import variants

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()


def settled(*sets: str, base: Config | None = None) -> Config:
    preset = load_preset("tiny-cpu") if base is None else base.model_dump(mode="json")
    config = resolve(preset, parse_overrides(sets))
    make_plan(config)
    return config


LOSS, CORRECTION = "learner.loss.name", "learner.correction"
DROP, PENALTY = "rollout.no_spread=drop", "learner.loss={truncated: penalty, overlong_buffer: 4}"
OPSM = "learner.loss={name: opsm, opsm_delta: 0.1, anchor: proximal}"
LENGTH = "[{part: len, reward: './mine.py:length', weight: -0.01}]"
REFUSED = {
    "a spread beside a greedy answer": (["learner.advantage.name=remax", DROP],
                                        "rollout.no_spread: remax compares answers with a greedy one"),
    "a spread beside a critic": (["learner.advantage.name=gae", DROP],
                                 "rollout.no_spread: gae compares answers with a critic's values"),
    "a spread beside the whole claim": (["learner.advantage.name=reinforce_plus_plus", DROP],
                                        "rollout.no_spread: reinforce_plus_plus compares answers with those of the"),
    "a spread of a sum of parts": (["learner.advantage.name=gdpo", DROP],
                                   "rollout.no_spread: gdpo compares answers part by part, and parts may differ"),
    "a spread of one": (["group_size=1", "learner.advantage={name: rloo, group_of_one: raw}", DROP],
                        "rollout.no_spread: a group of one has no spread"),
    "a penalty on a sum that nobody reads": (["learner.advantage.name=gdpo", PENALTY],
                                             "learner.loss.truncated: gdpo reads the parts of a reward"),
    "a penalty on a reward of at least 0": (["learner.advantage.name=maxrl", PENALTY],
                                            "learner.loss.truncated: maxrl is for rewards of at least 0"),
    "a greedy answer scored anew": (["learner.advantage.name=remax", "data.shards_from=k", "data.rescore=true"],
                                    "data.rescore: remax needs the reward of each prompt's greedy answer"),
    "a reference that nothing is taken against": (["learner.reference.path=r"], "learner.reference.path: nothing is"),
    "a refresh of no reference": (["learner.reference.refresh_every=2"], "learner.reference.refresh_every: there is"),
    "a refresh of another model": (["learner.kl.use=loss", "learner.reference={path: r, refresh_every: 2}"],
                                   "learner.reference.refresh_every: the policy's weights would take the place"),
    "a critic that nobody asks": (["learner.critic.path=c"], "learner.critic.path: no estimator reads"),
    "a warm-up of no critic": (["learner.critic.warmup_steps=2"], "learner.critic.warmup_steps: there is no critic"),
    "a teacher without a model": (["learner.teacher.use=loss"], "learner.teacher.path: learner.teacher.use=loss needs"),
    "a teacher who does not teach": (["learner.teacher.path=t"], "learner.teacher.path: nothing is learned"),
    "a KL of a log-linear prox in the reward": (
        [f"{LOSS}=decoupled_ppo", "learner.loss.proximal=loglinear", "learner.kl.use=reward"], "learner.kl.use: is"),
    "a KL in the reward of parts": (["learner.advantage.name=gdpo", "learner.kl.use=reward"], "learner.kl.use: gdpo"),
    "a KL in a reward of at least 0": (["learner.advantage.name=maxrl", "learner.kl.use=reward"], "kl.use: maxrl"),
    "k1 in the loss": (["learner.kl={use: loss, estimator: k1}"], "learner.kl.estimator: k1 has no expected gradient"),
    "abs+ in the reward": (["learner.kl={use: reward, estimator: abs+}"], "learner.kl.estimator: a reward has no grad"),
    "a plus without an estimator": (["learner.kl={use: loss, estimator: +}"], "learner.kl.estimator: Input should be"),
    "k3+ in the reward": (["learner.kl={use: reward, estimator: k3+}"], "learner.kl.estimator: a reward has no grad"),
    "an unbiased reward": (["learner.kl={use: reward, unbiased: true}"], "learner.kl.unbiased: weights the KL of the"),
    "a controller of the loss": (["learner.kl={use: loss, target: 0.1}"], "learner.kl.target: the controller is for"),
    "a summand of no deviation": (["learner.advantage={normalize_by_std: false, eps: 0.1}"],
                                  "learner.advantage.eps: nothing reads it without learner.advantage.normalize_by"),
    "a warm-up of the whole run": (["learner.advantage.name=gae", "learner.critic.warmup_steps=9", "total_steps=9"],
                                   "learner.critic.warmup_steps: the critic would learn alone in all of total_steps"),
    "parts that say how a program ended": (["reward=code", "learner.advantage.name=gdpo"],
                                           "learner.advantage.parts: gdpo would add up all parts of the reward code"),
    "parts that say what a judge did": (["reward=judge", "scoring.judge.url=http://h:1/v1",
                                         "learner.advantage.name=gdpo"],
                                        "learner.advantage.parts: gdpo would add up all parts of the reward judge"),
    "a part that says what could be read": (["reward=math_verify", "learner.advantage.name=gdpo"],
                                            "learner.advantage.parts: gdpo would add up all parts of the reward math"),
    "a weight of a sum that nobody reads": (["learner.advantage.name=gdpo", "scoring.weight=0.5"],
                                            "scoring.weight: multiplies the sum, and gdpo reads the parts"),
    "a reward below 0": (["learner.advantage.name=maxrl", f"scoring.parts={LENGTH}", "scoring.weight=-1"],
                         "scoring.weight: maxrl is for rewards of at least 0"),
    "a part below 0": (["learner.advantage.name=maxrl", f"scoring.parts={LENGTH}"],
                       "scoring.parts: of the part len: maxrl is for rewards of at least 0"),
    "an anchor that is not there": ([OPSM, f"{CORRECTION}.mode=bypass", "learner.passes=2"],
                                    "learner.loss.anchor: with learner.correction.mode=bypass the behavior policy"),
    "an anchor that nothing has left": ([OPSM],
                                        "learner.loss.anchor: in a step of one update the policy is the proximal one"),
    "sequence ratio, token mean": ([f"{LOSS}=gspo", "learner.loss.aggregation=token_mean"],
                                   "learner.loss.aggregation: gspo has one ratio for a whole answer"),
    "gmpo by tokens": ([f"{LOSS}=gmpo", "learner.loss.aggregation=token_sum"], "learner.loss.aggregation: gmpo is one"),
    "log-linear without decoupled": (["learner.loss.proximal=loglinear"], "learner.loss.proximal: belongs to"),
    "three policies in bypass": ([f"{LOSS}=decoupled_ppo", f"{CORRECTION}.mode=bypass"],
                                 "learner.correction.mode: decoupled_ppo is the loss of three policies"),
    "weights on a ratio pi/mu": ([f"{CORRECTION}={{mode: bypass, weights: token_truncate}}"],
                                 "learner.correction.weights: with mode=bypass the ratio of ppo_clip is pi/mu already"),
    "weights beside its own": ([f"{LOSS}=topr", f"{CORRECTION}.weights=token_truncate"],
                               "learner.correction.weights: topr has its own token weights pi/mu"),
    "weights beside tis_reinforce's": ([f"{LOSS}=tis_reinforce", f"{CORRECTION}.weights=geometric_truncate"],
                                       "learner.correction.weights: tis_reinforce has its own token weights pi/mu"),
    "weights beside decoupled_ppo's": ([f"{LOSS}=decoupled_ppo", f"{CORRECTION}.weights=sequence_icepop"],
                                       "learner.correction.weights: decoupled_ppo has its own token weights prox/mu"),
    "no weights to normalise": ([f"{CORRECTION}.normalize=true"], "learner.correction.normalize: there are no weights"),
    "weights that are clipped elsewhere": ([f"{LOSS}=topr", f"{CORRECTION}.normalize=true"],
                                           "learner.correction.normalize: the weights of topr are clipped in the loss"),
    "another cap of decoupled_ppo's": ([f"{LOSS}=decoupled_ppo", f"{CORRECTION}.cap=3"],
                                       "learner.correction.cap: decoupled_ppo cuts its own weights at 5, whatever"),
    "nothing rejected": ([f"{CORRECTION}.rejected=exclude"], "learner.correction.rejected: nothing is rejected"),
    "an empty band": ([f"{CORRECTION}.rejection=[{{rule: token_k1, high: 0.9}}]"], "learner.correction.rejection: not"),
    "a lower bound of k3": ([f"{CORRECTION}.rejection=[{{rule: seq_max_k3, high: 1, low: 0.5}}]"],
                            "learner.correction.rejection: seq_max_k3 is never negative"),
    "a lower bound of k2": ([f"{CORRECTION}.rejection=[{{rule: token_k2, high: 1, low: 0.5}}]"],
                            "learner.correction.rejection: token_k2 is never negative"),
    "an empty pop": ([f"{CORRECTION}={{weights: token_icepop, icepop_low: 5}}"], "learner.correction.icepop_low: not"),
    "an empty clip": ([f"{LOSS}=cispo", "learner.loss.ratio_low=2"], "learner.loss.ratio_low: not below"),
    "an empty clip of weights": ([f"{LOSS}=tis_reinforce", "learner.loss.ratio_low=2"],
                                 "learner.loss.ratio_low: not below ratio_high = 2"),
    "no covariance between the bounds": ([f"{LOSS}=clip_cov", "learner.loss.cov_low=5"],
                                         "learner.loss.cov_low: not below cov_high = 5"),
    "a token baseline without prox": (["learner.advantage.name=optimal_token_baseline", f"{CORRECTION}.mode=bypass"],
                                      "learner.advantage.name: needs the proximal policy's distribution"),
    "a token baseline of a log-linear prox": (
        ["learner.advantage.name=tir_optimal_token_baseline", f"{LOSS}=decoupled_ppo",
         "learner.loss.proximal=loglinear"], "learner.advantage.name: needs the proximal policy's distribution"),
    "a penalty without a buffer": (["learner.loss.truncated=penalty"], "learner.loss.overlong_buffer: belongs to"),
    "a buffer without a penalty": (["learner.loss.overlong_buffer=4"], "learner.loss.overlong_buffer: belongs to"),
    "a buffer of all": (["learner.loss={truncated: penalty, overlong_buffer: 4}", "sampling.max_new_tokens=4"],
                        "learner.loss.overlong_buffer: every answer would be penalised"),
    "a group of one": (["group_size=1", "learner.advantage.name=opo"], "group_size: a group of one has advantage 0"),
    "the second best of one": (["group_size=1", "learner.advantage={name: grpo_passk, group_of_one: raw}"],
                               "group_size: grpo_passk is how far"),
    "a required setting": ([f"{LOSS}=dro"], r"learner.loss.beta: Field required"),
    "a mask without its bound": ([f"{LOSS}=opsm"], r"learner.loss.opsm_delta: Field required"),
    "another loss's setting": ([f"{LOSS}=gspo", "learner.loss.tau=0.1"],
                               "learner.loss.tau: belongs to another `learner.loss.name`"),
    "no such loss": ([f"{LOSS}=grpo"], "learner.loss.name: there are 'ppo_clip'"),
}


@pytest.mark.parametrize(("sets", "message"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_together_is_refused_by_field(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.", 2)):
        settled(*sets)


REQUIRED = {"opsm": ["learner.loss.opsm_delta=0.1"], "function": ["learner.loss.path=./mine.py:loss"]}


@pytest.mark.parametrize("name", [name for name in variants(LossConfig) if name not in ("gpg", "dro")])
def test_bypass_has_no_weights_beside_a_loss_that_has_the_ratio_or_weights_of_its_own(name: str) -> None:
    why = {"tis_reinforce": "tis_reinforce has its own token weights", "topr": "topr has its own token weights",
           "decoupled_ppo": "decoupled_ppo is the loss of three policies"}
    field = "mode" if name == "decoupled_ppo" else "weights"
    with pytest.raises(ConfigError, match=rf"^learner\.correction\.{field}: "
                                          + why.get(name, f"with mode=bypass the ratio of {name} is pi/mu already")):
        settled(f"{LOSS}={name}", *REQUIRED.get(name, []), f"{CORRECTION}={{mode: bypass, weights: token_truncate}}")


ALLOWED = {
    "weights of dro in bypass": [f"{LOSS}=dro", "learner.loss.beta=1",
                                 f"{CORRECTION}={{mode: bypass, weights: sequence_icepop}}"],
    "weights of log-prob losses in bypass": [f"{LOSS}=gpg", f"{CORRECTION}={{mode: bypass, weights: token_truncate}}"],
    "weights of any loss on pi/prox": [f"{LOSS}=gspo", f"{CORRECTION}.weights=sequence_truncate"],
    "rejection in bypass": [f"{CORRECTION}={{mode: bypass, rejection: [{{rule: seq_mean_k1, high: 1.01}}]}}"],
    "a group of one without a group mean": ["group_size=1", "learner.advantage.name=reinforce_plus_plus"],
    "a group of one beside a greedy answer": ["group_size=1", "learner.advantage.name=remax"],
    "a penalty": [PENALTY],
    "a critic": ["learner.advantage.name=gae", "learner.critic.warmup_steps=2"],
    "a reference": ["learner.kl.use=loss", "learner.reference.refresh_every=5"],
    "a KL in the reward by its controller": ["learner.kl={use: reward, estimator: k1, target: 0.1}"],
    "the value of abs with the gradient of k2": ["learner.kl={use: loss, estimator: abs+}"],
    "abs in the loss": ["learner.kl={use: loss, estimator: abs}"],
    "k2 by its other name": ["learner.kl={use: loss, estimator: k2+}"],
    "a teacher by abs+": ["learner.teacher={use: loss, path: t, estimator: abs+}"],
    "a teacher": ["learner.teacher={use: forward_topk, path: t}"],
    "a teacher by abs": ["learner.teacher={use: loss, path: t, estimator: abs}"],
    "normalised weights of decoupled_ppo": [f"{LOSS}=decoupled_ppo", f"{CORRECTION}.normalize=true"],
    "a critic that learns alone at first": ["learner.advantage.name=gae", "learner.critic.warmup_steps=8",
                                            "total_steps=9"],
    "parts by name": ["reward=code", "learner.advantage={name: gdpo, parts: [{part: passed}]}"],
    "parts of a function": ["reward=./mine.py:score", "learner.advantage.name=gdpo"],
    "a negative part": ["learner.advantage.name=gdpo", f"scoring.parts={LENGTH}"],
    "a proximal anchor": [OPSM, "learner.passes=2"],
}


@pytest.mark.parametrize("sets", ALLOWED.values(), ids=ALLOWED)
def test_what_makes_sense_is_taken(sets: list[str]) -> None:
    settled(*sets)


IDLE: dict[str, tuple[str, list[str]]] = {
    # field of `learner` -> a value that it has not by itself, and settings beside which something reads it
    "advantage.normalize_by_std": ("false", []), "advantage.eps": ("0.1", []),
    "loss.overlong_factor": ("0.5", [PENALTY]),
    "correction.cap": ("3", [f"{CORRECTION}.weights=sequence_truncate"]),
    "correction.icepop_low": ("0.8", [f"{CORRECTION}.weights=token_icepop"]),
    "correction.icepop_high": ("2", [f"{CORRECTION}.weights=geometric_icepop"]),
    "kl.estimator": ("k2", ["learner.kl.use=loss"]), "kl.coef": ("0.1", ["learner.kl.use=reward"]),
    "kl.unbiased": ("true", ["learner.kl.use=loss"]), "kl.target": ("0.1", ["learner.kl.use=reward"]),
    "kl.horizon": ("9", ["learner.kl={use: reward, target: 0.1}"]),
    "reference.refresh_mix": ("0.5", ["learner.kl.use=loss", "learner.reference.refresh_every=2"]),
    "critic.lr": ("1e-3", ["learner.advantage.name=gae"]),
    "critic.weight_decay": ("0.1", ["learner.advantage.name=gae"]),
    "critic.max_grad_norm": ("2", ["learner.advantage.name=gae"]),
    "critic.clip": ("0.1", ["learner.advantage.name=gae"]),
    "teacher.coef": ("0.5", ["learner.teacher={use: advantage, path: t}"]),
    "teacher.estimator": ("k2", ["learner.teacher={use: loss, path: t}"]),
    "teacher.top_k": ("8", ["learner.teacher={use: forward_topk, path: t}"]),
    "resampling_power": ("1", ["learner.resampling=pow"]),
}
RLOO = ["learner.advantage.name=rloo"]


def test_every_setting_that_something_reads_is_in_the_table() -> None:
    assert set(IDLE) == set(READ_BY) and {f"learner.{field}" for field in READ_BY} <= set(field_kinds())


@pytest.mark.parametrize("field", IDLE)
def test_a_setting_that_nothing_reads_is_refused_with_what_reads_it(field: str) -> None:
    value, beside = IDLE[field]
    chosen = f"learner.{field}={value}"
    settled(*beside, chosen)
    idle = RLOO if field.startswith("advantage.") else []
    default, got = (flatten(resolve({}, parse_overrides(sets)))[f"learner.{field}"] for sets in (idle, [*idle, chosen]))
    said = "null" if default is None else default
    with pytest.raises(ConfigError, match=rf"^learner\.{re.escape(field)}: nothing reads it without learn") as refused:
        settled(*idle, chosen)
    assert str(refused.value).endswith(f"; set that, too, or leave it at {said} (got {got!r})")
    settled(*idle, f"learner.{field}={said}")


def test_what_earlier_versions_stored_is_still_explained_and_replayed() -> None:
    """`check` is asked of stored settings, too: what nothing read changed nothing then."""
    check(resolve(load_preset("tiny-cpu"), parse_overrides(["learner.kl.coef=0.1", f"{CORRECTION}.cap=3"])))


RATIO_1 = {
    # a loss and settings beside it -> whether nothing is left of it in a step, and whether staleness is told of
    "one update": ([f"{LOSS}=gspo"], True, True),
    "weights": ([f"{LOSS}=gspo", f"{CORRECTION}.weights=sequence_truncate"], True, False),
    "on-policy": ([f"{LOSS}=cispo", "staleness.bound=0"], True, False),
    "another run's shards": ([f"{LOSS}=sapo", "staleness.bound=0", "data.shards_from=k"], True, True),
    "a divergence": ([f"{LOSS}=dppo_kl"], True, True),
    "a penalty on log ratios": ([f"{LOSS}=kl_cov"], True, True),
    "a quadratic penalty": ([f"{LOSS}=dro", "learner.loss.beta=1"], True, True),
    "two passes": ([f"{LOSS}=gspo", "learner.passes=2"], False, False),
    "two minibatches": ([f"{LOSS}=gmpo", "learner.minibatch_groups=8"], False, False),
    "bypass": ([f"{LOSS}=dppo_tv", f"{CORRECTION}.mode=bypass"], False, False),
    "the default": ([f"{LOSS}=ppo_clip"], False, False),
    "weights of its own": ([f"{LOSS}=decoupled_ppo"], False, False),
    "no ratio": ([f"{LOSS}=topr"], False, False),
    "what is chosen by other than the ratio": ([f"{LOSS}=m2po"], False, False),
}


@pytest.mark.parametrize(("sets", "plain", "uncorrected"), RATIO_1.values(), ids=RATIO_1)
def test_the_plan_tells_where_nothing_is_left_of_a_loss_on_a_ratio(sets: list[str], plain: bool,
                                                                   uncorrected: bool) -> None:
    told = make_plan(settled(*sets)).warnings
    assert [line.split(" is ")[0] for line in told] == [f"learner.loss.name: {sets[0].split('=')[1]}"] * plain
    assert all("learner.correction.mode=bypass" in line and "learner.passes" in line for line in told)
    assert [line for line in told if "nor does anything correct for stale answers" in line] == list(told) * uncorrected


@pytest.mark.parametrize("name", PLAIN_AT_RATIO_1)
def test_of_these_losses_a_ratio_of_1_leaves_the_policy_gradient(name: str) -> None:
    """Its gradient by log pi at pi = prox is -A at every token; of gmpo its mean over the answer's tokens."""
    config: Any = variants(LossConfig)[name](**{"name": name, "beta": 0.5} if name == "dro" else {"name": name})
    logs = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64)
    tokens = Tokens(policy_S=logs.clone().requires_grad_(), anchor_S=logs, behavior_S=logs - 0.3,
                    advantage_S=torch.tensor([1.5, -2.0, 0.5], dtype=torch.float64), reward_S=torch.ones(3),
                    sequence_S=torch.tensor([0, 1, 2]), sequences=3, chosen_S=torch.tensor([True, False, True]))
    [gradient] = torch.autograd.grad(loss_module(name).token_loss(tokens, config).loss_S.sum(), tokens.policy_S)
    np.testing.assert_allclose(gradient, -tokens.advantage_S)


LANDED = {
    # settings of an earlier revision, those that are wanted -> why they are refused, or None
    "rewards of a function under maxrl": (["reward=./mine.py:score"], ["learner.advantage.name=maxrl"],
                                          "takes rewards of at least 0, and those that groups of run k have landed"),
    "a reward model's": (["reward=reward_model", "scoring.model.path=m"], ["learner.advantage.name=maxrl"],
                         "takes rewards of at least 0"),
    "a part that takes away": ([f"scoring.parts={LENGTH}"], ["learner.advantage.name=maxrl", "scoring.parts=[]"],
                               "takes rewards of at least 0"),
    "right or wrong": ([], ["learner.advantage.name=maxrl"], None),
    "scores of a task": (["reward=reasoning_gym:leg_counting"], ["learner.advantage.name=maxrl"], None),
    "under maxrl already": (["reward=./mine.py:score", "learner.advantage.name=maxrl"], ["total_steps=200"], None),
    "to another estimator": (["reward=./mine.py:score"], ["learner.advantage.name=rloo"], None),
    "without the part main": ([], ["learner.advantage.name=gdpo", f"scoring.parts={LENGTH}"],
                              "takes the part `main` of the rewards, which groups of run k have landed without"),
    "one part more": ([f"scoring.parts={LENGTH}"], ["learner.advantage.name=gdpo", "scoring.parts=[{part: len, reward: "
                      "'./mine.py:length'}, {part: more, reward: exact}]"], None),
    "parts of a function": (["reward=./mine.py:score"], ["learner.advantage.name=gdpo"], None),
}


@pytest.mark.parametrize(("before", "sets", "why"), LANDED.values(), ids=LANDED)
def test_no_run_goes_on_with_an_estimator_that_cannot_take_what_has_landed(before: list[str], sets: list[str],
                                                                           why: str | None) -> None:
    earlier = settled(*before)
    wanted = settled(*sets, base=earlier)
    if why is None:
        check_rewards_landed("k", [earlier], wanted)
    else:
        with pytest.raises(ConfigError, match=f"^learner.advantage.name: {why}"):
            check_rewards_landed("k", [earlier], wanted)


DROPPED: dict[str, tuple[list[str], list[str]]] = {
    # settings beside rollout.no_spread=drop -> beginnings of what the plan tells
    "a group's own scores": ([], []),
    "a function": (["learner.advantage={name: function, path: './mine.py:advantage'}"],
                   ["drop leaves out groups whose rewards are all equal, and an estimator of your own"]),
    "what whitening takes off": (["learner.advantage.name=reinforce_plus_plus_baseline"],
                                 ["drop leaves out groups whose rewards are all equal, and reinforce_plus_plus_base"]),
    "longer answers": (["learner.advantage.name=tir_optimal_token_baseline"],
                       ["drop leaves out groups whose rewards are all equal, and tir_optimal_token_baseline gives"]),
    "a KL and a penalty": (["learner.kl.use=reward", PENALTY],
                           ["drop is judged by what answers scored, before learner.kl.use=reward takes the KL",
                            "drop is judged by what answers scored, before learner.loss.truncated=penalty takes"]),
    "a teacher": (["learner.teacher={use: advantage, path: t}"],
                  ["drop leaves out groups whose rewards are all equal, and learner.teacher.use=advantage would"]),
}


@pytest.mark.parametrize(("sets", "told"), DROPPED.values(), ids=DROPPED)
def test_what_groups_without_spread_would_still_teach_is_told(sets: list[str], told: list[str]) -> None:
    warnings = make_plan(settled(*sets, DROP)).warnings
    assert len(warnings) == len(told)
    assert all(line.startswith(f"rollout.no_spread: {begin}") for line, begin in zip(warnings, told, strict=True))
    assert make_plan(settled(*sets)).warnings == ()


def advantages_without_spread(name: str) -> np.ndarray:
    """Of a group of two answers of 2 and 4 tokens that are both worth 1, beside a group that has a spread."""
    config: Any = variants(AdvantageConfig)[name](name=name)
    answers = answers_of(np.array([1.0, 1.0, 0.0, 1.0]), np.array([0, 0, 1, 1]), length_N=np.array([2, 4, 1, 3]),
                         tokens_N=np.array([2, 4, 1, 3]), baseline_N=np.full(4, 0.5),
                         parts={"a": np.array([1.0, 0.0, 0.0, 1.0]), "b": np.array([0.0, 1.0, 0.0, 0.0])})
    ones_K = np.ones(10)
    if name == "gae":
        values = ValueFacts(value_K=0.5 * ones_K, behind_N=np.zeros(4), cut_N=np.zeros(4, np.bool_))
        return estimate_from_values(answers, values, config)[0][:6]
    policy = PolicyFacts(logprob_K=-ones_K, squares_K=0.5 * ones_K, weight_K=ones_K,
                         position_K=np.array([0, 1, 0, 1, 2, 3, 0, 0, 1, 2]))
    found = advantages(answers, config, policy=policy)
    return found[:6] if is_per_token(config) else found[:2]


@pytest.mark.parametrize("name", [name for name in variants(AdvantageConfig) if name != "function"])
def test_estimators_by_which_a_group_without_spread_has_a_gradient_are_known(name: str) -> None:
    found = advantages_without_spread(name)
    assert bool(np.abs(found).max() > 1e-6) == (name in HAS_A_GRADIENT or name in HAS_A_LITTLE), found


def test_another_loss_over_a_whole_config_takes_its_own_defaults() -> None:
    before = settled("learner.loss.clip_high=0.28", "learner.loss.truncated=mask", "learner.loss.entropy_coef=0.01")
    gspo = settled(f"{LOSS}=gspo", base=before).learner.loss
    assert gspo.model_dump(exclude_defaults=True, exclude={"name"}) == {"truncated": "mask", "entropy_coef": 0.01}
    assert (gspo.aggregation, gspo.clip_high) == ("seq_mean_token_mean", 4e-4)
    cov = settled(f"{LOSS}=clip_cov", base=before).learner.loss
    assert (cov.clip_high, cov.clip_low, cov.truncated) == (0.28, 0.2, "mask"), "it is ppo_clip with its clips"
    decoupled = settled(f"{LOSS}=decoupled_ppo", base=before).learner.loss
    assert decoupled.model_dump() == before.learner.loss.model_dump() | {"name": "decoupled_ppo"}
    assert settled(f"{LOSS}=ppo_clip", base=settled(f"{LOSS}=gspo")).learner.loss == settled().learner.loss


def test_a_setting_beside_the_name_is_of_the_new_variant() -> None:
    config = settled(f"{LOSS}=cispo", "learner.loss.ratio_high=5", "learner.advantage={name: lite_ppo, eps: 0.1}",
                     base=settled("learner.advantage.eps=0.3"))
    assert (config.learner.loss.ratio_high, config.learner.advantage.eps) == (5.0, 0.1)


STORED = {  # what runs of before these settings have in their run.json
    "advantage": {"name": "rloo", "normalize_by_std": True, "eps": 1e-6, "group_of_one": "zero"},
    "loss": {"name": "decoupled_ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "proximal": "loglinear",
             "aggregation": "token_mean", "entropy_coef": 0.0, "truncated": "mask"},
    "correction": {"weights": "none", "cap": 2.0}}


def test_settings_of_stored_runs_are_still_read() -> None:
    learner = Config.model_validate({"learner": STORED}).learner
    for part, values in STORED.items():
        found = getattr(learner, part).model_dump()
        assert {key: found[key] for key in values} == values
    check(Config.model_validate({"learner": STORED}))


def test_a_step_of_another_revision_is_trained_by_its_own_variant() -> None:
    stored, now = settled(f"{LOSS}=gspo", "learner.loss.clip_low=0.1"), settled("learner.threads=2")
    found = trained_by(stored, now).learner
    assert (found.loss, found.advantage, found.threads) == (stored.learner.loss, stored.learner.advantage, 2)
    assert trained_by(now, stored).learner.loss == now.learner.loss


@pytest.mark.parametrize("name", variants(LossConfig))
def test_every_loss_has_its_file_and_its_line_in_the_document(name: str) -> None:
    assert callable(loss_module(name).token_loss)
    assert hasattr(loss_module(name), "select") == ("scope" in variants(LossConfig)[name].model_fields)
    assert re.search(rf"^\| `{name}` \|", DOCUMENT, re.MULTILINE)


@pytest.mark.parametrize("name", variants(AdvantageConfig))
def test_every_estimator_has_its_file_and_its_line_in_the_document(name: str) -> None:
    assert estimator_module(name).__doc__
    assert re.search(rf"^\| `{name}` \|", DOCUMENT, re.MULTILINE)


NAMED = {  # what a setting may be, and what its line in the document begins with
    f"{what} {name}": line for what, lines in {
        "rule": {name: name for name in get_args(RuleName)},
        "level of": {name: name.split("_")[0] for name in get_args(Weights) if name != "none"},
        "cut of": {name: name.split("_")[1] for name in get_args(Weights) if "_" in name},
        "aggregation": {name: name for name in get_args(Aggregation)},
        "KL": {name: name for name in get_args(KlConfig.model_fields["estimator"].annotation)}}.items()
    for name, line in lines.items()}


@pytest.mark.parametrize("line", NAMED.values(), ids=NAMED)
def test_corrections_aggregations_and_kl_estimators_have_their_line_with_their_use_in_the_document(line: str) -> None:
    rows = re.findall(rf"^\| [^|]*`{re.escape(line)}`[^|]*\|.*\|$", DOCUMENT, re.MULTILINE)
    assert any(len(row.split("|")) == 6 and all(cell.strip() for cell in row.split("|")[1:4]) for row in rows)


def test_a_replay_tries_an_estimator_that_a_start_would_refuse_beside_what_the_claim_left_out() -> None:
    """The claim is a fact: which groups it left out is no question any more."""
    recorded = settled(DROP, "learner.advantage.name=grpo")
    tried = tried_settings(recorded, {"learner": {"advantage": {"name": "reinforce_plus_plus"}}})
    assert tried.learner.advantage.name == "reinforce_plus_plus"
    with pytest.raises(ConfigError, match=r"rollout\.no_spread"):
        make_plan(tried)
