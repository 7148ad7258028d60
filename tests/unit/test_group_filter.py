"""Groups that a filter leaves out: exactly as many others are leased in their place, and each is counted by its
reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError, FilterError, FilterTimeout, NothingToTrainOn
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import EndOfData, claims
from rl_core.experience.outcomes import put_outcome
from rl_core.experience.shards import ShardWriter
from rl_core.plan import check
from rl_core.rollout.group_filter import GroupFilter, check_group_filter
from rl_core.rollout.verdicts import facts_of, reason_of
from rl_core.run_dir import OwnerLock, RunDir
from rl_core.types import Outcome
from tests.builders import make_group

B, STEPS, PROMPTS = 3, 5, 4096


def start(run: RunDir, config: Config) -> Experience:
    """The owner's next attempt; its worker serves nothing yet."""
    lock = OwnerLock(run)
    experience = Experience(run, config, lock.next_attempt(0, None))
    lock.release()
    experience.discover(full=True)
    experience.attach(PROMPTS, lambda epoch, position: position)
    experience.leases_known()
    return experience


def is_kept(position: int) -> bool:
    """One position of ten, without a rhythm."""
    return bool(np.random.default_rng([position, 7]).random() < 0.1)


class World:
    """A worker that answers at once, by `how` a group without use ends; training takes no time."""

    def __init__(self, run: RunDir, config: Config, how: str) -> None:
        self.run, self.config, self.how = run, config, how
        self.writer = ShardWriter(run, "w", 1, {}, False)
        self.experience = start(run, config)
        self.generated: set[str] = set()
        self.step = 0

    def generate(self) -> int:
        """Lease what may be leased, and finish it. Returns how many groups that were."""
        self.experience.serves("w", self.config.idx(self.step))
        granted = self.experience.grant(["w"])
        assert B * self.experience.next_step + self.experience.L + self.experience.F <= B * STEPS
        for lease in granted:
            self.generated.add(lease.group_id)
            position = lease.slot.position
            if is_kept(position) or self.how == "no_spread":
                rewards = [0.0, 1.0] if is_kept(position) else [1.0, 1.0]
                self.writer.land([make_group(position, n=2, rewards=rewards, versions=[self.step])])
            else:
                outcome = Outcome(group_id=lease.group_id, kind="filtered", reason="too_easy", error="", try_no=0,
                                  position=position, dataset_epoch=0)
                put_outcome(self.run, outcome)
                self.experience.outcome(outcome)
        self.experience.discover()
        return len(granted)

    def play(self, *, restart_after: int) -> EndOfData:
        """To the end; the owner is a new one after so many rounds, and what it had leased and not finished is lost."""
        for round_no in range(10_000):
            if round_no == restart_after:
                self.experience.serves("w", self.config.idx(self.step))
                self.generated.update(lease.group_id for lease in self.experience.grant(["w"]))  # never finished
                self.experience = start(self.run, self.config)
            self.generate()
            answer = self.experience.poll(self.step, 1e9)
            if isinstance(answer, EndOfData):
                return answer
            self.step += answer is not None
        raise AssertionError("no end")


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("how", ["no_spread", "too_easy"])
def test_a_filter_of_nine_groups_in_ten_is_refilled_exactly(run: RunDir, how: str, bound: int) -> None:
    rollout = {"no_spread": "drop"} if how == "no_spread" else {"group_filter": "./mine.py:keep"}
    config = Config.model_validate({"groups_per_step": B, "group_size": 2, "total_steps": STEPS, "rollout": rollout,
                                    "staleness": {"bound": bound}, "storage": {"fsync": False}})
    world = World(run, config, how)
    end = world.play(restart_after=17)
    assert end == EndOfData(step=STEPS, reason="steps", left_over=0)
    kept = [position for position in range(PROMPTS) if is_kept(position)][:B * STEPS]
    report = audit(run)
    assert report.holds, report.violations
    assert report.positions["trained"] == B * STEPS and report.positions["pending"] == 0
    assert report.filtered == {how: len(world.generated) - B * STEPS} and world.experience.F == 0
    assert report.positions["filtered"] == len(world.generated) - B * STEPS > 5 * B * STEPS
    trained = {group.position for claim in claims(run) for group in claim.groups}
    assert trained == set(kept), "the prompts that were trained are the first ones that pass, none is passed over"
    assert world.generate() == 0


def test_filtered_groups_are_counted_once_and_not_again_after_a_restart(run: RunDir) -> None:
    config = Config.model_validate({"groups_per_step": 2, "group_size": 2, "total_steps": 5,
                                    "rollout": {"no_spread": "drop"}, "storage": {"fsync": False}})
    writer = ShardWriter(run, "w", 1, {}, False)
    experience = start(run, config)
    writer.land([make_group(i, n=2, rewards=[0.0, float(i > 2)]) for i in range(5)])
    experience.discover()
    assert experience.claim(0, 5).step == 0
    put_outcome(run, Outcome(group_id="e0-p9-t0", kind="filtered", reason="too_long", error="", try_no=0, position=9,
                             dataset_epoch=0))
    experience.discover(full=True)
    assert experience.take_filtered() == 4 and experience.take_filtered() == 0
    assert start(run, config).take_filtered() == 0
    assert audit(run).filtered == {"no_spread": 3, "too_long": 1}


