"""What `headway validate` does: measure weights of a run, or a model directory, in this process.

No Prefect, no Ray, no MLflow. Of a run only its directory is read, also while the run is alive; nothing is written
there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.config import Config, LocalModel
from rl_core.errors import ConfigError
from rl_core.kept_weights import Kept, read_kept
from rl_core.measuring import Measuring, Progress, open_measuring
from rl_core.model_setup import check_model, model_directory
from rl_core.plan import flatten, merge, resolve
from rl_core.preflight import check_devices
from rl_core.revisions import config_of, current_revision
from rl_core.rollout.rewards.scoring import check_reward
from rl_core.run_dir import RunDir, json_values, put_if_absent, to_json
from rl_core.types import Prompt, WeightVersion
from rl_core.validation_plan import check_validation, of_sampled
from rl_core.weights import write_weights
from tasks.inspection import open_run
from tasks.paths import headway_home, run_dir

OF_A_VALIDATION = ("data.", "deadlines.", "reward", "rollout.engine.", "sampling.", "scoring.", "seed", "validation.")
"""Settings that a measurement reads. Others are refused: they would do nothing."""
NOT_OF_ONE = ("validation.every", "validation.only", "data.train", "data.epochs", "data.shuffle", "data.max_samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is measured: the model's directory, the settings, and of a run the step."""

    model: Path
    config: Config
    run: RunDir | None = None
    run_key: str | None = None
    step: int | None = None
    """None: the newest weights of the run, or no run."""


def of_run(run_key: str, step: int | None, changes: Mapping[str, Any]) -> Subject:
    """Weights of a run under its own settings, with `changes` on top. Raises ConfigError, BrokenFile."""
    run = run_dir(run_key)
    open_run(run, run_key)
    if not run.model.is_dir():
        raise ConfigError(f"run {run_key}: has no weights yet; wait until the run has set up its model")
    stored = config_of(run, current_revision(run))
    config = _resolved(stored.model_dump(mode="json"), changes)
    _check_changes(stored, config)
    return Subject(model=run.model, config=config, run=run, run_key=run_key, step=step)


def of_model(path: str, preset: Mapping[str, Any], changes: Mapping[str, Any]) -> Subject:
    """A Hugging Face directory, or `hf:owner/name`, under the settings of a preset with `changes` on top."""
    if "model" in changes:
        raise ConfigError("--set model...: --model says which model is measured")
    plain = resolve(preset, {})
    config = _resolved(preset, changes)
    _check_changes(plain, config)
    model = LocalModel(path=path)
    config = config.model_copy(update={"model": model})
    return Subject(model=model_directory(config, model, headway_home() / "models"), config=config)


def _resolved(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    """`resolve`; a change that asks something of sampled answers has them sampled, unless it says validation.sampled.

    A run measures greedy answers alone where sampled ones would keep it waiting; here they are what was asked for.
    """
    config = resolve(base, changes)
    named = changes.get("validation")
    if isinstance(named, Mapping) and "sampled" not in named and of_sampled(config.validation, named):
        return resolve(merge(base, {"validation": {"sampled": True}}), changes)
    return config


def _check_changes(before: Config, after: Config) -> None:
    one, two = flatten(before), flatten(after)
    for name in (name for name in two if one.get(name) != two[name]):
        if not name.startswith(OF_A_VALIDATION) or name in NOT_OF_ONE:
            raise ConfigError(f"{name}: has no part in measuring; leave it out (got {two[name]!r})")


class HeldOutRows:
    """The held-out prompts as rows that a reward is tried on (Rows of scoring.py)."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def first(self) -> tuple[Prompt, str]:
        return self._prompts[0], "the first held-out row"

    def without(self, column: str) -> str | None:
        return next((f"held-out row {i}" for i, prompt in enumerate(self._prompts, 1) if column not in prompt.columns),
                    None)


def open_subject(subject: Subject) -> Measuring:
    """Engine, prompts and scorer, each checked. Raises ConfigError, DataError."""
    config = subject.config
    check_validation(config)
    check_devices({"rollout.engine.device": config.validation_engine.device})
    if subject.run is None:
        check_model(subject.model)
    measuring = open_measuring(subject.model, config)
    try:
        check_reward(config, rows=HeldOutRows(measuring.prompts))
    except ValueError:
        measuring.close()
        raise
    return measuring


def measure(subject: Subject, measuring: Measuring,
            on_progress: Progress) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report, which has the fields of a validation's record (docs/validation.md 1), and the table of answers.

    Raises ConfigError for a step that is not there, listing those that are; BrokenFile, DeadPart, RewardError.
    """
    start = time.monotonic()
    about: dict[str, Any] = {"run_key": subject.run_key, "model": str(subject.model), "step": None, "source": "model",
                             "digest": None}
    if subject.run is not None:
        kept = read_kept(subject.run, step=subject.step)
        _serve(measuring, kept)
        about |= {"step": kept.source.step, "source": kept.source.kind, "digest": kept.digest}
    measured = measuring.measure(on_progress)
    report = about | measured.fields | {"mean_length": measured.fields["greedy_length"],
                                        "seconds": round(time.monotonic() - start, 3)}
    return json_values(report), json_values(measured.table)


def _serve(measuring: Measuring, kept: Kept) -> None:
    """Let the engine serve these weights; it takes them from a directory."""
    version = WeightVersion(v=0, step=kept.source.step, idx=0, attempt=0, digest=kept.digest)
    with tempfile.TemporaryDirectory(prefix="headway-") as name:
        write_weights(Path(name) / "weights", kept.tensors)
        measuring.engine.swap(version, Path(name) / "weights")


def write_report(path: Path, report: dict[str, Any], table: list[dict[str, Any]]) -> None:
    """The report with its table as one JSON file. Raises ConfigError where something is there already."""
    if not put_if_absent(path, to_json({**report, "table": table})):
        raise ConfigError(f"--out {str(path)!r}: is there already, and nothing is overwritten; name another file")
