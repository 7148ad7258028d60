"""The only door to MLflow: one thread replays what a run has committed.

A step's record is committed in the run directory first, then replayed here. MLflow drops a point whose run, key, step,
timestamp and value are all there already, and all five come from the committed file: however often a step is replayed,
there is one point per metric and step. MLflow is a view: when it is slow, down or broken the run goes on, the trouble
is reported, and what is missing is replayed when it is back, or by the next start.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rl_core.config import Config
from rl_core.errors import BrokenFile
from rl_core.metrics import is_tracked, tracked_names, validation_metrics
from rl_core.observations import observed_steps, put_observation, read_observation
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import revisions
from rl_core.run_dir import RunDir, file_numbers, numbered, put_if_absent, read_json, to_json
from tasks.destination import Destination as Destination
from tasks.destination import destination as destination
from tasks.destination import flatten, redact, redact_in, resolved
from tasks.waiting import waiting

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

logger = logging.getLogger("headway.tracking")

Status = Literal["FINISHED", "FAILED", "KILLED"]
TAG_RUN_UUID = "headway.run_uuid"
TAG_RUN_KEY = "headway.run_key"
TAG_CHANGED = "headway.changed"
TAG_REVISION = "headway.revision"
TAG_AMEND = "headway.amend."
"""And the number of the revision: what was amended, and from which step on."""
TAG_TABLES = "mlflow.loggedArtifacts"
"""Names the artifacts that MLflow's pages show as tables."""
TABLES = "validations"
SHOWN_TABLES = 50
"""The newest ones in that tag, whose length is limited; all of them are artifacts."""
BATCH_METRICS = 1000
"""MLflow takes at most this many metrics in one call."""
BATCH_PARAMS = 100
POLL_S = 5.0
"""A wake is a hint; looking at the run directory this often is the truth."""
PASS_EVERY_S = 2.0
"""What is committed within this time goes to MLflow together: a call costs more than a point, and this process has a
learner to feed. `flush` and `finish` do not wait for it."""
SLOW_S = 15.0
"""A look that takes longer is trouble, though MLflow may still be trying by itself."""
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1", "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Retries are ours: MLflow's own would hold the thread for minutes while a server is down.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Set before mlflow is imported, unless the environment says otherwise."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One kind of committed file. `load(k)` -> (metrics, ts_us) of step k."""

    marker: str | None
    """A metric that every step of this source has: its last step in MLflow is where the replay begins. None: all is
    replayed (few, and not always in order)."""
    steps: Callable[[], list[int]]
    """All that there are; they are listed when a start begins and when it ends."""
    place: Callable[[int], Path] | None
    """The file of a step, where steps follow one another: then the next ones are looked for by their names. A listing
    of all of them, thousands of times, would be most of the work of a long run."""
    load: Callable[[int], tuple[dict[str, float], int]]


