"""Trained models in MLflow's registry: a version is an exported Hugging Face directory, by reference.

No weights are copied. A version names the directory and the digest of its weights, and where they come from: run, step,
settings, commit, landed shards. What its validation measured stands with it, linked to the step. An alias says which
version is the one to beat; the night's flow moves it.

    exported = export_run("night-2026-11-30", "/models/night-2026-11-30", best=True)
    version = register_version(run, where, exported, name="sorter")
    best = champion(where, "sorter")              # None at first
    promote(where, version, why="held-out accuracy +0.04 [0.02, 0.06]")
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.errors import ConfigError
from rl_core.experience.ledger import read_claim
from rl_core.metrics import is_tracked, validation_metrics
from rl_core.records import read_record, recorded_steps
from rl_core.run_dir import RunDir, read_json
from tasks.destination import Destination
from tasks.tracking.client import TrackingFailed, asked

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion as Registered

CHAMPION = "champion"
"""Alias of the version that others are compared with."""
TAG = "headway."
TAG_VERSIONS = "mlflow.modelVersions"
"""Of a logged model: the registered versions that its page links to."""
TAG_EXTERNAL = "mlflow.model.isExternal"
LISTED_STREAMS = 1000
"""The newest ones stand in the tag of the shards."""

Verdict = Literal["promoted", "kept", "alarm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelVersion:
    """One version of a registered model: `ModelVersion(name="sorter", version=3, run_key="night-2026-11-30", ...)`."""

    name: str
    version: int
    run_key: str
    run_uuid: str
    mlflow_run_id: str
    step: int
    """Training steps behind the weights."""
    directory: str
    """The Hugging Face directory, where it was exported to."""
    weights_digest: str
    model_id: str
    """Of MLflow's logged model, which has the metrics."""
    tags: dict[str, str] = field(default_factory=dict[str, str])
    """All of them, `headway.` before each of ours."""

    @property
    def path(self) -> str:
        """Behind the address of MLflow's pages."""
        return f"/#/models/{self.name}/versions/{self.version}"


def serve_command(directory: str) -> str:
    """The one line that serves an exported directory (export.md 2)."""
    return f"python -m sglang.launch_server --model-path {shlex.quote(directory)} --port 30000"


def register_version(run: RunDir, where: Destination, exported: Mapping[str, Any], *, name: str,
                     tags: Mapping[str, str] | None = None) -> ModelVersion:
    """Register what `export_run` wrote as a version of the model `name`; the same export again is the same version.

    The run must be in MLflow: its tracker has finished, or `track_again` has replayed it. `tags` come beside ours;
    `headway.serve` among them is the line that serves it, instead of `serve_command`.

    Raises TrackingFailed where MLflow does not answer, ConfigError for a run that it does not have, or for the name.
    """
    try:
        stored = read_json(run.mlflow_run)
    except FileNotFoundError as error:
        raise ConfigError(f"{run.mlflow_run}: absent, so the run is not in MLflow and cannot be the source of a model "
                          "version; once MLflow answers, the run's own command tracks it again") from error
    if set(name) & set("/:'") or not name.strip():
        raise ConfigError(f"model name {name!r}: MLflow takes names without / : and '; give another")
    facts = _facts(run, exported) | dict(tags or {})

    def registered(client: MlflowClient) -> ModelVersion:
        model_id = _logged_model(client, run, stored, exported, name, facts)
        _make_model(client, name)
        found = _same(client, name, facts) or client.create_model_version(
            name, source=_source(where, exported, model_id), run_id=stored["run_id"], model_id=model_id,
            tags={**facts, TAG + "model_id": model_id}, description=_description(exported, facts))
        _link_version(client, model_id, name, int(found.version))
        return _version(client.get_model_version(name, str(found.version)))

    return asked(where, registered)


