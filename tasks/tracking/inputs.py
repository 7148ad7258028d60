"""What a run was made with, as MLflow shows it: its data sets, by digest and source, and the tags that it is found by.

No row of the data is copied.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.config import Config, DataSource, LocalModel
from rl_core.run_dir import RunDir, read_json

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

TAG_CONTEXT = "mlflow.data.context"
NAME_CHARACTERS, DIGEST_CHARACTERS = 500, 36
"""Longest name and digest that MLflow takes."""

Context = Literal["training", "validation"]
Kind = Literal["local", "hugging_face", "code"]
"""MLflow's type of a source; `code`: rows that Headway makes itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """`DataSet(name="gsm8k.parquet", digest="4f...", kind="local", source={"uri": "/data/gsm8k.parquet"}, rows=7473,
    context="training")`."""

    name: str
    digest: str
    kind: Kind
    source: dict[str, Any]
    rows: int
    context: Context


def tags_of(config: Config) -> dict[str, str]:
    """What runs are filtered by: `{"headway.model": "tiny", "headway.data": "sort", "headway.algorithm": "grpo,
    ppo_clip", "headway.engine": "torch", "headway.reward": "exact"}`."""
    model = config.model.path if isinstance(config.model, LocalModel) else config.model.type
    algorithm = f"{config.learner.advantage.name}, {config.learner.loss.name}"
    found = {"model": Path(model).name if model.startswith("/") else model, "data": _names(config.data.train),
             "algorithm": algorithm, "engine": config.rollout.engine.type, "reward": config.reward}
    return {f"headway.{name}": value for name, value in found.items()}


def data_sets(run: RunDir, config: Config) -> list[DataSet]:
    """The prompts that the run trains on and those held out. The latter are read again for their digest.

    Empty before the run has its inputs. Raises DataError, ConfigError or OSError where held-out rows cannot be read.
    """
    try:
        inputs = read_json(run.inputs)
    except FileNotFoundError:
        return []
    found = [_data_set(config.data.train, str(inputs["digests"]["data"]), int(inputs.get("rows") or 0), "training")]
    if config.data.validation is not None:
        from rl_core.rollout.dataset import validation_data

        held_out = validation_data(config)
        found.append(_data_set(config.data.validation, held_out.digest, len(held_out), "validation"))
    return found


def as_inputs(sets: Sequence[DataSet]) -> list[DatasetInput]:
    """As MLflow takes them. The same again, by name and digest, is no second input of a run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [DatasetInput(
        Dataset(name=one.name, digest=one.digest, source_type=one.kind, source=json.dumps(one.source),
                profile=json.dumps({"num_rows": one.rows})),
        [InputTag(TAG_CONTEXT, one.context)]) for one in sets]


def _data_set(sources: Sequence[DataSource], digest: str, rows: int, context: Context) -> DataSet:
    paths = [one.path for one in sources]
    kinds = {_kind(path) for path in paths}
    kind: Kind = _kind(paths[0]) if len(kinds) == 1 else "code"
    source = _source(paths[0]) if len(paths) == 1 else {
        "sources": [{**_source(one.path), "weight": one.weight} for one in sources]}
    return DataSet(name=_names(sources), digest=digest[:DIGEST_CHARACTERS], kind=kind, source=source, rows=rows,
                   context=context)


def _names(sources: Sequence[DataSource]) -> str:
    """`gsm8k.parquet, sort`."""
    names = [one.path if _kind(one.path) != "local" else Path(one.path).name for one in sources]
    return ", ".join(names)[:NAME_CHARACTERS]


def _kind(path: str) -> Kind:
    if path.startswith("hf:"):
        return "hugging_face"
    return "local" if Path(path).suffix else "code"


def _source(path: str) -> dict[str, Any]:
    match _kind(path):
        case "hugging_face":
            name, _, split = path.removeprefix("hf:").partition(":")
            return {"path": name, "split": split or None}
        case "local":
            return {"uri": str(Path(path).expanduser().absolute())}
        case "code":
            return {"task": path}
