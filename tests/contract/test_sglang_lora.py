"""An adapter that is published merged, served by a real server: the canary sees it, and sees where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.config import Config, SglangEngineConfig
from rl_core.errors import AdapterNotServed
from rl_core.learner.policy import load_policy
from rl_core.learner.probing import PROMPTS, adapter_probe
from rl_core.lora.settings import LoraConfig
from rl_core.lora.tensors import merged
from rl_core.rollout.canary import check_adapter_served
from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.rollout.sglang.server import SglangServer
from rl_core.types import WeightVersion
from rl_core.weights import digest_tensors, write_weights
from tests.serving import ENGINE

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
LORA = LoraConfig(rank=4)


@pytest.fixture
def engine(sglang_server: SglangServer, sglang_model: Path) -> Iterator[SglangEngine]:
    """An engine over the server of the session, which gets the model's own weights at the end."""
    settings = SglangEngineConfig.model_validate({**ENGINE, "urls": (sglang_server.url,)})
    opened = SglangEngine(sglang_model, config=settings)
    yield opened
    opened.close()
    body = {"model_path": str(sglang_model), "weight_version": wire.UNNAMED, "flush_cache": True}
    assert ask(sglang_server.url, wire.UPDATE_FROM_DISK, body).status == 200


def test_the_canary_tells_a_server_with_the_adapter_from_one_without(engine: SglangEngine, sglang_model: Path,
                                                                     tmp_path: Path) -> None:
    policy = load_policy(sglang_model, logits_chunk=64, dtype=torch.float32, device=torch.device("cpu"), lora=LORA)
    lots = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.weights().items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=lots) * 0.02)
    probe, base = adapter_probe(policy, room=64), {name: p.detach() for name, p in policy.base_weights().items()}
    settings: dict[str, Any] = {"type": "sglang", "urls": ["http://127.0.0.1:1"], **ENGINE}
    config = Config.model_validate({"learner": {"lora": LORA.model_dump()}, "rollout": {"engine": settings}})

    def published(v: int, tensors: dict[str, torch.Tensor]) -> tuple[WeightVersion, Path]:
        directory = tmp_path / f"v-{v}"
        write_weights(directory, tensors, probe)
        return WeightVersion(v=v, step=v, idx=v, attempt=1, digest=digest_tensors(tensors.items())), directory

    whole = {name: tensor.detach() for name, tensor in merged(base, policy.weights(), LORA.scale).items()}
    version, directory = published(1, whole)
    engine.swap(version, directory)
    found = check_adapter_served(engine, version, directory, config)
    assert found is not None and found.deciding > PROMPTS / 2 and found.of_base == 0
    assert found.gap < 1e-4 < found.base_gap
    version, directory = published(2, base)  # what a merge that leaves the adapter out would publish
    engine.swap(version, directory)
    with pytest.raises(AdapterNotServed, match=r"version 2 \(step 2\) answers as the base model"):
        check_adapter_served(engine, version, directory, config)
