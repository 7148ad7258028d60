"""A run as DataFrames: numbers, types, and gaps where files are gone or broken."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from rl_core import frames
from rl_core.config import Config
from rl_core.errors import ConfigError, FormatTooNew
from rl_core.estimates import Estimate
from rl_core.experience.ledger import read_claim
from rl_core.experience.reader import read_groups
from rl_core.run_dir import RunDir
from rl_core.run_numbers import difference, mean_of_steps, student95
from tests.builders import make_run
from tests.learning import claim_groups
from tests.looking import small_run, spoken_group

ROOT = Path(__file__).resolve().parents[2]
NAN = float("nan")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Read by the tests, never changed."""
    return small_run(tmp_path_factory.mktemp("frames") / "small")


@pytest.fixture
def broken(tmp_path: Path) -> RunDir:
    """To be damaged."""
    return small_run(tmp_path / "broken")


def listed(column: pd.Series) -> list[Any]:
    """Plain values, None for null."""
    return [None if value is pd.NA or value is pd.NaT else value for value in column.tolist()]


def shard_of(run: RunDir, step: int) -> Path:
    group = read_claim(run, step).groups[0]
    return run.shard(group.stream, group.seq)


# -- steps, sources, validations


def test_steps_have_a_row_for_every_step_and_null_for_what_does_not_exist(whole: RunDir) -> None:
    steps = frames.steps(whole)
    assert listed(steps.index.to_series()) == [0, 1, 2, 3]
    assert listed(steps["state"]) == ["trained", "trained", "trained", "claimed"]
    assert listed(steps["reward/mean"]) == [0.0, 0.25, 0.5, None]
    assert listed(steps["reward/part_digits_mean"]) == [1.0, 1.0, 1.0, None]
    assert listed(steps["rollout/length_right"]) == [None] * 4, "NaN in the record"
    assert listed(steps["reward/sampled"]) == [None, 0.5, None, None], "one observation"
    assert listed(steps["published"]) == [1, 2, 3, None] and listed(steps["seconds/update"]) == [0.5] * 3 + [None]
    assert steps["time"].iloc[1].isoformat() == "2026-09-21T14:13:21+00:00"
    assert steps["reward/mean"].mean() == 0.25
    assert steps.attrs["gaps"] == []


def test_the_last_steps_are_read_alone(whole: RunDir) -> None:
    assert listed(frames.steps(whole, last=1).index.to_series()) == [2, 3]


def test_sources_are_those_of_the_records(whole: RunDir) -> None:
    sources = frames.sources(whole)
    assert sources.groupby("data_source")["reward_mean"].mean().to_dict() == {"chat": 0.25, "sort": 0.5}
    assert listed(sources["n"]) == [4] * 6
    assert listed(frames.sources(whole, last=1)["step"]) == [2, 2]


def test_validations_have_a_row_for_all_sources_and_one_for_each(whole: RunDir) -> None:
    validations = frames.validations(whole)
    assert listed(validations["step"]) == [0, 0, 2, 2, 3, 3]
    assert listed(validations["data_source"]) == [None, "sort"] * 3
    overall = validations[validations["data_source"].isna()]
    assert listed(overall["greedy_accuracy"]) == [0.25, 0.75, 0.5]
    assert (listed(overall["mean_at_n_lo"]), listed(overall["pass_at_1"])) == ([0.125, 0.625, 0.375], [0.25, 0.75, 0.5])
    assert (listed(overall["pass_at_2"]), listed(overall["pass_at_2_lo"])) == ([1.0] * 3, [0.5] * 3)
    assert "sampled_accuracy" not in validations, "null in every record"


def test_samples_are_the_table_beside_a_validation(whole: RunDir) -> None:
    assert frames.samples(whole, 3)[["prompt", "text", "reward"]].iloc[0].tolist() == ["sort 31", "13", 1.0]
    with pytest.raises(FileNotFoundError):
        frames.samples(whole, 0)


# -- groups, trajectories