def champion(where: Destination, name: str, alias: str = CHAMPION) -> ModelVersion | None:
    """The version of the model `name` that has the alias; None where there is no such model, or none has it.

    Raises TrackingFailed.
    """
    def found(client: MlflowClient) -> ModelVersion | None:
        version = _aliases(client, name).get(alias)
        return None if version is None else _version(client.get_model_version(name, str(version)))

    return asked(where, found)


def versions(where: Destination, name: str) -> tuple[ModelVersion, ...]:
    """All versions of the model `name` that Headway registered, the newest first. Raises TrackingFailed."""
    found = asked(where, lambda client: [_version(one) for one in client.search_model_versions(f"name = '{name}'")
                                         if TAG + "step" in one.tags])
    return tuple(sorted(found, key=lambda one: one.version, reverse=True))


def promote(where: Destination, version: ModelVersion, *, why: str, alias: str = CHAMPION) -> None:
    """Give `version` the alias, which the one before loses, and note why. Again changes nothing. Raises TrackingFailed.
    """
    judge(where, version, "promoted", why=why)
    asked(where, lambda client: client.set_registered_model_alias(version.name, alias, str(version.version)))


def judge(where: Destination, version: ModelVersion, verdict: Verdict, *, why: str) -> None:
    """Note what a night decided on its version, and why: tags `headway.verdict`, `headway.why`. Raises TrackingFailed.
    """
    def noted(client: MlflowClient) -> None:
        for key, value in (("verdict", verdict), ("why", why)):
            client.set_model_version_tag(version.name, str(version.version), TAG + key, value)

    asked(where, noted)


# -- what a version says


def _facts(run: RunDir, exported: Mapping[str, Any]) -> dict[str, str]:
    """Lineage of the weights, as tags."""
    step = int(exported["step"])
    taken = ("run_key", "run_uuid", "step", "weights_digest", "config_digest", "revision", "dtype", "directory",
             "headway")
    facts = {TAG + name: str(exported[name]) for name in taken}
    facts[TAG + "commit"] = read_record(run, step - 1).env.get("commit", "unknown") if step else "unknown"
    facts[TAG + "shards"] = json.dumps(shards_behind(run, step))
    facts[TAG + "serve"] = serve_command(exported["directory"])
    if exported.get("best"):
        facts[TAG + "best"] = json.dumps(exported["best"])
    return facts


def shards_behind(run: RunDir, step: int) -> dict[str, list[int]]:
    """The landed shards that the first `step` steps were trained on: stream -> [first, last, how many].

    `{"rollout-0-a000001": [0, 41, 40]}`. Streams whose shards were pruned count as well: claims stay.
    """
    seen: dict[str, set[int]] = {}
    for k in recorded_steps(run):
        if k >= step or not run.claim(k).exists():
            continue
        for name in read_claim(run, k).shard_digests:
            stream, _, seq = name.rpartition("/")
            seen.setdefault(stream, set()).add(int(seq))
    newest = dict(list(seen.items())[-LISTED_STREAMS:])
    return {stream: [min(seqs), max(seqs), len(seqs)] for stream, seqs in newest.items()}


