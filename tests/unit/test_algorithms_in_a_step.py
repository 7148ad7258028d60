"""Estimators, losses and corrections in a real training step: what is true of all of them, whatever the claim is cut
into."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.config import Config
from rl_core.correction_settings import CorrectionConfig, RuleName, Weights
from rl_core.learner import batch as stages
from rl_core.learner.advantages.resampling import resampled, resampling_weights
from rl_core.learner.aggregation import Denominators
from rl_core.learner.critic import Critic
from rl_core.learner.invariants import AlarmBounds
from rl_core.learner.optimizer import make_optimizer
from rl_core.learner.plan import StepPlan, StepResult
from rl_core.learner.policy import Policy, load_policy
from rl_core.learner.ranks import Ranks
from rl_core.learner.roles import Roles
from rl_core.learner.step import training_step
from rl_core.learner.step_metrics import TokenFacts, token_metrics, update_metrics
from rl_core.learner.sums import Sums, anchor_sums
from rl_core.learner.whole import Draw
from rl_core.seeds import derive
from rl_core.types import TrajectoryGroup
from tests.golden import advantages, losses
from tests.golden import corrections as golden
from tests.learning import all_by, random_groups, rows_of, sampled_by, write_model

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, ranks=1, rendezvous="", device=CPU, deadline_s=1, barrier_s=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> Policy:
    """As loaded; every step trains a copy."""
    return load_policy(directory, logits_chunk=64, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def stock(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def groups(stock: Any) -> list[TrajectoryGroup]:
    """Four groups of four, sampled by weights that differ from the model's by noise, an update ago, each with the
    reward of a greedy answer."""
    return [replace(sampled_by(stock, all_by(0, group), noise=0.2, seed=i), baseline_reward=0.25 * i)
            for i, group in enumerate(random_groups(0, rewards=[1.0, 0.0, 0.5, 0.0]))]


class SumOfThreads:
    """Ranks as threads of this process: the same calls, summed over a barrier. Gradients stay each rank's own."""

    def __init__(self, rank: int, barrier: threading.Barrier, seen: list[Any]) -> None:
        self.rank, self.ranks, self.device, self.loss_scale = rank, 2, CPU, 1.0
        self._barrier, self._seen = barrier, seen

    def _all(self, values: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        self._seen[self.rank] = values.double()
        self._barrier.wait(20)
        found = how(self._seen[0], self._seen[1])
        self._barrier.wait(20)
        return found

    def sum_tensor(self, values: Tensor) -> Tensor:
        return self._all(values, torch.add)

    def max_tensor(self, values: Tensor) -> Tensor:
        return self._all(values, torch.maximum)

    def sum(self, values: list[float]) -> list[float]:
        return self.sum_tensor(torch.tensor(values)).tolist()

    def max(self, values: list[float]) -> list[float]:
        return self.max_tensor(torch.tensor(values)).tolist()


def critic_beside(model: Policy, config: Config) -> Roles:
    """A critic over the policy's own transformer, whose head is not 0."""
    critic = Critic(copy.deepcopy(model.model.base_model), dtype=torch.float32)
    with torch.no_grad():
        critic.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
    return Roles(critic=critic, optimizer=make_optimizer(critic, config.learner))


def step(model: Policy, groups: list[TrajectoryGroup], learner: dict[str, Any], *, budget: int = 10_000,
         ranks: Any = ALONE, mine: list[bool] | None = None,
         change: Callable[[Any], None] | None = None) -> tuple[StepResult, list[Tensor]]:
    """One training step; the gradients of its last update. Learning rate 1e-3, no clip of the gradient.

    With `gae` every second answer was cut, so that a value behind it counts.
    """
    base = {"lr": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9, "token_budget": budget}
    config = Config.model_validate({"groups_per_step": 4, "group_size": 4, "sampling": {"max_new_tokens": 12},
                                    "learner": base | learner})
    batch = stages.assemble(rows_of(groups, mine))
    if config.learner.advantage.name == "gdpo":
        batch["parts", "right"] = batch["trajectory", "reward"] + torch.arange(16) % 3
    roles = Roles()
    if config.learner.advantage.name == "gae":
        roles = critic_beside(model, config)
        batch["trajectory", "finish"] = torch.arange(16) % 2
    stages.mark_tokens(batch, step=1, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, config.learner.loss.truncated)
    if change is not None:
        change(batch)
    stages.number_tokens(batch, ranks.sum_tensor)
    stages.add_advantages(batch, config.learner.advantage)
    policy = copy.deepcopy(model)
    plan = StepPlan(step=1, idx=1, learning_rate=1e-3, groups=4, minibatch_groups=config.minibatch_groups,
                    max_new_tokens=12, learner=config.learner, skipped_in_a_row=0, max_skipped=0, seed=5)
    result = training_step(policy, make_optimizer(policy, config.learner), ranks, batch, plan, roles)
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    return result, gradients


def metrics(result: StepResult) -> dict[str, float]:
    return update_metrics(result, 1e-3, AlarmBounds(mismatch=1.0, drift=1e-6))


def never_nan(result: StepResult) -> bool:
    found = metrics(result)
    often = tuple(f"train/{name}" for name in ("mismatch_current", "mismatch_swapped", "loglinear", "rejected",
                                               "ratio_drift", "kl_reference", "distillation", "impossible_to_others"))
    return all(math.isfinite(value) for name, value in found.items() if not name.startswith((*often, "critic/")))


@pytest.mark.parametrize("name", losses.REFERENCES)
def test_every_loss_trains(model, groups, name):
    loss = {"name": name, **losses.REFERENCES[name][1][0]}
    result, gradients = step(model, groups, {"loss": loss, "passes": 2, "minibatch_groups": 2})
    assert (result.updates, result.skipped) == (4, 0) and never_nan(result)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert max(result.gradient_norms) > 1e-3


@pytest.mark.parametrize("name", advantages.REFERENCES)
def test_every_estimator_trains(model, groups, name):
    result, gradients = step(model, groups, {"advantage": {"name": name}})
    assert (result.updates, result.skipped) == (1, 0) and never_nan(result)
    assert all(torch.isfinite(gradient).all() for gradient in gradients) and result.gradient_norms[0] > 1e-3


WHOLE: dict[str, dict[str, Any]] = {
    "gspo": {"loss": {"name": "gspo"}, "passes": 2},
    "gmpo": {"loss": {"name": "gmpo"}},
    "clip_cov drawn by lot": {"loss": {"name": "clip_cov", "cov_low": 0.0, "share": 0.1}, "passes": 2},
    "kl_cov": {"loss": {"name": "kl_cov", "share": 0.1}, "passes": 2},
    "m2po": {"loss": {"name": "m2po", "tau": 0.01}, "minibatch_groups": 2},
    "m2po in bypass": {"loss": {"name": "m2po", "tau": 0.01}, "correction": {"mode": "bypass"}},
    "uncertain tokens": {"loss": {"top_entropy_quantile": 0.3, "behavior_penalty": 0.1}, "minibatch_groups": 2},
    "normalised sequence weights, rejected tokens excluded": {
        "correction": {"weights": "sequence_truncate", "normalize": True, "rejected": "exclude",
                       "rejection": [{"rule": "token_k1", "high": 1.2}, {"rule": "seq_mean_k3", "high": 0.1}]},
        "loss": {"aggregation": "seq_mean_token_mean"}},
    "normalised weights of decoupled_ppo": {"loss": {"name": "decoupled_ppo"}, "correction": {"normalize": True},
                                            "passes": 2},
    "resampled answers": {"resampling": "pow", "resampling_power": 1.0, "loss": {"aggregation": "seq_mean_token_mean"},
                          "minibatch_groups": 2},
    "the best and the worst answers": {"resampling": "max_min", "minibatch_groups": 2, "loss": {"entropy_coef": 0.1}},
    "the best answers more often": {"resampling": "max_random", "passes": 2, "loss": {"name": "gspo"}},
    "rewards to go": {"advantage": {"name": "reinforce_plus_plus", "gamma": 0.9}},
    "token baselines under weights": {"advantage": {"name": "optimal_token_baseline"},
                                      "correction": {"weights": "token_truncate"}},
}

WEIGHTS: dict[str, dict[str, Any]] = {
    "none": {}, "token_truncate": {"cap": 1.1}, "sequence_truncate": {"cap": 1.3}, "geometric_truncate": {"cap": 1.02},
    "token_icepop": {"icepop_low": 0.9, "icepop_high": 1.1}, "sequence_icepop": {"icepop_low": 0.8, "icepop_high": 1.3},
    "geometric_icepop": {"icepop_low": 0.97, "icepop_high": 1.02},
    "function": {"path": "./docs/examples/hooks.py:correction"}}
assert set(WEIGHTS) == set(get_args(Weights))
RULES = {  # an upper bound by which some tokens are rejected, and some are not
    "token_k1": 1.15, "token_k2": 0.01, "token_k3": 0.01, "seq_sum_k1": 1.5, "seq_sum_k2": 0.1, "seq_sum_k3": 0.1,
    "seq_mean_k1": 1.06, "seq_mean_k2": 0.02, "seq_mean_k3": 0.02, "seq_max_k2": 0.05, "seq_max_k3": 0.05}
assert set(RULES) == set(get_args(RuleName))

EVERY = {f"advantage {name}": {"advantage": {"name": name}} for name in advantages.REFERENCES} | {
    f"loss {name}": {"loss": {"name": name, **options[0]}} | ({} if name == "decoupled_ppo" else {
        "correction": {"mode": "bypass"}})  # one update, and no ratio is 1
    for name, (_, options) in losses.REFERENCES.items()} | {
    f"weights {name}": {"correction": {"weights": name, "normalize": name != "none", **bounds}}
    for name, bounds in WEIGHTS.items()} | {
    f"rule {name}": {"correction": {"rejection": [{"rule": name, "high": high}], "rejected": "exclude"}}
    for name, high in RULES.items()}


@pytest.mark.parametrize("learner", [*WHOLE.values(), *EVERY.values()], ids=[*WHOLE, *EVERY])
def test_nothing_depends_on_micro_batches_or_ranks(model, groups, learner):
    whole, gradients = step(model, groups, learner)
    cut, _ = step(model, groups, learner, budget=40)
    barrier, seen = threading.Barrier(2), [None, None]
    parts: list[Any] = [None, None]

    def as_rank(rank: int) -> None:  # the gradients of the first update only: each rank goes on with its own
        one = {**learner, "passes": 1, "minibatch_groups": None}
        parts[rank] = step(model, groups, one, ranks=SumOfThreads(rank, barrier, seen),
                           mine=[i % 3 == 0 if rank else i % 3 != 0 for i in range(16)])

    threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    single, single_gradients = (whole, gradients) if len(whole.losses) == 1 else step(
        model, groups, {**learner, "passes": 1, "minibatch_groups": None})
    assert cut.losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-6)
    assert cut.gradient_norms == pytest.approx(whole.gradient_norms, rel=1e-4)
    assert cut.critic == pytest.approx(whole.critic, rel=1e-4, abs=1e-6)
    if learner.get("correction", {}).get("rejection"):
        assert 0.0 < metrics(whole)["train/rejected_tokens"] < 1.0, "the case is one in which rules act"
    for (result, _) in parts:
        for name in single.critic.keys() - {"critic/grad_norm"}:
            assert result.critic[name] == pytest.approx(single.critic[name], rel=1e-4, abs=1e-6), name
        assert result.losses == pytest.approx(single.losses, rel=1e-4, abs=1e-6)
        for name in ("zero_advantage", "rejected_tokens", "clip_low", "clip_high", "weight_square"):
            assert result.totals[name] == pytest.approx(single.totals[name], rel=1e-5), name
    for one, two, both in zip(parts[0][1], parts[1][1], single_gradients, strict=True):
        np.testing.assert_allclose(one + two, both, rtol=1e-3, atol=2e-5)


