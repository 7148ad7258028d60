"""The requests of one engine, each from its submission to its answer: over as many tries, and servers, as it takes.

A request waits until a server has room (queueing.py), streams its tokens, and goes on elsewhere with its tokens so far
when its server dies or ends it. What the tokens of an answer mean is answering.py.

    consumes: requests (`add`), what servers say
    waits for: any of them
    unblocked by: `cancel`, `refuse_more`, `finish_all`, a server
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from rl_core.config import SglangEngineConfig
from rl_core.errors import DeadPart
from rl_core.rollout.requests import empty_completion
from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.answering import Answering
from rl_core.rollout.sglang.queueing import Queue
from rl_core.rollout.sglang.supervision import Replica
from rl_core.rollout.sglang.swapping import Offered
from rl_core.rollout.sglang.wire import NO_VERSION, Delta, ReplicaFailed, ServerRefused
from rl_core.types import Completion

FRUITLESS_TRIES = 6
"""Tries of one request in a row that bring no token, before it fails."""
TRY_AGAIN_S = 0.1
"""Before the next try behind a fruitless one, for each of those in a row."""
CANCEL_AGAIN_S = 0.5
Start = Callable[[Coroutine[Any, Any, None]], None]
"""Runs a coroutine in the engine's loop, which it is called in."""


class AnswerFailed(Exception):
    """One request brought no tokens, try after try: it is given up, and the engine goes on."""


class Requests:
    """`add`, `cancel`, `running`, `refuse_more` and `check` from any thread; the rest belongs to the loop.

    `ends`: token ids that end an answer. `cache_space`: prefixes that others have cached are never read; empty: those
    that the same version has.
    """

    def __init__(self, queue: Queue, offered: Offered, config: SglangEngineConfig, *, vocabulary: int,
                 ends: Collection[int], loop: asyncio.AbstractEventLoop, start: Start, cache_space: str = "") -> None:
        self._queue, self._offered, self._config = queue, offered, config
        self._vocabulary, self._ends, self._cache_space = vocabulary, sorted(ends), cache_space
        self._loop, self.start = loop, start
        self._nonce, self._serials = secrets.token_hex(4), itertools.count()
        self._lock = threading.Lock()  # guards `_live` and `_over` for other threads
        self._live: dict[str, Answering] = {}
        self._over = ""

    # -- called from any thread

    @property
    def running(self) -> int:
        return len(self._live)

    def add(self, work: Answering) -> None:
        """Begin a request; one that cannot begin is answered with why at once."""
        name = work.request.request_id
        with self._lock:
            if self._over:
                work.future.set_exception(DeadPart(self._over))
            elif name in self._live:
                work.future.set_exception(ValueError(f"request {name!r} is running already"))
            else:
                self._live[name] = work
                self._loop.call_soon_threadsafe(self.start, self._serve(work))

    def cancel(self, request_id: str) -> None:
        with self._lock:
            work = self._live.get(request_id)
            if work is not None and not self._over:
                self._loop.call_soon_threadsafe(self._cancel, work)

    def refuse_more(self, why: str) -> None:
        """The engine is over; the first reason stands."""
        with self._lock:
            self._over = self._over or why

    def check(self) -> None:
        """Raises DeadPart when the engine is over."""
        with self._lock:
            if self._over:
                raise DeadPart(self._over)

    def dead(self) -> DeadPart:
        return DeadPart(self._over)

    # -- what the engine asks

    def at(self, place: str) -> list[Answering]:
        """Those that are booked on this server."""
        return [work for work in self._live.values() if work.place == place]

    def finish_all(self, error: DeadPart | None = None) -> None:
        """Everything that waits hears the end: the tokens so far, or the error."""
        for work in list(self._live.values()):
            if error is not None:
                self._resolve(work, error)
            else:
                work.broke_off()
                self._resolve(work, work.completion("cancelled"))

    def lost(self, place: str) -> None:
        """This server is gone: what it streamed goes on elsewhere."""
        for work in self.at(place):
            if work.stream is not None:
                work.stream.cancel()

    async def begin_again(self, replica: Replica, works: Sequence[Answering]) -> None:
        """End the tries without a token before the weights change: their contexts may be read only then, and in part
        from a cache that the older weights have made, while the server would call all of their tokens new."""
        for work in works:
            work.renewed = work.renewed or not work.made_now
        await asyncio.gather(*(self.abort_once(replica, work.rid) for work in works if work.renewed))

    async def abort_once(self, replica: Replica, rid: str) -> None:
        """Tell the server to end one try, which then goes on elsewhere unless it is cancelled."""
        try:
            await replica.connected().abort(rid)
        except (ReplicaFailed, ServerRefused):
            replica.suspected.set()

    # -- one request

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
                                  end_token_ids=self._ends, stream_interval=self._config.stream_interval,
                                  cache_key=f"{self._cache_space}{version}")
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
        indices = [self._offered.index_of(span.version) for span in last.spans]
        if work.newest is not None:
            indices.insert(0, self._offered.index_of(work.newest))
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

    # -- how it ends

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
            self.start(self._abort(work))

    async def _abort(self, work: Answering) -> None:
        """Tell the server until the request has ended: one that it has not read yet is unknown to it."""
        until = self._loop.time() + self._config.request_s
        while not work.closed and self._loop.time() < until:
            replica = self._queue.at(work.place)
            if replica is not None and work.rid:
                await self.abort_once(replica, work.rid)
            await asyncio.sleep(CANCEL_AGAIN_S)
        if not work.closed:
            work.broke_off()
            self._resolve(work, work.completion("cancelled"))