def test_every_group_is_in_its_state(whole: RunDir) -> None:
    groups = frames.groups(whole)
    assert list(zip(*(listed(groups[name]) for name in ("position", "state", "reason", "step", "age")),
                    strict=True)) == [
        (0, "trained", None, 0, 0), (0, "duplicate", None, None, None), (1, "trained", None, 0, 0),
        (2, "trained", None, 1, 1), (3, "trained", None, 1, 1), (4, "trained", None, 2, 1), (5, "trained", None, 2, 2),
        (6, "claimed", None, 3, 1), (7, "claimed", None, 3, 3), (8, "waiting", None, None, None),
        (9, "dropped", "stale", None, None), (10, "failed", "reward_error", None, None)]
    assert listed(groups["reward_mean"])[:11] == [0.1875] * 11
    assert groups["reward_std"].iloc[0] == pytest.approx(np.std([1.0, 0.25, 0.0, -0.5]))
    assert (listed(groups["idx_max"])[3], listed(groups["n_responses"])[-1]) == (1, None)
    assert groups["finished_at"].iloc[1].isoformat() == "2023-11-14T22:13:21+00:00"


def test_the_answers_of_a_step_are_what_the_learner_reads(whole: RunDir) -> None:
    answers = frames.trajectories(whole, 2, tokens=True)
    assert listed(answers["group_id"]) == ["e0-p4-t0"] * 4 + ["e0-p5-t0"] * 4
    theirs = [answer for group in read_groups(whole, read_claim(whole, 2)) for answer in group["responses"]]
    assert [list(ids) for ids in answers["response_ids"]] == [answer["ids"] for answer in theirs]
    assert listed(answers["reward"]) == [answer["reward"] for answer in theirs] == [1.0, 0.25, 0.0, -0.5] * 2
    assert listed(answers["length"]) == [2, 2, 1, 3] * 2 and listed(answers["part_digits"]) == [1.0, 1.0, 0.5, 1.5] * 2
    assert listed(answers["finish"]) == ["stop", "stop", "stop", "length"] * 2
    assert [list(each) for each in answers["versions"]] == [[1, 2], [1, 2], [2], [1, 2], [0], [0], [0], [0]]
    assert [list(each) for each in answers["ver_run_end"]] == [[1, 2], [1, 2], [1], [1, 3], [2], [2], [1], [3]]
    assert listed(answers["mixed"]) == [True, True, False, True] + [False] * 4
    assert listed(answers["age"]) == [1, 1, 0, 1, 2, 2, 2, 2]
    assert listed(answers["correct"]) == [1.0, 0.0, 0.0, 0.0] * 2
    assert listed(answers["extracted"]) == ["13", "31", "1", "311"] * 2


def test_all_answers_that_landed_carry_the_state_of_their_group(whole: RunDir) -> None:
    answers = frames.trajectories(whole)
    assert answers["state"].value_counts().to_dict() == {"trained": 24, "claimed": 8, "waiting": 4, "dropped": 4,
                                                         "duplicate": 4}
    assert answers.groupby("step")["reward"].mean().to_dict() == dict.fromkeys(range(4), 0.1875)
    assert "prompt_ids" not in answers


def test_texts_are_the_tokenizers(whole: RunDir) -> None:
    answers = frames.trajectories(whole, 0, text=True)
    assert answers[["prompt", "text"]].iloc[3].tolist() == ["user\nsort 31\nassistant\n", "311"]
    assert "response_ids" not in answers


def test_answers_of_some_groups_are_read_alone_and_some_of_them_decoded(whole: RunDir) -> None:
    groups = frames.groups(whole)
    chosen = groups[groups["state"].isin(["dropped", "failed", "duplicate"])]
    answers = frames.trajectories(whole, of=chosen, tokens=True)
    assert answers["state"].value_counts().to_dict() == {"dropped": 4, "duplicate": 4}, "of what failed nothing landed"
    longest = frames.with_text(answers.nlargest(1, "length"), whole)
    assert longest[["group_id", "text", "length"]].iloc[0].tolist() == ["e0-p9-t0", "311", 3]
    assert frames.rows_of(longest)[0]["response_ids"] == listed(longest["response_ids"])[0]
    assert listed(frames.with_text(answers.head(0), whole)["text"]) == []
    assert "prompt_ids" not in frames.trajectories(whole, of=chosen, text=True)
    with pytest.raises(ValueError, match="not of both"):
        frames.trajectories(whole, 1, of=chosen)


