"""The MLflow run of one Headway run: what is committed in the run directory, replayed.

A step's record is committed first, then replayed here. MLflow drops a point whose run, key, step, timestamp and value
are all there already, and all five come from the committed file: however often a step is replayed, there is one point
per metric and step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rl_core.alarms import alarm_text
from rl_core.config import Config
from rl_core.errors import BrokenFile
from rl_core.gaps import Gaps
from rl_core.metrics import is_tracked, tracked_names, validation_metrics
from rl_core.observations import observed_steps, seen_observation
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import revisions
from rl_core.run_dir import RunDir, file_numbers, numbered, put_if_absent, read_json, to_json
from rl_core.uris import redact
from tasks.destination import Destination, flatten, resolved
from tasks.tracking.client import open_client
from tasks.tracking.inputs import as_inputs, data_sets, tags_of
from tasks.tracking.sampled import training_traces, validation_traces
from tasks.tracking.traces import TracedRun, put_traces

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

Status = Literal["FINISHED", "FAILED", "KILLED"]
TAG_RUN_UUID = "headway.run_uuid"
TAG_RUN_KEY = "headway.run_key"
TAG_CHANGED = "headway.changed"
TAG_REVISION = "headway.revision"
TAG_AMEND = "headway.amend."
"""And the number of the revision: what was amended, and from which step on."""
TAG_UNREAD = "headway.data_unread"
"""Why the run has no data sets as inputs."""
TAG_TRACED = "headway.traced"
"""The newest validation for which trajectories of the training step before it are traces."""
TAG_UNTRACED = "headway.trajectories_unread"
"""Why the newest of those steps that has fewer of them, or none, has."""
TAG_ALARM = "headway.alarm"
"""The first step that violated an invariant, with what was measured: `step 12: mismatch 0.012 over 0.005`."""
TAG_ALARM_NEWEST = "headway.alarm_newest"
"""The same of the newest such step."""
TAG_CAUSE = "headway.cause"
"""Why the newest start failed: the error, and below it what a dead part that caused it wrote last."""
UNREAD_CHARACTERS, CAUSE_CHARACTERS = 1000, 4000
VALIDATION = r"step-(\d{9})\.json"
TAG_TABLES = "mlflow.loggedArtifacts"
"""Names the artifacts that MLflow's pages show as tables."""
TABLES = "validations"
PAGES = ("viewer", "timeline")
"""Folders of the pages that tasks/screens.py makes."""
SHOWN_TABLES = 50
"""The newest ones in that tag, whose length is limited; all of them are artifacts."""
BATCH_METRICS = 1000
"""MLflow takes at most this many metrics in one call."""
BATCH_PARAMS = 100


class _Step(NamedTuple):
    """What a committed file says of its step."""

    metrics: dict[str, float]
    """The tracked ones."""
    ts_us: int
    alarm: str | None = None
    """Invariants that it violated, in words."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One kind of committed file."""

    marker: str | None
    """A metric that every step of this source has: its last step in MLflow is where the replay begins. None: all is
    replayed (few, and not always in order)."""
    steps: Callable[[], list[int]]
    """All that there are; they are listed when a start begins and when it ends."""
    place: Callable[[int], Path] | None
    """The file of a step, where steps follow one another: then the next ones are looked for by their names. A listing
    of all of them, thousands of times, would be most of the work of a long run."""
    load: Callable[[int], _Step | None]
    """None: as if the file were not there."""


def _sources(run: RunDir) -> tuple[_Source, ...]:
    def record(k: int) -> _Step:
        stored = read_record(run, k)
        return _Step(_tracked(stored.metrics), stored.ts_us, alarm_text(stored.metrics))

    def observation(k: int) -> _Step | None:
        stored = seen_observation(run, k)
        return None if stored is None else _Step(_tracked(stored.metrics), stored.ts_us)

    def validation(k: int) -> _Step:
        stored = read_json(run.validation(k))
        return _Step(_tracked(validation_metrics(stored)), int(stored["ts_us"]))

    return (
        _Source(tracked_names("learner")[0], lambda: recorded_steps(run), run.record, record),
        _Source(tracked_names("owner")[0], lambda: observed_steps(run), run.observation, observation),
        _Source(None, lambda: file_numbers(run.validations, VALIDATION), None, validation),
    )


def _following(place: Callable[[int], Path], done: set[int]) -> Iterator[int]:
    """Steps behind the last one that is done, as far as they have a file."""
    return takewhile(lambda k: place(k).exists(), count(max(done) + 1))


def _tracked(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if is_tracked(name)}


def amendments(run: RunDir) -> dict[str, str]:
    """Tags of an amended run: `{"headway.revision": "1", "headway.amend.1": '{"from_step": 60, "total_steps": [60,
    120]}'}`; none for one that never was."""
    made = revisions(run)
    tags = {f"{TAG_AMEND}{one.revision}": json.dumps({"from_step": one.from_step, **one.changed}) for one in made}
    return {**tags, TAG_REVISION: str(made[-1].revision)} if made else {}


