"""The engine that the settings name, for a rollout worker. Whatever an engine needs is imported when it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_core.config import Config, TorchEngine
from rl_core.rollout.engine import Engine
from rl_core.run_dir import RunDir


def open_engine(config: Config, model_dir: Path, logs: Sequence[Path], run: RunDir | None = None) -> Engine:
    """An engine over the model of this directory, at first with its weights.

    `logs`: of the servers that it starts, one each; they are `config.servers_started`. `run`: whose learner sends
    weights to servers (transport `collective`); None: all engines read the files. Raises ConfigError for a
    model or a server that cannot be used, EngineStartFailed for a server that does not serve.
    """
    settings = config.rollout.engine
    if isinstance(settings, TorchEngine):
        from rl_core.rollout import torch_engine

        return torch_engine.TorchEngine(
            model_dir, slots=settings.slots, threads=settings.threads, dtype=settings.dtype, device=settings.device,
            max_context=config.data.max_prompt_tokens + config.sampling.max_new_tokens,
            adapter_scale=config.learner.lora.scale)
    from rl_core.rollout.sglang.opening import open_servers

    return open_servers(model_dir, config, logs, sender=run)
