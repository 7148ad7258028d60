"""Parts of the settings that come in variants, told apart by their field `name`. Importable without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from rl_core.settings import Part


def named(default: str) -> Callable[[Any], Any]:
    """A validator that puts in the name of the variant where settings do not say it."""
    def with_name(value: Any) -> Any:
        if isinstance(value, Mapping) and "name" not in value:
            return {"name": default, **cast(Mapping[str, Any], value)}
        return cast(Any, value)
    return with_name


def variants(union: Any) -> dict[str, type[Part]]:
    """The class of every name: `{"ppo_clip": PpoClipLoss, "decoupled_ppo": PpoClipLoss, ...}`. The first is the one
    that is meant where no name is said."""
    classes = cast("tuple[type[Part], ...]", get_args(get_args(union)[0]))
    return {name: one for one in classes for name in get_args(one.model_fields["name"].annotation)}


def carried(union: Any, own: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """What is left of a variant's settings when another name is chosen: nothing that belongs to the old variant alone.

    Names of one class share all their settings. Others share those of their common base classes; of these a value
    stays where it is not the default, since a default belongs to its variant.
    """
    classes = variants(union)
    before, after = classes.get(own.get("name", next(iter(classes)))), classes.get(name)
    if before is None or after is None or before is after:
        return dict(own)
    bases = [base for base in before.__mro__ if issubclass(base, Part) and issubclass(after, base)]
    shared = {field for base in bases for field in base.model_fields} - {"name"}
    defaults = {field: info.get_default(call_default_factory=True) for field, info in before.model_fields.items()}
    return {field: value for field, value in own.items() if field in shared and value != defaults[field]}
