"""The thread that replays what a run has committed to MLflow, whatever MLflow does meanwhile.

MLflow is a view: when it is slow, down or broken the run goes on, the trouble is reported, and what is missing is
replayed when it is back, or by the next start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rl_core.config import Config
from rl_core.observations import put_observation
from rl_core.run_dir import RunDir
from rl_core.uris import redact_in
from tasks.destination import Destination
from tasks.tracking.mirror import TAG_RUN_KEY, TAG_RUN_UUID, Mirror, Status
from tasks.waiting import waiting

logger = logging.getLogger("headway.tracking")

POLL_S = 5.0
"""A wake is a hint; looking at the run directory this often is the truth."""
PASS_EVERY_S = 2.0
"""What is committed within this time goes to MLflow together: a call costs more than a point, and this process has a
learner to feed. `flush` and `finish` do not wait for it."""
SLOW_S = 15.0
"""A look that takes longer is trouble, though MLflow may still be trying by itself."""
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)


class Tracker:
    """Tracks one run on a thread of its own. Nothing here blocks, except `flush` and `finish` up to their deadline.

    Consumes: committed records, observations, validations and their tables. Waits for: `wake`, or POLL_S. Unblocked by:
    a new file.

        tracker = Tracker(run, config, destination(config, home), run_uuid="...", run_key="nightly", tags={})
        tracker.start()                     # once the process has done its own heavy imports
        tracker.wake()                      # after each committed step or validation
        tracker.finish("FINISHED", deadline_s=20, artifacts=figures)
    """

    def __init__(self, run: RunDir, config: Config, where: Destination, *, run_uuid: str, run_key: str,
                 tags: Mapping[str, str] | None = None, report: Callable[[str], None] = logger.warning) -> None:
        self.where = where
        self._run, self._config, self._report = run, config, report
        self._tags = {TAG_RUN_UUID: run_uuid, TAG_RUN_KEY: run_key, **(tags or {})}
        self._files: deque[tuple[Path, str]] = deque()
        self._pages: deque[tuple[str, str]] = deque()
        self._mirror: Mirror | None = None
        self._trouble: str | None = None
        self._pass_since: float | None = None
        self._cond = threading.Condition()
        self._asked = self._answered = 0
        self._closing: Status | None = None
        self._why: str | None = None
        self._urgent = False
        self._thread = threading.Thread(target=self._loop, name="tracking", daemon=True)

    # -- what the owner calls
    def start(self) -> None:
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until MLflow was reached for the first time."""
        return None if self._mirror is None else self._mirror.run_id

    @property
    def link(self) -> str | None:
        """Address of the run in the UI: whole for a server, else the part behind the address of `headway ui`."""
        if self._mirror is None:
            return None
        return f"{self.where.page or ''}/#/experiments/{self._mirror.experiment_id}/runs/{self._mirror.run_id}"

    @property
    def stored_pages(self) -> frozenset[str] | None:
        """Names of the pages that MLflow has for certain; None until it was reached for the first time."""
        return None if self._mirror is None else self._mirror.stored_pages

    @property
    def trouble(self) -> str | None:
        """What keeps MLflow from being up to date now; None if nothing does."""
        since = self._pass_since
        waited_s = 0.0 if since is None else time.monotonic() - since
        if self._trouble is None and waited_s > SLOW_S:
            return f"MLflow at {self.where}: no answer for {waited_s:.0f} s"
        return self._trouble

    def wake(self) -> None:
        """Something was committed: look now."""
        self._ask()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Commit the owner's metrics of a step (names("owner")) and wake. About 0.5 ms: no fsync, no MLflow."""
        put_observation(self._run, step, metrics, time.time_ns() // 1000)
        self._ask()

    def add_page(self, name: str, text: str) -> None:
        """A page of the run, `name` as in `viewer/validation-000000020.html`, becomes its artifact; the same name again
        is overwritten."""
        with self._cond:
            self._pages.append((name, text))
        self._ask()

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything committed before this call is in MLflow; False (and `trouble`) at the deadline."""
        mine = self._ask(urgent=True)
        with waiting(f"MLflow at {self.where}", "all points to arrive", deadline_s), self._cond:
            return self._cond.wait_for(lambda: self._answered >= mine, timeout=deadline_s)

    def finish(self, status: Status, deadline_s: float, artifacts: Sequence[Path] = (), why: str | None = None) -> bool:
        """Flush, copy the figures, set the final status and end the thread. `why`: the cause of a failure, which
        becomes a tag. False at the deadline: MLflow then still says RUNNING, and the next start of the run replays what
        is missing."""
        with self._cond:
            self._closing, self._why = status, why
            self._files.extend((path, "figures") for path in artifacts)
        self._ask(urgent=True)
        if self._thread.ident is None:
            return False
        with waiting(f"MLflow at {self.where}", "the last points to arrive", deadline_s):
            self._thread.join(timeout=deadline_s)
        return not self._thread.is_alive() and self._trouble is None

    # -- the thread
    def _ask(self, urgent: bool = False) -> int:
        with self._cond:
            self._asked += 1
            self._urgent = self._urgent or urgent
            self._cond.notify_all()
            return self._asked

    def _loop(self) -> None:
        failures = 0
        while True:
            with self._cond:
                asked, closing, self._urgent = self._asked, self._closing, False
            self._pass_since = time.monotonic()
            try:
                self._pass(closing)
            except Exception as error:  # whatever MLflow does, training goes on; retried with back-off, reported once
                text = f"MLflow at {self.where}: {type(error).__name__}: {redact_in(str(error), self.where.uri)}"
                if self._trouble is None:
                    self._report(f"{text}; training goes on, the records are replayed when it is back")
                self._trouble = text
                wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                failures += 1
            else:
                if self._trouble is not None:
                    self._report(f"MLflow at {self.where} is back and up to date")
                self._trouble, failures, wait_s = None, 0, POLL_S
                with self._cond:
                    self._answered = asked
                    self._cond.notify_all()
                if closing is not None:
                    return
            finally:
                self._pass_since = None
            with self._cond:
                self._cond.wait_for(lambda: self._urgent, timeout=min(wait_s, PASS_EVERY_S))
                self._cond.wait_for(partial(self._due, asked, failures), timeout=wait_s)

    def _due(self, asked: int, failures: int) -> bool:
        """After a failure only flush and finish cut the wait short: steps go on being committed meanwhile."""
        return self._urgent or (failures == 0 and self._asked > asked)

    def _pass(self, closing: Status | None) -> None:
        if self._mirror is None:
            self._mirror = Mirror(self._run, self._config, self.where, self._tags)
        self._mirror.replay(whole=closing is not None)
        while self._files:
            self._mirror.log_artifact(*self._files[0])
            self._files.popleft()
        while self._pages:
            self._mirror.log_page(*self._pages[0])
            self._pages.popleft()
        if closing is not None:
            self._mirror.close(closing, self._why)
