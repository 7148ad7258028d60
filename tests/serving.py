"""Settings and models for tests with real servers of SGLang (tests/contract/conftest.py starts them)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rl_core.config import Config, TinyModel
from rl_core.plan import resolve
from rl_core.rollout.sglang.server import SglangServer
from rl_core.tiny_model import make_tiny_model
from rl_core.weights import write_weights

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
SCRIPT = ROOT / "deployments" / "sglang" / "serve_cpu.py"
ENGINE: dict[str, Any] = {
    "type": "sglang", "python": str(PYTHON), "script": str(SCRIPT), "device": "cpu", "dtype": "float32",
    "max_running": 16, "start_s": 180.0,
    "server_args": ["--max-total-tokens", "16384", "--mem-fraction-static", "0.1"]}
CONTEXT = 2048
"""Of the tiny model, and of the servers here."""

StartServer = Callable[..., SglangServer]
"""`start_sglang(model_dir, **settings)`: another server, as the fixture gives it."""


def sglang_config(**engine: Any) -> Config:
    """Settings of a run on such servers whose prompts and answers fill the context."""
    return resolve({"rollout": {"engine": {**ENGINE, **engine}}, "isolated": True,
                    "data": {"max_prompt_tokens": 548}, "sampling": {"max_new_tokens": 1500}}, {})


def spread_model(directory: Path, *, seed: int, by: float = 5.0) -> Path:
    directory.mkdir(parents=True)
    make_tiny_model(directory, TinyModel(warmup_steps=0), seed, (), 60.0, lambda done, total: None)
    named = load_file(directory / "model.safetensors")
    write_weights(directory / "spread", {name: tensor * (by if tensor.dim() > 1 else 1)
                                         for name, tensor in named.items()})
    shutil.move(directory / "spread" / "model.safetensors", directory / "model.safetensors")
    (directory / "spread").rmdir()
    return directory
