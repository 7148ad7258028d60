"""Whole runs with group filters and functions of a user's: exact refill, orders and metrics that survive a kill."""

from __future__ import annotations

import math
import os
import shutil
import signal
import zlib
from collections import Counter
from pathlib import Path

import pytest

from rl_core.experience.ledger import claims
from rl_core.experience.outcomes import outcome_ids, read_outcome
from rl_core.observations import read_observation
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, read_json
from rl_core.types import group_id
from tests.runs import Command, Home, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.algorithms]

HOOKS = Path(__file__).resolve().parents[2] / "docs" / "examples" / "hooks.py"
B, N, STEPS = 4, 2, 5
MINE = '''
import random
import zlib

def is_kept(group_id):
    """One group of ten, without a rhythm."""
    return zlib.crc32(group_id.encode()) % 10 == 0

def tenth(group):
    return True if is_kept(group["group_id"]) else ("odd" if zlib.crc32(group["group_id"].encode()) % 2 else "even")

def rows(size, seed, held_out):
    draw = random.Random("held out" if held_out else str(seed))
    found = {}
    while len(found) < size:
        digits = [draw.choice("0123456789") for _ in range(4 + (not held_out))]
        found["sort " + "".join(digits)] = "".join(sorted(digits))
    return [{"prompt": prompt, "answer": answer} for prompt, answer in found.items()]

def short(completion):
    return -len(completion)
'''


def is_kept(name: str) -> bool:
    return zlib.crc32(name.encode()) % 10 == 0


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    shutil.copy(HOOKS, tmp_path / "hooks.py")
    return tmp_path


def killed_and_resumed(home: Home, key: str, settings: tuple[str, ...], work: Path, *, after: int) -> Command:
    """Kill -9 the owner and everything it has started once step `after` has a record, then the same command."""
    first = home.train(key, *settings, cwd=work)
    first.wait_for_step(after)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.wait()
    again = home.train(key, *settings, cwd=work)
    assert again.wait() == 0, again.said
    return again


@pytest.mark.parametrize("bound", [0, 2])
def test_nine_groups_of_ten_are_left_out_and_refilled_exactly_over_a_kill(home: Home, work: Path, bound: int) -> None:
    key = f"filtered-{bound}"
    settings = (f"groups_per_step={B}", f"group_size={N}", f"total_steps={STEPS}", f"staleness.bound={bound}",
                "rollout.group_filter=./mine.py:tenth", "data.validation=null", "data.shuffle=false",
                "sampling.max_new_tokens=8", "checkpoint.every=2")
    again = killed_and_resumed(home, key, settings, work, after=1)
    run = again.run
    assert (again.json["status"], again.json["steps"], again.json["groups_trained"]) == ("completed", STEPS, STEPS * B)
    trained = [group.group_id for claim in claims(run) for group in claim.groups]
    assert all(map(is_kept, trained)) and len(set(trained)) == STEPS * B
    outcomes = {name: read_outcome(run, name) for name in outcome_ids(run)}
    filtered = {name: each for name, each in outcomes.items() if each.kind == "filtered"}
    assert not any(map(is_kept, filtered)) and len(filtered) > 5 * STEPS * B
    reasons = Counter(each.reason for each in filtered.values())
    assert set(reasons) == {"odd", "even"} and all(each.tokens_wasted > 0 for each in filtered.values())
    audit = home.call("audit", key, "--json")
    assert audit.process.returncode == 0, audit.said
    report = audit.json
    assert report["filtered"] == dict(sorted(reasons.items())) and report["holds"]
    positions = report["positions"]
    assert (positions["trained"], positions["filtered"]) == (STEPS * B, len(filtered))
    assert positions["pending"] == positions["dropped"] == positions["failed"] == 0, "nothing that no step could train"
    first = [i for i in range(4096) if is_kept(group_id(0, i, 0))][:STEPS * B]
    assert sorted(group.position for claim in claims(run) for group in claim.groups) == first
    seen = [read_observation(run, step).metrics["rollout/filtered"] for step in range(STEPS)]
    known = [count for count in seen if not math.isnan(count)]
    assert len(known) >= STEPS - 2, "a step that was recorded while its owner died was seen by nobody"
    assert 0 < sum(known) <= len(filtered), "those that a start finds were filtered before it"
    words = home.call("audit", key).out
    assert f"filtered  {len(filtered):>8}" in words and f"{reasons['odd']} odd" in words
    assert wait_until_gone(home, 10) == {}


ROWS, ROWS_B = 12, 4
OWN = (f"groups_per_step={ROWS_B}", "group_size=4", "total_steps=7", "staleness.bound=0", f"data.size={ROWS}",
       "data.train=./mine.py:rows", "data.validation=./mine.py:rows", "data.validation_size=8", "validation.every=4",
       "data.sampler=./hooks.py:sampler", "learner.advantage.name=function",
       "learner.advantage.path=./hooks.py:advantage", "learner.loss.name=function",
       "learner.loss.path=./hooks.py:loss", "learner.correction.weights=function",
       "learner.correction.path=./hooks.py:correction", "learner.metrics=./hooks.py:metrics",
       "scoring.parts=[{part: short, reward: './mine.py:short', weight: 0.01}]", "sampling.max_new_tokens=8",
       "checkpoint.every=2", "retention.replay=all")
"""A sampler sees what is in the shards: the orders are the same where none was retired before the kill."""


def digests(run: RunDir) -> list[str]:
    return [read_record(run, step).weights_digest for step in recorded_steps(run)]


def test_a_run_of_functions_of_a_users_is_the_same_with_a_kill_and_without(home: Home, work: Path) -> None:
    straight = home.train("own-straight", *OWN, cwd=work)
    assert straight.wait() == 0, straight.said
    killed = killed_and_resumed(home, "own-killed", OWN, work, after=3)
    one, other = straight.run, killed.run
    assert digests(one) == digests(other) and len(set(digests(one))) == 7
    for epoch in (0, 1, 2):
        order = read_json(one.order(epoch))["order"]
        assert order == read_json(other.order(epoch))["order"] and sorted(order) == list(range(ROWS))
    record = read_record(other, 6)
    assert record.env["hooks"].count("./hooks.py:") == 4 and record.env["hooks"] == read_record(one, 6).env["hooks"]
    assert record.metrics["own/failed"] == 0.0 and 0.0 <= record.metrics["own/solved"] <= 1.0
    assert set(record.parts) == {"main", "short"} and -9.0 <= record.parts["short"] <= 0.0
    assert record.metrics["reward/mean"] == pytest.approx(record.parts["main"] + 0.01 * record.parts["short"], abs=1e-6)
    for run in (one, other):
        asked = [group.prompt_idx for claim in claims(run) for group in claim.groups]
        assert Counter(asked[:ROWS]) == Counter(asked[ROWS:2 * ROWS]) == Counter(range(ROWS)), "each once an epoch"
    assert read_json(one.validation(7))["best_at_k"].keys() == {"1"}
    replay = home.start("replay", "own-killed", "--steps", "0:7", "--json", cwd=work)
    assert replay.wait() == 0 and replay.json["identical"] == 7, replay.said
    assert wait_until_gone(home, 10) == {}
