"""The pages of a run as artifacts of its MLflow run, and the link to it in Prefect: viewer, timeline.

Made on a thread of their own, so that nothing waits for them, the timeline in a process of its own: each from the run
directory alone, once, also where the run is started again. A page that cannot be made is a line in `logs/screens.log`,
never a failed run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

from rl_core.records import recorded_steps
from rl_core.run_dir import RunDir, numbered
from tasks.tracking import Tracker
from tasks.waiting import waiting

LOOK_S = 2.0
"""How often it looks whether MLflow was reached; validations wake it."""
TIMELINE_EVERY_S = 120.0
"""While a run goes on its timeline is made again at a validation, but no sooner than this after the one before."""


@dataclass(frozen=True, slots=True)
class Screen:
    """One page: `Screen("viewer/validation-000000020.html", make)`; `make()` is its text, and takes seconds."""

    name: str
    make: Callable[[], str]


def viewer_screens(run: RunDir) -> list[Screen]:
    """A page of each validation, and one of the training step before it, oldest first."""
    from rl_core.pages import answers  # imports pyarrow

    recorded = set(recorded_steps(run))
    found: list[Screen] = []
    for step, _ in numbered(run.validations, r"step-(\d{9})\.json"):
        found.append(Screen(f"viewer/validation-{step:09d}.html", partial(answers.validation_page, run, step)))
        if step - 1 in recorded:
            found.append(Screen(f"viewer/step-{step - 1:09d}.html", partial(answers.step_page, run, step - 1)))
    return found


class Screens:
    """Makes the pages of one run while it goes on.

    Consumes: validations. Waits for: `wake`, MLflow, or LOOK_S. Unblocked by: a validation that ended, `finish`.

        screens = Screens(run, tracker, told=lambda link: ...)
        screens.start()
        screens.wake()                    # after each validation
        screens.finish(deadline_s=20)     # before the tracker's: what is due is made, and the last timeline
    """

    def __init__(self, run: RunDir, tracker: Tracker, *, told: Callable[[str], None] = lambda link: None) -> None:
        """`told(link)` is called once, when MLflow has the run."""
        self._run, self._tracker, self._told = run, tracker, told
        self._tried: set[str] = set()
        self._timeline_at = time.monotonic()
        self._cond = threading.Condition()
        self._asked = False
        self._ending = self._stopped = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._loop,), name="screens", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """A validation has ended."""
        self._set(asked=True)

    def end(self) -> None:
        """The run has ended: make what is due, and the last timeline. Does not wait."""
        self._set(ending=True)

    def stop(self) -> None:
        """Make no more pages; the next start does."""
        self._set(stopped=True)

    def finish(self, deadline_s: float) -> bool:
        """`end`, and wait; with no time nothing more is begun. False at the deadline, or where MLflow was not reached:
        the next start makes the rest."""
        if deadline_s <= 0 or self._thread.ident is None:
            self.stop()
            return False
        self.end()
        with waiting("screens", "the last pages", deadline_s):
            self._thread.join(deadline_s)
        done = not self._thread.is_alive()
        self.stop()
        return done

    # -- the thread
    def _set(self, *, asked: bool = False, ending: bool = False, stopped: bool = False) -> None:
        with self._cond:
            self._asked, self._ending = self._asked or asked, self._ending or ending
            self._stopped = self._stopped or stopped
            self._cond.notify_all()

    def _loop(self) -> None:
        told = False
        while True:
            with self._cond:
                ending, self._asked = self._ending, False
            stored = self._tracker.stored_pages
            if stored is not None:
                if not told:
                    with suppress(Exception):  # a view: a server that is away is no reason to stop
                        self._told(self._tracker.link or "")
                    told = True
                self._make_due(stored, ending=ending)
            if self._stopped or (ending and stored is not None):
                return
            with self._cond:
                self._cond.wait_for(partial(self._due, ending), timeout=LOOK_S if stored is None else None)

    def _due(self, was_ending: bool) -> bool:
        return self._asked or self._stopped or (self._ending and not was_ending)

    def _make_due(self, stored: frozenset[str], *, ending: bool) -> None:
        with _noted(self._run, "viewer"):
            for screen in viewer_screens(self._run):
                if screen.name not in stored and screen.name not in self._tried:
                    self._make(screen)
        if ending or time.monotonic() - self._timeline_at >= TIMELINE_EVERY_S:
            self._make_timeline()
            self._timeline_at = time.monotonic()

    def _make(self, screen: Screen) -> None:
        if self._stopped:
            return
        self._tried.add(screen.name)  # one that fails is tried again by the next start
        with _noted(self._run, screen.name):
            self._tracker.add_page(screen.name, screen.make())

    def _make_timeline(self) -> None:
        """Made again it is newer, under the same name."""
        from rl_core.pages.timeline_process import timeline_texts  # imports pyarrow

        if self._stopped:
            return
        with _noted(self._run, "timeline"):
            for name, text in timeline_texts(self._run).items():
                self._tracker.add_page(f"timeline/{name}", text)


@contextmanager
def _noted(run: RunDir, name: str) -> Iterator[None]:
    """Whatever is raised inside becomes a line of the log: a page is a view of the run."""
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            run.logs.mkdir(parents=True, exist_ok=True)
            with open(run.screens, "a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {name}: {type(error).__name__}: {error}\n")
