"""What the figures of engine and packing are measured on: lengths with a long tail, prompts, and models without an end.

Lengths are lognormal(sigma 0.9), as in models.md 4: the mean is a sixth of the longest. An answer has to be as long as
it was drawn, so the models are told no end token, and both sides of a comparison make the same tokens' worth of work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.config import TinyModel
from rl_core.tiny_model import make_tiny_model
from tests.learning import write_model

MEAN_TOKENS, MAX_TOKENS, SIGMA = 40, 240, 0.9
WARMUP_STEPS = 100
"""Enough that the tiny model's distributions are peaked, as those of a trained model are."""


def lengths(count: int, *, mean: float = MEAN_TOKENS, longest: int = MAX_TOKENS, seed: int = 0) -> NDArray[np.int64]:
    """Answer lengths, lognormal with this mean before the cut at `longest`."""
    drawn = np.random.default_rng([seed, 4]).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def prompts(count: int, vocabulary: int, *, seed: int = 0) -> list[NDArray[np.int32]]:
    """Distinct prompts of 8 to 24 tokens, none of them special."""
    rng = np.random.default_rng([seed, 5])
    return [rng.integers(6, vocabulary, rng.integers(8, 25)).astype(np.int32) for _ in range(count)]


def tiny_qwen3(directory: Path) -> Path:
    """The tiny model of the presets, warmed up for a short while."""
    directory.mkdir()
    make_tiny_model(directory, TinyModel(warmup_steps=WARMUP_STEPS), 1, (), 600.0, lambda done, total: None)
    return endless(directory)


def random_family(directory: Path, family: str) -> Path:
    """A random model of two layers of one architecture (tests/learning.py)."""
    return endless(write_model(directory, family))


def random_model(directory: Path, config: Any) -> Path:
    """A random model of a transformers configuration."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return endless(directory)


def endless(directory: Path) -> Path:
    """Take the end tokens away."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        settings = json.loads(path.read_text()) if path.is_file() else {}
        settings["eos_token_id"] = [] if name.startswith("generation") else None
        path.write_text(json.dumps(settings))
    return directory