def _description(exported: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    return (f"Weights of run `{exported['run_key']}` behind {exported['step']} training steps, in "
            f"`{exported['directory']}` (digest `{exported['weights_digest']}`). To serve them:\n\n"
            f"    {facts[TAG + 'serve']}\n")


def _source(where: Destination, exported: Mapping[str, Any], model_id: str) -> str:
    """A tracking server takes no path of a client's machine as the source; a database does."""
    return f"models:/{model_id}" if where.uri.startswith("http") else Path(exported["directory"]).as_uri()


def _version(found: Registered) -> ModelVersion:
    tags = dict(found.tags)
    try:
        return ModelVersion(
            name=found.name, version=int(found.version), run_key=tags[TAG + "run_key"], run_uuid=tags[TAG + "run_uuid"],
            mlflow_run_id=str(found.run_id), step=int(tags[TAG + "step"]), directory=tags[TAG + "directory"],
            weights_digest=tags[TAG + "weights_digest"], model_id=tags[TAG + "model_id"], tags=tags)
    except KeyError as error:
        raise TrackingFailed(f"version {found.version} of model {found.name!r} has no tag {error}: it was not "
                             "registered by Headway; give the alias to one that was") from error


# -- what MLflow has


def _make_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description="Trained by Headway. Versions are Hugging Face directories, "
                                                         "by reference: the weights are where each says.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _aliases(client: MlflowClient, name: str) -> dict[str, Any]:
    from mlflow.exceptions import MlflowException

    try:
        return dict(client.get_registered_model(name).aliases)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {}


def _same(client: MlflowClient, name: str, facts: Mapping[str, str]) -> Registered | None:
    """The version of these weights in this directory, if they were registered before."""
    keys = [TAG + key for key in ("run_uuid", "weights_digest", "dtype", "directory")]
    return next((one for one in client.search_model_versions(f"name = '{name}'")
                 if all(one.tags.get(key) == facts[key] for key in keys)), None)


def _logged_model(client: MlflowClient, run: RunDir, stored: Mapping[str, Any], exported: Mapping[str, Any], name: str,
                  facts: Mapping[str, str]) -> str:
    """Id of the logged model of these weights: made, described and linked to its run and step where it is not yet."""
    from mlflow.entities import LoggedModelOutput

    run_id, step = stored["run_id"], int(exported["step"])
    kept = {key: value for key, value in facts.items() if key != TAG + "shards"}  # longer than such a tag may be
    digest = facts[TAG + "weights_digest"]
    there = client.search_logged_models([stored["experiment_id"]], f"tags.`{TAG}weights_digest` = '{digest}'")
    found = next((one for one in there if one.source_run_id == run_id
                  and one.tags.get(TAG + "directory") == facts[TAG + "directory"]), None)
    model = found or client.create_logged_model(
        stored["experiment_id"], name=name, source_run_id=run_id, tags={**kept, TAG_EXTERNAL: "true"},
        params={"step": str(step), "dtype": str(exported["dtype"])}, model_type="Hugging Face")
    _put_card(client, model, exported, _description(exported, facts))
    _put_metrics(client, run, run_id, model.model_id, step)
    outputs = client.get_run(run_id).outputs
    if all(one.model_id != model.model_id for one in (outputs.model_outputs if outputs else ())):
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    client.finalize_logged_model(model.model_id, "READY")
    return model.model_id


def _put_card(client: MlflowClient, model: Any, exported: Mapping[str, Any], description: str) -> None:
    """What stands where the weights would: MLflow's own description of an external model, and ours of the weights."""
    from mlflow.models.utils import get_external_mlflow_model_spec

    with tempfile.TemporaryDirectory() as aside:
        get_external_mlflow_model_spec(model).save(str(Path(aside) / "MLmodel"))
        (Path(aside) / "headway.json").write_text(json.dumps(dict(exported), indent=1) + "\n")
        (Path(aside) / "README.md").write_text(description)
        client.log_model_artifacts(model.model_id, aside)


def _put_metrics(client: MlflowClient, run: RunDir, run_id: str, model_id: str, step: int) -> None:
    """What the validation of exactly these weights measured, at its step; nothing where there was none. The points are
    those of the run, so that none is doubled."""
    from mlflow.entities import Metric

    if not run.validation(step).exists():
        return
    record = read_json(run.validation(step))
    points = [Metric(name, value, int(record["ts_us"]) // 1000, step, model_id=model_id)
              for name, value in validation_metrics(record).items() if is_tracked(name) and value == value]
    if points:
        client.log_batch(run_id, metrics=points)


def _link_version(client: MlflowClient, model_id: str, name: str, version: int) -> None:
    """A tracking server does this by itself; where we write to the database, the page of the model shall link, too."""
    linked = json.loads(client.get_logged_model(model_id).tags.get(TAG_VERSIONS, "[]"))
    mine = {"name": name, "version": version}
    if not any(one["name"] == name and int(one["version"]) == version for one in linked):
        client.set_logged_model_tags(model_id, {TAG_VERSIONS: json.dumps([*linked, mine])})
