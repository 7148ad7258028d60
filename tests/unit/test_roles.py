"""Models beside the policy: what they say, what is learned from it, and that all of it is state that comes back."""

from __future__ import annotations

import copy
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification

from rl_core import metrics
from rl_core.checkpoint import newest_whole
from rl_core.config import Config
from rl_core.errors import ConfigError, NonFiniteTraining
from rl_core.learner import batch as stages
from rl_core.learner.advantages.resampling import resampled, resampling_weights
from rl_core.learner.critic import load_critic
from rl_core.learner.kl import KlController
from rl_core.learner.learner import Learner, fold_claims
from rl_core.learner.micro import minibatches_of
from rl_core.learner.optimizer import make_optimizer
from rl_core.learner.plan import StepPlan, StepResult
from rl_core.learner.policy import Policy, load_policy
from rl_core.learner.ranks import Ranks
from rl_core.learner.replay import replay, try_settings
from rl_core.learner.roles import Roles
from rl_core.learner.step import training_step
from rl_core.records import read_record
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.run_identity import identity_payload
from rl_core.seeds import derive
from rl_core.types import StepRecord, TrajectoryGroup
from tests.golden import corrections as golden
from tests.learning import (
    all_by,
    answer_logprobs,
    claim_groups,
    random_groups,
    rows_of,
    sampled_by,
    start_attempt,
    train_as_rank,
    write_model,
)

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, ranks=1, rendezvous="", device=CPU, deadline_s=1, barrier_s=1)
FLAT = [1.0, 1.0, 1.0, 1.0]
"""Rewards without spread: no gradient but that of the terms beside the policy loss."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary, near enough for KL estimators: a mix of this one and a third."""
    directory = write_model(tmp_path_factory.mktemp("other"), seed=0)
    model, third = AutoModelForCausalLM.from_pretrained(directory), write_model(tmp_path_factory.mktemp("x"), seed=1)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), AutoModelForCausalLM.from_pretrained(third).parameters(),
                                strict=True):
            mine.lerp_(theirs, 0.03)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(directory: Path) -> Policy:
    return load_policy(directory, logits_chunk=64, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def groups(directory: Path) -> list[TrajectoryGroup]:
    stock = AutoModelForCausalLM.from_pretrained(directory)
    return [sampled_by(stock, all_by(0, group)) for group in random_groups(0, rewards=[1.0, 0.0, 0.5, 0.0])]


def with_rewards(groups: list[TrajectoryGroup], rewards: list[float]) -> list[TrajectoryGroup]:
    """The same answers, of each group with these rewards."""
    return [replace(group, trajectories=tuple(replace(t, score=replace(t.score, reward=r))
                                              for t, r in zip(group.trajectories, rewards, strict=True)))
            for group in groups]


def step(model: Policy, groups: list[TrajectoryGroup], learner: dict[str, Any], directories: dict[str, Path], *,
         budget: int = 10_000, roles: Roles | None = None, finish: list[int] | None = None, masked: bool = False,
         ) -> tuple[StepResult, dict[str, Tensor], Roles]:
    """One training step: its result, the gradients of the policy's last update, and the roles behind it."""
    base = {"lr": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9, "token_budget": budget}
    config = Config.model_validate({"groups_per_step": 4, "group_size": 4, "sampling": {"max_new_tokens": 12},
                                    "learner": base | learner})
    rows = rows_of(groups)
    batch = stages.assemble(rows)
    if finish is not None:
        batch["trajectory", "finish"] = torch.tensor(finish)
    stages.mark_tokens(batch, step=1, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, config.learner.loss.truncated)
    if masked:
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    stages.number_tokens(batch)
    stages.add_advantages(batch, config.learner.advantage)
    policy = copy.deepcopy(model)
    roles = roles or Roles(directories)
    roles.prepare(config.learner, ALONE)
    plan = StepPlan(step=1, idx=1, learning_rate=1e-3, groups=4, minibatch_groups=config.minibatch_groups,
                    max_new_tokens=12, learner=config.learner, skipped_in_a_row=0, max_skipped=0,
                    policy_learns=config.learner.critic.warmup_steps <= 1, kl_beta=config.learner.kl.coef, seed=5)
    result = training_step(policy, make_optimizer(policy, config.learner), ALONE, batch, plan, roles)
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return result, gradients, roles


def answers_of(groups: list[TrajectoryGroup]) -> list[tuple[list[int], list[int], float]]:
    return [(group.lease.prompt.token_ids_P.tolist(), t.token_ids_L.tolist(), t.score.reward)
            for group in groups for t in group.trajectories]


def logprobs_under_gradient(stock: Any, prompt: list[int], answer: list[int]) -> Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    logits = stock(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1)


# -- reference ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1+", "k3+"])
def test_the_kl_in_the_loss_has_the_gradient_of_its_formula_over_the_stock_models(model, directory, other, groups,
                                                                                estimator):
    flat = with_rewards(groups, FLAT)
    result, gradients, _ = step(model, flat, {"kl": {"use": "loss", "coef": 0.3, "estimator": estimator}},
                                {"reference": other})
    stock, reference = (AutoModelForCausalLM.from_pretrained(where) for where in (directory, other))
    values, total, tokens = [], torch.zeros(()), sum(len(answer) for _, answer, _ in answers_of(flat))
    for prompt, answer, _ in answers_of(flat):
        policy = logprobs_under_gradient(stock, prompt, answer)[torch.arange(len(answer)), answer]
        d = policy - answer_logprobs(reference, prompt, answer)
        values += [golden.kl(x, estimator.rstrip("+")) for x in d.tolist()]
        slope = torch.tensor([golden.kl_slope(x, estimator) for x in d.tolist()])
        total = total + (0.3 * slope * policy).sum() / tokens
    total.backward()
    assert result.totals["kl_reference"] / result.totals["kl_tokens"] == pytest.approx(np.mean(values), rel=1e-4)
    assert result.losses == (0.0,)
    for name, parameter in stock.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=2e-3, atol=2e-6, err_msg=name)


