"""A whole run that trains an adapter: engines serve it, its base is the reference, and it comes back bit by bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rl_core.checkpoint import newest_whole
from rl_core.lora.canary import read_probe
from rl_core.lora.tensors import is_adapter
from rl_core.records import read_record
from rl_core.run_dir import read_json
from rl_core.versions import read_versions
from rl_core.weights import WEIGHTS_FILE, digest_tensors, read_tensors
from tests.learning import same_again
from tests.runs import Home, ended

pytestmark = [pytest.mark.slow, pytest.mark.algorithms]

STEPS = 6
SETTINGS = ("groups_per_step=4", "group_size=4", "data.size=256", "data.validation_size=16", "validation.every=3",
            "checkpoint.every=2", "learner.warmup_steps=0", "learner.lr=5e-3", "learner.lora.rank=8", "weights.keep=9",
            "learner.kl={use: loss, coef: 0.02}", f"total_steps={STEPS}")


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_a_run_with_an_adapter_is_stopped_goes_on_and_is_replayed_and_exported(home: Home, tmp_path: Path,
                                                                               publish: str) -> None:
    asked = (*SETTINGS, f"learner.lora.publish={publish}")
    first = home.train(publish, *asked)
    first.wait_for_step(2)
    first.process.send_signal(signal.SIGINT)
    assert first.wait(600) == 130, first.err[-3000:]
    command = home.train(publish, *asked)
    run = ended(command)
    records = [read_record(run, step) for step in range(STEPS)]
    assert len({record.attempt for record in records}) == 2
    assert records[0].metrics["train/kl_reference"] == 0.0 < records[-1].metrics["train/kl_reference"]
    assert all(record.metrics["train/mismatch_alarm"] == 0.0 for record in records)
    assert all(record.metrics["weights/changed"] > 0.1 for record in records)

    saved = newest_whole(run)
    assert saved is not None and saved.state.n == STEPS and is_adapter(saved.parameters)
    assert saved.state.weights_digest == records[-1].weights_digest and saved.roles == {}
    last = max(read_versions(run).values(), key=lambda version: version.v)
    held, probe = read_tensors(run.weights(last.v) / WEIGHTS_FILE), read_probe(run.weights(last.v))
    assert is_adapter(held) == (publish == "adapter") and digest_tensors(held.items()) == last.digest
    assert probe is not None
    apart = [abs(a - b) for place in probe.places for a, b in zip(place.adapter, place.base, strict=True)]
    assert max(apart) > 1e-2
    assert read_json(run.validation(STEPS))["digest"] == last.digest

    same_again(run, STEPS)
    exported = home.call("export", publish, "--out", str(tmp_path / "out"), "--json")
    assert exported.process.returncode == 0, exported.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.json["step"] == STEPS and exported.json["version"] == last.v
    assert digest_tensors(model.named_parameters()) == exported.json["weights_digest"]


def test_layers_that_the_model_does_not_have_are_refused_before_anything_starts(home: Home) -> None:
    command = home.train("nowhere", "learner.lora={rank: 8, target_modules: [query]}")
    assert command.wait() != 0
    assert "learner.lora.target_modules: no linear layer of the model's blocks has this name" in \
        command.out + command.err
    assert not command.run.root.exists() or not command.run.records.exists()