def test_rejected_tokens_are_counted_and_leave_the_denominators_only_where_that_is_asked_for(model, groups):
    rule = {"rule": "token_k1", "high": 1.1}
    counted, _ = step(model, groups, {"correction": {"rejection": [rule]}})
    excluded, _ = step(model, groups, {"correction": {"rejection": [rule], "rejected": "exclude"}})
    share = metrics(counted)["train/rejected_tokens"]
    assert 0.2 < share < 0.8 and share == metrics(excluded)["train/rejected_tokens"]
    assert counted.losses[0] == pytest.approx(excluded.losses[0] * (1 - share), rel=1e-5)


def test_behind_an_update_a_loglinear_proximal_rejects_anew_and_so_do_the_denominators(model, groups):
    """Adam's first update is the same whatever the loss is divided by: the second ones are of the same weights."""
    def rejecting(rejected: str, passes: int) -> StepResult:
        return step(model, groups, {
            "passes": passes, "loss": {"name": "decoupled_ppo", "proximal": "loglinear"},
            "correction": {"rejection": [{"rule": "token_k1", "high": 1.1}], "rejected": rejected}})[0]

    once, counted, excluded = rejecting("count", 1), rejecting("count", 2), rejecting("exclude", 2)
    first, second = (found.totals["rejected_tokens"] for found in (once, counted))
    assert excluded.totals["rejected_tokens"] == second and second - first != first, "the update moved what is rejected"
    for i, rejected in enumerate((first, second - first)):
        share = rejected / once.totals["update_tokens"]
        assert counted.losses[i] == pytest.approx(excluded.losses[i] * (1 - share), rel=1e-3)


