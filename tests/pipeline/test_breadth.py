"""Whole runs through the command with other settings than the preset's.

Two workers, weights published every second step, two updates a step; model, rows and reward are a user's own, beside
the command. The first run has two learner ranks and masks tokens by age, the second is killed in the middle.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.presets import load_preset
from rl_core.checkpoint import newest_whole
from rl_core.experience.ledger import drop_files, read_claim, read_drops
from rl_core.experience.reader import read_groups
from rl_core.learner.learner import Learner, fold_claims
from rl_core.metrics import tracked_names
from rl_core.model_setup import set_up_model
from rl_core.plan import resolve
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir
from rl_core.run_identity import read_identity
from rl_core.types import Claim
from rl_core.validation import read_validation
from rl_core.versions import newest_version, read_versions
from rl_core.weights import WEIGHTS_FILE, read_tensors
from tests.runs import Command, Home, processes_of, wait_until_gone

B, N, K = 6, 4, 2
SETTINGS = (f"groups_per_step={B}", f"group_size={N}", f"publish_every={K}", "rollout.workers=2",
            "learner.minibatch_groups=4", "learner.loss.name=decoupled_ppo", "model.type=local", "model.path=./model",
            "reward=./reward.py:score", "data.train=train.jsonl", "data.shuffle=false")
REWARD = '''
"""Share of the digits that stand at their place. Of a row with `until`, the answers from the fourth on fail before that
file is there, and are sampled again."""

import os
import time

answers = 0


def score(answer, ground_truth, digits, until=None):
    global answers
    answers += until is not None
    if answers > 3 and until is not None and not os.path.exists(until):
        time.sleep(0.02)
        raise OSError(f"{until} is not there yet")
    placed = sum(a == b for a, b in zip(answer, ground_truth)) / digits
    return {"reward": placed - 0.1 * (len(answer) > digits), "correct": answer == ground_truth, "placed": placed,
            "extracted": answer[:digits]}
'''
SLOW = 3
"""Position whose last answer fails for a while, in the first run."""


def row(i: int, **columns: Any) -> dict[str, Any]:
    """Row i: a chat, with a system message by turns, and a column of its own."""
    rng = random.Random(i)
    digits = [rng.choice("0123456789") for _ in range(3 + i % 3)]
    asked = [{"role": "user", "content": f"sort {''.join(digits)}"}]
    return {"prompt": [{"role": "system", "content": "digits only"}, *asked] if i % 2 else asked,
            "answer": "".join(sorted(digits)), "digits": len(digits), "data_source": "chat" if i % 2 else "text",
            **columns}


def held_out(i: int) -> dict[str, Any]:
    """Row i, held out: without a system message it is written as a text."""
    held = row(i)
    return held if i % 2 else {**held, "prompt": held["prompt"][0]["content"]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


@pytest.fixture(scope="module")
def model(home: Home) -> Path:
    """The tiny model: the one of all pipeline tests, made here if this is the first."""
    return set_up_model(resolve(load_preset("tiny-cpu"), {}), home.path / "models")


def workplace(directory: Path, model: Path, **slow: Any) -> Path:
    """A directory with everything that the settings name."""
    directory.mkdir()
    shutil.copytree(model, directory / "model")
    (directory / "reward.py").write_text(REWARD)
    write_rows(directory / "train.jsonl", [row(i, **slow if i == SLOW else {}) for i in range(72)])
    write_rows(directory / "texts.jsonl", [held_out(i) for i in range(100, 116, 2)])
    write_rows(directory / "chats.jsonl", [held_out(i) for i in range(101, 116, 2)])
    return directory


# -- two ranks, tokens masked by age

STEPS, LIMIT, RELEASE = 10, 2, 5
"""The slow answer fails until step RELEASE has a record: later steps are of publication 3 and on, its siblings of 0."""


@pytest.fixture(scope="module")
def finished(home: Home, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    record = home.run("breadth").record(RELEASE)
    work = workplace(tmp_path_factory.mktemp("breadth") / "work", model, until=str(record))
    command = home.train("breadth", *SETTINGS, f"total_steps={STEPS}", "learner.ranks=2", "staleness.policy=mask",
                         f"staleness.bound={LIMIT}", "staleness.drops_after_s=0.2",
                         "data.validation=[texts.jsonl, chats.jsonl]", "validation.every=5", "checkpoint.every=4",
                         "failure.trajectory_tries=100000", "failure.reward_failures=100000", cwd=work)
    assert command.wait() == 0, command.said
    return command


def claims(run: RunDir) -> list[Claim]:
    return [read_claim(run, step) for step in range(STEPS)]


def test_the_summary_tells_of_every_step_and_drop(finished: Command, home: Home) -> None:
    run, summary = finished.run, finished.json
    drops = [drop for claim in claims(run) for drop in claim.dropped]
    drops += [drop for path in drop_files(run) for drop in read_drops(path)]
    assert (summary["status"], summary["steps"], summary["groups_trained"]) == ("completed", STEPS, STEPS * B)
    assert summary["groups_dropped"] == len(drops)
    assert {drop.reason for drop in drops} <= {"all_masked"}, "a worker that is held back on a busy machine"
    assert finished.err == ""
    assert recorded_steps(run) == list(range(STEPS))
    assert {read_record(run, step).env["ranks"] for step in range(STEPS)} == {"2"}
    assert wait_until_gone(home, 10) == {}


def test_weights_are_published_every_second_step_and_sample_what_comes_after(finished: Command) -> None:
    run = finished.run
    published = {step: read_record(run, step).published for step in range(STEPS)}
    assert [step for step, version in published.items() if version is not None] == [1, 3, 5, 7, 9]
    assert [(v.step, v.idx) for v in read_versions(run).values()] == [(K * i, i) for i in range(STEPS // K + 1)]
    assert [claim.idx for claim in claims(run)] == [step // K for step in range(STEPS)]


def ages(group: dict[str, Any], idx: int, idx_of: dict[int, int]) -> list[int]:
    """Age of every token of a group at publication `idx`, from the version runs of its answers."""
    found: list[int] = []
    for answer in group["responses"]:
        ends = [0, *(end for end, _ in answer["versions"])]
        for length, (_, version) in zip(np.diff(ends), answer["versions"], strict=True):
            found += [idx - idx_of[version]] * int(length)
        assert ends[-1] == len(answer["ids"])
    return found


def test_tokens_older_than_the_bound_leave_the_loss_and_no_others(finished: Command) -> None:
    run = finished.run
    idx_of = {v: version.idx for v, version in read_versions(run).items()}
    over: list[int] = []
    for claim in claims(run):
        groups = read_groups(run, claim)
        age_G = [ages(group, claim.idx, idx_of) for group in groups]
        old_G = [sum(age > LIMIT for age in each) for each in age_G]
        metrics = read_record(run, claim.step).metrics
        assert all(0 <= min(each) <= LIMIT for each in age_G), "no group of which nothing is left, none of the future"
        assert dict(claim.masked) == {i: n for i, n in enumerate(old_G) if n}
        assert metrics["staleness/masked_tokens"] == sum(old_G)
        assert metrics["train/loss_tokens"] == sum(map(len, age_G)) - sum(old_G)
        assert metrics["staleness/max"] == max(map(max, age_G))
        over += [group["position"] for group, n in zip(groups, old_G, strict=True) if n]
    assert over == [SLOW]


def test_inspect_shows_both_versions_of_a_group_with_a_late_answer(finished: Command, home: Home) -> None:
    [step] = [claim.step for claim in claims(finished.run) if claim.masked]
    shown = home.call("inspect", "breadth", "--step", str(step), "--json").json
    [group] = [group for group in shown["groups"] if group["position"] == SLOW]
    versions = Counter(v for answer in group["answers"] for v in answer["versions"])
    assert versions[0] == N - 1 and len(versions) > 1, "version 0 sampled the siblings, newer ones the lost answer"
    assert group["age"] == shown["idx"] > LIMIT
    assert group["prompt"].startswith("system\ndigits only\nuser\nsort ")
    others = [each["prompt"] for each in shown["groups"] if each["position"] % 2 == 0]
    assert others and all(prompt.startswith("user\nsort ") for prompt in others)


def test_the_reward_gets_its_column_and_its_dict_is_stored_whole(finished: Command) -> None:
    for claim in claims(finished.run):
        for group, claimed in zip(read_groups(finished.run, claim), claim.groups, strict=True):
            asked = row(claimed.prompt_idx)
            assert group["data_source"] == asked["data_source"]
            for answer in group["responses"]:
                parts = answer["parts"]
                assert list(parts) == ["placed"]
                assert round(parts["placed"] * asked["digits"], 5) in range(asked["digits"] + 1)
                assert answer["reward"] == pytest.approx(parts["placed"]) or \
                    answer["reward"] == pytest.approx(parts["placed"] - 0.1)
                assert answer["correct"] == (answer["extracted"] == asked["answer"]
                                             and answer["reward"] == pytest.approx(1.0))


def test_held_out_rows_are_measured_by_source_at_the_newest_publication(finished: Command) -> None:
    for step in (0, 4, STEPS):  # the one due after step 5 measures the weights of step 4
        record = read_validation(finished.run, step)
        assert (record["n"], record["idx"]) == (16, step // K)
        assert {name: source["n"] for name, source in record["by_source"].items()} == {"chat": 8, "text": 8}
    assert finished.json["accuracy_end"] == read_validation(finished.run, STEPS)["greedy_accuracy"]


def test_mlflow_has_one_point_per_metric_and_step(finished: Command, home: Home) -> None:
    status, points = home.tracked(finished.json["mlflow_run_id"])
    per_step = (*tracked_names("learner"), *tracked_names("owner"), "reward/part_placed_mean")
    held_out = (*tracked_names("validator"), *(f"validation/source_{name}_accuracy" for name in ("chat", "text")))
    expected = {(name, k) for name in per_step for k in range(STEPS)}
    expected |= {(name, k) for name in held_out for k in (0, 4, STEPS)}
    assert status == "FINISHED"
    assert points == dict.fromkeys(expected, 1)


def test_audit_holds_after_drops_and_second_tries(finished: Command, home: Home) -> None:
    audit = home.call("audit", "breadth", "--json")
    assert audit.process.returncode == 0, audit.said
    assert audit.json["rows"]["claimed"] == STEPS * B


def test_two_ranks_trained_what_one_would_have(finished: Command) -> None:
    """The sums are ordered otherwise: equal within rounding, where fold_claims asks for the same bits."""
    run = finished.run
    config = read_identity(run).config
    one = Learner(root=str(run.root), config=config, attempt=1, rank=0, ranks=1, rendezvous="none")
    one.fold(STEPS)
    weights, _ = one.tensors()
    newest = newest_version(run)
    assert newest is not None and newest.step == STEPS
    for name, value in read_tensors(run.weights(newest.v) / WEIGHTS_FILE).items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


# -- killed in the middle

KILLED_STEPS = 9
"""No multiple of K: the last weights are published nowhere."""
KILLED_SETTINGS = (*SETTINGS, f"total_steps={KILLED_STEPS}", "learner.advantage.name=rloo", "learner.passes=2",
                   "learner.loss.proximal=loglinear", "data.validation=null", "checkpoint.every=3")


def pid_of_learner(home: Home, run: RunDir) -> int:
    """The process that writes the learner's log."""
    log = str(run.logs / "learner-0.log")
    [pid] = [pid for pid in processes_of(home) if os.readlink(f"/proc/{pid}/fd/1") == log]
    return pid


