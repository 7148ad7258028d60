"""Slot models against transformers' own forward passes, on real (tiny, random) checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rl_core.errors import WeightsDamaged
from rl_core.rollout.decoder import FunctionalModel, pack
from rl_core.rollout.models import RecomputeModel, load_model, read_model_tensors

COMMON: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
ARCHITECTURES: dict[str, tuple[PreTrainedConfig, type]] = {
    "llama": (LlamaConfig(**COMMON, num_key_value_heads=4), FunctionalModel),
    "llama, biases, llama3 rope": (LlamaConfig(**COMMON, num_key_value_heads=1, attention_bias=True, mlp_bias=True,
                                               rope_parameters=LLAMA3), FunctionalModel),
    "qwen2": (Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True), FunctionalModel),
    "qwen3, wide heads": (Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32), FunctionalModel),
    "gpt2": (GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=256), RecomputeModel),
    "mistral, sliding window": (MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=8), RecomputeModel),
}


def write_random(config: PreTrainedConfig, directory: Path, seed: int = 0) -> Any:
    """A checkpoint with large random weights, so that a wrong term shows; norm weights and biases random too."""
    generator = torch.Generator().manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.15 if parameter.dim() > 1 else 0.3
            offset = 0.0 if parameter.dim() > 1 else 1.0
            parameter.copy_(offset + spread * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_random(ARCHITECTURES["qwen3, wide heads"][0], directory)
    return directory


def contexts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(0, 61, size=length).astype(np.int32) for length in lengths]


@torch.inference_mode()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefill_and_decode_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    config, kind = ARCHITECTURES[name]
    reference = write_random(config, tmp_path)
    model = load_model(tmp_path, slots=6, dtype="float32", device="cpu")
    assert type(model) is kind
    assert (model.vocabulary, model.context) == (61, 256)
    prompts, owners = contexts(5, 18, 33), [0, 1, 1, 2]
    rows = [list(prompts[owner]) for owner in owners]

    def check(logits: torch.Tensor) -> None:
        expected = torch.stack([reference(torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    check(model.prefill(prompts, owners, 0))
    rng = np.random.default_rng(7)
    for _ in range(40):  # beyond the first capacity of the cache
        token = rng.integers(0, 61, size=4)
        logits = model.decode(token, np.array([len(row) for row in rows]))
        for row, value in zip(rows, token, strict=True):
            row.append(value)
    check(logits)


@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_among_others(qwen3: Path) -> None:
    """What a request samples may not depend on what else runs: prompts alone, together, in other rows, moved."""
    prompts = contexts(3, 19, 40, 130, 7)
    token = np.arange(10, 50)

    def alone(i: int) -> list[torch.Tensor]:
        model = load_model(qwen3, slots=1, dtype="float32", device="cpu")
        bits = [model.prefill([prompts[i]], [0], 0)[0]]
        bits += [model.decode(token[k:k + 1], np.array([len(prompts[i]) + k]))[0] for k in range(40)]
        return bits

    crowd = load_model(qwen3, slots=33, dtype="float32", device="cpu")
    order = [0, 1, 2, 3, 4, *[2] * 28]
    logits = [crowd.prefill(prompts, order, 0)]
    position = np.array([len(prompts[i]) for i in order])
    for k in range(40):
        if k == 20:  # row 1 ends; the last row takes its place
            crowd.move(np.array([32]), np.array([1]), 200)
            order, position = [0, 2, *order[2:32]], np.append(position[[0, 32]], position[2:32])
        logits.append(crowd.decode(np.full(len(order), token[k]), position))
        position = position + 1
    for i, row in ((0, 0), (3, 3), (4, 4), (2, 31)):
        for k, expected in enumerate(alone(i)):
            assert torch.equal(logits[k][row], expected), (i, k)
    moved = alone(2)
    assert all(torch.equal(logits[k][1], moved[k]) for k in range(21, 41))


@torch.inference_mode()
def test_bfloat16_stays_near_float32(qwen3: Path) -> None:
    prompts = contexts(9, 30)
    exact, coarse = (load_model(qwen3, slots=2, dtype=dtype, device="cpu").prefill(prompts, [0, 1], 0)
                     for dtype in ("float32", "bfloat16"))
    assert coarse.dtype == torch.float32
    assert 0 < (exact.log_softmax(-1) - coarse.log_softmax(-1)).abs().mean() < 0.1


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3, wide heads", "gpt2"])
def test_installed_weights_answer_like_a_model_loaded_with_them(name: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name][0]
    write_random(config, tmp_path / "a", seed=1)
    write_random(config, tmp_path / "b", seed=2)
    model, other = (load_model(tmp_path / part, slots=2, dtype="float32", device="cpu") for part in "ab")
    expected = other.prefill(contexts(12), [0], 0)
    assert not torch.allclose(model.prefill(contexts(12), [0], 0), expected)
    model.install(model.prepare(read_model_tensors(tmp_path / "b") if name != "gpt2" else dict(
        AutoModelForCausalLM.from_pretrained(tmp_path / "b").named_parameters())))
    assert torch.equal(model.prefill(contexts(12), [0], 0), expected)


@pytest.mark.parametrize("damage", ["absent", "other shape"])
def test_weights_that_do_not_fit_are_refused(damage: str, qwen3: Path) -> None:
    model = load_model(qwen3, slots=1, dtype="float32", device="cpu")
    named = read_model_tensors(qwen3)
    name = "model.layers.1.mlp.down_proj.weight"
    if damage == "absent":
        del named[name]
    else:
        named[name] = named[name][:, :-1]
    with pytest.raises(WeightsDamaged, match="do not fit the model"):
        model.prepare(named)


def test_max_context_shortens_but_never_lengthens(qwen3: Path) -> None:
    sizes = [load_model(qwen3, slots=1, dtype="float32", device="cpu", max_context=limit).context
             for limit in (None, 100, 1000)]
    assert sizes == [256, 100, 256]


def test_packing_writes_each_context_to_all_its_rows() -> None:
    packing = pack(np.array([3, 2]), 16, np.array([0, 0, 1]), torch.device("cpu"))
    assert packing.position_T.tolist() == [0, 1, 2, 0, 1]
    assert packing.padded_T.tolist() == [0, 1, 2, 16, 17]
    assert packing.last_C.tolist() == [2, 4]
    assert packing.row_W.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert packing.row_token_W.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert packing.row_position_W.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
