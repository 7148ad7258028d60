"""Replay: recorded steps trained again, offline, over real claims, shards and checkpoints of a small real model."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from flows.presets import load_preset
from flows.replaying import replay_run, steps_of
from rl_core.config import Config
from rl_core.env_digest import as_recorded
from rl_core.errors import ConfigError, ReplayUnavailable
from rl_core.experience.ledger import put_retired, read_claim, void_step
from rl_core.experience.reader import read_claim_rows
from rl_core.learner.learner import Learner
from rl_core.learner.replay import Replayed, close, replay, replayable, same, try_settings
from rl_core.learner.step_logprobs import step_logprobs
from rl_core.metrics import METRICS, is_of_step
from rl_core.plan import parse_overrides, resolve
from rl_core.records import read_record
from rl_core.run_dir import RunDir, to_json
from rl_core.run_identity import open_identity, read_identity
from rl_core.versions import read_versions
from tests.learning import all_by, claim_groups, random_groups, sampled_by, start_attempt, write_model

TINY = load_preset("tiny-cpu")
STEPS, AMENDED, CHECKPOINTS = 8, 4, (3, 6)


def wanted(*sets: str, base: Config | None = None) -> Config:
    return resolve(TINY if base is None else base.model_dump(mode="json"), parse_overrides(sets))


def learner_of(run: RunDir, config: Config, revision: int, attempt: int) -> Learner:
    return Learner(root=str(run.root), config=config, attempt=attempt, rank=0, ranks=1, rendezvous="",
                   revision=revision)


def claim(run: RunDir, config: Config, step: int, revision: int) -> None:
    groups = random_groups(step, config.groups_per_step, config.group_size, rewards=[1.0, 0.0, 0.3])
    groups = [all_by(0, group) for group in groups]
    if step == 0:  # tokens of the very weights of the step are measured against them
        groups = [sampled_by(AutoModelForCausalLM.from_pretrained(run.model), group) for group in groups]
    claim_groups(run, config, step, groups, revision=revision, attempt=revision + 1)


def trained_run(path: Path, *sets: str, elsewhere: tuple[str, ...] = ()) -> RunDir:
    """Eight steps, checkpoints behind 3 and 6, amended from step 4 on by another start. `elsewhere`: settings that the
    first start alone was given, and that no file of settings has."""
    config = wanted("groups_per_step=2", "group_size=3", "total_steps=60", "learner.warmup_steps=0", "learner.lr=1e-3",
                    "learner.passes=2", "sampling.max_new_tokens=12", "storage.fsync=false", *sets)
    run = RunDir(path)
    open_identity(run, "k", "tiny-cpu", config)
    write_model(run.model)
    start_attempt(run)
    learner, revision = learner_of(run, wanted(*elsewhere, base=config), 0, 1), 0
    learner.restore()
    learner.publish_current()
    for step in range(STEPS):
        if step == AMENDED:
            config, revision = wanted("learner.lr=3e-4", "learner.advantage.name=rloo", base=config), 1
            open_identity(run, "k", "tiny-cpu", config, amend=True)
            start_attempt(run, 2)
            learner = learner_of(run, config, 1, 2)
            for replayed in range(learner.restore(), step):
                learner.train(replayed)
            learner.publish_current()
        claim(run, config, step, revision)
        learner.train(step)
        if step + 1 in CHECKPOINTS:
            learner.checkpoint()
    return run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained_run(tmp_path_factory.mktemp("home") / "runs" / "k")


@pytest.fixture
def copy(done: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(done.root, tmp_path / "runs" / "k")))


def tree(run: RunDir) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in run.root.rglob("*")}


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    payload = json.loads(path.read_text())
    change(payload)
    path.write_text(json.dumps(payload))


def only(found: Any) -> Replayed:
    [one] = found
    return one


# -- against the record


def test_every_step_is_bit_identical_over_one_fold_and_nothing_is_written(done: RunDir) -> None:
    before = tree(done)
    found = list(replay(done, range(STEPS)))
    assert tree(done) == before
    assert [(one.step, one.verdict, one.checkpoint) for one in found] == [(k, "identical", 0) for k in range(STEPS)]
    for one in found:
        record = read_record(done, one.step)
        assert one.digests == (record.weights_digest,) * 2 and one.claims == (record.claim_digest,) * 2
        assert set(one.metrics) == {name for name in record.metrics if is_of_step(name)}
        assert one.environment == {} and one.differing == {}
    assert [one.metrics["weights/changed"][1] > 0.5 for one in found] == [True] * STEPS


NEAREST = {"before all checkpoints": ([2], [0]), "at a checkpoint": ([3], [3]), "behind one": ([5], [3]),
           "behind the newest": ([7], [6]), "far apart, in any order": ([7, 1], [0, 6]),
           "over a checkpoint": ([2, 4], [0, 0]), "twice": ([6, 6], [6])}


@pytest.mark.parametrize(("steps", "begun"), NEAREST.values(), ids=NEAREST)
def test_a_step_is_folded_from_the_nearest_checkpoint(done: RunDir, steps: list[int], begun: list[int]) -> None:
    found = list(replay(done, steps))
    assert [one.step for one in found] == sorted(set(steps))
    assert [one.checkpoint for one in found] == begun
    assert {one.verdict for one in found} == {"identical"}


def test_a_run_of_several_steps_a_publication_is_replayed_in_the_environment_of_its_records(tmp_path: Path) -> None:
    """Threads and budgets of a start that no file of settings has: the records name them. The second start trained
    step 3 again in another environment, with other bits, and went on from those: so does the replay of what is behind.
    """
    elsewhere = ("learner.threads=2", "learner.token_budget=40", "learner.logits_chunk=7",
                 "learner.share_prefixes=false")
    run = trained_run(tmp_path / "run", "publish_every=2", elsewhere=elsewhere)
    found = list(replay(run, range(STEPS)))
    assert [(one.verdict, one.environment) for one in found] == [("identical", {})] * STEPS
    assert ["weights/changed" in one.metrics for one in found] == [False, True] * (STEPS // 2)
    assert [only(replay(run, [step])).verdict for step in (5, 7)] == ["identical"] * 2
    assert run.divergent_record(3, 2).exists()
    first, later = (read_record(run, step).env for step in (0, 7))
    assert (first["threads"], first["token_budget"], later["threads"]) == ("2", "40", "1")
    stored = read_identity(run).config
    assert as_recorded(stored, first).learner == wanted(*elsewhere, base=stored).learner


DIFFERENCES: dict[str, tuple[Callable[[dict[str, Any]], None], str, set[str]]] = {
    "weights": (lambda record: record.update(weights_digest="0" * 32), "digests", set()),
    "a metric": (lambda record: record["metrics"].update({"train/entropy": 1.0}), "metrics", {"train/entropy"}),
    "a metric that did not exist": (lambda record: record["metrics"].update({"train/grad_norm": None}), "metrics",
                                    {"train/grad_norm"}),
    "the claim": (lambda record: record.update(claim_digest="0" * 32), "claims", set()),
    "times, which no replay repeats": (lambda record: record["metrics"].update(
        {"system/step_s": 9.0, "utilization/learner_busy": 0.5, "system/mfu": 0.9}), "", set()),
}


@pytest.mark.parametrize(("change", "what", "names"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_differs_from_the_record_is_named(copy: RunDir, change: Callable[[dict[str, Any]], None], what: str,
                                               names: set[str]) -> None:
    rewrite(copy.record(7), change)
    one = only(replay(copy, [7]))
    assert one.verdict == ("differs" if what else "identical")
    assert set(one.differing) == names
    assert (one.digests[0] != one.digests[1]) == (what == "digests")
    assert (one.claims[0] != one.claims[1]) == (what == "claims")


def scaled(factor: float) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        record["weights_digest"] = "0" * 32
        record["metrics"]["train/entropy"] *= factor
        record["env"] |= {"cpu": "another", "env_digest": "0" * 32}
    return change


@pytest.mark.parametrize(("factor", "verdict"), [(1.001, "within_tolerance"), (1.5, "differs")])
def test_in_another_environment_a_tolerance_is_allowed_and_the_fields_are_named(copy: RunDir, factor: float,
                                                                                verdict: str) -> None:
    rewrite(copy.record(7), scaled(factor))
    one = only(replay(copy, [7]))
    assert (one.verdict, set(one.environment), one.environment["cpu"][0]) == (verdict, {"cpu"}, "another")


def test_the_environment_of_the_steps_before_counts_as_far_as_the_checkpoint(copy: RunDir) -> None:
    rewrite(copy.record(4), lambda record: record["env"].update(torch="1.0"))
    assert [set(one.environment) for one in replay(copy, [3, 4, 5, 7])] == [set(), {"torch"}, {"torch"}, set()]
    assert only(replay(copy, [5])).verdict == "identical", "whatever differs: the bits are the same"


ENTROPY, CLIP, RATE = "train/entropy", "train/clip_low", "train/learning_rate"
NUMBERS = {
    "equal": (ENTROPY, 1.0, 1.0, True, True), "one bit": (ENTROPY, 1.0, math.nextafter(1.0, 2), False, True),
    "nan": (ENTROPY, math.nan, math.nan, True, True),
    "inf is nan in a record": (ENTROPY, math.nan, math.inf, True, True),
    "nan and a number": (ENTROPY, math.nan, 1.0, False, False), "within": (ENTROPY, 2.0, 2.01, False, True),
    "beyond": (ENTROPY, 2.0, 2.05, False, False), "small": (ENTROPY, 0.0, 5e-7, False, True),
    "not small": (ENTROPY, 0.0, 1e-3, False, False), "a token of a share": (CLIP, 0.0, 1e-3, False, True),
    "tokens of a share": (CLIP, 0.0, 5e-3, False, False), "a small learning rate": (RATE, 1e-7, 2e-7, False, False),
    "another name": ("reward/part_x_mean", 0.5, 0.501, False, True)}


@pytest.mark.parametrize(("name", "recorded", "now", "is_same", "is_close"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_are_compared(name: str, recorded: float, now: float, is_same: bool, is_close: bool) -> None:
    assert (same(recorded, now), close(name, recorded, now)) == (is_same, is_close)


def test_metrics_of_the_step_are_all_of_the_learner_but_times_and_what_is_divided_by_them() -> None:
    of_time = {metric.name for metric in METRICS if metric.writer == "learner" and not metric.of_step}
    assert of_time == {metric.name for metric in METRICS if metric.writer == "learner"
                       and metric.name.startswith(("system/", "utilization/"))}
    assert is_of_step("reward/part_format_mean") and not is_of_step("reward/sampled") and not is_of_step("other/name")


# -- which steps


def flip(path: Path) -> None:
    """One bit of the data."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def shard_of(run: RunDir, step: int) -> tuple[str, int]:
    """Each claim here has a shard of its own."""
    key = next(iter(json.loads(run.claim(step).read_text())["shard_digests"]))
    stream, seq = key.rsplit("/", 1)
    return stream, int(seq)


