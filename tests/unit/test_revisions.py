"""Config revisions: what may be amended, what is recorded, and what a step is trained by."""

from __future__ import annotations

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from flows.looking import show_status
from flows.presets import base_of, load_preset
from rl_core.config import Config, field_kinds
from rl_core.errors import BrokenFile, ConfigError
from rl_core.experience.audit import audit
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import EndOfData, put_end, read_claim
from rl_core.experience.shards import ShardWriter
from rl_core.learner import batch as stages
from rl_core.learner.learner import Learner, fold_claims
from rl_core.plan import flatten, make_plan, parse_overrides, resolve
from rl_core.records import read_record
from rl_core.revisions import (
    amend_command,
    check_same_training,
    config_of,
    current_revision,
    put_revision,
    read_revision,
    revisions,
    trained_by,
)
from rl_core.run_dir import RunDir, put_if_absent, replace_file, to_json
from rl_core.run_identity import open_identity, read_identity
from rl_core.schedules import learning_rate
from rl_core.types import Claim
from tasks.inspection import is_completed, run_status
from tasks.tracking import amendments
from tests.builders import make_group
from tests.learning import all_by, claim_groups, random_groups, rows_of, sampled_by, start_attempt, write_model

TINY = load_preset("tiny-cpu")


def wanted(*sets: str, base: Config | None = None) -> Config:
    """The settings of tiny-cpu, or of a run, with these on top."""
    return resolve(TINY if base is None else base.model_dump(mode="json"), parse_overrides(sets))


def new_run(path: Path, config: Config | None = None, claims: int = 0) -> RunDir:
    """A run as its first start leaves it; of its claims only the names."""
    run = RunDir(path)
    open_identity(run, "k", "tiny-cpu", config or wanted())
    for step in range(claims):
        put_if_absent(run.claim(step), b"{}", fsync=False)
    return run


# -- which fields can be amended

