"""Reading JSONL and CSV files into tables, line by line; what a file as a whole can have wrong (data.md section 3).

A line is read as a whole only up to `LINE_BYTES`: a file that is one object of a gigabyte is refused after the first
16 MiB of it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rl_core.errors import DataError
from rl_core.rollout.data_parquet import read_parquet
from rl_core.rollout.data_rows import Keys, Row, check_same, read_row
from rl_core.rollout.data_tables import BATCH_ROWS, Place, Table, TableBuilder, to_batch

LINE_BYTES = 16 * 2**20
"""Longest line of a JSONL file, and longest field of a CSV file."""
BATCH_BYTES = 16 * 2**20
"""Text of one batch, beside its last row."""

Reader = Callable[[Path, Place, Keys, int | None], Table]


def read_file(path: Path, keys: Keys, *, shown: str | None = None, source: str | None = None,
              limit: int | None = None) -> Table:
    """The rows of one file by its ending, the first `limit` of them. `shown`: how errors name it; `source`: data_source
    of rows that name none, else the file's name without its ending.

    Raises DataError, naming the file and where there is one the line, for anything that cannot be used.
    """
    shown = shown or str(path)
    try:
        with path.open("rb"):
            pass
    except IsADirectoryError as error:
        raise DataError(f"{shown}: is a directory, not a JSONL, CSV or Parquet file; name its files: "
                        "data.train=[a.parquet, b.parquet]") from error
    except FileNotFoundError as error:
        raise DataError(f"{shown}: no such data file; write `sort` or the path of a JSONL, CSV or Parquet file in "
                        "data.train or data.validation") from error
    except OSError as error:
        raise DataError(f"{shown}: the data file cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{shown!r}: is no path of a data file ({error})") from error
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{shown}: the ending {path.suffix!r} says no form of data; rename it to one of "
                        f"{', '.join(READERS)}")
    place = Place(path=shown, by_line=reader is not read_parquet, source=source or path.stem)
    return reader(path, place, keys, limit)


def read_jsonl(path: Path, place: Place, keys: Keys, limit: int | None) -> Table:
    """One JSON object a line; blank lines are skipped."""
    with path.open("rb") as file:
        found = ((number, len(line),
                  read_row(_object(line, place.where(number)), place.where(number), keys, place.source))
                 for number, line in _lines(file, place) if line.strip())
        return _table(found, place, keys, limit, f"each line is one JSON object with `{keys.prompt}` and "
                                                 f"`{keys.answer}`")


def _object(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}): {line.strip()[:80]!r}; each line is one JSON object") from error


def read_csv(path: Path, place: Place, keys: Keys, limit: int | None) -> Table:
    """A header of column names, then a row a record; chats and objects are JSON text in their columns."""
    csv.field_size_limit(LINE_BYTES)
    with path.open("rb") as file:
        records = _records(file, place, "\t" if path.suffix.lower() == ".tsv" else ",")
        found = ((number, sum(map(len, record.values())),
                  read_row(record, place.where(number), keys, place.source, json_text=True))
                 for number, record in records)
        return _table(found, place, keys, limit, f"a header with `{keys.prompt}` and `{keys.answer}`, then one row a "
                                                 "record")


def _records(file: BinaryIO, place: Place, delimiter: str) -> Iterator[tuple[int, dict[str, str]]]:
    """`(line at which it begins, {column: text})` of every record."""
    reader = csv.reader((line for _, line in _lines(file, place)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    begins = 1
    try:
        for fields in reader:
            if header is None:
                header = fields
                twice = [name for name in fields if fields.count(name) > 1]
                if twice:
                    raise DataError(f"{place.where(begins)}: the header names {twice[0]!r} twice; give every column a "
                                    "name of its own")
            elif fields:
                if len(fields) != len(header):
                    raise DataError(f"{place.where(begins)}: the record has {len(fields)} fields, and the header "
                                    f"{len(header)}: {fields[:3]}; put fields with commas or line ends into quotes")
                yield begins, dict(zip(header, fields, strict=True))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{place.where(begins)}: not CSV ({error}); put fields with commas, quotes or line ends into "
                        f"quotes, and keep each below {LINE_BYTES} bytes") from error


def _lines(file: BinaryIO, place: Place) -> Iterator[tuple[int, str]]:
    """`(number from 1, text with its line end)` of every line."""
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) > LINE_BYTES:
            raise DataError(f"{place.where(number)}: the line is longer than {LINE_BYTES} bytes, the limit of one row; "
                            "each line is one prompt with its answer")
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{place.where(number)}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def table_of(rows: Iterable[dict[str, Any]], place: Place, keys: Keys) -> Table:
    """The rows of a task, made in memory."""
    found = ((i, 0, read_row(row, place.where(i), keys, place.source)) for i, row in enumerate(rows))
    return _table(found, place, keys, None, "the task makes no rows")


def _table(found: Iterable[tuple[int, int, Row]], place: Place, keys: Keys, limit: int | None, expected: str) -> Table:
    """Of `(line, characters of it, row)`."""
    builder, first = TableBuilder(place, keys), None
    lines: list[int] = []
    rows: list[Row] = []
    size = 0
    for taken, (number, length, row) in enumerate(found, 1):
        first = first or row
        check_same(row, first, keys)
        builder.see_columns(row.columns)
        lines.append(number)
        rows.append(row)
        size += length
        if len(rows) == BATCH_ROWS or size >= BATCH_BYTES:
            builder.add(to_batch(lines, rows, place.source), first.form)
            lines, rows, size = [], [], 0
        if taken == limit:
            break
    if first is None:
        raise DataError(f"{place.path}: the data file is empty; {expected}")
    if rows:
        builder.add(to_batch(lines, rows, place.source), first.form)
    return builder.finish(first.form, first.shape)


READERS: dict[str, Reader] = {".jsonl": read_jsonl, ".ndjson": read_jsonl, ".json": read_jsonl, ".csv": read_csv,
                              ".tsv": read_csv, ".parquet": read_parquet, ".pq": read_parquet}
