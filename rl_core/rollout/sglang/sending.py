"""The learner's half of transport `collective`: published weights over a process group (gloo, or NCCL on GPUs).

A thread beside the learner takes connections of engines, one for each server that is to receive. Engine and sender
speak lines of JSON:

    {"secret": ..., "hello": {"backend": "gloo", "world": 2, "group": ...}}  ->  {"port": ...}, then {"joined": true}
    {"version": 7}   ->  {"digest": ..., "buckets": [{"names": [...], "dtypes": [...], "shapes": [...]}, ...]}
    {"bucket": 0}    ->  {"sent": 0}     # broadcast while the server receives

The bytes come from the published file, which the digest of the version covers; at most one version is held. Where to
connect stands in the run directory (`put_address`), for the time of one learner.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from rl_core.config import Config, SglangEngineConfig
from rl_core.errors import WeightsDamaged
from rl_core.run_dir import RunDir, read_json, to_json
from rl_core.types import WeightVersion
from rl_core.versions import read_version
from rl_core.weights import load_weights

BUCKET_BYTES = 512 * 2**20
"""Tensors of one broadcast round, together: what a receiver holds beside its weights."""
GROUP_S = 120.0
"""Joining a group, and one broadcast."""
SILENCE_S = 3600.0
"""An engine that says nothing for so long is gone."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the sender of a run listens, and the word that it wants to hear first."""

    host: str
    port: int
    secret: str


def put_address(run: RunDir, address: Address) -> None:
    """For engines; only the user may read it."""
    path = run.weight_sender
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(to_json({"host": address.host, "port": address.port, "secret": address.secret}))
    os.replace(aside, path)


def read_address(run: RunDir) -> Address:
    """Raises FileNotFoundError where no learner sends."""
    known = read_json(run.weight_sender)
    return Address(str(known["host"]), int(known["port"]), str(known["secret"]))


def buckets(tensors: Mapping[str, Tensor], most_bytes: int = BUCKET_BYTES) -> list[list[str]]:
    """Names in order, cut so that each part holds at most so many bytes; a larger tensor is a part of its own."""
    parts: list[list[str]] = []
    room = 0
    for name, tensor in sorted(tensors.items()):
        if not parts or tensor.nbytes > room:
            parts.append([])
            room = most_bytes
        parts[-1].append(name)
        room -= tensor.nbytes
    return parts


