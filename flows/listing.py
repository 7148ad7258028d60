"""`headway settings`: what can be set."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from flows.command import answer

WIDTH = 100


def show_settings(of: str, *, as_json: bool) -> int:
    """Run `headway settings`; returns its exit code. Reads nothing but the program."""
    from rl_core.settings_table import settings

    return answer(lambda: {"settings": [row._asdict() for row in settings(of)]}, setting_lines, as_json=as_json)


def setting_lines(found: Mapping[str, Any]) -> list[str]:
    """Two lines or more for each: name, default, values and kind; then what it is."""
    lines: list[str] = []
    for row in found["settings"]:
        lines.append(f"{row['name']} = {row['default']}    ({row['values']}; {row['kind']})")
        text = row["text"] + (f" Of {', '.join(row['only'])}." if row["only"] else "")
        lines += textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return lines
