"""Packed micro-batches against the stock model, one sequence at a time: log-probs, losses and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GraniteConfig, Lfm2Config

from rl_core.errors import ConfigError
from rl_core.learner import batch as stages
from rl_core.learner.attention import Call, Rows
from rl_core.learner.logprobs import _Entropy, head_likely, head_logprobs, head_others, head_squares
from rl_core.learner.micro import attention_of
from rl_core.learner.packing import Layout, Pack, fill, last_loss_token, micro_batches, pack, ragged_arange
from rl_core.learner.policy import PackInputs, Policy, load_policy
from tests.builders import make_group
from tests.learning import FAMILIES, LiveLogits, answer_logprobs, rows_of, write_model

CPU = torch.device("cpu")


def layout(prompts: list[int], answers: list[int], groups: list[int], off: tuple[int, ...] = ()) -> Layout:
    """Trajectories in a row; every answer token is in the loss but those named by their place in the claim."""
    prompt, answer = np.array(prompts), np.array(answers)
    start = np.cumsum(prompt + answer) - (prompt + answer)
    loss = np.zeros(int((prompt + answer).sum()), np.bool_)
    loss[ragged_arange(start + prompt, answer)] = True
    loss[list(off)] = False
    return Layout(start_M=start, prompt_M=prompt, used_M=last_loss_token(loss, start, prompt, answer),
                  context_M=np.array(groups), loss_T=loss)


def policy_of(directory: Path, chunk: int = 2048) -> Policy:
    return load_policy(directory, logits_chunk=chunk, dtype=torch.float32, device=CPU)


def inputs_of(batch, packed: Pack) -> PackInputs:
    def index(values):
        return torch.from_numpy(values)

    ids = batch["input_ids"]
    row_S = batch["mine"][index(packed.sequence_S)]
    return PackInputs(ids[index(packed.source_P)], batch["position_ids"][index(packed.source_P)],
                      attention_of(packed, CPU), index(packed.predictor_S), ids[index(packed.target_S)],
                      batch["trajectory", "temperature"][row_S])


FILLS = {
    "longest first": ([3, 9, 4, 4], 9, [[1], [2, 3], [0]]),
    "ties by position": ([2, 2, 2, 2], 4, [[0, 1], [2, 3]]),
    "one row over the budget is alone": ([3, 50, 3], 10, [[1], [0, 2]]),
    "nothing": ([], 10, []),
}


@pytest.mark.parametrize(("lengths", "budget", "expected"), FILLS.values(), ids=FILLS.keys())
def test_bins_are_filled_longest_first(lengths, budget, expected):
    assert [part.tolist() for part in fill(np.array(lengths, np.int64), budget)] == expected


def test_random_bins_hold_every_row_once_and_stay_in_budget():
    lengths = np.random.default_rng(1).integers(1, 40, 500)
    bins = fill(lengths, 100)
    assert sorted(np.concatenate(bins).tolist()) == list(range(500))
    assert all(lengths[part].sum() <= 100 for part in bins)


def test_a_pack_lays_a_groups_prompt_once_and_leaves_the_last_token_out():
    # two answers to one prompt of 2, one answer to another prompt of 1; claim places 0..4, 5..8, 9..11
    packed = pack(layout([2, 2, 1], [3, 2, 2], [0, 0, 1]), np.array([0, 1, 2]))
    assert packed.source_P.tolist() == [0, 1, 9, 2, 3, 7, 10]
    assert packed.target_S.tolist() == [2, 3, 4, 7, 8, 10, 11]
    assert packed.sequence_S.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert packed.predictor_S.tolist() == [1, 3, 4, 1, 5, 2, 6]
    alone, shared = packed.calls
    assert (alone.query.tolist(), alone.key, alone.before_R) == ([[2, 6], [0, 1]], None, None)
    assert shared.query.tolist() == [[3, 4], [5, 0]]
    assert shared.key is not None and shared.key.tolist() == [[0, 1, 3, 4], [0, 1, 5, 0]]
    assert shared.before_R is not None and shared.before_R.tolist() == [2]
    assert packed.home_P.tolist() == [2, 3, 0, 4, 5, 6, 1]


def test_tokens_outside_the_loss_are_read_but_not_predicted_and_trailing_ones_not_even_read():
    # prompt 1, answer of 5 with tokens 1 and 4 of it (places 2 and 5) outside the loss
    packed = pack(layout([1], [5], [0], off=(2, 5)), np.array([0]))
    assert packed.source_P.tolist() == [0, 1, 2, 3]
    assert packed.target_S.tolist() == [1, 3, 4]
    assert packed.predictor_S.tolist() == [0, 2, 3]


def test_a_trajectory_without_a_loss_token_is_in_no_micro_batch():
    where = layout([1, 1], [2, 2], [0, 0], off=(1, 2))
    assert where.used_M.tolist() == [0, 2]
    assert [part.tolist() for part in micro_batches(where, np.array([True, True]), 100)] == [[1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_entropies_are_those_of_single_sequences(tmp_path, family):
    model_dir = write_model(tmp_path / "model", family)
    stock = AutoModelForCausalLM.from_pretrained(model_dir)
    groups = [make_group(i, n=5, prompt_length=3 + 4 * i, seed=7) for i in range(4)]
    batch = stages.assemble(rows_of(groups))
    policy, where = policy_of(model_dir), stages.layout_of(batch)
    expected = np.concatenate([answer_logprobs(stock, g.lease.prompt.token_ids_P.tolist(), t.token_ids_L.tolist())
                               for g in groups for t in g.trajectories])
    tokens = int(batch["loss_mask"].sum())
    place = np.full(len(batch["input_ids"]), -1)
    place[batch["loss_mask"].numpy()] = np.arange(tokens)
    for budget in (10_000, 60, 1):
        found = np.full(tokens, np.nan)
        for members in micro_batches(where, np.ones(20, np.bool_), budget):
            packed = pack(where, members)
            found[place[packed.target_S]] = policy(inputs_of(batch, packed)).logprob_S.detach()
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_packed_gradients_are_those_of_padded_batches(tmp_path):
    model_dir = write_model(tmp_path / "model")
    stock = AutoModelForCausalLM.from_pretrained(model_dir)
    groups = [make_group(i, n=4, prompt_length=2 + 3 * i, seed=3) for i in range(3)]
    sequences = [(g.lease.prompt.token_ids_P.tolist(), t.token_ids_L.tolist()) for g in groups for t in g.trajectories]
    width = max(len(p) + len(a) for p, a in sequences)
    ids, mask = torch.ones(len(sequences), width, dtype=torch.long), torch.zeros(len(sequences), width)
    for i, (p, a) in enumerate(sequences):
        ids[i, :len(p) + len(a)] = torch.tensor(p + a)
        mask[i, len(p):len(p) + len(a)] = 1
    attended = torch.arange(width)[None] < torch.tensor([[len(p) + len(a)] for p, a in sequences])
    logits = stock(input_ids=ids, attention_mask=attended.long(), use_cache=False).logits[:, :-1]
    padded = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    padded_loss = -(padded * mask[:, 1:]).sum() / mask.sum()
    padded_loss.backward()

    policy, batch = policy_of(model_dir), stages.assemble(rows_of(groups))
    where = stages.layout_of(batch)
    loss = -policy(inputs_of(batch, pack(where, np.arange(12)))).logprob_S.sum() / mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(padded_loss.item(), rel=1e-6)
    for (name, theirs), ours in zip(stock.named_parameters(), policy.model.parameters(), strict=True):
        np.testing.assert_allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, err_msg=name)


def test_stock_attention_with_a_cache_lets_packed_sequences_see_each_other_and_ours_does_not(tmp_path):
    """The trap: stock models build the block mask only without a cache, and a cache is their default."""
    model_dir = write_model(tmp_path / "model")
    stock = AutoModelForCausalLM.from_pretrained(model_dir)
    first, second = [5, 6, 7, 8, 9], [11, 12, 13, 14]
    alone = stock(input_ids=torch.tensor([second]), use_cache=False).logits[0]
    ids, positions = torch.tensor([first + second]), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    leaking = stock(input_ids=ids, position_ids=positions).logits[0, 5:]
    apart = stock(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 5:]
    assert (leaking - alone).abs().max() > 0.1
    assert (apart - alone).abs().max() < 1e-5

    policy = policy_of(model_dir)
    caches: list[object] = []
    policy.model.base_model.register_forward_hook(
        lambda module, args, kwargs, out: caches.append((kwargs["use_cache"], out.past_key_values)), with_kwargs=True)
    rows = Rows((Call(torch.tensor([[0, 1, 2, 3, 4]])), Call(torch.tensor([[5, 6, 7, 8]]))), torch.arange(9))
    packed = PackInputs(ids[0], positions[0], rows, torch.tensor([5, 6, 7]), torch.tensor(second[1:]), torch.ones(3))
    found = policy(packed).logprob_S
    np.testing.assert_allclose(found.detach(), alone[:3].log_softmax(-1)[[0, 1, 2], second[1:]].detach(), atol=1e-6)
    assert caches == [(False, None)]


@pytest.mark.parametrize("prompt", [5, 15], ids=["answers longer than prompts", "prompts longer than answers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_sequence_changes_no_bit_of_its_neighbours_in_the_pack(tmp_path, family, prompt):
    """Groups of two answers, so that prompts are shared; one answer gets other tokens, and then one prompt does."""
    policy = policy_of(write_model(tmp_path / "model", family))
    batch = stages.assemble(rows_of([make_group(i, n=2, lengths=[9, 12], prompt_length=prompt + i) for i in range(3)]))
    packed = pack(stages.layout_of(batch), np.arange(6))
    cu, prompts = batch["cu_seqlens"].tolist(), batch["prompt_length"].tolist()
    ids = batch["input_ids"].clone()

    def logprobs(lo: int, hi: int) -> np.ndarray:
        batch["input_ids"] = ids.clone()
        batch["input_ids"][lo:hi] = (ids[lo:hi] + 31) % 97
        return policy(inputs_of(batch, packed)).logprob_S.detach().numpy()

    before = logprobs(0, 0)
    answer = logprobs(cu[2] + prompts[2], cu[3])
    np.testing.assert_array_equal(answer[packed.sequence_S != 2], before[packed.sequence_S != 2])
    assert np.median(np.abs(answer - before)[packed.sequence_S == 2]) > 1e-2
    # The prompt of the third group; its two answers share it, and the pack reads the copy of the longer one.
    shared = logprobs(cu[5], cu[5] + prompts[5])
    np.testing.assert_array_equal(shared[packed.sequence_S < 4], before[packed.sequence_S < 4])
    for one in (4, 5):
        assert np.median(np.abs(shared - before)[packed.sequence_S == one]) > 1e-2


@pytest.mark.parametrize("tokens", [300, 900])
def test_rows_of_logits_in_memory_depend_on_the_chunk_and_not_on_the_loss_tokens(tmp_path, tokens):
    policy = policy_of(write_model(tmp_path / "model"), chunk=32)
    batch = stages.assemble(rows_of([make_group(i, n=4, lengths=[tokens // 12] * 4) for i in range(3)]))
    packed = pack(stages.layout_of(batch), np.arange(12))
    assert len(packed.target_S) == tokens
    with LiveLogits(policy.model.lm_head.weight) as watched:
        policy(inputs_of(batch, packed)).logprob_S.sum().backward()
    assert watched.widest == 32 and watched.peak <= 6 * 32
    with LiveLogits(policy.model.lm_head.weight) as watched:
        found = policy(inputs_of(batch, packed), entropy_gradient=True)
        (found.logprob_S.sum() + found.entropy_S.sum()).backward()
    assert watched.widest == 32 and watched.peak <= 6 * 32
    for asked in ({"squares": True}, {"likely": (3, 90)}, {"others_SK": torch.zeros((tokens, 3), dtype=torch.long)}):
        with LiveLogits(policy.model.lm_head.weight) as watched, torch.set_grad_enabled("others_SK" in asked):
            found = policy(inputs_of(batch, packed), **asked)
            if "others_SK" in asked:
                (found.logprob_S.sum() + found.others_SK.sum()).backward()
        assert watched.widest == 32 and watched.peak <= 6 * 32, asked


BLOCKS = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2}
REFUSED = {
    "convolutions": (Lfm2Config(**BLOCKS, layer_types=["conv", "full_attention"]), r"layers \['conv'\]"),
    "an attention of its own": (BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4), "cannot be replaced"),
    "scaled logits": (GraniteConfig(**BLOCKS, logits_scaling=8.0), r"logits_scaling=8\.0"),
}


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_an_architecture_that_cannot_be_packed_is_refused_by_field_and_reason(tmp_path, config, reason):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{reason}"):
        policy_of(tmp_path)


def test_packing_is_a_pure_function_with_ties_by_position():
    where = layout([3] * 6, [4] * 6, [0, 0, 1, 1, 2, 2])
    packs = [[pack(where, part) for part in micro_batches(where, np.ones(6, np.bool_), 14)] for _ in range(2)]
    assert [p.sequence_S.tolist() for p in packs[0]] == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4, [4] * 4 + [5] * 4]
    for one, two in zip(*packs, strict=True):
        np.testing.assert_array_equal(one.source_P, two.source_P)
        np.testing.assert_array_equal(one.home_P, two.home_P)


def test_logits_in_chunks_give_the_same_logprobs_entropies_and_gradients():
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 31, bias=False)
    hidden, target, temperature = torch.randn(50, 8), torch.randint(0, 31, (50,)), torch.rand(50) + 0.5
    results = []
    for chunk in (1000, 16, 1):
        head.zero_grad()
        x = hidden.clone().requires_grad_()
        found = head_logprobs(x, head, target, temperature, chunk=chunk, entropy_gradient=True)
        (found.logprob_S.sum() + 0.1 * found.entropy_S.sum()).backward()
        results.append((found.logprob_S.detach(), found.entropy_S.detach(), x.grad, head.weight.grad.clone()))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)


def test_what_else_the_head_says_is_that_of_numpy_in_chunks_of_every_size():
    """Log-probs of other tokens and their gradient, the most likely tokens below the vocabulary, the sum of squares."""
    torch.manual_seed(1)
    head = torch.nn.Linear(8, 31, bias=False)
    hidden, temperature, ids = torch.randn(50, 8), torch.rand(50) + 0.5, torch.randint(0, 31, (50, 3))
    z = (hidden @ head.weight.T).detach().double().numpy() / temperature.double().numpy()[:, None]
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    best, of_ids = np.argsort(-p[:, :29], -1)[:, :4], np.log(np.take_along_axis(p, ids.numpy(), -1))
    dz = np.eye(31)[ids].sum(1) - 3 * p  # of the sum of the three log-probs by z
    slope = dz / temperature.double().numpy()[:, None] @ head.weight.detach().double().numpy()
    for chunk in (1000, 50, 16, 1):
        x = hidden.clone().requires_grad_()
        others = head_others(x, head, ids, temperature, chunk=chunk)
        np.testing.assert_allclose(others.detach(), of_ids, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(torch.autograd.grad(others.sum(), x)[0], slope, rtol=1e-4, atol=1e-5)
        log_SK, ids_SK = head_likely(hidden, head, temperature, top_k=4, vocabulary=29, chunk=chunk)
        np.testing.assert_array_equal(ids_SK, best)
        np.testing.assert_allclose(log_SK, np.log(np.take_along_axis(p, best, -1)), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(head_squares(hidden, head, temperature, chunk=chunk), (p**2).sum(-1), rtol=1e-5)
    assert head_likely(hidden, head, temperature, top_k=9, vocabulary=5, chunk=16)[1].shape == (50, 5)
    assert head_others(hidden[:0], head, ids[:0], temperature[:0], chunk=16).shape == (0, 3)
    assert head_squares(hidden[:0], head, temperature[:0], chunk=16).shape == (0,)


@pytest.mark.parametrize("chunk", [99, 16])
def test_a_token_of_logit_minus_infinity_is_as_if_the_vocabulary_had_it_not(chunk):
    """Log-probs, entropies, and their gradients by the hidden states and the head."""
    torch.manual_seed(0)
    hidden, temperature, weight = torch.randn(50, 8), torch.rand(50) + 0.5, torch.randn(31, 8)
    fewer, never = torch.arange(31) != 30, torch.tensor([30])
    found = []
    for head, rows in ((lambda h, w: h @ w.T, weight[fewer]),
                       (lambda h, w: (h @ w.T).index_fill(-1, never, -torch.inf), weight)):
        x, w = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
        answer = head_logprobs(x, lambda h, head=head, w=w: head(h, w), torch.arange(50) % 30, temperature, chunk=chunk,
                               entropy_gradient=True)
        (answer.logprob_S.sum() + 0.1 * answer.entropy_S.sum()).backward()
        found.append((answer.logprob_S.detach(), answer.entropy_S.detach(), x.grad, w.grad[:30]))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)
    sampled = head_logprobs(hidden, lambda h: (h @ weight.T).index_fill(-1, never, -torch.inf), never.expand(50),
                            temperature, chunk=chunk)
    assert torch.isneginf(sampled.logprob_S).all() and torch.equal(sampled.entropy_S, found[1][1])


def test_the_entropy_has_the_gradient_of_finite_differences_and_keeps_nan_visible():
    torch.manual_seed(0)
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: _Entropy.apply(z.log_softmax(-1)), logits)
    broken = torch.tensor([[0.0, torch.nan], [0.0, 0.0]])
    assert torch.isnan(_Entropy.apply(broken.log_softmax(-1))).tolist() == [True, False]


def test_logprobs_and_entropy_are_those_of_numpy_at_the_temperature():
    rng = np.random.default_rng(2)
    logits, temperature = rng.normal(size=(6, 9)).astype(np.float32), np.array([1, 0.5, 2, 1, 0.7, 1.3], np.float32)
    target = rng.integers(0, 9, 6)
    z = logits.astype(np.float64) / temperature[:, None]
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    found = head_logprobs(torch.tensor(logits), lambda h: h, torch.tensor(target), torch.tensor(temperature), chunk=99)
    np.testing.assert_allclose(found.logprob_S, np.log(p[np.arange(6), target]), rtol=1e-5)
    np.testing.assert_allclose(found.entropy_S, -(p * np.log(p)).sum(-1), rtol=1e-5)
    assert not found.entropy_S.requires_grad
