"""Reading Parquet files into tables, in whole columns (data.md section 3).

A batch whose columns are what they should be is taken as it is; one that holds anything else is read row by row by
`read_row`, which finds the row that is wrong, or what is unusual and fine (text parts, a ground truth that is a list).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl_core.errors import DataError
from rl_core.rollout.data_rows import MEDIA, ROLES, TOKEN_IDS, VERL_TRUTH, Form, Keys, Row, Shape, check_same, read_row
from rl_core.rollout.data_tables import BATCH_ROWS, MESSAGE, PROMPTS, Place, Table, TableBuilder, batch_of, to_batch

types = cast(Any, pa).types
PROMPT_TYPES = "text (string), a chat (list of struct<role, content>) or token ids (list of integers)"


def read_parquet(path: Path, place: Place, keys: Keys, limit: int | None) -> Table:
    """The first `limit` rows of a Parquet file. Raises DataError naming the file, and the column or the row."""
    try:
        with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            _check_schema(file.schema_arrow, place, keys)
            return _read(file, place, keys, limit)
    except (pa.ArrowInvalid, pa.ArrowException, OSError) as error:
        raise DataError(f"{place.path}: cannot be read as Parquet ({str(error).splitlines()[0]}); write the file "
                        "again") from error


def _read(file: Any, place: Place, keys: Keys, limit: int | None) -> Table:
    builder, done = TableBuilder(place, keys), 0
    first: Row | None = None
    for batch in file.iter_batches(batch_size=BATCH_ROWS):
        batch = _plain(batch if limit is None else batch.slice(0, limit - done))
        if not len(batch):
            break
        if first is None:
            first = _row(batch, 0, place, keys, 0)
            builder.see_columns(first.columns)
        columns = _columns(batch, keys, first.shape, place, done)
        taken = _taken(batch, place, keys, first, done, columns)
        if taken is None:
            rows = [_row(batch, i, place, keys, done) for i in range(len(batch))]
            for row in rows:
                check_same(row, first, keys)
            taken = to_batch(range(done, done + len(rows)), rows, place.source, columns)
        builder.add(taken, first.form)
        done += len(batch)
    if first is None:
        raise DataError(f"{place.path}: the data file is empty; it needs rows with `{keys.prompt}` and `{keys.answer}`")
    return builder.finish(first.form, first.shape)


# -- the schema


def _check_schema(schema: Any, place: Place, keys: Keys) -> None:
    names: list[str] = schema.names
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{place.path}: two columns are called {twice[0]!r}; give every column a name of its own")
    if keys.prompt not in names:
        raise DataError(f"{place.path}: no column `{keys.prompt}`; the file has {sorted(names)}; data.prompt_key names "
                        "another one")
    if keys.answer not in names and VERL_TRUTH not in names:
        raise DataError(f"{place.path}: no column `{keys.answer}`; the file has {sorted(names)}; data.answer_key names "
                        "another one, or write `reward_model.ground_truth`")
    wanted: list[tuple[str, Callable[[Any], bool], str]] = [
        (keys.prompt, _is_prompt, PROMPT_TYPES), (keys.answer, _is_answer, "text or a number"),
        ("data_source", _is_text, "text"),
        (VERL_TRUTH, lambda kind: _is_text(kind) or types.is_struct(kind), "a struct with `ground_truth`, or its JSON "
                                                                           "text")]
    for name, fits, what in wanted:
        if name in names and not fits(_value_type(schema.field(name).type)):
            raise DataError(f"{place.path}: column `{name}` is of type {schema.field(name).type}; it must be {what}")
    for name in names:
        if name not in MEDIA and _has_bytes(schema.field(name).type):
            raise DataError(f"{place.path}: column `{name}` is of type {schema.field(name).type}, and bytes are no "
                            "JSON value that a reward could get; leave the column out")


def _value_type(kind: Any) -> Any:
    return kind.value_type if types.is_dictionary(kind) else kind


def _is_text(kind: Any) -> bool:
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view, types.is_null))


def _is_answer(kind: Any) -> bool:
    return _is_text(kind) or types.is_integer(kind) or types.is_floating(kind)


def _is_list(kind: Any) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_prompt(kind: Any) -> bool:
    if _is_text(kind):
        return True
    return _is_list(kind) and (types.is_integer(kind.value_type) or types.is_null(kind.value_type) or (
        types.is_struct(kind.value_type)
        and {"role", "content"} <= {kind.value_type.field(i).name for i in range(kind.value_type.num_fields)}))


def _has_bytes(kind: Any) -> bool:
    if any(test(kind) for test in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)):
        return True
    return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))


# -- batches


def _plain(batch: Any) -> Any:
    """With dictionaries and large texts as plain text: batches of one file then are all of one type."""
    columns: list[Any] = []
    for column in batch.columns:
        kind = _value_type(column.type)
        if types.is_dictionary(column.type):
            column = column.cast(kind)
        if types.is_large_string(kind) or types.is_string_view(kind):
            column = column.cast(pa.string())
        columns.append(column)
    return cast(Any, pa.RecordBatch).from_arrays(columns, names=batch.schema.names)


def _row(batch: Any, i: int, place: Place, keys: Keys, done: int) -> Row:
    where = place.where(done + i)
    try:
        values = {name: batch.column(name)[i].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason}); write the file again as UTF-8") from error
    return read_row(values, where, keys, place.source)


def _columns(batch: Any, keys: Keys, shape: Shape, place: Place, done: int) -> Any:
    """All other columns as one struct."""
    read = {keys.prompt, "data_source", *MEDIA, *(["answer"] if shape == "answer" == keys.answer else [])}
    names = [name for name in batch.schema.names if name not in read]
    if not names:
        return pa.array([""] * len(batch), pa.string())
    columns = [batch.column(name) for name in names]
    for name, column in zip(names, columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DataError(f"{place.path} rows {done} to {done + len(batch) - 1}: column `{name}` cannot be read "
                            f"({error}); write the file again") from error
    return cast(Any, pa.StructArray).from_arrays(columns, names=names)


def _taken(batch: Any, place: Place, keys: Keys, first: Row, done: int, columns: Any) -> Any:
    """The batch as it is stored; None if any row of it must be looked at."""
    if any(name in batch.schema.names and batch.column(name).null_count < len(batch) for name in MEDIA):
        return None
    prompt = _take_prompt(batch.column(keys.prompt), first.form)
    answer = _take_answer(batch, keys, first.shape)
    names = batch.schema.names
    source = batch.column("data_source") if "data_source" in names else pa.nulls(len(batch), pa.string())
    if types.is_null(source.type):
        source = source.cast(pa.string())
    if prompt is None or answer is None or not _is_valid(source):
        return None
    source = pc.if_else(pc.equal(source, place.source), pa.scalar(None, pa.string()), source)
    line = pa.array(range(done, done + len(batch)), pa.int64())
    return batch_of(line, prompt, answer, source, columns)


def _is_valid(texts: Any) -> bool:
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_filled(texts: Any) -> bool:
    """Valid text in every row, none of it blank."""
    return not texts.null_count and _is_valid(texts) and not pc.any(pc.equal(
        pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0)).as_py()


def _take_prompt(prompt: Any, form: Form) -> Any:
    if prompt.null_count:
        return None
    if types.is_large_list(prompt.type) or types.is_fixed_size_list(prompt.type):
        prompt = prompt.cast(pa.list_(prompt.type.value_type))
    if form == "text":
        return prompt if types.is_string(prompt.type) and _is_filled(prompt) else None
    if not types.is_list(prompt.type) or pc.min(pc.list_value_length(prompt)).as_py() < 1:
        return None
    flat = prompt.flatten()
    if form == "ids":
        if not types.is_integer(flat.type) or flat.null_count:
            return None
        least, most = pc.min_max(flat).as_py().values()
        return None if least < 0 or most >= TOKEN_IDS else prompt.cast(PROMPTS["ids"])
    return _take_chat(prompt, flat)


def _take_chat(prompt: Any, flat: Any) -> Any:
    if not types.is_struct(flat.type) or flat.null_count:
        return None
    fields = dict(zip([flat.type.field(i).name for i in range(flat.type.num_fields)], flat.flatten(), strict=True))
    roles, contents = (_text_of(fields.pop(name)) for name in ("role", "content"))
    if roles is None or contents is None or any(more.null_count < len(more) for more in fields.values()):
        return None
    if roles.null_count or contents.null_count or not _is_valid(contents) or not pc.all(
            pc.is_in(roles, pa.array(ROLES))).as_py():
        return None
    lengths = pc.list_value_length(prompt)
    ends = pc.cumulative_sum(lengths)
    if pc.any(pc.equal(roles.take(pc.subtract(ends, 1)), "assistant")).as_py():
        return None
    offsets = cast(Any, pa).concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])
    messages = cast(Any, pa.StructArray).from_arrays(
        [roles, contents, pa.nulls(len(roles), pa.string())], fields=[MESSAGE.field(i) for i in range(3)])
    return cast(Any, pa.ListArray).from_arrays(offsets, messages).cast(PROMPTS["chat"])


def _text_of(column: Any) -> Any:
    """A text column as plain text; None for anything else."""
    kind = _value_type(column.type)
    return column.cast(pa.string()) if _is_text(kind) and not types.is_null(kind) else None


def _take_answer(batch: Any, keys: Keys, shape: Shape) -> Any:
    names = batch.schema.names
    if shape == "answer":
        if keys.answer not in names:
            return None
        answer = batch.column(keys.answer)
    else:
        truth = batch.column(VERL_TRUTH)
        mixed = keys.answer in names and batch.column(keys.answer).null_count < len(batch)
        if mixed or not types.is_struct(truth.type) or truth.type.get_field_index("ground_truth") < 0:
            return None
        answer = truth.flatten()[truth.type.get_field_index("ground_truth")]
    if answer.null_count:
        return None
    if types.is_integer(answer.type):
        return answer.cast(pa.string())
    answer = _text_of(answer)
    if answer is None or (keys.needs_answer and not _is_filled(answer)) or not _is_valid(answer):
        return None
    return answer
