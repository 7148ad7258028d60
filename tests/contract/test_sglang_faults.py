"""The engine over servers that are broken in one way each: a clear error or a recovery, and nothing lost.

Tokens of the server are a function of their place, so an answer says by itself whether one was lost or came twice.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_core.config import SglangEngineConfig, TinyModel
from rl_core.errors import ConfigError, DeadlinePassed, DeadPart, EngineStartFailed, WeightsDamaged
from rl_core.rollout.engine import Loan
from rl_core.rollout.sglang import supervision
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.rollout.sglang.serving import AnswerFailed
from rl_core.rollout.sglang.swapping import WeightsRefused
from rl_core.tiny_model import make_tiny_model
from rl_core.types import Completion, GenerateRequest, Sampling, WeightVersion
from rl_core.weights import WEIGHTS_FILE, digest_tensors, read_tensors, write_weights
from tests.contract.sglang_faults import FaultyServer, token_at
from tests.sglang_answers import wait_for

DEADLINE_S = 30
PROMPT = 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_model(directory, TinyModel(warmup_steps=0), 1, (), 60, lambda done, total: None)
    return directory


@pytest.fixture
def servers(model_dir: Path) -> Iterator[list[FaultyServer]]:
    started = [FaultyServer(model_dir), FaultyServer(model_dir)]
    yield started
    for server in started:
        server.stop()


@pytest.fixture
def open_engine(model_dir: Path) -> Iterator[Callable[..., SglangEngine]]:
    """Opens engines over servers as if they were its own processes, and closes them."""
    opened: list[SglangEngine] = []

    def open_one(*servers: FaultyServer, **settings: Any) -> SglangEngine:
        config = SglangEngineConfig.model_validate({
            "device": "cpu", "dtype": "float32", "request_s": 0.5, "stream_interval": 4, "start_s": 5} | settings)
        opened.append(engine := SglangEngine(model_dir, config=config, processes=() if config.urls else servers,
                                             swap_s=2.0))
        return engine

    yield open_one
    for engine in opened:
        engine.close()


def publication(model_dir: Path, root: Path, idx: int, v: int | None = None) -> tuple[WeightVersion, Path]:
    """Version `v` (default: its index) of random weights."""
    generator = torch.Generator().manual_seed(idx)
    tensors = {name: torch.randn(tensor.shape, generator=generator)
               for name, tensor in read_tensors(model_dir / WEIGHTS_FILE).items()}
    directory = root / f"v-{idx}"
    write_weights(directory, tensors)
    version = WeightVersion(v=idx if v is None else v, step=idx, idx=idx, attempt=1,
                            digest=digest_tensors(tensors.items()))
    return version, directory


def request(i: int = 0, tokens: int = 20, prompt: int = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=f"r{i}", token_ids_P=np.arange(6, 6 + prompt, dtype=np.int32) + i % 8, seed=i,
                           sampling=Sampling(**{"max_new_tokens": tokens, **sampling}))


def is_whole(answer: Completion, tokens: int = 20, prompt: int = PROMPT) -> bool:
    """Every token once, in its place, with a log-prob and a version."""
    return (answer.token_ids_L.tolist() == [token_at(prompt + i) for i in range(tokens)]
            and len(answer.logprobs_L) == tokens and answer.version_runs.end_R[-1] == tokens
            and answer.finish_reason == "length")


def count(engine: SglangEngine, name: str) -> float:
    return sum(counts[name] for counts in engine.counters().values())


# -- requests


RECOVERED = {"500": 0, "hang": 0, "silent": 4, "drop": 4, "half_json": 0, "abort": 4, "outside": 0, "eat": 0}
"""Fault -> tokens that a first try brings home."""


@pytest.mark.parametrize("fault", RECOVERED)
def test_a_request_goes_on_with_its_tokens_so_far(fault: str, servers: list[FaultyServer],
                                                  open_engine: Callable[..., SglangEngine]) -> None:
    server = servers[0]
    engine = open_engine(server)
    server.fault[fault] = 1
    answer = engine.submit(request()).result(DEADLINE_S)
    assert is_whole(answer)
    first, *_, last = server.asked
    assert len(server.asked) == 2
    assert len(last["input_ids"]) - len(first["input_ids"]) == RECOVERED[fault]
    assert last["sampling_params"]["max_new_tokens"] == 20 - RECOVERED[fault]
    assert len({body["rid"] for body in server.asked}) == 2 and len(first["rid"]) == len(last["rid"])
    assert engine.running == 0


def test_many_faults_lose_no_request_and_answer_none_twice(servers: list[FaultyServer],
                                                           open_engine: Callable[..., SglangEngine]) -> None:
    engine = open_engine(*servers)
    for server in servers:
        server.fault.update({"500": 3, "drop": 9, "half_json": 3, "abort": 3, "outside": 2})
    answers = [future.result(DEADLINE_S) for future in [engine.submit(request(i)) for i in range(64)]]
    assert all(is_whole(answer) for answer in answers)
    assert [answer.request_id for answer in answers] == [f"r{i}" for i in range(64)]
    assert count(engine, "retries") >= 30


def test_what_the_server_refuses_is_a_value_error_of_that_request_alone(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine]) -> None:
    engine = open_engine(servers[0])
    servers[0].fault["refuse"] = 1
    with pytest.raises(ValueError, match="longer than the model's context"):
        engine.submit(request(0)).result(DEADLINE_S)
    assert is_whole(engine.submit(request(1)).result(DEADLINE_S))


REFUSED_HERE = {"an id outside": {"prompt": [10**6]}, "an id below": {"prompt": [-1]}, "empty": {"prompt": []},
                "greedy": {"temperature": 0.0}, "nucleus": {"top_p": 0.9}}


@pytest.mark.parametrize("case", REFUSED_HERE)
def test_what_would_kill_a_server_is_never_sent(case: str, servers: list[FaultyServer],
                                                open_engine: Callable[..., SglangEngine]) -> None:
    engine = open_engine(servers[0])
    asked = dict(REFUSED_HERE[case])
    ids = np.array(asked.pop("prompt", [7]), np.int32)
    one = GenerateRequest(request_id="r", token_ids_P=ids, seed=1, sampling=Sampling(max_new_tokens=4, **asked))
    with pytest.raises(ValueError, match="request 'r'"):
        engine.submit(one).result(DEADLINE_S)
    assert servers[0].asked == []


def test_a_greedy_answer_that_is_no_data_is_sampled_beside_those_that_are(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine]) -> None:
    engine = open_engine(servers[0])
    trained, greedy = request(0), replace(request(1, temperature=0.0), trained=False)
    answers = [future.result(DEADLINE_S) for future in [engine.submit(trained), engine.submit(greedy)]]
    assert all(map(is_whole, answers))
    assert sorted(asked["sampling_params"]["temperature"] for asked in servers[0].asked) == [0.0, 1.0]


def test_a_request_that_brings_no_token_fails_alone_and_the_server_is_replaced(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine]) -> None:
    engine = open_engine(servers[0], restarts=1)
    servers[0].fault["500"] = supervision.FAILURES
    for future in [engine.submit(request(i)) for i in range(2)]:
        with pytest.raises(AnswerFailed, match=r"6 tries brought no token.*status 500"):
            future.result(DEADLINE_S)
    assert is_whole(engine.submit(request(2)).result(DEADLINE_S))
    assert count(engine, "restarts") == 1


def test_a_cancelled_request_answers_with_its_tokens_so_far(servers: list[FaultyServer],
                                                            open_engine: Callable[..., SglangEngine]) -> None:
    servers[0].delay_s = 0.05
    engine = open_engine(servers[0])
    future = engine.submit(request(0, tokens=1000))
    while not count(engine, "tokens"):
        time.sleep(0.01)
    engine.cancel("r0")
    engine.cancel("nobody")
    answer = future.result(DEADLINE_S)
    made = len(answer.token_ids_L)
    assert answer.finish_reason == "cancelled" and 4 <= made < 1000
    assert answer.token_ids_L.tolist() == [token_at(PROMPT + i) for i in range(made)]
    assert servers[0].aborted[0] == servers[0].asked[0]["rid"]


def test_closing_resolves_everything_with_its_tokens_so_far(servers: list[FaultyServer],
                                                            open_engine: Callable[..., SglangEngine]) -> None:
    servers[0].delay_s = 0.05
    engine = open_engine(servers[0], max_outstanding_tokens=2500)
    futures = [engine.submit(request(i, tokens=1000)) for i in range(4)]
    while count(engine, "tokens") < 16:  # four chunks: both that run have had one
        time.sleep(0.01)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 2
    assert [future.result(0).finish_reason for future in futures] == ["cancelled"] * 4
    assert [len(future.result(0).token_ids_L) > 0 for future in futures] == [True, True, False, False]
    with pytest.raises(DeadPart, match="closed"):
        engine.submit(request(9)).result(0)


# -- servers


def test_no_sglang_server_at_all_is_said_so(servers: list[FaultyServer],
                                            open_engine: Callable[..., SglangEngine]) -> None:
    servers[0].fault["foreign"] = 1
    with pytest.raises(EngineStartFailed, match=r"cannot be used: .*/server_info|no JSON"):
        open_engine(servers[0])


def test_a_server_that_streams_from_the_beginning_is_refused_with_the_flag(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine]) -> None:
    servers[0].fault["cumulative"] = 1
    with pytest.raises(EngineStartFailed, match="--incremental-streaming-output"):
        open_engine(servers[0])


def test_what_the_checks_refuse_ends_the_start(servers: list[FaultyServer], model_dir: Path) -> None:
    def check(url: str) -> None:
        raise ConfigError(f"server {url} serves another model")

    config = SglangEngineConfig(device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="another model"):
        SglangEngine(model_dir, config=config, processes=servers[:1], check=check)


def test_requests_of_a_server_that_dies_go_on_elsewhere_and_it_comes_back_with_the_current_weights(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path, tmp_path: Path) -> None:
    for server in servers:
        server.delay_s = 0.02
    engine = open_engine(*servers)
    engine.swap(*publication(model_dir, tmp_path, 1))
    futures = [engine.submit(request(i, tokens=200)) for i in range(16)]
    while min(counts["tokens"] for counts in engine.counters().values()) < 64:
        time.sleep(0.01)
    before, begun = servers[0].url, time.monotonic()
    servers[0].stop()
    answers = [future.result(DEADLINE_S) for future in futures]
    assert all(is_whole(answer, 200) for answer in answers)
    assert all(answer.version_runs.version_R.tolist() == [1] for answer in answers)
    while servers[0].version != "1":
        time.sleep(0.01)
        assert time.monotonic() - begun < 3 + 2
    assert servers[0].url != before
    assert (count(engine, "restarts"), count(engine, "thrown_tokens")) == (1, 0)
    asked = len(servers[0].asked)
    for i in itertools.count(1):  # it has the weights a moment before it has room; every round has prompts of its own
        some = [engine.submit(request(8 * i + j, prompt=PROMPT + i)) for j in range(4)]
        assert all(is_whole(future.result(DEADLINE_S), prompt=PROMPT + i) for future in some)
        if len(servers[0].asked) > asked:
            break
        assert time.monotonic() - begun < DEADLINE_S
        time.sleep(0.05)


def test_a_death_is_seen_in_three_seconds_even_while_nothing_runs(servers: list[FaultyServer],
                                                                  open_engine: Callable[..., SglangEngine]) -> None:
    engine = open_engine(servers[0])
    servers[0].stop()
    begun = time.monotonic()
    while not count(engine, "restarts"):
        assert time.monotonic() - begun < 3
        time.sleep(0.01)


def test_over_its_restarts_the_engine_is_dead_with_the_last_words_of_the_log(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine]) -> None:
    servers[0].delay_s = 0.05
    engine = open_engine(servers[0], restarts=2)
    future = engine.submit(request(0, tokens=2000))
    servers[0].fault["start"] = 5
    servers[0].stop()
    with pytest.raises(DeadPart, match=r"(?s)rollout\.engine\.restarts is 2"):
        future.result(DEADLINE_S)
    with pytest.raises(DeadPart, match="the last line of its log"):
        engine.submit(request(1)).result(0)


def test_servers_of_somebody_else_may_go_and_come_back(servers: list[FaultyServer],
                                                       open_engine: Callable[..., SglangEngine]) -> None:
    for server in servers:
        server.start()
    engine = open_engine(urls=tuple(server.url for server in servers))
    servers[0].stop()
    answers = [future.result(DEADLINE_S) for future in [engine.submit(request(i)) for i in range(16)]]
    assert all(is_whole(answer) for answer in answers)


# -- weights


def test_refused_weights_are_a_named_error_and_the_old_ones_stay(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path, tmp_path: Path) -> None:
    engine = open_engine(servers[0])
    first, second = publication(model_dir, tmp_path, 1), publication(model_dir, tmp_path, 2)
    assert engine.swap(*first) == first[0].digest
    servers[0].fault["update_refused"] = 1
    with pytest.raises(WeightsRefused, match="Failed to get weights iterator"):
        engine.swap(*second)
    assert engine.served == first[0] and not servers[0].paused
    answer = engine.submit(request()).result(DEADLINE_S)
    assert is_whole(answer) and answer.version_runs.version_R.tolist() == [1]
    assert engine.swap(*second) == second[0].digest


def test_weights_whose_bytes_are_not_those_of_their_version_never_reach_a_server(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path, tmp_path: Path) -> None:
    engine = open_engine(servers[0])
    version, _ = publication(model_dir, tmp_path, 1)
    _, other = publication(model_dir, tmp_path, 2)
    with pytest.raises(WeightsDamaged):
        engine.swap(version, other)
    assert servers[0].version == "default" and engine.served is None


@pytest.mark.parametrize("fault", ["update_ignored", "update_500", "update_hangs"])
def test_a_server_that_holds_other_weights_than_it_says_is_replaced(
        fault: str, servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path,
        tmp_path: Path) -> None:
    engine = open_engine(servers[0])
    version, directory = publication(model_dir, tmp_path, 1)
    servers[0].fault[fault] = 1
    assert engine.swap(version, directory) == version.digest
    assert count(engine, "restarts") == 1 and servers[0].version == "1"
    assert servers[0].checksums == FaultyServer._checksums(directory)
    assert is_whole(engine.submit(request()).result(DEADLINE_S))


def test_a_version_that_runs_backwards_is_refused(servers: list[FaultyServer],
                                                  open_engine: Callable[..., SglangEngine], model_dir: Path,
                                                  tmp_path: Path) -> None:
    engine = open_engine(servers[0])
    engine.swap(*publication(model_dir, tmp_path, 2))
    with pytest.raises(ValueError, match="runs backwards"):
        engine.swap(*publication(model_dir, tmp_path, 1))
    engine.swap(*publication(model_dir, tmp_path, 2, v=5))
    assert engine.served is not None and engine.served.v == 5


def test_tokens_whose_versions_run_backwards_are_thrown_away_and_the_server_is_replaced(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path, tmp_path: Path) -> None:
    engine = open_engine(servers[0])
    for idx in (0, 1):
        engine.swap(*publication(model_dir, tmp_path, idx))
    servers[0].fault["backwards"] = 1
    answer = engine.submit(request()).result(DEADLINE_S)
    assert is_whole(answer) and answer.version_runs.version_R.tolist() == [1]
    assert (count(engine, "thrown_tokens"), count(engine, "restarts")) == (20, 1)


def test_weights_that_somebody_else_changed_are_seen(servers: list[FaultyServer],
                                                     open_engine: Callable[..., SglangEngine], model_dir: Path,
                                                     tmp_path: Path) -> None:
    engine = open_engine(servers[0])
    engine.swap(*publication(model_dir, tmp_path, 1))
    servers[0].version = "77"
    begun = time.monotonic()
    while servers[0].version != "1":
        assert time.monotonic() - begun < 5
        time.sleep(0.01)
    assert count(engine, "restarts") == 1


def test_an_answer_is_never_continued_by_older_weights(servers: list[FaultyServer],
                                                       open_engine: Callable[..., SglangEngine], model_dir: Path,
                                                       tmp_path: Path) -> None:
    for server in servers:
        server.delay_s = 0.01
    engine = open_engine(*servers)
    for idx in range(1, 8):
        futures = [engine.submit(request(100 * idx + i, tokens=80)) for i in range(8)]
        for server in servers:
            server.fault["drop"] = 4
        engine.swap(*publication(model_dir, tmp_path, idx))
        for answer in [future.result(DEADLINE_S) for future in futures]:
            versions = answer.version_runs.version_R.tolist()
            assert is_whole(answer, 80) and versions == sorted(versions)


# -- a server is lent


def lent_and_other(servers: list[FaultyServer], loan: Loan) -> tuple[FaultyServer, FaultyServer]:
    [lent] = [server for server in servers if server.url == loan.url]
    [other] = [server for server in servers if server is not lent]
    return lent, other


def test_a_lent_server_serves_its_version_alone_and_comes_back_with_the_current_one(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path, tmp_path: Path) -> None:
    for server in servers:
        server.delay_s = 0.01
    engine = open_engine(*servers)
    first, second, third = (publication(model_dir, tmp_path, idx) for idx in (1, 2, 3))
    engine.swap(*first)
    engine.swap(*second)
    futures = [engine.submit(request(i, tokens=200)) for i in range(16)]
    wait_for(lambda: min(counts["tokens"] for counts in engine.counters().values()) >= 16)
    loan = engine.lend(*first, wait_s=5, for_s=60)
    lent, other = lent_and_other(servers, loan)
    assert (loan.version, lent.version, other.version) == (first[0], "1", "2")
    assert lent.checksums == FaultyServer._checksums(first[1])
    asked = len(lent.asked)
    futures += [engine.submit(request(16 + i, tokens=40)) for i in range(4)]
    engine.swap(*third)
    answers = [future.result(DEADLINE_S) for future in futures]
    assert all(is_whole(answer, 200 if i < 16 else 40) for i, answer in enumerate(answers))
    assert {version for answer in answers for version in answer.version_runs.version_R.tolist()} == {2, 3}
    assert (len(lent.asked), lent.version, other.version, engine.served) == (asked, "1", "3", third[0])
    engine.take_back(loan.id)
    engine.take_back(loan.id)
    assert lent.version == "3" and not lent.paused
    futures = [engine.submit(request(8 * i, tokens=8, prompt=9 + i)) for i in range(4)]  # no server has these prompts
    assert all(is_whole(future.result(DEADLINE_S), 8, 9 + i) for i, future in enumerate(futures))
    assert len(lent.asked) > asked
    assert (count(engine, "restarts"), count(engine, "retries"), count(engine, "thrown_tokens")) == (0, 0, 0)


def test_a_loan_ends_by_itself_when_its_time_is_over_and_when_the_next_one_begins(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path, tmp_path: Path) -> None:
    engine = open_engine(*servers)
    first, second = (publication(model_dir, tmp_path, idx) for idx in (1, 2))
    engine.swap(*first)
    engine.swap(*second)
    for for_s in (60.0, 0.3):
        loan = engine.lend(*first, wait_s=5, for_s=for_s)
        lent, other = lent_and_other(servers, loan)
        assert (lent.version, other.version) == ("1", "2")
    wait_for(lambda: lent.version == "2", 5)
    engine.take_back(loan.id)
    assert count(engine, "restarts") == 0


def test_a_lent_server_that_dies_is_started_again_for_rollout(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path, tmp_path: Path) -> None:
    engine = open_engine(*servers)
    first, second = (publication(model_dir, tmp_path, idx) for idx in (1, 2))
    engine.swap(*first)
    engine.swap(*second)
    loan = engine.lend(*first, wait_s=5, for_s=60)
    lent, _ = lent_and_other(servers, loan)
    lent.stop()
    wait_for(lambda: lent.url != loan.url and lent.version == "2", 5)
    engine.take_back(loan.id)
    assert lent.version == "2" and count(engine, "restarts") == 1
    again = engine.lend(*first, wait_s=5, for_s=60)
    assert again.url in {server.url for server in servers}


def test_the_only_server_that_is_there_is_not_lent(servers: list[FaultyServer],
                                                   open_engine: Callable[..., SglangEngine], model_dir: Path,
                                                   tmp_path: Path) -> None:
    engine = open_engine(servers[0])
    engine.swap(*publication(model_dir, tmp_path, 2))
    with pytest.raises(DeadlinePassed, match=r"no server can be spared: 1 of 1 were there for 0\.1 s"):
        engine.lend(*publication(model_dir, tmp_path, 1), wait_s=0.1, for_s=60)
    assert servers[0].version == "2" and is_whole(engine.submit(request()).result(DEADLINE_S))


def test_weights_that_a_server_refuses_are_not_lent_and_it_stays_with_rollout(
        servers: list[FaultyServer], open_engine: Callable[..., SglangEngine], model_dir: Path, tmp_path: Path) -> None:
    engine = open_engine(*servers)
    engine.swap(*publication(model_dir, tmp_path, 2))
    for server in servers:
        server.fault["update_refused"] = 1
    with pytest.raises(WeightsRefused):
        engine.lend(*publication(model_dir, tmp_path, 1), wait_s=5, for_s=60)
    assert [server.version for server in servers] == ["2", "2"] and count(engine, "restarts") == 0
    assert engine.lend(*publication(model_dir, tmp_path, 3), wait_s=5, for_s=60).version.v == 3


def test_a_borrower_asks_as_it_likes_and_believes_no_other_version(servers: list[FaultyServer], model_dir: Path,
                                                                   tmp_path: Path) -> None:
    version, directory = publication(model_dir, tmp_path, 1)
    with servers[0] as server:
        config = SglangEngineConfig(device="cpu", dtype="float32", urls=(server.url,), start_s=0.5)
        loan = Loan("loan", server.url, version)
        with pytest.raises(EngineStartFailed, match="is lent at version 1 and says that it serves 'default'"):
            SglangEngine(model_dir, config=config, loan=loan)
        server.version = "1"
        engine = SglangEngine(model_dir, config=config, loan=loan)
        assert engine.served == version and engine.swap(version, directory) == version.digest
        with pytest.raises(ValueError, match="is lent at version 1"):
            engine.swap(*publication(model_dir, tmp_path, 2))
        answer = engine.submit(request(temperature=0.0, top_p=0.9, top_k=7)).result(DEADLINE_S)
        assert is_whole(answer) and answer.version_runs.version_R.tolist() == [1]
        asked = server.asked[-1]
        assert [asked["sampling_params"][name] for name in ("temperature", "top_p", "top_k")] == [0.0, 0.9, 7]
        assert asked["extra_key"] == "loan-1"
        server.delay_s = 0.05
        future = engine.submit(request(1, tokens=400))
        server.version = "2"
        with pytest.raises(DeadPart, match=r"is lent at version 1 and says that it serves '2'"):
            future.result(DEADLINE_S)
        engine.close()
