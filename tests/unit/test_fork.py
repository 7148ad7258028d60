"""Forks: what a new run has of the past of another one, what it does not take up, and that the other one is left alone.

The parent has six trained steps of four groups, checkpoints behind steps 2 and 5, and groups in every state behind
them. Its groups of step k are sampled by the version behind step k - 1.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rl_core.checkpoint import newest_whole
from rl_core.config import Config
from rl_core.errors import CheckpointDamaged, ConfigError, ForkDiverged
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import claimed_steps, drop_files, put_drops, read_claim, read_drops, read_retired
from rl_core.experience.outcomes import outcome_ids, put_outcome
from rl_core.experience.retirement import retire
from rl_core.experience.shards import ShardWriter
from rl_core.fork import Fork, check_replayed, make_fork, settings_at
from rl_core.learner.learner import Learner, fold_claims
from rl_core.plan import parse_overrides, resolve
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import config_of, current_revision, put_revision, read_revision
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent, read_json, to_json
from rl_core.run_identity import check_inputs, open_identity, prompt_rows, read_identity
from rl_core.types import Claim, Drop, Outcome, OutcomeKind
from rl_core.versions import read_versions
from tests.builders import make_group
from tests.learning import all_by, claim_groups, random_groups, sampled_by, start_attempt, write_model

KEY, STEPS, PROMPTS = "k", 6, 40
CONFIG = Config.model_validate({
    "groups_per_step": 4, "group_size": 4, "total_steps": 20, "storage": {"fsync": False}, "data": {"size": 64},
    "learner": {"lr": 1e-3, "warmup_steps": 0, "token_budget": 100, "decay": "constant"}})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent, made once; each test has a copy."""
    runs = tmp_path_factory.mktemp("made")
    run = RunDir(runs / KEY)
    open_identity(run, KEY, "tiny-cpu", CONFIG)
    write_model(run.model)
    check_inputs(run, {}, rows=PROMPTS)
    start_attempt(run)
    stock = AutoModelForCausalLM.from_pretrained(run.model)
    learner = Learner(root=str(run.root), config=CONFIG, attempt=1, rank=0, ranks=1, rendezvous="")
    learner.restore()
    learner.publish_current()
    for step in range(STEPS):
        groups = [sampled_by(stock, all_by(max(0, step - 1), group)) for group in random_groups(step)]
        claim_groups(run, CONFIG, step, groups)
        learner.train(step)
        if step + 1 in (2, 5):
            learner.checkpoint()
    learner.close()
    start_attempt(run, 2)
    leave_groups_behind(run)
    put_if_absent(run.result, to_json({"status": "failed"}))
    return runs


def leave_groups_behind(run: RunDir) -> None:
    """Groups at positions 24 to 35, and what became of them; those of version 5 and 6 are of no past before step 5."""
    writer = ShardWriter(run, "rollout-1", 2, {}, False)
    writer.land([make_group(24, versions=[3]), make_group(25, versions=[4]), make_group(26, versions=[4, 5])])
    writer.land([make_group(27, versions=[6]), make_group(28, versions=[2]), make_group(29, versions=[1])])
    writer.land([make_group(28, versions=[6], try_no=1), make_group(29, versions=[3], try_no=1),
                 make_group(31, versions=[4], try_no=1)])
    put_drops(run, 3, [Drop(group_id="e0-p29-t0", reason="stale", n_tokens=5)], attempt=2)
    put_drops(run, 6, [Drop(group_id="e0-p28-t0", reason="stale", n_tokens=5)], attempt=2)
    for position, try_no, kind in ((30, 0, "failed"), (31, 0, "failed"), (32, 0, "poison"), (33, 0, "failed"),
                                   (33, 1, "given_up")):
        put_outcome(run, outcome(position, try_no, kind))


def outcome(position: int, try_no: int, kind: OutcomeKind) -> Outcome:
    return Outcome(group_id=f"e0-p{position}-t{try_no}", kind=kind, reason="reward_error", error="x", try_no=try_no,
                   position=position, dataset_epoch=0)


@pytest.fixture
def parent(made: Path, tmp_path: Path) -> RunDir:
    shutil.copytree(made, tmp_path / "runs")
    return RunDir(tmp_path / "runs" / KEY)


def digest_of(run: RunDir) -> str:
    """Names, contents and times of everything in the tree."""
    files = sorted(path for path in run.root.rglob("*"))
    facts = [f"{path} {path.lstat().st_mtime_ns} {path.read_bytes().hex() if path.is_file() else ''}" for path in files]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def forked(parent: RunDir, step: int, *sets: str) -> Fork:
    """A fork with these settings on top of those that the step had."""
    base = settings_at(parent, step)[1].model_dump(mode="json")
    return make_fork(parent, KEY, step, resolve(base, parse_overrides(sets)))


