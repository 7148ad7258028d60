"""`headway validate`: accuracy of a run's weights, or of any model directory, on held-out prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.command import answer, hush, leave_on_sigterm
from flows.console import Console, stage
from flows.presets import load_preset
from rl_core.errors import ConfigError
from rl_core.plan import parse_overrides

MODEL_PRESET = "local-model-cpu"
SAY_EVERY_S = 5.0
SHOWN_PASSES = 2
"""Columns for pass@k, those of the largest k; the JSON object has all of them."""


def validate(run_key: str | None, *, model: str | None, step: int | None, preset: str | None, overrides: Sequence[str],
             out: str | None, as_json: bool) -> int:
    """Run `headway validate`; returns its exit code."""
    hush()
    leave_on_sigterm()
    console = Console()
    console.line(f"headway {version('headway')}: validate {run_key or model or ''}")

    def measured() -> dict[str, Any]:
        _check_arguments(run_key, model, step, preset, out)
        return _measure(console, run_key, model, step, preset, overrides, out)

    return answer(measured, report_lines, as_json=as_json, both=True, stopped="stopped; nothing was written")


def _check_arguments(run_key: str | None, model: str | None, step: int | None, preset: str | None,
                     out: str | None) -> None:
    if (run_key is None) == (model is None):
        raise ConfigError("validate: give a run's key, or a model directory as --model DIR")
    if model is not None and step is not None:
        raise ConfigError(f"--step {step}: belongs to a run; a model directory has one set of weights")
    if run_key is not None and preset is not None:
        raise ConfigError(f"--preset {preset}: a run is measured by its own settings; change single ones with --set")
    if out is not None and Path(out).exists():
        raise ConfigError(f"--out {out!r}: is there already, and nothing is overwritten; name another file")


def _measure(console: Console, run_key: str | None, model: str | None, step: int | None, preset: str | None,
             overrides: Sequence[str], out: str | None) -> dict[str, Any]:
    changes = parse_overrides(overrides)
    settings = {} if model is None else load_preset(preset or MODEL_PRESET)
    with stage(console, "model"):
        from tasks.measurement import measure, of_model, of_run, open_subject, write_report

        subject = of_model(model, settings, changes) if model is not None else of_run(run_key or "", step, changes)
        measuring = open_subject(subject)
    try:
        with stage(console, "answers"):
            report, table = measure(subject, measuring, _Said(console))
    finally:
        measuring.close()
    if out is not None:
        write_report(Path(out), report, table)
    return report


class _Said:
    """Says now and then how many answers are there."""

    def __init__(self, console: Console) -> None:
        self._console, self._said_at = console, time.monotonic()

    def __call__(self, scored: int, total: int) -> None:
        if time.monotonic() - self._said_at > SAY_EVERY_S:
            self._said_at = time.monotonic()
            self._console.line(f"  {scored} of {total} answers")


# -- in words


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """A table with a row for each data source and one for all of them, and what to know about it."""
    sources: dict[str, Mapping[str, Any]] = dict(report["by_source"])
    rows = [*sources.items(), ("all", report)] if len(sources) > 1 else list(sources.items())
    columns = _columns(report)
    cells = [["", "prompts", *(title for title, _, _ in columns)]]
    cells += [[name, str(row["n"]), *(_cell(row, value, interval) for _, value, interval in columns)]
              for name, row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    table = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
             for line in cells]
    modes = [mode for mode in ("greedy", "sampled") if f"{mode}_length" in report]
    notes = [f"  {mode}: {report[f'{mode}_length']:.1f} tokens, {100 * report[f'{mode}_truncated']:.1f} % cut at the "
             f"limit" + (f", {report[f'{mode}_failed']} not scored" if report[f"{mode}_failed"] else "")
             for mode in modes]
    if report["left_out"]:
        notes.append(f"  {report['left_out']} held-out prompts are longer than data.max_prompt_tokens and left out")
    what = f"{report['run_key']}, {report['step']} training steps ({report['source']})" if report["run_key"] \
        else report["model"]
    return ["", what, *table, *notes, "  brackets: 95 % intervals, by prompts"]


def _columns(report: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Title, path of the value, path of the interval; only what is known of at least all sources together."""
    columns: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("greedy", ("greedy_accuracy",), ("greedy_interval",))]
    if report["greedy_accuracy"] is None:
        columns = [("greedy reward", ("greedy_reward",), ("greedy_reward_interval",))]
    if report.get("sampling") is None:
        return columns
    n = report["sampling"]["n"]
    if report["mean_at_n"] is None:
        return [*columns, (f"reward mean@{n}", ("sampled_reward",), ("sampled_reward_interval",))]
    columns.append((f"mean@{n}", ("mean_at_n",), ("mean_at_n_interval",)))
    passes = [k for k in report["pass_at_k"] if int(k) > 1][-SHOWN_PASSES:]
    columns += [(f"pass@{k}", ("pass_at_k", k), ("pass_at_k_interval", k)) for k in passes]
    if n > 1 and report["maj_at_n"] is not None:
        columns.append((f"maj@{n}", ("maj_at_n",), ("maj_at_n_interval",)))
    return columns


def _cell(row: Mapping[str, Any], value: Sequence[str], interval: Sequence[str]) -> str:
    found, between = _at(row, value), _at(row, interval)
    if found is None:
        return "-"
    return f"{found:.3f}" + ("" if between is None else f" [{between[0]:.3f}, {between[1]:.3f}]")


def _at(row: Mapping[str, Any], path: Sequence[str]) -> Any:
    found: Any = row
    for name in path:
        found = found[name]
    return found
