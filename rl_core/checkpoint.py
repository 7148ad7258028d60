"""Checkpoints: all that step n depends on beside its claim, whole or not there.

`checkpoints/n-<n>/` is written aside (files, then a manifest with their digests) and renamed: n training steps are
behind it. It holds parameters, optimizer state, and the bytes of version idx(n), which engines are offered after a
restart (experience-store.md 3.8). No pickle: safetensors and JSON. Nothing is read that a digest does not cover.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash
from torch import Tensor

from rl_core.best import best_by_field, known_fields
from rl_core.config import CheckpointConfig
from rl_core.errors import BrokenFile, CheckpointDamaged, ShardRetired, WeightsDamaged
from rl_core.experience.ledger import read_claim, retired_below
from rl_core.experience.reader import ensure_not_retired
from rl_core.model_setup import model_digests
from rl_core.run_dir import (
    RunDir,
    check_attempt,
    file_numbers,
    fsync_dir,
    json_values,
    numbered,
    put_if_absent,
    read_json,
    to_json,
)
from rl_core.spans import as_rows
from rl_core.types import Span
from rl_core.versions import pinned_versions, read_version
from rl_core.weights import digest_tensors, read_tensors, write_tensors

LOG = logging.getLogger("headway.learner")
MANIFEST = "manifest.json"
PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"
ROLES = "roles.safetensors"
"""What models beside the policy have become (learner/roles.py); absent where there is none."""
VERSION = "version.safetensors"
"""Bytes of version idx(n); absent where they are the parameters themselves."""
BESIDE_THE_STATE = ("format", "files", "spans", "digest")
"""What a manifest says beside the fields of CheckpointState."""
CHUNK = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """Everything beside tensors."""

    n: int
    """Training steps behind it; the next step is n."""
    revision: int
    weights_digest: str
    """Of the parameters."""
    version_step: int
    """Training steps behind the last scheduled publication: n - n % K."""
    version_digest: str
    skipped_in_a_row: int
    """Non-finite updates at the end of step n - 1."""
    roles: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers of the state of models beside the policy, by name; those as at the start are left out."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint in memory, tensors on the host."""

    state: CheckpointState
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """`<what>/<parameter name>`; see Learner."""
    version: dict[str, Tensor]
    """Bytes of the last scheduled publication; the parameters themselves where n is scheduled."""
    roles: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def file_digest(path: Path) -> str:
    """xxh3_128 of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """xxh3_128 of what a manifest says of the state and the files, as JSON with sorted keys."""
    told = {name: value for name, value in manifest.items() if name not in ("format", "spans", "digest")}
    return xxhash.xxh3_128(json.dumps(json_values(told), sort_keys=True).encode()).hexdigest()


def write_checkpoint(run: RunDir, state: CheckpointState, *, parameters: Mapping[str, Tensor],
                     optimizer: Mapping[str, Tensor], version: Mapping[str, Tensor] | None, attempt: int,
                     settings: CheckpointConfig, roles: Mapping[str, Tensor] | None = None, fsync: bool = True,
                     spans: Callable[[], Iterable[Span]] = tuple) -> Path:
    """Write checkpoint n aside, manifest last, and rename it into place; then remove those that `settings` let go.
    `spans`: asked for what its manifest says of the time, when all else is written.

    `version` None: the last scheduled publication is the parameters. A checkpoint n that is whole already stands (one
    history: it holds the same); one that is not is replaced. Raises StaleAttempt if a newer attempt owns the run.
    """
    check_attempt(run, attempt)
    final = run.checkpoint(state.n)
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp")
    aside.mkdir()
    try:
        files = {PARAMETERS: parameters, OPTIMIZER: optimizer} | ({} if version is None else {VERSION: version}) \
            | ({ROLES: roles} if roles else {})
        for name, tensors in files.items():
            write_tensors(aside / name, tensors, fsync=fsync)
        manifest = asdict(state) | {"files": {name: {"xxh3_128": file_digest(aside / name),
                                                     "bytes": (aside / name).stat().st_size} for name in files},
                                        "spans": as_rows(spans())}
        put_if_absent(aside / MANIFEST, to_json(manifest | {"digest": _manifest_digest(manifest)}), fsync=fsync)
        _place(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if fsync:
        fsync_dir(final.parent)
    prune_checkpoints(run, settings, state.version_step)
    return final


def _place(aside: Path, final: Path) -> None:
    try:
        os.rename(aside, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if is_whole(final):
            return
        broken = final.with_name(f".{final.name}.broken-{secrets.token_hex(6)}.tmp")
        os.rename(final, broken)
        os.rename(aside, final)
        shutil.rmtree(broken, ignore_errors=True)


def _ensure_whole(directory: Path) -> dict[str, Any]:
    """The manifest, once it and every file it names match. Raises CheckpointDamaged naming the file."""
    try:
        manifest = read_json(directory / MANIFEST)
        if manifest.get("digest", found := _manifest_digest(manifest)) != found:  # manifests of before it have none
            raise CheckpointDamaged(f"{directory / MANIFEST}: does not match its own digest")
        for name, expected in manifest["files"].items():
            path = directory / name
            if path.stat().st_size != expected["bytes"] or file_digest(path) != expected["xxh3_128"]:
                raise CheckpointDamaged(f"{path}: does not match the checkpoint's manifest")
    except (OSError, BrokenFile, KeyError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"{directory}: {error}") from error
    return manifest


def is_whole(directory: Path) -> bool:
    """Whether every file matches the manifest, and the manifest has the fields of a state."""
    try:
        _state_of(_ensure_whole(directory))
    except (CheckpointDamaged, TypeError):
        return False
    return True


def read_checkpoint(run: RunDir, n: int) -> Checkpoint:
    """Raises CheckpointDamaged."""
    directory = run.checkpoint(n)
    manifest = _ensure_whole(directory)
    files = manifest["files"]
    try:
        parameters, optimizer = read_tensors(directory / PARAMETERS), read_tensors(directory / OPTIMIZER)
        version = read_tensors(directory / VERSION) if VERSION in files else parameters
        roles = read_tensors(directory / ROLES) if ROLES in files else {}
        return Checkpoint(_state_of(manifest), parameters, optimizer, version, roles)
    except (WeightsDamaged, TypeError) as error:
        raise CheckpointDamaged(f"{directory}: {error}") from error


def read_checkpoint_state(run: RunDir, n: int) -> CheckpointState:
    """What checkpoint n holds beside tensors, once all its files match the manifest. Raises CheckpointDamaged."""
    manifest = _ensure_whole(run.checkpoint(n))
    try:
        return _state_of(manifest)
    except TypeError as error:
        raise CheckpointDamaged(f"{run.checkpoint(n)}: {error}") from error


def _state_of(manifest: Mapping[str, Any]) -> CheckpointState:
    """Raises TypeError for one without a field, or with one more. Manifests of before roles have none."""
    return CheckpointState(**{name: value for name, value in manifest.items() if name not in BESIDE_THE_STATE})


def read_parameters(run: RunDir, n: int) -> tuple[CheckpointState, dict[str, Tensor]]:
    """State and parameters of checkpoint n, without its optimizer, checked by the digest of the weights.

    Raises CheckpointDamaged, also for one that is pruned meanwhile; what this returns stays readable then.
    """
    directory = run.checkpoint(n)
    try:
        manifest = read_json(directory / MANIFEST)
        state = _state_of(manifest)
        parameters = read_tensors(directory / PARAMETERS)
    except (OSError, BrokenFile, TypeError) as error:
        raise CheckpointDamaged(f"{directory}: {error}") from error
    if digest_tensors(parameters.items()) != state.weights_digest:
        raise CheckpointDamaged(f"{directory / PARAMETERS}: does not match the checkpoint's manifest")
    return state, parameters


def checkpoints(run: RunDir) -> list[int]:
    """The n of every checkpoint directory, ascending, whole or not."""
    return file_numbers(run.checkpoints, r"n-(\d{9})")


def newest_whole(run: RunDir, replay: Literal["all", "window"] = "all") -> Checkpoint | None:
    """The newest checkpoint that is whole; None where the run is to begin with the initial model.

    That is a run without a checkpoint (one that was killed in its first has none), and under `replay`, the run's
    `retention.replay`, `all`, where the initial model counts as checkpoint 0, also one of which none is whole. What is
    passed over is a warning in the log. Raises CheckpointDamaged if there are some, none is whole, and the initial
    model does not count; ShardRetired if only one is whole whose next steps cannot be trained again, since retention
    has removed their shards on account of the damaged ones.
    """
    damage: list[str] = []
    for n in reversed(checkpoints(run)):
        try:
            found = read_checkpoint(run, n)
        except CheckpointDamaged as error:
            damage.append(str(error))
            continue
        if (lost := _lost_step(run, n)) is not None:
            raise ShardRetired(f"{run.checkpoint(n)}: the steps behind it cannot be trained again ({lost}), and the "
                               f"checkpoints after it are damaged ({'; '.join(damage) or 'or gone'})") from lost
        _warn_of(damage, f"checkpoint {n}")
        return found
    if damage:
        _ensure_initial_counts(run, damage, replay)
        _warn_of(damage, "the initial model, training every recorded step again")
    return None


def _lost_step(run: RunDir, n: int) -> ShardRetired | None:
    """What says that a recorded step behind checkpoint n has lost its shards to retention; None if none has."""
    for step in range(n, retired_below(run)):
        if run.void(step).exists() or not run.claim(step).exists():
            continue
        try:
            ensure_not_retired(run, read_claim(run, step))
        except ShardRetired as error:
            return error
    return None


def _warn_of(damage: list[str], instead: str) -> None:
    for text in damage:
        LOG.warning("damaged checkpoint passed over (%s); the run goes on from %s", text, instead)


def _ensure_initial_counts(run: RunDir, damage: list[str], replay: Literal["all", "window"]) -> None:
    """Raises CheckpointDamaged, with every checkpoint's damage and what to do, where the initial model does not count
    as checkpoint 0."""
    key = run.root.name
    if (lost := _lost_step(run, 0)) is not None:
        why = f"its steps cannot be trained again from the initial weights ({lost})"
        instead = f"begin a new run with the initial weights: `headway rerun {key} --from-step 0`"
    elif changed := initial_model_damage(run):
        why, instead = changed, "put that model back"
    elif replay == "window":
        why = "retention.replay is window"
        instead = "have every recorded step trained again from the initial weights (their shards are all there): " \
                  f"`headway train --run-key {key} --set retention.replay=all`"
    else:
        return
    raise CheckpointDamaged(f"{run.checkpoints}: no checkpoint is whole ({'; '.join(damage)}), and the run does not "
                            f"go back to step 0 by itself: {why}. Restore one of them from a copy, or {instead}")


def initial_model_damage(run: RunDir) -> str:
    """What keeps the initial model from being checkpoint 0; empty where nothing does."""
    try:
        stored: dict[str, str] = read_json(run.inputs)["digests"]
    except FileNotFoundError:
        return ""  # a run that no set-up has made: whatever loads is all that there is
    changed = [name for name, digest in model_digests(run.model).items() if stored.get(name, digest) != digest]
    return f"{run.model} is not what the run began with ({', '.join(changed)} differ)" if changed else ""


def at_or_before(made: list[int], step: int) -> int | None:
    """The last of the ascending `made` that is at most `step`: `at_or_before([20, 40], 39)` -> 20."""
    return max((n for n in made if n <= step), default=None)


def best_checkpoint(run: RunDir, field: str) -> int | None:
    """The checkpoint at or before the step of the validation with the largest `field`, the first among equals.

    From the run directory alone. None where no validation has the field, or no checkpoint is that early: the best may
    be the initial model.
    """
    best = best_by_field(run, field)
    return None if best is None else at_or_before(checkpoints(run), best.step)


def kept_checkpoints(run: RunDir, settings: CheckpointConfig, version_step: int) -> set[int]:
    """The checkpoints that stay: the newest `keep`, every `keep_every`-th, the best, and what may become the best.

    That is what lies at or before a version whose validation has not ended (it is pinned until its record is there) or
    has not begun: `version_step`, the last scheduled publication. Raises nothing for a field that no validation has.
    """
    made = checkpoints(run)
    stay = set(made[-settings.keep:])
    if settings.keep_every is not None:
        stay |= {n for n in made if n % settings.keep_every == 0}
    if settings.best is not None:
        judged_later = [read_version(run, v).step for v in pinned_versions(run)]  # before the records are read
        wanted = [at_or_before(made, step) for step in (*judged_later, version_step)]
        stay |= {n for n in (*wanted, best_checkpoint(run, settings.best)) if n is not None}
    return stay


def prune_checkpoints(run: RunDir, settings: CheckpointConfig, version_step: int) -> list[int]:
    """Remove all but `kept_checkpoints`. Returns what went; a best that nothing tells is a warning in the log."""
    if settings.best is not None and any(numbered(run.validations, r"step-(\d{9})\.json")) \
            and best_by_field(run, settings.best) is None:
        LOG.warning("checkpoint.best: no validation has a number %r, so no best checkpoint is kept; there are %s",
                    settings.best, ", ".join(known_fields(run)) or "none")
    gone = sorted(set(checkpoints(run)) - kept_checkpoints(run, settings, version_step))
    for n in gone:
        aside = run.checkpoint(n).with_name(f".n-{n:09d}.{secrets.token_hex(6)}.tmp")
        os.rename(run.checkpoint(n), aside)
        shutil.rmtree(aside, ignore_errors=True)
    return gone


def sweep_aside(directory: Path) -> None:
    """Remove what dead attempts left half-written beside checkpoints or weights. For the owner, at a start."""
    for path in directory.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