def experiment_of(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """Id of the experiment `name`, which is made where there is none; its artifacts then lie at `artifacts`."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            client.create_experiment(name, artifact_location=artifacts)
        except MlflowException as error:  # another run made it in between
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    return str(experiment.experiment_id)


class Mirror:
    """The MLflow run of one Headway run: everything that talks to MLflow. Used by one thread."""

    def __init__(self, run: RunDir, config: Config, where: Destination, tags: Mapping[str, str]) -> None:
        """Import mlflow, find or create the run, write params and tags, and find where the replay begins."""
        self._run, self._config, self._where, self._tags = run, config, where, tags
        self._client: MlflowClient = open_client(where.uri)
        found = self._find() or self._create()
        self.run_id: str = found.info.run_id
        self.experiment_id: str = found.info.experiment_id
        put_if_absent(run.mlflow_run, to_json({"run_id": self.run_id, "experiment_id": self.experiment_id,
                                               "uri": redact(where.uri)}))
        self._client.update_run(self.run_id, status="RUNNING")
        self._describe(found)
        self._put_data_sets(found)
        self._sources = {source: self._replayed(source) for source in _sources(run)}
        self._alarmed = TAG_ALARM in found.data.tags
        self._looked = False
        self._tables = self._stored_tables()
        self._of = TracedRun(run_uuid=tags[TAG_RUN_UUID], run_id=self.run_id, experiment_id=self.experiment_id)
        traced = int(found.data.tags.get(TAG_TRACED, -1))
        self._traced = {k for k in file_numbers(run.validations, VALIDATION) if k <= traced}
        self.stored_pages = frozenset(name for folder in PAGES for name in self._stored(folder, r".*\.(html|json)"))
        """`viewer/validation-000000020.html` ... of earlier starts."""

    def replay(self, *, whole: bool = False) -> None:
        """Everything that is committed and not in MLflow goes there, oldest first, in as few calls as may be. `whole`:
        also what was committed out of its order, as does the first time."""
        whole = whole or not self._looked
        from mlflow.entities import Metric

        batch: list[Metric] = []
        marks: list[tuple[set[int], int]] = []
        alarms: dict[int, str] = {}
        for source, done in self._sources.items():
            for k in _following(source.place, done) if source.place and done and not whole else source.steps():
                if k in done or (step := source.load(k)) is None:
                    continue
                metrics, ts_us, alarm = step
                if len(batch) + len(metrics) > BATCH_METRICS:
                    self._send(batch, marks, alarms)
                    batch, marks, alarms = [], [], {}
                batch += [Metric(name, value, ts_us // 1000, k) for name, value in metrics.items()]
                marks.append((done, k))
                alarms |= {} if alarm is None else {k: alarm}
        self._send(batch, marks, alarms)
        self._looked = True
        self._put_tables()
        self._put_trajectories()

    def _put_tables(self) -> None:
        """Answers of the validations as tables of MLflow: `validations/step-<k>.json`. Each is written whole, so that
        once more changes nothing (MLflow's own `log_table` would append)."""
        there = dict(numbered(self._run.validations, r"step-(\d{9})\.table\.json"))
        new = [k for k in there if k not in self._tables and self._run.validation(k).exists()]
        for k in new:
            rows = read_json(there[k])["rows"]
            # Before the table, which says that all of this step is there.
            put_traces(self._where.uri, validation_traces(self._of, self._run, k, rows))
            table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            self._client.log_dict(self.run_id, table, f"{TABLES}/step-{k:09d}.json")
            self._tables.add(k)
        if new:
            shown = [{"path": f"{TABLES}/step-{k:09d}.json", "type": "table"} for k in sorted(self._tables)]
            self._client.set_tag(self.run_id, TAG_TABLES, json.dumps(shown[-SHOWN_TABLES:]))

    def _put_trajectories(self) -> None:
        """Some of what the training step before each validation consumed, as traces."""
        for k in file_numbers(self._run.validations, VALIDATION):
            if k in self._traced:
                continue
            gaps = Gaps()
            if self._run.record(k - 1).exists():
                put_traces(self._where.uri, training_traces(self._of, self._run, k - 1, gaps))
            if gaps:
                self._client.set_tag(self.run_id, TAG_UNTRACED, f"step {k - 1}: {gaps[0]}"[:UNREAD_CHARACTERS])
            self._traced.add(k)
            # Behind the traces: it says that they are there.
            self._client.set_tag(self.run_id, TAG_TRACED, str(max(self._traced)))

    def _put_data_sets(self, found: Run) -> None:
        """Once per run. What cannot be read becomes a tag: it is the run's own reader that this stops, or has not."""
        inputs = found.inputs.dataset_inputs if found.inputs else []
        if inputs:
            return
        try:
            sets = data_sets(self._run, self._config)
        except (OSError, ValueError) as error:
            self._client.set_tag(self.run_id, TAG_UNREAD, f"{type(error).__name__}: {error}"[:UNREAD_CHARACTERS])
        else:
            self._client.log_inputs(self.run_id, as_inputs(sets))

    def _stored_tables(self) -> set[int]:
        """Steps whose table MLflow has for certain."""
        names = self._stored(TABLES, r"step-\d{9}\.json")
        return {int(name.removesuffix(".json")[-9:]) for name in names}

    def _stored(self, folder: str, pattern: str) -> list[str]:
        """Artifacts that MLflow has for certain, `folder/name`: the last one is written again, it may have been cut."""
        paths = [artifact.path for artifact in self._client.list_artifacts(self.run_id, folder)]
        return sorted(path for path in paths if re.fullmatch(pattern, Path(path).name))[:-1]

    def _send(self, batch: list[Metric], marks: list[tuple[set[int], int]], alarms: Mapping[int, str]) -> None:
        if alarms:  # before the points, behind which these steps are not replayed again
            self._tag_alarms(alarms)
        if batch:
            self._client.log_batch(self.run_id, metrics=batch)
        for done, k in marks:
            done.add(k)

    def _tag_alarms(self, alarms: Mapping[int, str]) -> None:
        """The first step with an alarm stays; the newest one is written over. One call, however many they are."""
        from mlflow.entities import RunTag

        first, newest = (f"step {k}: {alarms[k]}" for k in (min(alarms), max(alarms)))
        tags = {TAG_ALARM_NEWEST: newest} if self._alarmed else {TAG_ALARM: first, TAG_ALARM_NEWEST: newest}
        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        self._alarmed = True

    def log_artifact(self, path: Path, folder: str) -> None:
        self._client.log_artifact(self.run_id, str(path), folder or None)

    def log_page(self, name: str, text: str) -> None:
        self._client.log_text(self.run_id, text, name)

    def close(self, status: Status, why: str | None) -> None:
        """Set how this start ended. `why`: the cause of a failure; that of an earlier start goes with any other end."""
        from mlflow.exceptions import MlflowException

        if why is not None:
            self._client.set_tag(self.run_id, TAG_CAUSE, why[:CAUSE_CHARACTERS])
        elif status != "FAILED":
            try:
                self._client.delete_tag(self.run_id, TAG_CAUSE)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        self._client.set_terminated(self.run_id, status=status)

    def _find(self) -> Run | None:
        """The run by its stored id, else by the tag run uuid (a start that died before it could store the id)."""
        from mlflow.exceptions import MlflowException

        with suppress(FileNotFoundError):
            stored = read_json(self._run.mlflow_run)
            try:
                run = self._client.get_run(stored["run_id"])
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                if run.info.lifecycle_stage != "active":
                    raise BrokenFile(f"run {run.info.run_id} was deleted in MLflow; `mlflow runs restore --run-id "
                                     f"{run.info.run_id}` brings it back")
                return run
        experiment = self._client.get_experiment_by_name(self._config.tracking.experiment)
        if experiment is None:
            return None
        hits = self._client.search_runs([experiment.experiment_id],
                                        f"tags.`{TAG_RUN_UUID}` = '{self._tags[TAG_RUN_UUID]}'",
                                        order_by=["attributes.start_time ASC"], max_results=1)
        return hits[0] if hits else None

    def _create(self) -> Run:
        place = experiment_of(self._client, self._config.tracking.experiment, self._where.artifacts)
        return self._client.create_run(place, tags=dict(self._tags), run_name=self._tags[TAG_RUN_KEY])

    def _describe(self, found: Run) -> None:
        """Params once, as at the first start; what a later start changed goes into tags, since params are final."""
        from mlflow.entities import Param, RunTag

        settings = resolved(self._config)
        params, stored = flatten(settings), found.data.params
        changed = {key: value for key, value in params.items() if key in stored and stored[key] != value}
        tags = {**tags_of(self._config), **self._tags, **amendments(self._run),
                **({TAG_CHANGED: json.dumps(changed)} if changed else {})}
        missing = [Param(key, value) for key, value in params.items() if key not in stored]
        for lo in range(0, len(missing), BATCH_PARAMS):
            self._client.log_batch(self.run_id, params=missing[lo:lo + BATCH_PARAMS])
        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        self._client.log_dict(self.run_id, settings, "config.yaml")

    def _replayed(self, source: _Source) -> set[int]:
        """Steps that MLflow has for certain. The last one is replayed again: it costs nothing, and fills its gaps."""
        if source.marker is None:
            return set()
        history = self._client.get_metric_history(self.run_id, source.marker)
        last = max((point.step for point in history), default=-1)
        return {k for k in source.steps() if k < last}
