"""`headway reward test`: a reward tried on some rows, as a table with what is wrong below it."""

from __future__ import annotations

from typing import Any

from flows.command import answer
from flows.console import clean
from flows.presets import load_preset
from rl_core.errors import DataError, DeadlinePassed
from rl_core.plan import merge, parse_overrides, resolve

WIDTHS = {"row": 24, "of": 13, "answer": 24, "reward": 8, "correct": 7, "extracted": 16, "ms": 8}
COMPLETE = 60
"""Characters of the last column, the parts."""


def show_trial(reward: str, preset: str, set_: list[str], *, data: str | None, rows: int, as_json: bool) -> int:
    """Try a reward on the first rows; 1 if it would fail answers in a run, 2 if it cannot be tried."""
    return answer(lambda: _tried(reward, preset, set_, data, rows), report_lines, as_json=as_json,
                  holds=lambda report: report["holds"])


def _tried(reward: str, preset: str, set_: list[str], data: str | None, rows: int) -> dict[str, Any]:
    from tasks.reward_trial import try_reward, whole_target

    chosen: dict[str, Any] = {"reward": whole_target(reward)}
    if data is not None:
        chosen["data"] = {"train": data}
    config = resolve(load_preset(preset), merge(parse_overrides(set_), chosen))
    try:
        return try_reward(config, rows)
    except DeadlinePassed as error:  # rows that do not come in time are none
        raise DataError(str(error)) from error


def report_lines(report: dict[str, Any]) -> list[str]:
    """The table, then problems and notes."""
    called = f", called in the signature `{report['signature']}`" if report["signature"] else ""
    lines = [f"{report['reward']}{called}"]
    if report["rows"]:
        lines += ["", _line({name: name for name in WIDTHS}, "parts")]
        before = f"reward {report['reward']}: "
        lines += [_line(_cells(row), (row["error"] or "").removeprefix(before) or _parts(row["parts"]))
                  for row in report["rows"]]
        lines += [""]
    lines += [f"PROBLEM  {problem}" for problem in report["problems"]]
    lines += [f"note     {note}" for note in report["notes"]]
    return [*lines, "works" if report["holds"] else "does not work: see PROBLEM above"]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {"row": row["row"], "of": row["of"], "answer": row["answer"], "reward": _number(row["reward"]),
            "correct": _number(row["correct"]), "extracted": row["extracted"] or "", "ms": f"{row['ms']:.1f}"}


def _line(cells: dict[str, str], last: str) -> str:
    return "  ".join([*(_fit(cells[name], width, keep_end=name == "row") for name, width in WIDTHS.items()),
                      _fit(last, COMPLETE).rstrip()]).rstrip()


def _fit(text: str, width: int, *, keep_end: bool = False) -> str:
    """One line of exactly `width` characters; a place keeps its end, where file and line stand."""
    flat = clean(" ".join(text.split()))
    if len(flat) > width:
        flat = "..." + flat[3 - width:] if keep_end else flat[:width - 3] + "..."
    return flat.ljust(width)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _parts(parts: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in parts.items())
