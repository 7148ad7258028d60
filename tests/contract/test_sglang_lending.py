"""Validation by a lent server, over real ones: rollout goes on with the other server, and the accuracy is that of the
embedded engine. What may go wrong about a loan: test_sglang_faults.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_core.config import Config
from rl_core.errors import DeadPart
from rl_core.model_setup import set_up_model
from rl_core.plan import resolve
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.rollout.sglang.opening import open_servers
from rl_core.rollout.sglang.server import SglangServer
from rl_core.rollout.sglang.wire import LOADS
from rl_core.run_dir import RunDir
from rl_core.types import Completion, WeightVersion
from rl_core.validation import open_validator, read_table
from rl_core.versions import read_versions
from rl_core.weights import publish, read_tensors
from tests.learning import start_attempt
from tests.serving import ENGINE, PYTHON
from tests.sglang_answers import count, request, runs, version_at, wait_for

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
DEADLINE_S = 120
AT_ONCE = 8


def settings(**validation: Any) -> Config:
    # A short clean warm-up: right about half of the time, so that accuracies are not trivial.
    return resolve({"model": {"type": "tiny", "warmup_steps": 60, "warmup_mix": 1.0}, "isolated": True,
                    "rollout": {"engine": {**ENGINE, "replicas": 2, "stream_interval": 8}},
                    "data": {"train": "sort", "validation": "sort", "max_prompt_tokens": 64, "validation_size": 256},
                    "sampling": {"max_new_tokens": 200}, "storage": {"fsync": False},
                    "validation": {"engine": "replica", "max_new_tokens": 8, "top_p": 0.9, "table": 256, **validation},
                    }, {})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with three versions: the model as it is, and off by more and more."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON}: no environment for a server; `make sglang` makes it, `make test-sglang` runs these")
    root = tmp_path_factory.mktemp("lending")
    run = RunDir(root / "run")
    start_attempt(run)
    run.model.symlink_to(set_up_model(settings(), root))
    tensors = read_tensors(run.model / "model.safetensors")
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        publish(run, {name: tensor * (1 + 0.2 * step * torch.randn(tensor.shape, generator=generator))
                      for name, tensor in tensors.items()}, step, step, 1, settings())
    return run


@pytest.fixture(scope="module")
def engine(run: RunDir) -> Iterator[SglangEngine]:
    engine = open_servers(run.model, settings(), [run.server_log("rollout-0", i) for i in range(2)])
    yield engine
    engine.close()


@pytest.fixture
def versions(run: RunDir) -> list[WeightVersion]:
    return list(read_versions(run).values())


@contextmanager
def rollout_of(engine: SglangEngine) -> Iterator[list[Completion]]:
    """Eight answers at once, without end: those that are there so far."""
    done: list[Completion] = []
    stop = threading.Event()

    def ask_on(lane: int) -> None:
        serial = lane
        while not stop.is_set():
            done.append(engine.submit(request(serial, 150, temperature=1.5)).result(DEADLINE_S))
            serial += AT_ONCE

    with ThreadPoolExecutor(AT_ONCE) as lanes:
        asking = [lanes.submit(ask_on, lane) for lane in range(AT_ONCE)]
        try:
            yield done
        finally:
            stop.set()
    for one in asking:
        one.result(0)


def tokens(engine: SglangEngine) -> dict[str, float]:
    """By address."""
    counters = engine.counters()
    return {replica.url: counters[replica.name]["tokens"] for replica in engine._replicas}


def greedy_texts(run: RunDir, step: int) -> list[tuple[str, str]]:
    return [(row["prompt"], row["text"]) for row in read_table(run, step) if row["mode"] == "greedy"]


def test_a_validation_has_one_server_at_its_version_and_rollout_goes_on_with_the_other(
        run: RunDir, engine: SglangEngine, versions: list[WeightVersion]) -> None:
    first, second, third = versions
    engine.swap(first, run.weights(0))
    engine.swap(second, run.weights(1))
    lent = open_validator(root=str(run.root), config=settings())
    with rollout_of(engine) as answers:
        wait_for(lambda: len(answers) >= AT_ONCE and min(tokens(engine).values()) > 100)
        loan = engine.lend(first, run.weights(0), wait_s=DEADLINE_S, for_s=600)
        [other] = set(tokens(engine)) - {loan.url}
        assert (version_at(loan.url), version_at(other)) == ("0", "1")
        before, asked = tokens(engine), len(answers)
        record = lent.validate(first, step=0, loan=loan)
        engine.swap(third, run.weights(2))
        after = tokens(engine)
        assert (version_at(loan.url), version_at(other)) == ("0", "2")
        assert after[loan.url] == before[loan.url] and after[other] > before[other] and len(answers) > asked
        engine.take_back(loan.id)
        assert version_at(loan.url) == "2"
        wait_for(lambda: tokens(engine)[loan.url] > after[loan.url])
    lent.close()
    assert all(answer.finish_reason in ("stop", "length") for answer in answers)
    assert all(v > 0 and found == sorted(found) for found in map(runs, answers) for _, v in found)
    assert [count(engine, name) for name in ("restarts", "retries", "thrown_tokens")] == [0, 0, 0]
    # The same version by the engine of validation's own, and another one, which is told apart.
    embedded = open_validator(root=str(run.root), config=settings(engine="embedded"))
    same, changed = embedded.validate(first, step=10), embedded.validate(second, step=11)
    embedded.close()
    assert 0.2 < record["greedy_accuracy"] == same["greedy_accuracy"] != changed["greedy_accuracy"]
    assert greedy_texts(run, 0) == greedy_texts(run, 10) != greedy_texts(run, 11) and len(greedy_texts(run, 0)) == 256
    assert (record["v"], record["digest"], record["n"], record["greedy_failed"]) == (0, first.digest, 256, 0)
    assert abs(record["sampled_accuracy"] - same["sampled_accuracy"]) < 0.15


def test_a_validation_whose_server_is_killed_says_so_and_rollout_goes_on(
        run: RunDir, engine: SglangEngine, versions: list[WeightVersion]) -> None:
    engine.swap(versions[2], run.weights(2))
    loan = engine.lend(versions[0], run.weights(0), wait_s=DEADLINE_S, for_s=600)
    [victim] = [replica.process for replica in engine._replicas if replica.url == loan.url]
    assert isinstance(victim, SglangServer)
    lent = open_validator(root=str(run.root), config=settings(n=256, temperature=1.0))  # minutes
    with ThreadPoolExecutor(1) as thread:
        record = thread.submit(lent.validate, versions[0], 20, loan)
        wait_for(lambda: ask(loan.url, LOADS).fields["loads"][0]["num_running_reqs"] > 0)
        os.kill(victim.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(DeadPart):
            record.result(DEADLINE_S)
        assert time.monotonic() - begun < 15
    lent.close()
    assert not run.validation(20).exists()
    engine.take_back(loan.id)
    answer = engine.submit(request(9_000, 100, temperature=1.5)).result(DEADLINE_S)
    assert [v for _, v in runs(answer)] == [2] and count(engine, "restarts") == 1
