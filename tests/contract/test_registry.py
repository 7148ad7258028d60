"""Model versions and parent runs against a real MLflow on sqlite; nights whose MLflow is away."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.metrics import names
from rl_core.nightly.nights import Night, NightRun, put_night, put_outcome, run_keys, told_outcome
from rl_core.records import put_record
from rl_core.run_dir import RunDir, put_if_absent, replace_file, to_json
from rl_core.run_identity import open_identity
from rl_core.types import StepRecord
from tasks.destination import Destination, destination
from tasks.night_end import compare_night, failure_of, register_night
from tasks.night_files import TAG_NIGHT, has_verdict, night_dir, night_tags
from tasks.nights import CHAMPION, adopt_runs, begin_night, open_matrix
from tasks.paths import run_dir
from tasks.tracking import (
    TAG_PARENT,
    Tracker,
    TrackingFailed,
    adopt,
    champion,
    close_parent,
    judge,
    log_page,
    open_parent,
    promote,
    register_version,
    serve_command,
    tracked_status,
    versions,
)
from tasks.tracking.registry import shards_behind
from tests.looking import small_run
from tests.unit.test_nights import outcome

CONFIG = Config.model_validate({"isolated": True})
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Destination:
    """One database for the module: making it costs seconds."""
    return destination(CONFIG, tmp_path_factory.mktemp("home"), {})


def tracked(run: RunDir, where: Destination, key: str, **tags: str) -> str:
    """Id of the MLflow run of a run with three steps and a validation behind the second."""
    for step in range(3):
        put_record(run, StepRecord(
            step=step, idx=step, attempt=1, claim_digest="c", weights_digest="w", published=None, revision=0,
            seconds={}, metrics=dict.fromkeys(names("learner"), 1.0), env={"commit": f"commit-{step}"}, ts_us=1))
    put_if_absent(run.validation(2), to_json({
        "step": 2, "v": 2, "greedy_accuracy": 0.75, "sampled_accuracy": None, "n": 8, "seconds": 1.0, "ts_us": 5_000}))
    tracker = Tracker(run, CONFIG, where, run_uuid=f"uuid-{key}", run_key=key, tags=tags)
    tracker.start()
    assert tracker.finish("FINISHED", DEADLINE_S)
    return str(tracker.run_id)


def exported(key: str, directory: Path, **changed: Any) -> dict[str, Any]:
    """What `export_run` returns."""
    return {"run_key": key, "run_uuid": f"uuid-{key}", "step": 2, "version": 2, "source": "checkpoint",
            "weights_digest": f"weights-of-{key}", "revision": 0, "config_digest": "settings", "dtype": "float32",
            "best": {"field": "greedy_accuracy", "value": 0.75, "step": 2}, "headway": "0.1.0",
            "directory": str(directory), **changed}


def test_a_version_is_a_directory_by_reference_with_its_lineage_and_what_its_validation_measured(
        tmp_path: Path, where: Destination) -> None:
    from mlflow import MlflowClient

    run, directory = RunDir(tmp_path / "run"), tmp_path / "sorter-hf"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"0" * 100_000)
    run_id = tracked(run, where, "first")
    made = register_version(run, where, exported("first", directory), name="lineage", tags={"headway.night": "monday"})
    assert (made.name, made.version, made.run_key, made.step, made.directory, made.mlflow_run_id) == (
        "lineage", 1, "first", 2, str(directory), run_id)
    assert made.tags.items() >= {
        "headway.weights_digest": "weights-of-first", "headway.config_digest": "settings",
        "headway.commit": "commit-1", "headway.shards": "{}", "headway.night": "monday",
        "headway.serve": f"python -m sglang.launch_server --model-path {directory} --port 30000",
        "headway.best": '{"field": "greedy_accuracy", "value": 0.75, "step": 2}'}.items()
    again = register_version(run, where, exported("first", directory), name="lineage")
    assert again == made and len(versions(where, "lineage")) == 1

    client = MlflowClient(where.uri, where.uri)
    version = client.get_model_version("lineage", "1")
    assert version.source == directory.as_uri() and serve_command(str(directory)) in str(version.description)
    [output] = client.get_run(run_id).outputs.model_outputs
    assert (output.model_id, output.step) == (made.model_id, 2)
    model = client.get_logged_model(made.model_id)
    assert [(one.key, one.step, one.value, one.run_id) for one in model.metrics or ()] == [
        ("validation/greedy_accuracy", 2, 0.75, run_id)]
    assert len(client.get_metric_history(run_id, "validation/greedy_accuracy")) == 1, "the run's own point"
    card = Path(model.artifact_location.removeprefix("file://"))
    assert sorted(path.name for path in card.iterdir()) == ["MLmodel", "README.md", "headway.json"]


def test_a_version_is_described_by_the_command_that_was_given_to_serve_it(tmp_path: Path, where: Destination) -> None:
    from mlflow import MlflowClient

    run = RunDir(tmp_path / "run")
    tracked(run, where, "served")
    made = register_version(run, where, exported("served", tmp_path), name="served", tags={
        "headway.serve": "serve /m --now"})
    client = MlflowClient(where.uri, where.uri)
    card = Path(client.get_logged_model(made.model_id).artifact_location.removeprefix("file://")) / "README.md"
    for said in (client.get_model_version("served", "1").description, card.read_text()):
        assert said is not None and "    serve /m --now\n" in said and "sglang" not in said


def test_a_directory_with_a_space_is_served_as_one_word() -> None:
    assert serve_command("/my models/m") == "python -m sglang.launch_server --model-path '/my models/m' --port 30000"


def test_the_champion_is_the_version_that_was_promoted_last(tmp_path: Path, where: Destination) -> None:
    assert champion(where, "sorter") is None
    made: list[Any] = []
    for key in ("monday", "tuesday"):
        run = RunDir(tmp_path / key)
        tracked(run, where, key)
        made.append(register_version(run, where, exported(key, tmp_path / f"{key}-hf"), name="sorter"))
    assert [one.version for one in made] == [1, 2] and champion(where, "sorter") is None
    promote(where, made[0], why="the first night")
    judge(where, made[1], "kept", why="accuracy -0.02 [-0.05, 0.01]")
    best = champion(where, "sorter")
    assert best is not None and (best.run_key, best.tags["headway.verdict"], best.tags["headway.why"]) == (
        "monday", "promoted", "the first night")
    for _ in range(2):
        promote(where, made[1], why="better after all")
    best = champion(where, "sorter")
    assert best is not None and (best.run_key, best.version) == ("tuesday", 2)
    assert [one.version for one in versions(where, "sorter")] == [2, 1]


def test_a_run_that_is_not_tracked_and_a_name_that_mlflow_does_not_take_are_refused(
        tmp_path: Path, where: Destination) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"mlflow-run\.json: absent, so the run is not in MLflow"):
        register_version(run, where, exported("k", tmp_path), name="sorter")
    tracked(run, where, "k")
    for name in ("a/b", "a:b", "it's", " "):
        with pytest.raises(ConfigError, match="model name"):
            register_version(run, where, exported("k", tmp_path), name=name)


def test_mlflow_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    away = Destination(uri="http://me:secret@127.0.0.1:9", artifacts=None, why="test")
    with pytest.raises(TrackingFailed, match=r"^MLflow at http://me:\*\*\*@127\.0\.0\.1:9 \(test\): ") as told:
        champion(away, "sorter")
    assert "secret" not in str(told.value)


def test_the_shards_behind_weights_are_those_of_their_claims(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    assert [list(shards_behind(run, step).values()) for step in (0, 1, 3)] == [[], [[0, 0, 1]], [[0, 2, 3]]]


def test_the_runs_of_a_matrix_are_children_of_one_parent(tmp_path: Path, where: Destination) -> None:
    from mlflow import MlflowClient

    parent = open_parent(where, experiment="headway", key="matrix", tags={"headway.night": "monday"},
                         settings={"seed": [1, 2]})
    first = tracked(RunDir(tmp_path / "first"), where, "m-1", **{TAG_PARENT: parent})
    late = RunDir(tmp_path / "late")
    second = tracked(late, where, "m-2")
    for _ in range(2):  # a flow that is tried again
        assert open_parent(where, experiment="headway", key="matrix") == parent
        adopt(where, parent, late)
        close_parent(where, parent, "FINISHED", {"validation/best": 0.75})
    client = MlflowClient(where.uri, where.uri)
    run = client.get_run(parent)
    children = client.search_runs([run.info.experiment_id], f"tags.`{TAG_PARENT}` = '{parent}'")
    assert {child.info.run_id for child in children} == {first, second}
    assert (run.info.status, run.info.run_name, run.data.tags["headway.night"]) == ("FINISHED", "matrix", "monday")
    assert [point.value for point in client.get_metric_history(parent, "validation/best")] == [0.75]


def test_a_page_of_a_night_is_an_artifact_of_its_run(tmp_path: Path, where: Destination) -> None:
    from mlflow import MlflowClient

    run_id = tracked(RunDir(tmp_path / "run"), where, "paged")
    for text in ("<p>draft</p>", "<p>report</p>"):
        log_page(where, run_id, text, "report/night.html")
    client = MlflowClient(where.uri, where.uri)
    [page] = client.list_artifacts(run_id, "report")
    assert Path(client.download_artifacts(run_id, page.path, str(tmp_path))).read_text() == "<p>report</p>"


# -- nights that are finished late

def test_a_night_that_is_finished_late_does_not_take_the_champion_back(
        tmp_path: Path, where: Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    """Monday's version is registered when Tuesday's is the champion already; Wednesday takes it over."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", where.uri)
    keys = [f"late-2026-11-{day}" for day in (23, 24, 25)]
    nights = [begun(key, due=due) for due, key in enumerate(keys)]
    for key in keys:
        open_identity(run_dir(key), key, "tiny-cpu", Config())
        tracked(run_dir(key), where, key)
        replace_file(night_dir(key).model / "headway.json", to_json(exported(key, night_dir(key).model)))
        put_outcome(night_dir(key), outcome(key))
    monday, tuesday, wednesday = nights
    champions: list[str] = []
    for night in (tuesday, monday, monday, wednesday):  # a flow that is tried again
        assert register_night.fn(night, outcome(night.key)) is not None
        best = champion(where, "late")
        assert best is not None
        champions.append(best.run_key)
    assert champions == [tuesday.key, tuesday.key, tuesday.key, wednesday.key]
    stays = f"version 1 of 'late', of run {tuesday.key}, is of a later night, and stays champion"
    assert [(one.run_key, one.tags["headway.verdict"], one.tags["headway.why"]) for one in versions(where, "late")] == [
        (wednesday.key, "promoted", "so it is"), (monday.key, "kept", f"{stays}\nso it is"),
        (tuesday.key, "promoted", "so it is")]
    told = told_outcome(night_dir(monday.key))
    assert (told.verdict, told.reasons) == ("keep", (stays, "so it is"))


