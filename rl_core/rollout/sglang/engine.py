"""The engine over SGLang servers: token ids out, token ids and log-probs back, over HTTP.

One thread with one asyncio loop holds all state; what other threads call hands over to it. What it is put together of:

    serving.py       requests, each over as many tries and servers as it takes; queueing.py, router.py: which server
    publishing.py    weights over all servers, one after the other; swapping.py: one server takes them
    supervision.py   servers are started, watched, started again
    lending.py       one server serves another version for a while

    consumes: submitted requests, offered versions, what servers say
    waits for: any of them
    unblocked by: submit, cancel, swap, lend, take_back, close, a server
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import torch
import xxhash

from rl_core.config import SglangEngineConfig
from rl_core.errors import DeadPart
from rl_core.model_setup import check_model
from rl_core.rollout.engine import Loan
from rl_core.rollout.requests import check_request
from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.answering import Answering
from rl_core.rollout.sglang.client import open_session
from rl_core.rollout.sglang.lending import Lending
from rl_core.rollout.sglang.publishing import Publishing, Sender
from rl_core.rollout.sglang.queueing import Queue
from rl_core.rollout.sglang.serving import Requests
from rl_core.rollout.sglang.supervision import Process, Replica, Supervisor
from rl_core.rollout.sglang.swapping import Offered, Published
from rl_core.rollout.sglang.wire import ReplicaFailed
from rl_core.types import Completion, GenerateRequest, WeightVersion
from rl_core.weights import WEIGHTS_FILE, load_weights

CLOSE_S = 5.0
Check = Callable[[str], None]
"""Asks the server at an address, in a thread, whether it fits the run; raises ConfigError."""
T = TypeVar("T")


class SglangEngine:
    """See rl_core/rollout/engine.py for the promises; it is a Lender. `served` is None, and tokens carry version -1,
    before a swap.

        engine = SglangEngine(run.model, config=config.rollout.engine, processes=[SglangServer(...)], context=2048)

    `processes` are the servers that this engine starts and ends; without them it uses `config.urls`. Returns when all
    of them serve. `context`: longest prompt and answer together, tokens; None = the model's own. `check` is asked about
    every server before it serves, again after every start. `sender` says where weights are sent from (sending.py), with
    transport `collective`. A server that takes longer than `swap_s` for a step of a swap is given up. `loan`: the
    server is somebody else's, and serves the version of the loan and no other; any sampling is allowed then.
    """

    def __init__(self, model_dir: Path, *, config: SglangEngineConfig, processes: Sequence[Process] = (),
                 context: int | None = None, check: Check | None = None, sender: Sender | None = None,
                 swap_s: float = 60.0, loan: Loan | None = None) -> None:
        """Raises EngineStartFailed, with the tail of the log, for a server that does not come; what `check` raises."""
        facts = check_model(model_dir)
        self._config, self._check, self._loan = config, check, loan
        self._vocabulary = facts.vocabulary
        self._context = facts.context if context is None else min(context, facts.context)
        self._ends = frozenset(facts.eos_token_ids)
        self._closing = threading.Lock()
        self._closed = False
        # All below belongs to the loop.
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._replicas = [Replica(f"server-{i}", process) for i, process in enumerate(processes)] or \
            [Replica(f"server-{i}", None, url=url) for i, url in enumerate(config.urls)]
        self._offered = Offered()
        self._queue = Queue(self._replicas, self._offered.index_of)
        self._requests = Requests(
            self._queue, self._offered, config, vocabulary=self._vocabulary, ends=self._ends, loop=self._loop,
            start=self._task, cache_space="" if loan is None else f"{loan.id}-")
        self._publishing = Publishing(self._replicas, self._requests, self._queue, self._offered, config,
                                      model_dir=model_dir, sender=sender, swap_s=swap_s)
        self._lending = Lending(self._replicas, self._queue, self._requests, self._publishing, joined=self._joined,
                                move_s=swap_s)
        self._thread = threading.Thread(target=self._run_loop, name="sglang-engine", daemon=True)
        self._thread.start()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._run(self._open()).result()
            undo.pop_all()

    # -- called from any thread

    @property
    def served(self) -> WeightVersion | None:
        return self._publishing.served if self._loan is None else self._loan.version

    @property
    def running(self) -> int:
        return self._requests.running

    @property
    def context(self) -> int:
        """Longest prompt and answer together, tokens."""
        return self._context

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return self._vocabulary

    def counters(self) -> dict[str, dict[str, float]]:
        """What each server has done since the engine began: `{"server-0": {"tokens": 1024.0, ...}}`; the fields are
        those of supervision.Counts."""
        return {replica.name: replica.counts.as_floats() for replica in self._replicas}

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()
        try:
            check_request(request, self._vocabulary, self._context)
            refused = wire.refused_sampling(request.sampling) if self._loan is None and request.trained else None
            if refused is not None:
                raise ValueError(f"request {request.request_id!r}: {refused}")
        except ValueError as error:
            future.set_exception(error)
            return future
        prompt = request.token_ids_P
        self._requests.add(Answering(
            request, future, session=xxhash.xxh3_64_hexdigest(prompt.tobytes()), ends=self._ends,
            limit=min(request.sampling.max_new_tokens, self._context - len(prompt))))
        return future

    def cancel(self, request_id: str) -> None:
        self._requests.cancel(request_id)

    def swap(self, version: WeightVersion, weights_dir: Path) -> str:
        """Read and verified in the caller's thread; then one server after the other, each standing still for its own
        swap. Raises WeightsRefused where a server keeps its old weights (the others keep theirs, too), ValueError for a
        version that runs backwards or that is not the loan's, DeadPart when no server is left."""
        served = self.served
        if version == served:
            return version.digest
        if self._loan is not None:
            raise ValueError(f"version {version.v}: the server is lent at version {self._loan.version.v}")
        if served is not None and (version.idx, version.v) < (served.idx, served.v):
            raise ValueError(f"version {version.v} (publication {version.idx}) runs backwards: the engine serves "
                             f"version {served.v} (publication {served.idx})")
        published = self._published(version, weights_dir)
        self._requests.check()
        self._answered(self._publishing.publish(published))
        return version.digest

    def lend(self, version: WeightVersion, weights_dir: Path, *, wait_s: float, for_s: float) -> Loan:
        published = self._published(version, weights_dir)
        self._requests.check()
        return self._answered(self._lending.lend(published, wait_s=wait_s, for_s=for_s))

    def take_back(self, loan_id: str) -> None:
        self._requests.check()
        self._answered(self._lending.take_back(loan_id))

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._requests.refuse_more("engine sglang: closed")
        if self._thread.is_alive():
            closing = self._run(self._close())
            try:
                closing.result(CLOSE_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                if threading.current_thread() is not self._thread:
                    self._thread.join(CLOSE_S)

    def _published(self, version: WeightVersion, weights_dir: Path) -> Published:
        """Raises WeightsDamaged."""
        tensors: dict[str, torch.Tensor] = {}
        if self._config.transport == "disk" or (weights_dir / WEIGHTS_FILE).exists():
            tensors = load_weights(weights_dir, version)  # else the sender verifies it
        return Published(version, Path(os.path.abspath(weights_dir)),
                         tensors if self._publishing.hashes_known else {})

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _answered(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._run(coroutine).result()
        except CancelledError:
            raise self._requests.dead() from None

    # -- opening and closing

    async def _open(self) -> None:
        session = self._session = open_session()
        supervisor = Supervisor(
            self._replicas, session, silence_s=self._config.request_s, restarts=self._config.restarts,
            start_s=self._config.start_s, join=self._join, joined=self._joined, lost=self._lost, over=self._die)
        await supervisor.start()
        for replica in self._replicas:
            self._task(supervisor.watch(replica))

    async def _close(self) -> None:
        self._requests.finish_all()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ends = [asyncio.to_thread(replica.process.stop, 0.0) for replica in self._replicas if replica.process]
        await asyncio.gather(*ends, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _die(self, error: DeadPart) -> None:
        self._requests.refuse_more(f"engine sglang: {error}")
        self._requests.finish_all(self._requests.dead())
        self._publishing.changed.set()

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task's edge: whoever waits must hear of what nobody expected."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(DeadPart(f"died of {error!r}"))

    # -- servers come and go

    async def _join(self, replica: Replica) -> None:
        """A server that answers is checked and given the current weights."""
        if self._check is not None:
            await asyncio.to_thread(self._check, replica.url)
        if self._loan is None:
            await self._publishing.welcome(replica)
            return
        version, said = self._loan.version, (await replica.connected().model_info()).version
        if said != str(version.v):
            raise ReplicaFailed(f"{replica.url}: is lent at version {version.v} and says that it serves {said!r}")
        self._offered.add(version)
        replica.version = version

    def _joined(self, replica: Replica) -> None:
        assert replica.info is not None
        self._queue.add(replica, limit=self._config.max_outstanding_tokens or replica.info.capacity,
                        most=self._config.max_running)
        self._publishing.changed.set()

    def _lost(self, replica: Replica, error: ReplicaFailed) -> None:
        """Its streams break off by themselves, or are ended by their requests' own deadline."""
        self._queue.remove(replica)
        self._requests.lost(replica.place)
