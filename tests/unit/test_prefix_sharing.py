"""Prompts that are computed once for all answers to them, against plain packing and against one sequence at a time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_core.config import Config
from rl_core.learner import batch as stages
from rl_core.learner.critic import Critic, load_critic
from rl_core.learner.micro import minibatches_of
from rl_core.learner.optimizer import make_optimizer
from rl_core.learner.packing import Attention, Layout, Pack, last_loss_token, micro_batches, pack, ragged_arange
from rl_core.learner.plan import StepPlan, StepResult
from rl_core.learner.policy import Policy, load_policy
from rl_core.learner.ranks import Ranks
from rl_core.learner.step import training_step
from tests.builders import make_group
from tests.learning import FAMILIES, rows_of, write_model

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, ranks=1, rendezvous="", device=CPU, deadline_s=60, barrier_s=60)
ENOUGH = 10_000


def layout(prompts: list[int], answers: list[int], contexts: list[int], off: tuple[int, ...] = (), *,
           behind: bool = False) -> Layout:
    """Trajectories in a row; every answer token is in the loss but those named by their place in the claim."""
    prompt, answer = np.array(prompts), np.array(answers)
    start = np.cumsum(prompt + answer) - (prompt + answer)
    loss = np.zeros(int((prompt + answer).sum()), np.bool_)
    loss[ragged_arange(start + prompt, answer)] = True
    loss[list(off)] = False
    return Layout(start_M=start, prompt_M=prompt, used_M=last_loss_token(loss, start, prompt, answer),
                  context_M=np.array(contexts), loss_T=loss, behind=behind)


# -- what a pack says, without a model ---------------------------------------------------------------------------------


def seen(packed: Pack) -> dict[int, list[int]]:
    """Which places each place attends to, in order, as the attention calls and the way home have it."""
    found: list[list[int]] = []
    for call in packed.calls:
        key = call.query if call.key is None else call.key
        before = np.zeros(1, np.int64) if call.before_R is None else call.before_R
        before = np.broadcast_to(before, len(call.query))
        found += [key[r, :before[r] + q + 1].tolist() for r in range(len(key)) for q in range(call.query.shape[1])]
    return {place: found[home] for place, home in enumerate(packed.home_P)}


def tokens_before(where: Layout, packed: Pack, i: int) -> list[list[int]]:
    """Of each place of trajectory i, the tokens of the claim that it attends to: prompts by the copy that is laid."""
    mine = seen(packed)
    answer = int(where.answer_M[i])
    places = [int(np.flatnonzero(packed.source_P == token)[0])
              for token in range(where.start_M[i] + where.prompt_M[i], where.start_M[i] + where.prompt_M[i] + answer)]
    return [packed.source_P[mine[place]].tolist() for place in places]


@pytest.mark.parametrize("seed", range(12))
def test_every_place_attends_to_its_prompt_and_to_what_is_before_it_in_its_answer(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, rng.integers(1, 6))
    contexts = np.repeat(np.arange(len(sizes)), sizes)
    prompts = rng.integers(1, 40, len(sizes))[contexts]
    answers = rng.integers(1, 25, len(contexts))
    where = layout(prompts.tolist(), answers.tolist(), contexts.tolist(), behind=bool(seed % 2))
    budget = int(rng.integers(60, 400))
    bins = micro_batches(where, np.ones(len(contexts), np.bool_), budget)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(contexts)))
    for members in bins:
        packed = pack(where, members)
        assert len(packed.source_P) <= budget
        assert len(set(packed.home_P.tolist())) == len(packed.source_P)
        laid = {int(contexts[token_of]): None for token_of in members}
        assert len(packed.source_P) == sum(int(prompts[contexts == c][0]) for c in laid) + int(
            where.answer_M[members].sum())
        for i in members.tolist():
            copies = {int(where.start_M[j]) for j in members if contexts[j] == contexts[i]}
            for t, tokens in enumerate(tokens_before(where, packed, i)):
                prompt, answer = tokens[:where.prompt_M[i]], tokens[where.prompt_M[i]:]
                assert prompt[0] in copies and prompt == list(range(prompt[0], prompt[0] + len(prompt)))
                first = int(where.start_M[i] + where.prompt_M[i])
                assert answer == list(range(first, first + t + 1))


def test_answers_to_one_prompt_stay_together_and_are_cut_only_where_the_budget_ends():
    where = layout([6] * 7, [3, 4, 3, 9, 3, 3, 3], [0, 1, 0, 1, 0, 1, 2])
    everyone = np.ones(7, np.bool_)
    assert [sorted(part.tolist()) for part in micro_batches(where, everyone, 30)] == [[1, 3, 5], [0, 2, 4, 6]]
    # a budget of 16 has no room for the second prompt with all its answers, of 8, 3 and 2 tokens
    assert [sorted(part.tolist()) for part in micro_batches(where, everyone, 16)] == [[3], [0, 2, 4], [1, 5], [6]]
    assert [part.tolist() for part in micro_batches(where.apart(), everyone, 16)] == [[3], [1], [0, 2], [4, 5], [6]]


def test_an_answer_longer_than_its_prompt_and_one_that_is_alone_are_rows_of_their_own():
    packed = pack(layout([2, 2, 2, 9], [5, 2, 2, 3], [0, 0, 0, 1]), np.arange(4))
    causal, shared = packed.calls
    # [0, 1] and [2..10] are the prompts
    assert isinstance(causal, Attention)
    assert causal.query.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [0, 1, 13, 14, 15, 16, 0, 0, 0, 0, 0]]
    assert shared.query.tolist() == [[17], [18]]
    assert shared.key is not None and shared.key.tolist() == [[0, 1, 17], [0, 1, 18]]


# -- log-probs, values and gradients -----------------------------------------------------------------------------------

CASES: dict[str, tuple[list[int], list[list[int]], int]] = {  # prompts, answers to each of them, budget
    "one answer": ([9], [[5]], ENOUGH),
    "one prompt": ([9], [[5, 3, 7, 2]], ENOUGH),
    "answers of one token": ([6, 5], [[1, 1, 1], [1, 4]], ENOUGH),
    "prompts of one token": ([1, 1], [[1, 4, 2], [3, 3]], ENOUGH),
    "prompts of several lengths": ([1, 7, 20, 31], [[4, 9, 2], [7, 3], [12, 1, 5, 5], [2, 25, 11]], ENOUGH),
    "some of them longer than the prompt": ([8], [[20, 3, 9, 5]], ENOUGH),
    "cut into parts": ([20, 4], [[12, 9, 5, 7, 2], [6, 6, 3]], 45),
    "nothing fits": ([20, 4], [[12, 9], [6, 6]], 1),
}


def batch_of(prompts: list[int], answers: list[list[int]]) -> Any:
    groups = [make_group(i, n=len(lengths), lengths=lengths, prompt_length=prompt, seed=3)
              for i, (prompt, lengths) in enumerate(zip(prompts, answers, strict=True))]
    batch = stages.assemble(rows_of(groups))
    stages.mark_tokens(batch, step=1, publish_every=1, updates_per_step=1)
    stages.mask_truncated(batch, "score")
    stages.number_tokens(batch)
    batch["trajectory", "advantage"] = torch.linspace(-1, 1, sum(map(len, answers)))
    return batch


def told(model: Policy | Critic, batch: Any, budget: int, *, share: bool) -> tuple[Tensor, dict[int, float], list[Any]]:
    """What a model says of every loss token and behind every answer, and gradients of a sum that weighs each
    differently."""
    groups = int(batch["trajectory", "group"].max()) + 1
    [minibatch] = minibatches_of(batch, ALONE, groups=groups, minibatch_groups=groups, token_budget=budget,
                                 share_prefixes=share, behind=isinstance(model, Critic))
    model.zero_grad()
    found, behind = torch.zeros(int(batch["loss_mask"].sum())), dict[int, float]()
    for micro in minibatch.micros:
        if isinstance(model, Critic):
            values = model(micro.inputs)
            value_S = values.value_S
            behind |= dict(zip(micro.order_Q.tolist(), values.behind_Q.tolist(), strict=True))
            total = values.behind_Q.square().sum()
        else:
            answer = model(micro.inputs, entropy_gradient=True)
            value_S, total = answer.logprob_S, 0.1 * answer.entropy_S.sum()
        total = total + (value_S * (1 + micro.place_S % 3)).sum()
        total.backward()
        found[micro.place_S] = value_S.detach()
    return found, behind, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(one: tuple[Tensor, dict[int, float], list[Any]],
                two: tuple[Tensor, dict[int, float], list[Any]]) -> None:
    np.testing.assert_allclose(one[0], two[0], rtol=1e-5, atol=5e-6)
    assert one[1] == pytest.approx(two[1], rel=1e-5, abs=5e-6)
    for mine, theirs in zip(one[2], two[2], strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-6


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    home = tmp_path_factory.mktemp("families")
    return {family: load_policy(write_model(home / str(i), family), logits_chunk=16, dtype=torch.float32, device=CPU)
            for i, family in enumerate(FAMILIES)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_give_the_logprobs_and_gradients_of_plain_packing_and_of_one_by_one(policies, family, case):
    prompts, answers, budget = CASES[case]
    batch, policy = batch_of(prompts, answers), policies[family]
    one_by_one = told(policy, batch, 1, share=False)
    for other in (told(policy, batch, budget, share=False), told(policy, batch, budget, share=True)):
        assert_same(other, one_by_one)


def test_answers_that_are_empty_or_masked_leave_the_others_as_they_are(policies):
    """The second answer has no loss token, of the third one the first two are masked: they have no share in anything,
    but what stands before a loss token is read."""
    batch = batch_of([12], [[5, 6, 7, 3]])
    mask = batch["loss_mask"].clone()
    cu = batch["cu_seqlens"].tolist()
    mask[cu[1]:cu[2]] = False
    mask[cu[2]:cu[2] + 14] = False
    batch["loss_mask"] = mask
    stages.number_tokens(batch)
    [minibatch] = minibatches_of(batch, ALONE, groups=1, minibatch_groups=1, token_budget=ENOUGH)
    assert len(minibatch.micros[0].inputs.input_ids_P) == 12 + 4 + 6 + 2
    for family in ("qwen3", "qwen2, sliding window of 5"):
        assert_same(told(policies[family], batch, ENOUGH, share=True), told(policies[family], batch, 1, share=False))


@pytest.mark.parametrize("case", CASES)
def test_a_critic_has_the_same_values_also_behind_the_answers(critic, case):
    prompts, answers, budget = CASES[case]
    batch = batch_of(prompts, answers)
    one_by_one = told(critic, batch, 1, share=False)
    assert sorted(one_by_one[1]) == list(range(sum(map(len, answers))))
    assert_same(told(critic, batch, budget, share=True), one_by_one)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Critic:
    made = load_critic(write_model(tmp_path_factory.mktemp("critic") / "model"), dtype=torch.float32, device=CPU)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        torch.nn.init.normal_(made.head.weight, std=0.3)
    return made


def test_in_bfloat16_sharing_changes_no_more_than_rounding_does(policies):
    batch, policy = batch_of(*CASES["prompts of several lengths"][:2]), policies["llama"]
    exact = told(policy, batch, ENOUGH, share=True)
    policy.dtype = torch.bfloat16
    try:
        shared, plain = (told(policy, batch, ENOUGH, share=share) for share in (True, False))
    finally:
        policy.dtype = torch.float32
    for found in (shared, plain):
        assert 1e-4 < float((found[0] - exact[0]).abs().mean()) < 0.05
        for mine, theirs in zip(found[2], exact[2], strict=True):
            assert float((mine - theirs).norm()) <= 0.05 * float(theirs.norm())


# -- a whole step ------------------------------------------------------------------------------------------------------


def step(model: Policy, learner: dict[str, Any]) -> StepResult:
    config = Config.model_validate({"groups_per_step": 4, "group_size": 4, "sampling": {"max_new_tokens": 12},
                                    "learner": {"lr": 1e-3, "warmup_steps": 0, **learner}})
    batch = batch_of([3, 17, 30, 9], [[5, 12, 3, 1], [2, 2, 9, 11], [12, 7, 4, 10], [8, 1, 1, 6]])
    policy = copy.deepcopy(model)
    plan = StepPlan(step=1, idx=1, learning_rate=1e-3, groups=4, minibatch_groups=config.minibatch_groups,
                    max_new_tokens=12, learner=config.learner, skipped_in_a_row=0, max_skipped=0, seed=5)
    return training_step(policy, make_optimizer(policy, config.learner), ALONE, batch, plan)


STEPS: dict[str, dict[str, Any]] = {
    "one update": {},
    "several updates": {"passes": 2, "minibatch_groups": 2},
    "a mean over sequences, and entropy": {"loss": {"name": "gspo", "entropy_coef": 0.01}},
}


@pytest.mark.parametrize("learner", STEPS.values(), ids=STEPS)
def test_loss_and_gradient_norm_of_a_step_do_not_depend_on_sharing_or_on_the_budget(policies, learner):
    model = policies["qwen3"]
    plain = step(model, {**learner, "share_prefixes": False, "token_budget": ENOUGH})
    for budget in (ENOUGH, 70, 1):
        found = step(model, {**learner, "share_prefixes": True, "token_budget": budget})
        assert found.losses == pytest.approx(plain.losses, rel=1e-5, abs=1e-7)
        assert found.gradient_norms == pytest.approx(plain.gradient_norms, rel=1e-5)
        assert found.totals == pytest.approx(plain.totals, rel=1e-4, abs=1e-4)


def test_a_step_has_the_same_bits_again(policies):
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (step(policies["qwen3"], {"token_budget": 70}) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert first.losses == second.losses and first.gradient_norms == second.gradient_norms
