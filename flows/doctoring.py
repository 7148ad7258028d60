"""The words of `headway doctor`: runs with what they do and wait for, then what is wrong, then what was mended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.command import answer
from flows.console import duration


def show_diagnosis(run_key: str | None, *, fix: bool, as_json: bool) -> int:
    """Say what was found; with `fix` mend what has no live owner, and look again. 0: nothing is wrong now, 1: it is."""
    from tasks.diagnosis import diagnose

    def found() -> dict[str, Any]:
        report = diagnose(run_key)
        mended = _mended(report, run_key) if fix else {}
        return {**(diagnose(run_key) if mended else report), "mended": mended}

    return answer(found, lambda report: diagnosis_lines(report, one=run_key is not None), as_json=as_json,
                  holds=lambda report: report["healthy"])


def _mended(report: Mapping[str, Any], run_key: str | None) -> dict[str, list[str]]:
    """What was done, by run: those with something to mend; one that was named also if its leftovers still may wait, or
    Prefect could not be asked about it."""
    from tasks.mending import mend

    return {run["run_key"]: mend(run["run_key"]) for run in report["runs"] if not run["alive"] and (
        any(finding["mends"] for finding in run["findings"])
        or (run_key is not None and (run["processes"] or run["state"] == "stopped")))}


def diagnosis_lines(report: Mapping[str, Any], *, one: bool) -> list[str]:
    """The report for people. Of all runs those that run, or have something to say; the others are counted."""
    shown = [run for run in report["runs"] if one or run["alive"] or run["findings"] or run["processes"]]
    lines: list[str] = []
    for run in shown:
        lines += [*_run_lines(run), ""]
    quiet = len(report["runs"]) - len(shown)
    if quiet:
        lines += [f"{quiet} other run{'s' if quiet > 1 else ''}: nothing runs, nothing is wrong", ""]
    home = report["home"]
    lines.append(f"home        {home['directory']}, {_bytes(home['free_bytes'])} free")
    for database in home["databases"]:
        state = "can be reached" if database["trouble"] is None else database["trouble"]
        lines.append(f"{database['name']:<12}{database['where']}: {state}")
    lines += [f"WRONG       {finding['text']}" for finding in home["findings"]]
    for key, done in report["mended"].items():
        lines += [f"mended      {key}: {text}" for text in done] or [f"mended      {key}: nothing was left to do"]
    count = len(home["findings"]) + sum(len(run["findings"]) for run in report["runs"])
    return [*lines, "healthy" if report["healthy"] else f"{count} thing{'s are' if count > 1 else ' is'} wrong"]


def _run_lines(run: Mapping[str, Any]) -> list[str]:
    owner = run["owner"]
    since = "" if run["since_s"] is None else f" for {duration(run['since_s'])}"
    rows = [("run", run["run_key"]), ("state", f"{run['state']}{since}, {run['steps']} of {run['total_steps']} steps"),
            ("owner", "none" if owner is None else f"pid {owner['pid']} on {owner['host']}, attempt {run['attempt']}")]
    rows += [("waits", _wait_text(wait)) for wait in run["waits"]]
    rows += [("workers", _worker_text(name, worker)) for name, worker in run["live"].get("workers", {}).items()]
    rows += [("actors", ", ".join(f"{a['actor']} (pid {a['pid']}{_state(a)})" for a in run["actors"]))] \
        if run["actors"] else []
    rows.append(("disk", f"{_bytes(run['used_bytes'])} of {_bytes(run['quota_bytes'])} (storage.bytes_quota)"))
    rows += [("note", text) for text in run["notes"]]
    rows += [("WRONG", finding["text"] + ("; --fix mends it" if finding["mends"] else ""))
             for finding in run["findings"]]
    return [f"{name:<12}{text}" for name, text in rows]


def _wait_text(wait: Mapping[str, Any]) -> str:
    limit = "" if wait["deadline_s"] is None else f", at most {duration(wait['deadline_s'])}"
    why = f"; {wait['why']}" if wait["why"] else ""
    return f"{wait['who']} on {wait['on']} for {wait['what']}, since {duration(wait['waited_s'])}{limit}{why}"


def _worker_text(name: str, worker: Mapping[str, Any]) -> str:
    alive = "" if worker["alive"] else "dead, "
    return f"{name}: {alive}serves publication {worker['served_idx']}, {worker['in_flight']} groups in flight, the " \
           f"oldest for {duration(worker.get('oldest_lease_s', 0.0))}"


def _state(actor: Mapping[str, Any]) -> str:
    if actor["stopped"]:
        return ", stopped"
    return {True: "", False: ", dead", None: ", on another machine"}[actor["alive"]]


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
