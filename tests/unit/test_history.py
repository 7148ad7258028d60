"""History, summary and figures of a run, read from a directory of real records, claims and shards."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_core.experience.ledger import put_claim, put_drops
from rl_core.experience.shards import ShardWriter
from rl_core.history import read_history
from rl_core.landed_groups import trained_ages
from rl_core.metrics import names
from rl_core.observations import (
    make_up_observations,
    observed_steps,
    put_observation,
    read_observation,
    seen_observation,
)
from rl_core.records import put_record
from rl_core.run_dir import RunDir, put_if_absent, to_json
from rl_core.summary import summarize
from rl_core.types import Claim, Drop, ShardRef, StepRecord
from tasks.figures import draw_figures, learning_curve, merge_cells, smooth, staleness_histogram, step_edges, timeline
from tests.builders import make_claim, make_group, make_run

IDX_MIN = {0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 3)}
"""Oldest publication of the two groups that each step trains."""
T0 = 1_790_000_000.0


def record(step: int, time_s: float, metrics: dict[str, float]) -> StepRecord:
    return StepRecord(step=step, idx=step, attempt=1, claim_digest="", weights_digest=f"w{step}", env={},
                      metrics=dict.fromkeys(names("learner"), 0.0) | metrics, revision=0, seconds={}, published=None,
                      ts_us=int(time_s * 1e6))


def claim_rows(run: RunDir, writer: ShardWriter, step: int) -> Claim:
    """Land two groups in a shard of their own and claim them for `step`; the claim drops one group too."""
    groups = [make_group(2 * step + i, versions=(idx,)) for i, idx in enumerate(IDX_MIN[step])]
    landed = writer.land(groups)
    claim = make_claim(run, [ShardRef(stream=landed.stream, seq=landed.seq)], step=step)
    claim = replace(claim, dropped=(Drop(group_id=f"e0-p{90 + step}-t0", reason="stale", n_tokens=5),))
    return put_claim(run, claim, fsync=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Three trained steps, a fourth that is claimed only, validations at 0 and 3."""
    run = make_run(tmp_path / "run")
    writer = ShardWriter(run, "rollout-0", 1, {}, False)
    for step in IDX_MIN:
        claim_rows(run, writer, step)
    put_drops(run, 3, [Drop(group_id="e0-p90-t0", reason="stale", n_tokens=5),  # known from a claim already
                       Drop(group_id="e0-p99-t0", reason="all_masked", n_tokens=7)], attempt=1, fsync=False)
    for step, (rate, tokens, lag) in enumerate([(100.0, 10.0, 0.0), (400.0, 10.0, 1.0), (400.0, 20.0, 4.0)]):
        put_record(run, record(step, T0 + step, {
            "reward/mean": 0.25 * step, "system/samples_per_s": rate, "train/loss_tokens": tokens,
            "staleness/update_lag_mean": lag, "staleness/mean": step / 2, "staleness/max": float(step),
            "system/step_s": 0.5, "utilization/learner_busy": 0.75, "utilization/learner_waiting": 0.25}))
    put_observation(run, 1, dict.fromkeys(names("owner"), 2.0), ts_us=7)
    for step, accuracy in ((0, 0.375), (3, 0.875)):
        put_if_absent(run.validation(step), to_json({"step": step, "v": step, "greedy_accuracy": accuracy, "n": 8,
                                                     "sampled_accuracy": None, "mean_length": 4.0, "seconds": 0.1,
                                                     "ts_us": 1}))
    put_if_absent(run.mlflow_run, to_json({"run_id": "stored"}))
    return run


def test_history_is_what_was_recorded(run: RunDir) -> None:
    history = read_history(run)
    assert history.step_K.tolist() == [0, 1, 2]
    assert history.metrics["reward/mean"].tolist() == [0.0, 0.25, 0.5]
    np.testing.assert_equal(history.metrics["rollout/tokens_per_s"], [math.nan, 2.0, math.nan])
    assert [(v.step, v.greedy_accuracy) for v in history.validations] == [(0, 0.375), (3, 0.875)]
    assert math.isnan(history.validations[0].sampled_accuracy)


