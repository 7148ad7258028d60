"""A few sessions of a training step as texts: which they are, what is said of them, and what is a gap."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_core.landed_sessions import LandedTurn, evenly, few_sessions
from rl_core.run_dir import RunDir, put_if_absent
from tests.looking import run_of_sessions, small_run

PROMPT = "user\nsort 31\nassistant\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return small_run(tmp_path_factory.mktemp("small") / "run")


def test_places_lie_evenly() -> None:
    assert [evenly(n, 3) for n in (0, 2, 3, 12)] == [[], [0, 1], [0, 1, 2], [0, 4, 8]]


FEW = {
    "one of the claim's first group": (1, [("e0-p4-t0", 0, "13")]),
    "one of each group": (2, [("e0-p4-t0", 0, "13"), ("e0-p5-t0", 0, "13")]),
    "several of a group": (3, [("e0-p4-t0", 0, "13"), ("e0-p4-t0", 2, "1"), ("e0-p5-t0", 1, "31")]),
    "all of them": (99, [(group, number, text) for group in ("e0-p4-t0", "e0-p5-t0")
                         for number, text in enumerate(("13", "31", "1", "311"))]),
}


@pytest.mark.parametrize(("most", "expected"), FEW.values(), ids=FEW)
def test_sessions_lie_evenly_over_the_claim_in_training_order(run: RunDir, most: int,
                                                              expected: list[tuple[str, int, str]]) -> None:
    gaps: list[str] = []
    found = few_sessions(run, 2, most, gaps)
    assert [(each.group_id, each.number, each.turns[-1].text) for each in found] == expected and gaps == []


def test_a_session_says_where_it_landed_who_sampled_it_and_what_it_got(run: RunDir) -> None:
    right, wrong = (few_sessions(run, 2, 99, [])[place] for place in (0, 7))
    assert (right.data_source, right.seq, right.row, right.truth) == ("sort", 2, 0, "4")
    assert (wrong.data_source, wrong.seq, wrong.row, wrong.truth) == ("chat", 2, 1, "5")
    assert right.stream.startswith("rollout-0-") and run.shard(right.stream, right.seq).exists()
    assert (right.reward, right.correct, right.extracted, right.parts) == (1.0, 1.0, "13", {"digits": 1.0})
    assert (wrong.reward, wrong.correct, wrong.extracted, wrong.parts) == (-0.5, 0.0, "311", {"digits": 1.5})
    assert right.turns == (LandedTurn(prompt=PROMPT, text="13", length=2, finish="stop", versions=(1, 2), age=1),)
    assert wrong.turns == (LandedTurn(prompt=PROMPT, text="311", length=3, finish="length", versions=(0,), age=2),)


def test_a_session_of_several_trajectories_has_a_turn_for_each_in_order(tmp_path: Path) -> None:
    two, one = few_sessions(run_of_sessions(tmp_path / "run"), 0, 6, [])
    assert [(turn.prompt, turn.text) for turn in two.turns] == [(PROMPT, "1"), (f"{PROMPT}1 ", "13")]
    assert (two.number, two.reward, two.length) == (0, 1.0, 3)
    assert [turn.text for turn in one.turns] == ["31"] and (one.number, one.reward, one.length) == (1, 0.25, 2)


def test_of_a_run_on_another_runs_shards_no_age_is_known(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    put_if_absent(run.taken, b"{}")
    [session] = few_sessions(run, 2, 1, [])
    assert session.turns == (LandedTurn(prompt=PROMPT, text="13", length=2, finish="stop", versions=(1, 2), age=None),)


def test_what_cannot_be_read_is_a_gap(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    [shard] = {run.shard(each.stream, each.seq) for each in few_sessions(run, 1, 6, [])}
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-100])
    run.claim(2).write_text("{")
    for step, name in ((1, shard.name), (2, run.claim(2).name), (7, run.claim(7).name)):
        gaps: list[str] = []
        assert few_sessions(run, step, 6, gaps) == []
        assert len(gaps) == 1 and name in gaps[0], gaps
    (run.model / "tokenizer.json").unlink()
    gaps = []
    assert few_sessions(run, 0, 6, gaps) == [] and gaps == [f"{run.model}: tokenizer.json: absent"]
