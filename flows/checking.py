"""`headway data check`: what a data set holds, what would be left out, and one prompt as the model gets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flows.command import answer, hush
from flows.presets import load_preset
from rl_core.errors import ConfigError, DataError, DeadlinePassed
from rl_core.plan import merge, parse_overrides, resolve, toy_words

HEAD, TAIL = 24, 16
"""Tokens of a long prompt that are shown."""


def check_files(files: Sequence[str], preset: str, overrides: Sequence[str], *, row: int, as_json: bool) -> int:
    """Run `headway data check`; returns its exit code. Without files: `data.train` of the settings."""
    hush()
    return answer(lambda: _checked(files, preset, overrides, row), report_lines, as_json=as_json,
                  holds=lambda report: report["holds"])


def _checked(files: Sequence[str], preset: str, overrides: Sequence[str], row: int) -> dict[str, Any]:
    """Raises DataError or ConfigError with everything that there is to say of them."""
    given = parse_overrides(overrides)
    if files:
        given = merge({"data": {"validation": None}}, merge(given, {"data": {"train": list(files)}}))
    config = resolve(load_preset(preset), given)
    from tasks.data_check import check_data

    try:
        return check_data(config, row=row)
    except (ConfigError, DataError, DeadlinePassed) as error:  # rows that do not come in time are none
        raise DataError("\n".join([str(error), *toy_words(config, str(error))])) from error


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    tokens, over, again = report["tokens"], report["overlong"], report["duplicates"]
    lines = [_row("source", f"{each['path']}: {each['rows']} rows, prompt: {each['prompt']}, answer: `{each['answer']}`"
                  + (f", weight {each['weight']:g}" if each["weight"] != 1 else "")) for each in report["sources"]]
    lines += [_row("", ", ".join(f"{name} {count}" for name, count in list(each["data_sources"].items())[:8]))
              for each in report["sources"] if len(each["data_sources"]) > 1]
    lines.append(_row("prompts", f"{report['rows']}; {report['positions']} positions in a dataset epoch"))
    lines.append(_row("tokens", f"min {tokens['min']}  median {tokens['median']}  p95 {tokens['p95']}  max "
                      f"{tokens['max']}; limit {over['limit']} (data.max_prompt_tokens)"))
    what = "would be refused (data.overlong=drop leaves them out)" if over["policy"] == "refuse" else "are left out"
    lines.append(_row("over limit", f"{over['count']} {what}" if over["count"] else "none"))
    lines += [_row("", f"{each['where']}: {each['tokens']} tokens") for each in over["first"]]
    lines.append(_row("duplicates", f"{again['count']}, first {again['first']['where']}, which repeats "
                      f"{again['first']['repeats']}" if again["count"] else "none"))
    lines += [_row("warning", text) for text in report["warnings"] if not text.startswith("data.train: ")]
    return [*lines, "", *_example_lines(report["example"])]


def _example_lines(example: dict[str, Any]) -> list[str]:
    tokens = example["tokens"]
    cut = len(tokens) - HEAD - TAIL
    shown = [f"{i:>6}  {token['id']:>7}  {token['mask']}     {token['text']!r}" for i, token in enumerate(tokens)]
    if cut > 0:
        shown = [*shown[:HEAD], f"   ...  {cut} more, mask 0", *shown[-TAIL:]]
    answer = f"sampled from here: the answer, at most {example['max_new_tokens']} tokens"
    return [f"{example['where']}, answer {example['answer']!r}, data source {example['data_source']}, columns "
            f"{', '.join(example['columns'])}", "", *example["text"].splitlines(), "",
            "    at       id  mask  token", *shown, f"{example['sampled_at']:>6}           1     {answer}"]


def _row(name: str, value: str) -> str:
    return f"{name:<12}{value}"
