"""Every setting with its values, default and meaning: what `headway settings` prints, and docs/settings.md is made of.
Importable without torch.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from rl_core.config import Config, parts_of
from rl_core.errors import ConfigError
from rl_core.settings import Kind, Part, kind_of, unknown_setting

CHOICES = ("type", "name")
"""Fields by whose value one of several settings models is taken: `model.type`, `learner.loss.name`."""
LIMITS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("multiple_of", "multiple of"))
SIMPLE = {bool: "true or false", int: "integer", float: "number", Decimal: "number", str: "text"}


class Setting(NamedTuple):
    """One row: `Setting("learner.loss.clip_low", "number, > 0, < 1", "0.2", "training", "Lower clip ...", ())`."""

    name: str
    values: str
    default: str
    kind: Kind
    text: str
    only: tuple[str, ...]
    """Choices that have it, as in `("ppo_clip", "gspo")`; empty where all of them do."""


def settings(prefix: str = "") -> list[Setting]:
    """Rows in the order of config.py, of all settings, or of those named `prefix` or below it: `settings("staleness")`.

    A setting that means something else under another choice has a row for each meaning. Raises ConfigError where there
    is no such setting.
    """
    rows: dict[tuple[Any, ...], list[str]] = {}
    every: dict[str, set[str]] = {}
    for row in _walk(Config, "", ()):
        rows.setdefault(row[:-1], []).extend(row.only)
        every.setdefault(row.name.rpartition(".")[0], set()).update(row.only)
    made = [Setting(*key, only=() if set(only) == every[key[0].rpartition(".")[0]] else tuple(only))
            for key, only in rows.items()]
    rows_of = [row for row in _choices_first(made)
               if not prefix or f"{row.name}.".replace("[]", "").startswith(f"{prefix}.")]
    if not rows_of:
        parents = {row.name.rpartition(".")[0] for row in made} - {""}
        raise ConfigError(unknown_setting(prefix, [*parents, *(row.name for row in made)]))
    return rows_of


def markdown() -> str:
    """The tables of docs/settings.md: one for each part of the settings, those without a part first."""
    parts: dict[str, list[Setting]] = {}
    for row in settings():
        parts.setdefault(row.name.rpartition(".")[0], []).append(row)
    return "\n".join(_table(part, rows) for part, rows in sorted(parts.items(), key=lambda one: one[0] != ""))


def _table(part: str, rows: list[Setting]) -> str:
    lines = [f"## {part or 'The run'}", "", "| setting | values | default | kind | what |", "|---|---|---|---|---|"]
    for row in rows:
        only = f" (of {', '.join(f'`{one}`' for one in row.only)})" if row.only else ""
        text = row.text.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.values} | `{row.default}` | {row.kind} | {text}{only} |")
    return "\n".join(lines) + "\n"


def _choices_first(rows: list[Setting]) -> list[Setting]:
    """One row for a choice, with all that can be chosen, before what comes of it."""
    choices = {row.name: [one for one in rows if one.name == row.name] for row in rows
               if row.only and row.name.rpartition(".")[2] in CHOICES}
    ordered: dict[Setting, None] = {}
    for row in rows:
        parent = row.name.rpartition(".")[0]
        for name in (f"{parent}.{choice}" for choice in CHOICES):
            if all_of := choices.get(name):
                ordered[_chosen(all_of)] = None
        if row.name not in choices:
            ordered[row] = None
    return list(ordered)


def _chosen(variants: list[Setting]) -> Setting:
    texts = {one.text for one in variants}
    text = texts.pop() if len(texts) == 1 else " ".join(f"`{one.values}`: {one.text}" for one in variants)
    return variants[0]._replace(values=", ".join(one.values for one in variants), text=text, only=())


def _walk(model: type[Part], prefix: str, only: tuple[str, ...]) -> Iterator[Setting]:
    for name, info in model.model_fields.items():
        parts = parts_of(info.annotation)
        for part in parts:
            yield from _walk(part, f"{prefix}{name}.", _choice(part) if len(parts) > 1 else ())
        if not parts:
            yield Setting(prefix + name, _values(info), _default(info), kind_of(info), info.description or "", only)
        for element in _elements(info.annotation):
            yield from _walk(element, f"{prefix}{name}[].", only)


def _elements(annotation: Any) -> list[type[Part]]:
    """The settings models that a list is made of."""
    if get_origin(annotation) is tuple:
        return parts_of(get_args(annotation)[0])
    return [part for inner in get_args(annotation) for part in _elements(inner)]


def _choice(part: type[Part]) -> tuple[str, ...]:
    [field] = [part.model_fields[name] for name in CHOICES if name in part.model_fields]
    return get_args(field.annotation)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    return _plain(info.get_default(call_default_factory=True))


def _plain(value: Any) -> str:
    """As YAML has it, on one line; of a long text its beginning."""
    if isinstance(value, Part):
        return _plain(value.model_dump(exclude_unset=True))
    if isinstance(value, tuple | list):
        return f"[{', '.join(_plain(each) for each in cast('Sequence[Any]', value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_plain(each)}' for key, each in cast('dict[str, Any]', value).items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    first, *others = str(value).splitlines()
    return f"{first} ..." if others else first


def _values(info: FieldInfo) -> str:
    limits = [f"{sign} {_plain(getattr(each, name))}" for name, sign in LIMITS for each in info.metadata
              if getattr(each, name, None) is not None]
    return ", ".join([_named(info.annotation), *limits])


def _named(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in SIMPLE:
        return SIMPLE[annotation]
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _named(inner[0])
    if origin is Literal:
        return ", ".join(_plain(each) for each in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_named(each) for each in inner)
    if origin in (tuple, list):
        return "list" if inner[-1:] == (...,) or origin is list else f"list of {len(inner)}"
    return "map" if origin is dict else getattr(annotation, "__name__", str(annotation)).lower()