class WeightSender:
    """`WeightSender(run, host="10.0.0.7", device=...)` sends until `close`."""

    def __init__(self, run: RunDir, *, host: str, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._run, self._device, self._bucket_bytes = run, device, bucket_bytes
        self._lock = threading.Lock()
        self._held: tuple[WeightVersion, dict[str, Tensor]] | None = None
        secret = secrets.token_hex(16)
        sender = self

        class Engine(socketserver.StreamRequestHandler):
            timeout = SILENCE_S

            def handle(self) -> None:
                _Session(sender, self.rfile, self.wfile, secret, host).run()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server((host, 0), Engine)
        self._thread = threading.Thread(target=self._server.serve_forever, name="weight-sender", daemon=True)
        self._thread.start()
        self.address = Address(host, int(self._server.server_address[1]), secret)
        put_address(run, self.address)

    def tensors(self, v: int) -> tuple[WeightVersion, dict[str, Tensor]]:
        """A published version, its bytes verified. Raises WeightsDamaged."""
        with self._lock:
            if self._held is None or self._held[0].v != v:
                self._held = None
                version = read_version(self._run, v)
                self._held = (version, load_weights(self._run.weights(v), version))
            return self._held

    def parts(self, tensors: Mapping[str, Tensor]) -> list[list[str]]:
        return buckets(tensors, self._bucket_bytes)

    @property
    def device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self._run.weight_sender.unlink()
        self._server.shutdown()
        self._server.server_close()


def open_sender(run: RunDir, config: Config, device: torch.device) -> WeightSender | None:
    """The sender that the settings ask for; None where servers read files, or there are none."""
    engine = config.rollout.engine
    if not isinstance(engine, SglangEngineConfig) or engine.transport != "collective":
        return None
    return WeightSender(run, host="127.0.0.1" if config.isolated else own_address(), device=device)


class _Session:
    """One engine's connection for one server: a group of its own, of which the sender is rank 0."""

    def __init__(self, sender: WeightSender, reading: Any, writing: Any, secret: str, host: str) -> None:
        self._sender, self._reading, self._writing = sender, reading, writing
        self._secret, self._host = secret, host
        self._group: Any = None
        self._version: tuple[WeightVersion, dict[str, Tensor]] | None = None

    def run(self) -> None:
        """Until the engine hangs up, or asks for what cannot be."""
        try:
            for asked in self._lines():
                try:
                    self._answer(asked)
                except WeightsDamaged as error:  # no reason to hang up: the server is given others
                    self._say({"damaged": str(error)})
                except Exception as error:  # the edge of the learner: the engine hears it, training goes on
                    self._say({"error": f"{type(error).__name__}: {error}"})
                    return
        except OSError:
            return
        finally:
            leave_group(self._group)

    def _lines(self) -> Iterator[dict[str, Any]]:
        for line in self._reading:
            yield cast("dict[str, Any]", json.loads(line))

    def _say(self, answer: Mapping[str, Any]) -> None:
        with suppress(OSError):
            self._writing.write(json.dumps(answer).encode() + b"\n")
            self._writing.flush()

    def _answer(self, asked: Mapping[str, Any]) -> None:
        if "hello" in asked:
            if not secrets.compare_digest(str(asked.get("secret")), self._secret):
                raise PermissionError("another secret than that of this run's sender")
            hello = cast("dict[str, Any]", asked["hello"])
            self._group = join_group(
                self._host, 0, backend=str(hello["backend"]), world=int(hello["world"]), rank=0,
                name=str(hello["group"]), on_port=lambda port: self._say({"port": port}))
            self._say({"joined": True})
        elif self._group is None:
            raise PermissionError("no hello came first")
        elif "version" in asked:
            self._version = version, tensors = self._sender.tensors(int(asked["version"]))
            self._say({"digest": version.digest, "buckets": [
                {"names": names, "dtypes": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
                 "shapes": [list(tensors[name].shape) for name in names]}
                for names in self._sender.parts(tensors)]})
        else:
            assert self._version is not None
            tensors, number = self._version[1], int(asked["bucket"])
            broadcast(self._group, [tensors[name].to(self._sender.device)
                                    for name in self._sender.parts(tensors)[number]])
            self._say({"sent": number})


_GROUPS = threading.Lock()
"""torch keeps its groups in tables that two threads must not write at once."""


def join_group(host: str, port: int, *, backend: str, world: int, rank: int, name: str,
               on_port: Callable[[int], None] = lambda port: None) -> Any:
    """A process group beside the learner's own, as SGLang's servers make it. Port 0 takes a free one; rank 0 listens.
    `on_port` is told the port before the others are waited for."""
    torch_dist, torch_c10d = cast(Any, dist), cast(Any, distributed_c10d)
    store = torch_dist.TCPStore(host, port, world, rank == 0, timeout=timedelta(seconds=GROUP_S),
                                wait_for_workers=False)
    on_port(int(store.port))
    with _GROUPS:
        group, _ = torch_c10d._new_process_group_helper(
            world, rank, [], torch_c10d.Backend(backend), torch_c10d.PrefixStore(name, store), group_name=name,
            timeout=timedelta(seconds=GROUP_S))
        torch_c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


def broadcast(group: Any, tensors: list[Tensor]) -> None:
    """From rank 0, one after the other, as a server receives them."""
    works = [cast(Any, dist).broadcast(tensor.contiguous(), src=0, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def leave_group(group: Any) -> None:
    """None, and a group whose other members are gone, are no error."""
    if group is not None:
        with _GROUPS, suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)


def own_address() -> str:
    """The address of this machine towards others; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
