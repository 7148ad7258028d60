"""The engine as a run opens it: the servers that the settings name, each checked before it serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rl_core.config import Config, SglangEngineConfig
from rl_core.rollout.sglang.agreement import check_agreement
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.checks import check_server
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.rollout.sglang.sending import read_address
from rl_core.rollout.sglang.server import SglangServer
from rl_core.rollout.sglang.wire import MODEL_INFO, UNNAMED
from rl_core.run_dir import RunDir


def open_servers(model_dir: Path, config: Config, logs: Sequence[Path], sender: RunDir | None = None) -> SglangEngine:
    """`logs`: of the servers that are started, one each; none with `rollout.engine.urls`. Returns when all serve.
    `sender`: the run whose learner sends weights (transport `collective`).

    Raises EngineStartFailed, ConfigError for a server that is not what the run needs, EngineMismatch.
    """
    settings = cast(SglangEngineConfig, config.rollout.engine)
    context = config.served_tokens
    width = settings.tensor_parallel
    gpus = [range(i * width, (i + 1) * width) if settings.device == "cuda" else None for i in range(len(logs))]
    processes = [SglangServer(model_dir, config=settings, log=log, context=context, gpus=which)
                 for log, which in zip(logs, gpus, strict=True)]
    return SglangEngine(model_dir, config=settings, processes=processes, context=context,
                        check=Checks(config, model_dir),
                        sender=None if sender is None else lambda: read_address(sender),
                        swap_s=config.deadlines.swap_s / 2)  # the other half is for what comes in its place


class Checks:
    """Of every server at every start; log-probs of the first one alone, as long as it has the model's own weights."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        self._config, self._model_dir = config, model_dir
        self._agreed = False

    def __call__(self, url: str) -> None:
        check_server(url, self._config, self._model_dir)
        if not self._agreed and ask(url, MODEL_INFO).fields.get("weight_version") == UNNAMED:
            self._agreed = True
            check_agreement(url, self._config, self._model_dir)