def retire(run: RunDir, step: int) -> None:
    put_retired(run, 6, [shard_of(run, step)], [], attempt=2)
    run.shard(*shard_of(run, step)).unlink()


def damage_all(run: RunDir, step: int) -> None:
    for n in CHECKPOINTS:
        (run.checkpoint(n) / "parameters.safetensors").write_bytes(b"rot")
    run.inputs.write_bytes(to_json({"digests": dict.fromkeys(("model", "config", "tokenizer", "chat_template"), "x")}))


BROKEN: dict[str, tuple[Callable[[RunDir, int], Any], dict[int, str]]] = {
    "no record": (lambda run, k: run.record(k).unlink(), {4: "no record: nothing to compare with"}),
    "no claim": (lambda run, k: run.claim(k).unlink(), {4: "its claim .* is absent",
                                                        5: "step 4, which comes before it from checkpoint 3 on, .*"}),
    "shard gone": (lambda run, k: run.shard(*shard_of(run, k)).unlink(), {4: "shard .* is gone", 5: "step 4, .* gone"}),
    "shard retired": (retire, {4: "shard .* was retired", 5: "step 4, .* was retired"}),
    "shard corrupt": (lambda run, k: flip(run.shard(*shard_of(run, k))), {4: "claim of step 4: ", 5: "step 4, "}),
    "voided": (lambda run, k: (run.record(k).unlink(), void_step(run, k, reason="test", attempt=2)),
               {4: "voided: it trained nothing"}),
    "claim damaged": (lambda run, k: run.claim(k).write_text("{"), {4: ".*not JSON", 5: "step 4, .*not JSON"}),
    "nothing to begin with": (damage_all, dict.fromkeys(range(STEPS), "no checkpoint at or before it is whole, and ")),
}


