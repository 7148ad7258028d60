"""staleness.exact: which publication samples what, what a claim takes, and that every world comes to its end."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.experience.audit import audit
from rl_core.experience.exact import ExactOrder
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import EndOfData, claims
from rl_core.experience.shards import ShardWriter
from rl_core.experience.staleness import FILTERED, KEEP, STALE, YOUNG, StalenessRule, explain, is_drop, judge, rule_of
from rl_core.plan import check, describe, make_plan
from rl_core.run_dir import OwnerLock, RunDir
from rl_core.types import Claim
from tests.builders import make_group
from tests.unit.test_admission_property import Simulation, World

ORDER = ExactOrder(exact=2, groups_per_step=4, publish_every=1, total_steps=10, weights_kept=2)


def exact_config(exact: int, **over: Any) -> Config:
    return Config.model_validate({"groups_per_step": 4, "group_size": 4, "total_steps": 8, "storage": {"fsync": False},
                                  "staleness": {"bound": exact, "exact": exact}} | over)


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


# -- which publication has to sample what


def test_the_first_steps_share_the_initial_weights_and_all_later_ones_are_exactly_so_old() -> None:
    assert [ORDER.publication(step) for step in range(10)] == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert [ORDER.needed(publication, 0) for publication in range(9)] == [12, 4, 4, 4, 4, 4, 4, 4, 0]
    slow = replace(ORDER, publish_every=3, exact=1)
    assert [slow.publication(step) for step in range(10)] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 2]
    assert [slow.needed(publication, 0) for publication in range(4)] == [24, 12, 4, 0]


@pytest.mark.parametrize("exact", [0, 1, 3, 16])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_what_publications_have_to_sample_is_what_the_steps_train_on(exact: int, every: int) -> None:
    order = ExactOrder(exact=exact, groups_per_step=4, publish_every=every, total_steps=17, weights_kept=2)
    for step in range(17):
        left = [order.publication(k) for k in range(step, 17)]
        assert [order.needed(p, step) for p in range(20)] == [4 * left.count(p) for p in range(20)]


def test_workers_serve_a_publication_until_its_groups_have_landed() -> None:
    assert ORDER.offered(0, 0, {}) == 0
    assert ORDER.offered(1, 1, {0: 7}) == 0, "8 are needed behind the first claim"
    assert ORDER.offered(1, 1, {0: 8}) == 1
    assert ORDER.offered(3, 3, {1: 4, 2: 3}) == 2
    assert ORDER.offered(9, 10, {7: 4}) == 10, "of the last ones nothing is needed"


def test_a_claim_is_held_where_its_version_would_remove_weights_that_are_still_sampled_from() -> None:
    assert not ORDER.holds(0, {0: 4}), "version 1 leaves version 0 on the disk"
    assert ORDER.holds(1, {0: 7}) and not ORDER.holds(1, {0: 8})
    assert not replace(ORDER, weights_kept=3).holds(1, {0: 7})


# -- verdicts


def test_groups_are_taken_at_one_age_wait_below_it_and_are_dropped_above() -> None:
    rule = rule_of(exact_config(2))
    assert (rule.policy, rule.limit, rule.oldest) == ("exact", 2, 2)
    verdict = judge(7, rule, idx_min_G=i32(7, 6, 5, 4), idx_max_G=i32(7, 6, 5, 4))
    assert verdict.tolist() == [YOUNG, YOUNG, KEEP, STALE] and is_drop(verdict).tolist() == [False] * 3 + [True]
    assert judge(1, rule, idx_min_G=i32(0, 1), idx_max_G=i32(0, 1)).tolist() == [KEEP, YOUNG]


def test_a_filter_counts_also_for_groups_that_wait() -> None:
    rule = StalenessRule(policy="exact", limit=2, hard_max=2, drop_no_spread=True)
    verdict = judge(7, rule, idx_min_G=i32(7, 7), idx_max_G=i32(7, 7), spread_G=np.array([0.0, 1.0], np.float32))
    assert verdict.tolist() == [FILTERED, YOUNG]


def test_a_verdict_is_explained() -> None:
    rule = rule_of(exact_config(2))
    assert explain(rule, 3) == "age 3: over 2; dropped as stale under staleness.exact"
    assert "waits until it is 2 publications old" in explain(rule, 1) and "trained" in explain(rule, 2)


# -- the plan


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "another bound": ({"bound": 4}, r"staleness\.bound: .*set it to 2, too \(got '?4"),
    "drop": ({"policy": "drop"}, r"staleness\.policy: .*no group is over a bound"),
    "mask": ({"policy": "mask"}, r"staleness\.policy: .*use keep"),
    "hard_max": ({"hard_max": 3}, r"staleness\.hard_max: .*no group becomes older than staleness\.exact = 2"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_it_is_refused(name: str) -> None:
    given_, words = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=words):
        check(exact_config(2, staleness={"bound": 2, "exact": 2} | given_))


def test_groups_of_another_run_and_prompts_that_end_are_refused() -> None:
    with pytest.raises(ConfigError, match="have no age in this one"):
        check(exact_config(2, data={"shards_from": "other"}))
    with pytest.raises(ConfigError, match=r"data\.epochs: a publication whose prompts have run out"):
        check(exact_config(2, data={"epochs": 3}))


def test_the_plan_says_it() -> None:
    config = exact_config(2)
    plan = make_plan(config)
    assert plan.staleness_hard_max == 2 and plan.max_outstanding_groups == 12
    assert "exactly 2, of every group (staleness.exact)" in str(describe(config, plan))


# -- over the store


def start(run: RunDir, config: Config) -> Experience:
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    return Experience(run, config, attempt)


def test_a_claim_takes_groups_of_its_publication_and_leaves_younger_ones(run: RunDir) -> None:
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    writer.land([make_group(i, lease_no=i) for i in range(8)])
    experience = start(run, exact_config(1))
    first = experience.claim(0, 5)
    assert isinstance(first, Claim) and (first.policy, first.eta, first.hard_max) == ("exact", "1", 1)
    writer.land([make_group(i, lease_no=i, versions=[1]) for i in range(8, 12)])
    experience.discover()
    assert (experience.L, experience.index.usable(1), experience.offered(1)) == (8, 4, 1)
    second = experience.claim(1, 5)
    assert isinstance(second, Claim) and [g.position for g in second.groups] == [4, 5, 6, 7] and not second.dropped
    third = start(run, exact_config(1)).claim(2, 5)
    assert isinstance(third, Claim) and [g.position for g in third.groups] == [8, 9, 10, 11], "a restart does the same"
    assert audit(run).holds


def test_a_publication_that_lacks_groups_is_offered_again_after_a_restart(run: RunDir) -> None:
    """The owner was killed while one group of publication 1 was in flight, and version 2 was made."""
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    writer.land([make_group(i, lease_no=i) for i in range(8)])
    experience = start(run, exact_config(1))
    experience.claim(0, 5)
    experience.claim(1, 5)
    writer.land([make_group(i, lease_no=i, versions=[1]) for i in range(8, 11)])
    again = start(run, exact_config(1))
    again.discover(full=True)
    again.attach(64, lambda epoch, position: position)
    again.leases_known()
    assert again.offered(2) == 1 and again.try_claim(2) is None
    again.serves("rollout-0", 1)
    [leased] = again.grant(["rollout-0"])
    assert leased.slot.position == 11, "just what is missing"
    assert "staleness.exact 1: it trains on publication 1, of which 3 of 3 waiting groups are." in again.stall_report()
    writer.land([make_group(11, lease_no=leased.lease_no, versions=[1])])
    again.discover()
    assert again.offered(2) == 2 and isinstance(again.try_claim(2), Claim)


# -- every world


WORLDS = st.builds(
    World, seed=st.integers(0, 2**31 - 1), groups_per_step=st.integers(1, 6), publish_every=st.integers(1, 3),
    eta=st.just("0"), policy=st.just("keep"), hard_max_over=st.none(), filtered=st.sampled_from([0.0, 0.0, 0.3]),
    spread=st.sampled_from([0.0, 0.8, 1.5]), swap_lag_s=st.sampled_from([0.0, 0.5, 10.0]), workers=st.integers(1, 3),
    prompts=st.integers(20, 60), epochs=st.none(), total_steps=st.integers(1, 12),
    failing=st.sampled_from([0.0, 0.0, 0.2]), forgetting=st.sampled_from([0.0, 0.0, 0.05]), deaths=st.integers(0, 3),
    crashes=st.integers(0, 3), hints=st.booleans(), small_disk=st.just(False), exact=st.sampled_from([0, 1, 2, 5]))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(WORLDS)
def test_every_world_comes_to_its_end_with_groups_of_exactly_that_age(world: World) -> None:
    world = replace(world, eta=str(world.exact))
    with tempfile.TemporaryDirectory(prefix="headway-world-") as directory:
        simulation = Simulation(world, RunDir(Path(directory)))
        end = simulation.play()
        assert end == EndOfData(step=world.total_steps, reason="steps", left_over=end.left_over)
        made = list(claims(simulation.run))
        assert len(made) == world.total_steps
        order = ExactOrder.of(simulation.config)
        assert order is not None
        oldest = {(row.stream, row.seq, row.row): row.idx_min for row in landed(simulation.run)}
        for claim in made:
            sampled = {oldest[group.stream, group.seq, group.row] for group in claim.groups}
            assert sampled == {order.publication(claim.step)} and not claim.masked
        assert audit(simulation.run, n_prompts=world.prompts).holds


def landed(run: RunDir) -> list[Any]:
    """Every row that landed, with its place and the publication of its oldest token."""
    from types import SimpleNamespace

    from rl_core.experience.shards import verify_shard

    rows = []
    for stream in sorted(run.streams.iterdir()):
        for path in sorted(stream.glob("*.arrow")):
            info = verify_shard(path)
            rows += [SimpleNamespace(stream=stream.name, seq=int(path.stem), row=i, idx_min=int(idx))
                     for i, idx in enumerate(info.idx_min)]
    return rows
