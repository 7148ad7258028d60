"""One server takes new weights while it answers: pause, update, compare, continue.

    in_place   requests keep their tokens and their key/value cache; generation stands still for the update alone
    retract    the server gives up the cache of running requests, and reads their contexts again behind the update
    abort      running requests end with the tokens so far; the engine sends them again, longer

Before anything is sampled by the new weights, the server's own version and checksums are compared with what was
published. A server that refuses keeps its old weights and goes on with them; one that holds anything else fails, and
samples nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rl_core.errors import WeightsDamaged
from rl_core.rollout.sglang.client import PauseMode, SglangClient
from rl_core.rollout.sglang.collective import Channel
from rl_core.rollout.sglang.fingerprints import differing, overall
from rl_core.rollout.sglang.wire import NO_VERSION, ReplicaFailed, ServerRefused
from rl_core.types import WeightVersion


class WeightsRefused(WeightsDamaged):
    """A server did not take published weights: it serves its old ones."""


@dataclass(frozen=True, slots=True)
class Published:
    """One version as every server is to hold it."""

    version: WeightVersion
    directory: Path
    """With model.safetensors in it; with transport `disk`, every server can read it by this path."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Verified against the version's digest; empty where no server's checksum can be computed."""


class Offered:
    """Versions that the servers were offered, by number."""

    def __init__(self) -> None:
        self._known: dict[int, WeightVersion] = {}

    def add(self, version: WeightVersion) -> None:
        self._known[version.v] = version

    def index_of(self, version: int) -> int | None:
        """Publication index, which orders versions; None for one that was never offered."""
        if version == NO_VERSION:
            return NO_VERSION
        known = self._known.get(version)
        return None if known is None else known.idx


@dataclass(slots=True)
class Held:
    """What is known of the weights of one server."""

    computable: frozenset[str] = frozenset()
    """Names whose checksum can be computed (fingerprints.py)."""
    checksum: str = ""
    """Of all tensors, as last read; empty before that."""
    digest: str = ""
    """`WeightVersion.digest` behind it; empty for the weights that the server started with."""


async def swap(client: SglangClient, published: Published, held: Held, *, mode: PauseMode, dtype: torch.dtype,
               deadline_s: float, agreed: dict[str, str], channel: Channel | None = None,
               while_paused: Callable[[], Awaitable[None]] | None = None) -> float:
    """Serve `published`; returns the seconds that generation stood still. `agreed`: digest -> checksum of all tensors,
    as the first server said it; the others must say the same. The bytes come from disk, or through `channel`.
    `while_paused` is awaited before they do.

    Raises WeightsRefused, and WeightsDamaged where the sender finds that (the server goes on with its old weights),
    ReplicaFailed (it is not to be used any more).
    """
    version, flush = published.version, mode != "in_place"
    if channel is not None:
        await channel.prepare(version, deadline_s)
    begun = time.monotonic()
    await client.pause(mode, deadline_s)
    if while_paused is not None:
        await while_paused()
    try:
        if channel is None:
            await client.update_from_disk(str(published.directory), version.v, flush_cache=flush, deadline_s=deadline_s)
        else:
            await channel.send(version, flush_cache=flush, deadline_s=deadline_s)
    except ServerRefused as refusal:
        await _check_old(client, held, refusal)
        await client.resume(deadline_s)
        raise WeightsRefused(f"{client.url}: weights of version {version.v} ({published.directory}) were refused; it "
                             f"goes on with its old ones: {refusal.message}") from refusal
    await _check_new(client, published, held, dtype, deadline_s, agreed)
    await client.resume(deadline_s)
    return time.monotonic() - begun


async def _check_old(client: SglangClient, held: Held, refusal: ServerRefused) -> None:
    if held.checksum and overall(await client.checksums()) != held.checksum:
        raise ReplicaFailed(f"{client.url}: refused new weights, and holds its old ones no more: {refusal}")


async def _check_new(client: SglangClient, published: Published, held: Held, dtype: torch.dtype, deadline_s: float,
                     agreed: dict[str, str]) -> None:
    version = published.version
    said = (await client.model_info(deadline_s)).version
    if said != str(version.v):
        raise ReplicaFailed(f"{client.url}: was told to serve version {version.v} and says that it serves {said!r}")
    checksums = await client.checksums(deadline_s)
    wrong = differing(checksums, held.computable, published.tensors, dtype) if published.tensors else []
    if wrong:
        raise ReplicaFailed(f"{client.url}: {len(wrong)} of {len(held.computable)} tensors are not those of version "
                            f"{version.v}: {', '.join(wrong[:3])}")
    checksum = overall(checksums)
    # In a narrower dtype a small step may change nothing.
    unchanged = held.digest not in ("", version.digest) and checksum == held.checksum
    if unchanged and dtype == torch.float32:
        raise ReplicaFailed(f"{client.url}: took version {version.v}, and holds the same weights as before")
    if agreed.setdefault(version.digest, checksum) != checksum:
        raise ReplicaFailed(f"{client.url}: holds other weights for version {version.v} than another server does")
    held.checksum, held.digest = checksum, version.digest