@pytest.mark.parametrize(("damage", "reasons"), BROKEN.values(), ids=BROKEN)
def test_the_list_says_why_a_step_cannot_be_replayed(copy: RunDir, damage: Callable[[RunDir, int], Any],
                                                     reasons: dict[int, str]) -> None:
    assert [(one.checkpoint, one.why) for one in replayable(copy)] == [(n, None) for n in (0, 0, 0, 3, 3, 3, 6, 6)]
    damage(copy, 4)
    found = {one.step: one.why for one in replayable(copy)}
    assert {step for step, why in found.items() if why is not None} == set(reasons)
    for step, reason in reasons.items():
        assert re.match(reason, found[step] or ""), (step, found[step])
    refused = max(reasons)
    with pytest.raises(ReplayUnavailable, match=rf"step {refused}: "):
        list(replay(copy, [refused]))


def test_a_damaged_checkpoint_is_passed_over(copy: RunDir) -> None:
    (copy.checkpoint(6) / "optimizer.safetensors").write_bytes(b"rot")
    assert [one.checkpoint for one in replayable(copy)] == [0, 0, 0, 3, 3, 3, 3, 3]
    one = only(replay(copy, [7]))
    assert (one.checkpoint, one.verdict) == (3, "identical")
    shutil.rmtree(copy.checkpoints)
    one = only(replay(copy, [7]))
    assert (one.checkpoint, one.verdict) == (0, "identical")


