"""The pump: keeps rollout workers supplied with leases and weights, and the experience with what they land.

All it knows is rebuilt from the run directory and from the workers. It talks to workers through `WorkerLink`, whose
every call has a deadline and raises WorkerDead or DeadlinePassed. One lock and one Condition (`Experience.changed`)
guard all state; no call to a worker, and no verification of a shard, is made under it.

| thread | consumes | waits for | unblocked by |
| --- | --- | --- | --- |
| main (`run`) | positions | capacity | a claim, a served version, an ended lease |
| watch, one a worker | events of the worker | the long poll | a landing, an outcome |
| send, one a worker | leases and cancels for the worker | its outbox | main |
| swap | versions | a newer version than a worker serves | `Experience.wake`, or a look every 0.25 s |
| list | hints | a hint | watch, or a listing every 2 s |

All threads are daemons and look at `closing` after every call, so a worker that hangs delays neither `run` nor the exit
of the process. At the start nothing is leased until every worker has said what it has in flight (or is killed) and all
streams were listed after that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Protocol

from rl_core.config import Config
from rl_core.errors import DeadlinePassed, FailureBudgetSpent, WeightsDamaged, WorkerDead
from rl_core.experience import admission
from rl_core.experience.experience import Experience
from rl_core.experience.leases import Leased
from rl_core.experience.shards import sweep_tmp
from rl_core.run_dir import RunDir, check_attempt
from rl_core.run_log import STORY
from rl_core.types import Landed, Lease, Prompt, Sampling, WeightVersion, WorkerEvents, WorkerStatus
from rl_core.versions import learn_versions, read_version

CancelAnswer = Literal["cancelled", "landed", "unknown"]

POLL_S = 0.5
"""Long poll of a worker's events: also the longest that a watch thread outlives `run`."""
TICK_S = 0.05
"""Longest time until `run` sees `stop`."""
VERSION_LOOK_S = 0.25
LIST_S = 2.0
FULL_LIST_EVERY = 15
"""Of this many listings one is full: it finds gaps and foreign files."""
JOIN_S = 1.0
RATE_WINDOW_S = 10.0


class WorkerLink(Protocol):
    """One incarnation of a rollout worker. Every call ends by its deadline: WorkerDead or DeadlinePassed."""

    @property
    def name(self) -> str: ...

    def lease(self, leases: list[Lease]) -> None: ...

    def events(self, timeout_s: float) -> WorkerEvents:
        """Long poll; 0 = at once."""
        ...

    def cancel(self, group_ids: list[str]) -> dict[str, CancelAnswer]: ...

    def swap(self, version: WeightVersion) -> str:
        """Returns the digest of the weights as served. Ends by `deadlines.swap_s`."""
        ...

    def kill(self) -> None:
        """Returns when the worker is gone, whatever state it was in."""
        ...


class WorkerPool(Protocol):
    def links(self) -> list[WorkerLink]:
        """The workers that live now, adopted or fresh."""
        ...

    def restart(self, name: str) -> WorkerLink:
        """A fresh incarnation in place of one that was killed."""
        ...


class PromptSource(Protocol):
    def __len__(self) -> int: ...

    def at(self, dataset_epoch: int, position: int) -> Prompt: ...

    def prompt_idx(self, dataset_epoch: int, position: int) -> int:
        """That of `at`, without reading the row."""
        ...


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    link: WorkerLink
    alive: bool = True
    adopted: bool = False
    """Its groups in flight are counted, it may be leased to."""
    status: WorkerStatus | None = None
    """None until the first answer."""
    asked: bool = False
    """It has said what it has in flight, or it was killed: nothing unknown is in flight there."""
    served: WeightVersion | None = None
    death: Exception | None = None
    outbox: list[Lease] = field(default_factory=list[Lease])
    cancels: list[str] = field(default_factory=list[str])
    rate: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    """(clock, tokens generated) of the last seconds."""