def test_where_everything_is_rejected_the_loss_is_zero_and_the_update_changes_nothing(model, groups):
    for rejected in ("count", "exclude"):
        result, gradients = step(model, groups, {"correction": {
            "rejection": [{"rule": "seq_sum_k2", "high": 1e-12}], "rejected": rejected}})
        assert result.losses == (0.0,) and not any(gradient.any() for gradient in gradients)
        assert (metrics(result)["train/rejected_tokens"], metrics(result)["train/rejected_answers"]) == (1.0, 1.0)


@pytest.mark.parametrize("name", [*WEIGHTS, "those of decoupled_ppo", "token_truncate in bypass"])
def test_the_correction_metrics_are_those_of_plain_numbers(model, stock, groups, name):
    """Of the weights that are applied, before they are cut: the level's at every token, the function's, or exp(d)."""
    applied = name.partition(" ")[0] if name in WEIGHTS or "bypass" in name else "token_truncate"
    bounds = WEIGHTS[applied] if "decoupled" not in name else {"cap": 5.0}
    learner = {"loss": {"name": "decoupled_ppo"}} if "decoupled" in name else {
        "loss": {"name": "gpg"}, "correction": {"mode": "bypass" if "bypass" in name else "decoupled",
                                                "weights": applied, **bounds}}
    found = metrics(step(model, groups, learner)[0])
    behavior = np.concatenate([t.behavior_logprobs_L for group in groups for t in group.trajectories])
    lengths = [len(t.behavior_logprobs_L) for group in groups for t in group.trajectories]
    exact = np.concatenate([t.behavior_logprobs_L for group in groups for t in sampled_by(stock, group).trajectories])
    d = exact.astype(np.float64) - behavior
    sums, row = np.add.reduceat(d, np.cumsum([0, *lengths[:-1]])), np.repeat(np.arange(16), lengths)
    ratio = np.exp(d)
    w = {"sequence": np.exp(sums)[row], "geometric": np.exp(sums / lengths)[row],
         "function": np.clip(ratio, 0.5, 2.0)}.get(applied.partition("_")[0], ratio)
    low, high = bounds.get("icepop_low", 0.0), bounds.get("icepop_high", bounds.get("cap", math.inf))
    expected = {"weight_mean": w.mean(), "weight_min": w.min(), "weight_max": w.max(), "weight_std": w.std(),
                "weight_under": (w < low).mean(), "weight_truncated": (w > high).mean(),
                "effective_samples": 1 / np.mean((w / w.mean()) ** 2), "chi2_token": (ratio**2).mean() - 1,
                "chi2_answer": np.mean(np.exp(2 * sums)) - 1, "behavior_kl": -d.mean(),
                "behavior_k3": np.mean([golden.statistic(x, "k3") for x in d]),
                "learner_perplexity": math.exp(-exact.mean()), "behavior_perplexity": math.exp(-behavior.mean()),
                "perplexity_gap": behavior.mean() - exact.mean()}
    for metric, value in expected.items():
        assert found[f"train/{metric}"] == pytest.approx(value, rel=2e-3, abs=2e-5), metric
    assert ((w > high).any(), (w < low).any()) == ("path" not in bounds and bounds not in ({}, {"cap": 5.0}),
                                                   "icepop_low" in bounds), "the case is one in which they act"
    assert found["train/zero_advantage"] == 0.0 and math.isnan(found["train/rejected_tokens"])


