"""One row of a data set: what it may hold, in which shapes, and what is wrong with one that cannot be used (data.md 2).

Everything that refuses a single row is here, whatever file it comes from; `where` is `file:line` or `file row n`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from rl_core.config import REWARDS, Config
from rl_core.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns that a text model cannot take; empty ones are left out."""
VERL_TRUTH = "reward_model"
TOKEN_IDS = 2**31
"""Ids are int32 whatever the vocabulary."""
DIGITS = 80
"""Most characters of a value that an error shows."""

Message = dict[str, Any]
Text = str | list[Message] | list[int]
Form = Literal["text", "chat", "ids"]
Shape = Literal["answer", "reward_model"]

FORM_WORDS: dict[Form, str] = {"text": "a text", "chat": "a chat", "ids": "a list of token ids"}
SHAPE_WORDS: dict[Shape, str] = {"answer": "its answer in `{answer}`", "reward_model": "its answer in "
                                 "`reward_model.ground_truth`"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Which columns are read, and what they must hold: `Keys(prompt="question", answer="solution")`."""

    prompt: str = "prompt"
    answer: str = "answer"
    needs_answer: bool = True
    """False allows an empty answer, for rewards that do not compare."""


def keys_of(config: Config) -> Keys:
    """The columns that a run reads."""
    named = (config.reward, *(part.reward for part in config.scoring.parts))
    return Keys(prompt=config.data.prompt_key, answer=config.data.answer_key,
                needs_answer=any(reward in REWARDS for reward in named))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row before tokenisation."""

    prompt: Text
    answer: str
    data_source: str
    where: str
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """The others, JSON values."""
    form: Form = "text"
    shape: Shape = "answer"


def read_row(payload: Any, where: str, keys: Keys, source: str, *, json_text: bool = False) -> Row:
    """The row of one JSON object. `source` is its data_source where it names none; `json_text`: columns of a CSV file
    hold chats and objects as JSON text.

    Raises DataError for a row that cannot be used.
    """
    if not isinstance(payload, dict):
        raise DataError(f"{where}: a row is a JSON object with `{keys.prompt}` and `{keys.answer}`, not "
                        f"{type(payload).__name__}; each line is one JSON object")
    columns = dict(cast(dict[str, Any], payload))
    for name in MEDIA:
        if columns.pop(name, None) not in (None, "", [], {}):
            raise DataError(f"{where}: the row has `{name}`, and a text model takes text alone; leave such rows out, "
                            "or the column")
    given = columns.get(keys.prompt)
    if given is None:
        raise DataError(f"{where}: no `{keys.prompt}`; the row has {sorted(columns)}; every row needs "
                        f"`{keys.prompt}` and `{keys.answer}` (data.prompt_key and data.answer_key name other columns)")
    shape, answer = _answer(columns, where, keys)
    columns.pop(keys.prompt)
    if shape == "answer" and keys.answer == "answer":
        columns.pop("answer")
    prompt, form = read_prompt(_parsed(given, "[") if json_text else given, where, keys.prompt)
    data_source = columns.pop("data_source", None)
    if data_source is not None and not isinstance(data_source, str):
        raise DataError(f"{where}: `data_source` is {short(data_source)}; it must be a text")
    return Row(prompt=prompt, answer=answer, data_source=data_source or source, where=where, columns=columns, form=form,
               shape=shape)


def check_same(row: Row, first: Row, keys: Keys) -> None:
    """Raises DataError where a row has another form or shape than the first one of its file."""
    if row.form != first.form:
        raise DataError(f"{row.where}: `{keys.prompt}` is {FORM_WORDS[row.form]}, and {first.where} has "
                        f"{FORM_WORDS[first.form]}: one file holds one form; write the others to a file of their own "
                        "(data.train=[a.jsonl, b.jsonl])")
    if row.shape != first.shape:
        here, there = (SHAPE_WORDS[shape].format(answer=keys.answer) for shape in (row.shape, first.shape))
        raise DataError(f"{row.where}: the row has {here}, and {first.where} has {there}: one file holds one shape; "
                        "write the others to a file of their own (data.train=[a.jsonl, b.jsonl])")


# -- the answer


def _answer(columns: Mapping[str, Any], where: str, keys: Keys) -> tuple[Shape, str]:
    name, value, shape = keys.answer, columns.get(keys.answer), cast(Shape, "answer")
    if value is None and VERL_TRUTH in columns:
        name, value, shape = f"{VERL_TRUTH}.ground_truth", _ground_truth(columns[VERL_TRUTH], where), "reward_model"
        if value is not None and not isinstance(value, str):
            try:
                return shape, json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(f"{where}: `{name}` is {short(value)}, which is no JSON value ({error})") from error
    if value is None:
        raise DataError(f"{where}: no `{name}`; the row has {sorted(columns)}; every row needs `{keys.prompt}` and "
                        f"`{keys.answer}` (data.answer_key names another column), or `reward_model.ground_truth`")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = str(int(value) if value == int(value) else value)  # a column of whole numbers and a null holds floats
    if not isinstance(value, str) or (keys.needs_answer and not value.strip()):
        limit = " that is not empty" if keys.needs_answer else ""
        raise DataError(f"{where}: `{name}` is {short(value)}; it must be a text{limit}")
    _check_text(value, f"`{name}`", where)
    return shape, value


def _ground_truth(reward_model: Any, where: str) -> Any:
    value = _parsed(reward_model, "{")
    if not isinstance(value, dict):
        raise DataError(f"{where}: `reward_model` is {short(reward_model)}; it must be an object with `ground_truth`, "
                        "or its JSON text")
    return cast(dict[str, Any], value).get("ground_truth")


def _parsed(value: Any, opening: str) -> Any:
    """What JSON text stands for; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(opening):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def with_objects(columns: dict[str, Any]) -> dict[str, Any]:
    """`reward_model` and `extra_info` that are JSON text as the objects they stand for."""
    return {name: _parsed(value, "{") if name in (VERL_TRUTH, "extra_info") else value
            for name, value in columns.items()}


# -- the prompt


def read_prompt(prompt: Any, where: str, name: str = "prompt") -> tuple[Text, Form]:
    """A prompt and its form. Messages keep role, content and what else they hold; text parts of a content are joined.

    Raises DataError for anything else than a text, a chat to answer, or token ids.
    """
    if isinstance(prompt, str) and prompt.strip():
        _check_text(prompt, f"`{name}`", where)
        return prompt, "text"
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: `{name}` is {short(prompt)}; it must be a text, a chat (a list of messages) or a "
                        "list of token ids, and not empty")
    items = cast(list[Any], prompt)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        for bad in (item for item in items if not 0 <= item < TOKEN_IDS):
            raise DataError(f"{where}: token id {bad} is outside the model's vocabulary; use ids of this model's "
                            "tokenizer, from 0 on, or write the prompt as text")
        return cast(list[int], items), "ids"
    messages = [_message(item, i, where, name) for i, item in enumerate(items)]
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last message of `{name}` is of the assistant; it must be one to answer")
    return messages, "chat"


def _message(item: Any, i: int, where: str, name: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{where}: item {i} of `{name}` is {short(item)}; a list holds messages "
                        "(`{\"role\": ..., \"content\": ...}`), or token ids alone (whole numbers)")
    message = cast(dict[str, Any], item)
    content, role = message.get("content"), message.get("role")
    what = f"message {i} of `{name}`"
    if isinstance(content, list):
        content = "".join(_part(part, what, where) for part in cast(list[Any], content))
    if not isinstance(content, str):
        raise DataError(f"{where}: {what} is {short(item)}; it must have `role` and a text `content`")
    _check_text(content, what, where)
    if role not in ROLES:
        raise DataError(f"{where}: {what} has the role {role!r}; known roles are {', '.join(ROLES)}")
    more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    return {"role": role, "content": content, **more}


def _part(part: Any, what: str, where: str) -> str:
    """The text of one part of a content list."""
    if isinstance(part, str):
        return part
    fields = cast(dict[str, Any], part) if isinstance(part, dict) else {}
    kind = fields.get("type", "text")
    if kind != "text" or not isinstance(fields.get("text"), str):
        raise DataError(f"{where}: {what} has a part of type {kind!r}: {short(part)}; a text model takes text parts "
                        "alone; leave such rows out")
    return fields["text"]


def _check_text(text: str, what: str, where: str) -> None:
    """JSON can escape half a character (`\\ud800`), which is no text that a tokenizer or a file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {what} holds {text[error.start]!r}, half of a character, and is no text: "
                        f"{short(text)}") from error


def short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(cast(Sequence[Any], value)[:20] if isinstance(value, list) else value)
    return text if len(text) <= DIGITS else text[:DIGITS - 3] + "..."