AMENDED: dict[str, tuple[list[str], str | None]] = {
    "total_steps": (["total_steps=400"], None),
    "rollout.over_sampling": (["rollout.over_sampling=2"], None),
    "rollout.session": (["rollout.session=./mine.py:again"], None),
    "rollout.session_answers": (["rollout.session_answers=3"], None),
    "reward": (["reward=regex", "scoring.pattern='[0-9]+'"], None),
    "scoring.signature": (["reward=./reward.py:score", "scoring.signature=verl"], None),
    "scoring.pattern": (["reward=regex", "scoring.pattern='answer: (.*)'"], None),
    "scoring.weight": (["scoring.weight=2"], None),
    "scoring.parts": (["scoring.parts=[{part: short, reward: './mine.py:short', weight: 0.1}]"], None),
    "scoring.code.time_s": (["reward=code", "scoring.code.time_s=1"], None),
    "scoring.code.total_s": (["reward=code", "scoring.code.total_s=5"], None),
    "scoring.code.memory_bytes": (["reward=code", "scoring.code.memory_bytes=134217728"], None),
    "scoring.code.output_bytes": (["reward=code", "scoring.code.output_bytes=1000"], None),
    "scoring.code.partial": (["reward=code", "scoring.code.partial=true"], None),
    "data.epochs": (["data.epochs=3"], None),
    "sampling.temperature": (["sampling.temperature=0.7"], None),
    "sampling.top_p": (["sampling.top_p=0.9"], "must sample the whole distribution"),
    "sampling.top_k": (["sampling.top_k=5"], "must sample the whole distribution"),
    "sampling.min_p": (["sampling.min_p=0.1"], "must sample the whole distribution"),
    "sampling.max_new_tokens": (["sampling.max_new_tokens=12"], None),
    "sampling.stop": (["sampling.stop=['.', 'yes']"], None),
    "sampling.stop_token_ids": (["sampling.stop_token_ids=[3]"], None),
    "staleness.bound": (["staleness.bound=0.5"], None),
    "staleness.policy": (["staleness.policy=mask"], None),
    "staleness.hard_max": (["staleness.hard_max=3"], None),
    "rollout.min_group": (["rollout.min_group=3"], None),
    "rollout.no_spread": (["rollout.no_spread=drop"], None),
    "rollout.group_filter": (["rollout.group_filter=./mine.py:keep"], None),
    "learner.advantage.name": (["learner.advantage.name=rloo"], None),
    "learner.advantage.path": (["learner.advantage.name=function",
                                "learner.advantage.path=./docs/examples/hooks.py:advantage"], None),
    "learner.loss.path": (["learner.loss={name: function, path: './docs/examples/hooks.py:loss'}"], None),
    "learner.correction.path": (["learner.correction.weights=function",
                                 "learner.correction.path=./docs/examples/hooks.py:correction"], None),
    "learner.metrics": (["learner.metrics=./docs/examples/hooks.py:metrics"], None),
    "learner.advantage.normalize_by_std": (["learner.advantage.normalize_by_std=false"], None),
    "learner.advantage.eps": (["learner.advantage.eps=1e-3"], None),
    "learner.advantage.group_of_one": (["learner.advantage.group_of_one=raw"], None),
    "learner.advantage.parts": (["learner.advantage.name=gdpo", "learner.advantage.parts=[{part: size}]"], None),
    "learner.advantage.gamma": (["learner.advantage.name=reinforce_plus_plus", "learner.advantage.gamma=0.9"], None),
    "learner.advantage.f_norm": (["learner.advantage.name=gpg", "learner.advantage.f_norm=2"], None),
    "learner.advantage.lam": (["learner.advantage.name=gae", "learner.advantage.lam=0.9"], None),
    "learner.loss.name": (["learner.loss.name=decoupled_ppo"], None),
    "learner.loss.clip_low": (["learner.loss.clip_low=0.1"], None),
    "learner.loss.clip_high": (["learner.loss.clip_high=0.3"], None),
    "learner.loss.dual_clip": (["learner.loss.dual_clip=null"], None),
    "learner.loss.proximal": (["learner.loss.name=decoupled_ppo", "learner.loss.proximal=loglinear"], None),
    "learner.loss.aggregation": (["learner.loss.aggregation=seq_mean_token_mean"], None),
    "learner.loss.entropy_coef": (["learner.loss.entropy_coef=0.01"], None),
    "learner.loss.truncated": (["learner.loss.truncated=mask"], None),
    "learner.loss.overlong_buffer": (["learner.loss.truncated=penalty", "learner.loss.overlong_buffer=2"], None),
    "learner.loss.overlong_factor": (["learner.loss.truncated=penalty", "learner.loss.overlong_buffer=2",
                                      "learner.loss.overlong_factor=0.5"], None),
    "learner.loss.top_entropy_quantile": (["learner.loss.top_entropy_quantile=0.2"], None),
    "learner.loss.behavior_penalty": (["learner.loss.behavior_penalty=0.1"], None),
    "learner.loss.delta": (["learner.loss.delta=1.5"], None),
    "learner.loss.share": (["learner.loss.name=clip_cov", "learner.loss.share=0.01"], None),
    "learner.loss.cov_low": (["learner.loss.name=clip_cov", "learner.loss.cov_low=0.5"], None),
    "learner.loss.cov_high": (["learner.loss.name=clip_cov", "learner.loss.cov_high=7"], None),
    "learner.loss.scope": (["learner.loss.name=kl_cov", "learner.loss.scope=micro_batch"], None),
    "learner.loss.coef": (["learner.loss.name=kl_cov", "learner.loss.coef=1"], None),
    "learner.loss.tau": (["learner.loss.name=m2po", "learner.loss.tau=0.1"], None),
    "learner.loss.opsm_delta": (["learner.loss.name=opsm", "learner.loss.opsm_delta=0.1"], None),
    "learner.loss.anchor": (["learner.loss={name: opsm, opsm_delta: 0.1, anchor: proximal}", "learner.passes=2"], None),
    "learner.loss.ratio_cap": (["learner.loss.name=dppo_tv", "learner.loss.ratio_cap=5"], None),
    "learner.loss.tau_positive": (["learner.loss.name=sapo", "learner.loss.tau_positive=2"], None),
    "learner.loss.tau_negative": (["learner.loss.name=sapo", "learner.loss.tau_negative=2"], None),
    "learner.loss.beta": (["learner.loss.name=dro", "learner.loss.beta=0.1"], None),
    "learner.loss.ratio_low": (["learner.loss.name=cispo", "learner.loss.ratio_low=0.5"], None),
    "learner.loss.ratio_high": (["learner.loss.name=cispo", "learner.loss.ratio_high=5"], None),
    "learner.correction.mode": (["learner.correction.mode=bypass"], None),
    "learner.correction.weights": (["learner.correction.weights=token_truncate"], None),
    "learner.correction.icepop_low": (["learner.correction.weights=token_icepop",
                                       "learner.correction.icepop_low=0.8"], None),
    "learner.correction.icepop_high": (["learner.correction.weights=token_icepop",
                                        "learner.correction.icepop_high=2"], None),
    "learner.correction.normalize": (["learner.correction.weights=token_truncate",
                                      "learner.correction.normalize=true"], None),
    "learner.correction.rejection": (["learner.correction.rejection=[{rule: token_k1, high: 2}]"], None),
    "learner.correction.rejected": (["learner.correction.rejection=[{rule: token_k1, high: 2}]",
                                     "learner.correction.rejected=exclude"], None),
    "learner.kl.use": (["learner.kl.use=loss"], None),
    "learner.kl.estimator": (["learner.kl.use=loss", "learner.kl.estimator=k2"], None),
    "learner.kl.coef": (["learner.kl.use=loss", "learner.kl.coef=0.1"], None),
    "learner.kl.unbiased": (["learner.kl.use=loss", "learner.kl.unbiased=true"], None),
    "learner.kl.target": (["learner.kl.use=reward", "learner.kl.target=0.1"], None),
    "learner.kl.horizon": (["learner.kl.use=reward", "learner.kl.target=0.1", "learner.kl.horizon=100"], None),
    "learner.reference.refresh_every": (["learner.kl.use=loss", "learner.reference.refresh_every=10"], None),
    "learner.reference.refresh_mix": (["learner.kl.use=loss", "learner.reference.refresh_every=10",
                                       "learner.reference.refresh_mix=0.5"], None),
    "learner.critic.lr": (["learner.advantage.name=gae", "learner.critic.lr=1e-4"], None),
    "learner.critic.weight_decay": (["learner.advantage.name=gae", "learner.critic.weight_decay=0.1"], None),
    "learner.critic.max_grad_norm": (["learner.advantage.name=gae", "learner.critic.max_grad_norm=0.5"], None),
    "learner.critic.warmup_steps": (["learner.advantage.name=gae", "learner.critic.warmup_steps=5"], None),
    "learner.critic.clip": (["learner.advantage.name=gae", "learner.critic.clip=0.2"], None),
    "learner.teacher.use": (["learner.teacher.use=loss"], "needs the directory of a teacher"),
    "learner.teacher.coef": (["learner.teacher.coef=0.5"], "nothing reads it without learner.teacher.use"),
    "learner.teacher.estimator": (["learner.teacher.estimator=k2"], "nothing reads it without learner.teacher.use"),
    "learner.teacher.top_k": (["learner.teacher.top_k=8"], "nothing reads it without learner.teacher.use"),
    "learner.resampling": (["learner.resampling=max_min"], None),
    "learner.resampling_power": (["learner.resampling=pow", "learner.resampling_power=1"], None),
    "learner.correction.cap": (["learner.correction.weights=token_truncate", "learner.correction.cap=1.5"], None),
    "learner.passes": (["learner.passes=2"], None),
    "learner.minibatch_groups": (["learner.minibatch_groups=6"], None),
    "learner.lr": (["learner.lr=1e-5"], None),
    "learner.warmup_steps": (["learner.warmup_steps=1"], None),
    "learner.decay": (["learner.decay=cosine"], None),
    "learner.decay_steps": (["learner.decay_steps=70"], None),
    "learner.final_lr_ratio": (["learner.final_lr_ratio=0.2"], None),
    "learner.betas": (["learner.betas=[0.8, 0.99]"], None),
    "learner.adam_eps": (["learner.adam_eps=1e-6"], None),
    "learner.weight_decay": (["learner.weight_decay=0.1"], None),
    "learner.max_grad_norm": (["learner.max_grad_norm=0.5"], None),
    "scoring.judge.model": (["scoring.judge.model=m"], None),
    "scoring.judge.prompt": (["scoring.judge.prompt='rate {answer}'"], None),
    "scoring.judge.pattern": (["scoring.judge.pattern='[0-9]+'"], None),
    "scoring.judge.low": (["scoring.judge.low=1"], None),
    "scoring.judge.high": (["scoring.judge.high=5"], None),
    "scoring.judge.right": (["scoring.judge.right=0.5"], None),
    "scoring.judge.temperature": (["scoring.judge.temperature=0.7"], None),
    "scoring.judge.max_tokens": (["scoring.judge.max_tokens=64"], None),
    "scoring.model.path": (["reward=reward_model", "scoring.model.path=m"], None),
    "scoring.model.label": (["scoring.model.label=1"], None),
    "scoring.model.squash": (["scoring.model.squash=true"], None),
    "scoring.model.right": (["scoring.model.right=0.5"], None),
    "scoring.model.dtype": (["scoring.model.dtype=bfloat16"], None),
}
"""Field -> the --set values that amend it (others with it where it means nothing alone), and why it is refused."""