def test_tokens_of_a_whole_run_are_the_bytes_of_its_shards(whole: RunDir) -> None:
    """Mapped, not copied: no chunk of the column lies in memory that Arrow had to allocate for tokens."""
    before = pa.total_allocated_bytes()
    table = frames.answer_table(whole, tokens=True)
    assert sum(chunk.num_rows for chunk in table.to_batches()) == 44
    assert table.column("response_ids").combine_chunks().flatten().to_pylist()[:2] == [9, 11], "the digits 1 and 3"
    assert pa.total_allocated_bytes() - before < 100_000


def test_correct_and_parts_are_null_where_nothing_says_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    said, silent = spoken_group(0), spoken_group(1)
    silent = replace(silent, trajectories=tuple(
        replace(t, score=replace(t.score, correct=None, extracted=None, parts={})) for t in silent.trajectories))
    claim_groups(run, Config(groups_per_step=1, group_size=4), 0, [said])
    claim_groups(run, Config(groups_per_step=1, group_size=4), 1, [silent])
    answers = frames.trajectories(run).sort_values(["position", "answer"])  # each writer has a stream of its own
    assert listed(answers["correct"]) == [1.0, 0.0, 0.0, 0.0, None, None, None, None]
    assert listed(answers["extracted"]) == ["13", "31", "1", "311", None, None, None, None]
    assert listed(answers["part_digits"]) == [1.0, 1.0, 0.5, 1.5, None, None, None, None]
    assert listed(answers["age"]) == [None] * 8, "versions without manifests have no index"


def test_every_column_has_an_arrow_type(whole: RunDir) -> None:
    made = (frames.steps(whole), frames.sources(whole), frames.groups(whole), frames.validations(whole),
            frames.trajectories(whole, 1, tokens=True), frames.samples(whole, 3), frames.compare([whole]))
    assert {type(dtype) for frame in made for dtype in frame.dtypes} == {pd.ArrowDtype}


# -- broken runs


def test_a_record_that_cannot_be_read_is_a_gap(broken: RunDir) -> None:
    broken.record(1).write_text("{")
    steps = frames.steps(broken)
    assert listed(steps["state"]) == ["trained", "unreadable", "trained", "claimed"]
    assert listed(steps["reward/mean"]) == [0.0, None, 0.5, None]
    [gap] = steps.attrs["gaps"]
    assert gap.startswith(f"{broken.record(1)}: not JSON")
    assert frames.compare([broken])["steps"].tolist() == [2]


def test_a_record_without_its_fields_is_a_gap(broken: RunDir) -> None:
    broken.record(2).write_text('{"format": 1, "step": 2}')
    steps = frames.steps(broken)
    assert listed(steps["state"]) == ["trained", "trained", "unreadable", "claimed"]
    assert steps.attrs["gaps"] == [f"{broken.record(2)}: KeyError: 'published'"]


def test_a_shard_that_is_gone_leaves_its_groups_with_what_the_claim_says(broken: RunDir) -> None:
    path = shard_of(broken, 1)
    path.unlink()
    groups = frames.groups(broken)
    assert groups.attrs["gaps"] == [f"{path}: absent"]
    row = groups[groups["position"] == 2].iloc[0]
    assert (row["state"], row["step"], row["age"], row["reward_mean"]) == ("trained", 1, pd.NA, pd.NA)
    assert len(frames.trajectories(broken)) == 36
    answers = frames.trajectories(broken, 1)
    assert len(answers) == 0 and answers.attrs["gaps"] == [f"{path}: absent"]


