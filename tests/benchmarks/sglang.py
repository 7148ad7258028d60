"""The engine over a real SGLang server on this machine's CPU (docs/sglang.md): needs the environment of `make sglang`.

`engine_vs_bare`: tokens a second of the engine, of those that a bare client of the same server gets, in turn in one
run: eight connections that post and wait for the whole answer with its log-probs. `swap_*`: weights change under eight
answers. `two_hundred_swaps/*`: under a load that never ends; every answer must be whole, once, and say its versions.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import aiohttp

from rl_core.config import SglangEngineConfig
from rl_core.rollout.sglang.engine import SglangEngine
from rl_core.rollout.sglang.server import SglangServer
from rl_core.rollout.sglang.wire import GENERATE
from rl_core.types import Completion, WeightVersion
from tests.benchmarks.measure import figure, side_by_side
from tests.serving import ENGINE, PYTHON, spread_model
from tests.sglang_answers import count, endless, is_whole, publication, request, runs

AT_ONCE = 8
ANSWERS, TOKENS, PROMPT = 48, 256, 64
ROUNDS = 5
SWAPS = 200
VARIANTS = 4
"""Different weights; versions take them in turn."""
WARM = 40
"""Swaps before memory is looked at."""
LOADED_TOKENS = 120
WAIT_S = 600.0


def figures() -> Iterator[dict[str, Any]]:
    if not PYTHON.exists():
        yield figure("sglang/engine_vs_bare", None, "x", ">= 0.9", reason="no environment: make sglang")
        return
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        root = Path(name)
        model_dir = endless(spread_model(root / "spread", seed=1), root / "model")
        config = SglangEngineConfig.model_validate({**ENGINE, "stream_interval": 128})
        server = SglangServer(model_dir, config=config, log=root / "server.log", context=2048)
        engine = SglangEngine(model_dir, config=config, processes=[server])
        weights = [publication(model_dir, root, i) for i in range(VARIANTS)]
        try:
            yield from throughput(engine, server.url)
            yield from one_swap_at_a_time(engine, weights)
            yield from two_hundred_swaps(engine, server, weights)
        finally:
            engine.close()


def throughput(engine: SglangEngine, url: str) -> Iterator[dict[str, Any]]:
    requests = [request(i, TOKENS, prompt=PROMPT) for i in range(ANSWERS)]

    def by_engine() -> None:
        pending: set[Future[Completion]] = set()
        for one in requests:
            if len(pending) == AT_ONCE:
                done, pending = wait(pending, WAIT_S, FIRST_COMPLETED)
                assert all(is_whole_now(future) for future in done)
            pending.add(engine.submit(one))
        assert all(is_whole_now(future) for future in pending)

    def is_whole_now(future: Future[Completion]) -> bool:
        return len(future.result(WAIT_S).token_ids_L) == TOKENS

    def bare() -> None:
        asyncio.run(bare_client(url, [one.token_ids_P.tolist() for one in requests]))

    by_engine()
    seconds = side_by_side(by_engine, bare, rounds=ROUNDS)
    tokens = ANSWERS * TOKENS
    yield figure("sglang/engine_vs_bare", seconds[1] / seconds[0], "x", ">= 0.9", ours=round(tokens / seconds[0]),
                 bare=round(tokens / seconds[1]), rate="tokens/s", at_once=AT_ONCE)
    yield figure("sglang/bytes_per_token", count(engine, "bytes_read") / count(engine, "tokens"), "bytes")


async def bare_client(url: str, prompts: list[list[int]]) -> None:
    """Eight connections: post, wait for the whole answer, read it."""
    waiting = iter(prompts)

    async def one(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            body = {"input_ids": prompt, "return_logprob": True,
                    "sampling_params": {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}}
            async with session.post(url + GENERATE, json=body) as answer:
                assert len((await answer.json())["meta_info"]["output_token_logprobs"]) == TOKENS

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session) for _ in range(AT_ONCE)))


def one_swap_at_a_time(engine: SglangEngine, weights: list[tuple[WeightVersion, Path]]) -> Iterator[dict[str, Any]]:
    """Under eight answers each; the standstill is from the order to pause until the server has said that it goes on."""
    stills: list[float] = []
    mixed = 0
    for v in range(20):
        futures = [engine.submit(request(100_000 + 100 * v + i, 600)) for i in range(AT_ONCE)]
        wait_for_tokens(engine, 400)
        before = count(engine, "paused_s")
        swap(engine, weights, v)
        stills.append(count(engine, "paused_s") - before)
        answers = [future.result(WAIT_S) for future in futures]
        assert all(is_whole(answer, 600) for answer in answers)
        mixed += sum(len(runs(answer)) > 1 for answer in answers)
    yield figure("sglang/swap_standstill", 1e3 * statistics.median(stills), "ms", "<= 100",
                 largest=round(1e3 * max(stills), 1), swaps=len(stills), mixed_answers=mixed)
    yield figure("sglang/swap_thrown_tokens", count(engine, "thrown_tokens") + count(engine, "reread_tokens"), "tokens",
                 "<= 0")


def two_hundred_swaps(engine: SglangEngine, server: SglangServer,
                      weights: list[tuple[WeightVersion, Path]]) -> Iterator[dict[str, Any]]:
    pending: dict[str, Future[Completion]] = {}
    seen: dict[str, int] = {}
    broken = mixed = 0
    client: list[float] = []
    servers: list[float] = []

    def settle(name: str, future: Future[Completion]) -> None:
        nonlocal broken, mixed
        answer = future.result(WAIT_S)
        seen[answer.request_id] = seen.get(answer.request_id, 0) + 1
        broken += answer.request_id != name or not is_whole(answer, LOADED_TOKENS)
        mixed += len(runs(answer)) > 1

    serial = 0
    for v in range(20, 20 + SWAPS):
        for name in [name for name, future in pending.items() if future.done()]:
            settle(name, pending.pop(name))
        while len(pending) < 2 * AT_ONCE:
            one = request(serial, LOADED_TOKENS)
            pending[one.request_id] = engine.submit(one)
            serial += 1
        wait_for_tokens(engine, 200)
        swap(engine, weights, v)
        client.append(resident_mb([os.getpid()]))
        servers.append(resident_mb(session_of(server.pid)))
    for name, future in list(pending.items()):
        settle(name, future)
    name = "sglang/two_hundred_swaps"
    yield figure(f"{name}/lost", serial - len(seen), "requests", "<= 0", requests=serial, mixed_answers=mixed)
    yield figure(f"{name}/answered_twice", sum(times - 1 for times in seen.values()), "requests", "<= 0")
    yield figure(f"{name}/cut_short_or_without_versions", broken, "requests", "<= 0")
    yield figure(f"{name}/client_growth", client[-1] - client[WARM], "MB", "<= 16", resident=round(client[-1]))
    yield figure(f"{name}/server_growth", servers[-1] - servers[WARM], "MB", "<= 64", resident=round(servers[-1]))


def swap(engine: SglangEngine, weights: list[tuple[WeightVersion, Path]], v: int) -> None:
    """Version `v`, with one of the few weights."""
    base, directory = weights[v % VARIANTS]
    engine.swap(WeightVersion(v=v, step=v, idx=v, attempt=1, digest=base.digest), directory)


def wait_for_tokens(engine: SglangEngine, tokens: int) -> None:
    until = count(engine, "tokens") + tokens
    deadline = time.monotonic() + WAIT_S
    while count(engine, "tokens") < until and engine.running:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def session_of(pid: int) -> list[int]:
    """The processes of the server's session."""
    mine = os.getsid(pid)
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == mine:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def resident_mb(pids: list[int]) -> float:
    """Resident memory, pages that several share counted for each."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except FileNotFoundError:
            continue
        total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), 0)
    return total / 1024