def test_the_weights_of_decoupled_ppo_are_normalised_by_their_mean(model, groups):
    plain, _ = step(model, groups, {"loss": {"name": "decoupled_ppo"}})
    divided, _ = step(model, groups, {"loss": {"name": "decoupled_ppo"}, "correction": {"normalize": True}})
    found = metrics(plain)
    assert found["train/weight_truncated"] == 0.0 and abs(found["train/weight_mean"] - 1.0) > 1e-3
    assert divided.losses[0] == pytest.approx(plain.losses[0] / found["train/weight_mean"], rel=1e-5)
    spelled, _ = step(model, groups, {"correction": {"normalize": True, "weights": "token_truncate", "cap": 5.0}})
    assert divided.losses == spelled.losses, "ppo_clip with these weights is the same loss"


def test_the_weight_of_an_answer_with_an_impossible_token_is_measured_as_it_is_applied():
    """d is log 2, nothing, log 2, of an answer of three: its mean is over three tokens, as in the loss."""
    sums, policy = Sums(), torch.log(torch.tensor([0.5, 0.5, 0.5]))
    behavior, none = torch.log(torch.tensor([0.25, 0.0, 0.25])), torch.zeros(3, dtype=torch.int64)
    anchor_sums(sums, policy, behavior, none, none.bool(), none, 1, CorrectionConfig(weights="geometric_truncate"))
    assert float(sums.total["tokens"]) == 2.0
    assert float(sums.total["weight"]) == pytest.approx(2 * 2 ** (2 / 3))


