"""Promises of the store and the learner that have no test elsewhere which one of the mutants would break."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_core.experience.experience import Experience
from rl_core.experience.ledger import claims
from rl_core.experience.retention import first_needed
from rl_core.experience.retirement import retire
from rl_core.experience.shards import ShardWriter
from rl_core.run_dir import RunDir
from rl_core.types import WeightVersion
from rl_core.versions import put_version
from tests.builders import make_group, next_owner, store_config
from tests.chaos.rivals import race
from tests.unit.test_ledger import rivals_claim

B = 4


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def start(run: RunDir, **over: object) -> Experience:
    """An owner's experience beside one worker that serves the initial weights, at the start of its attempt."""
    experience = next_owner(run, store_config(**over))
    experience.attach(100, lambda epoch, position: position)
    experience.discover(full=True)
    experience.serves("rollout-0", 0)
    experience.leases_known()
    return experience


def granted(experience: Experience) -> list[str]:
    return [lease.group_id for lease in experience.grant(["rollout-0"])]


@pytest.mark.parametrize("fsync", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "durable"])
def test_three_rivals_agree_on_each_of_400_claims(run: RunDir, fsync: bool) -> None:
    found = race(run, 400, rivals_claim, fsync=fsync)
    print(f"3 rivals, 400 steps: {found}")
    assert found.disagreements == 0
    assert found.winners == {1: 400}
    assert found.adopted == 800
    assert min(found.won) > 0, "they did not race"


def test_a_restart_leases_again_what_was_in_flight_nowhere(run: RunDir) -> None:
    first = granted(start(run, staleness={"bound": 1}))
    assert first == [f"e0-p{i}-t0" for i in range(2 * B)]
    assert granted(start(run, staleness={"bound": 1})) == first, "its worker died with it"


def test_a_version_that_nobody_serves_opens_no_capacity(run: RunDir) -> None:
    experience = start(run, staleness={"bound": 0})
    assert len(granted(experience)) == B
    ShardWriter(run, "rollout-0", 1, {}, False).land([make_group(i) for i in range(B)])
    experience.discover()
    experience.claim(0, 5)
    put_version(run, WeightVersion(v=1, step=1, idx=1, attempt=1, digest="d"))
    experience.wake()
    assert granted(experience) == []
    experience.serves("rollout-0", 1)
    assert len(granted(experience)) == B


def test_groups_that_no_claim_will_take_hold_no_capacity(run: RunDir) -> None:
    experience = start(run, staleness={"bound": 0})
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    writer.land([make_group(i) for i in range(B)])
    experience.discover()
    experience.claim(0, 5)
    writer.land([make_group(i) for i in range(B, 2 * B)])  # of version 0, at step 1
    experience.discover()
    experience.serves("rollout-0", 1)
    assert len(granted(experience)) == B


def test_a_kept_checkpoint_keeps_the_shards_behind_it(run: RunDir) -> None:
    experience = start(run, staleness={"bound": 50})
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    for step in range(6):
        writer.land([make_group(B * step + i) for i in range(B)])
    experience.discover()
    for step in range(6):
        experience.claim(step, 5)
    retire(run, first_needed([2, 4, 6], keep=2), attempt=1)
    there = [claim.step for claim in claims(run) if all(run.shard(g.stream, g.seq).exists() for g in claim.groups)]
    assert there == [4, 5], "a start from checkpoint 4 trains steps 4 and 5 again"


@pytest.mark.slow
def test_a_replay_publishes_nothing(tmp_path: Path) -> None:
    import shutil

    from tests.unit.test_learner import learner_of, new_run, settings, start_attempt, started

    config = settings()
    run = new_run(tmp_path, config, steps=3)
    learner = started(run, config)
    for step in range(3):
        learner.train(step)
    shutil.rmtree(run.weights_root)
    start_attempt(run, 2)
    again = learner_of(run, config, attempt=2)
    assert again.restore() == 0
    for step in range(3):
        again.train(step)
    assert list(run.weights_root.glob("v-*")) == [], "engines would be offered weights of the past"
    offered = again.publish_current()
    assert offered is not None and [path.name for path in run.weights_root.glob("v-*")] == [run.weights(offered.v).name]