# -- nights whose MLflow is away

AWAY = "http://127.0.0.1:9"


def begun(key: str, runs: int = 1, due: int = 1) -> Night:
    """A night of so many runs, on disk."""
    night = Night(key=key, name=key.partition("-")[0], flow_run_id=key, scheduled_us=due, preset="tiny-cpu",
                  runs=tuple(NightRun(run_key=each, overrides={}) for each in run_keys(key, runs)))
    assert put_night(night_dir(key), night)
    return night


def test_without_mlflow_a_night_has_no_verdict_and_says_what_gets_it_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", AWAY)
    night = begun("away-2026-11-30")
    small_run(run_dir(night.key).root, night.key)
    with pytest.raises(TrackingFailed, match=f"^MLflow at {AWAY} ") as told:
        compare_night.fn(night)
    assert not has_verdict(night)
    said = str(failure_of(night, "comparison", told.value)).splitlines()[0]
    assert f"night {night.key}: comparison, MLflow: TrackingFailed: MLflow at {AWAY}" in said
    assert said.endswith(f"Retry, or `headway rerun {night.key}`, goes on from there")


UNOPENED = {
    "a damaged file": "sqlite:///{home}/broken.db",
    "PostgreSQL where nobody listens": "postgresql://me:secret@127.0.0.1:9/mlflow",  # psycopg, or that it is not there
    "a driver that is not installed": "mysql://me:secret@127.0.0.1:9/mlflow"}


