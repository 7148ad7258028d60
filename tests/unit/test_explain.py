"""What another staleness policy makes of a run's landed groups: real shards, claims and drops."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from flows.explaining import explain_policy
from flows.presets import load_preset
from rl_core.errors import ConfigError
from rl_core.experience.experience import Experience
from rl_core.experience.ledger import put_drops, void_step
from rl_core.experience.other_policy import Lengths, PolicyReport, Share, other_policy
from rl_core.experience.shards import ShardWriter
from rl_core.plan import parse_overrides, resolve
from rl_core.run_dir import RunDir, put_if_absent
from rl_core.run_identity import open_identity
from rl_core.types import Claim, Drop, DropReason
from rl_core.versions import put_version
from tests.builders import make_group, make_versions

BASE = ("groups_per_step=2", "group_size=2", "storage.fsync=false", "staleness.bound=1")
LANDED: list[list[dict[str, Any]]] = [
    [{"versions": [0], "lengths": [3, 5]}, {"versions": [0], "lengths": [4, 4]}],
    [{"versions": [1], "lengths": [2, 2]}, {"versions": [0], "lengths": [6, 8]}],  # ages 0, 1
    [{"versions": [0], "lengths": [20, 30]}, {"versions": [0, 2], "lengths": [10, 12]}],  # 2; oldest token 2, newest 0
    [{"versions": [3], "lengths": [1, 1]}, {"versions": [3], "lengths": [1, 1]}],
    [{"versions": [4], "lengths": [1, 1]}, {"versions": [4], "lengths": [1, 1]}],
    [{"versions": [0], "lengths": [40, 44]}, {"versions": [5], "lengths": [2, 4]},
     {"versions": [5], "lengths": [2, 2]}],
]
"""What lands before each step is claimed. In the last one the first group has age 5: over hard_max 4."""
MIXED = [*LANDED[:2], [{"versions": [0, 2], "lengths": [10, 12]}, {"versions": [2], "lengths": [2, 2]}], *LANDED[3:]]
DROPPED_BEFORE = 30
"""Position of a group of age 5 that a file of drops names, of 7 + 9 tokens."""


def policy_run(path: Path, *sets: str, reason: DropReason = "stale",
               landed: Sequence[list[dict[str, Any]]] = LANDED) -> RunDir:
    config = resolve(load_preset("tiny-cpu"), parse_overrides([*BASE, *sets]))
    run = RunDir(path)
    open_identity(run, "k", "tiny-cpu", config)
    put_if_absent(run.attempt(1), b"{}", fsync=False)
    for version in make_versions(7).values():
        put_version(run, version)
    writer, experience, position = ShardWriter(run, "w", 1, {}, False), Experience(run, config, 1), 0
    for step, groups in enumerate(landed):
        writer.land([make_group(position + i, n=2, **group) for i, group in enumerate(groups)])
        position += len(groups)
        experience.discover()
        assert isinstance(experience.claim(step, 5), Claim)
    late = make_group(DROPPED_BEFORE, n=2, versions=[0], lengths=[7, 9])
    writer.land([late, make_group(31, n=2, versions=[5]), make_group(0, n=2, versions=[1])])  # waiting; a duplicate
    put_drops(run, 5, [Drop(group_id=late.lease.group_id, reason=reason, n_tokens=16)],
              attempt=1, fsync=False)
    return run


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Policy keep, bound 1, hard_max 4."""
    return policy_run(tmp_path_factory.mktemp("home") / "runs" / "k")


def counts(report: PolicyReport) -> tuple[int, int, int, int]:
    """Groups and tokens trained, groups and tokens thrown away, by the other policy."""
    trained, dropped = report.other.trained, report.other.dropped
    return trained.groups, trained.tokens, dropped.groups, dropped.tokens


TOKENS = 3 + 5 + 8 + 4 + 14 + 50 + 22 + 8 + 6 + 4
OTHERS: dict[str, tuple[dict[str, Any], tuple[int, int, int, int], tuple[int, int], dict[str, int]]] = {
    "its own": ({"policy": "keep", "bound": Decimal(1)}, (12, TOKENS, 2, 100), (0, 0), {"stale": 2}),
    "drop, bound 1": ({"policy": "drop", "bound": Decimal(1)}, (10, TOKENS - 72, 4, 172), (0, 0), {"stale": 4}),
    "drop, bound 0": ({"policy": "drop", "bound": Decimal(0)}, (9, TOKENS - 86, 5, 186), (0, 0), {"stale": 5}),
    "mask, bound 1": ({"policy": "mask"}, (11, TOKENS - 50, 3, 150), (1, 11), {"all_masked": 3}),
    "keep, hard_max 5": ({"hard_max": 5}, (14, TOKENS + 100, 0, 0), (0, 0), {}),
    "keep, bound 0.5": ({"bound": Decimal("0.5")}, (12, TOKENS, 2, 100), (0, 0), {"stale": 2}),  # hard_max 2
    "wait judges as keep": ({"policy": "wait"}, (12, TOKENS, 2, 100), (0, 0), {"stale": 2}),
}


