"""`headway hook test`: a function of a user's against the contract of its kind."""

from __future__ import annotations

from typing import Any

from flows.command import answer


def show_hook_trial(hook: str, *, as_json: bool) -> int:
    """Try a hook; 1 if it does not keep its contract, 2 if it cannot be tried."""
    return answer(lambda: _tried(hook), hook_lines, as_json=as_json, holds=lambda report: report["holds"])


def _tried(hook: str) -> dict[str, Any]:
    from tasks.hook_trial import run_trial

    return run_trial(hook)


def hook_lines(report: dict[str, Any]) -> list[str]:
    """Problems, or how a run takes it."""
    if report["holds"]:
        sets = " ".join(f"--set {each}" for each in report["settings"])
        return [f"{report['target']} keeps the contract of a {report['kind'].replace('_', ' ')}", f"use it: {sets}"]
    return [report["target"], *(f"PROBLEM  {problem}" for problem in report["problems"]),
            f"does not keep the contract of a {report['kind'].replace('_', ' ')}: see PROBLEM above, and docs/hooks.md"]