def test_every_training_field_is_in_the_table_and_in_the_document() -> None:
    training = {name for name, kind in field_kinds().items() if kind == "training"}
    assert set(AMENDED) == training
    document = (Path(__file__).resolve().parents[2] / "docs" / "changing-a-run.md").read_text()
    assert [name for name in sorted(training) if f"`{name}`" not in document] == []


@pytest.mark.parametrize("name", AMENDED)
def test_a_training_field_is_amended_from_the_next_step_or_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    sets, reason = AMENDED[name]
    run = new_run(tmp_path / "runs" / "k", claims=7)
    before = read_identity(run).config
    if reason is not None:
        with pytest.raises(ConfigError, match=rf"{re.escape(name.rpartition('.')[0])}\.\w+: .*{reason}"):
            make_plan(wanted(*sets, base=before))
        return
    now = wanted(*sets, base=before)
    make_plan(now)
    named = {text.partition("=")[0] for text in sets if "={name" not in text}
    with pytest.raises(ConfigError, match=rf"other training fields: .*{re.escape(name)} is .*, asked for ") as refused:
        open_identity(run, "k", "tiny-cpu", now)
    assert current_revision(run) == 0
    [command] = re.findall(r"headway train --run-key k --amend .*", str(refused.value))
    said = [value for word, value in pairwise(shlex.split(command)) if word == "--set"]
    assert wanted(*said, base=before) == now, "the command that the refusal gives amends to what was asked for"

    assert open_identity(run, "k", "tiny-cpu", now, amend=True).config == before
    made = read_revision(run, current_revision(run))
    assert (made.revision, made.from_step, made.config) == (1, 7, now)
    assert named <= set(made.changed)
    others = {field: pair for field, pair in made.changed.items() if field not in named}  # of another variant
    assert not others or now.learner.loss.name != "ppo_clip" or now.learner.advantage.name != "grpo"
    assert made.changed[name] == (flatten(before).get(name), flatten(now)[name])
    assert (config_of(run, 0), config_of(run, 1)) == (before, now)
    open_identity(run, "k", "tiny-cpu", now)  # every later start goes on with it
    with pytest.raises(ConfigError, match="as amended by revision 1: "):
        open_identity(run, "k", "tiny-cpu", before)


