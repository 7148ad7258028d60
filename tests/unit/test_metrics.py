"""The metric table, the interval ledger, and the owner's metrics of the rollout side."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from rl_core.metrics import (
    BY_NAME,
    MAX_PARTS,
    MAX_SCALARS,
    MAX_SOURCES,
    METRICS,
    STATES,
    IntervalLedger,
    check,
    is_part,
    is_tracked,
    names,
    part_metrics,
    pool_metrics,
    read_pool,
    tracked_names,
    utilization,
    validation_metrics,
    weighted_mean,
)
from rl_core.types import WeightVersion, WorkerStatus

GROUPS = {"train", "critic", "rollout", "staleness", "reward", "validation", "utilization", "weights", "system",
          "servers"}


class Clock:
    """Nanoseconds that the test turns."""

    now = 0

    def __call__(self) -> int:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def test_the_table_is_small_and_no_name_begins_another() -> None:
    assert len(METRICS) == len(BY_NAME)
    tracked = sum(len(tracked_names(writer)) for writer in ("learner", "owner", "validator"))
    assert tracked + MAX_PARTS + MAX_SOURCES <= MAX_SCALARS == 60, "scalars of a step in a tracker"
    assert [(a, b) for a in BY_NAME for b in BY_NAME if a != b and b.startswith(a)] == []
    assert {name.split("/")[0] for name in BY_NAME} == GROUPS
    assert all(name.count("/") == 1 for name in BY_NAME)
    assert all(m.unit and m.description.endswith(".") for m in METRICS)


def test_each_metric_has_one_writer() -> None:
    writers = Counter(name for writer in ("learner", "owner", "validator") for name in names(writer))
    assert writers == Counter(dict.fromkeys(BY_NAME, 1))


def test_check_names_what_is_unknown_and_what_is_missing() -> None:
    check(dict.fromkeys(names("owner"), 0.0), "owner")
    wrong = dict.fromkeys(names("owner")[1:], 0.0) | {"train/lr": 1.0}
    with pytest.raises(ValueError, match=rf"unknown \['train/lr'\], missing \['{names('owner')[0]}'\]"):
        check(wrong, "owner")


def test_validation_metrics_fill_what_was_not_asked_for_with_nan() -> None:
    metrics = validation_metrics({"step": 3, "greedy_accuracy": 0.5, "sampled_accuracy": None, "mean_length": 6})
    assert metrics["validation/greedy_accuracy"] == 0.5 and metrics["validation/mean_length"] == 6.0
    assert math.isnan(metrics["validation/sampled_accuracy"]) and math.isnan(metrics["validation/seconds"])
    assert tuple(metrics) == names("validator")


MEANS = {
    "by weight": ([1.0, 4.0], [3.0, 1.0], 1.75),
    "nan left out": ([1.0, math.nan, 3.0], [1.0, 9.0, 1.0], 2.0),
    "no weight": ([1.0, 2.0], [0.0, 0.0], math.nan),
    "empty": ([], [], math.nan),
}


@pytest.mark.parametrize(("values", "weights", "expected"), MEANS.values(), ids=MEANS)
def test_weighted_mean(values: list[float], weights: list[float], expected: float) -> None:
    assert weighted_mean(values, weights) == pytest.approx(expected, nan_ok=True)


def test_the_ledger_counts_every_moment_once() -> None:
    clock = Clock()
    ledger = IntervalLedger(clock_ns=clock)
    clock.pass_s(2.0)
    assert ledger.enter("busy") == "waiting"
    clock.pass_s(3.0)
    with ledger.during("syncing"):
        clock.pass_s(0.5)
        assert ledger.state == "syncing"
    clock.pass_s(1.0)
    assert ledger.seconds() == {"busy": 4.0, "waiting": 2.0, "syncing": 0.5, "paused": 0.0}
    clock.pass_s(1.5)
    assert ledger.seconds()["busy"] == 5.5


def test_the_block_gives_the_state_back_when_it_raises() -> None:
    ledger = IntervalLedger("paused")
    with pytest.raises(KeyError), ledger.during("busy"):
        raise KeyError
    assert ledger.state == "paused"


def test_the_seconds_sum_to_the_age_whatever_threads_enter() -> None:
    started = time.monotonic_ns()
    ledger = IntervalLedger()
    made = time.monotonic_ns()

    def flicker(offset: int) -> None:
        for i in range(3000):
            ledger.enter(STATES[(i + offset) % len(STATES)])

    threads = [threading.Thread(target=flicker, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = time.monotonic_ns()
    total = sum(ledger.seconds().values())
    assert (before - made) / 1e9 - 1e-6 <= total <= (time.monotonic_ns() - started) / 1e9 + 1e-6


def test_utilization_shares_sum_to_one() -> None:
    shares = utilization("learner", {"busy": 10.0, "waiting": 5.0},
                         {"busy": 13.0, "waiting": 5.6, "syncing": 0.3, "paused": 0.1})
    assert shares == pytest.approx({"utilization/learner_busy": 0.75, "utilization/learner_waiting": 0.15,
                                    "utilization/learner_syncing": 0.075, "utilization/learner_paused": 0.025})
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(math.isnan(share) for share in utilization("rollout", {"busy": 1.0}, {"busy": 1.0}).values())


def status(worker: str, stream: str, idx: int | None, generated: int, wasted: int, busy: float,
           waiting: float) -> WorkerStatus:
    served = None if idx is None else WeightVersion(v=idx + 7, step=idx, idx=idx, attempt=1, digest="d")
    return WorkerStatus(worker=worker, stream=stream, served=served, in_flight=(), running=0,
                        tokens_generated=generated, tokens_wasted=wasted,
                        seconds={"busy": busy, "waiting": waiting, "syncing": 0.0, "paused": 0.0})


def test_pool_metrics_are_those_since_the_reading_before_also_over_a_restart() -> None:
    before = read_pool([status("r-0", "r-0-aa", 4, 1000, 100, 10.0, 0.0), status("r-1", "r-1-bb", 4, 500, 0, 9.0, 1.0)],
                       at_s=100.0)
    # r-1 died and came back: its new incarnation counts from 0.
    now = read_pool([status("r-0", "r-0-aa", 6, 1300, 130, 13.0, 1.0), status("r-1", "r-1-cc", 5, 100, 10, 1.0, 1.0)],
                    at_s=104.0, before=before)
    metrics = pool_metrics(now, in_flight=9, published_idx=6, sampled=0.25, filtered=3)
    check(metrics, "owner")
    assert {name: value for name, value in metrics.items() if not name.startswith("servers/")} == pytest.approx({
        "utilization/rollout_busy": 4.0 / 6.0, "utilization/rollout_waiting": 2.0 / 6.0,
        "utilization/rollout_syncing": 0.0, "utilization/rollout_paused": 0.0, "weights/served_lag": 1.0,
        "rollout/tokens_per_s": 100.0, "rollout/wasted": 0.1, "rollout/in_flight": 9.0, "reward/sampled": 0.25,
        "rollout/filtered": 3.0, "system/swap_s": 0.0, "rollout/greedy": 0.0})


def test_tokens_of_greedy_baselines_are_a_share_of_the_generated_ones_and_wasted() -> None:
    before = read_pool([replace(status("r-0", "r-0-aa", 4, 1000, 100, 10.0, 0.0), tokens_greedy=90)], at_s=100.0)
    now = read_pool([replace(status("r-0", "r-0-aa", 6, 1400, 180, 13.0, 1.0), tokens_greedy=150)], at_s=104.0,
                    before=before)
    metrics = pool_metrics(now, in_flight=0, published_idx=6)
    assert (metrics["rollout/greedy"], metrics["rollout/wasted"]) == (0.15, 0.2)


SERVER = {"tokens": 0.0, "context_tokens": 0.0, "cached_tokens": 0.0, "swaps": 0.0, "paused_s": 0.0,
          "reread_tokens": 0.0, "thrown_tokens": 0.0, "restarts": 0.0, "retries": 0.0, "running": 0.0, "queued": 0.0}


def test_servers_are_summed_since_the_reading_before_and_embedded_engines_have_none() -> None:
    plain = status("r-0", "r-0-aa", 4, 0, 0, 1.0, 0.0)
    old = replace(plain, servers={"server-0": SERVER | {"tokens": 100.0, "restarts": 1.0, "running": 7.0}})
    new = replace(status("r-0", "r-0-aa", 4, 0, 0, 3.0, 0.0), servers={
        "server-0": SERVER | {"tokens": 300.0, "restarts": 1.0, "running": 2.0, "swaps": 4.0, "paused_s": 0.2},
        "server-1": SERVER | {"tokens": 50.0, "restarts": 1.0, "running": 3.0, "context_tokens": 40.0,
                              "cached_tokens": 10.0, "retries": 2.0}})
    before = read_pool([old], at_s=10.0)
    metrics = pool_metrics(read_pool([new], at_s=15.0, before=before), in_flight=0, published_idx=1)
    check(metrics, "owner")
    assert {name: value for name, value in metrics.items() if name.startswith("servers/")} == pytest.approx({
        "servers/tokens_per_s": 50.0, "servers/cache_hit": 0.25, "servers/pause_s": 0.05, "servers/reread_tokens": 0.0,
        "servers/thrown_tokens": 0.0, "servers/running": 5.0, "servers/queued": 0.0, "servers/restarts": 1.0,
        "servers/retries": 2.0})
    none = pool_metrics(read_pool([plain], at_s=10.0), in_flight=0, published_idx=1)
    assert all(math.isnan(value) for name, value in none.items() if name.startswith("servers/"))


def test_swaps_are_the_mean_over_the_workers_since_the_reading_before() -> None:
    def syncing(stream: str, seconds: float) -> WorkerStatus:
        return replace(status(stream, stream, 1, 0, 0, 1.0, 0.0), seconds={"busy": 1.0, "syncing": seconds})

    before = read_pool([syncing("r-0", 1.0), syncing("r-1", 2.0)], at_s=10.0)
    now = read_pool([syncing("r-0", 1.5), syncing("r-1", 2.25)], at_s=12.0, before=before)
    assert pool_metrics(now, in_flight=0, published_idx=1)["system/swap_s"] == 0.375


PARTS = {
    "as they are": ({"b": 1.0, "a": 0.5}, {"reward/part_a_mean": 0.5, "reward/part_b_mean": 1.0}),
    "no name begins another": ({"is": 1.0, "is_mean": 2.0, "is_mean_too": 3.0}, {
        "reward/part_is_mean": 1.0, "reward/part_is-mean_mean": 2.0, "reward/part_is-mean-too_mean": 3.0}),
    "the same when written plainly": ({"a b": 1.0, "a/b": 2.0}, {
        "reward/part_a-b_mean": 1.0, "reward/part_a-b-2_mean": 2.0}),
    "six of eight": (dict.fromkeys("hgfedcba", 1.0), {f"reward/part_{letter}_mean": 1.0 for letter in "abcdef"}),
}


@pytest.mark.parametrize(("parts", "expected"), PARTS.values(), ids=PARTS)
def test_reward_parts_become_metrics(parts: dict[str, float], expected: dict[str, float]) -> None:
    found = part_metrics(parts)
    assert found == expected and list(found) == list(expected)
    assert [(a, b) for a in (*found, *BY_NAME) for b in found if a != b and b.startswith(a)] == []
    assert all(is_part(name) and is_tracked(name) for name in found)


def test_what_few_look_at_stays_in_the_record() -> None:
    check(dict.fromkeys(names("learner"), 0.0) | {"reward/part_a_mean": 1.0}, "learner")
    assert is_tracked("reward/mean") and not is_tracked("train/ratio_drift") and not is_tracked("of/another version")
    assert set(tracked_names("learner")) < set(names("learner"))


LOOKED_AT_FIRST = """
reward/mean reward/std reward/correct reward/all_equal reward/no_spread_right reward/no_spread_wrong reward/sampled
rollout/length_mean rollout/length_p95 rollout/length_right rollout/length_wrong rollout/truncated
rollout/right_length_p95 rollout/wrong_length_p95
train/policy_loss train/entropy train/clip_low train/clip_high train/ratio_max train/kl_proximal train/grad_norm
train/learning_rate train/skipped_updates train/mismatch_current_k3 train/mismatch_stale_k3 train/effective_samples
staleness/mean staleness/max staleness/p95 staleness/update_lag_mean staleness/mixed staleness/dropped_tokens
system/tokens_per_s rollout/tokens_per_s system/samples_per_s system/mfu system/waiting_s system/step_s
weights/served_lag system/update_s system/publish_s system/swap_s utilization/learner_busy utilization/learner_waiting
utilization/rollout_busy utilization/rollout_waiting validation/greedy_accuracy
"""


def test_the_numbers_that_people_look_at_first_are_tracked() -> None:
    assert [name for name in LOOKED_AT_FIRST.split() if not is_tracked(name)] == []


def test_the_first_reading_counts_from_the_start_of_the_workers() -> None:
    now = read_pool([status("r-0", "r-0-aa", None, 300, 0, 2.0, 1.0)], at_s=50.0)
    metrics = pool_metrics(now, in_flight=0, published_idx=0)
    assert metrics["rollout/tokens_per_s"] == 100.0
    assert math.isnan(metrics["weights/served_lag"])
    idle = read_pool([status("r-0", "r-0-aa", None, 300, 0, 2.0, 2.0)], at_s=51.0, before=now)
    assert math.isnan(pool_metrics(idle, in_flight=0, published_idx=0)["rollout/wasted"])


def test_a_step_in_which_no_worker_has_spoken_shows_the_newest_known_interval() -> None:
    first = read_pool([status("r-0", "r-0-aa", 0, 100, 0, 1.0, 0.0)], at_s=10.0)
    second = read_pool([status("r-0", "r-0-aa", 0, 400, 0, 2.5, 0.5)], at_s=12.0, before=first)
    silent = read_pool([status("r-0", "r-0-aa", 1, 400, 0, 2.5, 0.5)], at_s=12.1, before=second)
    later = read_pool([status("r-0", "r-0-aa", 1, 900, 0, 4.5, 1.0)], at_s=14.0, before=silent)
    found = [pool_metrics(reading, in_flight=0, published_idx=1) for reading in (second, silent, later)]
    assert [each["utilization/rollout_busy"] for each in found] == [0.75, 0.75, 0.8]
    assert [each["rollout/tokens_per_s"] for each in found] == [150.0, 150.0, 250.0]
    assert [each["weights/served_lag"] for each in found] == [1.0, 0.0, 0.0]  # an acknowledged swap counts at once
