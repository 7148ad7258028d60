"""The report of a night as one HTML file: the verdict and why, the numbers beside the baseline's with their intervals,
the runs of a matrix, what differs, and where the weights are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rl_core.looking.comparison import Difference
from rl_core.nightly.nights import Night, Outcome
from rl_core.nightly.text import WORDS, number
from rl_core.pages.page import asset, page, text

WIDTH, HEIGHT = 180, 16
"""Of the drawing of one interval, pixels."""


def night_page(night: Night, outcome: Outcome, facts: Mapping[str, str]) -> str:
    """`facts`: lineage and place of the weights, by what each is called: `{"serve": "python -m ..."}`."""
    base = "nothing to compare with: the first night" if outcome.baseline is None \
        else f"compared with {outcome.baseline}"
    due = datetime.fromtimestamp(night.scheduled_us / 1e6, UTC)
    body = [
        f'<header class="{text(outcome.verdict)}"><h1>{text(night.key)}: {text(WORDS[outcome.verdict])}</h1>',
        f"<p>{text(base)}; due {due:%Y-%m-%d %H:%M} UTC</p></header>",
        _list(outcome.reasons, "reasons"), _numbers(outcome.differences)]
    if night.is_matrix:
        body.append(_runs(night, outcome))
    if outcome.changed:
        body += ["<h2>Settings that differ</h2>", _table(("setting", "baseline", "this night"), (
            (name, _value(before), _value(now)) for name, (before, now) in outcome.changed.items()))]
    if outcome.notes:
        body += ["<h2>To know</h2>", _list(outcome.notes, "notes")]
    body += ["<h2>Weights and lineage</h2>", _table(("what", "value"), facts.items(), code=1)]
    return page(f"{night.key}: {outcome.verdict}", body="\n".join(body), style=asset("report.css"))


def _list(lines: Iterable[str], name: str) -> str:
    return f'<ul class="{name}">' + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>"


def _numbers(differences: Sequence[Difference]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("what", "baseline", "this night", "difference", "95 %", "", "unit"))
    rows = "".join(
        f"<tr><td>{text(each.name.replace('_', ' '))}</td><td>{number(each.baseline)}</td><td>{number(each.value)}</td>"
        f'<td class="{_mood(each)}">{each.said.difference}</td><td>{each.said.interval}</td>'
        f"<td>{_drawing(each)}</td><td>{text(each.unit)}</td></tr>" for each in differences)
    return f'<h2>Numbers</h2><table class="numbers"><tr>{head}</tr>{rows}</table>'


def _mood(difference: Difference) -> str:
    """Better, worse, or not known to be either."""
    return difference.verdict or "same"


def _drawing(difference: Difference) -> str:
    """The interval beside 0, each in a scale of its own; nothing where there is none."""
    reach = max(abs(difference.low), abs(difference.high))
    if not difference.said.low or math.isinf(reach):
        return ""
    def at(value: float) -> str:
        return f"{WIDTH / 2 + value / reach * (WIDTH / 2 - 6):.1f}"

    middle = HEIGHT / 2
    return (f'<svg class="{_mood(difference)}" width="{WIDTH}" height="{HEIGHT}" role="img" '
            f'aria-label="{text(difference.said.interval)}"><line class="zero" x1="{at(0)}" x2="{at(0)}" y1="0" '
            f'y2="{HEIGHT}"/><line class="ends" x1="{at(difference.low)}" x2="{at(difference.high)}" y1="{middle}" '
            f'y2="{middle}"/><circle cx="{at(difference.difference)}" cy="{middle}" r="4"/></svg>')


def _runs(night: Night, outcome: Outcome) -> str:
    settings = {run.run_key: run.overrides for run in night.runs}
    rows: list[tuple[str, ...]] = []
    for one in outcome.compared:
        accuracy = next((each for each in one.differences if each.name == "held_out_accuracy"), None)
        rows.append((one.run_key, _value(settings[one.run_key]), number(accuracy.value if accuracy else math.nan),
                     one.judgement.verdict, one.judgement.reasons[0]))
    return "<h2>Runs</h2>" + _table(("run", "settings", "held out accuracy", "by itself", "why"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, code: int | None = None) -> str:
    def cell(at: int, value: str) -> str:
        return f"<td><code>{text(value)}</code></td>" if at == code else f"<td>{text(value)}</td>"

    lines = "".join("<tr>" + "".join(cell(at, value) for at, value in enumerate(row)) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{text(name)}</th>" for name in head) + f"</tr>{lines}</table>"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