def _sources(run: RunDir) -> tuple[_Source, ...]:
    def record(k: int) -> tuple[dict[str, float], int]:
        stored = read_record(run, k)
        return _tracked(stored.metrics), stored.ts_us

    def observation(k: int) -> tuple[dict[str, float], int]:
        stored = read_observation(run, k)
        return _tracked(stored.metrics), stored.ts_us

    def validation(k: int) -> tuple[dict[str, float], int]:
        stored = read_json(run.validation(k))
        return _tracked(validation_metrics(stored)), int(stored["ts_us"])

    return (
        _Source(tracked_names("learner")[0], lambda: recorded_steps(run), run.record, record),
        _Source(tracked_names("owner")[0], lambda: observed_steps(run), run.observation, observation),
        _Source(None, lambda: file_numbers(run.validations, r"step-(\d{9})\.json"), None,
                validation),
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


def make_database(uri: str) -> None:
    """Make a sqlite database that is not there yet beside its place, and link it there whole: MLflow builds one in many
    steps, and one that was killed in between can be opened by nobody again."""
    from mlflow import MlflowClient

    final = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or final.exists():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another run was quicker
            os.link(aside, final)
    finally:
        aside.unlink(missing_ok=True)


def upgrade_database(uri: str) -> None:
    """Bring a database of an older MLflow to the schema of this one; nothing where it is that already, or is empty."""
    from mlflow.store.db import utils

    engine = utils.create_sqlalchemy_engine_with_retry(uri)
    if not utils._is_empty_database(engine) \
            and utils._get_schema_version(engine) != utils._get_latest_schema_revision():
        utils._upgrade_db(engine)


class _Mirror:
    """The MLflow run of one Headway run: everything that talks to MLflow. Used by one thread."""

    def __init__(self, run: RunDir, config: Config, where: Destination, tags: Mapping[str, str]) -> None:
        """Import mlflow, find or create the run, write params and tags, and find where the replay begins."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # here: seconds of import, off the run's path

        self._run, self._config, self._where, self._tags = run, config, where, tags
        make_database(where.uri)
        self._client: MlflowClient = MlflowClient(tracking_uri=where.uri)
        found = self._find() or self._create()
        self.run_id: str = found.info.run_id
        self.experiment_id: str = found.info.experiment_id
        put_if_absent(run.mlflow_run, to_json({"run_id": self.run_id, "experiment_id": self.experiment_id,
                                               "uri": redact(where.uri)}))
        self._client.update_run(self.run_id, status="RUNNING")
        self._describe(found)
        self._sources = {source: self._replayed(source) for source in _sources(run)}
        self._looked = False
        self._tables = self._stored_tables()

    def replay(self, *, whole: bool = False) -> None:
        """Everything that is committed and not in MLflow goes there, oldest first, in as few calls as may be. `whole`:
        also what was committed out of its order, as does the first time."""
        whole = whole or not self._looked
        from mlflow.entities import Metric

        batch: list[Metric] = []
        marks: list[tuple[set[int], int]] = []
        for source, done in self._sources.items():
            for k in _following(source.place, done) if source.place and done and not whole else source.steps():
                if k in done:
                    continue
                metrics, ts_us = source.load(k)
                if len(batch) + len(metrics) > BATCH_METRICS:
                    self._send(batch, marks)
                    batch, marks = [], []
                batch += [Metric(name, value, ts_us // 1000, k) for name, value in metrics.items()]
                marks.append((done, k))
        self._send(batch, marks)
        self._looked = True
        self._put_tables()

    def _put_tables(self) -> None:
        """Answers of the validations as tables of MLflow: `validations/step-<k>.json`. Each is written whole, so that
        once more changes nothing (MLflow's own `log_table` would append)."""
        there = dict(numbered(self._run.validations, r"step-(\d{9})\.table\.json"))
        new = [k for k in there if k not in self._tables and self._run.validation(k).exists()]
        for k in new:
            rows = read_json(there[k])["rows"]
            table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            self._client.log_dict(self.run_id, table, f"{TABLES}/step-{k:09d}.json")
            self._tables.add(k)
        if new:
            shown = [{"path": f"{TABLES}/step-{k:09d}.json", "type": "table"} for k in sorted(self._tables)]
            self._client.set_tag(self.run_id, TAG_TABLES, json.dumps(shown[-SHOWN_TABLES:]))

    def _stored_tables(self) -> set[int]:
        """Steps whose table MLflow has for certain: the last one is written again, it may have been cut."""
        names = [Path(artifact.path).name for artifact in self._client.list_artifacts(self.run_id, TABLES)]
        stored = [int(found.group(1)) for name in names if (found := re.fullmatch(r"step-(\d{9})\.json", name))]
        return set(sorted(stored)[:-1])

    def _send(self, batch: list[Metric], marks: list[tuple[set[int], int]]) -> None:
        if batch:
            self._client.log_batch(self.run_id, metrics=batch)
        for done, k in marks:
            done.add(k)

    def log_artifact(self, path: Path, folder: str) -> None:
        self._client.log_artifact(self.run_id, str(path), folder or None)

    def close(self, status: Status) -> None:
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
        from mlflow.exceptions import MlflowException

        name = self._config.tracking.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                self._client.create_experiment(name, artifact_location=self._where.artifacts)
            except MlflowException as error:  # another run made it in between
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)
        assert experiment is not None
        return self._client.create_run(experiment.experiment_id, tags=dict(self._tags),
                                       run_name=self._tags[TAG_RUN_KEY])

    def _describe(self, found: Run) -> None:
        """Params once, as at the first start; what a later start changed goes into tags, since params are final."""
        from mlflow.entities import Param, RunTag

        settings = resolved(self._config)
        params, stored = flatten(settings), found.data.params
        changed = {key: value for key, value in params.items() if key in stored and stored[key] != value}
        tags = {**self._tags, **amendments(self._run), **({TAG_CHANGED: json.dumps(changed)} if changed else {})}
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


def tracked_status(uri: str, run_id: str) -> str | None:
    """What MLflow says of a run: `RUNNING`, `FINISHED` ...; None where it cannot be asked, or does not know it."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        return str(MlflowClient(tracking_uri=uri).get_run(run_id).info.status)
    except (MlflowException, OSError):
        return None


class Tracker:
    """Tracks one run on a thread of its own. Nothing here blocks, except `flush` and `finish` up to their deadline.

    Consumes: committed records, observations, validations and their tables. Waits for: `wake`, or POLL_S. Unblocked by:
    a new file.

        tracker = Tracker(run, config, destination(config, home), run_uuid="...", run_key="nightly", tags={})
        tracker.start()                     # once the process has done its own heavy imports
        tracker.wake()                      # after each committed step or validation
        tracker.finish("FINISHED", deadline_s=20, artifacts=figures)
    """

    def __init__(self, run: RunDir, config: Config, where: Destination, *, run_uuid: str, run_key: str,
                 tags: Mapping[str, str] | None = None, report: Callable[[str], None] = logger.warning) -> None:
        self.where = where
        self._run, self._config, self._report = run, config, report
        self._tags = {TAG_RUN_UUID: run_uuid, TAG_RUN_KEY: run_key, **(tags or {})}
        self._files: deque[tuple[Path, str]] = deque()
        self._mirror: _Mirror | None = None
        self._trouble: str | None = None
        self._pass_since: float | None = None
        self._cond = threading.Condition()
        self._asked = self._answered = 0
        self._closing: Status | None = None
        self._urgent = False
        self._thread = threading.Thread(target=self._loop, name="tracking", daemon=True)

    # -- what the owner calls
    def start(self) -> None:
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until MLflow was reached for the first time."""
        return None if self._mirror is None else self._mirror.run_id

    @property
    def link(self) -> str | None:
        """Address of the run in the UI: whole for a server, else the part behind the address of `headway ui`."""
        if self._mirror is None:
            return None
        base = redact(self.where.uri).rstrip("/") if self.where.uri.startswith("http") else ""
        return f"{base}/#/experiments/{self._mirror.experiment_id}/runs/{self._mirror.run_id}"

    @property
    def trouble(self) -> str | None:
        """What keeps MLflow from being up to date now; None if nothing does."""
        since = self._pass_since
        waited_s = 0.0 if since is None else time.monotonic() - since
        if self._trouble is None and waited_s > SLOW_S:
            return f"MLflow at {self.where}: no answer for {waited_s:.0f} s"
        return self._trouble

    def wake(self) -> None:
        """Something was committed: look now."""
        self._ask()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Commit the owner's metrics of a step (names("owner")) and wake. About 0.5 ms: no fsync, no MLflow."""
        put_observation(self._run, step, metrics, time.time_ns() // 1000)
        self._ask()

    def add_artifact(self, path: Path, folder: str = "") -> None:
        """Copy a file to the run's artifacts; the same name again is overwritten."""
        with self._cond:
            self._files.append((path, folder))
        self._ask()

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything committed before this call is in MLflow; False (and `trouble`) at the deadline."""
        mine = self._ask(urgent=True)
        with waiting(f"MLflow at {self.where}", "all points to arrive", deadline_s), self._cond:
            return self._cond.wait_for(lambda: self._answered >= mine, timeout=deadline_s)

    def finish(self, status: Status, deadline_s: float, artifacts: Sequence[Path] = ()) -> bool:
        """Flush, copy the figures, set the final status and end the thread. False at the deadline: MLflow then still
        says RUNNING, and the next start of the run replays what is missing."""
        with self._cond:
            self._closing = status
            self._files.extend((path, "figures") for path in artifacts)
        self._ask(urgent=True)
        if self._thread.ident is None:
            return False
        with waiting(f"MLflow at {self.where}", "the last points to arrive", deadline_s):
            self._thread.join(timeout=deadline_s)
        return not self._thread.is_alive() and self._trouble is None

    # -- the thread
    def _ask(self, urgent: bool = False) -> int:
        with self._cond:
            self._asked += 1
            self._urgent = self._urgent or urgent
            self._cond.notify_all()
            return self._asked

    def _loop(self) -> None:
        failures = 0
        while True:
            with self._cond:
                asked, closing, self._urgent = self._asked, self._closing, False
            self._pass_since = time.monotonic()
            try:
                self._pass(closing)
            except Exception as error:  # whatever MLflow does, training goes on; retried with back-off, reported once
                text = f"MLflow at {self.where}: {type(error).__name__}: {redact_in(str(error), self.where.uri)}"
                if self._trouble is None:
                    self._report(f"{text}; training goes on, the records are replayed when it is back")
                self._trouble = text
                wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                failures += 1
            else:
                if self._trouble is not None:
                    self._report(f"MLflow at {self.where} is back and up to date")
                self._trouble, failures, wait_s = None, 0, POLL_S
                with self._cond:
                    self._answered = asked
                    self._cond.notify_all()
                if closing is not None:
                    return
            finally:
                self._pass_since = None
            with self._cond:
                self._cond.wait_for(lambda: self._urgent, timeout=min(wait_s, PASS_EVERY_S))
                self._cond.wait_for(partial(self._due, asked, failures), timeout=wait_s)

    def _due(self, asked: int, failures: int) -> bool:
        """After a failure only flush and finish cut the wait short: steps go on being committed meanwhile."""
        return self._urgent or (failures == 0 and self._asked > asked)

    def _pass(self, closing: Status | None) -> None:
        if self._mirror is None:
            self._mirror = _Mirror(self._run, self._config, self.where, self._tags)
        self._mirror.replay(whole=closing is not None)
        while self._files:
            self._mirror.log_artifact(*self._files[0])
            self._files.popleft()
        if closing is not None:
            self._mirror.close(closing)