def test_a_reference_that_is_the_policy_changes_nothing_in_the_first_update(model, directory, groups):
    plain, gradients, _ = step(model, groups, {}, {})
    result, same, _ = step(model, groups, {"kl": {"use": "loss", "coef": 1.0}}, {"reference": directory})
    assert (result.losses, result.totals["kl_reference"]) == (plain.losses, pytest.approx(0.0, abs=1e-9))
    for name, gradient in gradients.items():
        np.testing.assert_allclose(same[name], gradient, rtol=1e-4, atol=1e-7)


def test_the_kl_in_the_reward_is_taken_from_it_token_by_token_before_advantages_are_made(model, directory, other,
                                                                                       groups):
    kl = {"use": "reward", "coef": 0.2, "estimator": "k1"}
    stock, reference = (AutoModelForCausalLM.from_pretrained(where) for where in (directory, other))
    given = answers_of(groups)
    d = [(answer_logprobs(stock, p, a) - answer_logprobs(reference, p, a)).double().numpy() for p, a, _ in given]
    scores = np.array([r for _, _, r in given]) - 0.2 * np.array([one.sum() for one in d])
    result, gradients, _ = step(model, groups, {"kl": kl}, {"reference": other})
    assert result.kl == pytest.approx(np.mean([one.mean() for one in d]), rel=1e-4)
    by_hand = [with_rewards([group], scores[4 * i:4 * i + 4].tolist())[0] for i, group in enumerate(groups)]
    expected, same, _ = step(model, by_hand, {}, {})
    assert result.losses[0] == pytest.approx(expected.losses[0], abs=1e-5)
    for name, gradient in same.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=2e-3, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("learner", [{"advantage": {"name": "reinforce_plus_plus", "gamma": 0.9}},
                                     {"advantage": {"name": "optimal_token_baseline"}},
                                     {"correction": {"mode": "bypass"}}, {"passes": 2, "minibatch_groups": 2},
                                     {"advantage": {"name": "gae", "gamma": 0.9, "lam": 0.9}}],
                         ids=["returns", "token baselines", "bypass", "minibatches", "gae"])
