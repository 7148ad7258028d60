"""The commands that look: status, audit, inspect. They read run directories and change nothing."""

from __future__ import annotations

from typing import Any

from flows.command import FAILED, failed, show
from flows.looking_text import extreme_lines, group_lines, status_lines, step_lines
from rl_core.errors import BrokenFile, ConfigError


def show_status(run_key: str, *, as_json: bool) -> int:
    """What the run is doing, or how it ended."""
    from tasks.inspection import run_status

    return _show(run_status, run_key, as_json=as_json, lines=status_lines)


def show_audit(run_key: str, *, as_json: bool) -> int:
    """The partition of prompts and rows; 1 if it does not hold."""
    from tasks.inspection import run_audit

    return _show(run_audit, run_key, as_json=as_json, lines=_audit_lines,
                 code=lambda report: 0 if report["holds"] else FAILED)


def show_answers(run_key: str, *, step: int | None, group: str | None, best: int | None, worst: int | None,
                 as_json: bool) -> int:
    """Prompts, answers, rewards and versions: of one training step (by default the newest), of one group, or the best
    or worst answers of a step or of the run."""
    given = [name for name, value in (("--group", group), ("--best", best), ("--worst", worst)) if value is not None]
    if len(given) > 1 or (group is not None and step is not None):
        named = [*given, *(["--step"] if step is not None and group else [])]
        return failed(f"{' and '.join(named)} ask for different things; give --group alone, or one of --best and "
                      "--worst, with --step or without")
    from tasks.answers import run_extremes, run_group, run_step

    if group is not None:
        return _show(lambda key: run_group(key, group), run_key, as_json=as_json, lines=group_lines)
    if best is not None or worst is not None:
        count = best if best is not None else worst
        return _show(lambda key: run_extremes(key, "best" if worst is None else "worst", count or 0, step), run_key,
                     as_json=as_json, lines=extreme_lines)
    return _show(lambda key: run_step(key, step), run_key, as_json=as_json, lines=step_lines)


def _show(read: Any, run_key: str, *, as_json: bool, lines: Any, code: Any = lambda report: 0) -> int:
    try:
        report = read(run_key)
    except (ConfigError, BrokenFile) as error:
        return failed(error)
    show(report, lines, as_json=as_json)
    return code(report)


def _audit_lines(report: dict[str, Any]) -> list[str]:
    epoch, position = report["frontier"]
    lines = [f"{report['run_key']}: {report['claims']} claims, {report['recorded']} records, {report['shards']} "
             f"shards; prompts up to position {position} of dataset epoch {epoch}"]
    if (origin := report["origin"]) is not None:
        lines.append(f"shards of run {origin['run_key']} ({origin['run_uuid']}), "
                     + ("scored anew; each says which one it is of" if origin["rescored"] else "linked, rewards kept"))
    for what, key in (("positions", "positions"), ("rows", "rows"), ("shards", "shard_states")):
        counts = {state: n for state, n in report[key].items() if n}
        listed = ", ".join(f"{n} {state}" for state, n in counts.items())
        lines.append(f"{what:<10}{sum(counts.values()):>8}  {listed}")
    if report["holds"]:
        return [*lines, "holds: every prompt and every landed group is in exactly one state"]
    return [*lines, f"DOES NOT HOLD: {len(report['violations'])} violations", *report["violations"][:20]]
