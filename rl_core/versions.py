"""Manifests of weight versions: `versions/v-<v:08d>.json`, put-if-absent. The manifest makes a version real."""

from __future__ import annotations

import re
from pathlib import Path

from rl_core.run_dir import RunDir, file_numbers, put_if_absent, read_json, to_json
from rl_core.types import WeightVersion


def read_version(run: RunDir, v: int) -> WeightVersion:
    """Raises FileNotFoundError where version v was never made real."""
    payload = read_json(run.version(v))
    return WeightVersion(v=payload["v"], step=payload["step"], idx=payload["idx"], attempt=payload["attempt"],
                         digest=payload["digest"])


def read_versions(run: RunDir) -> dict[int, WeightVersion]:
    """All versions of the run by v, in order."""
    return learn_versions(run, {})


def learn_versions(run: RunDir, known: dict[int, WeightVersion]) -> dict[int, WeightVersion]:
    """Add the run's versions that are not in `known` yet, and return it.

    Manifests never change: each is read once, and once some are known only the numbers above them are looked for. One
    that has no manifest is passed over while there are newer bytes: those that a dead attempt left (weights.publish).
    """
    if not known:
        known.update({v: read_version(run, v) for v in file_numbers(run.versions, r"v-(\d{8})\.json")})
        return known
    v, newest = max(known) + 1, max(file_numbers(run.weights_root, r"v-(\d{8})"), default=-1)
    while v <= newest or run.version(v).exists():
        if run.version(v).exists():
            known[v] = read_version(run, v)
        v += 1
    return known


def newest_version(run: RunDir) -> WeightVersion | None:
    """The version with the largest v; None before the initial weights are published."""
    last = max(file_numbers(run.versions, r"v-(\d{8})\.json"), default=None)
    return None if last is None else read_version(run, last)


def put_version(run: RunDir, version: WeightVersion) -> bool:
    """Make a version real. False if that name exists already (then the stored one stands)."""
    return put_if_absent(run.version(version.v), to_json(version.as_json()))


def validating_pin(step: int) -> str:
    """By which name a validator pins the version that it measures, with `step` training steps behind it."""
    return f"validation-{step:09d}"


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
    return set(file_numbers(run.pins, r"[A-Za-z0-9-]+\.v-(\d{8})\.json"))


def _pin(run: RunDir, name: str, v: int) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9-]+", name):
        raise ValueError(f"pin name {name!r}: letters, digits and '-' only")
    return run.pins / f"{name}.v-{v:08d}.json"