@pytest.mark.parametrize(("given", "expected", "masked", "reasons"), OTHERS.values(), ids=OTHERS)
def test_landed_groups_are_judged_by_the_other_rule_at_their_own_steps(
        kept: RunDir, given: dict[str, Any], expected: tuple[int, int, int, int], masked: tuple[int, int],
        reasons: dict[str, int]) -> None:
    report = other_policy(kept, **given)
    assert counts(report) == expected
    assert (report.other.masked_groups, report.other.masked_tokens) == masked
    assert report.other.reasons == reasons
    assert (report.own.trained.groups, report.own.trained.tokens, report.own.dropped.tokens) == (12, TOKENS, 100)
    assert (report.own.reasons, report.own.masked_tokens) == ({"stale": 2}, 0)
    assert (report.judged, report.steps) == (14, 6)
    assert report.left_out == {"waiting": 1, "duplicate": 1, "fenced": 0, "voided": 0, "unreadable": 0}


def test_lengths_of_what_is_admitted_and_thrown_away(kept: RunDir) -> None:
    report = other_policy(kept, policy="drop", bound=Decimal(1))
    assert report.own.dropped.length == Lengths(mean=25.0, p50=24.5, p95=43.4, max=44)
    assert report.thrown_away_instead.length == Lengths(mean=18.0, p50=16.0, p95=pytest.approx(28.5), max=30)
    assert (report.thrown_away_instead.groups, report.thrown_away_instead.answers) == (2, 4)
    assert report.admitted_instead == Share(groups=0, answers=0, tokens=0, length=Lengths(mean=None, p50=None, p95=None,
                                                                                         max=None))
    assert report.other.trained.length.max == 8, "long answers are the old ones"
    assert report.rules == {"own": {"policy": "keep", "bound": "1", "hard_max": 4},
                            "other": {"policy": "drop", "bound": "1", "hard_max": 4}}
    more = other_policy(kept, hard_max=5)
    assert (more.admitted_instead.groups, more.admitted_instead.tokens) == (2, 100)


def test_the_rule_of_the_run_gives_what_the_run_has_recorded_also_of_masked_tokens(tmp_path: Path) -> None:
    run = policy_run(tmp_path / "run", "staleness.policy=mask", reason="all_masked", landed=MIXED)
    report = other_policy(run, policy="mask")
    assert report.own == report.other
    assert (report.own.reasons, report.own.masked_tokens) == ({"all_masked": 2}, 5 + 6)


def test_amended_runs_are_judged_by_the_filter_and_bound_of_each_step(tmp_path: Path, kept: RunDir) -> None:
    run = RunDir(Path(shutil.copytree(kept.root, tmp_path / "runs" / "k")))
    config = resolve(load_preset("tiny-cpu"), parse_overrides([*BASE, "staleness.bound=8"]))
    open_identity(run, "k", "tiny-cpu", config, amend=True)
    assert other_policy(run, policy="drop").other.dropped.groups == 4, "claims of revision 0 have its bound of 1"


def test_what_cannot_be_read_or_was_voided_is_left_out_and_counted(tmp_path: Path, kept: RunDir) -> None:
    run = RunDir(Path(shutil.copytree(kept.root, tmp_path / "runs" / "k")))
    void_step(run, 4, reason="test", attempt=1)
    [stream] = run.streams.iterdir()
    run.shard(stream.name, 2).unlink()
    report = other_policy(run, policy="drop")
    assert (report.left_out["voided"], report.left_out["unreadable"], report.judged) == (2, 2, 10)


def test_a_policy_that_no_run_could_have_is_refused(kept: RunDir) -> None:
    for given in ({"hard_max": 0, "policy": "keep"}, {"bound": Decimal(-1)}):
        with pytest.raises(ConfigError, match=r"staleness.hard_max|bound"):
            other_policy(kept, **given)


def test_the_command(kept: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(kept.root.parents[1]))
    assert explain_policy("k", policy="drop", bound="1", hard_max=None, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["other"]["dropped"]["groups"] == 4 and found["other"]["dropped"]["length"]["max"] == 44
    assert explain_policy("k", policy="drop", bound="1", hard_max=None, as_json=False) == 0
    out = capsys.readouterr().out
    assert "the other policy: drop, bound 1" in out and "not judged: 1 waiting, 1 duplicate" in out
    assert "would have claimed others" in out
    for given, message in (({"policy": "toss"}, "--policy 'toss': use keep, mask, drop, wait"),
                           ({"bound": "one"}, "--bound 'one'"), ({}, "--policy: name another")):
        assert explain_policy("k", **({"policy": None, "bound": None, "hard_max": None} | given), as_json=False) == 2
        assert message in capsys.readouterr().err
    assert explain_policy("no-such-run", policy="drop", bound=None, hard_max=None, as_json=False) == 2
