"""Checkpoints: whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_core.checkpoint import (
    MANIFEST,
    CheckpointState,
    best_checkpoint,
    checkpoints,
    is_whole,
    newest_whole,
    read_checkpoint,
    read_parameters,
    sweep_aside,
    write_checkpoint,
)
from rl_core.config import CheckpointConfig
from rl_core.errors import CheckpointDamaged, StaleAttempt
from rl_core.model_setup import model_digests
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.types import WeightVersion
from rl_core.versions import pin, put_version, unpin
from rl_core.weights import digest_tensors
from tests.learning import start_attempt


def state(n: int, version_step: int | None = None) -> CheckpointState:
    return CheckpointState(n=n, revision=0, weights_digest="d" * 32, version_digest="d" * 32, skipped_in_a_row=n % 3,
                           version_step=n if version_step is None else version_step)


def write(run: RunDir, n: int, *, version: dict[str, torch.Tensor] | None = None, attempt: int = 1,
          settings: CheckpointConfig | None = None) -> Path:
    parameters = {"w": torch.full((3,), float(n))}
    optimizer = {"exp_avg/w": torch.full((3,), n / 7), "step/w": torch.tensor(float(n))}
    return write_checkpoint(run, state(n, None if version is None else n - 1), parameters=parameters,
                            optimizer=optimizer, version=version, attempt=attempt, fsync=False,
                            settings=settings or CheckpointConfig(keep=2, best=None))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    start_attempt(made)
    return made


def test_a_checkpoint_is_read_back_bit_for_bit(run):
    write(run, 4)
    found = read_checkpoint(run, 4)
    assert found.state == state(4)
    assert torch.equal(found.parameters["w"], torch.full((3,), 4.0))
    assert torch.equal(found.optimizer["exp_avg/w"], torch.full((3,), 4 / 7))
    assert found.optimizer["step/w"].shape == ()
    assert found.version is found.parameters


def test_the_bytes_of_an_earlier_publication_are_kept_beside_the_parameters(run):
    write(run, 5, version={"w": torch.tensor([9.0])})
    found = read_checkpoint(run, 5)
    assert found.state.version_step == 4
    assert found.version["w"].tolist() == [9.0]


def test_only_the_newest_are_kept(run):
    for n in (2, 4, 6, 8):
        write(run, n)
    assert checkpoints(run) == [6, 8]
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")] == []


def validate(run: RunDir, step: int, accuracy: float | None, **fields: object) -> None:
    put_if_absent(run.validation(step), to_json({"step": step, "greedy_accuracy": accuracy, **fields}))


KEPT = {
    "the newest": ({"best": None}, {}, [70, 80]),
    "every 30th": ({"best": None, "keep_every": 30}, {}, [30, 60, 70, 80]),
    "every 20th, one newest": ({"best": None, "keep_every": 20, "keep": 1}, {}, [20, 40, 60, 80]),
    "the best": ({}, {20: 0.5, 40: 0.9, 60: 0.7}, [40, 70, 80]),
    "the first of equals": ({}, {20: 0.9, 40: 0.9}, [20, 70, 80]),
    "the one before the best": ({}, {45: 0.9, 60: 0.7}, [40, 70, 80]),
    "the best and every 30th": ({"keep_every": 30}, {40: 0.9}, [30, 40, 60, 70, 80]),
    "the best is among the newest": ({}, {40: 0.1, 70: 0.9}, [70, 80]),
    "the initial model is the best": ({}, {0: 0.9, 40: 0.5}, [70, 80]),
    "a value that is not known": ({}, {40: None, 50: 0.2}, [50, 70, 80]),
    "no validation": ({}, {}, [70, 80]),
}


@pytest.mark.parametrize(("settings", "accuracies", "kept"), KEPT.values(), ids=KEPT)
def test_what_is_kept(run, settings, accuracies, kept):
    """Every validation has ended when the next checkpoint is written."""
    for n in range(10, 90, 10):
        write(run, n, settings=CheckpointConfig.model_validate({"keep": 2, **settings}))
        for step in [step for step in accuracies if step < n + 10]:
            validate(run, step, accuracies[step])
    assert checkpoints(run) == kept


def test_the_best_is_told_from_the_disk_alone(run):
    assert best_checkpoint(run, "greedy_accuracy") is None
    for step, accuracy, mean in ((0, 0.3, 0.2), (20, 0.8, 0.1), (40, 0.8, 0.4), (50, 0.7, 0.5)):
        validate(run, step, accuracy, by_source={"gsm8k": {"mean_at_n": mean}})
    assert best_checkpoint(run, "greedy_accuracy") is None  # nothing at or before step 20
    for n in (20, 40, 60):
        write(run, n, settings=CheckpointConfig(keep=3))
    assert best_checkpoint(run, "greedy_accuracy") == 20
    assert best_checkpoint(run, "by_source.gsm8k.mean_at_n") == 40
    assert best_checkpoint(run, "sampled_accuracy") is None


def test_what_is_still_validated_is_kept_until_its_record_is_there(run):
    settings = CheckpointConfig(keep=1)
    for n in (10, 20):
        put_version(run, WeightVersion(v=n, step=n, idx=n, attempt=1, digest="d"))
    pin(run, "validate", 10)
    write(run, 10, settings=settings)
    write(run, 20, settings=settings)
    pin(run, "validate", 20)
    write(run, 30, settings=settings)
    assert checkpoints(run) == [10, 20, 30]
    validate(run, 10, 0.4)
    validate(run, 20, 0.6)
    unpin(run, "validate", 10)
    unpin(run, "validate", 20)
    write(run, 40, settings=settings)
    assert checkpoints(run) == [20, 40]
    validate(run, 40, 0.7)
    write(run, 50, settings=settings)
    assert checkpoints(run) == [40, 50]


def test_a_checkpoint_before_the_last_publication_is_kept_until_that_is_validated(run):
    """Published every 4 steps, so what is validated behind checkpoint 30 has 28 steps; the checkpoint before is 20."""
    settings = CheckpointConfig(keep=1)
    write(run, 20, settings=settings)
    write_checkpoint(run, state(30, 28), parameters={"w": torch.ones(1)}, optimizer={}, version={"w": torch.ones(1)},
                     attempt=1, settings=settings, fsync=False)
    assert checkpoints(run) == [20, 30]
    validate(run, 28, 0.9)
    write(run, 40, settings=settings)
    assert checkpoints(run) == [20, 40]


def test_a_best_that_no_validation_tells_is_a_warning(run, caplog):
    settings = CheckpointConfig(keep=1, best="by_source.gsm8k.greedy_accuracy")
    write(run, 10, settings=settings)
    assert caplog.records == []
    validate(run, 10, 0.5, by_source={"math": {"greedy_accuracy": 0.5, "mean_at_n": None}})
    write(run, 20, settings=settings)
    [said] = [record.getMessage() for record in caplog.records]
    assert said == ("checkpoint.best: no validation has a number 'by_source.gsm8k.greedy_accuracy', so no best "
                    "checkpoint is kept; there are greedy_accuracy, by_source.math.greedy_accuracy")
    assert checkpoints(run) == [20]


def test_parameters_are_read_without_the_optimizer_and_checked(run):
    parameters = {"w": torch.arange(3.0)}
    made = replace(state(4), weights_digest=digest_tensors(parameters.items()))
    directory = write_checkpoint(run, made, parameters=parameters, optimizer={}, version=None, attempt=1, fsync=False,
                                 settings=CheckpointConfig())
    (directory / "optimizer.safetensors").unlink()
    found, tensors = read_parameters(run, 4)
    assert found == made and tensors["w"].tolist() == [0.0, 1.0, 2.0]
    bit_flip(directory)
    with pytest.raises(CheckpointDamaged, match=r"parameters.safetensors: does not match"):
        read_parameters(run, 4)
    with pytest.raises(CheckpointDamaged, match=r"n-000000005"):
        read_parameters(run, 5)


def test_there_is_none_before_the_first(run):
    assert newest_whole(run) is None


def bit_flip(directory: Path) -> None:
    file = directory / "parameters.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(raw)


def forget_a_field(directory: Path) -> None:
    payload = json.loads((directory / MANIFEST).read_text())
    del payload["version_step"]
    (directory / MANIFEST).write_text(json.dumps(payload))


def another_number(directory: Path) -> None:
    text = (directory / MANIFEST).read_text()
    skipped = json.loads(text)["skipped_in_a_row"]
    changed = text.replace(f'"skipped_in_a_row": {skipped}', '"skipped_in_a_row": 7')
    assert changed != text
    (directory / MANIFEST).write_text(changed)


DAMAGE = {
    "a flipped bit": bit_flip,
    "a truncated file": lambda d: cut(d / "optimizer.safetensors"),
    "a file gone": lambda d: (d / "optimizer.safetensors").unlink(),
    "no manifest": lambda d: (d / MANIFEST).unlink(),
    "half a manifest": lambda d: (d / MANIFEST).write_text((d / MANIFEST).read_text()[:40]),
    "a manifest without a field": forget_a_field,
    "a manifest with another number": another_number,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it_and_in_the_end_to_the_initial_model(run, damage, caplog):
    for n in (2, 4):
        write(run, n)
    damage(run.checkpoint(4))
    with pytest.raises(CheckpointDamaged):
        read_checkpoint(run, 4)
    found = newest_whole(run)
    assert found is not None and found.state.n == 2
    [said] = [record.getMessage() for record in caplog.records]
    assert str(run.checkpoint(4)) in said and said.endswith("the run goes on from checkpoint 2")
    damage(run.checkpoint(2))
    assert newest_whole(run) is None
    assert len(caplog.records) == 3
    assert "from the initial model" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_under_a_window_no_run_goes_back_to_step_0_by_itself(run, damage):
    for n in (2, 4):
        damage(write(run, n))
    with pytest.raises(CheckpointDamaged) as refused:
        newest_whole(run, "window")
    said = str(refused.value)
    assert said.startswith(f"{run.checkpoints}: no checkpoint is whole (")
    assert said.index(str(run.checkpoint(4))) < said.index(str(run.checkpoint(2))), "each, the newest first"
    assert said.endswith("the run does not go back to step 0 by itself: retention.replay is window. Restore one of "
                         "them from a copy, or have every recorded step trained again from the initial weights (their "
                         "shards are all there): `headway train --run-key run --set retention.replay=all`")
    write(run, 4)
    assert newest_whole(run, "window").state.n == 4


@pytest.mark.parametrize("replay", ["all", "window"])
def test_a_run_that_was_killed_in_its_first_checkpoint_begins_at_step_0(run, replay):
    assert newest_whole(run, replay) is None, "nothing written yet"
    for name in (f".n-000000002.{'0' * 12}.tmp", ".n-000000002.7-0123456789ab.tmp"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "parameters.safetensors").write_bytes(b"half")
    assert newest_whole(run, replay) is None


def test_without_a_whole_checkpoint_only_the_model_that_the_run_began_with_will_do(run):
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"weights")
    put_if_absent(run.inputs, to_json({"digests": {**model_digests(run.model), "data": "d"}}))
    bit_flip(write(run, 2))
    assert newest_whole(run) is None
    (run.model / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(CheckpointDamaged, match=r"no checkpoint is whole .*n-000000002.* not what the run began with "
                                                r"\(model differ\)\. Restore one of them from a copy, or put that "
                                                r"model back$"):
        newest_whole(run)
    write(run, 4)
    assert newest_whole(run).state.n == 4  # a whole checkpoint needs no initial model


def test_a_manifest_from_before_it_had_a_digest_is_read_and_must_have_the_fields_of_a_state(run):
    write(run, 4)
    payload = json.loads((run.checkpoint(4) / MANIFEST).read_text())
    del payload["digest"]
    (run.checkpoint(4) / MANIFEST).write_text(json.dumps(payload))
    assert read_checkpoint(run, 4).state == state(4) and is_whole(run.checkpoint(4))
    forget_a_field(run.checkpoint(4))
    assert not is_whole(run.checkpoint(4)), "retention relies on it, and whoever writes it again"
    with pytest.raises(CheckpointDamaged, match="version_step"):
        read_checkpoint(run, 4)


def test_writing_a_checkpoint_again_leaves_a_whole_one_and_replaces_a_damaged_one(run):
    first = write(run, 4)
    inode = (first / MANIFEST).stat().st_ino
    write(run, 4)
    assert (first / MANIFEST).stat().st_ino == inode
    bit_flip(first)
    write(run, 4)
    assert read_checkpoint(run, 4).state.n == 4


def test_an_older_attempt_writes_no_checkpoint(run):
    start_attempt(run, 2)
    with pytest.raises(StaleAttempt):
        write(run, 4)
    assert checkpoints(run) == []


def test_what_a_kill_left_half_written_is_no_checkpoint_and_is_swept(run):
    write(run, 2)
    half = run.checkpoints / ".n-000000004.123-abc.tmp"
    half.mkdir()
    (half / "parameters.safetensors").write_bytes(b"half")
    assert checkpoints(run) == [2]
    sweep_aside(run.checkpoints)
    assert not half.exists()
