"""Weights over a process group: two learner ranks train and publish, a real server receives, with gloo."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.config import Config, SglangEngineConfig
from rl_core.errors import WeightsDamaged
from rl_core.model_setup import TOKENIZER_FILES
from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.collective import Channel
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.rollout.sglang.fingerprints import computable
from rl_core.rollout.sglang.sending import WeightSender, buckets, read_address
from rl_core.run_dir import RunDir
from rl_core.types import WeightVersion
from rl_core.weights import WEIGHTS_FILE, publish
from tests.learning import all_by, claim_groups, random_groups, sampled_by, start_attempt, write_model
from tests.serving import ENGINE, StartServer
from tests.sglang_answers import count, is_whole, request, runs

STEPS = 20
SETTINGS = {"total_steps": STEPS, "groups_per_step": 4, "group_size": 4, "isolated": True,
            "weights": {"keep": STEPS + 1}, "storage": {"fsync": False},
            "learner": {"ranks": 2, "lr": 1e-3, "warmup_steps": 0, "token_budget": 200},
            "rollout": {"engine": {**ENGINE, "transport": "collective"}}}
DEADLINE_S = 120


def learn(rank: int, root: str, rendezvous: str, orders: Connection) -> None:
    """One learner rank in a process of its own: says each version that it has published, and at the end its weights."""
    from rl_core.learner.learner import Learner

    learner = Learner(root=root, config=Config.model_validate(SETTINGS), attempt=1, rank=rank, ranks=2,
                      rendezvous=rendezvous)
    learner.restore()
    orders.send(learner.publish_current())
    while (step := orders.recv()) is not None:
        record = learner.train(step)
        orders.send(None if record is None else record.published)
    weights, _ = learner.tensors()
    torch.save(weights, f"{root}/learned-{rank}.pt")
    learner.close()


def test_buckets_hold_every_tensor_once_and_no_more_than_they_may() -> None:
    tensors = {"a": torch.zeros(10), "b": torch.zeros(30), "c": torch.zeros(2), "d": torch.zeros(9)}
    assert buckets(tensors, 80) == [["a"], ["b"], ["c", "d"]]
    assert buckets(tensors, 10**9) == [["a", "b", "c", "d"]]


def test_a_sender_tells_nothing_to_whom_it_does_not_know(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    sender = WeightSender(run, host="127.0.0.1", device=torch.device("cpu"))
    assert read_address(run) == sender.address and run.weight_sender.stat().st_mode & 0o777 == 0o600
    for line in (b'{"secret": "guess", "hello": {"backend": "gloo", "world": 2, "group": "g"}}\n', b'{"version": 0}\n'):
        with socket.create_connection((sender.address.host, sender.address.port), timeout=10) as connection:
            connection.sendall(line)
            assert b"PermissionError" in connection.makefile().readline().encode()
    sender.close()
    with pytest.raises(FileNotFoundError):
        read_address(run)


def test_a_version_whose_bytes_are_damaged_is_said_to_be_and_another_one_can_be_asked_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    start_attempt(run)
    config = Config.model_validate(SETTINGS)
    whole, torn = (publish(run, {"w": torch.full((8,), float(step))}, step, step, 1, config) for step in range(2))
    (run.weights(torn.v) / WEIGHTS_FILE).write_bytes(b"")
    sender = WeightSender(run, host="127.0.0.1", device=torch.device("cpu"))

    async def asked() -> None:
        reader, writer = await asyncio.open_connection(sender.address.host, sender.address.port)
        server: Any = None  # only what is sent needs one
        channel = Channel(server, sender.address, "alone", reader, writer)
        hello = {"backend": "gloo", "world": 1, "group": channel.group}
        await channel.ask({"secret": sender.address.secret, "hello": hello}, DEADLINE_S)
        assert await channel.hear(DEADLINE_S) == {"joined": True}
        with pytest.raises(WeightsDamaged, match=r"the sender of weights: .*model\.safetensors"):
            await channel.prepare(torn, DEADLINE_S)
        await channel.prepare(whole, DEADLINE_S)
        channel.close()

    asyncio.run(asked())
    sender.close()


@pytest.mark.sglang
@pytest.mark.xdist_group("sglang")
def test_after_twenty_swaps_the_server_holds_the_weights_of_two_learner_ranks_tensor_by_tensor(
        tmp_path: Path, sglang_model: Path, start_sglang: StartServer) -> None:
    run = RunDir(tmp_path / "run")
    write_model(run.model, vocab=97)
    for name in TOKENIZER_FILES:
        if (sglang_model / name).exists():
            shutil.copy(sglang_model / name, run.model / name)
    start_attempt(run)
    config = Config.model_validate(SETTINGS)
    stock = AutoModelForCausalLM.from_pretrained(run.model)
    for step in range(STEPS):
        claim_groups(run, config, step, [sampled_by(stock, all_by(0, group)) for group in random_groups(step)])
    context = multiprocessing.get_context("spawn")
    orders, theirs = zip(*(context.Pipe() for _ in range(2)), strict=True)
    ranks = [context.Process(target=learn, args=(rank, str(run.root), str(tmp_path / "meeting"), theirs[rank]))
             for rank in range(2)]
    for process in ranks:
        process.start()

    def said(rank: int) -> WeightVersion | None:
        assert orders[rank].poll(DEADLINE_S), "a learner rank is silent"
        return orders[rank].recv()

    server = start_sglang(run.model)
    settings = SglangEngineConfig.model_validate({**ENGINE, "transport": "collective", "urls": (server.url,)})
    engine = SglangEngine(run.model, config=settings, sender=lambda: read_address(run))
    try:
        version = said(0)
        assert version is not None and said(1) is None
        engine.swap(version, run.weights(version.v))
        futures = [engine.submit(request(i, 900, temperature=1.0)) for i in range(4)]
        for step in range(STEPS):
            for order in orders:
                order.send(step)
            version = said(0)
            assert version is not None and said(1) is None and version.step == step + 1
            # Half of the time as where the file is out of reach.
            directory = run.weights(version.v) if step % 2 else tmp_path / "nowhere"
            assert engine.swap(version, directory) == version.digest
        for future in futures:
            answer = future.result(DEADLINE_S)
            assert len(answer.token_ids_L) == answer.version_runs.end_R[-1]
        answer = engine.submit(request(99, 16)).result(DEADLINE_S)
        assert is_whole(answer, 16) or answer.finish_reason == "stop"
        assert [v for _, v in runs(answer)] == [version.v]
        assert count(engine, "swaps") == STEPS + 1 and count(engine, "restarts") == 0
        for order in orders:
            order.send(None)
        for process in ranks:
            process.join(DEADLINE_S)
        assert [process.exitcode for process in ranks] == [0, 0]
        learned = torch.load(run.root / "learned-0.pt", weights_only=True)
        held = wire.read_checksums(ask(server.url, wire.CHECKSUMS, {"action": "checksum"}).fields)
        assert computable(held, learned, torch.float32) == set(held)
        # The learner is gone: a server then reads the file, where it can.
        later = publish(run, {name: tensor * 1.01 for name, tensor in learned.items()}, STEPS + 1, STEPS + 1, 1, config)
        assert engine.swap(later, run.weights(later.v)) == later.digest
    finally:
        engine.close()
        for process in ranks:
            process.kill()
            process.join()