def test_a_step_that_was_voided_on_the_way_trains_nothing_again(tmp_path: Path, done: RunDir) -> None:
    run = RunDir(Path(shutil.copytree(done.root, tmp_path / "run")))
    for step in range(4, STEPS):
        run.record(step).unlink()
    shutil.rmtree(run.checkpoint(6))
    void_step(run, 4, reason="test", attempt=2)
    learner = learner_of(run, wanted("learner.lr=3e-4", "learner.advantage.name=rloo", base=read_identity(run).config),
                         1, 2)
    for step in range(learner.restore(), 7):
        learner.train(step)
    one = only(replay(run, [6]))
    assert (one.checkpoint, one.verdict) == (3, "identical")


# -- with other settings


def test_other_settings_show_what_the_step_would_have_been(done: RunDir) -> None:
    before = tree(done)
    lr = {step: one for step in (3, 4) for one in try_settings(done, [step], parse_overrides(["learner.lr=1e-2"]))}
    assert tree(done) == before
    assert [one.changed for one in lr.values()] == [{"learner.lr": (1e-3, 1e-2)}, {"learner.lr": (3e-4, 1e-2)}]
    for step, one in lr.items():
        recorded, tried = one.metrics["train/learning_rate"]
        assert tried == pytest.approx(recorded * 1e-2 / (1e-3 if step == 3 else 3e-4))
        assert one.metrics["reward/mean"][0] == one.metrics["reward/mean"][1], "what was sampled is a fact"
        assert one.metrics["train/kl_proximal"][1] > 2 * one.metrics["train/kl_proximal"][0]
        assert one.digests[0] != one.digests[1]
    [estimator] = try_settings(done, [2], parse_overrides(["learner.advantage.normalize_by_std=false"]))
    assert estimator.metrics["train/grad_norm"][1] < estimator.metrics["train/grad_norm"][0]


