"""A whole run of every estimator, loss, aggregation, KL, weight and rejection rule by name, each replayed bit by bit.

A run has one name of each kind, or several; that none is left out is asked of the settings themselves, so that a new
name without a run fails. Models beside the policy and adapters have runs of their own: test_roles.py, test_lora.py.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from flows.presets import load_preset
from rl_core.advantage_settings import AdvantageConfig
from rl_core.combinations import check_combination
from rl_core.config import Config, DeadlineConfig, LearnerConfig
from rl_core.correction_settings import CorrectionConfig, KlConfig, RejectionRule
from rl_core.errors import ConfigError
from rl_core.experience.audit import audit
from rl_core.loss_settings import LossConfig
from rl_core.observations import read_observation
from rl_core.plan import check, parse_overrides, resolve
from rl_core.records import read_record
from rl_core.revisions import config_of, current_revision
from rl_core.settings import Part
from rl_core.variants import variants
from tasks import services
from tests.learning import same_again
from tests.runs import Home, SharedHome, ended

pytestmark = pytest.mark.algorithms

HOOKS = Path(__file__).resolve().parents[2] / "docs" / "examples" / "hooks.py"
MINE = '''
def placed(completion, truth):
    """Share of the digits that stand at their place: answers of a group are seldom all worth the same."""
    return sum(a == b for a, b in zip(completion, truth)) / len(truth)

def short(completion):
    return -len(completion) / 8
'''
ROWS, STEPS = 256, 3
SMALL = ("groups_per_step=4", "group_size=4", f"total_steps={STEPS}", f"data.size={ROWS}", "data.validation=null",
         "checkpoint.every=2", "learner.warmup_steps=0", "learner.lr=1e-4", "learner.minibatch_groups=2",
         "sampling.max_new_tokens=6", "reward=./mine.py:placed", "isolated=false")
"""Two updates a step, so that the policy leaves the proximal one; groups of the steps behind the first are stale, and
answers to six digits are cut."""
MORE = "groups_per_step=8"
"""So that not all answers of a step are cut: it would have no token in its loss."""
RUNS: dict[str, tuple[str, ...]] = {
    # settings of `learner`, and others
    "ppo_clip-grpo": ("{loss: {name: ppo_clip}, advantage: {name: grpo}, kl: {use: loss, estimator: k2, coef: 0.1}, "
                      "correction: {weights: token_truncate, normalize: true, "
                      "rejection: [{rule: token_k1, high: 1.05}, {rule: token_k2, high: 0.01}]}}",),
    "decoupled_ppo-rloo": ("{loss: {name: decoupled_ppo, proximal: loglinear, aggregation: token_sum}, "
                           "advantage: {name: rloo}, kl: {use: loss, estimator: k3, coef: 0.1}}",
                           "rollout.over_sampling=2"),
    "clip_cov-grpo_passk": ("{loss: {name: clip_cov, share: 0.1, cov_low: 0, scope: micro_batch, truncated: mask}, "
                            "advantage: {name: grpo_passk}, kl: {use: loss, estimator: abs+, coef: 0.1}, "
                            "correction: {weights: sequence_truncate, rejection: [{rule: seq_sum_k1, high: 1.2}]}}",
                            MORE),
    "m2po-gdpo": ("{loss: {name: m2po, tau: 0.01}, advantage: {name: gdpo}, kl: {use: loss, estimator: k1+, coef: 0.1},"
                  " correction: {weights: geometric_truncate, rejection: [{rule: token_k3, high: 0.01}]}}",
                  "scoring.parts=[{part: short, reward: './mine.py:short', weight: 0.1}]"),
    "opsm-reinforce_plus_plus_baseline": (
        "{loss: {name: opsm, opsm_delta: 0.02, anchor: proximal}, advantage: {name: reinforce_plus_plus_baseline}, "
        "kl: {use: reward, estimator: k1, coef: 0.05}, correction: {weights: token_icepop}}",),
    "opsm-of-single-answers": (
        "{loss: {name: opsm, opsm_delta: 0.1}, advantage: {name: opo, group_of_one: raw}, "
        "correction: {mode: bypass}, decay: constant}", "groups_per_step=8", "group_size=1"),
    "kl_cov-opo": ("{loss: {name: kl_cov, share: 0.1}, advantage: {name: opo}, "
                   "kl: {use: reward, estimator: k3, coef: 0.05}, "
                   "correction: {weights: sequence_icepop, rejection: [{rule: seq_sum_k2, high: 0.01}]}}",),
    "dppo_tv-maxrl": ("{loss: {name: dppo_tv}, advantage: {name: maxrl}, "
                      "kl: {use: loss, estimator: k3+, coef: 0.1, unbiased: true}, "
                      "correction: {mode: bypass, rejection: [{rule: seq_mean_k1, high: 1.02}]}}",),
    "dppo_kl-reinforce_plus_plus": (
        "{loss: {name: dppo_kl}, advantage: {name: reinforce_plus_plus, gamma: 0.9}, "
        "kl: {use: reward, estimator: abs, coef: 0.05}, "
        "correction: {weights: geometric_icepop, rejection: [{rule: seq_sum_k3, high: 0.01}]}}",),
    "gspo-lite_ppo": ("{loss: {name: gspo}, advantage: {name: lite_ppo}, "
                      "kl: {use: loss, estimator: k2+, coef: 0.1}, "
                      "correction: {mode: bypass, rejection: [{rule: seq_mean_k2, high: 0.001}]}}",),
    "sapo-gpg": ("{loss: {name: sapo, truncated: exclude, top_entropy_quantile: 0.8}, advantage: {name: gpg}, "
                 "kl: {use: loss, estimator: abs, coef: 0.1}, resampling: max_random}", MORE),
    "gmpo-optimal_token_baseline": (
        "{loss: {name: gmpo}, advantage: {name: optimal_token_baseline}, "
        "correction: {weights: function, path: './hooks.py:correction'}}",),
    "gpg-tir_optimal_token_baseline": (
        "{loss: {name: gpg, aggregation: seq_mean_token_sum, behavior_penalty: 0.1}, "
        "advantage: {name: tir_optimal_token_baseline}, correction: {rejection: [{rule: seq_max_k3, high: 0.005}]}}",),
    "topr-remax": ("{loss: {name: topr}, advantage: {name: remax}}",),
    "dro-gae": ("{loss: {name: dro, beta: 0.5}, advantage: {name: gae, lam: 0.95}, critic: {lr: 1.0e-3}, "
                "correction: {mode: bypass, weights: token_truncate}}",),
    "cispo-function": ("{loss: {name: cispo, aggregation: seq_mean_token_sum_norm}, "
                       "advantage: {name: function, path: './hooks.py:advantage'}, resampling: pow, "
                       "correction: {rejection: [{rule: seq_max_k2, high: 0.005}]}}",),
    "tis_reinforce-grpo": ("{loss: {name: tis_reinforce, entropy_coef: 0.01}, advantage: {name: grpo}, decay: cosine, "
                           "kl: {use: reward, estimator: k2, coef: 0.05}, "
                           "correction: {rejection: [{rule: seq_mean_k3, high: 0.001}], rejected: exclude}}",),
    "function-grpo": ("{loss: {name: function, path: './hooks.py:loss', truncated: penalty, overlong_buffer: 4}, "
                      "advantage: {name: grpo}, resampling: max_min}",),
}
PARTS: dict[str, set[type[Part]]] = {
    "advantage": set(variants(AdvantageConfig).values()), "loss": set(variants(LossConfig).values()),
    "correction": {CorrectionConfig}, "rejection": {RejectionRule}, "learner": {LearnerConfig}}
"""Whose choices by name must all have been made. Those of the KL go in pairs: where it acts, and its estimator."""


def asked(key: str) -> tuple[str, ...]:
    learner, *others = RUNS[key]
    return (f"learner={learner}", *SMALL, *others)


def settled(key: str) -> Config:
    return resolve(load_preset("tiny-cpu"), parse_overrides(asked(key)))


def named_choices(part: type[Part]) -> dict[str, tuple[str, ...]]:
    """Field -> the names that it may have, of the fields that are part of an algorithm."""
    return {name: get_args(info.annotation) for name, info in part.model_fields.items()
            if get_origin(info.annotation) is Literal and info.json_schema_extra == {"kind": "training"}}


def made_choices(learner: LearnerConfig) -> Iterator[tuple[str, str, str]]:
    """`("loss", "aggregation", "token_sum")`, ..."""
    parts = [("advantage", learner.advantage), ("loss", learner.loss), ("correction", learner.correction),
             *(("rejection", rule) for rule in learner.correction.rejection), ("learner", learner)]
    for what, part in parts:
        for field in named_choices(type(part)):
            yield what, field, getattr(part, field)


def makes_sense(kl: KlConfig) -> bool:
    try:
        check_combination(LearnerConfig(kl=kl))
    except ConfigError:
        return False
    return True


def test_every_name_of_an_algorithm_has_its_run() -> None:
    configs = [settled(key) for key in RUNS]
    for config in configs:
        check(config)
    made = {choice for config in configs for choice in made_choices(config.learner)}
    wanted = {(what, field, name) for what, classes in PARTS.items() for part in classes
              for field, names in named_choices(part).items() for name in names}
    assert {("loss", "name", "gspo"), ("rejection", "rule", "token_k1"), ("learner", "resampling", "pow")} <= wanted
    assert wanted - made == set()
    uses, estimators = (get_args(KlConfig.model_fields[field].annotation) for field in ("use", "estimator"))
    pairs = {(use, name) for use, name in product(uses, estimators)
             if use != "none" and makes_sense(KlConfig(use=use, estimator=name))}
    assert {("loss", "k3+"), ("reward", "abs")} <= pairs
    assert pairs - {(config.learner.kl.use, config.learner.kl.estimator) for config in configs} == set()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("algorithms")
    (place / "mine.py").write_text(MINE)
    shutil.copy(HOOKS, place)
    return place


@pytest.fixture(scope="module")
def shared(home: Home) -> Iterator[SharedHome]:
    """One Prefect server and one Ray head for all runs, which else would each wait for their own."""
    started = services.start(home.path / "shared" / "services", home.path, isolated=True, deadlines=DeadlineConfig())
    try:
        yield SharedHome(home.path, started)
    finally:
        services.stop(started)


@pytest.mark.slow
@pytest.mark.parametrize("key", RUNS)
def test_a_run_of_every_algorithm_trains_holds_its_audit_and_is_replayed(shared: SharedHome, work: Path, key: str,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(shared.train(key, *asked(key), cwd=work))
    config = settled(key)
    assert config_of(run, current_revision(run)).learner == config.learner
    report = audit(run, n_prompts=ROWS)
    assert report.holds, report.violations
    assert report.positions["trained"] == STEPS * config.groups_per_step

    monkeypatch.chdir(work)  # functions are found from the working directory
    same_again(run, STEPS)

    learner, records = config.learner, [read_record(run, step) for step in range(STEPS)]
    decoupled = learner.correction.mode == "decoupled" and learner.loss.proximal == "recompute"
    acts = {"train/kl_reference": learner.kl.use != "none", "train/rejected_tokens": bool(learner.correction.rejection),
            "critic/value_loss": learner.advantage.name == "gae", "reward/greedy": learner.advantage.name == "remax"}
    for record in records:
        found = record.metrics
        assert all(math.isfinite(found[f"train/{name}"]) for name in ("policy_loss", "grad_norm", "entropy"))
        assert found["train/skipped_updates"] == found["train/mismatch_alarm"] == 0.0
        assert {name: math.isfinite(found[name]) for name in acts} == acts
    for name in ("train/grad_norm", "rollout/truncated", "train/kl_reference", "train/rejected_tokens"):
        assert not acts.get(name, True) or max(abs(record.metrics[name]) for record in records) > 0.0, name
    assert len({record.weights_digest for record in records}) > 1
    # a step has none where masks leave it a single update, or its first micro-batch no token
    assert any(math.isfinite(record.metrics["train/ratio_drift"]) for record in records) == decoupled

    seen = [read_observation(run, step).metrics["rollout/wasted"] for step in range(STEPS)]
    more = config.rollout.over_sampling > 0 or learner.advantage.name == "remax"
    assert any(share > 0.0 for share in seen) == more, "tokens of answers that never land"
    assert all(record.metrics["rollout/partial"] == 0.0 for record in records)
