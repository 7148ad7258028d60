"""Trained weights as a Hugging Face directory (export.md): safetensors under the model's own names, its config,
tokenizer and chat template, and `headway.json`, which says what they are.

Reads the run directory and writes nothing in it, so a run can be exported while it is alive: what is pruned meanwhile
is looked for again. The directory is written aside and renamed; nothing half-done has its name.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import torch
import xxhash
from torch import Tensor

from rl_core.checkpoint import at_or_before
from rl_core.config import Config
from rl_core.errors import BrokenFile, ConfigError
from rl_core.kept_weights import Kind, load_stock, read_kept
from rl_core.model_setup import SETTINGS_FILES, TEMPLATE_FILES, TOKENIZER_FILES
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import config_of
from rl_core.run_dir import RunDir, fsync_dir, put_if_absent, to_json
from rl_core.run_identity import read_identity
from rl_core.versions import read_versions

CONFIG, GENERATION_CONFIG = SETTINGS_FILES
ABOUT = "headway.json"
SHARD_SIZE = "5GB"
"""Larger weights are written as several files with an index."""

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export is: `headway.json` has all of it but the directory."""

    run_key: str
    run_uuid: str
    step: int
    """Training steps behind the weights."""
    version: int | None
    """The run's version with these weights; None where none was published of them."""
    source: Kind
    weights_digest: str
    """Of the run's float32 weights (weights.py, digest_tensors), whatever the dtype of the files."""
    revision: int
    config_digest: str
    """xxh3_128 of the settings of that revision, as JSON with sorted keys."""
    dtype: Dtype
    best: dict[str, Any] | None
    """For the best checkpoint: field, value, and the step that was validated."""
    headway: str
    directory: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def export(run: RunDir, out: Path, *, step: int | None = None, best: str | None = None, dtype: Dtype = "float32",
           shard_size: str = SHARD_SIZE) -> Exported:
    """Write weights of the run to the directory `out`, which must not exist or be empty.

    `step`: those behind this many training steps; `best`: those of the best validation by this field of its record
    (the checkpoint at or before it where its own are gone); neither: the newest. Weights of which a file is damaged are
    taken from elsewhere if the run has them twice.

    Example: `export(RunDir(Path("runs/k")), Path("k-hf"), best="greedy_accuracy").step` -> 160.

    Raises ConfigError (an `out` that holds something, a step that is not there, naming those that are), BrokenFile,
    OSError.
    """
    identity = read_identity(run)
    out = _free(run, out)
    kept = read_kept(run, step=step, best=best)
    source, judged = kept.source, kept.judged
    revision = _revision(run, source.step)
    about = Exported(
        run_key=identity.run_key, run_uuid=identity.run_uuid, step=source.step, source=source.kind,
        version=max((known.v for known in read_versions(run).values()
                     if (known.step, known.digest) == (source.step, kept.known_as)), default=None),
        weights_digest=kept.digest, revision=revision, config_digest=config_digest(config_of(run, revision)),
        dtype=dtype,
        best=None if judged is None else {"field": best, "value": judged.value, "step": judged.step},
        headway=version("headway"), directory=str(out))
    with _aside(out) as aside:
        _write_model(run, aside, kept.tensors, DTYPES[dtype], shard_size)
        told = {name: value for name, value in about.as_json().items() if name != "directory"}
        put_if_absent(aside / ABOUT, to_json(told))
        _place(aside, out)
    return about


def config_digest(config: Config) -> str:
    """32 hex digits that settings are known by."""
    return xxhash.xxh3_128_hexdigest(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode())


def _revision(run: RunDir, step: int) -> int:
    """The config revision by which the last of `step` training steps was made; 0 where no record tells."""
    behind = at_or_before(recorded_steps(run), step - 1)
    return 0 if behind is None else read_record(run, behind).revision


# -- the directory


def _free(run: RunDir, out: Path) -> Path:
    """`out` without links. Raises ConfigError where something is there, or where it lies in the run directory."""
    out = out.expanduser().resolve()
    if out.is_relative_to(run.root.resolve()):
        raise ConfigError(f"--out {str(out)!r}: lies in the run directory, where only the run writes; give another")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r}: is a file; give a directory that does not exist or is empty")
    if out.is_dir() and any(out.iterdir()):
        raise _occupied(out)
    return out


def _occupied(out: Path) -> ConfigError:
    return ConfigError(f"--out {str(out)!r}: is not empty, and an export overwrites nothing; remove it, or give a "
                       "directory that does not exist or is empty")


@contextmanager
def _aside(out: Path) -> Generator[Path, None, None]:
    """A directory beside `out` that is gone afterwards, locked while it is written; those of killed exports go, too."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.export"):
        _sweep(left)
    aside = out.with_name(f".{out.name}.{secrets.token_hex(6)}.export")
    aside.mkdir()
    lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield aside
    finally:
        os.close(lock)
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(left: Path) -> None:
    try:
        lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True)
    except BlockingIOError:
        pass  # an export that is alive
    finally:
        os.close(lock)


def _place(aside: Path, out: Path) -> None:
    for path in sorted(aside.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            fsync_dir(path)
    fsync_dir(aside)
    try:
        os.rename(aside, out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _occupied(out) from error
        raise
    fsync_dir(out.parent)


def _write_model(run: RunDir, directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype, shard_size: str) -> None:
    """Weights by transformers' own `save_pretrained`, which knows tied and converted names; all else is the run's."""
    import transformers

    model = load_stock(run.model)
    mine = dict(cast("dict[str, Tensor]", model.named_parameters()))
    if mine.keys() != tensors.keys():
        raise BrokenFile(f"{run.model}: is another model than the weights; parameters "
                         f"{sorted(mine.keys() ^ tensors.keys())[:5]} are in only one of the two")
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])
    tensors.clear()
    if (run.model / GENERATION_CONFIG).is_file():
        model.generation_config = transformers.GenerationConfig()  # the run's own is copied, valid or not
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    _write_config(run.model, directory, dtype)
    for path in directory.glob("*.safetensors"):
        path.chmod((directory / CONFIG).stat().st_mode)  # safetensors writes for its user alone
    for pattern in (GENERATION_CONFIG, *TOKENIZER_FILES, *TEMPLATE_FILES):
        for path in run.model.glob(pattern):
            copy = directory / path.relative_to(run.model)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _write_config(source: Path, directory: Path, dtype: torch.dtype) -> None:
    """The run's own config.json with the dtype of the files, by both names that readers know it by."""
    written: dict[str, Any] = json.loads((directory / CONFIG).read_text())
    settings: dict[str, Any] = json.loads((source / CONFIG).read_text())
    settings.setdefault("architectures", written.get("architectures"))
    name = str(dtype).removeprefix("torch.")
    for part in (settings, settings.get("text_config")):
        if isinstance(part, dict):
            cast(dict[str, Any], part).update({"dtype": name, "torch_dtype": name})
    (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