MEASURED = {  # settings, and of how many of four groups the proximal log-probs are seen, in updates of two groups each
    "a pass for them": ({}, 4), "bypass": ({"correction": {"mode": "bypass"}}, 2),
    "bypass, by a pass for a choice": ({"correction": {"mode": "bypass"}, "loss": {"name": "kl_cov"}}, 2),
    "log-linear": ({"loss": {"name": "decoupled_ppo", "proximal": "loglinear"}}, 2),
    "bypass in one update": ({"correction": {"mode": "bypass"}, "minibatch_groups": None}, 4)}


@pytest.mark.parametrize(("learner", "seen"), MEASURED.values(), ids=MEASURED)
def test_of_how_many_loss_tokens_mismatch_and_weights_are_is_counted(model, groups, learner, seen):
    result, _ = step(model, groups, {"minibatch_groups": 2, **learner})
    lengths = [sum(len(t.token_ids_L) for t in group.trajectories) for group in groups]
    assert result.totals["tokens"] == sum(lengths[:seen])
    facts = TokenFacts(sampled=1.0, masked_by_age=0.0, lag=0.0, lag_max=0.0, mixed=0.0, loss=float(sum(lengths)))
    assert token_metrics(facts, 16, result.totals["tokens"])["train/measured_tokens"] == pytest.approx(
        sum(lengths[:seen]) / sum(lengths))


