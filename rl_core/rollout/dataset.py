"""Rows of a data set: the procedural task `sort`, or a JSONL file with `prompt` and `answer` on each line.

A prompt is a text (one user message), a chat (`[{"role": "user", "content": "..."}]`), or a list of token ids. A row
that cannot be used is refused with file and line.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.rollout.environments.sort import held_out_rows, sort_rows

ROLES = ("system", "user", "assistant", "tool")
SORT = "sort"

Message = dict[str, str]
Text = str | list[Message] | list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row before tokenisation. `where` is `file:line`, for errors."""

    prompt: Text
    answer: str
    data_source: str
    where: str
    columns: dict[str, Any] = field(default_factory=dict[str, Any])


def training_rows(config: Config, cwd: Path = Path()) -> list[Row]:
    """The rows of `data.train` in file order; a relative path starts at `cwd`. Raises DataError naming the line."""
    if config.data.train == SORT:
        held_out = {row["prompt"] for row in held_out_rows(config.data.validation_size)}
        return _sort(sort_rows(config.data.size, config.seed, held_out), "data.train")
    return read_jsonl(cwd / Path(config.data.train).expanduser(), needs_answer=config.reward == "exact")


def validation_rows(config: Config, cwd: Path = Path()) -> list[Row]:
    """The first `data.validation_size` held-out rows; none if there is no validation. As `training_rows` otherwise."""
    source = config.data.validation
    if source is None:
        return []
    if source == SORT:
        return _sort(held_out_rows(config.data.validation_size), "data.validation")
    rows = read_jsonl(cwd / Path(source).expanduser(), needs_answer=config.reward == "exact")
    return rows[: config.data.validation_size]


def _sort(rows: list[dict[str, str]], where: str) -> list[Row]:
    return [Row(prompt=row["prompt"], answer=row["answer"], data_source=SORT, where=f"{where} row {i}")
            for i, row in enumerate(rows)]


def read_jsonl(path: Path, *, needs_answer: bool = True) -> list[Row]:
    """Rows of a JSONL file. Blank lines are skipped. `needs_answer=False` allows an empty answer, for rewards that do
    not compare.

    Raises DataError, naming file and line, for a missing or empty file and for any row that cannot be used.
    """
    raw = _read(path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    rows = [_row(line, f"{path}:{i}", path.stem, needs_answer)
            for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not rows:
        raise DataError(f"{path}: the data file is empty; each line is one JSON object with `prompt` and `answer`")
    return rows


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such data file; write `sort` or the path of a JSONL file in data.train or "
                        "data.validation") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a directory, not a JSONL file") from error
    except OSError as error:
        raise DataError(f"{path}: the data file cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{str(path)!r}: is no path of a data file ({error})") from error


def _row(line: str, where: str, source: str, needs_answer: bool) -> Row:
    try:
        payload: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}): {line.strip()[:80]!r}; each line is one JSON object") from error
    if not isinstance(payload, dict):
        raise DataError(f"{where}: a row is a JSON object with `prompt` and `answer`, not {type(payload).__name__}")
    columns = cast(dict[str, Any], payload)
    for name in ("prompt", "answer"):
        if columns.get(name) is None:
            raise DataError(f"{where}: no `{name}`; the row has {sorted(columns)}; every row needs `prompt` and "
                            "`answer`")
    prompt = _prompt(columns.pop("prompt"), where)
    answer = columns.pop("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        answer = str(answer)
    if not isinstance(answer, str) or (needs_answer and not answer.strip()):
        limit = " that is not empty" if needs_answer else ""
        raise DataError(f"{where}: `answer` is {_short(answer)}; it must be a text{limit}")
    _check_text(answer, "`answer`", where)
    data_source = columns.pop("data_source", source)
    if not isinstance(data_source, str):
        raise DataError(f"{where}: `data_source` is {_short(data_source)}; it must be a text")
    return Row(prompt=prompt, answer=answer, data_source=data_source, where=where, columns=columns)


def _prompt(prompt: Any, where: str) -> Text:
    if isinstance(prompt, str) and prompt.strip():
        _check_text(prompt, "`prompt`", where)
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: `prompt` is {_short(prompt)}; it must be a text, a chat (a list of messages) or a "
                        "list of token ids, and not empty")
    items = cast(list[Any], prompt)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return cast(list[int], items)
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise DataError(f"{where}: item {i} of `prompt` is {_short(item)}; a list holds messages "
                            "(`{\"role\": ..., \"content\": ...}`), or token ids alone (whole numbers)")
        message = cast(dict[str, Any], item)
        if not isinstance(message.get("content"), str):
            raise DataError(f"{where}: message {i} of `prompt` is {_short(item)}; it must have `role` and a text "
                            "`content`")
        _check_text(message["content"], f"message {i} of `prompt`", where)
        if message.get("role") not in ROLES:
            raise DataError(f"{where}: message {i} of `prompt` has the role {message.get('role')!r}; known roles are "
                            f"{', '.join(ROLES)}")
    if items[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last message of `prompt` is of the assistant; it must be one to answer")
    return cast(list[Message], items)


def _check_text(text: str, what: str, where: str) -> None:
    """JSON can escape half a character (`\\ud800`), which is no text that a tokenizer or a file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {what} holds {text[error.start]!r}, half of a character, and is no text: "
                        f"{_short(text)}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
