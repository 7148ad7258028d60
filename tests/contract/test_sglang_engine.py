"""The engine over real servers: what it samples, swaps in flight, servers that are killed under it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import SglangEngineConfig
from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.asking import ask
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.rollout.sglang.fingerprints import computable
from rl_core.rollout.sglang.server import SglangServer
from rl_core.rollout.torch_engine import TorchEngine
from rl_core.types import Completion, GenerateRequest
from rl_core.weights import WEIGHTS_FILE, read_tensors
from tests.contract.sglang_faults import shapes, unlike
from tests.serving import ENGINE
from tests.sglang_answers import (
    Publish,
    count,
    endless,
    is_whole,
    load,
    plain_logprobs,
    publication,
    request,
    runs,
    swapped_logprobs,
    version_at,
    wait_for,
)

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]
DEADLINE_S = 120
LONG = 1400
"""Tokens of an answer that a swap is to meet: two seconds."""
LONG_CONTEXT = 8192


@pytest.fixture(scope="module")
def endless_model(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless(sglang_model, tmp_path_factory.mktemp("endless") / "model")


@pytest.fixture(scope="module")
def publish(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Publish:
    root = tmp_path_factory.mktemp("weights")
    return lambda idx: publication(sglang_model, root, idx)


@pytest.fixture
def open_engine(sglang_server: SglangServer, sglang_model: Path, publish: Publish) -> Iterator[Callable[..., Any]]:
    """Engines over the server of the session, which gets the model's own weights first, and at the end."""
    assert sglang_server.alive(), sglang_server.log_tail()
    opened: list[SglangEngine] = []

    def open_one(model_dir: Path, swap: bool = True, **settings: Any) -> SglangEngine:
        config = SglangEngineConfig.model_validate({**ENGINE, "urls": (sglang_server.url,), **settings})
        opened.append(engine := SglangEngine(model_dir, config=config))
        if swap:
            engine.swap(*publish(0))
        return engine

    yield open_one
    for engine in opened:
        engine.close()
    body = {"model_path": str(sglang_model), "weight_version": wire.UNNAMED, "flush_cache": True}
    assert ask(sglang_server.url, wire.RESUME, {}).status == 200
    assert ask(sglang_server.url, wire.UPDATE_FROM_DISK, body).status == 200


def answers(engine: SglangEngine | TorchEngine, requests: list[GenerateRequest]) -> list[Completion]:
    return [future.result(DEADLINE_S) for future in [engine.submit(one) for one in requests]]


# -- what is sampled


def test_the_broken_server_of_the_tests_has_the_shapes_of_a_real_one(sglang_server: SglangServer) -> None:
    url = sglang_server.url
    sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"rid": "shape", "input_ids": [5, 9, 7], "sampling_params": sampling, "return_logprob": True}
    bodies: dict[str, Any] = {
        wire.CHECKSUMS: {"action": "checksum"}, wire.PAUSE: {"mode": "in_place"}, wire.RESUME: {}, wire.GENERATE: body,
        wire.UPDATE_FROM_DISK: wire.update_body("/nowhere", 1, flush_cache=False)}
    assert {route: unlike(ours, ask(url, route, bodies.get(route)).payload, route)
            for route, ours in shapes().items()} == {route: [] for route in shapes()}
    refused = ask(url, wire.GENERATE, {**body, "input_ids": [5] * 5000})
    assert refused.status == 400 and "longer" in wire.read_message(refused.fields)


def test_logprobs_are_those_of_the_learners_model_at_two_temperatures(open_engine: Callable[..., SglangEngine],
                                                                      sglang_model: Path) -> None:
    engine, model = open_engine(sglang_model), load(sglang_model)
    for temperature in (1.0, 0.7):
        requests = [request(i, temperature=temperature, prompt=5 + i) for i in range(12)]
        for one, answer in zip(requests, answers(engine, requests), strict=True):
            expected = plain_logprobs(model, one.token_ids_P, answer.token_ids_L, temperature)
            np.testing.assert_allclose(answer.logprobs_L, expected, atol=1e-4)
            assert answer.version_runs.version_R.tolist() == [0]


def test_answers_to_one_prompt_are_no_copies_even_with_one_seed(open_engine: Callable[..., SglangEngine],
                                                                endless_model: Path) -> None:
    engine = open_engine(endless_model)
    prompt = request(0).token_ids_P
    requests = [GenerateRequest(request_id=f"c{i}", token_ids_P=prompt, seed=5, sampling=request(0).sampling)
                for i in range(16)]
    assert len({answer.token_ids_L.tobytes() for answer in answers(engine, requests)}) == 16