def learner_of(run: RunDir, attempt: int) -> Learner:
    revision = current_revision(run)
    return Learner(root=str(run.root), config=config_of(run, revision), attempt=attempt, rank=0, ranks=1, rendezvous="",
                   revision=revision)


def next_attempt(run: RunDir) -> int:
    lock = OwnerLock(run)
    attempt = lock.next_attempt(0, None)
    lock.release()
    return attempt


# -- what a fork has


def test_a_fork_has_the_past_of_its_parent_and_leaves_it_alone(parent: RunDir) -> None:
    before = digest_of(parent)
    made = forked(parent, 4)
    assert digest_of(parent) == before
    run, origin = made.run, read_identity(parent)
    identity = read_identity(run)
    assert (made.key, made.checkpoint, run.root.name) == ("k~1", 2, "k~1")
    assert (identity.run_key, identity.preset, identity.config) == ("k~1", "tiny-cpu", CONFIG)
    assert identity.run_uuid != origin.run_uuid
    assert read_json(run.run_json)["forked_from"] == {"run_key": KEY, "run_uuid": origin.run_uuid, "step": 4}
    assert (claimed_steps(run), recorded_steps(run)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert [version.step for version in read_versions(run).values()] == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["n-000000002"]
    assert prompt_rows(run) == PROMPTS
    linked = [run.claim(3), run.record(3), run.version(4), next(run.streams.glob("*/*.arrow"))]
    for path in linked:
        assert os.path.samefile(path, parent.root / path.relative_to(run.root))
    names = {path.name for path in run.root.iterdir()}
    assert not names & {"result.json", "status.json", "mlflow-run.json", "services", "logs"}
    assert [path.name for path in parent.root.parent.iterdir() if path.name not in (KEY, "k~1")] == []


def test_what_is_of_another_history_is_dropped_and_what_failed_since_is_tried_again(parent: RunDir) -> None:
    run = forked(parent, 4).run
    [before, since] = [{drop.group_id: drop.reason for drop in read_drops(path)} for path in drop_files(run)]
    assert before == {"e0-p29-t0": "stale"}
    assert since == {"e0-p26-t0": "fenced", "e0-p27-t0": "fenced", "e0-p28-t0": "stale", "e0-p28-t1": "fenced"}
    assert outcome_ids(run) == ["e0-p31-t0", "e0-p32-t0"], "a later try has landed, and poison"
    report = audit(run, n_prompts=PROMPTS)
    assert report.violations == []
    rows = {state: n for state, n in report.rows.items() if n}
    assert rows == {"claimed": 16, "eligible": 8 + 4, "fenced": 3, "dropped": 2}
    positions = {state: n for state, n in report.positions.items() if n}
    assert positions == {"trained": 16, "pending": 8 + 4, "dropped": 3, "poison": 1, "unleased": 1}


def test_a_fork_goes_on_with_what_waits_and_leases_what_it_lacks(parent: RunDir) -> None:
    run = forked(parent, 4).run
    attempt = next_attempt(run)
    assert attempt == 3, "lease numbers and attempts go on"
    experience = Experience(run, CONFIG, attempt)
    experience.attach(PROMPTS, lambda epoch, position: position)
    experience.discover(full=True)
    experience.leases_known()
    assert (experience.next_step, experience.L) == (4, 12)
    taken = [experience.positions.take() for _ in range(6)]
    assert [(slot.position, slot.try_no) for slot in taken if slot] == [
        (26, 1), (27, 1), (28, 2), (30, 0), (33, 0), (34, 0)]
    claims = [experience.claim(step, 5) for step in (4, 5, 6)]
    groups = [group for claim in claims if isinstance(claim, Claim) for group in claim.groups]
    assert sorted((group.position, group.try_no) for group in groups) == [
        *((position, 0) for position in range(16, 26)), (29, 1), (31, 1)]
    assert audit(run, n_prompts=PROMPTS).violations == []


def test_a_fork_at_the_very_start_and_at_the_end(parent: RunDir) -> None:
    first, last = forked(parent, 0), forked(parent, STEPS)
    assert (first.key, first.checkpoint, claimed_steps(first.run)) == ("k~1", 0, [])
    assert (last.key, last.checkpoint, recorded_steps(last.run)) == ("k~2", 5, list(range(STEPS)))
    assert [[(drop.group_id, drop.reason) for drop in read_drops(path)] for path in drop_files(last.run)] == [
        [("e0-p29-t0", "stale")], [("e0-p28-t0", "stale")]], "its next try has landed"
    for run in (first.run, last.run):
        assert audit(run, n_prompts=PROMPTS).violations == []


# -- replay, and what comes after


def test_replay_gives_the_recorded_weights_and_then_the_overrides_apply(parent: RunDir) -> None:
    before = digest_of(parent)
    made = forked(parent, 4, "learner.lr=0.01", "checkpoint.every=7")
    run, attempt = made.run, next_attempt(made.run)
    assert [(r.from_step, r.changed) for r in [read_revision(run, 1)]] == [(4, {"learner.lr": (0.001, 0.01)})]
    assert read_identity(run).config.checkpoint.every == 7, "no training field: the fork's own from its beginning"
    assert read_identity(run).config.learner.lr == 0.001
    learner = learner_of(run, attempt)
    assert learner.restore() == 2
    for step in (2, 3):
        learner.train(step)
    check_replayed(run, read_identity(run).forked_from, first=2, attempt=attempt)
    assert learner.publish_current() == read_versions(parent)[4]
    experience = Experience(run, config_of(run, 1), attempt, 1)
    experience.discover(full=True)
    experience.claim(4, 5)
    learner.train(4)
    learner.close()
    assert read_claim(run, 4).groups == read_claim(parent, 4).groups, "the oldest that wait"
    assert [read_record(run, k).metrics["train/learning_rate"] for k in (3, 4)] == [0.001, 0.01]
    assert read_record(run, 4).weights_digest != read_record(parent, 4).weights_digest
    assert fold_claims(str(run.root)) == read_record(run, 4).weights_digest
    assert audit(run, n_prompts=PROMPTS).violations == []
    assert digest_of(parent) == before


def test_a_replay_with_other_weights_is_an_error_with_its_name(parent: RunDir) -> None:
    made = forked(parent, 4)
    run, attempt = made.run, next_attempt(made.run)
    stored = read_json(run.record(3))
    run.record(3).unlink()  # the link, not the parent's record
    other = stored["env"] | {"cpu": "other"}
    put_if_absent(run.record(3), to_json(stored | {"weights_digest": "0" * 32, "env": other}))
    learner = learner_of(run, attempt)
    for step in range(learner.restore(), 4):
        learner.train(step)
    learner.close()
    with pytest.raises(ForkDiverged, match=r"step 3, replayed, .* recorded are 0{32} \(the environment differs: "
                                           r"cpu was 'other'"):
        check_replayed(run, read_identity(run).forked_from, first=2, attempt=attempt)
    check_replayed(run, read_identity(run).forked_from, first=4, attempt=attempt)
    assert "0" * 32 not in parent.record(3).read_text()


# -- settings


def test_a_fork_begins_with_the_settings_that_its_step_had(parent: RunDir) -> None:
    base = config_of(parent, 0)
    put_revision(parent, base, resolve(base.model_dump(mode="json"), {"learner": {"lr": 0.5}}))
    groups = [all_by(3, group) for group in random_groups(STEPS)]
    claim_groups(parent, base, STEPS, groups, revision=1, attempt=2)
    assert [settings_at(parent, step)[0] for step in (0, 5, 6)] == [0, 0, 1]
    past, now = forked(parent, 5).run, forked(parent, 6).run
    assert (current_revision(past), current_revision(now)) == (0, 1)
    assert config_of(now, 1).learner.lr == 0.5


REFUSED = {
    "the future": (7, (), r"--from-step 7: run k has 6 recorded steps, .* use at most 6"),
    "another identity": (4, ("seed=9", "learner.lr=1"), r"identity fields: seed is 1, asked for 9\."),
    "a greedy baseline that nothing has": (4, ("learner.advantage.name=remax",),
                                           r"learner.advantage.name: run k has sampled for \w+, without a greedy"),
    "nothing to train": (4, ("total_steps=4",), r"total_steps: a fork from step 4 would train nothing; use more"),
}


@pytest.mark.parametrize(("step", "sets", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_fork_is_refused(parent: RunDir, step: int, sets: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        forked(parent, step, *sets)
    assert [path.name for path in parent.root.parent.iterdir()] == [KEY]


# -- what is gone, damaged, or in the way


def test_a_step_whose_shard_is_gone_cannot_be_replayed_but_a_checkpoint_can_be_forked(parent: RunDir) -> None:
    [key] = read_claim(parent, 2).shard_digests
    stream, seq = key.rsplit("/", 1)
    parent.shard(stream, int(seq)).unlink()
    with pytest.raises(ConfigError, match=rf"step 2 cannot be replayed: its shard {key} is retired; .* \[2, 5\]"):
        forked(parent, 4)
    assert [path.name for path in parent.root.parent.iterdir()] == [KEY]
    assert forked(parent, 5).checkpoint == 5


def test_a_damaged_checkpoint_is_passed_over(parent: RunDir) -> None:
    damaged = parent.checkpoint(5) / "parameters.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    made = forked(parent, 5)
    assert (made.checkpoint, [path.name for path in made.run.checkpoints.iterdir()]) == (2, ["n-000000002"])


def test_forks_are_numbered_and_what_died_half_way_is_removed(parent: RunDir) -> None:
    runs = parent.root.parent
    dead, busy = (RunDir(runs / f".k~1.{n}-{n * 12}.tmp") for n in "12")
    put_if_absent(dead.claim(0), b"{}")
    lock = OwnerLock(busy)
    assert [forked(parent, 4).key, forked(parent, 2).key] == ["k~1", "k~2"]
    assert sorted(path.name for path in runs.iterdir()) == [busy.root.name, KEY, "k~1", "k~2"]
    lock.release()
    shutil.rmtree(runs / "k~1")
    assert forked(parent, 4).key == "k~3", "a number is not given twice while a later one stands"
    assert not busy.root.exists()


def test_a_fork_takes_the_orders_of_its_prompts_along(parent: RunDir) -> None:
    put_if_absent(parent.order(0), to_json({"epoch": 0, "order": [1, 0]}))
    run = forked(parent, 4).run
    assert run.order(0).read_bytes() == parent.order(0).read_bytes()


def test_killed_at_any_moment_a_fork_is_whole_or_not_there(parent: RunDir) -> None:
    before, runs, rng = digest_of(parent), parent.root.parent, random.Random(4)
    made: list[RunDir] = []
    for kill in range(64):
        if (child := os.fork()) == 0:
            while True:
                forked(parent, 4)
        time.sleep(rng.uniform(0.02, 0.3 + 0.03 * kill))  # on a busy machine none is finished sooner
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        made = [RunDir(path) for path in runs.iterdir() if not path.name.startswith(".") and path.name != KEY]
        if kill >= 7 and made:
            break
    assert made, "some were finished"
    for run in made:
        assert read_identity(run).run_key == run.root.name
        assert (recorded_steps(run), audit(run, n_prompts=PROMPTS).violations) == ([0, 1, 2, 3], [])
        assert {drop.reason for path in drop_files(run) for drop in read_drops(path)} == {"stale", "fenced"}
    forked(parent, 4)
    assert [path.name for path in runs.iterdir() if path.name.startswith(".")] == []
    assert digest_of(parent) == before


def test_a_run_that_cannot_go_back_to_step_0_begins_again_by_the_fork_that_the_refusal_names(parent: RunDir) -> None:
    assert len(retire(parent, 5, attempt=2).shards) == 5
    for n in (2, 5):
        (parent.checkpoint(n) / "parameters.safetensors").write_bytes(b"rot")
    with pytest.raises(CheckpointDamaged, match=r"was retired.*`headway rerun k --from-step 0`$"):
        newest_whole(parent)
    made = forked(parent, 0)
    assert (made.key, made.checkpoint, newest_whole(made.run)) == ("k~1", 0, None)
    report = audit(made.run, n_prompts=PROMPTS)
    assert (report.violations, report.claims, report.rows["fenced"], report.rows["eligible"]) == ([], 0, 13, 0)
    assert report.positions["unleased"] == 21, "those of the retired shards among them: they are leased again"


def test_a_fork_of_a_run_that_has_retired_shards_says_that_it_never_had_them(parent: RunDir) -> None:
    put_drops(parent, 6, [Drop(group_id="e0-p27-t0", reason="stale", n_tokens=3),
                          Drop(group_id="e0-p29-t1", reason="stale", n_tokens=3),
                          Drop(group_id="e0-p28-t1", reason="stale", n_tokens=3)], attempt=2)
    gone = retire(parent, 5, attempt=2).shards
    assert len(gone) == 6, "those of steps 0 to 4, and one of which all was dropped since"
    before = digest_of(parent)
    run = forked(parent, 5).run
    assert read_retired(run).shards == set(gone)
    report = audit(run, n_prompts=PROMPTS)
    assert (report.violations, report.rows["claimed"], report.rows["eligible"]) == ([], 20, 9)
    attempt = next_attempt(run)
    experience = Experience(run, CONFIG, attempt)
    assert isinstance(experience.claim(5, 5), Claim)
    assert audit(run, n_prompts=PROMPTS).violations == []
    assert digest_of(parent) == before
