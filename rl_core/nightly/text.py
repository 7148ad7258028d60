"""What came out of a night, in words: for Prefect's artifact and for a webhook. The page is rl_core/pages/report.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.looking.difference_text import DASH
from rl_core.nightly.nights import Night, Outcome
from rl_core.run_dir import json_values

WORDS = {"promote": "promoted", "keep": "kept, the baseline stays", "alarm": "alarm, the baseline stays"}


def number(value: float) -> str:
    """`0.7625`; a dash for what does not exist."""
    return DASH if math.isnan(value) else f"{value:.4g}"


def night_words(night: Night, outcome: Outcome, version: int | None) -> dict[str, Any]:
    """The verdict as JSON values: what the flow returns, and what a webhook gets."""
    reason = outcome.reasons[0]
    return json_values({
        "subject": f"{night.key}: {outcome.verdict}", "text": f"{night.key}: {WORDS[outcome.verdict]}: {reason}",
        "night": night.key, "verdict": outcome.verdict, "reasons": list(outcome.reasons), "run_key": outcome.run_key,
        "baseline": None if outcome.baseline is None else str(outcome.baseline),
        "model": None if version is None else f"{night.name}/{version}",
        "differences": {each.name: {"baseline": each.baseline, "value": each.value, "difference": each.difference,
                                    "low": each.low, "high": each.high, "unit": each.unit}
                        for each in outcome.differences}})


def night_markdown(night: Night, outcome: Outcome, facts: Mapping[str, str]) -> str:
    """The report as Markdown: verdict, reasons, numbers, runs, notes, lineage."""
    base = "nothing: first night" if outcome.baseline is None else str(outcome.baseline)
    parts = [f"## {_cell(night.key)}: {WORDS[outcome.verdict]}", *(f"* {_cell(reason)}" for reason in outcome.reasons),
             "", f"Compared with {_cell(base)}.", "",
             _table(["what", "baseline", "this night", "difference", "95 %", "unit"],
                    [[each.name, number(each.baseline), number(each.value), each.said.difference,
                      each.said.interval, each.unit] for each in outcome.differences])]
    if night.is_matrix:
        rows = {run.run_key: run.overrides for run in night.runs}
        parts += ["", "### Runs", _table(["run", "settings", "verdict by itself", "why"], [
            [one.run_key, str(rows[one.run_key]), one.judgement.verdict, one.judgement.reasons[0]]
            for one in outcome.compared])]
    if outcome.changed:
        parts += ["", "### Settings that differ", _table(["setting", "baseline", "this night"], [
            [name, str(before), str(now)] for name, (before, now) in outcome.changed.items()])]
    parts += ["", "### To know", *(f"* {_cell(note)}" for note in outcome.notes)] if outcome.notes else []
    parts += ["", "### Lineage", _table(["what", "value"], [[name, f"`{value}`"] for name, value in facts.items()])]
    return "\n".join(parts) + "\n"


def failed_markdown(night: Night, why: str) -> str:
    """What a night without a verdict leaves: how far its runs are not told here, they have their own pages."""
    runs = ", ".join(run.run_key for run in night.runs)
    return f"## {_cell(night.key)}: no verdict\n\n{_cell(why)}\n\nRuns: {_cell(runs)}\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: str) -> str:
    """Text of a table or line: what could end it, or be markup of a page, is shown."""
    return value.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
