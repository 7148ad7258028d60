"""Weight versions: digests, adoption, divergence, damage and pruning, over real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_core.config import Config, StorageConfig, WeightsConfig
from rl_core.errors import StaleAttempt, WeightsDamaged
from rl_core.lora.canary import PROBE_FILE, Place, Probe, read_probe
from rl_core.run_dir import RunDir
from rl_core.versions import learn_versions, pin, read_versions, unpin
from rl_core.weights import changed_share, digest_tensors, diverged, load_weights, prune_weights, publish, write_weights
from tests.learning import start_attempt, write_model

CONFIG = Config(storage=StorageConfig(fsync=False), weights=WeightsConfig(keep=2))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"b.weight": torch.randn(3, 4, generator=generator), "a.bias": torch.randn(5, generator=generator)}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    start_attempt(made)
    return made


def test_the_digest_is_xxh3_over_name_dtype_shape_and_bytes_in_order_of_name():
    ours = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([3], dtype=torch.int64)}
    plain = b"a\0int64\x001\0" + b"\3" + b"\0" * 7 + b"b\0float32\x001x2\0" + ours["b"].numpy().tobytes()
    assert digest_tensors(ours.items()) == xxhash.xxh3_128_hexdigest(plain)


CHANGES = {
    "a value": lambda t: {**t, "a.bias": t["a.bias"] + 1e-7},
    "a name": lambda t: {"b.weight": t["b.weight"], "c.bias": t["a.bias"]},
    "a shape": lambda t: {**t, "b.weight": t["b.weight"].reshape(4, 3)},
    "a dtype": lambda t: {**t, "a.bias": t["a.bias"].view(torch.int32)},
    "a tensor less": lambda t: {"a.bias": t["a.bias"]},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_digest_sees(change):
    assert digest_tensors(change(tensors(0)).items()) != digest_tensors(tensors(0).items())


def test_the_digest_ignores_order_strides_and_tied_names():
    there = tensors(0)
    strided = {"a.bias": there["a.bias"], "b.weight": there["b.weight"].t().contiguous().t()}
    tied = {**there, "z.tied": there["b.weight"]}
    assert digest_tensors(strided.items()) == digest_tensors(there.items()) == digest_tensors(tied.items())


def test_a_model_its_state_dict_and_its_file_have_one_digest(tmp_path):
    directory = write_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    found = {digest_tensors(named) for named in (
        model.named_parameters(), model.state_dict().items(), load_file(directory / "model.safetensors").items())}
    assert len(found) == 1


def test_a_published_version_is_read_back_with_the_digest_of_its_manifest(run):
    version = publish(run, tensors(0), 0, 0, 1, CONFIG)
    assert (version.v, version.step, version.idx, version.attempt) == (0, 0, 0, 1)
    assert read_versions(run) == {0: version}
    found = load_weights(run.weights(0), version)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(0).items())


def test_the_same_bytes_for_the_same_step_are_adopted_and_other_bytes_take_a_new_name(run):
    first = publish(run, tensors(0), 4, 4, 1, CONFIG)
    assert publish(run, tensors(0), 4, 4, 1, CONFIG) == first
    other = publish(run, tensors(1), 4, 4, 1, CONFIG)
    assert (other.v, other.step) == (1, 4)
    assert diverged(run, other) == [first]
    assert publish(run, tensors(0), 5, 5, 1, CONFIG).v == 2


def test_adoption_writes_bytes_again_that_are_gone_or_rotten(run):
    version = publish(run, tensors(0), 0, 0, 1, CONFIG)
    file = run.weights(0) / "model.safetensors"
    for spoil in (file.unlink, lambda: file.write_bytes(file.read_bytes()[:-1] + b"\7")):
        spoil()
        with pytest.raises(WeightsDamaged):
            load_weights(run.weights(0), version)
        assert publish(run, tensors(0), 0, 0, 1, CONFIG) == version
        load_weights(run.weights(0), version)


def test_adoption_writes_the_probe_of_an_adapter_again_that_is_gone_or_torn(run):
    probe = Probe((Place(prompt=(1, 2), token_ids=(5, 6), adapter=(-1.0, -2.0), base=(-1.5, -1.2)),))
    version = publish(run, tensors(0), 0, 0, 1, CONFIG, probe=probe)
    file = run.weights(0) / PROBE_FILE
    for spoil in (file.unlink, lambda: file.write_bytes(b"")):
        spoil()
        assert publish(run, tensors(0), 0, 0, 1, CONFIG, probe=probe) == version
        assert read_probe(run.weights(0)) == probe


def test_bytes_left_without_a_manifest_by_a_kill_are_adopted_if_equal_and_never_overwritten(run):
    write_weights(run.weights(0), tensors(7))
    write_weights(run.weights(1), tensors(0))
    version = publish(run, tensors(0), 0, 0, 1, CONFIG)
    assert version.v == 1
    assert digest_tensors(load_file(run.weights(1) / "model.safetensors").items()) == version.digest


def test_versions_are_learned_one_by_one_over_numbers_that_never_became_real(run):
    """What a reader knows is not read again; bytes that a dead attempt left take a number with them."""
    known = {}
    for step in range(3):
        publish(run, tensors(step), step, step, 1, CONFIG, known)
        assert list(learn_versions(run, known)) == list(range(step + 1))
    reader = learn_versions(run, {})
    assert reader == known
    write_weights(run.weights(3), tensors(99))
    assert publish(run, tensors(3), 3, 3, 1, CONFIG, known).v == 4
    run.version(1).unlink()
    assert list(learn_versions(run, reader)) == [0, 1, 2, 4]
    assert learn_versions(run, known) == reader


def test_an_older_attempt_publishes_nothing(run):
    start_attempt(run, 2)
    with pytest.raises(StaleAttempt):
        publish(run, tensors(0), 0, 0, 1, CONFIG)
    assert read_versions(run) == {}


def test_pruning_keeps_the_newest_and_the_pinned(run):
    for step in range(2):
        publish(run, tensors(step), step, step, 1, CONFIG)
    pin(run, "validation-step-0", 0)
    for step in range(2, 5):
        publish(run, tensors(step), step, step, 1, CONFIG)
    assert [v for v in range(5) if run.weights(v).exists()] == [0, 3, 4]
    unpin(run, "validation-step-0", 0)
    assert prune_weights(run, 1) == [0, 3]
    assert prune_weights(run, 1) == []
    assert len(read_versions(run)) == 5
    assert sorted(os.listdir(run.weights_root)) == ["v-00000004"]


def test_bytes_in_shared_memory_are_linked_private_and_written_again_after_they_are_lost(run):
    config = CONFIG.model_copy(update={"weights": WeightsConfig(store="shm", keep=2)})
    version = publish(run, tensors(0), 0, 0, 1, config)
    target = run.weights_root.readlink()
    try:
        assert target.parent == Path("/dev/shm") and target.stat().st_mode & 0o777 == 0o700
        load_weights(run.weights(0), version)
        for file in sorted(target.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        target.rmdir()
        assert publish(run, tensors(0), 0, 0, 1, config) == version
        load_weights(run.weights(0), version)
    finally:
        for file in sorted(target.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        target.rmdir()


def test_the_changed_share_is_counted_in_the_dtype_that_the_engine_serves():
    before = {"w": torch.ones(4)}
    now = {"w": torch.tensor([1.0, 1.0 + 1e-4, 1.5, 1.0])}
    assert changed_share(before, now, torch.float32) == 0.5
    assert changed_share(before, now, torch.bfloat16) == 0.25
