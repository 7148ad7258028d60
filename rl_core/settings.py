"""What settings are made of: their base class, and fields of each kind (config.py). Importable without torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Kind = Literal["identity", "training", "operational", "environment"]


def of_kind(kind: Kind) -> dict[str, Any]:
    """What a field carries so that its kind is known."""
    return {"kind": kind}


def kind_of(field: FieldInfo) -> Kind:
    """What `of_kind` gave a field."""
    return cast(dict[str, Kind], field.json_schema_extra)["kind"]


def identity(default: Any, text: str, **limits: Any) -> Any:
    """A field that makes the run this run: a difference on resume is refused by name."""
    return Field(default, description=text, json_schema_extra=of_kind("identity"), **limits)


def training(default: Any, text: str, **limits: Any) -> Any:
    """A field of how the run learns: a difference on resume needs `--amend`, which records a config revision."""
    return Field(default, description=text, json_schema_extra=of_kind("training"), **limits)


def operational(default: Any, text: str, **limits: Any) -> Any:
    """A field of how the run is run: free on any restart."""
    return Field(default, description=text, json_schema_extra=of_kind("operational"), **limits)


def environment(default: Any, text: str, **limits: Any) -> Any:
    """A field of where the run is run: free, but bit-identical replay is not promised across it."""
    return Field(default, description=text, json_schema_extra=of_kind("environment"), **limits)


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """What is said of a name that no setting has: the nearest of those that are known, or where they all are."""
    last = name.rpartition(".")[2]
    near = difflib.get_close_matches(name, known, 1) or [k for k in known if k.rpartition(".")[2] == last][:1]
    return f"{name}: no such setting" + (f"; did you mean `{near[0]}`?" if near else "; see `headway settings`")


class Part(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