def test_the_kl_in_the_reward_does_not_depend_on_micro_batches(model, directory, other, groups, learner):
    with_kl = {**learner, "kl": {"use": "reward", "coef": 0.1}}
    places = {"reference": other, "critic": directory}
    whole, _, _ = step(model, groups, with_kl, places)
    cut, _, _ = step(model, groups, with_kl, places, budget=40)
    plain, _, _ = step(model, groups, learner, places)
    assert cut.losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-6)
    assert cut.gradient_norms == pytest.approx(whole.gradient_norms, rel=1e-4)
    assert abs(whole.gradient_norms[0] - plain.gradient_norms[0]) > 1e-4
    assert whole.critic == pytest.approx(cut.critic, rel=1e-4, abs=1e-6)


def test_tokens_that_the_reference_holds_impossible_are_counted_and_have_no_kl(model, other, groups):
    roles = Roles({"reference": other})
    settings = {"kl": {"use": "loss", "coef": 1.0}}
    roles.prepare(Config.model_validate({"learner": settings}).learner, ALONE)
    impossible = groups[0].trajectories[0].token_ids_L[0]
    head = roles.reference.model.get_output_embeddings()
    never(head, int(impossible))
    result, gradients, _ = step(model, groups, settings, {}, roles=roles)
    count = sum(int((t.token_ids_L == impossible).sum()) for group in groups for t in group.trajectories)
    assert result.totals["impossible_to_others"] == count > 0 and result.skipped == 0
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    head.bias.data[:] = math.nan
    with pytest.raises(NonFiniteTraining, match="the reference policy answers NaN at"):
        step(model, groups, settings, {}, roles=roles)


# -- critic ------------------------------------------------------------------------------------------------------------


def with_head(directory: Path, seed: int = 3) -> Roles:
    """A critic whose head is not 0."""
    roles = Roles({"critic": directory})
    roles.prepare(Config.model_validate({"learner": {"advantage": {"name": "gae"}}}).learner, ALONE)
    with torch.no_grad():
        roles.critic.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return roles