def test_answers_end_as_those_of_the_embedded_engine(open_engine: Callable[..., SglangEngine], sglang_model: Path,
                                                     endless_model: Path) -> None:
    """By an end token, which is kept; by a stop token; by a stop string, whose tokens are kept; by the budget."""
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "end token": (sglang_model, {"tokens": 600}),
        "stop token": (endless_model, {"tokens": 600, "stop_token_ids": (9, 10, 11)}),
        "stop string": (endless_model, {"tokens": 600, "stop": ("1", "a2", "(")}),
        "budget": (endless_model, {"tokens": 7})}
    for case, (model_dir, sampling) in cases.items():
        engine, torch_engine = open_engine(model_dir), TorchEngine(model_dir, slots=16)
        found = answers(engine, [request(i, **sampling) for i in range(16)])
        embedded = answers(torch_engine, [request(i, **sampling) for i in range(16)])
        torch_engine.close()
        ends = {answer.token_ids_L[-1] for answer in embedded if answer.finish_reason == "stop"}
        if case == "stop string":
            assert all(answer.stop_text in sampling["stop"] for answer in found if answer.finish_reason == "stop")
        elif case != "budget":
            assert {answer.token_ids_L[-1] for answer in found if answer.finish_reason == "stop"} <= ends | {9, 10, 11}
            assert all(not set(answer.token_ids_L[:-1].tolist()) & {int(end) for end in ends} for answer in found)
        assert {answer.finish_reason for answer in found} == {answer.finish_reason for answer in embedded}, case


def test_a_cancelled_answer_has_its_tokens_so_far(open_engine: Callable[..., SglangEngine],
                                                  endless_model: Path) -> None:
    engine = open_engine(endless_model)
    futures = [engine.submit(request(i, LONG)) for i in range(20)]
    wait_for(lambda: count(engine, "tokens") > 200)
    for i in range(20):
        engine.cancel(f"r{i}")
    done = [future.result(10) for future in futures]
    assert {answer.finish_reason for answer in done} == {"cancelled"}
    assert all(len(answer.token_ids_L) == len(answer.logprobs_L) < LONG for answer in done)
    assert sum(len(answer.token_ids_L) > 0 for answer in done) >= 8
    assert is_whole(engine.submit(request(99, 16)).result(DEADLINE_S), 16)


# -- swaps


def test_the_server_says_the_checksums_that_are_computed_from_the_published_weights(
        sglang_server: SglangServer, sglang_model: Path) -> None:
    said = wire.read_checksums(ask(sglang_server.url, wire.CHECKSUMS, {"action": "checksum"}).fields)
    tensors = read_tensors(sglang_model / WEIGHTS_FILE)
    import torch

    assert computable(said, tensors, torch.float32) == set(said)
    changed = {name: tensor + (name.endswith("norm.weight")) for name, tensor in tensors.items()}
    assert set(said) - computable(said, changed, torch.float32) == {
        name for name in said if name.endswith("norm.weight")}


def test_a_swap_in_flight_keeps_tokens_and_says_exactly_which_weights_sampled_which(
        open_engine: Callable[..., SglangEngine], endless_model: Path, publish: Publish) -> None:
    engine = open_engine(endless_model)
    requests = [request(i, LONG) for i in range(4)]
    futures = [engine.submit(one) for one in requests]
    wait_for(lambda: count(engine, "tokens") > 400)
    version, directory = publish(1)
    assert engine.swap(version, directory) == version.digest
    found = [future.result(DEADLINE_S) for future in futures]
    before, after = load(endless_model, publish(0)[1]), load(endless_model, directory)
    for one, answer in zip(requests, found, strict=True):
        assert is_whole(answer, LONG)
        (boundary, first), (_, second) = runs(answer)
        assert (first, second) == (0, 1)
        errors = {at: float(np.abs(swapped_logprobs(before, after, one.token_ids_P, answer.token_ids_L, at)
                                   - answer.logprobs_L).max()) for at in range(boundary - 2, boundary + 3)}
        assert errors[boundary] < 1e-3 and min(errors, key=errors.__getitem__) == boundary, errors
    assert (count(engine, "thrown_tokens"), count(engine, "reread_tokens"), count(engine, "retries")) == (0, 0, 0)


def test_a_prompt_behind_a_swap_is_not_read_from_the_cache_of_the_weights_before(
        open_engine: Callable[..., SglangEngine], endless_model: Path, publish: Publish) -> None:
    engine = open_engine(endless_model)
    one = request(0, 16, prompt=200)
    answers(engine, [one])
    before = count(engine, "cached_tokens")
    answers(engine, [one])
    assert count(engine, "cached_tokens") >= before + 190
    engine.swap(*publish(2))
    cached = count(engine, "cached_tokens")
    answer = engine.submit(one).result(DEADLINE_S)
    assert count(engine, "cached_tokens") == cached
    expected = plain_logprobs(load(endless_model, publish(2)[1]), one.token_ids_P, answer.token_ids_L)
    np.testing.assert_allclose(answer.logprobs_L, expected, atol=1e-4)