class Pump:
    """Hosts nothing, owns nothing durable: `Pump(...).run(stop)` in a thread of its own, once."""

    def __init__(self, run: RunDir, config: Config, prompts: PromptSource, experience: Experience, pool: WorkerPool,
                 attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._config, self._prompts, self._pool = run, config, prompts, pool
        self._experience, self._attempt, self._clock = experience, attempt, clock
        self._changed = experience.changed
        self._workers: dict[str, _Worker] = {}
        self._outboxes = threading.Condition(experience.lock)
        self._listings = threading.Condition(experience.lock)
        self._hints: list[Landed] = []
        self._list_now = False
        self._closing = False
        self._restarts = 0
        self._newest: WeightVersion | None = None
        self._versions: dict[int, WeightVersion] = {}
        self._damaged: dict[int, int | None] = {}
        """Versions that could not be served, until they are made again, and when their bytes were written."""
        self._threads: list[threading.Thread] = []

    # -- the main loop

    def run(self, stop: threading.Event) -> None:
        """Pump until `stop` is set; returns within 2 s of it.

        Raises the first error of any of its threads, which also ends every wait for a claim.
        """
        try:
            self._experience.attach(len(self._prompts), self._prompt_idx)
            self._start()
            self._main(stop)
        except BaseException as error:
            self._experience.fail(error)  # whatever it is: a claim that waits must end with it
            raise
        finally:
            self._close()

    def _prompt_idx(self, dataset_epoch: int, position: int) -> int:
        return self._prompts.prompt_idx(dataset_epoch, position)

    def _start(self) -> None:
        for link in self._pool.links():
            self._workers[link.name] = _Worker(name=link.name, link=link)
        for worker in self._workers.values():
            self._thread(f"watch-{worker.name}", self._watch, worker)
            self._thread(f"send-{worker.name}", self._send, worker)
        self._thread("swap", self._swap)
        self._thread("list", self._list)

    def _thread(self, name: str, body: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=self._guard, args=(body, *args), name=f"pump-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, body: Callable[..., None], *args: Any) -> None:
        try:
            body(*args)
        except BaseException as error:
            if not self._closing:  # what a call to a worker says while everything closes is no news
                self._experience.fail(error)

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            self._experience.detach()
            self._outboxes.notify_all()
            self._listings.notify_all()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _main(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with self._changed:
                self._raise_failure()
                self._order_cancels()
                if not self._grant():
                    self._changed.wait(TICK_S)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._experience.failure is not None:
            raise self._experience.failure

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.alive and worker.status is not None]

    def _grant(self) -> bool:
        """Lease what capacity lets. True if something was leased."""
        able = [w.name for w in self._living() if w.adopted]
        granted = self._experience.grant(able)
        for lease in granted:
            self._workers[lease.worker].outbox.append(self._lease_of(lease))
        if granted:
            self._outboxes.notify_all()
        return bool(granted)

    def _lease_of(self, lease: Leased) -> Lease:
        s = self._config.sampling
        sampling = Sampling(temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p, stop=s.stop,
                            max_new_tokens=s.max_new_tokens, stop_token_ids=s.stop_token_ids)
        return Lease(prompt=self._prompts.at(lease.slot.dataset_epoch, lease.slot.position), try_no=lease.slot.try_no,
                     lease_no=lease.lease_no, idx_dispatch=lease.idx_dispatch, n_expected=self._config.group_size,
                     min_group=self._config.min_group, sampling=sampling, attempt=self._attempt)

    def _order_cancels(self) -> None:
        """Policy `wait`: tell the workers which groups are not waited for any longer."""
        for lease in self._experience.leases.by_id.values():
            if lease.cancel and not lease.cancel_sent:
                lease.cancel_sent = True
                self._workers[lease.worker].cancels.append(lease.group_id)
                self._outboxes.notify_all()

    def _adopt(self, worker: _Worker) -> None:
        """Count what a live worker has in flight; what no claim will take is cancelled there."""
        status = worker.status
        assert status is not None
        worker.served = self._known_version(status.served)
        idx = -1 if worker.served is None else worker.served.idx
        refused = [name for name in status.in_flight if not self._experience.adopt(worker.name, name, max(idx, 0))]
        worker.cancels += refused
        worker.adopted = True
        self._experience.serves(worker.name, idx)
        self._outboxes.notify_all()

    def _known_version(self, served: WeightVersion | None) -> WeightVersion | None:
        """What a worker says it serves, if this run has published exactly that."""
        if served is None or not self._run.version(served.v).exists():
            return None
        stored = read_version(self._run, served.v)
        return stored if stored.digest == served.digest else None

    # -- watch: events, death, restart

    def _watch(self, worker: _Worker) -> None:
        while not self._closing:
            if not worker.alive:
                self._revive(worker)
                continue
            link, asked_at = worker.link, self._clock()
            try:
                events = link.events(POLL_S if worker.adopted else 0.0)
            except (WorkerDead, DeadlinePassed) as error:
                self._declare_dead(worker, link, error)
                continue
            with self._changed:
                if worker.link is link and worker.alive and not self._closing:
                    self._take(worker, events, asked_at)
            self._wait_for_adoption(worker)

    def _take(self, worker: _Worker, events: WorkerEvents, asked_at: float) -> None:
        first, worker.status, worker.asked = worker.status is None, events.status, True
        self._hints += events.landed
        for outcome in events.outcomes:
            self._experience.outcome(outcome)
        for name in events.cancelled:
            self._experience.cancelled(name)
        named = {name for landed in events.landed for name in landed.group_ids}.union(events.status.in_flight)
        if self._experience.leases.note_in_flight(worker.name, named, asked_at):
            self._list_now = True
        if self._hints or self._list_now:
            self._listings.notify_all()
        now = self._clock()
        worker.rate.append((now, events.status.tokens_generated))
        while now - worker.rate[0][0] > RATE_WINDOW_S:
            worker.rate.popleft()
        if first:
            if self._experience.leases.known:
                self._adopt(worker)
            self._changed.notify_all()

    def _wait_for_adoption(self, worker: _Worker) -> None:
        """Between a worker's first answer and its adoption nothing is polled: the answer must still hold."""
        with self._changed:
            while not (worker.adopted or self._closing) and worker.alive:
                self._changed.wait(TICK_S)

    def _declare_dead(self, worker: _Worker, link: WorkerLink, error: Exception) -> None:
        with self._changed:
            if worker.link is link and worker.alive:
                worker.alive, worker.death = False, error
                self._changed.notify_all()

    def _revive(self, worker: _Worker) -> None:
        """Kill for certain, find what it landed, lease the rest again, start another incarnation within the budget."""
        worker.link.kill()
        self._experience.discover(full=True)  # also outcomes that it could not tell any more
        with self._changed:
            if self._closing:
                return
            worker.outbox, worker.cancels, worker.served, worker.adopted = [], [], None, False
            worker.status, worker.asked = None, True
            self._experience.worker_ended(worker.name)
            self._restarts += 1
            STORY.warning("%s died and is started again (%d of %d): %s", worker.name, self._restarts,
                          self._config.failure.worker_restarts, worker.death)
            if self._restarts > self._config.failure.worker_restarts:
                raise FailureBudgetSpent(
                    f"rollout workers died {self._restarts} times in this attempt (failure.worker_restarts "
                    f"{self._config.failure.worker_restarts}); the last one: {worker.name}: {worker.death}"
                ) from worker.death
        try:
            link = self._pool.restart(worker.name)
        except (WorkerDead, DeadlinePassed) as error:
            worker.death = error
            return
        with self._changed:
            worker.link, worker.alive = link, True
            worker.rate.clear()

    # -- send: leases and cancels

    def _send(self, worker: _Worker) -> None:
        while True:
            with self._changed:
                while not (self._closing or (worker.alive and (worker.outbox or worker.cancels))):
                    self._outboxes.wait(1.0)
                if self._closing:
                    return
                link = worker.link
                leases, worker.outbox = worker.outbox, []
                cancels, worker.cancels = worker.cancels, []
            try:
                if leases:
                    link.lease(leases)
                    self._note_sent(leases)
                if cancels:
                    self._note_cancelled(link.cancel(cancels))
            except (WorkerDead, DeadlinePassed) as error:
                self._declare_dead(worker, link, error)

    def _note_sent(self, leases: Iterable[Lease]) -> None:
        with self._changed:
            for lease in leases:
                held = self._experience.leases.by_id.get(lease.group_id)
                if held is not None and held.lease_no == lease.lease_no:
                    held.sent_at = self._clock()

    def _note_cancelled(self, answers: dict[str, CancelAnswer]) -> None:
        """`landed` is found by its hint, or by listing; `unknown` too, or it has failed."""
        with self._changed:
            for name, answer in answers.items():
                held = self._experience.leases.by_id.get(name)
                if held is None:
                    continue
                if answer == "cancelled":
                    self._experience.cancelled(name)
                else:
                    held.missing = held.missing or answer == "unknown"
                    self._list_now = True
                    self._listings.notify_all()

    # -- swap: one worker after the other, the lowest publication first, to the newest version

    def _swap(self) -> None:
        while not self._closing:
            with self._changed:
                due = self._swap_due()
                if due is None:
                    self._changed.wait(VERSION_LOOK_S)
                    continue
            worker, version = due
            # Before the swap: its step may make it again meanwhile.
            link, remade, written = worker.link, self._is_remade(version), self._written(version)
            try:
                digest = link.swap(version)
            except (WorkerDead, DeadlinePassed) as error:
                self._declare_dead(worker, link, error)
                continue
            except WeightsDamaged as error:
                if self._offered_version() is not version:
                    continue  # pruned under the swap: a newer one is there
                if not remade:
                    raise
                STORY.warning("version %d is not offered until training step %d makes it again: %s", version.v,
                              version.step - 1, error)
                self._damaged[version.v] = written
                continue
            self._damaged.pop(version.v, None)
            self._acknowledge(worker, link, version, digest)

    def _swap_due(self) -> tuple[_Worker, WeightVersion] | None:
        version = self._offered_version()
        if version is None:
            return None
        behind = [w for w in self._living() if w.adopted and w.served != version and not self._is_ahead(w, version)]
        if not behind:
            return None
        return min(behind, key=lambda w: (-1 if w.served is None else w.served.idx, w.name)), version

    def _is_ahead(self, worker: _Worker, version: WeightVersion) -> bool:
        """Whether it serves, whole, a later version that could not be served elsewhere: it stays at that."""
        served = worker.served
        return served is not None and served.v in self._damaged and (served.idx, served.v) > (version.idx, version.v)

    def _offered_version(self) -> WeightVersion | None:
        """The newest, but for damaged ones; with `staleness.exact` the one whose groups are not complete."""
        newest = self._newest_version()
        if newest is not None and self._waits_for_bytes(newest):
            newest = max((version for version in self._versions.values() if not self._waits_for_bytes(version)),
                         key=lambda each: (each.idx, each.v), default=None)
        if newest is None or (idx := self._experience.offered(newest.idx)) == newest.idx:
            return newest
        return max((version for version in self._versions.values() if version.idx == idx), key=lambda each: each.v,
                   default=newest)

    def _newest_version(self) -> WeightVersion | None:
        """By (idx, v): after a divergence an index has two versions, and the later one counts."""
        seen = len(self._versions)
        learn_versions(self._run, self._versions)
        for version in islice(reversed(self._versions.values()), len(self._versions) - seen):
            if self._newest is None or (version.idx, version.v) > (self._newest.idx, self._newest.v):
                self._newest = version
        return self._newest

    def _is_remade(self, version: WeightVersion) -> bool:
        """Whether its step, which has no record yet, makes it again: a power loss right behind its manifest may have
        torn its bytes, which are not fsynced."""
        return version.step > 0 and not self._run.record(version.step - 1).exists()

    def _waits_for_bytes(self, version: WeightVersion) -> bool:
        """Whether it could not be served, and has not been made again since."""
        return version.v in self._damaged and self._is_remade(version) \
            and self._damaged[version.v] == self._written(version)

    def _written(self, version: WeightVersion) -> int | None:
        """When its bytes were written, ns; None where there are none. Those that are made again have another time, also
        those of a voided step, which gets no record."""
        try:
            return self._run.weights(version.v).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _acknowledge(self, worker: _Worker, link: WorkerLink, version: WeightVersion, digest: str) -> None:
        if digest != version.digest:
            self._declare_dead(worker, link, WorkerDead(
                f"{worker.name} serves weights {digest} where version {version.v} is {version.digest}; refused"))
            return
        with self._changed:
            if worker.link is link and worker.alive:
                worker.served = version
                self._experience.serves(worker.name, version.idx)

    # -- list: discovery and verification

    def _list(self) -> None:
        if not self._all_asked():
            return
        self._experience.discover(full=True)
        with self._changed:
            for worker in self._living():
                if not worker.adopted:
                    self._adopt(worker)
            self._experience.leases_known()
        sweep_tmp(self._run, [w.status.stream for w in self._living() if w.status is not None])
        passes, due = 0, self._clock() + LIST_S
        while True:
            with self._changed:
                while not (self._closing or self._hints or self._list_now) and (left := due - self._clock()) > 0:
                    self._listings.wait(left)
                if self._closing:
                    return
                hints, self._hints = self._hints, []
                listing, self._list_now = self._list_now or self._clock() >= due, False
            if hints:
                self._experience.discover(hints)
            if listing:
                passes, due = passes + 1, self._clock() + LIST_S
                self._experience.discover(full=passes % FULL_LIST_EVERY == 0)
                check_attempt(self._run, self._attempt)

    def _all_asked(self) -> bool:
        """Waits until every worker has said what it has in flight, or was found dead and killed. False = closing."""
        with self._changed:
            while not self._closing and not all(w.asked for w in self._workers.values()):
                self._changed.wait(TICK_S)
            return not self._closing

    # -- for the owner

    def statuses(self) -> list[WorkerStatus]:
        """The newest status of every worker that has answered, with the version that it has acknowledged since."""
        with self._changed:
            return [replace(worker.status, served=worker.served) for worker in self._workers.values()
                    if worker.status is not None]

    def snapshot(self) -> dict[str, Any]:
        """Now: `in_flight` F, `landed` L, `step` (next unclaimed), `capacity` of the worker with the newest weights and
        its `binding` term, `restarts`, `budgets` (of failure.*: spent and allowed), `tokens_per_s`, and `workers`: by
        name `served_idx`, `in_flight`, `running`, `alive`, `oldest_lease_s`, `tokens_per_s`, `tokens_generated`,
        `tokens_wasted`, `seconds` (interval ledger), `servers` (counters of its engine's servers)."""
        with self._changed:
            book = self._experience.leases
            state = self._experience.admission(max(book.served.values(), default=-1))
            workers = {w.name: self._worker_snapshot(w) for w in self._workers.values()}
            return {"step": state.step, "in_flight": state.leased, "landed": state.landed,
                    "capacity": admission.capacity(state) if book.known else 0, "binding": admission.binding(state),
                    "restarts": self._restarts, "budgets": self._budgets(), "workers": workers,
                    "tokens_per_s": sum(w["tokens_per_s"] for w in workers.values())}

    def _budgets(self) -> dict[str, tuple[int, int]]:
        return {"worker_restarts": (self._restarts, self._config.failure.worker_restarts), **self._experience.budgets()}

    def _worker_snapshot(self, worker: _Worker) -> dict[str, Any]:
        status = worker.status
        rate = 0.0
        if len(worker.rate) > 1 and worker.rate[-1][0] > worker.rate[0][0]:
            (t0, n0), (t1, n1) = worker.rate[0], worker.rate[-1]
            rate = (n1 - n0) / (t1 - t0)
        leases = self._experience.leases.of(worker.name)
        sent = [lease.sent_at for lease in leases if lease.sent_at is not None]
        return {"alive": worker.alive, "served_idx": -1 if worker.served is None else worker.served.idx,
                "in_flight": len(leases), "oldest_lease_s": self._clock() - min(sent) if sent else 0.0,
                "tokens_per_s": rate,
                "running": 0 if status is None else status.running,
                "tokens_generated": 0 if status is None else status.tokens_generated,
                "tokens_wasted": 0 if status is None else status.tokens_wasted,
                "seconds": {} if status is None else dict(status.seconds),
                "servers": {} if status is None else status.servers}
