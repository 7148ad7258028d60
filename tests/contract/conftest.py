"""Real servers of SGLang for the contract tests: started once, ended with the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.rollout.sglang.server import SglangServer
from tests.serving import CONTEXT, PYTHON, StartServer, sglang_config, spread_model


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without a warm-up; its weights are spread, so that log-probs differ much from token to token."""
    return spread_model(tmp_path_factory.mktemp("sglang") / "model", seed=1)


@pytest.fixture(scope="session")
def start_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """`start_sglang(model_dir, **settings)` starts another real server (20 s of one core); it ends with the session."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON}: no environment for a server; `make sglang` makes it, `make test-sglang` runs these")
    servers: list[SglangServer] = []

    def start(model_dir: Path, **engine: Any) -> SglangServer:
        log = tmp_path_factory.getbasetemp() / f"sglang-{len(servers)}.log"
        server = SglangServer(model_dir, config=sglang_config(**engine).rollout.engine, log=log, context=CONTEXT)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def sglang_server(sglang_model: Path, start_sglang: StartServer) -> SglangServer:
    """One server for all tests that leave it alive, over `sglang_model`; a test that gives it other weights puts these
    back."""
    return start_sglang(sglang_model)
