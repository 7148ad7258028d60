"""One run whose checkpoints are damaged on the disk, the newest and then all: what each start says, and what it trains.

The tests stand in the order of the starts, and each begins where the one before it ended.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_core.checkpoint import checkpoints, is_whole
from rl_core.learner.learner import fold_claims
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir
from tests.runs import Command, Home

pytestmark = pytest.mark.slow
"""Four starts. `make chaos` runs it."""

KEY = "rotten"
SMALL = ("total_steps=6", "groups_per_step=4", "group_size=4", "validation.every=50", "checkpoint.every=2",
         "checkpoint.keep=9", "retention.replay=window", "data.size=256", "data.validation=null",
         "model.warmup_steps=0", "learner.loss.entropy_coef=0.05")
"""So many kept checkpoints that nothing is retired."""


def flip(directory: Path) -> None:
    """One bit of the parameters."""
    file = directory / "parameters.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(raw)


def again(home: Home, *words: str) -> Command:
    command = home.start("train", "--run-key", KEY, *words, "--json", key=KEY)
    command.wait()
    return command


def note(run: RunDir) -> str:
    """What the status view says beside its numbers; the owner's log tells the same."""
    said = json.loads(run.status.read_text())["note"]
    assert f"note: {said}" in run.component_log("owner").read_text()
    return said


def check_history(run: RunDir, steps: int) -> None:
    """Each step took effect once: the weights are the fold of the claims, and no step came to other ones."""
    assert recorded_steps(run) == list(range(steps)) and list(run.records.glob("*divergent*")) == []
    assert fold_claims(str(run.root)) == read_record(run, steps - 1).weights_digest


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_status_says_so(home: Home) -> None:
    first = home.train(KEY, *SMALL)
    assert first.wait() == 0, first.said
    run = first.run
    assert checkpoints(run) == [2, 4, 6]
    flip(run.checkpoint(6))
    command = again(home, "--amend", "--set", "total_steps=8")
    assert command.process.returncode == 0, command.said
    log = run.logs / "learner-0.log"
    assert note(run) == f"checkpoint 6 is damaged: trained again from step 4, see {log}"
    assert f"damaged checkpoint passed over ({run.checkpoint(6) / 'parameters.safetensors'}: does not match the " \
           "checkpoint's manifest); the run goes on from checkpoint 4" in log.read_text()
    check_history(run, 8)


def test_under_a_window_a_run_without_a_whole_checkpoint_is_refused_with_what_to_do(home: Home) -> None:
    run = home.run(KEY)
    assert [n for n in checkpoints(run) if is_whole(run.checkpoint(n))] == [2, 4, 8]
    for n in (2, 4, 8):
        flip(run.checkpoint(n))
    command = again(home, "--amend", "--set", "total_steps=10")
    assert command.process.returncode == 1, command.said
    assert f"failed: CheckpointDamaged: {run.checkpoints}: no checkpoint is whole (" in command.out
    cause = json.loads(run.result.read_text())["message"]
    assert all(str(run.checkpoint(n)) in cause for n in (2, 4, 6, 8))
    assert cause.endswith(f"`headway train --run-key {KEY} --set retention.replay=all`")
    assert recorded_steps(run) == list(range(8))


def test_what_the_refusal_says_trains_every_recorded_step_again_from_the_initial_weights(home: Home) -> None:
    run = home.run(KEY)
    command = again(home, "--set", "retention.replay=all")
    assert command.process.returncode == 0, command.said
    assert note(run) == "no checkpoint is whole: trained again from the initial weights (retention.replay: all), " \
                         f"see {run.logs / 'learner-0.log'}"
    check_history(run, 10)
    assert is_whole(run.checkpoint(10))
