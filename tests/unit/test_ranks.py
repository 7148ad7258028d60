"""Learner ranks that wait for a peer in vain: the wait ends by its deadline, with a name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

COLLECTIVE_S = 1.0


def meet(rank: int, rendezvous: str, leaves: str, said: Connection) -> None:
    """Rank 1 leaves after the first sum; rank 0 says what the second one raised, and after how long."""
    import torch

    from rl_core.errors import CollectiveFailed
    from rl_core.learner.ranks import Ranks, named_collectives

    ranks = Ranks(rank=rank, ranks=2, rendezvous=rendezvous, device=torch.device("cpu"), deadline_s=COLLECTIVE_S,
                  barrier_s=30.0)
    assert ranks.sum([1.0]) == [2.0]
    if rank == 1:
        said.send(os.getpid())
        if leaves == "dies":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = time.monotonic()
    try:
        with named_collectives(rank):
            ranks.sum([1.0])
    except CollectiveFailed as error:
        said.send((str(error), time.monotonic() - begun))
    os._exit(0)  # destroying the group would wait for the peer


@pytest.mark.parametrize("leaves", ["is stopped", pytest.param("dies", marks=pytest.mark.slow)])
def test_a_rank_that_leaves_a_collective_ends_the_wait_of_the_others(tmp_path: Path, leaves: str) -> None:
    context = multiprocessing.get_context("spawn")
    heard, says = zip(*(context.Pipe(duplex=False) for _ in range(2)), strict=True)
    ranks = [context.Process(target=meet, args=(rank, str(tmp_path / "meeting"), leaves, says[rank]))
             for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        assert heard[1].poll(60) and heard[1].recv() == ranks[1].pid
        assert heard[0].poll(20), "no answer long after the deadline"
        text, seconds = heard[0].recv()
        assert text.startswith("rank 0: a collective ended without one of the other ranks")
        assert "deadlines.collective_s" in text and seconds < COLLECTIVE_S + 2
    finally:
        for process in ranks:
            process.kill()
            process.join()