def test_ages_are_those_of_the_trained_groups_also_when_a_shard_is_gone(run: RunDir) -> None:
    assert trained_ages(run).tolist() == [0, 0, 1, 0, 2, 0]
    stream = next(run.streams.iterdir()).name
    run.shard(stream, 1).unlink()
    assert trained_ages(run).tolist() == [0, 0, 2, 0]


def test_the_summary_has_the_numbers_of_the_json_line_and_is_json(run: RunDir) -> None:
    summary = summarize(run, run_key="k", status="completed", wall_s=12.3456)
    assert json.loads(json.dumps(summary.as_json(), allow_nan=False)) == {
        "run_key": "k", "status": "completed", "steps": 3, "accuracy_start": 0.375, "accuracy_end": 0.875,
        "wall_s": 12.346, "groups_trained": 6,
        "groups_dropped": 5,  # one in each of the four claims, and one more in the drops file
        "staleness_max": 2, "staleness_mean": 0.5,
        "update_lag_mean": 2.25,  # (10 * 0 + 10 * 1 + 20 * 4) / 40 tokens
        "samples_per_s": 200.0,  # as many answers at 100/s, 400/s, 400/s
        "mlflow_run_id": "stored"}


def test_an_empty_run_has_a_summary_of_nulls_and_no_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "empty")
    summary = summarize(run, run_key="k", status="failed", wall_s=1.0).as_json()
    assert [key for key, value in summary.items() if value is None] == [
        "accuracy_start", "accuracy_end", "staleness_max", "staleness_mean", "update_lag_mean", "samples_per_s",
        "mlflow_run_id"]
    assert draw_figures(run, title="k", limit=2) == []


def test_an_observation_stands_once_it_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert put_observation(run, 4, {"rollout/in_flight": 1.0}, ts_us=5)
    assert not put_observation(run, 4, {"rollout/in_flight": 9.0}, ts_us=6)
    assert observed_steps(run) == [4]
    assert (read_observation(run, 4).metrics, read_observation(run, 4).ts_us) == ({"rollout/in_flight": 1.0}, 5)


TORN = {"no byte": b"", "the right length, zeroed": b"\0" * 80, "the first half": b'{"format": 1, "step": 1, "metr'}


@pytest.mark.parametrize("torn", TORN.values(), ids=TORN)
def test_an_observation_that_a_power_loss_tore_is_absent_and_made_up_at_the_next_start(run: RunDir,
                                                                                       torn: bytes) -> None:
    run.observation(1).write_bytes(torn)
    assert seen_observation(run, 1) is None
    assert np.isnan(read_history(run).metrics["rollout/tokens_per_s"]).all()
    assert len(draw_figures(run, title="k", limit=1)) == 3
    assert summarize(run, run_key="k", status="completed", wall_s=1.0).steps == 3
    put_observation(run, 2, dict.fromkeys(names("owner"), 3.0), ts_us=8)
    make_up_observations(run)
    assert observed_steps(run) == [0, 1, 2] and not run.observation(3).exists(), "each recorded step has one"
    made_up = read_observation(run, 1)
    assert set(made_up.metrics) == set(names("owner")) and all(map(math.isnan, made_up.metrics.values()))
    assert read_observation(run, 2).metrics["rollout/in_flight"] == 3.0, "what can be read stays"


