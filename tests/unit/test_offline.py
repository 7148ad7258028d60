"""Training on another run's shards: which are taken, what their tokens count as, how they are scored anew, what is
refused, and that the other run is left alone.

The parent has three trained steps of four groups, sampled by its versions 0, 1 and 2, and behind them groups in several
states. Log-probs are random: were any token thought to be of the learner's own weights, the step would end the run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.presets import base_of
from rl_core import frames
from rl_core.config import Config
from rl_core.errors import BrokenFile, ConfigError, FailureBudgetSpent, RewardError, ShardsSpent
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import EndOfData, put_drops, put_retired, read_claim, read_drops
from rl_core.experience.other_policy import other_policy
from rl_core.experience.outcomes import put_outcome, read_outcome
from rl_core.experience.shards import ShardWriter, map_shard, verify_shard
from rl_core.experience.verify import shard_key
from rl_core.fork import make_fork, settings_at
from rl_core.learner.learner import Learner, fold_claims
from rl_core.learner.replay import replay
from rl_core.offline import (
    check_agreement,
    check_same_inputs,
    check_scored_by,
    check_steps,
    is_scored_alike,
    landed_places,
    note_what_is_not_taken,
    read_taken,
    take_shards,
)
from rl_core.plan import check, parse_overrides, resolve
from rl_core.records import read_record, recorded_steps
from rl_core.rescoring import ORIGIN, Rescoring
from rl_core.revisions import put_revision
from rl_core.rollout.prompts import PromptSource, load_tokenizer
from rl_core.run_dir import OwnerLock, RunDir, read_json
from rl_core.run_identity import check_inputs, open_identity, read_identity
from rl_core.tokenizer import write_tokenizer
from rl_core.types import Drop, Outcome, Prompt, Score
from tasks.offline import base_settings, check_shards, placed_model, refuse_to_sample
from tests.builders import make_group
from tests.learning import claim_groups, random_groups, start_attempt, write_model

KEY, PARENT = "again", "first"
CONFIG = Config.model_validate({
    "groups_per_step": 4, "group_size": 4, "total_steps": 3, "storage": {"fsync": False}, "data": {"size": 64},
    "learner": {"lr": 1e-3, "warmup_steps": 0, "token_budget": 100, "decay": "constant"}})
OFFLINE = resolve(CONFIG.model_dump(mode="json"), {"data": {"shards_from": PARENT}, "total_steps": 4,
                                                   "learner": {"lr": 2e-3}})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent, made once; each test has a copy."""
    runs = tmp_path_factory.mktemp("made")
    run = RunDir(runs / PARENT)
    open_identity(run, PARENT, "tiny-cpu", CONFIG)
    write_model(run.model)
    write_tokenizer(run.model, 2048)
    check_inputs(run, {"model": "m", "tokenizer": "t", "data": "d"}, rows=20)
    start_attempt(run)
    for step in range(3):
        claim_groups(run, CONFIG, step, random_groups(step, versions=[step]))
    writer = ShardWriter(run, "rollout-1", 1, {"model": "m", "tokenizer": "t"}, False)
    writer.land([make_group(12, versions=[2]), make_group(13, versions=[1])])
    writer.land([make_group(16)])
    writer.land([make_group(17)])
    writer.land([make_group(13, versions=[3], try_no=1), make_group(14, versions=[2, 3], try_no=1),
                 make_group(15, versions=[3])])
    writer.land([make_group(18)])
    put_drops(run, 3, [Drop(group_id="e0-p13-t0", reason="stale", n_tokens=5)], attempt=1)
    for name, place in (("e0-p14-t0", 14), ("e0-p19-t0", 19)):
        put_outcome(run, Outcome(group_id=name, kind="failed", reason="reward_error", error="x", try_no=0,
                                 position=place, dataset_epoch=0))
    run.shard(writer.stream, 1).unlink()
    put_retired(run, 2, [(writer.stream, 1)], [], attempt=1)
    flipped = bytearray(run.shard(writer.stream, 2).read_bytes())
    flipped[len(flipped) // 2] ^= 1
    run.shard(writer.stream, 2).write_bytes(flipped)
    return runs


@pytest.fixture
def parent(made: Path, tmp_path: Path) -> RunDir:
    shutil.copytree(made, tmp_path / "runs")
    return RunDir(tmp_path / "runs" / PARENT)


@pytest.fixture
def run(parent: RunDir) -> RunDir:
    return begun(parent)


def begun(parent: RunDir, config: Config = OFFLINE, key: str = KEY) -> RunDir:
    """A run with its identity, its model and its first attempt; no shards yet."""
    run = RunDir(parent.root.parent / key)
    open_identity(run, key, "tiny-cpu", config)
    shutil.copytree(parent.model, run.model)
    next_attempt(run)
    return run


def next_attempt(run: RunDir) -> int:
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    return attempt


def taking(parent: RunDir, run: RunDir, config: Config = OFFLINE) -> Any:
    taken = take_shards(parent, run, config)
    note_what_is_not_taken(run, taken, 1)
    return taken


def digest_of(run: RunDir) -> str:
    """Names, contents and times of everything in the tree."""
    facts = [f"{path} {path.lstat().st_mtime_ns} {path.read_bytes().hex() if path.is_file() else ''}"
             for path in sorted(run.root.rglob("*"))]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def learner_of(run: RunDir, config: Config, attempt: int) -> Learner:
    learner = Learner(root=str(run.root), config=config, attempt=attempt, rank=0, ranks=1, rendezvous="")
    learner.restore()
    learner.publish_current()
    return learner


def train(run: RunDir, config: Config, attempt: int, until: int, *, save_at: int | None = None) -> None:
    """One start: claims and steps from the first without a record."""
    experience, learner = Experience(run, config, attempt), learner_of(run, config, attempt)
    for step in range(learner.next_step(), until):
        experience.claim(step, 5)
        learner.train(step)
        if step + 1 == save_at:
            learner.checkpoint()
    learner.close()


# -- what is taken


def test_shards_are_linked_and_the_other_run_is_left_alone(parent: RunDir, run: RunDir) -> None:
    before, origin = digest_of(parent), read_identity(parent)
    taken = taking(parent, run)
    assert digest_of(parent) == before
    assert (taken.run_key, taken.run_uuid, taken.rescored, taken.groups) == (PARENT, origin.run_uuid, False, 17)
    assert landed_places(parent) in (17, 18), "a damaged shard is seen only when all of it is read"
    for key in taken.shards:
        stream, seq = key.rsplit("/", 1)
        assert os.path.samefile(run.shard(stream, int(seq)), parent.shard(stream, int(seq)))
    assert len(taken.shards) == 3 + 3
    assert [(drop.group_id, drop.reason) for drop in read_drops(run.drops(0, 0))] == [("e0-p13-t0", "stale")]
    assert sorted(path.name for path in run.outcomes.iterdir()) == ["e0-p14-t0.json"]
    assert [seq for _, seq in taken.gone] == [1, 2]
    report = audit(run, n_prompts=20)
    assert report.violations == []
    assert report.positions["pending"] == 17 and report.positions["absent"] == 2
    assert report.origin == {"run_key": PARENT, "run_uuid": origin.run_uuid, "rescored": False,
                             "shards": {key: key for key in taken.shards}}


def test_what_lands_later_is_not_taken_and_the_other_run_may_go(parent: RunDir, run: RunDir) -> None:
    first = taking(parent, run)
    ShardWriter(parent, "rollout-2", 1, {}, False).land([make_group(19)])
    assert taking(parent, run) == first
    shutil.rmtree(parent.root)
    assert taking(parent, run) == first == read_taken(run)
    assert audit(run, n_prompts=20).violations == []


def test_a_start_that_was_killed_before_it_decided_takes_what_is_there_now(parent: RunDir, run: RunDir) -> None:
    taking(parent, run)
    run.taken.unlink()
    shutil.rmtree(run.ledger())
    ShardWriter(parent, "rollout-2", 1, {}, False).land([make_group(19)])
    assert taking(parent, run).groups == 18
    assert audit(run, n_prompts=20).violations == []


def test_a_shard_that_is_gone_or_was_not_taken_is_a_violation(parent: RunDir, run: RunDir) -> None:
    taken = taking(parent, run)
    last = max(taken.shards)
    stream, seq = last.rsplit("/", 1)
    run.shard(stream, int(seq)).unlink()
    ShardWriter(run, "rollout-9", 1, {}, False).land([make_group(19)])
    violations = audit(run, n_prompts=20).violations
    assert f"shard {last}, of {last} of run {PARENT}, is gone" in violations
    assert any("is not one that was taken from run first" in each for each in violations)


# -- training on them


LOSSES = {"ppo_clip": {}, "token weights": {"correction": {"weights": "token_truncate"}},
          "decoupled": {"loss": {"name": "decoupled_ppo"}, "minibatch_groups": 2}}


@pytest.mark.parametrize("learner", LOSSES.values(), ids=LOSSES)
def test_groups_are_trained_in_order_whatever_version_sampled_them(parent: RunDir, learner: dict[str, Any]) -> None:
    config = resolve(OFFLINE.model_dump(mode="json"), {"learner": learner})
    run = begun(parent, config)
    taking(parent, run, config)
    train(run, config, 1, 4)
    claims = [read_claim(run, step) for step in range(4)]
    assert [[g.position for g in claim.groups] for claim in claims] == [list(range(4 * k, 4 * k + 4)) for k in range(4)]
    assert [g.try_no for g in claims[3].groups] == [0, 1, 1, 0]
    assert {claim.policy for claim in claims} == {"offline"}
    metrics = [read_record(run, step).metrics for step in range(4)]
    absent = ("staleness/mean", "staleness/max", "staleness/update_lag_mean", "train/mismatch_current_abs")
    assert all(one[name] != one[name] for one in metrics for name in absent), "NaN: nothing is of this run's versions"
    assert all(one["train/mismatch_stale_abs"] > 0.1 for one in metrics)
    assert all(one["train/mismatch_alarm"] == 0 for one in metrics)
    groups = frames.groups(run)
    assert groups["state"].value_counts().to_dict() == {"trained": 16, "waiting": 1, "dropped": 1, "failed": 1}
    assert groups["age"].isna().all()
    assert audit(run, n_prompts=20).violations == []


def test_a_run_that_was_stopped_goes_on_to_the_same_weights_and_each_step_replays(parent: RunDir, run: RunDir) -> None:
    taking(parent, run)
    train(run, OFFLINE, 1, 3, save_at=2)
    shutil.rmtree(parent.root)
    train(run, OFFLINE, next_attempt(run), 4)
    assert recorded_steps(run) == [0, 1, 2, 3] and list(run.records.glob("*divergent*")) == []
    assert fold_claims(str(run.root)) == read_record(run, 3).weights_digest
    assert [one.verdict for one in replay(run, [0, 1, 3])] == ["identical"] * 3
    assert isinstance(Experience(run, OFFLINE, 2).claim(4, 1), EndOfData)
    assert audit(run, n_prompts=20).violations == []


def test_a_claim_that_can_never_be_full_is_a_named_error_at_once(parent: RunDir, run: RunDir) -> None:
    taking(parent, run)
    more = OFFLINE.model_copy(update={"total_steps": 9})
    experience = Experience(run, more, 1)
    for step in range(4):
        experience.claim(step, 5)
    with pytest.raises(ShardsSpent, match="step 4 needs 4 groups, and 1 of those of run first are left"):
        experience.claim(4, 60)


def test_the_filter_of_this_run_judges_them(parent: RunDir) -> None:
    config = resolve(OFFLINE.model_dump(mode="json"), {"rollout": {"no_spread": "drop"}})
    ShardWriter(parent, "rollout-2", 1, {}, False).land([make_group(19, rewards=[1.0] * 4)])
    run = begun(parent, config)
    taking(parent, run, config)
    experience = Experience(run, config, 1)
    experience.discover(full=True)
    assert (len(experience.index.waiting), experience.L) == (18, 17)


def test_no_other_policy_is_explained(parent: RunDir, run: RunDir) -> None:
    taking(parent, run)
    with pytest.raises(ConfigError, match="which have no age in it"):
        other_policy(run)


def test_a_fork_of_it_has_its_shards_and_fences_none(parent: RunDir, run: RunDir) -> None:
    taking(parent, run)
    train(run, OFFLINE, 1, 3, save_at=2)
    made = make_fork(run, KEY, 2, settings_at(run, 2)[1])
    assert read_taken(made.run) == read_taken(run)
    experience = Experience(made.run, OFFLINE, next_attempt(made.run))
    experience.discover(full=True)
    assert (experience.next_step, experience.L) == (2, 9)
    assert audit(made.run, n_prompts=20).violations == []


# -- scored anew


RESCORED = resolve(OFFLINE.model_dump(mode="json"), {"data": {"rescore": True}})


class ByLength:
    """A reward of its own: the length of the text. Fails on the prompts of these positions."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.fails, self.scored = fails, list[int]()

    def __call__(self, prompt: Prompt, text: str) -> Score:
        self.scored.append(prompt.position)
        if prompt.position in self.fails:
            raise RewardError("no number")
        return Score(reward=float(len(text)), parts={"length": float(len(text))}, correct=None, extracted=text[:3])


@pytest.fixture
def scored(parent: RunDir) -> Iterator[RunDir]:
    run = begun(parent, RESCORED)
    take_shards(parent, run, RESCORED)
    yield run


def rescoring(run: RunDir, scorer: Any, attempt: int = 1, **over: Any) -> Rescoring:
    taken, tokenizer = read_taken(run), load_tokenizer(run.model)
    assert taken is not None
    return Rescoring(run=run, config=RESCORED, taken=taken, attempt=attempt, tokenizer=tokenizer, scorer=scorer,
                     prompts=PromptSource(RESCORED, tokenizer), **over)


def test_other_rewards_are_other_shards_and_all_else_stays(parent: RunDir, scored: RunDir) -> None:
    scorer = ByLength()
    shards = rescoring(scored, scorer).finish()
    assert sorted(scorer.scored) == sorted([*range(4 * 3), 12, 13, 14, 15, 18] * 4)
    assert len(shards) == 6 and not scored.origin.streams.exists()
    for old, new in shards.items():
        assert new is not None
        stream, seq = old.rsplit("/", 1)
        before, _ = map_shard(parent.shard(stream, int(seq)))
        stream, seq = new.rsplit("/", 1)
        after, meta = map_shard(scored.shard(stream, int(seq)))
        assert meta[ORIGIN] == old and stream.startswith("rescored-")
        if before.num_rows == after.num_rows:  # no try of it was superseded
            same = [name for name in before.schema.names if before.column(name).equals(after.column(name))]
            assert set(before.schema.names) - set(same) == {"reward", "reward_parts", "correct", "extracted"}
        verify_shard(scored.shard(stream, int(seq)))
    assert read_outcome(scored, "e0-p13-t0").reason == "stale"
    report = audit(scored, n_prompts=20)
    assert report.violations == [] and report.origin is not None
    assert report.origin["shards"] == {new: old for old, new in shards.items()}
    train(scored, RESCORED, 1, 4)
    assert read_record(scored, 0).metrics["reward/mean"] > 1
    assert [one.verdict for one in replay(scored, [3])] == ["identical"]
    assert audit(scored, n_prompts=20).violations == []


def test_what_has_landed_is_not_scored_again_after_a_kill(parent: RunDir, scored: RunDir) -> None:
    scorer = ByLength()

    def killed() -> None:
        if len(scorer.scored) >= 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rescoring(scored, scorer, check=killed).finish()
    assert not scored.rescored.exists()
    shutil.rmtree(parent.root)
    again = ByLength()
    shards = rescoring(scored, again, next_attempt(scored)).finish()
    assert len(again.scored) == 4 * 17 - 16, "one whole shard of four groups had landed"
    assert rescoring(scored, again, 2).finish() == shards and len(again.scored) == 4 * 17 - 16
    assert audit(scored, n_prompts=20).violations == []


def test_an_answer_that_cannot_be_scored_fails_its_group_and_is_no_reward_of_zero(scored: RunDir) -> None:
    rescoring(scored, ByLength(fails=(5, 18))).finish()
    outcome = read_outcome(scored, "e0-p5-t0")
    assert (outcome.kind, outcome.reason, outcome.error) == ("failed", "reward_error", "no number")
    assert None in read_json(scored.rescored)["shards"].values(), "the shard of group 18 alone"
    report = audit(scored, n_prompts=20)
    assert report.violations == []
    assert (report.positions["pending"], report.positions["failed"]) == (15, 2)


def test_too_many_failures_in_a_row_end_it(scored: RunDir) -> None:
    with pytest.raises(FailureBudgetSpent, match=r"64 answers in a row could not be scored anew .*no number"):
        rescoring(scored, ByLength(fails=tuple(range(20)))).finish()


def test_a_taken_shard_that_rots_before_it_is_scored_is_named(scored: RunDir) -> None:
    taken = read_taken(scored)
    assert taken is not None
    stream, seq = next(iter(taken.shards)).rsplit("/", 1)
    path = scored.origin.shard(stream, int(seq))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.unlink()
    path.write_bytes(raw)
    with pytest.raises(BrokenFile, match="it was taken from run first, and is not scored yet"):
        rescoring(scored, ByLength()).finish()


# -- what is refused


def test_rewards_are_kept_where_every_revision_scored_alike(parent: RunDir) -> None:
    assert is_scored_alike(parent, OFFLINE)
    assert not is_scored_alike(parent, RESCORED)
    assert not is_scored_alike(parent, OFFLINE.model_copy(update={"reward": "gsm8k"}))
    put_revision(parent, CONFIG, CONFIG.model_copy(update={"reward": "gsm8k"}))
    assert not is_scored_alike(parent, OFFLINE), "half of them are scored by the other one"


FIXED = {
    "group size": ("group_size=8", r"group_size is 4, asked for 8"),
    "temperature": ("sampling.temperature=0.5", r"sampling.temperature is 1.0, asked for 0.5"),
    "prompts": ("data.size=32", r"data.size is 64, asked for 32"),
}


@pytest.mark.parametrize(("pair", "why"), FIXED.values(), ids=FIXED)
def test_what_the_shards_fix_is_refused_by_name(parent: RunDir, run: RunDir, pair: str, why: str) -> None:
    check_agreement(parent, PARENT, OFFLINE)
    config = resolve(OFFLINE.model_dump(mode="json"), parse_overrides([pair]))
    with pytest.raises(ConfigError, match=f"the shards of run first were made with other settings: {why}"):
        check_agreement(parent, PARENT, config)
    taking(parent, run)
    shutil.rmtree(parent.root)
    with pytest.raises(ConfigError, match=why):
        check_agreement(run.origin, PARENT, config)


REMAX = {"learner": {"advantage": {"name": "remax"}}}


def test_greedy_baselines_that_the_shards_have_not_or_that_another_reward_made_are_refused(parent: RunDir) -> None:
    with pytest.raises(ConfigError, match="name: run first has sampled for grpo, without a greedy"):
        check_agreement(parent, PARENT, resolve(OFFLINE.model_dump(mode="json"), REMAX))
    other = parent.root.parent / "other"
    open_identity(RunDir(other), "other", "tiny-cpu", resolve(CONFIG.model_dump(mode="json"), REMAX))
    taking_it = resolve(OFFLINE.model_dump(mode="json"), REMAX)
    check_agreement(RunDir(other), "other", taking_it)
    with pytest.raises(ConfigError, match="the answers of run other would be scored anew, by other reward settings"):
        check_agreement(RunDir(other), "other", taking_it.model_copy(update={"reward": "gsm8k"}))


def test_more_steps_than_the_shards_make_another_tokenizer_and_an_amended_reward_are_refused(
        parent: RunDir, run: RunDir) -> None:
    with pytest.raises(ConfigError, match="has 17 landed groups, which make 4 steps of groups_per_step = 4; use at "
                                          r"most 4 \(got 5\)"):
        check_steps(OFFLINE.model_copy(update={"total_steps": 5}), 17)
    with pytest.raises(ConfigError, match="tokenizer of run first differ"):
        check_same_inputs(parent, PARENT, {"data": "d", "tokenizer": "another", "model": "any"})
    taken = taking(parent, run)
    check_scored_by(taken, OFFLINE)
    with pytest.raises(ConfigError, match=r"reward is 'exact', asked for 'gsm8k'\. Another reward needs another"):
        check_scored_by(taken, OFFLINE.model_copy(update={"reward": "gsm8k"}))
    assert shard_key("a", 1) not in replace(taken, shards={}).shards


def test_a_run_begins_with_the_settings_of_the_other_one_and_the_plan_says_what_there_is(
        parent: RunDir, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(parent.root.parent.parent))
    preset, settings = base_settings(PARENT, {})
    assert (preset, settings["total_steps"], settings["learner"]["lr"]) == ("tiny-cpu", 3, 1e-3)
    assert base_settings(PARENT, {"groups_per_step": 8})[1]["total_steps"] == 2
    assert base_of(None, "new", PARENT)[1]["data"]["shards_from"] == PARENT
    assert base_of(None, KEY)[1] == OFFLINE.model_dump(mode="json"), "a start without the option goes on"
    new = RunDir(parent.root.with_name("new"))
    assert str(check_shards(new, "new", OFFLINE)).endswith("at most 4 steps; rewards kept")
    assert str(check_shards(new, "new", RESCORED)).endswith("scored anew by exact")
    assert check_shards(new, "new", CONFIG) is None
    for key, config, why in ((PARENT, OFFLINE, "is 'first', this very run"),
                             ("new", OFFLINE.model_copy(update={"total_steps": 9}), "which make 4 steps"),
                             ("new", resolve(OFFLINE.model_dump(mode="json"), {"data": {"shards_from": "nobody"}}),
                              "run 'nobody': there is no such run")):
        with pytest.raises(ConfigError, match=why):
            check_shards(new, key, config)
    assert placed_model(new, OFFLINE) == parent.model
    assert placed_model(new, OFFLINE.model_copy(update={"seed": 2})) == new.model, "other weights are made"
    with pytest.raises(ConfigError, match="samples nothing; use another --run-key"):
        refuse_to_sample(OFFLINE, 5)


IMPOSSIBLE = {
    "ages that are not there": (["learner.loss.name=decoupled_ppo", "learner.loss.proximal=loglinear"],
                                "learner.loss.proximal: is reckoned by the ages of tokens"),
    "nothing to score anew": (["data.shards_from=null", "data.rescore=true"], "data.rescore: is for a run on another"),
}


@pytest.mark.parametrize(("pairs", "why"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_settings_that_cannot_work_on_foreign_shards_are_refused(pairs: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check(resolve(OFFLINE.model_dump(mode="json"), parse_overrides(pairs)))