def test_what_is_tried_does_not_touch_the_steps_behind_it(done: RunDir) -> None:
    both = list(try_settings(done, [4, 5], parse_overrides(["learner.lr=1e-2"])))
    [alone] = try_settings(done, [5], parse_overrides(["learner.lr=1e-2"]))
    assert both[1].digests == alone.digests
    as_it_was = list(try_settings(done, [4, 5], parse_overrides(["learner.lr=3e-4"])))
    assert all(one.digests[0] == one.digests[1] and one.changed == {} for one in as_it_was)
    assert all(same(*pair) for one in as_it_was for pair in one.metrics.values())


ALGORITHMS = {
    "gspo": ["learner.loss.name=gspo"],
    "clip_cov, whose tokens are drawn by lot": ["learner.loss.name=clip_cov", "learner.loss.cov_low=-1"],
    "sequence weights and rejection": ["learner.correction={weights: sequence_truncate, rejected: exclude, rejection: "
                                       "[{rule: token_k1, high: 4}]}"],
    "bypass": ["learner.correction.mode=bypass", "learner.loss.name=cispo"],
    "a token baseline": ["learner.advantage.name=optimal_token_baseline"]}


@pytest.mark.parametrize("sets", ALGORITHMS.values(), ids=ALGORITHMS)
def test_other_estimators_losses_and_corrections_read_only_what_the_claim_has(done: RunDir, sets: list[str]) -> None:
    one, again = (list(try_settings(done, [2], parse_overrides(sets))) for _ in range(2))
    assert one[0].digests == again[0].digests and one[0].digests[0] != one[0].digests[1]
    assert {key.split("=")[0] for key in sets if "{" not in key} <= set(one[0].changed)
    assert "learner.loss.aggregation" not in one[0].changed or "gspo" in sets[0], "gspo has a default of its own"


def test_a_record_of_before_a_metric_was_added_is_compared_by_what_it_has(copy: RunDir) -> None:
    rewrite(copy.record(7), lambda record: record["metrics"].pop("train/chi2_token"))
    one = only(replay(copy, [7]))
    assert one.verdict == "identical" and "train/chi2_token" not in one.metrics


