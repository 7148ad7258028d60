"""The words and bars of `headway status --watch`, from a report of tasks/watching.py. Pure; only colours need rich."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flows.console import SPARKS, clean, duration, facts, plain_line, view_of

if TYPE_CHECKING:
    from rich.text import Text

LABEL = 10
BAR, CURVE_WIDTH, CURVE_ROWS = 40, 60, 4
AGES_SHOWN = 8
"""Rows of the histogram; what is older is one row."""
LITTLE = 0.05
"""A side that waits for less of its time than this is not said to wait."""
FILLS = {"busy": "█", "waiting": "░", "syncing": "▓", "paused": "▒"}
STYLES = {"busy": "blue", "waiting": "bright_black", "syncing": "yellow", "paused": "magenta"}


def watch_line(report: Mapping[str, Any]) -> str:
    """Everything in one line, for a pipe or a log: `training  step 42/180  reward 0.612 ...  learner waits 3 %`."""
    shares = report["utilization"]
    waiting = [f"{side} waits {share:.0%}" for side in ("learner", "rollout")
               if (share := shares[f"{side}_waiting"]) is not None]
    end = _cause(report) or ("; ".join(map(wait_text, report["waits"])))
    words = plain_line(_view(report, note=False), report["left_s"]).strip()
    return clean("  ".join([report["state"], words, *waiting, *([end] if end else [])]))


def watch_rows(report: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    """The picture, row by row, each of `(text, style)` parts: bar, numbers, curve, histogram, both sides, waits."""
    return [*_head(report), *_curve_rows(report), *_age_rows(report), *_side_rows(report), *_wait_rows(report)]


def picture(report: Mapping[str, Any]) -> Text:
    """`watch_rows` for a terminal. Imports rich."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    for i, row in enumerate(watch_rows(report)):
        text.append("\n" if i else "")
        for part, style in row:
            text.append(clean(part), style=style)
    return text


def curve(values: Sequence[float], width: int, rows: int) -> list[str]:
    """Columns of eighths, from the least to the greatest value; more values than columns are averaged.

    `curve([0, 1, 2], 3, 2)` -> `["  █", "▁██"]`, from the top.
    """
    cells = _cells([value for value in values if math.isfinite(value)], width)
    lo, hi = min(cells, default=0.0), max(cells, default=0.0)
    eighths = rows * len(SPARKS)
    heights = [1 + round((eighths - 1) * (value - lo) / (hi - lo)) if hi > lo else 1 for value in cells]
    return ["".join(_block(height - row * len(SPARKS)) for height in heights) for row in reversed(range(rows))]


def _cells(values: Sequence[float], width: int) -> list[float]:
    n = min(width, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)] if n else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _block(eighths: int) -> str:
    return " " if eighths <= 0 else SPARKS[min(eighths, len(SPARKS)) - 1]


def stacked(shares: Sequence[float], width: int) -> list[int]:
    """Cells of each share of a bar, which sum to `width` where the shares sum to 1: `stacked([.5, .25, .25], 8)` ->
    `[4, 2, 2]`."""
    ends, total = [0], 0.0
    for share in shares:
        total += share
        ends.append(round(width * min(1.0, total)))
    return [b - a for a, b in pairwise(ends)]


def wait_text(wait: Mapping[str, Any]) -> str:
    """`the flow waits on the rollout side for a full claim of step 3, since 12 s, at most 30 min 00 s`."""
    limit = "" if wait["deadline_s"] is None else f", at most {duration(wait['deadline_s'])}"
    return f"{wait['who']} waits on {wait['on']} for {wait['what']}, since {duration(wait['waited_s'])}{limit}"


def who_waits(report: Mapping[str, Any]) -> str:
    """Which side starves which, by what both did with their time lately."""
    learner, rollout = (report["utilization"][f"{side}_waiting"] or 0.0 for side in ("learner", "rollout"))
    if max(learner, rollout) < LITTLE:
        return "neither side waits for the other"
    if learner >= rollout:
        return f"the learner waits for rollouts, {learner:.0%} of its time"
    binding = report["live"].get("binding")
    return f"rollout workers wait for the learner, {rollout:.0%} of their time" + (
        f" (capacity: {binding})" if binding else "")