@pytest.mark.slow
def test_owner_and_learner_killed_between_two_publications_the_same_command_goes_on(home: Home, model: Path,
                                                                                    tmp_path: Path) -> None:
    work = workplace(tmp_path / "work", model)
    first = home.train("breadth-killed", *KILLED_SETTINGS, cwd=work)
    first.wait_for_step(4)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    os.kill(pid_of_learner(home, first.run), signal.SIGKILL)
    checkpoint = newest_whole(first.run)
    assert checkpoint is not None and checkpoint.state.n == 3
    assert checkpoint.state.version_step == 2, "of weights that nobody has any more but the checkpoint"
    second = home.train("breadth-killed", *KILLED_SETTINGS, cwd=work)
    assert second.wait() == 0, second.said
    assert (second.json["status"], second.json["steps"], second.err) == ("completed", KILLED_STEPS, "")
    run = second.run
    assert recorded_steps(run) == list(range(KILLED_STEPS))
    assert {read_record(run, step).attempt for step in range(KILLED_STEPS)} == {1, 2}
    assert list(run.records.glob("*divergent*")) == []
    digest = read_record(run, KILLED_STEPS - 1).weights_digest
    assert fold_claims(str(run.root), read_identity(run).config) == digest
    assert [(v.step, v.idx) for v in read_versions(run).values()] == [(0, 0), (2, 1), (4, 2), (6, 3), (8, 4)]
    status, points = home.tracked(second.json["mlflow_run_id"])
    assert (status, set(points.values())) == ("FINISHED", {1})
    assert {step for key, step in points if key == "reward/mean"} == set(range(KILLED_STEPS))
    audit = home.call("audit", "breadth-killed", "--json")
    assert audit.process.returncode == 0, audit.said
    assert wait_until_gone(home, 10) == {}