def test_in_bypass_mode_the_ratio_is_policy_over_behavior_and_no_proximal_pass_is_made(model, groups):
    result, _ = step(model, groups, {"correction": {"mode": "bypass"}, "passes": 2})
    assert result.proximal_s == 0.0 and not result.recomputed
    assert math.isnan(metrics(result)["train/ratio_drift"]) and metrics(result)["train/ratio_max"] > 1.3
    decoupled, _ = step(model, groups, {"passes": 2})
    assert decoupled.recomputed and metrics(decoupled)["train/ratio_drift"] <= 1e-6


def without_token(model: Policy, token: int) -> Policy:
    """The model with a logit of minus infinity for this token, everywhere."""
    policy = copy.deepcopy(model)
    policy.model.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, logits: logits.index_fill(-1, torch.tensor([token]), -math.inf))
    return policy


@pytest.mark.parametrize("loss", [{}, {"entropy_coef": 0.3}, {"top_entropy_quantile": 0.3, "entropy_coef": 0.3}],
                         ids=["recorded", "a bonus", "uncertain tokens"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_logit_of_minus_infinity_leaves_entropy_loss_and_gradients_finite(model, groups, loss, sampled):
    """A token that was sampled all the same is impossible, counted, and has no policy loss."""
    ids = np.concatenate([t.token_ids_L for group in groups for t in group.trajectories])
    token = int(ids[5]) if sampled else next(v for v in range(model.vocabulary) if v not in ids)
    result, gradients = step(without_token(model, token), groups, {"loss": loss})
    assert never_nan(result) and result.skipped == 0 and math.isfinite(result.gradient_norms[0])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert 0.0 < metrics(result)["train/entropy"] < math.log(model.vocabulary - 1)
    assert metrics(result)["train/impossible_tokens"] == (ids == token).sum()


@pytest.mark.parametrize("learner", [{}, {"loss": {"name": "gpg"}, "correction": {"weights": "geometric_truncate"}},
                                     {"loss": {"name": "gspo"}, "correction": {"mode": "bypass"}}])
def test_log_probs_of_minus_infinity_are_counted_and_have_no_loss(model, groups, learner):
    def break_some(batch: Any) -> None:
        tokens = batch["loss_mask"].nonzero()[:, 0]
        batch["behavior_logprobs"][tokens[:3]] = -math.inf

    result, gradients = step(model, groups, learner, change=break_some)
    assert metrics(result)["train/impossible_tokens"] == 3.0 and never_nan(result)
    assert all(torch.isfinite(gradient).all() for gradient in gradients) and result.skipped == 0


def test_a_claim_whose_tokens_are_all_masked_makes_no_update(model, groups):
    def mask_all(batch: Any) -> None:
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])

    for learner in ({}, {"advantage": {"name": "optimal_token_baseline"}}, {"correction": {"normalize": True,
                    "weights": "token_truncate"}}, {"advantage": {"name": "reinforce_plus_plus"}}):
        result, _ = step(model, groups, learner, change=mask_all)
        assert (result.updates, result.losses) == (0, ())


def test_groups_without_spread_have_zero_advantage_and_that_is_counted(model, groups):
    def level(batch: Any) -> None:
        batch["trajectory", "reward"] = torch.where(batch["trajectory", "group"] < 2, 1.0,
                                                    batch["trajectory", "reward"])

    result, _ = step(model, groups, {}, change=level)
    lengths = [sum(len(t.token_ids_L) for t in group.trajectories) for group in groups]
    assert metrics(result)["train/zero_advantage"] == pytest.approx(sum(lengths[:2]) / sum(lengths))
    everywhere, gradients = step(model, groups, {}, change=lambda batch: batch["trajectory", "reward"].zero_())
    assert metrics(everywhere)["train/zero_advantage"] == 1.0 and everywhere.losses == (0.0,)
    assert not any(gradient.any() for gradient in gradients)