def _view(report: Mapping[str, Any], *, note: bool = True) -> Any:
    known = [value for value in report["accuracy"] if value is not None]
    first, last = (known[0], known[-1]) if known else (None, None)
    return view_of({**report, "step": report["steps"], "accuracy": last, "accuracy_start": first,
                    "note": report["note"] if note else None})


def _head(report: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    view = _view(report)
    running = next((name for name, seconds in view.stages if seconds is None), view.state)
    name, done, total = view.part or (running, view.step, view.total)
    filled = round(BAR * min(1.0, done / total)) if total else 0
    left = report["left_s"]
    head = [(f"{report['run_key']}", "bold"), (f"  {report['state']}, attempt {report['attempt']}", "")]
    bar = [(f"{name:<{LABEL}}", ""), ("━" * filled, "blue"), ("━" * (BAR - filled), "bright_black"),
           (f"  {done}/{total}", ""), (f"  {duration(left)} left" if left else "", "")]
    said = facts(view)
    return [head, bar, *([[("  ".join(said), "")]] if said else [])]


def _curve_rows(report: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    steps = report["reward"]["steps"]
    rewards = [value for value in report["reward"]["mean"] if value is not None]
    if not rewards:
        return []
    lines = curve(rewards, CURVE_WIDTH, CURVE_ROWS)
    lo, hi = min(_cells(rewards, CURVE_WIDTH)), max(_cells(rewards, CURVE_WIDTH))
    labels = [f"{hi:.3f}", *[""] * (CURVE_ROWS - 2), f"{lo:.3f}"]
    head = [[], [("reward", "bold"), (f"  of trained answers, steps {steps[0]} to {steps[-1]}", "bright_black")]]
    return head + [[(f"{label:>{LABEL - 2}} ", "bright_black"), ("┤", "bright_black"), (line, "blue")]
                   for label, line in zip(labels, lines, strict=True)]


def _age_rows(report: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    groups = {int(age): n for age, n in report["staleness"]["groups"].items()}
    total, limit = sum(groups.values()), report["staleness"]["limit"]
    if not total:
        return []
    shown = [(str(age), groups.get(age, 0), age) for age in range(min(AGES_SHOWN, max(groups) + 1))]
    if (older := sum(n for age, n in groups.items() if age >= AGES_SHOWN)) > 0:
        shown.append((f"{AGES_SHOWN}+", older, AGES_SHOWN))
    head = [[], [("staleness", "bold"), (f"  of {total} trained groups, publications; bound {limit}", "bright_black")]]
    return head + [[(f"{label:>{LABEL - 2}} ", "bright_black"), ("┤", "bright_black"),
                    ("█" * math.ceil(BAR * n / total), "blue" if age <= limit else "yellow"), (f" {n / total:.0%}", "")]
                   for label, n, age in shown]


def _side_rows(report: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    rows: list[list[tuple[str, str]]] = []
    for side in ("learner", "rollout"):
        shares = [report["utilization"][f"{side}_{state}"] for state in FILLS]
        if any(share is None for share in shares):
            continue
        bar = [(FILLS[state] * cells, STYLES[state]) for state, cells in zip(FILLS, stacked(shares, BAR), strict=True)]
        words = "  ".join(f"{state} {share:.0%}" for state, share in zip(FILLS, shares, strict=True)
                          if share >= 0.005 or state == "busy")
        rows.append([(f"{side:<{LABEL}}", ""), *bar, (f"  {words}", "")])
    return [[], *rows] if rows else []


def _cause(report: Mapping[str, Any]) -> str:
    """Its first line: `headway status` has the others."""
    return (report["cause"] or "").partition("\n")[0]


def _wait_rows(report: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    rows: list[tuple[str, str, str]] = []
    if not report["over"]:
        said = [wait_text(wait) for wait in report["waits"]] or ([who_waits(report)] if report["steps"] else [])
        rows += [("waits", text, "") for text in said]
    rows += [("note", report["note"], "yellow")] if report["note"] else []
    rows += [("cause", cause, "red")] if (cause := _cause(report)) else []
    return [[(f"{label:<{LABEL}}", ""), (text, style)] for label, text, style in rows]
