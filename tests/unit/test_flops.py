"""Model FLOPs: what is counted, and where nothing can be said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from rl_core.learner.flops import ModelSize, claim_places, measured_peak, model_size, step_flops
from tests.builders import make_group
from tests.learning import rows_of, write_model

BLOCK = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
"""Matrices of the two layers of `write_model`: attention with half as many key heads, and the MLP."""


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_parameters_are_those_of_matrix_products(tmp_path: Path, family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / family, family))
    size = model_size(model)
    assert size is not None and (size.layers, size.width) == (2, 64)
    small = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert size.parameters == BLOCK + small + 97 * 64, "the head once, whether it shares the embeddings or not"


def test_a_claim_is_prompts_once_and_pairs_under_the_causal_mask() -> None:
    rows = rows_of([make_group(0, n=2, lengths=[2, 3], prompt_length=4),
                    make_group(1, n=1, lengths=[1], prompt_length=2)])
    assert claim_places(rows) == (9 + 3, (8 + 8 + 2 + 12 + 4.5) + (2 + 2 + 0.5))


PASSES: dict[str, tuple[dict[str, Any], float]] = {
    "one update": ({"passes": 1, "proximal": False}, 6.0),
    "and a proximal pass": ({"passes": 1, "proximal": True}, 8.0),
    "four passes": ({"passes": 4, "proximal": True}, 26.0),
}


@pytest.mark.parametrize(("of", "factor"), PASSES.values(), ids=PASSES)
def test_a_step_is_three_forwards_a_pass(of: dict[str, Any], factor: float) -> None:
    size = ModelSize(parameters=10**6, layers=2, width=128)
    assert step_flops(size, 100, 0, **of) == factor * 1e8
    assert step_flops(size, 0, 50, **of) == factor / 2 * 4 * 2 * 128 * 50


def test_nothing_is_said_of_models_with_experts() -> None:
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                             num_attention_heads=2, num_key_value_heads=2, num_local_experts=2))
    assert model_size(model) is None


def test_the_peak_is_measured_once() -> None:
    first = measured_peak("cpu", "float32", 1)
    assert np.isfinite(first) and first > 1e8 and measured_peak("cpu", "float32", 1) == first
