"""Decoder blocks that are computed again in the backward pass: the same numbers, and what they keep meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rl_core.config import Config, LearnerConfig
from rl_core.errors import ConfigError
from rl_core.learner.attention import Call, Rows
from rl_core.learner.blocks import decoder_blocks, recompute_blocks
from rl_core.learner.critic import load_critic
from rl_core.learner.policy import PackInputs, Policy, load_policy
from rl_core.lora.plan import Linear
from rl_core.memory import activation_bytes, cache_bytes
from rl_core.model_setup import ModelFacts
from rl_core.preflight import tiny_facts
from tests.learning import FAMILIES, write_model

CPU = torch.device("cpu")
PLACES = 48
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def policy_of(directory: Path, *, dtype: str = "float32", recompute: bool = False) -> Policy:
    return load_policy(directory, logits_chunk=8, dtype=DTYPES[dtype], device=CPU, recompute=recompute)


def pack_of_one() -> PackInputs:
    here = torch.arange(PLACES)
    return PackInputs(here % 7 + 2, here, Rows((Call(here[None]),), here), here[:-1], here[1:] % 7 + 2,
                      torch.ones(PLACES - 1))


def kept_bytes(policy: Policy) -> int:
    """Bytes that the backward pass of one pack holds, weights and their casts not counted."""
    own = {parameter.shape for parameter in policy.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape not in own and tensor.shape[::-1] not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy(pack_of_one())
    return sum(seen.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recomputed_model_has_the_same_log_probs_and_gradients_bit_for_bit(tmp_path: Path, family: str,
                                                                             dtype: str) -> None:
    directory = write_model(tmp_path, family)
    found = []
    for recompute in (False, True):
        policy = policy_of(directory, dtype=dtype, recompute=recompute)
        logprob_S = policy(pack_of_one()).logprob_S
        logprob_S.sum().backward()
        found.append((logprob_S.detach(), {name: p.grad for name, p in policy.weights().items()}))
    (one, gradients), (two, again) = found
    assert torch.equal(one, two) and gradients.keys() == again.keys()
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.abs().sum() > 0 and torch.equal(gradient, again[name]), name


def test_a_recomputed_critic_has_the_same_gradients(tmp_path: Path) -> None:
    directory, found = write_model(tmp_path), []
    for recompute in (False, True):
        critic = load_critic(directory, dtype=torch.float32, device=CPU, recompute=recompute)
        nn.init.constant_(critic.head.weight, 0.1)
        critic(pack_of_one()).value_S.sum().backward()
        found.append([parameter.grad for parameter in critic.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_of_a_recomputed_block_its_input_alone_is_kept(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    whole, inputs = (kept_bytes(policy_of(directory, recompute=recompute)) for recompute in (False, True))
    hidden, blocks = 64, len(decoder_blocks(policy_of(directory).model))
    assert blocks == 2 and whole > 10 * blocks * 4 * hidden * PLACES
    assert inputs - blocks * 4 * hidden * PLACES < 0.2 * whole, "the rest is of embedding, last norm and head"


def test_a_model_that_names_no_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^learner\.recompute: model\.path: here is a Linear, which names no"):
        recompute_blocks(nn.Linear(2, 2), "model.path: here")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_estimate_of_the_plan_is_near_what_is_kept(tmp_path: Path, family: str, dtype: str) -> None:
    policy = policy_of(write_model(tmp_path, family), dtype=dtype)
    facts = ModelFacts(parameters=1, context=256, vocabulary=64, eos_token_ids=(), layers=tuple(
        Linear(name.removesuffix(".weight"), *weight.shape) for name, weight in policy.model.named_parameters()
        if ".layers." in name and weight.ndim == 2))
    learner = LearnerConfig(token_budget=PLACES, logits_chunk=1, dtype=dtype)  # pyright: ignore[reportArgumentType]
    of_blocks = activation_bytes(facts, learner) - activation_bytes(replace(facts, layers=facts.layers[:7]), learner)
    both = kept_bytes(policy)
    policy.model.base_model.layers = policy.model.base_model.layers[:1]  # pyright: ignore
    kept = both - kept_bytes(policy)
    print(f"{family}, {dtype}: {of_blocks / kept:.2f} of {kept} bytes")
    assert 0.75 < of_blocks / kept < 1.5


def test_recomputing_leaves_one_block_and_the_inputs_of_all_in_the_estimate() -> None:
    facts = ModelFacts(parameters=1, context=1, vocabulary=1000, eos_token_ids=(), layers=tuple(
        Linear(f"model.layers.{i}.mlp.down_proj", 100, 300) for i in range(10)))
    learner = LearnerConfig(token_budget=1000, logits_chunk=10, dtype="bfloat16")
    logits = 10 * 1000 * 16
    block = 44 * 100 + 8 * 300
    assert activation_bytes(facts, learner) == 1000 * 10 * block + logits
    again = learner.model_copy(update={"recompute": True})
    assert activation_bytes(facts, again) == 1000 * (10 * 4 * 100 + block) + logits
    assert activation_bytes(replace(facts, layers=()), learner) == 0


def test_the_cache_is_of_all_slots_at_their_longest() -> None:
    config = Config()
    facts = tiny_facts(config.model)  # pyright: ignore[reportArgumentType]
    keys_and_values = sum(layer.outputs for layer in facts.layers if layer.name.endswith(("k_proj", "v_proj")))
    slots, places = config.rollout.engine.slots, config.served_tokens  # pyright: ignore
    assert cache_bytes(facts, config) == slots * places * keys_and_values * 4
