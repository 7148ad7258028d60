"""`headway timeline`: what each part of a run did when, as a page or as a trace."""

from __future__ import annotations

from typing import Any

from flows.command import answer, hush


def write_timeline(run_key: str, out: str, *, as_json: bool) -> int:
    """Write it to `out`; returns the exit code."""
    hush()
    from tasks.timing import draw_timeline

    return answer(lambda: draw_timeline(run_key, out), _lines, as_json=as_json)


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['run_key']}: {report['spans']} spans in {report['lanes']} lanes over {report['seconds']:.1f} s",
             f"written to {report['file']}"]
    return lines + [f"gap: {gap}" for gap in report["gaps"]]