def plain_values(critic: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Values before each token of the answer, and behind the last one, by the stock transformer, one at a time."""
    hidden = critic.stock(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).last_hidden_state[0]
    return (hidden[len(prompt) - 1:] @ critic.head.T).squeeze(-1)


class PlainCritic:
    def __init__(self, directory: Path, head: Tensor) -> None:
        self.stock = AutoModelForCausalLM.from_pretrained(directory).base_model
        self.head = head.clone().requires_grad_()


def plain_gae(rewards: list[float], values: list[float], last: float, gamma: float, lam: float) -> list[float]:
    out, following, advantage = [], last, 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        advantage = r + gamma * following - v + gamma * lam * advantage
        out.insert(0, advantage)
        following = v
    return out


@pytest.mark.parametrize("finish", [None, [0, 1] * 8], ids=["all finished", "every second one cut"])
def test_a_critic_learns_the_returns_and_the_policy_the_advantages_as_a_plain_loop_does(model, directory, groups,
                                                                                      finish):
    gamma, lam = 0.95, 0.9
    roles = with_head(directory)
    plain = PlainCritic(directory, roles.critic.head.weight.detach())
    values = [plain_values(plain, p, a).detach().tolist() for p, a, _ in answers_of(groups)]
    advantages = []
    for i, (_, answer, reward) in enumerate(answers_of(groups)):
        last = values[i][-1] if finish and finish[i] else 0.0
        advantages.append(plain_gae([0.0] * (len(answer) - 1) + [reward], values[i][:-1], last, gamma, lam))
    returns = [[a + v for a, v in zip(one, v, strict=False)] for one, v in zip(advantages, values, strict=True)]
    flat = np.concatenate(advantages)
    whitened = (flat - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8)
    learner = {"advantage": {"name": "gae", "gamma": gamma, "lam": lam},
               "critic": {"lr": 1e-3, "max_grad_norm": 0.5, "clip": 0.2}}
    result, _, after = step(model, groups, learner, {}, roles=roles, finish=finish)
    # On-policy and in one update the policy loss is -mean(A r) with r = 1.
    assert result.losses[0] == pytest.approx(-whitened.mean(), abs=1e-5)
    found = result.critic
    targets, before = np.concatenate(returns), np.concatenate([v[:-1] for v in values])
    assert found["critic/value_mean"] == pytest.approx(before.mean(), rel=1e-4)
    assert found["critic/return_mean"] == pytest.approx(targets.mean(), rel=1e-4)
    assert found["critic/value_loss"] == pytest.approx((0.5 * (before - targets) ** 2).mean(), rel=1e-4)
    assert found["critic/explained_variance"] == pytest.approx(1 - (targets - before).var() / targets.var(), rel=1e-3)
    assert (found["critic/clipped"], found["critic/skipped_updates"]) == (0.0, 0.0)
    total = torch.zeros(())
    for (prompt, answer, _), target in zip(answers_of(groups), returns, strict=True):
        error = plain_values(plain, prompt, answer)[:-1] - torch.tensor(target)
        total = total + 0.5 * error.square().sum() / len(targets)
    named = {f"model.{name}": p for name, p in plain.stock.named_parameters()} | {"head.weight": plain.head}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
    optimizer.step()
    assert found["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    mine = after.critic.weights()
    assert mine.keys() == named.keys()
    for name, parameter in named.items():
        np.testing.assert_allclose(mine[name].detach(), parameter.detach(), atol=3e-5, err_msg=name)


def test_values_of_packed_answers_are_those_of_answers_alone_with_the_value_behind_each(directory, groups):
    roles = with_head(directory)
    plain = PlainCritic(directory, roles.critic.head.weight.detach())
    learner = Config.model_validate({"learner": {"advantage": {"name": "gae"}}}).learner
    batch = stages.assemble(rows_of(groups))
    stages.mark_tokens(batch, step=0, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, "score")
    stages.number_tokens(batch)
    stages.add_advantages(batch, learner.advantage)
    for budget in (10_000, 40):
        for minibatch in minibatches_of(batch, ALONE, groups=4, minibatch_groups=4, token_budget=budget, behind=True):
            for micro in minibatch.micros:
                with torch.no_grad():
                    found = roles.critic(micro.inputs)
                assert sorted(micro.order_Q.tolist()) == sorted(set(micro.sequence_S.tolist()))
                for q, i in enumerate(micro.order_Q.tolist()):
                    prompt, answer, _ = answers_of(groups)[i]
                    expected = plain_values(plain, prompt, answer).detach()
                    mine = found.value_S[micro.sequence_S == i]
                    np.testing.assert_allclose(mine[micro.position_S[micro.sequence_S == i].argsort()], expected[:-1],
                                               atol=2e-5)
                    assert float(found.behind_Q[q]) == pytest.approx(float(expected[-1]), abs=2e-5)


def test_a_critic_begins_with_zero_or_with_the_head_of_a_sequence_classifier(tmp_path, directory):
    assert not load_critic(directory, dtype=torch.float32, device=CPU).head.weight.any()
    classifier = Qwen3ForSequenceClassification.from_pretrained(directory, num_labels=1)
    torch.nn.init.normal_(classifier.score.weight)
    classifier.save_pretrained(tmp_path)
    critic = load_critic(tmp_path, dtype=torch.float32, device=CPU)
    assert torch.equal(critic.head.weight, classifier.score.weight) and critic.head.weight.any()


def test_updates_of_the_critic_that_are_not_finite_are_skipped_counted_and_end_the_run(model, directory, groups):
    roles = with_head(directory)
    learner = {"advantage": {"name": "gae"}, "critic": {"lr": 1e-3}}
    broken = with_rewards(groups, [3e38, 1.0, 0.0, 0.0])
    with pytest.raises(NonFiniteTraining, match=r"step 1: 1 updates of the critic in a row were not finite"):
        step(model, broken, learner, {}, roles=roles)


@pytest.mark.parametrize("learner", [
    {"advantage": {"name": "gae"}, "kl": {"use": "reward"}}, {"kl": {"use": "loss"}},
    {"advantage": {"name": "optimal_token_baseline"}, "kl": {"use": "reward", "target": 0.1}},
    {"teacher": {"use": "forward_topk", "path": "t"}}], ids=["critic", "loss", "token baselines", "teacher"])
def test_a_claim_whose_tokens_are_all_masked_makes_no_update_and_no_number(model, directory, groups, learner):
    places = {"reference": directory, "critic": directory, "teacher": directory}
    result, _, roles = step(model, groups, learner, places, masked=True)
    assert (result.updates, result.losses, roles.kl_beta) == (0, (), None) and math.isnan(result.kl)
    assert all(math.isnan(value) for name, value in result.critic.items() if name != "critic/skipped_updates")


# -- teacher -----------------------------------------------------------------------------------------------------------


def test_reverse_kl_against_the_teacher_is_an_advantage_per_token(model, directory, other, groups):
    flat = with_rewards(groups, FLAT)
    result, gradients, _ = step(model, flat, {"teacher": {"use": "advantage", "path": "t", "coef": 0.5}},
                                {"teacher": other})
    stock, teacher = (AutoModelForCausalLM.from_pretrained(where) for where in (directory, other))
    total, tokens, gaps = torch.zeros(()), sum(len(answer) for _, answer, _ in answers_of(flat)), []
    for prompt, answer, _ in answers_of(flat):
        policy = logprobs_under_gradient(stock, prompt, answer)[torch.arange(len(answer)), answer]
        gap = policy.detach() - answer_logprobs(teacher, prompt, answer)
        gaps += gap.tolist()
        total = total + (0.5 * gap * policy).sum() / tokens  # -A log pi
    total.backward()
    assert result.totals["distillation"] / result.totals["distilled_tokens"] == pytest.approx(np.mean(gaps), rel=1e-4)
    for name, parameter in stock.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=2e-3, atol=3e-6, err_msg=name)


@pytest.mark.parametrize(("use", "budget"), [("loss", 10_000), ("forward_topk", 10_000), ("forward_topk", 40)])
def test_distillation_as_a_loss_has_the_gradient_of_its_formula(model, directory, other, groups, use, budget):
    flat = with_rewards(groups, FLAT)
    settings = {"use": use, "path": "t", "coef": 0.5, "estimator": "k2", "top_k": 5}
    result, gradients, _ = step(model, flat, {"teacher": settings}, {"teacher": other}, budget=budget)
    stock, teacher = (AutoModelForCausalLM.from_pretrained(where) for where in (directory, other))
    total, tokens = torch.zeros(()), sum(len(answer) for _, answer, _ in answers_of(flat))
    for prompt, answer, _ in answers_of(flat):
        policy = logprobs_under_gradient(stock, prompt, answer)
        with torch.no_grad():
            taught = logprobs_under_gradient(teacher, prompt, answer)
        if use == "loss":
            at = torch.arange(len(answer)), torch.tensor(answer)
            total = total + ((policy[at] - taught[at]) ** 2 / 2).sum() / tokens
            continue
        likely = taught.argsort(-1, descending=True)[:, :5]
        t, p = taught.gather(-1, likely), policy.gather(-1, likely)
        t_rest, p_rest = 1 - t.exp().sum(-1), 1 - p.exp().sum(-1)
        total = total + ((t.exp() * (t - p)).sum(-1) + t_rest * (t_rest.log() - p_rest.log())).sum() / tokens
    (0.5 * total).backward()
    assert result.totals["distillation"] / tokens == pytest.approx(float(total.detach()), rel=1e-4)
    for name, parameter in stock.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=2e-3, atol=3e-6, err_msg=name)


def never(head: Any, token: int) -> None:
    """A bias of minus infinity for this token."""
    head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]), requires_grad=False)
    head.bias.data[token] = -math.inf


@pytest.mark.parametrize("of", ["teacher", "policy", "both"])
def test_a_token_that_teacher_or_policy_holds_impossible_has_no_part_in_the_whole_forward_kl(model, other, groups, of):
    flat, roles = with_rewards(groups, FLAT), Roles({"teacher": other})
    settings = {"teacher": {"use": "forward_topk", "path": "t", "top_k": 1024}, "loss": {"entropy_coef": 0.1}}
    roles.prepare(Config.model_validate({"learner": settings}).learner, ALONE)
    policy, sampled = copy.deepcopy(model), {int(v) for _, answer, _ in answers_of(flat) for v in answer}
    token = next(v for v in range(policy.vocabulary) if v not in sampled)
    for whose, one in (("teacher", roles.teacher), ("policy", policy)):
        if of in (whose, "both"):
            never(one.model.get_output_embeddings(), token)
    result, gradients, _ = step(policy, flat, settings, {}, roles=roles)
    assert result.skipped == 0 and all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert math.isfinite(result.totals["entropy"]) and result.totals["impossible_to_others"] == 0
    assert 0.001 < abs(result.totals["distillation"] / result.totals["distilled_tokens"]) < 10.0


DRAWN = {"kl": ({"kl": {"use": "loss", "coef": 0.3, "estimator": "k2"}}, "reference"),
         "teacher": ({"teacher": {"use": "loss", "path": "t", "coef": 0.3, "estimator": "k2"}}, "teacher")}


@pytest.mark.parametrize(("settings", "role"), DRAWN.values(), ids=DRAWN)
def test_answers_that_were_drawn_again_have_their_term_as_often(model, directory, other, groups, settings, role):
    flat = [with_rewards([group], [r] * 4)[0] for group, r in zip(groups, [1.0, 2.0, 0.0, 3.0], strict=True)]
    copies = resampled(resampling_weights(np.repeat([1.0, 2.0, 0.0, 3.0], 4), "pow"), derive(5, 1, 0, 0, "lots"))
    _, gradients, _ = step(model, flat, {**settings, "resampling": "pow"}, {role: other})
    stock, beside = (AutoModelForCausalLM.from_pretrained(where) for where in (directory, other))
    total, tokens = torch.zeros(()), sum(n * len(a) for n, (_, a, _) in zip(copies, answers_of(flat), strict=True))
    for often, (prompt, answer, _) in zip(copies.tolist(), answers_of(flat), strict=True):
        policy = logprobs_under_gradient(stock, prompt, answer)[torch.arange(len(answer)), answer]
        total = total + often * ((policy - answer_logprobs(beside, prompt, answer)) ** 2 / 2).sum() / tokens
    (0.3 * total).backward()
    for name, parameter in stock.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=2e-3, atol=3e-6, err_msg=name)


def test_a_critic_learns_of_the_answers_that_were_drawn_also_before_the_policy_does(model, directory, groups):
    """Values of 0, and returns that are the rewards: half the mean of their squares."""
    rewards, lengths = np.array([r for _, _, r in answers_of(groups)]), [len(a) for _, a, _ in answers_of(groups)]
    often = resampled(resampling_weights(rewards, "max_min"), derive(5, 1, 0, 0, "lots")) * lengths
    assert 0 in often
    for warmup in (0, 9):
        learner = {"advantage": {"name": "gae"}, "resampling": "max_min", "critic": {"warmup_steps": warmup}}
        result, _, _ = step(model, groups, learner, {"critic": directory})
        assert result.critic["critic/value_loss"] == pytest.approx((0.5 * often * rewards**2).sum() / often.sum())


# -- state -------------------------------------------------------------------------------------------------------------

STATES: dict[str, dict[str, Any]] = {
    "a critic, its warm-up, two updates a step": {
        "advantage": {"name": "gae"}, "critic": {"lr": 1e-3, "warmup_steps": 1}, "minibatch_groups": 2},
    "an adaptive KL in the reward": {"kl": {"use": "reward", "coef": 0.1, "estimator": "k2", "target": 1e-3,
                                            "horizon": 64}},
    "a reference that is refreshed": {"kl": {"use": "loss", "coef": 0.1},
                                      "reference": {"refresh_every": 2, "refresh_mix": 0.5}},
    "a critic beside a reference": {"advantage": {"name": "gae"}, "critic": {"lr": 1e-3},
                                    "kl": {"use": "reward", "coef": 0.1}},
}
STEPS = 4


def settings(learner: dict[str, Any]) -> Config:
    return Config.model_validate({"groups_per_step": 4, "group_size": 4, "total_steps": 20, "checkpoint": {"keep": 9},
                                  "sampling": {"max_new_tokens": 12},
                                  "learner": {"lr": 1e-3, "warmup_steps": 0, "token_budget": 100, **learner}})


def new_run(path: Path, config: Config, steps: int = STEPS) -> RunDir:
    run = RunDir(path)
    write_model(run.model)
    start_attempt(run)
    stock = AutoModelForCausalLM.from_pretrained(run.model)
    for k in range(steps):
        claim_groups(run, config, k, [sampled_by(stock, all_by(0, group)) for group in random_groups(k)])
    put_if_absent(run.run_json, to_json(identity_payload("r", "tiny-cpu", config)))
    return run


def started(run: RunDir, config: Config) -> Learner:
    learner = Learner(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
    learner.restore()
    learner.publish_current()
    return learner


def trained(learner: Learner, steps: range) -> list[StepRecord]:
    records = [learner.train(k) for k in steps]
    assert all(record is not None for record in records)
    return [record for record in records if record is not None]


@pytest.mark.parametrize("learner", STATES.values(), ids=STATES)
def test_what_roles_have_become_comes_back_from_a_checkpoint_and_from_the_claims_bit_by_bit(tmp_path, learner):
    config = settings(learner)
    run = new_run(tmp_path / "run", config)
    first = started(run, config)
    records = trained(first, range(2))
    first.checkpoint()
    records += trained(first, range(2, STEPS))
    for record in records:
        metrics.check(record.metrics, "learner")
    again = started(run, config)
    assert again.next_step() == 2
    for k in range(2, STEPS):
        again.train(k)
    assert not list(run.records.glob("*divergent*"))
    for one, two in zip((*first.tensors(), first.role_tensors()), (*again.tensors(), again.role_tensors()),
                        strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert fold_claims(str(run.root)) == records[-1].weights_digest
    for one in replay(run, range(STEPS)):
        assert one.verdict == "identical", (one.step, one.differing, one.roles)
        assert one.roles.keys() == records[one.step].roles.keys()


def test_in_the_warm_up_of_the_critic_the_policy_stays_and_its_tokens_do_not_age(tmp_path):
    config = settings({"advantage": {"name": "gae"}, "critic": {"lr": 1e-3, "warmup_steps": 2}})
    run = new_run(tmp_path / "run", config)
    records = trained(started(run, config), range(STEPS))
    digests = [record.weights_digest for record in records]
    assert digests[0] == digests[1] != digests[2] != digests[3]
    assert len({record.roles["critic"] for record in records}) == STEPS
    assert [record.metrics["staleness/update_lag_mean"] for record in records] == [0.0, 0.0, 0.0, 1.0]
    first, third = records[0].metrics, records[2].metrics
    assert math.isnan(first["train/policy_loss"]) and first["train/mismatch_current_abs"] < 1e-6
    assert third["train/policy_loss"] == pytest.approx(0.0, abs=1.0) and third["train/mismatch_current_abs"] < 1e-6
    assert first["critic/value_mean"] == 0.0 and third["critic/value_mean"] != 0.0
    assert first["critic/value_loss"] > records[3].metrics["critic/value_loss"] * 0.2


def test_the_adaptive_coefficient_is_the_controllers_step_by_step(tmp_path):
    kl = {"use": "reward", "coef": 0.1, "estimator": "k2", "target": 1e-3, "horizon": 64}
    config = settings({"kl": kl})
    records = trained(started(new_run(tmp_path / "run", config), config), range(STEPS))
    controller = KlController(beta=0.1, target=1e-3, horizon=64)
    for record in records:
        assert record.metrics["train/kl_beta"] == pytest.approx(controller.beta, rel=1e-12)
        controller = controller.after(record.metrics["train/kl_reference"], 16)
    assert records[0].metrics["train/kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert records[-1].metrics["train/kl_beta"] != 0.1


def test_a_refreshed_reference_says_whose_weights_it_has(tmp_path):
    config = settings({"kl": {"use": "loss", "coef": 0.1}, "reference": {"refresh_every": 2}})
    run = new_run(tmp_path / "run", config)
    records = trained(started(run, config), range(STEPS))
    assert [record.metrics["train/reference_step"] for record in records] == [0.0, 0.0, 2.0, 2.0]
    assert [list(record.roles) for record in records] == [[], [], ["reference"], ["reference"]]
    assert records[2].roles["reference"] == records[1].weights_digest
    assert records[2].metrics["train/kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert records[3].metrics["train/kl_reference"] > 1e-6


def test_a_recorded_step_can_be_tried_with_roles_that_it_did_not_have(tmp_path):
    config = settings({})
    run = new_run(tmp_path / "run", config, steps=2)
    trained(started(run, config), range(2))
    changes = {"learner": {"kl": {"use": "loss", "coef": 1.0}, "advantage": {"name": "gae"}}}
    [tried] = try_settings(run, [1], changes)
    assert tried.digests[0] == read_record(run, 1).weights_digest != tried.digests[1]
    assert tried.metrics["train/kl_reference"][1] > 1e-6 and math.isnan(tried.metrics["train/kl_reference"][0])
    assert (tried.metrics["critic/value_mean"][1], tried.metrics["train/reference_step"][1]) == (0.0, 0.0)
    with pytest.raises(ConfigError, match=r"learner\.reference\.path: is of kind identity"):
        list(try_settings(run, [1], {"learner": {"kl": {"use": "loss"}, "reference": {"path": "./other"}}}))


@pytest.mark.slow
@pytest.mark.algorithms
@pytest.mark.parametrize("learner", [
    {"advantage": {"name": "gae", "lam": 0.9}, "critic": {"lr": 1e-3, "weight_decay": 0.1},
     "kl": {"use": "reward", "coef": 0.1, "estimator": "k2", "target": 1e-3, "horizon": 64}, "minibatch_groups": 3},
    {"kl": {"use": "loss", "coef": 0.1}, "reference": {"refresh_every": 1, "refresh_mix": 0.5},
     "teacher": {"use": "forward_topk", "path": "t", "top_k": 4}},
], ids=["critic and reference", "refreshed reference and teacher"])
def test_two_gloo_ranks_ask_and_train_roles_as_one_does(tmp_path, learner):
    config = settings({**learner, "token_budget": 60})
    two = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 2})})
    runs = [new_run(tmp_path / name, config, steps=2) for name in ("alone", "together")]
    for run in runs:
        if "teacher" in learner:
            write_model(run.role("teacher"), seed=2)
    alone = started(runs[0], config)
    expected = trained(alone, range(2))
    alone.checkpoint()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train_as_rank, args=(
        rank, 2, str(runs[1].root), two, str(tmp_path / "meet"), 2, str(tmp_path / "rank"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0, 0]
    beside = [name for name in metrics.names("learner") if name.startswith("critic/")] + [
        "train/kl_reference", "train/kl_beta", "train/reference_step", "train/distillation", "train/policy_loss",
        "train/grad_norm"]
    for step, one in enumerate(expected):
        found = read_record(runs[1], step).metrics
        for name in beside:
            assert found[name] == pytest.approx(one.metrics[name], rel=1e-3, abs=1e-6, nan_ok=True), (step, name)
    saved = [newest_whole(run) for run in runs]
    assert saved[0].roles.keys() == saved[1].roles.keys() and saved[0].roles
    for name, tensor in saved[0].roles.items():
        np.testing.assert_allclose(saved[1].roles[name], tensor, atol=3e-5, err_msg=name)
    assert saved[1].state.roles == pytest.approx(saved[0].state.roles, rel=1e-4)
    assert started(runs[1], config).next_step() == 2, "the checkpoint of two ranks is one rank's, too"


def test_without_roles_a_record_has_none_and_their_metrics_are_nan(tmp_path):
    config = settings({})
    run = new_run(tmp_path / "run", config, steps=1)
    learner = started(run, config)
    [record] = trained(learner, range(1))
    learner.checkpoint()
    assert record.roles == {} and learner.role_tensors() == {}
    assert [path.name for path in sorted(run.checkpoint(1).iterdir())] == [
        "manifest.json", "optimizer.safetensors", "parameters.safetensors"]
    beside = [name for name in record.metrics if name.startswith("critic/")] + [
        "train/kl_reference", "train/kl_beta", "train/reference_step", "train/distillation"]
    assert len(beside) == 11 and all(math.isnan(record.metrics[name]) for name in beside)
