"""What a person sees of a run: first line at once, stages with their times, a live display, the summary.

On a terminal the display is redrawn in place; elsewhere it is one plain line every few seconds. All of it goes to one
stream (stdout), nothing to stderr. Only the live display imports rich, and nothing here imports the stack: the first
line is out before anything heavy is loaded.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PLAIN_EVERY_S = 5.0
PACE_STEPS = 30
"""Steps behind the estimate of the time left."""
SPARKS = "▁▂▃▄▅▆▇█"
BAR_CELLS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One look at a run. `view_of` makes it from the status view that the owner rewrites (tasks/progress.py)."""

    run_key: str
    state: str
    stages: tuple[tuple[str, float | None], ...] = ()
    """Name and seconds of each stage of the start; None while it runs."""
    step: int = 0
    """Training steps done."""
    total: int = 0
    accuracy: float | None = None
    """Of the newest validation."""
    accuracy_start: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the last step, by the names of rl_core/metrics.py."""
    alarm: str | None = None
    """The newest step that violated an invariant, with what was measured: `step 12: mismatch 0.012 over 0.005`."""
    tokens_per_s: float | None = None
    """Answer tokens trained, over the last steps."""
    part: tuple[str, int, int] | None = None
    """A long part of the start, done and total: `("warming up", 120, 250)`."""
    note: str | None = None
    """What it waits for, or what is wrong and does not stop it."""
    stall: str | None = None
    """Who waits on whom, new each minute of a wait that lasts."""


def view_of(status: Mapping[str, Any]) -> View:
    """From `status.json`; fields that are absent yet are left empty."""
    parts = (("warmed_up", "warming up"), ("rescored", "scoring anew"), ("replayed", "replaying"))
    part = next(((name, *status[key]) for key, name in parts if key in status and status.get("state") == name), None)
    return View(
        run_key=status.get("run_key", ""), state=status.get("state", ""),
        stages=tuple((name, seconds) for name, seconds in status.get("stages", ())),
        step=status.get("step", 0), total=status.get("total_steps", 0), accuracy=status.get("accuracy"),
        accuracy_start=status.get("accuracy_start"), tokens_per_s=status.get("tokens_per_s"), part=part,
        metrics={name: math.nan if value is None else value for name, value in status.get("metrics", {}).items()},
        alarm=status.get("alarm"), note=status.get("trouble") or status.get("stall") or status.get("note"),
        stall=status.get("stall"))


class Pace:
    """Estimates the time left from when the last steps were seen done."""

    def __init__(self, steps: int = PACE_STEPS) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=steps)

    def saw(self, now_s: float, step: int) -> None:
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((now_s, step))

    def left_s(self, now_s: float, total: int) -> float | None:
        """Seconds for the steps that remain; None before two steps were seen."""
        if len(self._seen) < 2:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        per_step = (last_s - first_s) / (last - first)
        return max(0.0, (total - last) * per_step - (now_s - last_s))


class Console:
    """Writes one run to one stream. Methods may be called from one thread; `close` is safe to call twice.

        console = Console()
        console.line("headway 0.1.0  train tiny-cpu")
        console.show(view_of(status))          # as often as there is news
        console.close()
        console.lines(summary_lines(result) + next_lines(result))
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None, every_s: float = PLAIN_EVERY_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._is_live = self._stream.isatty() if live is None else live
        self._every_s, self._clock = every_s, clock
        self._pace = Pace()
        self._rewards: deque[float] = deque(maxlen=BAR_CELLS)
        self._stages_said = 0
        self._said: tuple[int, str] | None = None
        self._said_at = -math.inf
        self._stall_said: str | None = None
        self._live: Live | None = None

    def line(self, text: str) -> None:
        """One line, above the live display if there is one."""
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(clean(text)))
        else:
            self._stream.write(clean(text) + "\n")
            self._stream.flush()

    def lines(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.line(text)

    def show(self, view: View) -> None:
        """Bring the display up to date: finished stages become lines, the rest is redrawn or said now and then."""
        now = self._clock()
        reward = view.metrics.get("reward/mean", math.nan)
        if view.step > (self._said[0] if self._said else 0) and math.isfinite(reward):
            self._rewards.append(reward)
        if view.state == "training":
            self._pace.saw(now, view.step)
        self._say_stages(view)
        if view.stall is not None and view.stall != self._stall_said:
            self.line(f"  {view.stall}")
        self._stall_said = view.stall
        left_s = self._pace.left_s(now, view.total)
        if self._is_live:
            self._draw(view, left_s)
        else:
            self._say(view, left_s, now)
        self._said = (view.step, view.state)

    def close(self) -> None:
        """End the live display and give the cursor back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say_stages(self, view: View) -> None:
        for name, seconds in view.stages[self._stages_said:]:
            if seconds is None:  # in order: a later one is said after it
                break
            self.line(f"  {name:<12} {seconds:6.1f} s")
            self._stages_said += 1

    def _say(self, view: View, left_s: float | None, now: float) -> None:
        changed = self._said is None or self._said != (view.step, view.state)
        last = view.total > 0 and view.step == view.total and changed
        nothing_new = view.part is None and (view.step == 0 or not changed)
        if nothing_new or (now - self._said_at < self._every_s and not last):
            return
        self._said_at = now
        self.line(plain_line(view, left_s))

    def _draw(self, view: View, left_s: float | None) -> None:
        picture = picture_of(view, left_s, tuple(self._rewards))
        if self._live is None:
            from rich.console import Console as RichConsole
            from rich.live import Live

            self._live = Live(picture, console=RichConsole(file=self._stream, highlight=False, markup=False,
                                                           force_terminal=True),
                              refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._live.update(picture)


@contextmanager
def stage(console: Console, name: str) -> Iterator[None]:
    """Say how long it took, unless it raises."""
    begun = time.monotonic()
    yield
    console.line(f"  {name:<12} {time.monotonic() - begun:6.1f} s")


def plain_line(view: View, left_s: float | None) -> str:
    """`step 42/180  reward 0.61  accuracy 0.58  staleness 1.2 max 2  3 012 tokens/s  38 s left`"""
    if view.part is not None:
        name, done, total = view.part
        return f"  {name} {done}/{total}"
    words = [f"step {view.step:>{len(str(view.total))}}/{view.total}", *facts(view)]
    if left_s is not None and view.step < view.total:
        words.append(f"{duration(left_s)} left")
    if view.note:
        words.append(view.note)
    return "  ".join(words)


def facts(view: View) -> list[str]:
    """The numbers that people look at first, those that are known; of a run that trains always how fast it is."""
    get = view.metrics.get
    said: list[str] = []
    if _known(get("reward/mean")):
        said.append(f"reward {get('reward/mean'):.3f}")
    if _known(view.accuracy):
        said.append(f"accuracy {view.accuracy:.3f}")
    if _known(get("staleness/mean")):
        said.append(f"staleness {get('staleness/mean'):.1f} max {get('staleness/max', math.nan):.0f}")
    if view.metrics or view.state == "training":
        said.append(f"{_rate(view.tokens_per_s)} tokens/s")
    if view.alarm:
        said.append(f"alarm at {view.alarm}")
    return said


def _rate(value: float | None) -> str:
    """Never 0, which would say that nothing is trained: `3 012`, `0.25`; a dash where it is unknown."""
    if value is None or not value > 0:
        return "-"
    return number(value) if value >= 10 else f"{value:.2g}"


def _busy(view: View) -> list[str]:
    shares = [(side, view.metrics.get(f"utilization/{side}_busy")) for side in ("learner", "rollout")]
    return [f"{side} {100 * share:.0f} % busy" for side, share in shares if share is not None and _known(share)]


def picture_of(view: View, left_s: float | None, rewards: Sequence[float]) -> RenderableType:
    """The live display: a bar, the numbers, and what it waits for. At most four lines."""
    from rich.console import Group
    from rich.text import Text

    running = next((stage for stage, seconds in view.stages if seconds is None), view.state)
    name, done, total = view.part or (running, view.step, view.total if view.metrics or view.state == "training" else 0)
    filled = round(BAR_CELLS * done / total) if total else 0
    head = Text()
    head.append(f"{clean(name):<12} ", style="bold")
    head.append("━" * filled, style="blue").append("━" * (BAR_CELLS - filled), style="bright_black")
    head.append(f"  {done}/{total}" if total else "")
    if left_s is not None and done < total:
        head.append(f"  {duration(left_s)} left")
    rows: list[Text] = [head]
    if said := facts(view):
        rows.append(Text("  ".join(said)))
    if view.metrics:
        rows.append(Text("  ".join([sparkline(rewards), *_busy(view)]), style="bright_black"))
    if view.note:
        rows.append(Text(clean(view.note), style="yellow"))
    return Group(*rows)


def sparkline(values: Sequence[float]) -> str:
    """One block per value, from the least to the greatest of them."""
    lo, hi = min(values, default=0.0), max(values, default=0.0)
    scale = (len(SPARKS) - 1) / (hi - lo) if hi > lo else 0.0
    return "".join(SPARKS[round((value - lo) * scale)] for value in values)


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary table, from the object that `--json` prints (rl_core/summary.py, Summary)."""
    def shown(key: str, digits: int) -> str:
        return "-" if summary[key] is None else f"{summary[key]:.{digits}f}"

    table = [
        ("run", summary["run_key"]),
        ("steps", number(summary["steps"])),
        ("accuracy", f"{shown('accuracy_start', 3)} -> {shown('accuracy_end', 3)}"),
        ("groups", f"{number(summary['groups_trained'])} trained, {number(summary['groups_dropped'])} dropped"),
        ("staleness", f"mean {shown('staleness_mean', 2)}, max {shown('staleness_max', 0)} publications"),
        ("update lag", f"mean {shown('update_lag_mean', 2)} updates"),
        ("speed", f"{shown('samples_per_s', 0)} answers/s while training"),
    ]
    head = f"{summary['status']} in {duration(summary['wall_s'])}"
    return ["", head, *(f"  {name:<12}{text}" for name, text in table)]


def next_lines(summary: Mapping[str, Any], figures: str | None = None) -> list[str]:
    """Where to look next. `figures`: the directory that holds them."""
    key = summary["run_key"]
    commands = [("headway ui", "MLflow and Prefect in the browser")]
    if summary["steps"]:
        commands.append((f"headway inspect {key} --step {summary['steps'] - 1}", "prompts, answers, rewards of a step"))
    commands.append((f"headway audit {key}", "where every prompt and every answer went"))
    if figures:
        commands.append((figures, "learning curve, staleness, timeline"))
    width = max(len(command) for command, _ in commands)
    return ["", "where to look next", *(f"  {command:<{width}}  {what}" for command, what in commands)]


def stopped_lines(*, run_key: str, signal: str, step: int, total: int, resume: str) -> list[str]:
    """What Ctrl-C and SIGTERM leave on the screen: at most five lines."""
    return ["", f"stopped by {signal} after {step} of {total} steps; what has landed is kept", f"  go on    {resume}",
            f"  look at  headway status {run_key}"]


def failed_lines(*, run_key: str, cause: str, logs: str, resume: str) -> list[str]:
    """The first cause of a failure, what the part wrote last that caused it, where the whole story is, and how to go
    on."""
    return ["", *cause_lines(cause), f"  logs     {logs}", f"  look at  headway status {run_key}",
            f"  go on    {resume}"]


def cause_lines(cause: str) -> list[str]:
    """`failed: LearnerDead: ...`, and the other lines of the message below it."""
    first, *more = cause.splitlines() or [""]
    return [f"failed: {first}", *(f"    {line}" for line in more)]


def amendment_text(from_step: int, changed: Mapping[str, Sequence[Any]]) -> str:
    """`from step 60 on: total_steps 60 -> 120, learner.lr 0.0005 -> 0.0003`."""
    return f"from step {from_step} on: " + ", ".join(f"{name} {was} -> {now}" for name, (was, now) in changed.items())


def number(value: float) -> str:
    """`12345.6` -> `12 346`."""
    return f"{value:,.0f}".replace(",", " ")


def duration(seconds: float) -> str:
    """`112` -> `1 min 52 s`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clean(text: str) -> str:
    """Text without control characters: what comes from models, rewards and files may not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