@pytest.mark.parametrize("uri", UNOPENED.values(), ids=UNOPENED)
def test_a_database_that_cannot_be_opened_is_an_mlflow_that_is_away(
        uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is said to be within seconds: a matrix trains, and a night with a named baseline begins."""
    (tmp_path / "broken.db").write_bytes(b"not a database, but long enough to be read as one" * 100)
    uri = uri.format(home=tmp_path)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    away = Destination(uri=uri, artifacts=None, why="test")
    night, since = begun("unopened-2026-11-30", runs=2), time.monotonic()
    with pytest.raises(TrackingFailed, match=f"^MLflow at {re.escape(str(away))}: ") as told:
        champion(away, "sorter")
    assert "secret" not in str(told.value)
    assert tracked_status(uri, "4f") is None
    with disable_run_logger():  # outside of a flow run
        open_matrix.fn(night, Config())
    assert not night_dir(night.key).parent.exists()
    assert begin_night(replace(night, name="named", baseline=CHAMPION), Config()).baseline == CHAMPION
    assert time.monotonic() - since < 30


def test_without_mlflow_a_matrix_trains_and_its_runs_get_their_parent_when_it_is_back(
        tmp_path: Path, where: Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", AWAY)
    night = begun("apart-2026-11-30", runs=2)
    with disable_run_logger():  # outside of a flow run
        open_matrix.fn(night, Config())
    assert not night_dir(night.key).parent.exists()
    assert [night_tags(run.run_key) for run in night.runs] == [{TAG_NIGHT: night.key}] * 2, "they can be trained"

    monkeypatch.setenv("MLFLOW_TRACKING_URI", where.uri)
    children: set[str] = set()
    for each in night.runs:
        open_identity(run_dir(each.run_key), each.run_key, "tiny-cpu", Config())
        children.add(tracked(run_dir(each.run_key), where, each.run_key, **night_tags(each.run_key)))
    parent = adopt_runs(night)
    client = MlflowClient(where.uri)
    found = client.search_runs([client.get_run(parent).info.experiment_id], f"tags.`{TAG_PARENT}` = '{parent}'")
    assert {child.info.run_id for child in found} == children
    assert night_tags(night.runs[0].run_key) == {TAG_NIGHT: night.key, TAG_PARENT: parent}