LANDED = {
    # began with, amended to -> why what has landed does not do
    "without a baseline": ("learner.advantage.name=rloo", "remax", "run k has sampled for rloo, without a greedy"),
    "rewards below 0": ("reward=./mine.py:score", "maxrl",
                        "takes rewards of at least 0, and those that groups of run k have")}


@pytest.mark.parametrize(("began", "estimator", "why"), LANDED.values(), ids=LANDED)
def test_no_run_is_amended_to_an_estimator_that_what_has_landed_is_not_for(tmp_path: Path, began: str, estimator: str,
                                                                           why: str) -> None:
    run = new_run(tmp_path / "runs" / "k", wanted(began))
    now = wanted(f"learner.advantage.name={estimator}", base=read_identity(run).config)
    with pytest.raises(ConfigError, match=f"name: {why}"):
        open_identity(run, "k", "tiny-cpu", now, amend=True)
    assert current_revision(run) == 0


def test_the_command_has_all_that_differs_but_a_password() -> None:
    now = wanted("learner.lr=1e-5", "learner.threads=2", "checkpoint.every=9", "sampling.stop=['a b']",
                 "reward=./a b.py:f", "tracking.uri=postgresql://me:secret@host/db")
    assert amend_command("k", wanted(), now) == (
        "headway train --run-key k --amend --set learner.lr=1e-05 --set 'reward=./a b.py:f' "
        """--set 'sampling.stop=["a b"]' --set checkpoint.every=9 --set learner.threads=2""")


