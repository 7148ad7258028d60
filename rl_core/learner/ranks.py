"""The learner's ranks: sums over them, and the sharding of the model (FSDP2). One rank needs neither.

FSDP2 averages gradients over ranks. Losses here have global denominators, so the average comes out divided by the rank
count: `loss_scale` undoes it where it happens, before the gradient is clipped.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_core.errors import CollectiveFailed
from rl_core.learner.blocks import decoder_blocks
from rl_core.learner.critic import Critic
from rl_core.learner.policy import Policy


class Ranks:
    """`Ranks(rank=0, ranks=1, ...)` is alone and communicates with nobody; more join a group at `rendezvous`.

    `rendezvous` is a URL of torch.distributed (`tcp://127.0.0.1:29500`), or the path of a file that does not exist yet.
    Every collective has `deadline_s`, a barrier `barrier_s`: there the others may wait for what rank 0 writes.
    """

    def __init__(self, *, rank: int, ranks: int, rendezvous: str, device: torch.device, deadline_s: float,
                 barrier_s: float) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}: ranks count from 0")
        self.rank = rank
        self.ranks = ranks
        self.device = device
        if ranks > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            if device.type == "cuda":  # what is sharded later goes to the current device
                torch.cuda.set_device(device)
            where = rendezvous if urlparse(rendezvous).scheme else f"file://{rendezvous}"
            dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks,
                                    timeout=timedelta(seconds=deadline_s))
            self._meeting: Any = cast(Any, dist).new_group(backend="gloo", timeout=timedelta(seconds=barrier_s))
            # NCCL connects at its first collective, through the file of the rendezvous: now, while that is there.
            self.sum([0.0])

    @property
    def loss_scale(self) -> float:
        """What a loss with global denominators is multiplied by, so that FSDP2's gradient average becomes a sum."""
        return float(self.ranks)

    def shard(self, policy: Policy | Critic) -> None:
        """Shard in place: one unit per decoder block, and one for everything else."""
        if self.ranks == 1:
            return
        mesh = init_device_mesh(self.device.type, (self.ranks,))
        # Its overloads are typed only in part.
        for block in decoder_blocks(policy.model):
            fully_shard(block, mesh=mesh)  # pyright: ignore[reportUnknownMemberType]
        fully_shard(policy, mesh=mesh)  # pyright: ignore[reportUnknownMemberType]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks in float64; exact for counts."""
        return to_list(self._reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM))

    def sum_tensor(self, values: Tensor) -> Tensor:
        return self._reduce(values.double(), dist.ReduceOp.SUM)

    def max_tensor(self, values: Tensor) -> Tensor:
        return self._reduce(values.double(), dist.ReduceOp.MAX)

    def max(self, values: Sequence[float]) -> list[float]:
        return to_list(self._reduce(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX))

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.ranks == 1:
            return values.cpu()
        shared = values.to(self.device)
        cast(Any, dist).all_reduce(shared, op=op)
        return shared.cpu()

    def barrier(self) -> None:
        if self.ranks > 1:
            cast(Any, dist).barrier(group=self._meeting)

    def close(self) -> None:
        if self.ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()


def reshard(model: nn.Module) -> None:
    """Shard again what a pass without a backward has left gathered: its parameters are those of the optimizer then."""
    if isinstance(model, FSDPModule):
        model.reshard()


@contextmanager
def named_collectives(rank: int) -> Generator[None, None, None]:
    """What a collective inside raises about a peer that is gone or too late is raised as CollectiveFailed.

    torch has a class for it with nccl only; gloo's is a RuntimeError that names the place in gloo's source.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise CollectiveFailed(f"rank {rank}: a collective ended without one of the other ranks, which is gone or did "
                               "not come within deadlines.collective_s (at a barrier: deadlines.step_s): "
                               f"{str(error).strip().splitlines()[0]}") from error


def to_list(values: Tensor) -> list[float]:
    """The values of a 1-D tensor."""
    return cast(list[float], values.tolist())  # pyright: ignore[reportUnknownMemberType]  # untyped in torch


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (a collective), on every rank; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_host(named: Iterable[tuple[str, Tensor]], *, keep: bool = True) -> dict[str, Tensor]:
    """Full tensors by name in host memory (a collective, one tensor at a time); those that lie there whole are the same
    memory. Without `keep` nothing is held: for ranks that only take part."""
    found: dict[str, Tensor] = {}
    for name, tensor in named:
        full = whole(tensor.detach())
        if keep:
            found[name] = full.cpu()
    return found


def assign(target: Tensor, full: Tensor) -> None:
    """Copy the values of a full tensor into a sharded (or plain) one, in place."""
    with torch.no_grad():
        target.copy_(like(target, full))


def like(target: Tensor, full: Tensor) -> Tensor:
    """`full` placed and sharded like `target`."""
    if isinstance(target, DTensor):
        return distribute_tensor(full.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return full.to(target.device)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients over all ranks, a scalar; 0 without gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    return whole(torch.nn.utils.get_total_norm(gradients))