def test_figures_are_drawn_from_the_directory(run: RunDir) -> None:
    paths = draw_figures(run, title="k $not math$", limit=1)
    assert [path.name for path in paths] == ["learning-curve.png", "staleness.png", "timeline.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths)


def test_the_learning_curve_shows_reward_and_validations_at_the_steps_done(run: RunDir) -> None:
    faint, smoothed, greedy = learning_curve(read_history(run), "k").axes[0].lines
    assert (faint.get_xdata().tolist(), faint.get_ydata().tolist()) == ([1, 2, 3], [0.0, 0.25, 0.5])
    assert smoothed.get_ydata().tolist() == [0.25, 0.25, 0.25]
    assert (list(greedy.get_xdata()), greedy.get_ydata().tolist()) == ([0, 3], [0.375, 0.875])


def test_the_learning_curve_shows_intervals_and_data_sources(run: RunDir) -> None:
    for step, by_source in ((5, {"a": {"greedy_accuracy": 0.5}, "b": {"greedy_accuracy": None}}),
                            (6, {"b": {"greedy_accuracy": 0.25}})):
        put_if_absent(run.validation(step), to_json({
            "step": step, "v": step, "greedy_accuracy": 0.5, "n": 8, "greedy_interval": [0.25, 0.75],
            "by_source": by_source, "ts_us": 1}))
    ax = learning_curve(read_history(run), "k").axes[0]
    a, b = ax.lines[3:]
    assert (a.get_label(), b.get_label()) == ("greedy, a", "greedy, b")
    np.testing.assert_equal(a.get_ydata(), [math.nan, math.nan, 0.5, math.nan])
    np.testing.assert_equal(b.get_ydata(), [math.nan, math.nan, math.nan, 0.25])
    [band] = ax.collections
    assert {(5.0, 0.25), (5.0, 0.75)} <= {tuple(point) for point in band.get_paths()[0].vertices.tolist()}


def test_the_histogram_tells_what_is_over_the_limit(run: RunDir) -> None:
    ax = staleness_histogram(trained_ages(run), 1, "k").axes[0]
    assert [round(bar.get_height(), 3) for bar in ax.patches] == [66.667, 16.667, 16.667]
    assert "limit 1: 16.7 % older" in [text.get_text() for text in ax.texts]


def test_the_timeline_stacks_each_side_to_its_shares(run: RunDir) -> None:
    learner, rollout = timeline(read_history(run), "k").axes
    heights = np.array([bar.get_height() for bar in learner.patches]).reshape(4, -1)
    assert heights.sum(axis=0).tolist() == [100.0, 100.0, 100.0]
    assert learner.get_title(loc="left") == "learner: 75 % busy"
    assert rollout.get_xlim() == (0.0, 2.5)


def test_a_stop_between_attempts_is_cut_out_of_the_timeline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step, time_s in enumerate([10.0, 11.0, 12.0, 500.0, 501.0]):
        put_record(run, record(step, T0 + time_s, {"system/step_s": 0.5}))
    edges, cuts = step_edges(read_history(run))
    np.testing.assert_allclose(edges, [[0, 0.5], [0.5, 1.5], [1.5, 2.5], [2.5, 3.0], [3.0, 4.0]])
    np.testing.assert_allclose(cuts, [2.5])


def test_cells_are_merged_by_time_and_unknown_shares_have_no_weight() -> None:
    edges = np.array([[0.0, 1.0], [1.0, 4.0], [4.0, 5.0], [5.0, 6.0]])
    shares = np.array([[1.0, 0.0, math.nan, 0.5], [0.0, 1.0, math.nan, 0.5]])
    left, width, merged = merge_cells(edges, shares, 2)
    np.testing.assert_allclose(left, [0.0, 4.0])
    np.testing.assert_allclose(width, [4.0, 1.0])
    np.testing.assert_allclose(merged, [[0.25, 0.5], [0.75, 0.5]])


def test_smoothing_leaves_out_what_is_not_finite() -> None:
    np.testing.assert_allclose(smooth(np.array([1.0, math.nan, 3.0, 5.0]), 3), [1.0, 2.0, 4.0, 4.0])
    assert np.isnan(smooth(np.array([math.nan]), 9)).all()


def test_drawing_with_a_fresh_font_cache_is_silent(run: RunDir, tmp_path: Path) -> None:
    code = ("import sys; from pathlib import Path; from rl_core.run_dir import RunDir; "
            "from tasks.figures import draw_figures; draw_figures(RunDir(Path(sys.argv[1])), title='k', limit=2)")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(run.root)], cwd=root, capture_output=True, text=True,
                          timeout=120, env={"MPLCONFIGDIR": str(tmp_path / "cold"), "PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