def test_a_filter_that_leaves_out_everything_ends_the_run_and_says_why(run: RunDir) -> None:
    config = Config.model_validate({"groups_per_step": 2, "failure": {"barren_groups": 5},
                                    "rollout": {"group_filter": "./mine.py:keep"}})
    experience = start(run, config)
    for i in range(5):
        experience.outcome(Outcome(group_id=f"e0-p{i}-t0", kind="filtered", reason="a" if i else "b", error="",
                                   try_no=0, position=i, dataset_epoch=0))
    with pytest.raises(NothingToTrainOn, match=r"5 verified groups in a row.*by rollout.group_filter: 4 a, 1 b"):
        experience.poll(0, 0.0)


@pytest.mark.parametrize(("rollout", "groups_per_step", "expected"), [
    ({}, 16, 320), ({}, 2, 40), ({"no_spread": "drop"}, 2, 256), ({"group_filter": "a:b"}, 2, 256),
    ({"no_spread": "drop"}, 16, 320)])
def test_the_budget_of_groups_without_use_leaves_room_for_a_filter(rollout: dict[str, Any], groups_per_step: int,
                                                                  expected: int) -> None:
    config = Config.model_validate({"rollout": rollout, "groups_per_step": groups_per_step})
    assert config.barren_groups == expected


# -- the function


FILTERS = """
import time

def keep(group):
    return True

def reject(group):
    return False

def spread_of_lengths(group):
    return "same_length" if len(set(group["lengths"])) == 1 else True

def forgets(group):
    pass

def raises(group):
    return group["no such key"]

def hangs(group):
    time.sleep(60)
"""


@pytest.fixture
def filter_of(tmp_path: Path) -> Any:
    made: list[GroupFilter] = []
    (tmp_path / "filters.py").write_text(FILTERS)

    def make(name: str) -> GroupFilter:
        made.append(GroupFilter(f"./filters.py:{name}", cwd=tmp_path, deadline_s=0.5 if name == "hangs" else 10.0))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_filter_says_keep_or_why_not(filter_of: Callable[[str], GroupFilter]) -> None:
    assert filter_of("keep")(make_group(0)) is None
    assert filter_of("reject")(make_group(0)) == "rejected"
    by_length = filter_of("spread_of_lengths")
    assert by_length(make_group(0, lengths=[3, 3, 3, 3])) == "same_length"
    assert by_length(make_group(0, lengths=[3, 4, 3, 3])) is None


@pytest.mark.parametrize(("name", "error", "words"), [
    ("forgets", FilterError, "the verdict is None"), ("raises", FilterError, r"KeyError: 'no such key' \(filters.py:"),
    ("hangs", FilterTimeout, "no answer within 0.5 s")])
def test_a_filter_without_a_verdict_is_a_named_failure(filter_of: Callable[[str], GroupFilter], name: str,
                                                       error: type[Exception], words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(error, match=f"rollout.group_filter ./filters.py:{name}: .*{words}"):
        filter_of(name)(make_group(0))
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(("value", "reason"), [(True, None), (False, "rejected"), ("too_easy", "too_easy"),
                                               (np.True_, None), (np.False_, "rejected")])
def test_verdicts(value: Any, reason: str | None) -> None:
    assert reason_of(value) == reason


@pytest.mark.parametrize("value", [None, 1, 0.0, "", "two words", "x" * 65, ["a"], float("nan"), "a\n"])
def test_what_is_no_verdict_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="the verdict is"):
        reason_of(value)


def test_a_filter_is_given_what_is_known_of_the_answers() -> None:
    facts = facts_of(make_group(7, n=2, n_expected=3, rewards=[0.0, 1.0], lengths=[4, 2]))
    assert facts == {
        "group_id": "e0-p7-t0", "data_source": "sort", "truth": "7", "columns": {}, "n_expected": 3,
        "rewards": [0.0, 1.0], "correct": [0.0, 1.0], "extracted": [None, None], "parts": {}, "lengths": [4, 2],
        "finish_reasons": ["stop", "stop"]}


@pytest.mark.parametrize(("target", "words"), [
    ("mine", "rollout.group_filter: 'mine' is no function path"),
    ("./none.py:keep", "rollout.group_filter: no such file"),
    ("../out.py:keep", "rollout.group_filter: .* lies outside"), ("os:system", "rollout.group_filter: package 'os'"),
    ("./filters.py:absent", "rollout.group_filter .*cannot be loaded: ValueError: .* has no function 'absent'")])
def test_a_filter_that_cannot_be_loaded_is_refused_before_the_start(tmp_path: Path, target: str, words: str) -> None:
    (tmp_path / "filters.py").write_text(FILTERS)
    with pytest.raises(ConfigError, match=words):
        check_group_filter(Config.model_validate({"rollout": {"group_filter": target}}), cwd=tmp_path)


def test_groups_of_another_run_have_landed_already() -> None:
    config = Config.model_validate({"data": {"shards_from": "other"}, "rollout": {"group_filter": "./mine.py:keep"}})
    with pytest.raises(ConfigError, match=r"rollout.group_filter: .*have landed"):
        check(config)