@pytest.mark.parametrize("damage", ["cut", "zeros", "text", "empty", "flipped"])
def test_a_damaged_shard_is_a_gap_and_never_a_crash(broken: RunDir, damage: str) -> None:
    path = shard_of(broken, 2)
    data = path.read_bytes()
    lo = len(data) // 3
    changed = {"cut": data[:len(data) // 2], "zeros": bytes(len(data)), "text": b"no shard", "empty": b"",
               "flipped": data[:lo] + bytes(byte ^ 0xFF for byte in data[lo:2 * lo]) + data[2 * lo:]}[damage]
    path.write_bytes(changed)
    answers = frames.trajectories(broken, 2)  # verified: no byte of it is believed
    assert len(answers) == 0 and len(answers.attrs["gaps"]) == 1
    whole = frames.groups(broken)
    assert "e0-p4-t0" in listed(whole["group_id"])
    frames.trajectories(broken, tokens=True)


def test_bytes_that_rotted_anywhere_in_a_shard_harm_no_reader(broken: RunDir) -> None:
    path = shard_of(broken, 2)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    gaps = 0
    for at in rng.integers(0, len(data) - 32, 40).tolist():
        changed = bytearray(data)
        changed[at:at + 32] = bytes(rng.integers(0, 256, 32, dtype=np.uint8))
        path.write_bytes(changed)
        answers = frames.trajectories(broken, tokens=True)
        assert len(answers) in (36, 44)
        gaps += len(answers.attrs["gaps"])
    assert gaps >= 10


def test_a_claim_that_is_gone_is_a_gap_in_the_middle(broken: RunDir) -> None:
    broken.claim(1).unlink()
    groups = frames.groups(broken)
    assert groups.attrs["gaps"] == [f"{broken.claim(1)}: absent"]
    assert listed(groups[groups["position"] == 2]["state"]) == ["waiting"]
    assert listed(frames.steps(broken)["state"]) == ["trained", "trained", "trained", "claimed"]
    with pytest.raises(FileNotFoundError):
        frames.trajectories(broken, 1)


def test_outcomes_drops_and_validations_that_cannot_be_read_are_gaps_and_observations_are_absent(
        broken: RunDir) -> None:
    for path in (broken.outcome("e0-p10-t0"), broken.drops(2, 0), broken.validation(2), broken.observation(1)):
        path.write_text("[]")
    assert len(frames.groups(broken).attrs["gaps"]) == 2
    assert listed(frames.validations(broken)["step"]) == [0, 0, 3, 3]
    assert listed(frames.steps(broken)["reward/sampled"]) == [None] * 4
    assert [gap.partition(":")[0] for gap in frames.steps(broken).attrs["gaps"]] == [str(broken.validation(2))]


def test_a_file_of_a_newer_headway_is_no_gap(broken: RunDir) -> None:
    broken.record(1).write_text('{"format": 99}')
    with pytest.raises(FormatTooNew):
        frames.steps(broken)


def test_a_run_in_which_nothing_has_happened_has_empty_frames(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    made = [read(run) for read in (frames.steps, frames.sources, frames.groups, frames.trajectories,
                                   frames.validations)]
    assert [len(frame) for frame in made] == [0] * 5 and "reward/mean" in made[0] and "age" in made[3]
    assert frames.compare([run])["accuracy_end"].isna().all()
    with pytest.raises(FileNotFoundError, match="no such run directory"):
        frames.steps(tmp_path / "elsewhere")


# -- comparing runs


def test_runs_are_compared_with_the_first_one(whole: RunDir, tmp_path: Path) -> None:
    better = small_run(tmp_path / "better", bonus=0.5)
    compared = frames.compare([whole, better], last=2)
    assert listed(compared.index.to_series()) == ["small", "better"]
    first, second = compared.iloc[0], compared.iloc[1]
    assert (first["steps"], first["accuracy_start"], first["accuracy_end"]) == (3, 0.25, 0.5)
    assert first["accuracy_best"] == 0.75
    assert (first["best_step"], first["accuracy_best_lo"]) == (2, pytest.approx(0.4093, abs=1e-4))
    assert (first["reward"], second["reward"], second["reward_diff"]) == (0.375, 0.875, 0.5)
    half = 12.7062 * np.std([0.25, 0.5], ddof=1) / np.sqrt(2)
    assert (first["reward_lo"], first["reward_hi"]) == pytest.approx((0.375 - half, 0.375 + half))
    assert second["reward_diff_hi"] == pytest.approx(0.5 + half * np.sqrt(2))
    assert (first["reward_diff"], first["reward_diff_lo"], first["reward_diff_hi"]) == (0.0, 0.0, 0.0)
    assert first["samples_per_s"] == pytest.approx(3 / (1 / 100 + 1 / 200 + 1 / 400))
    assert (first["staleness_mean"], first["staleness_max"], first["update_lag"]) == (0.5, 2.0, 1.0)
    assert (first["wasted"], first["dropped"]) == (0.5, pytest.approx(1 / 7))


def test_differences_are_those_of_the_command(whole: RunDir, tmp_path: Path) -> None:
    better = small_run(tmp_path / "better", bonus=0.5)
    found = frames.differences(whole, [better]).set_index("name")
    assert found.loc["reward_last", ["run", "baseline", "value", "difference"]].tolist() == ["better", 0.25, 0.75, 0.5]
    assert found["low"].isna().tolist() == [False] * 2 + [True] + [False] * 3 + [True, False], "NaN is null"
    assert [len(said) for said in frames.differences(whole, [better]).attrs["caveats"].values()] == [1]
    curves = frames.curves([whole, better])
    assert curves["run"].tolist() == ["small"] * 4 + ["better"] * 4
    assert listed(curves["reward"])[:4] == [None, 0.0, 0.25, 0.5]
    assert listed(curves["accuracy"])[:4] == [0.25, None, 0.75, 0.5]
    assert listed(curves["accuracy_lo"])[2] == pytest.approx(0.4093, abs=1e-4)
    assert {type(dtype) for dtype in [*found.dtypes, *curves.dtypes]} == {pd.ArrowDtype}
    with pytest.raises(ConfigError, match="given twice"):
        frames.differences(whole, [whole])


STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 19: 2.093, 100: 1.984}


@pytest.mark.parametrize(("freedom", "expected"), STUDENT.items())
def test_students_t(freedom: int, expected: float) -> None:
    assert student95(freedom) == pytest.approx(expected, rel=2e-3)


def test_the_mean_of_steps_and_the_difference_of_two() -> None:
    one = mean_of_steps([1.0, 2.0, NAN, 3.0])
    assert (one.value, one.lo, one.hi) == pytest.approx((2.0, 2.0 - 4.3027 / np.sqrt(3), 2.0 + 4.3027 / np.sqrt(3)))
    assert np.isnan(mean_of_steps([]).value) and np.isnan(mean_of_steps([1.0]).lo)
    # Newcombe 1998, table II, case (a): 56/70 - 48/80 by method 10.
    apart = difference(Estimate(0.8, 0.6919, 0.8769), Estimate(0.6, 0.4904, 0.7002))
    assert (apart.value, apart.lo, apart.hi) == pytest.approx((0.2, 0.0524, 0.3339), abs=2e-3)


# -- the notebook, and what it costs to import


def test_the_notebook_of_the_documents_runs(whole: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    better = small_run(tmp_path / "better", bonus=0.5)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    script = ROOT / "docs" / "examples" / "look_at_runs.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(whole.root), str(better.root)])
    made = runpy.run_path(str(script))
    assert made["states"].to_dict()["trained"] == 6
    assert made["worst"]["reward"].tolist() == [0.0, 0.0, 0.5] and made["worst"]["text"].tolist()[0] == "311"
    assert made["comparison"]["reward_diff"].tolist() == [0.0, 0.5]
    assert made["by_source"].loc["sort", "reward_mean"] == 0.5
    assert made["differences"].set_index("name").loc["reward_last", "difference"] == 0.5
    assert made["curves"]["step"].tolist() == [0, 1, 2, 3] * 2
    assert (tmp_path / "compared.png").stat().st_size > 10_000
    assert (tmp_path / "look-at-runs.png").read_bytes().startswith(b"\x89PNG")


def test_pandas_is_imported_by_the_first_frame_and_the_status_needs_nothing_heavier(whole: RunDir) -> None:
    code = ("import sys, rl_core.frames, tasks.answers; from pathlib import Path; from rl_core.run_dir import RunDir;"
            "from tasks.inspection import run_status, summarize; run = RunDir(Path(sys.argv[1]));"
            "heavy = lambda: sorted({'pandas', 'torch', 'transformers'} & set(sys.modules)); print(heavy());"
            "summarize(run, run_key='k', status='s', wall_s=1.0); run_status('small'); print(heavy())")
    (whole.root.parent / "runs").mkdir()
    (whole.root.parent / "runs" / "small").symlink_to(whole.root)
    done = subprocess.run([sys.executable, "-c", code, str(whole.root)], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=True, env={**os.environ, "HEADWAY_HOME": str(whole.root.parent)})
    assert done.stdout == "[]\n['pandas']\n"


