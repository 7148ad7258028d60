"""Checkpoints: whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rl_core.checkpoint import (
    MANIFEST,
    CheckpointState,
    checkpoints,
    newest_whole,
    read_checkpoint,
    sweep_aside,
    write_checkpoint,
)
from rl_core.errors import CheckpointDamaged, StaleAttempt
from rl_core.model_setup import model_digests
from rl_core.run_dir import RunDir, put_if_absent, to_json
from tests.learning import start_attempt


def state(n: int, version_step: int | None = None) -> CheckpointState:
    return CheckpointState(n=n, revision=0, weights_digest="d" * 32, version_digest="d" * 32, skipped_in_a_row=n % 3,
                           version_step=n if version_step is None else version_step)


def write(run: RunDir, n: int, *, version: dict[str, torch.Tensor] | None = None, attempt: int = 1) -> Path:
    parameters = {"w": torch.full((3,), float(n))}
    optimizer = {"exp_avg/w": torch.full((3,), n / 7), "step/w": torch.tensor(float(n))}
    return write_checkpoint(run, state(n, None if version is None else n - 1), parameters=parameters,
                            optimizer=optimizer, version=version, attempt=attempt, keep=2, fsync=False)


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


DAMAGE = {
    "a flipped bit": bit_flip,
    "a truncated file": lambda d: cut(d / "optimizer.safetensors"),
    "a file gone": lambda d: (d / "optimizer.safetensors").unlink(),
    "no manifest": lambda d: (d / MANIFEST).unlink(),
    "half a manifest": lambda d: (d / MANIFEST).write_text((d / MANIFEST).read_text()[:40]),
    "a manifest without a field": forget_a_field,
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


def test_without_a_whole_checkpoint_only_the_model_that_the_run_began_with_will_do(run):
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"weights")
    put_if_absent(run.inputs, to_json({"digests": {**model_digests(run.model), "data": "d"}}))
    bit_flip(write(run, 2))
    assert newest_whole(run) is None
    (run.model / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(CheckpointDamaged, match=r"no checkpoint is whole .*n-000000002.* not what the run began with "
                                                r"\(model differ\)"):
        newest_whole(run)
    write(run, 4)
    assert newest_whole(run).state.n == 4  # a whole checkpoint needs no initial model


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
