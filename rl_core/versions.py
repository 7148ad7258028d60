"""Manifests of weight versions: `versions/v-<v:08d>.json`, put-if-absent. The manifest makes a version real."""

from __future__ import annotations

import re
from pathlib import Path

from rl_core.run_dir import RunDir, numbered, put_if_absent, read_json, to_json
from rl_core.types import WeightVersion


def read_version(run: RunDir, v: int) -> WeightVersion:
    """Raises FileNotFoundError where version v was never made real."""
    payload = read_json(run.version(v))
    return WeightVersion(v=payload["v"], step=payload["step"], idx=payload["idx"], attempt=payload["attempt"],
                         digest=payload["digest"])


def read_versions(run: RunDir) -> dict[int, WeightVersion]:
    """All versions of the run by v, in order."""
    return {v: read_version(run, v) for v, _ in numbered(run.versions, r"v-(\d{8})\.json")}


def newest_version(run: RunDir) -> WeightVersion | None:
    """The version with the largest v; None before the initial weights are published."""
    last = None
    for v, _ in numbered(run.versions, r"v-(\d{8})\.json"):
        last = v
    return None if last is None else read_version(run, last)


def put_version(run: RunDir, version: WeightVersion) -> bool:
    """Make a version real. False if that name exists already (then the stored one stands)."""
    return put_if_absent(run.version(version.v), to_json(version.as_json()))


def pin(run: RunDir, name: str, v: int) -> None:
    """Keep the bytes of version v until `unpin` by the same name. `pin(run, "validation-step-40", 12)`; idempotent.

    Raises ValueError for a name that is no file name.
    """
    put_if_absent(_pin(run, name, v), to_json({"name": name, "v": v}))


def unpin(run: RunDir, name: str, v: int) -> None:
    """Let version v go, as far as this name is concerned. Idempotent."""
    _pin(run, name, v).unlink(missing_ok=True)


def pinned_versions(run: RunDir) -> set[int]:
    """Versions that some pin keeps."""
    return {v for v, _ in numbered(run.pins, r"[A-Za-z0-9-]+\.v-(\d{8})\.json")}


def _pin(run: RunDir, name: str, v: int) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9-]+", name):
        raise ValueError(f"pin name {name!r}: letters, digits and '-' only")
    return run.pins / f"{name}.v-{v:08d}.json"