def test_the_overlong_penalty_changes_rewards_before_groups_are_compared():
    batch = stages.assemble(rows_of(random_groups(0, 1, rewards=[1, 1, 1, 1], lengths=[2, 10, 11, 12])))
    stages.penalize_overlong(batch, longest=12, buffer=2, factor=0.5)
    assert batch["trajectory", "reward"].tolist() == [1.0, 1.0, 0.75, 0.5]


def test_an_answer_that_is_drawn_twice_counts_twice_also_in_the_denominators(model, stock, groups):
    """Of groups with one right answer each only those four are drawn by |S|."""
    def only_the_first(batch: Any) -> None:
        batch["trajectory", "reward"] = (torch.arange(16) % 4 == 0).float()

    drawn, _ = step(model, groups, {"resampling": "pow", "loss": {"name": "gpg", "aggregation": "token_mean"}},
                    change=only_the_first)
    copies = resampled(resampling_weights((np.arange(16) % 4 == 0) * 1.0, "pow"), derive(5, 1, 0, 0, "lots"))
    assert copies.sum() == 16 and set(np.flatnonzero(copies)) <= {0, 4, 8, 12}
    answers = [t for group in groups for t in group.trajectories]
    policy = [t.behavior_logprobs_L for group in groups for t in sampled_by(stock, group).trajectories]
    total = sum(n * -1.5 * policy[i].sum() for i, n in enumerate(copies))
    assert drawn.losses[0] == pytest.approx(total / sum(n * len(answers[i].token_ids_L) for i, n in enumerate(copies)),
                                            rel=1e-4)


def test_drawn_answers_are_counted_as_often_as_they_were_drawn_with_and_without_rejected_tokens():
    copies = torch.tensor([2, 0, 1])
    draw = Draw(copies, copies, torch.tensor([3, 4, 5]))
    assert draw.denominators() == Denominators(tokens=11, sequences=3)
    assert draw.denominators(torch.tensor([1, 4, 0])) == Denominators(tokens=2, sequences=2)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_answers_that_were_drawn_again_have_their_entropy_as_often(model, directory, groups, aggregation):
    """Without spread in any group nothing but the bonus has a gradient."""
    rewards = torch.tensor([1.0, 2.0, 0.0, 3.0]).repeat_interleave(4)
    result, _ = step(model, groups, {"resampling": "pow", "loss": {"entropy_coef": 0.3, "aggregation": aggregation}},
                     change=lambda batch: batch["trajectory", "reward"].copy_(rewards))
    copies = resampled(resampling_weights(rewards.double().numpy(), "pow"), derive(5, 1, 0, 0, "lots"))
    stock = AutoModelForCausalLM.from_pretrained(directory)
    _, entropy, length = told(stock, groups)
    lengths = [len(t.token_ids_L) for group in groups for t in group.trajectories]
    often = torch.tensor(np.repeat(copies, lengths))
    divisor = often.sum() if aggregation == "token_mean" else 16 * length
    (0.3 * (often * entropy / divisor).sum()).backward()
    assert max(copies) > 1 and result.losses == (0.0,)
    assert result.gradient_norms[0] == pytest.approx(math.hypot(*(float(p.grad.norm()) for p in stock.parameters())),
                                                     rel=1e-4)


