"""Weight versions: the bytes behind `versions/v-<v>.json`, written once, named by a digest of their values.

`publish` is the only way a version comes into being: bytes aside, rename of the directory, then the manifest, which
makes it real (experience-store.md 3.1, 3.8). A directory that exists is never overwritten: other bytes take another v,
since v is only a name. `load_weights` trusts nothing that does not match the manifest's digest.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_core.config import Config
from rl_core.errors import WeightsDamaged
from rl_core.lora.canary import PROBE_FILE, Probe, read_probe
from rl_core.run_dir import RunDir, check_attempt, numbered, put_if_absent, to_json
from rl_core.types import WeightVersion
from rl_core.versions import learn_versions, pinned_versions, put_version, read_versions

WEIGHTS_FILE = "model.safetensors"
SHARED_MEMORY = Path("/dev/shm")


def distinct(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors by name, tied ones once, under the first name given (`model.embed_tokens.weight`, as in HF files)."""
    seen: set[tuple[object, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in named:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor
    return kept


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The values' bytes in row-major order, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """32 hex digits: xxh3_128 over name, dtype, shape and bytes of every tensor in order of name.

    Tied tensors count once, under the first name given; so a model's `state_dict().items()`, its `named_parameters()`
    and the file written from them have one digest. Independent of device, strides and file layout.
    """
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(distinct(named).items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        hasher.update(f"{name}\0{dtype}\0{'x'.join(map(str, tensor.shape))}\0".encode())
        hasher.update(tensor_bytes(tensor).data)
    return hasher.hexdigest()


def write_weights(directory: Path, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> bool:
    """Write the tensors as `<directory>/model.safetensors`, aside, then rename. True if this call made the directory.
    `probe`: of the adapter in them, written beside.

    False leaves what is there untouched: a directory of weights never changes once it has its name. Not fsynced: every
    reader checks the digest, and bytes that a power loss tore are made again by the replay that follows it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = directory.with_name(f".{directory.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp")
    aside.mkdir()
    try:
        write_tensors(aside / WEIGHTS_FILE, tensors, fsync=False)
        if probe is not None:
            put_if_absent(aside / PROBE_FILE, to_json(probe.as_json()), fsync=False)
        try:
            os.rename(aside, directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, fsync: bool = True) -> None:
    """One safetensors file, tensors in order of name. Not atomic: write aside."""
    save_file({name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}, path)
    if fsync:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises WeightsDamaged for a file that is absent or no whole safetensors file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsDamaged(f"{path}: {error}") from error


def load_weights(directory: Path, version: WeightVersion) -> dict[str, Tensor]:
    """The tensors of a version by name, on the host. Raises WeightsDamaged if their digest is not the manifest's."""
    tensors = read_tensors(directory / WEIGHTS_FILE)
    digest = digest_tensors(tensors.items())
    if digest != version.digest:
        raise WeightsDamaged(f"{directory}: digest {digest}, but version {version.v} has {version.digest}")
    return tensors


def publish(run: RunDir, tensors: Mapping[str, Tensor], step: int, idx: int, attempt: int, config: Config,
            known: dict[int, WeightVersion] | None = None, probe: Probe | None = None,
            digest: str | None = None) -> WeightVersion:
    """Make weights behind `step` training steps a version of the run, or adopt the one that is it already.

    A version of the same step and digest is adopted; its bytes are written again if they are gone (shared memory after
    a reboot). Other bytes for a step that has a version take a new v (`diverged` finds them). Old bytes are pruned
    afterwards. `known` are versions that the caller has read before (versions.learn_versions). `probe`: of an adapter
    in them. `digest`: of the tensors, where the caller has it. Raises StaleAttempt if a newer attempt owns the run.
    """
    check_attempt(run, attempt)
    make_weights_root(run, config)
    digest = digest_tensors(tensors.items()) if digest is None else digest
    versions = learn_versions(run, {} if known is None else known)
    for version in versions.values():
        if (version.step, version.digest) == (step, digest):
            _ensure_bytes(run, version, tensors, probe)
            return version
    v = max(versions, default=-1) + 1
    while True:
        if write_weights(run.weights(v), tensors, probe) or _holds(run.weights(v), digest, probe):
            version = WeightVersion(v=v, step=step, idx=idx, attempt=attempt, digest=digest)
            check_attempt(run, attempt)
            if put_version(run, version):
                break
        v += 1  # this v belongs to other bytes, real or left behind by a dead attempt
    prune_weights(run, config.weights.keep)
    return version


def _ensure_bytes(run: RunDir, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None) -> None:
    directory = run.weights(version.v)
    if write_weights(directory, tensors, probe) or _holds(directory, version.digest, probe):
        return
    rotten = directory.with_name(f".{directory.name}.rotten-{secrets.token_hex(6)}.tmp")
    os.rename(directory, rotten)
    shutil.rmtree(rotten, ignore_errors=True)
    write_weights(directory, tensors, probe)


def _holds(directory: Path, digest: str, probe: Probe | None) -> bool:
    try:
        return digest_tensors(read_tensors(directory / WEIGHTS_FILE).items()) == digest \
            and (probe is None or read_probe(directory) is not None)
    except WeightsDamaged:
        return False


def diverged(run: RunDir, version: WeightVersion) -> list[WeightVersion]:
    """Other versions of the same step: a replay on this machine did not give the same bytes. Empty when all is well."""
    return [other for other in read_versions(run).values()
            if other.step == version.step and other.digest != version.digest]


def changed_share(before: Mapping[str, Tensor], now: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    """Share of values that differ between two publications, in the dtype that the engine serves.

    0.0 = equal bit for bit there: a learning rate too small for bfloat16, or an adapter that is not applied.
    """
    differing = total = 0
    for name, tensor in now.items():
        if before[name] is not tensor:  # a frozen base is the same on both sides
            differing += int((before[name].cpu().to(dtype) != tensor.cpu().to(dtype)).sum())
        total += tensor.numel()
    return differing / total if total else 0.0


# -- where the bytes lie, and which stay -------------------------------------------------------------------------------


def make_weights_root(run: RunDir, config: Config) -> None:
    """Create `weights/`: a directory of the run, or a link into shared memory (`weights.store: shm`)."""
    root = run.weights_root
    if config.weights.store == "disk" and not root.is_symlink():
        root.mkdir(parents=True, exist_ok=True)
        return
    if not root.is_symlink():
        name = xxhash.xxh3_64_hexdigest(str(run.root.resolve()).encode())
        os.symlink(SHARED_MEMORY / f"headway-{os.getuid()}-{name}", root)
    target = root.readlink()
    target.mkdir(mode=0o700, exist_ok=True)
    if target.stat().st_uid != os.getuid():
        raise PermissionError(f"{target}: belongs to another user; remove {root} and set weights.store to disk")


def prune_weights(run: RunDir, keep: int) -> list[int]:
    """Remove the bytes of versions beyond the newest `keep`, never the newest nor pinned ones. Returns what went.

    Bytes that never became real (no manifest) go once a newer version is. Manifests stay.
    """
    there = dict(numbered(run.weights_root, r"v-(\d{8})"))
    real = [v for v in there if run.version(v).exists()]
    if not real:
        return []
    stay = set(real[-max(1, keep):]) | pinned_versions(run) | {v for v in there if v > real[-1]}
    gone = sorted(set(there) - stay)
    for v in gone:
        aside = there[v].with_name(f".{there[v].name}.{secrets.token_hex(6)}.tmp")
        os.rename(there[v], aside)
        shutil.rmtree(aside, ignore_errors=True)
    return gone