def test_answers_that_begin_around_a_swap_are_wholly_of_the_weights_that_they_name(
        open_engine: Callable[..., SglangEngine], endless_model: Path, publish: Publish) -> None:
    """Their prompts are in the cache of the older weights, and some are read before the swap, some behind it."""
    engine = open_engine(endless_model)
    prompts = [request(i, 24, prompt=100) for i in range(4)]
    serial = checked = 0
    for idx in range(1, 7):
        answers(engine, prompts)
        futures: list[Any] = []
        for _ in range(3):
            for one in prompts:
                futures.append((one, engine.submit(replace(one, request_id=f"s{serial}"))))
                serial += 1
        engine.swap(*publish(idx))
        model = load(endless_model, publish(idx)[1])
        for one, future in futures:
            answer = future.result(DEADLINE_S)
            assert is_whole(answer, 24)
            if runs(answer) == [(24, idx)]:
                expected = plain_logprobs(model, one.token_ids_P, answer.token_ids_L)
                np.testing.assert_allclose(answer.logprobs_L, expected, atol=1e-3)
                checked += 1
    assert checked >= 6 and count(engine, "thrown_tokens") == 0


@pytest.mark.parametrize("pause", ["retract", "abort"])
def test_the_other_ways_to_swap_read_contexts_again_and_keep_the_budget(
        pause: str, open_engine: Callable[..., SglangEngine], endless_model: Path, publish: Publish) -> None:
    engine = open_engine(endless_model, pause=pause)
    requests = [request(i, LONG) for i in range(4)]
    futures = [engine.submit(one) for one in requests]
    wait_for(lambda: count(engine, "tokens") > 400)
    engine.swap(*publish(1))
    found = [future.result(DEADLINE_S) for future in futures]
    after = load(endless_model, publish(1)[1])
    for one, answer in zip(requests, found, strict=True):
        assert is_whole(answer, LONG) and [v for _, v in runs(answer)] == [0, 1]
        boundary = runs(answer)[0][0]
        plain = plain_logprobs(after, one.token_ids_P, answer.token_ids_L)
        np.testing.assert_allclose(answer.logprobs_L[boundary + 1:], plain[boundary + 1:], atol=1e-3)
    assert count(engine, "reread_tokens") >= 400 and count(engine, "thrown_tokens") == 0


# -- several servers


@pytest.fixture(scope="module")
def pair(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """An engine with two servers of its own, over a longer context."""
    root = tmp_path_factory.mktemp("pair")
    model_dir = endless(sglang_model, root / "model", LONG_CONTEXT)
    config = SglangEngineConfig.model_validate({**ENGINE, "stream_interval": 128, "restarts": 4})
    servers = [SglangServer(model_dir, config=config, log=root / f"{i}.log", context=LONG_CONTEXT) for i in range(2)]
    engine = SglangEngine(model_dir, config=config, processes=servers)
    yield engine
    engine.close()
    assert not any(server.alive() for server in servers)


def test_an_answer_of_four_thousand_tokens_costs_at_most_forty_bytes_a_token(pair: SglangEngine,
                                                                             publish: Publish) -> None:
    pair.swap(*publish(0))
    before = count(pair, "bytes_read")
    answer = pair.submit(request(0, 4096)).result(DEADLINE_S)
    assert is_whole(answer, 4096)
    assert (count(pair, "bytes_read") - before) / 4096 <= 40


def test_twenty_swaps_under_load_lose_nothing(pair: SglangEngine, publish: Publish) -> None:
    """`make bench` does two hundred."""
    futures: dict[str, Any] = {}
    for idx in range(1, 21):
        for i in range(6):
            one = request(1000 * idx + i, 300)
            futures[one.request_id] = pair.submit(one)
        pair.swap(*publish(idx))
    found = {name: future.result(DEADLINE_S) for name, future in futures.items()}
    assert len(found) == 120 and all(answer.request_id == name for name, answer in found.items())
    assert all(is_whole(answer, 300) for answer in found.values())
    assert sum(len(runs(answer)) > 1 for answer in found.values()) >= 10
    assert (count(pair, "retries"), count(pair, "thrown_tokens"), count(pair, "restarts")) == (0, 0, 0)


def test_answers_of_a_server_that_is_killed_go_on_elsewhere(pair: SglangEngine, publish: Publish) -> None:
    pair.swap(*publish(21))
    victim = next(replica.process for replica in pair._replicas if replica.process is not None)
    assert isinstance(victim, SglangServer)
    before = pair.counters()["server-0"]["tokens"]
    futures = [pair.submit(request(5000 + i, 1000)) for i in range(12)]
    wait_for(lambda: pair.counters()["server-0"]["tokens"] > before + 1000)
    os.kill(victim.pid, signal.SIGKILL)
    begun = time.monotonic()
    wait_for(lambda: pair.counters()["server-0"]["restarts"] > 0)
    assert time.monotonic() - begun < 3
    found = [future.result(DEADLINE_S) for future in futures]
    assert all(is_whole(answer, 1000) and runs(answer) == [(1000, 21)] for answer in found)
    assert 1 <= count(pair, "retries") <= 12
    wait_for(lambda: version_at(victim.url) == "21")
    wait_for(lambda: all(is_whole(answer, 16) for answer in answers(pair, [request(6000 + i, 16) for i in range(4)])))