def told(stock: Any, groups: list[TrajectoryGroup]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob and entropy of every token by the stock model, under gradient, and the length of its answer."""
    found = []
    for group in groups:
        prompt = group.lease.prompt.token_ids_P.tolist()
        for t in group.trajectories:
            answer = t.token_ids_L.tolist()
            logits = stock(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1:-1]
            log_LV = (logits.float() / group.lease.sampling.temperature).log_softmax(-1)
            found.append((log_LV[torch.arange(len(answer)), torch.tensor(answer)], -(log_LV.exp() * log_LV).sum(-1),
                          torch.full((len(answer),), float(len(answer)))))
    logprob, entropy, length = (torch.cat(column) for column in zip(*found, strict=True))
    return logprob, entropy, length


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_entropy_bonus_is_its_coefficient_times_the_aggregated_entropy(model, directory, groups, aggregation):
    """Where no answer is better than another nothing else has a gradient."""
    result, _ = step(model, groups, {"loss": {"entropy_coef": 0.3, "aggregation": aggregation}},
                     change=lambda batch: batch["trajectory", "reward"].zero_())
    stock = AutoModelForCausalLM.from_pretrained(directory)
    _, entropy, length = told(stock, groups)
    bonus = entropy.mean() if aggregation == "token_mean" else (entropy / length).sum() / 16
    (0.3 * bonus).backward()
    assert result.losses == (0.0,), "the recorded loss is that of the policy alone"
    assert result.gradient_norms[0] == pytest.approx(math.hypot(*(float(p.grad.norm()) for p in stock.parameters())),
                                                     rel=1e-4)
    assert metrics(result)["train/entropy"] == pytest.approx(float(entropy.detach().mean()), rel=1e-5)


def test_a_step_of_uncertain_tokens_with_a_penalty_is_that_of_plain_numbers(model, stock, groups):
    learner = {"loss": {"name": "gpg", "top_entropy_quantile": 0.3, "behavior_penalty": 0.5},
               "advantage": {"name": "grpo", "normalize_by_std": False}}
    result, _ = step(model, groups, learner)
    policy, entropy, length = (column.detach().double().numpy() for column in told(stock, groups))
    behavior = np.concatenate([t.behavior_logprobs_L for group in groups for t in group.trajectories])
    advantage = np.repeat([0.625, -0.375, 0.125, -0.375] * 4,
                          [len(t.token_ids_L) for group in groups for t in group.trajectories])
    uncertain = np.argsort(-entropy)[:math.ceil(0.3 * len(entropy))]
    expected = -(advantage * policy)[uncertain].sum() + 0.5 * ((policy - behavior) ** 2).sum()
    assert result.losses[0] == pytest.approx(expected / len(length), rel=1e-4)


PASSES = {  # what a step of two updates lets the model read beside them: the proximal pass, and one before an update
    "none in bypass": ({"correction": {"mode": "bypass"}}, 0), "proximal": ({}, 2),
    "proximal, and the minibatch before the second update": ({"loss": {"name": "kl_cov"}}, 3),
    "proximal only, by which m2po chooses": ({"loss": {"name": "m2po"}}, 2),
    "none for a choice in each micro-batch": ({"loss": {"name": "kl_cov", "scope": "micro_batch"}}, 2),
    "before each update in bypass": ({"correction": {"mode": "bypass", "rejected": "exclude",
                                                     "rejection": [{"rule": "token_k2", "high": 9}]}}, 2)}


@pytest.mark.parametrize(("learner", "passes"), PASSES.values(), ids=PASSES)
def test_a_pass_without_gradient_is_made_only_where_it_is_needed(model, groups, learner, passes, monkeypatch):
    made, forward = [], Policy.forward

    def counted(self, *args, **options):
        made.append(torch.is_grad_enabled())
        return forward(self, *args, **options)

    monkeypatch.setattr(Policy, "forward", counted)
    step(model, groups, {**learner, "minibatch_groups": 2})
    assert (made.count(True), made.count(False)) == (2, passes)


def test_lots_depend_on_the_seed_of_the_run_alone(model, groups):
    learner = {"loss": {"name": "clip_cov", "cov_low": -9, "cov_high": 9, "share": 0.2}}
    one, two = (step(model, groups, learner)[0].losses for _ in range(2))
    assert one == two
