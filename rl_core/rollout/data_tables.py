"""Rows in Arrow: no Python object per row, no copy of the file in memory (data.md section 5).

Whatever the file, rows become record batches of one schema: `line` int64, `prompt` (text: string; chat: list of
struct<role, content, more>; ids: list of int32), `answer` string, `source` string (null: the file's name), `columns`
(the others: JSON text of a JSONL or CSV row, a struct of Parquet's own columns). Above `SPILL_BYTES` the batches lie in
a file without a name in the directory for temporary files, which is mapped into memory: the pages belong to the file
system, and nothing is left behind however the process ends.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
from numpy.typing import NDArray

from rl_core.rollout.data_digest import ValuesDigest
from rl_core.rollout.data_rows import Form, Keys, Row, Shape, Text, with_objects
from rl_core.rollout.prompt_facts import PromptFacts, facts_of

BATCH_ROWS = 8192
SPILL_BYTES = 64 * 2**20
"""Batches of one source that are kept in memory."""

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("more", pa.string())])
PROMPTS: dict[Form, Any] = {"text": pa.string(), "chat": pa.list_(MESSAGE), "ids": pa.list_(pa.int32())}


def to_batch(lines: Sequence[int], rows: Sequence[Row], source: str, columns: Any = None) -> pa.RecordBatch:
    """Rows of one form as a batch. `columns`: of a Parquet file, row by row; else those of the rows."""
    form = rows[0].form
    if columns is None:
        columns = pa.array([json.dumps(row.columns) if row.columns else "" for row in rows], pa.string())
    prompts = [_to_messages(row.prompt) if form == "chat" else row.prompt for row in rows]
    sources = [None if row.data_source == source else row.data_source for row in rows]
    return batch_of(pa.array(lines, pa.int64()), pa.array(prompts, PROMPTS[form]),
                    pa.array([row.answer for row in rows], pa.string()), pa.array(sources, pa.string()), columns)


def batch_of(line: Any, prompt: Any, answer: Any, source: Any, columns: Any) -> pa.RecordBatch:
    """The canonical batch of five columns."""
    return cast(Any, pa.RecordBatch).from_arrays([line, prompt, answer, source, columns],
                                                 names=["line", "prompt", "answer", "source", "columns"])


def _to_messages(chat: Text) -> list[dict[str, Any]]:
    messages = cast(list[dict[str, Any]], chat)
    return [{"role": m["role"], "content": m["content"], "more": _more(m)} for m in messages]


def _more(message: dict[str, Any]) -> str | None:
    more = {key: value for key, value in message.items() if key not in ("role", "content")}
    return json.dumps(more) if more else None


def _from_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": m["role"], "content": m["content"], **(json.loads(m["more"]) if m["more"] else {})}
            for m in messages]


# -- storage


class _Spool:
    """Batches in memory, or beyond `SPILL_BYTES` in a file without a name."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    def add(self, batch: Any) -> None:
        self._kept.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > SPILL_BYTES:
            self._write()

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="headway-prompts-")  # noqa: SIM115, it is closed when mapped
            self._writer = ipc.new_stream(self._file, self._kept[0].schema)
        for batch in self._kept:
            self._writer.write_batch(batch)
        self._kept, self._bytes = [], SPILL_BYTES

    def finish(self) -> list[Any]:
        if self._file is None:
            return self._kept
        self._write()
        self._writer.close()
        self._file.flush()
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file.close()
        return list(ipc.open_stream(pa.py_buffer(mapped)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the rows of a source come from, as people are told."""

    path: str
    by_line: bool = False
    """`file:line`, from 1; else `file row n`, from 0."""
    source: str
    """data_source of rows that name none."""

    def where(self, line: int) -> str:
        return f"{self.path}:{line}" if self.by_line else f"{self.path} row {line}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """All rows of one source, read one by one: `table.row(17)`."""

    place: Place
    keys: Keys
    form: Form
    shape: Shape
    batches: Sequence[Any]
    starts: NDArray[np.int64]
    """First row of each batch, and the number of rows [batches + 1]."""
    facts: PromptFacts
    digest: str
    missing: dict[str, int]
    """Column -> first row without it, of columns that some row has; columns in none are in neither."""
    columns: frozenset[str]
    """Columns that every row has."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def bare(self, i: int) -> Row:
        """Row i, from 0, without its other columns. A chat as messages."""
        batch, j = self._at(i)
        line, prompt, answer, source = (batch.column(c)[j].as_py() for c in range(4))
        return Row(prompt=_from_messages(prompt) if self.form == "chat" else prompt, answer=answer,
                   data_source=source or self.place.source, where=self.place.where(line), form=self.form,
                   shape=self.shape)

    def row(self, i: int) -> Row:
        """Row i, from 0. A chat as messages, all other columns as JSON values."""
        row = self.bare(i)
        batch, j = self._at(i)
        rest = batch.column(4)[j].as_py()
        columns: dict[str, Any] = _json(rest) if not isinstance(rest, str) else json.loads(rest) if rest else {}
        if self.keys.prompt != "prompt":
            columns[self.keys.prompt] = row.prompt
        if self.shape == "reward_model":
            columns["data_source"] = row.data_source
        return replace(row, columns=with_objects(columns))

    def where(self, i: int) -> str:
        """`file:line` of row i."""
        batch, j = self._at(i)
        return self.place.where(batch.column(0)[j].as_py())

    def _at(self, i: int) -> tuple[Any, int]:
        """The batch of row i, and its place in it."""
        at = int(np.searchsorted(self.starts, i, "right")) - 1
        return self.batches[at], i - int(self.starts[at])

    def data_sources(self) -> Counter[str]:
        """Rows of each data_source."""
        counted: Counter[str] = Counter()
        for batch in self.batches:
            for pair in pc.value_counts(batch.column(3)).to_pylist():
                counted[pair["values"] or self.place.source] += pair["counts"]
        return counted

    def without(self, column: str) -> int | None:
        """The first row without this column; None if all have it."""
        named = {"prompt", self.keys.prompt, *(["data_source"] if self.shape == "reward_model" else [])}
        return None if column in self.columns | named else self.missing.get(column, 0)


def _json(value: Any) -> Any:
    """A value of Arrow as a JSON value: dates as text in ISO form, what else JSON lacks as its text."""
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in cast(list[Any], value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


class TableBuilder:
    """Batches of one source, all of one form and shape, become its table."""

    def __init__(self, place: Place, keys: Keys) -> None:
        self._place, self._keys = place, keys
        self._spool, self._digest = _Spool(), ValuesDigest()
        self._facts: list[PromptFacts] = []
        self._rows = 0
        self._starts = [0]
        self._missing: dict[str, int] = {}
        self._columns: set[str] | None = None

    def see_columns(self, names: Iterable[str]) -> None:
        """Columns of the next row, before it is added; of all rows at once where they are a file's."""
        row = self._rows
        self._rows += 1
        names = set(names)
        if self._columns is None:
            self._columns = names
            return
        if names != self._columns:
            for gone in self._columns - names:
                self._missing.setdefault(gone, row)
            for late in names - self._columns - self._missing.keys():
                self._missing[late] = 0
            self._columns &= names

    def add(self, batch: Any, form: Form) -> None:
        """One batch, after the columns of its rows."""
        self._facts.append(facts_of(form, batch.column(1)))
        for i, name in enumerate(("prompt", "answer", "source", "columns"), 1):
            self._digest.add(name, batch.column(i))
        self._starts.append(self._starts[-1] + len(batch))
        self._spool.add(batch)

    def finish(self, form: Form, shape: Shape) -> Table:
        """The table of all batches; at least one was added."""
        fields = {name: np.concatenate([getattr(facts, name) for facts in self._facts])
                  for name in ("key", "size", "wide", "kind")}
        self._facts = []
        cast(Any, pa).default_memory_pool().release_unused()
        return Table(place=self._place, keys=self._keys, form=form, shape=shape, batches=self._spool.finish(),
                     starts=np.array(self._starts, np.int64), facts=PromptFacts(**fields),
                     digest=self._digest.hexdigest(), missing=self._missing, columns=frozenset(self._columns or ()))
