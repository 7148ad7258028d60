"""What cannot work about an engine's servers, known before anything starts: named fields, the value got, what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config, SglangEngineConfig
from rl_core.errors import refuse

ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""In a server's environment: its log-probs are then not of the distribution that it samples from."""
OF_A_START: dict[str, Any] = {"replicas": 1, "tensor_parallel": 1, "script": None, "server_args": ()}
"""Settings of servers that Headway starts, with the value that asks for nothing."""


def check_engine(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse settings of servers that cannot work together, whatever the inputs. Raises ConfigError."""
    engine = config.rollout.engine
    if not isinstance(engine, SglangEngineConfig):
        return
    for name, nothing in OF_A_START.items() if engine.urls else ():
        if getattr(engine, name) != nothing:
            refuse(f"rollout.engine.{name}", getattr(engine, name), "the servers of rollout.engine.urls are there "
                   "already, and Headway starts none; leave one of the two out")
    if engine.urls and config.rollout.workers > 1:
        refuse("rollout.workers", config.rollout.workers, "one worker speaks for all servers of rollout.engine.urls, "
               "since weights reach them in one order; use 1")
    if engine.device == "cpu" and engine.tensor_parallel > 1:
        refuse("rollout.engine.tensor_parallel", engine.tensor_parallel,
               "a server on the CPU is whole; use 1, and more replicas")
    longest = config.served_tokens
    if engine.max_outstanding_tokens is not None and engine.max_outstanding_tokens < longest:
        refuse("rollout.engine.max_outstanding_tokens", engine.max_outstanding_tokens, "data.max_prompt_tokens and "
               f"the longest answer together are {longest} tokens; use at least that, or null")
    if environ.get(ORIGINAL_LOGPROB, "").lower() in ("1", "true", "yes", "on"):
        refuse(ORIGINAL_LOGPROB, environ[ORIGINAL_LOGPROB], "servers would report log-probs of another distribution "
               "than they sample from; unset it")


def missing_programs(config: Config) -> list[str]:
    """What a server is started with and this machine does not have: a line for each."""
    engine = config.rollout.engine
    if not isinstance(engine, SglangEngineConfig) or engine.urls or config.offline:
        return []
    return [*([] if shutil.which(engine.python) else [
                f"rollout.engine.python: there is no such program in {os.getcwd()} or on PATH (got {engine.python!r}); "
                "`make sglang` makes an environment for a server on the CPU, and docs/sglang.md says what one on GPUs "
                "takes"]),
            *([] if engine.script is None or Path(engine.script).is_file() else [
                f"rollout.engine.script: there is no such file in {os.getcwd()} (got {engine.script!r}); run in a "
                "checkout of Headway, or give its path"])]


def copies_of_weights(config: Config) -> int:
    """Of the model that rollout holds in memory here."""
    engine = config.rollout.engine
    if config.offline:
        return 0
    return config.rollout.workers * (engine.started if isinstance(engine, SglangEngineConfig) else 1)
