"""The engine over SGLang servers: token ids out, token ids and log-probs back, over HTTP.

One thread with one asyncio loop holds all state; what other threads call hands over to it. A request waits until a
server has room (queueing.py, router.py), streams its tokens, and goes on elsewhere with its tokens so far when its
server dies or ends it. Servers are watched and started again by supervision.py, and take new weights one after the
other (swapping.py).

    consumes: submitted requests, offered versions, what servers say
    waits for: any of them
    unblocked by: submit, cancel, swap, close, a server
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import torch
import xxhash

from rl_core.config import SglangEngineConfig
from rl_core.errors import DeadPart, WeightsDamaged
from rl_core.model_setup import check_model, weight_files
from rl_core.rollout.requests import check_request, empty_completion
from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.answering import Answering
from rl_core.rollout.sglang.client import open_session
from rl_core.rollout.sglang.collective import Channel, NobodySends, open_channel
from rl_core.rollout.sglang.fingerprints import computable
from rl_core.rollout.sglang.queueing import Queue
from rl_core.rollout.sglang.sending import Address
from rl_core.rollout.sglang.supervision import Process, Replica, Supervisor
from rl_core.rollout.sglang.swapping import Published, swap
from rl_core.rollout.sglang.wire import NO_VERSION, Delta, ReplicaFailed, ServerRefused
from rl_core.types import Completion, GenerateRequest, WeightVersion
from rl_core.weights import WEIGHTS_FILE, load_weights, read_tensors

FRUITLESS_TRIES = 6
"""Tries of one request in a row that bring no token, before it fails."""
TRY_AGAIN_S = 0.1
"""Before the next try behind a fruitless one, for each of those in a row."""
CANCEL_AGAIN_S = 0.5
CLOSE_S = 5.0
REMEMBERED = 64
"""Newest versions whose checksum is remembered."""
Check = Callable[[str], None]
"""Asks the server at an address, in a thread, whether it fits the run; raises ConfigError."""


class AnswerFailed(Exception):
    """One request brought no tokens, try after try: it is given up, and the engine goes on."""


class SglangEngine:
    """See rl_core/rollout/engine.py for the promises. `served` is None, and tokens carry version -1, before a swap.

        engine = SglangEngine(run.model, config=config.rollout.engine, processes=[SglangServer(...)], context=2048)

    `processes` are the servers that this engine starts and ends; without them it uses `config.urls`. Returns when all
    of them serve. `context`: longest prompt and answer together, tokens; None = the model's own. `check` is asked about
    every server before it serves, again after every start. `sender` says where weights are sent from (sending.py), with
    transport `collective`; it raises FileNotFoundError while nobody sends. A server that takes longer than `swap_s` for
    a step of a swap is given up.
    """

    def __init__(self, model_dir: Path, *, config: SglangEngineConfig, processes: Sequence[Process] = (),
                 context: int | None = None, check: Check | None = None,
                 sender: Callable[[], Address] | None = None, swap_s: float = 60.0) -> None:
        """Raises EngineStartFailed, with the tail of the log, for a server that does not come; what `check` raises."""
        facts = check_model(model_dir)
        self._model_dir, self._config, self._check, self._sender = model_dir, config, check, sender
        self._swap_s = swap_s
        self._vocabulary = facts.vocabulary
        self._context = facts.context if context is None else min(context, facts.context)
        self._ends = frozenset(facts.eos_token_ids)
        self._dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self._nonce, self._serials = secrets.token_hex(4), itertools.count()
        self._lock = threading.Lock()  # guards `_live`, `_error` and `_closed` for other threads
        self._live: dict[str, Answering] = {}
        self._error: DeadPart | None = None
        self._closed = False
        # All below belongs to the loop.
        self._served: WeightVersion | None = None
        self._current: Published | None = None
        self._versions: dict[int, WeightVersion] = {}
        self._agreed: dict[str, str] = {}
        self._replicas = [Replica(f"server-{i}", process) for i, process in enumerate(processes)] or \
            [Replica(f"server-{i}", None, url=url) for i, url in enumerate(config.urls)]
        self._queue = Queue(self._replicas, self._index_of)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="sglang-engine", daemon=True)
        self._thread.start()
        self._weights_lock, self._changed = asyncio.Lock(), asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        with ExitStack() as undo:
            undo.callback(self.close)
            self._run(self._open()).result()
            undo.pop_all()

    # -- called from any thread

    @property
    def served(self) -> WeightVersion | None:
        return self._served

    @property
    def running(self) -> int:
        return len(self._live)

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
            refused = wire.refused_sampling(request.sampling)
            if refused is not None:
                raise ValueError(f"request {request.request_id!r}: {refused}")
        except ValueError as error:
            future.set_exception(error)
            return future
        prompt = request.token_ids_P
        work = Answering(request, future, session=xxhash.xxh3_64_hexdigest(prompt.tobytes()), ends=self._ends,
                         limit=min(request.sampling.max_new_tokens, self._context - len(prompt)))
        with self._lock:
            if self._closed or self._error is not None:
                future.set_exception(self._dead())
            elif request.request_id in self._live:
                future.set_exception(ValueError(f"request {request.request_id!r} is running already"))
            else:
                self._live[request.request_id] = work
                self._loop.call_soon_threadsafe(self._task, self._serve(work))
        return future

    def cancel(self, request_id: str) -> None:
        with self._lock:
            work = self._live.get(request_id)
            if work is not None and not self._closed:
                self._loop.call_soon_threadsafe(self._cancel, work)

    def swap(self, version: WeightVersion, weights_dir: Path) -> str:
        """Read and verified in the caller's thread; then one server after the other, each standing still for its own
        swap. Raises WeightsRefused where a server keeps its old weights (the others keep theirs, too), ValueError for a
        version that runs backwards, DeadPart when no server is left."""
        if version == self._served:
            return version.digest
        served = self._served
        if served is not None and (version.idx, version.v) < (served.idx, served.v):
            raise ValueError(f"version {version.v} (publication {version.idx}) runs backwards: the engine serves "
                             f"version {served.v} (publication {served.idx})")
        tensors: dict[str, torch.Tensor] = {}
        if self._config.transport == "disk" or (weights_dir / WEIGHTS_FILE).exists():
            tensors = load_weights(weights_dir, version)  # else the sender verifies it
        published = Published(version, Path(os.path.abspath(weights_dir)), tensors if self._hashes_known else {})
        with self._lock:
            if self._closed or self._error is not None:
                raise self._dead()
        try:
            self._run(self._swap(published)).result()
        except CancelledError:
            raise self._dead() from None
        return version.digest

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread.is_alive():
            closing = self._run(self._close())
            try:
                closing.result(CLOSE_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                if threading.current_thread() is not self._thread:
                    self._thread.join(CLOSE_S)

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _dead(self) -> DeadPart:
        return DeadPart("engine sglang: closed" if self._error is None else f"engine sglang: {self._error}")

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def _hashes_known(self) -> bool:
        """Whether a server's checksum can be computed here: fingerprints.py."""
        return self._config.device == "cpu" and self._config.tensor_parallel == 1

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
        self._finish_all()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ends = [asyncio.to_thread(replica.process.stop, 0.0) for replica in self._replicas if replica.process]
        await asyncio.gather(*ends, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _finish_all(self) -> None:
        """Everything that waits hears the end: the tokens so far after `close`, DeadPart after an error."""
        for work in list(self._live.values()):
            if self._error is not None:
                self._resolve(work, self._dead())
            else:
                work.broke_off()
                self._resolve(work, work.completion("cancelled"))

    def _die(self, error: DeadPart) -> None:
        with self._lock:
            self._error = self._error or error
        self._finish_all()
        self._changed.set()

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
        client = replica.connected()
        if self._hashes_known and (await client.model_info()).version == wire.UNNAMED:
            base = await asyncio.to_thread(self._base_tensors)
            replica.held.computable = computable(await client.checksums(), base, self._dtype)
        async with self._weights_lock:
            if self._current is not None:
                await self._give(replica, self._current)

    def _base_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for file in weight_files(self._model_dir)
                for name, tensor in read_tensors(self._model_dir / file).items()}

    def _joined(self, replica: Replica) -> None:
        assert replica.info is not None
        self._queue.add(replica, limit=self._config.max_outstanding_tokens or replica.info.capacity,
                        most=self._config.max_running)
        self._changed.set()

    def _lost(self, replica: Replica, error: ReplicaFailed) -> None:
        """Its streams break off by themselves, or are ended by their requests' own deadline."""
        self._queue.remove(replica)
        for work in list(self._live.values()):
            if work.place == replica.place and work.stream is not None:
                work.stream.cancel()

    # -- weights

    async def _swap(self, published: Published) -> None:
        took = 0
        async with self._weights_lock:
            self._versions[published.version.v] = published.version
            for replica in self._replicas:
                if not replica.up:
                    continue
                try:
                    await self._give(replica, published)
                    took += 1
                except WeightsDamaged as refusal:
                    if not took:
                        raise
                    replica.condemn(ReplicaFailed(f"{refusal}, which another server took"))
                except (ReplicaFailed, ServerRefused) as error:
                    replica.condemn(ReplicaFailed(str(error)))
            self._current = published
        while not any(replica.up and replica.version == published.version for replica in self._replicas):
            if self._error is not None:
                raise self._dead()
            self._changed.clear()
            await self._changed.wait()
        self._served = published.version
        self._queue.dispatch()

    async def _give(self, replica: Replica, published: Published) -> None:
        """One server takes these weights; the caller holds the lock."""
        channel = await self._channel(replica) if self._config.transport == "collective" else None
        works: list[Answering] = []

        async def paused() -> None:
            works.extend(work for work in self._live.values() if work.place == replica.place and work.rid)
            if self._config.pause == "in_place":
                await self._begin_again(replica, works)

        replica.swapping = True
        try:
            paused_s = await swap(replica.connected(), published, replica.held, mode=self._config.pause,
                                  dtype=self._dtype, deadline_s=self._swap_s, agreed=self._agreed, channel=channel,
                                  while_paused=paused)
        finally:
            replica.swapping = False
        replica.version = published.version
        self._versions[published.version.v] = published.version
        while len(self._agreed) > REMEMBERED:
            del self._agreed[next(iter(self._agreed))]
        replica.counts.swaps += 1
        replica.counts.paused_s += paused_s
        for work in works:
            work.taken_over(published.version.v, 2 * self._config.stream_interval)
            if self._config.pause == "retract":
                replica.counts.reread_tokens += len(work.request.token_ids_P) + work.made
            elif work.renewed and work.rid:  # the server may have read it only now
                self._task(self._abort_once(replica, work.rid))
        self._queue.dispatch()

    async def _begin_again(self, replica: Replica, works: Sequence[Answering]) -> None:
        """End the tries without a token before the weights change: their contexts may be read only then, and in part
        from a cache that the older weights have made, while the server would call all of their tokens new."""
        for work in works:
            work.renewed = work.renewed or not work.made_now
        await asyncio.gather(*(self._abort_once(replica, work.rid) for work in works if work.renewed))

    async def _channel(self, replica: Replica) -> Channel | None:
        """How the learner that lives now reaches this server; None while none sends: then the server reads the file,
        if it can."""
        assert replica.info is not None
        try:
            address = await asyncio.to_thread(self._sender) if self._sender else None
        except FileNotFoundError:
            address = None
        if address is None:
            return None
        if replica.channel is not None and replica.channel.open and replica.channel.address == address:
            return replica.channel
        replica.hang_up()
        try:
            replica.channel = await open_channel(
                replica.connected(), address, backend="nccl" if self._config.device == "cuda" else "gloo",
                ranks=replica.info.tensor_parallel)
        except NobodySends:
            return None
        return replica.channel

    # -- requests

    async def _serve(self, work: Answering) -> None:
        """One request from its submission to its answer."""
        while not work.closed:
            replica = await self._queue.placed(work)
            if replica is None:
                self._resolve(work, work.completion("cancelled") if work.made else empty_completion(work.request))
                return
            place, made = replica.place, work.made
            try:
                await self._try(work, replica)
            except ServerRefused as refusal:
                self._refused(work, replica, refusal)
            except ReplicaFailed as error:
                self._failed(work, replica, error)
            finally:
                work.place = ""
                self._queue.give_back(place, work)
            if work.closed:
                return
            replica.counts.thrown_tokens += work.back_off()
            work.fruitless = 0 if work.made > made or work.renewed else work.fruitless + 1
            work.renewed = False
            if work.fruitless >= FRUITLESS_TRIES:
                self._resolve(work, AnswerFailed(f"request {work.request.request_id!r}: {FRUITLESS_TRIES} tries "
                                                 f"brought no token; the last one on {replica.url}: {work.last_error}"))
            elif work.fruitless:
                await asyncio.sleep(TRY_AGAIN_S * work.fruitless)

    async def _try(self, work: Answering, replica: Replica) -> None:
        """Stream from one server until the answer, or this try, is over. The try's versions are booked then."""
        rid = f"{self._nonce}{next(self._serials):012x}"  # of one length: servers compare ids by their beginning
        version = NO_VERSION if replica.version is None else replica.version.v
        work.begin(rid, version)
        context = work.context
        replica.counts.context_tokens += len(context)
        if work.made:
            replica.counts.reread_tokens += len(context)
        body = wire.generate_body(rid, context, work.request.sampling, max_new=work.left, seed=work.request.seed,
                                  end_token_ids=sorted(self._ends), stream_interval=self._config.stream_interval,
                                  cache_key=str(version))
        work.stream = self._loop.create_task(self._stream(work, replica, body))
        try:
            last = await work.stream
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # this task is ended, not its stream alone
                raise
            if work.closed:
                return
            raise ReplicaFailed(f"{replica.url}: lost under a request") from None
        finally:
            work.stream = None
        self._attest(work, replica, last)
        replica.failures = 0
        assert last.finish is not None
        ended = work.ended_by(last.finish)
        if ended is not None:
            self._resolve(work, work.completion(*ended))
        elif work.cancelled:
            self._resolve(work, work.completion("cancelled"))
        elif last.finish.kind == "abort" and last.finish.status is not None:
            raise ServerRefused(replica.url, last.finish.status, last.finish.message)

    async def _stream(self, work: Answering, replica: Replica, body: dict[str, Any]) -> Delta:
        last: Delta | None = None
        async for payload in replica.connected().generate(body):
            delta = wire.read_event(payload, work.made_now, self._vocabulary)
            replica.counts.bytes_read += len(payload) + wire.FRAMING_BYTES
            if last is None:
                replica.counts.cached_tokens += delta.cached
            work.extend(delta)
            replica.counts.tokens += len(delta.token_ids)
            last = delta
        if last is None or last.finish is None:
            raise wire.BadAnswer(f"{replica.url}: a stream that ended without the end of its answer")
        return last

    def _attest(self, work: Answering, replica: Replica, last: Delta) -> None:
        """The server's own word on versions; one that cannot be true costs it this try."""
        assert replica.info is not None
        if work.renewed:  # what it has sampled meanwhile counts as the older weights'
            work.broke_off()
            return
        indices = [self._index_of(span.version) for span in last.spans]
        if work.newest is not None:
            indices.insert(0, self._index_of(work.newest))
        known = [index for index in indices if index is not None]
        if len(known) < len(indices) or known != sorted(known):
            said = [span.version for span in last.spans]
            replica.counts.thrown_tokens += work.drop_try()
            error = ReplicaFailed(f"{replica.url}: says that versions {said} sampled an answer, behind {work.newest}: "
                                  "that runs backwards, or was never served")
            replica.condemn(error)
            raise error
        in_place = self._config.pause == "in_place"
        work.attested(last.spans, 1 if replica.info.overlap and in_place else 0, kept_cache=in_place)

    def _index_of(self, version: int) -> int | None:
        if version == NO_VERSION:
            return NO_VERSION
        known = self._versions.get(version)
        return None if known is None else known.idx

    def _refused(self, work: Answering, replica: Replica, refusal: ServerRefused) -> None:
        """The server is well, and does not want this request."""
        if work.rid:
            work.broke_off()
        if refusal.status in (400, 413, 422):
            self._resolve(work, ValueError(f"request {work.request.request_id!r}: {refusal}"))
        else:
            self._failed(work, replica, ReplicaFailed(str(refusal)))

    def _failed(self, work: Answering, replica: Replica, error: ReplicaFailed) -> None:
        """A try that broke off: its tokens so far are kept."""
        if work.rid:
            work.broke_off()
        work.last_error = str(error)
        replica.counts.retries += 1
        replica.failed(error)
        reason = "cancelled" if work.cancelled else work.whole()
        if reason is not None:
            self._resolve(work, work.completion(reason))

    def _resolve(self, work: Answering, result: Completion | Exception) -> None:
        if work.closed:
            return
        work.closed = True
        with self._lock:
            self._live.pop(work.request.request_id, None)
        if isinstance(result, Completion):
            work.future.set_result(result)
        else:
            work.future.set_exception(result)
        if work.stream is not None:
            work.stream.cancel()

    def _cancel(self, work: Answering) -> None:
        if not work.closed and not work.cancelled:
            work.cancelled = True
            self._queue.dispatch()
            self._task(self._abort(work))

    async def _abort_once(self, replica: Replica, rid: str) -> None:
        try:
            await replica.connected().abort(rid)
        except (ReplicaFailed, ServerRefused):
            replica.suspected.set()

    async def _abort(self, work: Answering) -> None:
        """Tell the server until the request has ended: one that it has not read yet is unknown to it."""
        until = self._loop.time() + self._config.request_s
        while not work.closed and self._loop.time() < until:
            replica = self._queue.at(work.place)
            if replica is not None and work.rid:
                await self._abort_once(replica, work.rid)
            await asyncio.sleep(CANCEL_AGAIN_S)
        if not work.closed:
            work.broke_off()
            self._resolve(work, work.completion("cancelled"))
