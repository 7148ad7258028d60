"""A start that trains nothing: how far admission lets it go, when it ends, and which weights it offers."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError, DeadlinePassed
from rl_core.experience import admission
from rl_core.experience.experience import Experience
from rl_core.experience.shards import ShardWriter
from rl_core.learner.learner import Learner
from rl_core.offered_weights import offered_version
from rl_core.run_dir import RunDir
from rl_core.types import WeightVersion
from rl_core.versions import put_version, read_versions
from tests.builders import make_group
from tests.learning import start_attempt, write_model

B = 4


def settings(**over: Any) -> Config:
    return Config.model_validate({"groups_per_step": B, "group_size": 4, "total_steps": 3, "learner": {"lr": 1e-3},
                                  "rollout": {"max_groups": 100}, "storage": {"fsync": False}} | over)


def gathering(run: RunDir, goal: int, prompts: int = 64, **over: Any) -> Experience:
    """With a pump attached, one worker that serves publication 0, and everything listed."""
    start_attempt(run)
    experience = Experience(run, settings(**over), 1, goal=goal)
    experience.attach(prompts, lambda epoch, position: position)
    experience.discover(full=True)
    experience.leases_known()
    experience.serves("rollout-0", 0)
    return experience


@pytest.mark.parametrize("goal", [1, 17, 40])
def test_as_many_groups_are_leased_as_shall_wait_whatever_bound_and_steps_say(run: RunDir, goal: int) -> None:
    experience = gathering(run, goal)
    assert admission.capacity(experience.admission(0)) == goal
    assert len(experience.grant(["rollout-0"])) == goal
    assert admission.capacity(experience.admission(0)) == 0
    ordinary = Experience(run, settings(), 1)
    assert admission.capacity(ordinary.admission(0)) == 3 * B == B * (1 + 2), "total steps, and the bound"


def test_it_ends_when_so_many_wait_and_what_landed_before_counts(run: RunDir) -> None:
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    writer.land([make_group(i) for i in range(4)])
    experience = gathering(run, 6)
    assert (experience.L, len(experience.grant(["rollout-0"]))) == (4, 2)
    landing = threading.Timer(0.1, lambda: experience.discover([writer.land([make_group(4), make_group(5)])]))
    landing.start()
    assert experience.gather(10, lambda: None) == 6
    landing.join()
    assert experience.F == 0


def test_it_ends_with_the_data(run: RunDir) -> None:
    ShardWriter(run, "rollout-0", 1, {}, False).land([make_group(i) for i in range(3)])
    experience = gathering(run, 6, prompts=3, data={"epochs": 1})
    assert experience.gather(10, lambda: None) == 3


def test_waiting_for_nothing_is_an_error_that_says_who_waits_for_whom(run: RunDir) -> None:
    experience = gathering(run, 6)
    experience.grant(["rollout-0"])
    with pytest.raises(DeadlinePassed, match=r"rollout: no new group for 0 s .*rollout-0 serves publication 0 with 6 "
                                             r"groups in flight; capacity 0"):
        experience.gather(0.2, lambda: None)


def test_the_weights_offered_are_those_that_a_learner_begins_with(run: RunDir) -> None:
    config = settings()
    write_model(run.model)
    start_attempt(run)
    offered = offered_version(run, config, 1)
    assert offered_version(run, config, 1) == offered, "published once"
    learner = Learner(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="")
    learner.restore()
    assert learner.publish_current() == offered and list(read_versions(run)) == [0]
    learner.close()
    shutil.rmtree(run.weights(0))  # as shared memory after a reboot
    assert offered_version(run, config, 1) == offered and run.weights(0).is_dir()


def test_later_weights_without_their_bytes_are_made_by_a_learner_alone(run: RunDir) -> None:
    write_model(run.model)
    start_attempt(run)
    offered_version(run, settings(), 1)
    put_version(run, WeightVersion(v=1, step=4, idx=4, attempt=1, digest="0" * 32))
    with pytest.raises(ConfigError, match=r"cannot be served .*headway train --run-key run makes them again"):
        offered_version(run, settings(), 1)
