"""`headway compare`: runs against the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.command import answer, hush


def show_comparison(keys: Sequence[str], *, plot: str | None, as_json: bool) -> int:
    """Differences with their intervals, and one plot where asked for; returns the exit code."""
    hush()
    from tasks.comparing import compare_runs

    return answer(lambda: compare_runs(keys, plot), comparison_lines, as_json=as_json)


def comparison_lines(report: Mapping[str, Any]) -> list[str]:
    """A table for each run, then what else differs, and what keeps the numbers from being read as they stand."""
    baseline = report["baseline"]
    lines: list[str] = []
    for run in report["runs"]:
        lines += [f"{run['run_key']} ({run['steps']} steps) against {baseline['run_key']} ({baseline['steps']} steps)",
                  *_table(baseline["run_key"], run)]
        lines += [f"  {name}: {before} -> {now}" for name, (before, now) in run["settings"].items()]
        lines += [f"  note: {caveat}" for caveat in run["caveats"]]
        lines.append("")
    lines += [f"gap: {gap}" for gap in report["gaps"]]
    return [*lines, f"plot: {report['plot']}"] if report["plot"] else lines[:-1] if lines[-1:] == [""] else lines


def _table(baseline: str, run: Mapping[str, Any]) -> list[str]:
    rows = [("", baseline, run["run_key"], "difference", "95 % interval", "", "")]
    for of in run["differences"]:
        if of["baseline"] is None and of["value"] is None:
            continue
        rows.append((of["name"].replace("_", " "), _number(of["baseline"]), _number(of["value"]),
                     of["said"]["difference"], of["said"]["interval"], of["unit"], of["verdict"]))
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    return ["  " + "  ".join(cell.ljust(width) if i in (0, 5, 6) else cell.rjust(width)
                             for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