REFUSED = {"identity": ("seed=2", "seed: is of kind identity"), "operational": ("checkpoint.every=2", "kind oper"),
           "environment": ("learner.threads=2", "learner.threads: is of kind environment"),
           "of the claim": ("staleness.policy=drop", "staleness.policy: acts before the claim.*headway explain"),
           "of sampling": ("sampling.temperature=0.5", "sampling.temperature: acts before"),
           "unknown": ("learner.lrr=1", "learner.lrr: no such setting"),
           "impossible": ("learner.loss.proximal=loglinear", "learner.loss.proximal: .*decoupled_ppo")}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_no_step_depends_on_are_refused_by_name(done: RunDir, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(try_settings(done, [2], parse_overrides([text])))


# -- the command


def command(steps: list[int], *, ranges: tuple[str, ...] = (), listed: bool = False, sets: tuple[str, ...] = (),
            against: str = "recorded", as_json: bool = True) -> int:
    return replay_run("k", steps=steps, ranges=ranges, against=against, listed=listed, overrides=sets, as_json=as_json)


def test_the_command_says_what_it_found_by_words_json_and_exit_code(
        copy: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(copy.root.parents[1]))

    def said() -> dict[str, Any]:
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    assert command([1], ranges=("6:8",)) == 0
    found = said()
    assert (found["identical"], found["within_tolerance"], found["differs"]) == (3, 0, 0)
    assert [(one["step"], one["verdict"], one["checkpoint"]) for one in found["steps"]] == [
        (1, "identical", 0), (6, "identical", 6), (7, "identical", 6)]
    assert command([7], as_json=False) == 0
    assert "1 of 1 step is bit-identical to its record" in capsys.readouterr().out

    assert command([], listed=True) == 0
    assert said()["replayable"] == STEPS
    assert command([], listed=True, as_json=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "k: 8 of 8 steps can be replayed", "  step 0-2  from the initial model", "  step 3-5  from checkpoint 3",
        "  step 6-7  from checkpoint 6"]

    assert command([4], sets=("learner.lr=1e-2",)) == 0
    assert said()["steps"][0]["changed"] == {"learner.lr": [3e-4, 1e-2]}
    assert command([4], sets=("learner.lr=1e-2",), as_json=False) == 0
    assert "learner.lr 0.0003 -> 0.01" in capsys.readouterr().out

    rewrite(copy.record(7), lambda record: record["metrics"].update({"train/entropy": None}))
    assert command([7]) == 1
    assert said()["steps"][0]["differing"]["train/entropy"][0] is None
    assert command([7], as_json=False) == 1
    out = capsys.readouterr().out
    assert "step 7 from checkpoint 6: DIFFERS: 1 of " in out and "train/entropy" in out and "1 DIFFERS" in out


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no step": ({"steps": []}, "--step: name the steps"),
    "list and step": ({"steps": [1], "listed": True}, "--list: asks about all steps"),
    "against nothing known": ({"steps": [1], "against": "mlflow"}, "--against 'mlflow'"),
    "no such step": ({"steps": [99]}, "ReplayUnavailable: step 99: no claim and no record"),
    "no range": ({"steps": [], "ranges": ("5-7",)}, "--steps '5-7'"),
    "settings for a list": ({"steps": [], "listed": True, "sets": ("learner.lr=1",)}, "--set: is for steps"),
}


@pytest.mark.parametrize(("given", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused(given: dict[str, Any], message: str, done: RunDir, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(done.root.parents[1]))
    assert command(**given) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_ranges_of_steps() -> None:
    assert steps_of([3, 11], ["10:13", "0:1"]) == [0, 3, 10, 11, 12]


# -- what the learner says of a step's tokens


def test_log_probs_of_a_step_are_those_that_it_was_trained_with(done: RunDir) -> None:
    """By the weights before step 0, which sampled its tokens, they are the behavior log-probs; nothing is written."""
    before, found = tree(done), step_logprobs(done, 0)
    rows = read_claim_rows(done, read_claim(done, 0), rank=0, ranks=1, versions=read_versions(done))
    sampled_T = rows.loss_mask == 1
    assert (np.isnan(found.proximal_T) == ~sampled_T).all() and (np.isnan(found.policy_T) == ~sampled_T).all()
    gap_T = np.abs(found.proximal_T - rows.behavior_logprobs)[sampled_T]
    assert float(gap_T.mean()) == pytest.approx(read_record(done, 0).metrics["train/mismatch_current_abs"], rel=1e-3)
    assert gap_T.max() < 1e-4 < np.abs(found.policy_T - found.proximal_T)[sampled_T].max()
    after = step_logprobs(done, 1)
    assert len(after.proximal_T) == read_claim_rows(done, read_claim(done, 1), rank=0, ranks=1,
                                                    versions=read_versions(done)).offsets[-1]
    assert tree(done) == before
    with pytest.raises(ReplayUnavailable, match="no claim and no record"):
        step_logprobs(done, 99)