@pytest.mark.parametrize("amend", [False, True])
def test_identity_fields_are_refused_by_name_with_and_without_amend(amend: bool, tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs" / "k")
    fields = {name: value for name, value in flatten(wanted()).items() if field_kinds()[name] == "identity"}
    other = {"seed": "seed=9", "groups_per_step": "groups_per_step=8", "group_size": "group_size=4",
             "publish_every": "publish_every=2", "model.layers": "model.layers=3", "data.shuffle": "data.shuffle=false",
             "data.train": "data.train=rows.jsonl", "data.max_prompt_tokens": "data.max_prompt_tokens=99"}
    assert set(other) <= set(fields)
    for name, text in other.items():
        with pytest.raises(ConfigError, match=rf"other identity fields: {re.escape(name)} is .* cannot be amended"):
            open_identity(run, "k", "tiny-cpu", wanted(text, "learner.lr=1", "total_steps=400"), amend=amend)
    assert revisions(run) == ()


def test_fields_of_how_and_where_it_runs_are_no_amendment(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs" / "k")
    now = wanted("rollout.workers=2", "checkpoint.every=3", "learner.threads=2", "deadlines.claim_s=9")
    open_identity(run, "k", "tiny-cpu", now)
    open_identity(run, "k", "tiny-cpu", now, amend=True)
    assert revisions(run) == () and not run.revisions.exists()


def test_nothing_is_amended_where_there_is_no_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "k")
    with pytest.raises(ConfigError, match=r"there is no run k yet .* without --amend the same command begins it"):
        open_identity(run, "k", "tiny-cpu", wanted(), amend=True)
    assert not run.root.exists()


# -- a run that cannot do what the amendment says

ALL_STEPS = EndOfData(step=7, reason="steps", left_over=0)
ALL_DATA = EndOfData(step=7, reason="data", left_over=3)
ENDED: dict[str, tuple[list[str], EndOfData | None, list[str], str | None]] = {
    "fewer steps than are claimed": ([], None, ["total_steps=6"], "total_steps: 7 steps .* use at least 7 .got 6"),
    "as many steps as are claimed": ([], None, ["total_steps=7"], None),
    "all steps done, other settings": (["total_steps=7"], ALL_STEPS, ["learner.lr=1"],
                                       "total_steps: all 7 steps .* use more than 7 .got 7"),
    "all steps done, more of them": (["total_steps=7"], ALL_STEPS, ["total_steps=8", "learner.lr=1"], None),
    "the data ended, more steps": (["data.epochs=2"], ALL_DATA, ["total_steps=900"],
                                   "data.epochs: the data .* ended after 7 steps.* more than 2, or null .*got 2"),
    "the data ended, fewer passes": (["data.epochs=2"], ALL_DATA, ["data.epochs=1"], "data.epochs: .*got 1"),
    "the data ended, one more pass": (["data.epochs=2"], ALL_DATA, ["data.epochs=3"], None),
    "the data ended, endless passes": (["data.epochs=2"], ALL_DATA, ["data.epochs=null"], None),
}


@pytest.mark.parametrize(("first", "end", "then", "message"), ENDED.values(), ids=ENDED)
def test_an_amendment_that_trains_nothing_is_refused_by_the_field_that_would_mend_it(
        first: list[str], end: EndOfData | None, then: list[str], message: str | None, tmp_path: Path) -> None:
    before = wanted(*first)
    run = new_run(tmp_path / "runs" / "k", before, claims=7)
    if end is not None:
        put_end(run, end, revision=0, attempt=1)
    if message is None:
        open_identity(run, "k", "tiny-cpu", wanted(*then, base=before), amend=True)
        assert current_revision(run) == 1
    else:
        with pytest.raises(ConfigError, match=message):
            open_identity(run, "k", "tiny-cpu", wanted(*then, base=before), amend=True)
        assert current_revision(run) == 0


# -- the files

def test_amendments_follow_one_another_and_a_gap_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs" / "k")
    first = wanted("total_steps=200")
    second = wanted("total_steps=200", "learner.lr=1e-5")
    assert put_revision(run, wanted(), first) == 1
    assert put_revision(run, first, first) == 1, "nothing differs: nothing is recorded"
    assert put_revision(run, first, second) == 2
    assert [one.changed for one in revisions(run)] == [{"total_steps": (180, 200)}, {"learner.lr": (5e-4, 1e-5)}]
    run.settings(1).unlink()
    with pytest.raises(BrokenFile, match=r"rev-000001\.json: absent, but there is revision 2; restore it"):
        current_revision(run)


BROKEN = {"not JSON": b"{", "without its settings": b'{"format": 1, "revision": 1}',
          "with settings of another kind": b'{"format": 1, "revision": 1, "config": {"seed": "x"}}'}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_revision_that_cannot_be_read_is_a_broken_file(content: bytes, tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs" / "k")
    put_if_absent(run.settings(1), content)
    with pytest.raises(BrokenFile, match=r"rev-000001\.json: not "):
        revisions(run)
    with pytest.raises(BrokenFile, match=r"rev-000007\.json: absent, but steps of the run were made under revision 7"):
        config_of(run, 7)


def test_a_step_is_trained_by_its_revision_on_the_machine_of_this_start() -> None:
    stored = wanted("learner.lr=1e-5", "learner.loss.clip_low=0.1", "learner.threads=4", "failure.reward_failures=1")
    now = wanted("learner.threads=2", "total_steps=400")
    made = trained_by(stored, now)
    assert (made.learner.lr, made.learner.loss.clip_low, made.total_steps) == (1e-5, 0.1, 180)
    assert (made.learner.threads, made.failure.reward_failures) == (2, now.failure.reward_failures)


def test_without_a_preset_the_stored_settings_are_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    assert base_of(None, None) == base_of(None, "k") == ("tiny-cpu", TINY)
    first = wanted("learner.lr=1e-3", "rollout.workers=3")
    new_run(tmp_path / "runs" / "k", first)
    name, settings = base_of(None, "k")
    assert (name, resolve(settings, {})) == ("tiny-cpu", first)
    assert base_of("tiny-cpu", "k") == ("tiny-cpu", TINY)
    then = wanted("total_steps=400", base=first)
    put_revision(RunDir(tmp_path / "runs" / "k"), first, then)
    assert resolve(base_of(None, "k")[1], {}) == then
    with pytest.raises(ConfigError, match=r"to train on with the run's own: headway train --run-key k$"):
        check_same_training("k", then, first, 1)


def test_an_amendment_re_opens_a_completed_run_and_shows_in_status_and_mlflow(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    run = new_run(tmp_path / "runs" / "k", claims=3)
    replace_file(run.result, to_json({"status": "completed", "attempt": 0, "revision": 0, "ended": {}}))
    assert is_completed(run) and run_status("k")["state"] == "completed"
    assert (amendments(run), run_status("k")["amendments"], run_status("k")["revision"]) == ({}, [], 0)

    put_revision(run, wanted(), wanted("total_steps=400"))
    assert not is_completed(run), "whatever happened to the start that amended it"
    status = run_status("k")
    assert (status["state"], status["total_steps"], status["revision"]) == ("stopped", 400, 1)
    assert status["amendments"] == [{"revision": 1, "from_step": 3, "changed": {"total_steps": [180, 400]}}]
    assert amendments(run) == {"headway.revision": "1",
                               "headway.amend.1": '{"from_step": 3, "total_steps": [180, 400]}'}
    assert show_status("k", as_json=False) == 0
    assert "revision    1, from step 3 on: total_steps 180 -> 400" in capsys.readouterr().out
    replace_file(run.result, to_json({"status": "completed", "attempt": 0, "revision": 1, "ended": {}}))
    assert is_completed(run)


# -- claims and the audit

def experience(run: RunDir, config: Config, revision: int = 0) -> Experience:
    put_if_absent(run.attempt(1), b"{}", fsync=False)
    return Experience(run, config, 1, revision)


def test_claims_name_their_revision_are_judged_by_it_and_the_audit_holds(tmp_path: Path) -> None:
    before = wanted("groups_per_step=2", "group_size=4", "total_steps=2", "data.epochs=1", "storage.fsync=false")
    run = new_run(tmp_path / "run", before)
    writer = ShardWriter(run, "w", 1, {}, False)
    writer.land([make_group(i) for i in range(5)])
    first = experience(run, before)
    for step in range(2):
        assert isinstance(first.claim(step, 5), Claim)
    assert first.claim(2, 5) == EndOfData(step=2, reason="steps", left_over=1)
    assert audit(run).holds

    now = wanted("total_steps=4", "staleness.bound=1", "staleness.policy=drop", base=before)
    open_identity(run, "k", "tiny-cpu", now, amend=True)
    second = experience(run, now, 1)
    writer.land([make_group(i, versions=[2]) for i in range(5, 9)])
    claim = second.claim(2, 5)
    assert isinstance(claim, Claim)
    assert (claim.revision, claim.eta, claim.hard_max, claim.policy) == (1, "1", 4, "drop")
    assert [drop.group_id for drop in claim.dropped] == ["e0-p4-t0"], "within the bound of before, over that of now"
    assert isinstance(second.claim(3, 5), Claim)
    assert second.claim(4, 5) == EndOfData(step=4, reason="steps", left_over=0)
    assert [read_claim(run, step).revision for step in range(4)] == [0, 0, 1, 1]
    assert audit(run).violations == []

    third = wanted("total_steps=9", base=now)
    open_identity(run, "k", "tiny-cpu", third, amend=True)
    assert audit(run).holds, "re-opened, nothing claimed yet"
    writer.land([make_group(i, versions=[4]) for i in (9, 10)])
    experience(run, third, 1).claim(4, 5)  # by a revision that had ended
    assert audit(run).violations == ["claim 4 is of revision 1, which ended at step 4"]
    run.settings(1).rename(run.root / "elsewhere")
    assert "claim 2 is of revision 1, which is not there" in audit(run).violations


def test_the_audit_sees_a_claim_that_its_revision_does_not_explain(tmp_path: Path) -> None:
    before = wanted("groups_per_step=2", "group_size=4", "storage.fsync=false")
    run = new_run(tmp_path / "run", before)
    ShardWriter(run, "w", 1, {}, False).land([make_group(i) for i in range(4)])
    experience(run, before).claim(0, 5)
    experience(run, wanted("staleness.bound=4", base=before)).claim(1, 5)
    assert audit(run).violations == ["claim 1 is of revision 0, whose bound, hard_max and policy are ('2', 8, 'keep'), "
                                     "not ('4', 16, 'keep')"]


def attached(run: RunDir, config: Config, revision: int) -> Experience:
    """With a pump over four prompts, in file order, whose one worker serves the first weights."""
    made = experience(run, config, revision)
    made.attach(4, lambda dataset_epoch, position: position)
    made.discover(full=True)
    made.leases_known()
    made.serves("w", 0)
    return made


def test_more_passes_open_data_that_has_ended_and_fewer_end_it_with_what_has_begun(tmp_path: Path) -> None:
    once = wanted("groups_per_step=2", "group_size=4", "data.epochs=1", "storage.fsync=false")
    run = new_run(tmp_path / "run", once)
    writer = ShardWriter(run, "w", 1, {}, False)
    writer.land([make_group(i) for i in range(4)])
    first = attached(run, once, 0)
    for step in range(2):
        assert isinstance(first.claim(step, 5), Claim)
    assert first.grant(["w"]) == []
    assert first.claim(2, 5) == EndOfData(step=2, reason="data", left_over=0)

    thrice = wanted("data.epochs=3", base=once)
    open_identity(run, "k", "tiny-cpu", thrice, amend=True)
    second = attached(run, thrice, 1)
    assert [lease.group_id for lease in second.grant(["w"])] == ["e1-p0-t0", "e1-p1-t0"]
    writer.land([make_group(i, dataset_epoch=1) for i in range(3)])
    second.discover(full=True)
    assert isinstance(second.claim(2, 5), Claim)
    assert audit(run, n_prompts=4, epochs=3).violations == []

    open_identity(run, "k", "tiny-cpu", wanted("data.epochs=1", base=thrice), amend=True)
    third = attached(run, once, 2)
    assert third.grant(["w"]) == [], "position 3 of the second pass was never leased, and is not any more"
    assert third.claim(3, 5) == EndOfData(step=3, reason="data", left_over=1)
    assert audit(run, n_prompts=4, epochs=1).violations == []


# -- the learner

def small(*sets: str) -> Config:
    return wanted("groups_per_step=2", "group_size=3", "total_steps=60", "learner.warmup_steps=0", "learner.lr=1e-3",
                  "learner.decay=linear", "sampling.max_new_tokens=12", "storage.fsync=false", *sets)


def learner_of(run: RunDir, config: Config, revision: int = 0, attempt: int = 1) -> Learner:
    return Learner(root=str(run.root), config=config, attempt=attempt, rank=0, ranks=1, rendezvous="",
                   revision=revision)


def claim(run: RunDir, config: Config, step: int, *, revision: int = 0, version: int = 0, attempt: int = 1) -> None:
    groups = random_groups(step, config.groups_per_step, config.group_size, rewards=[1.0, 0.0, 0.3])
    groups = [all_by(version, group) for group in groups]
    if step == 0:  # tokens of the very weights of the step are measured against them
        groups = [sampled_by(AutoModelForCausalLM.from_pretrained(run.model), group) for group in groups]
    claim_groups(run, config, step, groups, revision=revision, attempt=attempt)


def trained(learner: Learner, steps: range) -> str:
    """The weights digest of the last of these steps."""
    records = [learner.train(step) for step in steps]
    assert records[-1] is not None
    return records[-1].weights_digest


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two steps of a run, a checkpoint behind them, and a third claim under revision 0."""
    config = small("learner.passes=2")
    run = new_run(tmp_path_factory.mktemp("begun") / "run", config)
    write_model(run.model)
    start_attempt(run)
    for step in range(3):
        claim(run, config, step)
    learner = learner_of(run, config)
    learner.restore()
    learner.publish_current()
    trained(learner, range(2))
    learner.checkpoint()
    return run


ALIKE = ("learner.kl.", "learner.correction.icepop", "learner.correction.mode", "learner.correction.normalize",
         "learner.correction.rejected", "learner.loss.overlong", "learner.loss.delta", "learner.resampling_power",
         "learner.reference.", "learner.critic.", "learner.teacher.")
"""Those that act as their neighbours do, or on nothing yet."""
LEARNED = {
    **{name: sets for name, (sets, reason) in AMENDED.items() if name.startswith("learner.") and reason is None
       and name in flatten(wanted()) and not name.startswith(ALIKE)},
    "learner.loss.tau": ["learner.loss.name=m2po", "learner.loss.tau=0.001"],
    "total_steps": ["total_steps=400"], "staleness.policy": ["staleness.policy=mask"],
    "learner.advantage.eps": ["learner.advantage.eps=0.5"], "learner.passes": ["learner.passes=3"],
    "learner.minibatch_groups": ["learner.minibatch_groups=1"], "learner.warmup_steps": ["learner.warmup_steps=9"],
    "learner.loss.clip_low": ["learner.loss.clip_low=0.0001"],
    "learner.loss.clip_high": ["learner.loss.clip_high=5"],
    "learner.kl.use": ["learner.kl={use: loss, coef: 0.5}"],
    "learner.critic.lr": ["learner.advantage.name=gae", "learner.critic.lr=1e-3"],
}
NO_DIFFERENCE_HERE = {"learner.advantage.group_of_one", "learner.loss.dual_clip", "learner.loss.truncated",
                      "staleness.policy", "learner.metrics"}
"""Settings that the claims of this test give nothing to act on."""


def test_a_claimed_step_is_trained_by_the_settings_of_its_revision(begun: RunDir, tmp_path: Path) -> None:
    """By each field in turn: as a learner trains it that had the amended settings from the checkpoint on."""
    before = read_identity(begun).config
    plain = trained(resumed(begun, tmp_path / "plain", before), range(2, 3))
    for name, sets in LEARNED.items():
        now = wanted(*sets, base=before)
        alone = trained(resumed(begun, tmp_path / f"{name}-alone", now), range(2, 3))
        run = copied(begun, tmp_path / name)
        run.claim(2).unlink()
        open_identity(run, "k", "tiny-cpu", now, amend=True)
        claim(run, now, 2, revision=1)
        learner = learner_of(run, now, revision=1)
        assert learner.restore() == 2
        assert trained(learner, range(2, 3)) == alone, name
        assert (alone == plain) == (name in NO_DIFFERENCE_HERE), name
        assert read_record(run, 2).revision == 1


def copied(run: RunDir, to: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(run.root, to)))


def resumed(run: RunDir, to: Path, config: Config) -> Learner:
    learner = learner_of(copied(run, to), config)
    assert learner.restore() == 2
    return learner


def test_sixty_steps_amended_to_120_fold_to_the_same_weights(tmp_path: Path) -> None:
    """Trained, restarted behind the amendment, restarted behind that, and folded from the initial model."""
    first = small()
    run = new_run(tmp_path / "run", first)
    write_model(run.model)
    start_attempt(run)
    learner = learner_of(run, first)
    learner.restore()
    learner.publish_current()
    for step in range(60):
        claim(run, first, step)
        learner.train(step)
        if step == 55:
            learner.checkpoint()
    put_end(run, EndOfData(step=60, reason="steps", left_over=0), revision=0, attempt=1)

    second = wanted("total_steps=120", "learner.loss.clip_high=0.3", base=first)
    open_identity(run, "k", "tiny-cpu", second, amend=True)
    start_attempt(run, 2)
    learner = learner_of(run, second, revision=1, attempt=2)
    assert learner.restore() == 56
    digest = trained(learner, range(56, 60))
    for step in range(60, 120):
        claim(run, second, step, revision=1, attempt=2)
        digest = trained(learner, range(step, step + 1))

    rates = [read_record(run, step).metrics["train/learning_rate"] for step in range(120)]
    assert rates == [learning_rate(step, first if step < 60 else second) for step in range(120)]
    assert rates[60] == pytest.approx(1e-3 * 0.525), "half way down to 5 %, by the new number of steps"
    assert [read_record(run, step).revision for step in (59, 60)] == [0, 1]

    start_attempt(run, 3)
    again = learner_of(run, second, revision=1, attempt=3)
    assert (again.restore(), trained(again, range(56, 120))) == (56, digest)
    assert list(run.records.glob("*divergent*")) == []
    assert fold_claims(str(run.root)) == digest


def test_the_update_lag_counts_what_each_step_between_has_made(tmp_path: Path) -> None:
    first = small("staleness.hard_max=9", "learner.passes=2")
    run = new_run(tmp_path / "run", first)
    write_model(run.model)
    start_attempt(run)
    learner = learner_of(run, first)
    learner.restore()
    learner.publish_current()
    for step in range(2):
        claim(run, first, step)
        learner.train(step)
    second = wanted("learner.minibatch_groups=1", base=first)  # 4 updates a step instead of 2
    open_identity(run, "k", "tiny-cpu", second, amend=True)
    learner = learner_of(run, second, revision=1)
    learner.restore()
    for step in range(2, 5):
        claim(run, second, step, revision=1, version=0 if step != 3 else 1)
    lags = [learner.train(step) for step in range(5)][2:]
    assert [record and record.metrics["staleness/update_lag_mean"] for record in lags] == [2 + 2, 2 + 4, 2 + 2 + 4 + 4]


def test_the_lag_of_a_token_is_the_same_in_both_forms() -> None:
    group = make_group(0, versions=(1, 3), lengths=[6] * 4)
    lags = []
    for updates in (3, [3, 3, 3, 3]):
        batch = stages.assemble(rows_of([group]))
        stages.mark_tokens(batch, step=5, publish_every=1, updates_per_step=updates)
        lags.append(batch["lag"][batch["loss_mask"]].tolist())
    assert lags[0] == lags[1] == [12, 12, 12, 6, 6, 6] * 4
    assert np.all(np.array(lags) > 0)
