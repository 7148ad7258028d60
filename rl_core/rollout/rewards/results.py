"""From what a reward function returned to the fields of a Score.

A dict's `reward` is the reward, or its `score` (in verl's signature `score` before `reward`). `correct` or `acc` says
whether the answer is right, `extracted` or `pred` what it is. Of the other entries numbers and truth values are parts;
texts, lists and whatever else is left out, as verl leaves it out of its sums (rewards.md section 3).
"""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Mapping
from typing import Any, Literal, cast

RewardKey = Literal["reward", "score"]


def as_score(value: Any, first: RewardKey = "reward") -> dict[str, Any]:
    """A function's result as {reward, parts, correct, extracted}: a number, a truth value, or a dict.

    A truth value says `correct` too. `first` is the key that is the reward where a dict has both. Raises ValueError
    naming the value for anything else, NaN, infinity and what float32 cannot hold included. Texts come out encodable.
    """
    if not isinstance(value, Mapping):
        reward = _number(value, "the result")
        return {"reward": reward, "parts": {}, "correct": reward if _is_truth(value) else None, "extracted": None}
    result = dict(cast(Mapping[str, Any], value))
    key = next((key for key in (first, "reward", "score") if key in result), None)
    if key is None:
        raise ValueError(f"the result has no `reward` and no `score`: {short(value)}")
    reward = _number(result.pop(key), f"`{key}`")
    correct = _take(result, "correct", "acc")
    extracted = _take(result, "extracted", "pred")
    return {
        "reward": reward,
        "correct": None if correct is None else _number(correct, "`correct`"),
        "extracted": None if extracted is None else clean(str(extracted)),
        "parts": {clean(str(name)): _number(part, f"part {name!r}")
                  for name, part in result.items() if _is_number(part)},
    }


def left_out(value: Any) -> list[str]:
    """Names in a dict that are neither fields of a Score nor numbers: `["feedback"]`."""
    if not isinstance(value, Mapping):
        return []
    fields = ("reward", "score", "correct", "acc", "extracted", "pred")
    return [clean(str(name)) for name, part in cast(Mapping[str, Any], value).items()
            if name not in fields and not _is_number(part)]


def only_reward(value: Any) -> Any:
    """The reward in TRL's list, which holds one for the one completion that was handed in.

    Raises ValueError for anything that is no list of one, and for None in it.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"the result is {short(value)} of type {type(value).__name__}; in TRL's signature it must be "
                         "a list with one reward for each completion")
    listed = cast("list[Any] | tuple[Any, ...]", items)
    if len(listed) != 1:
        raise ValueError(f"the result has {len(listed)} rewards for 1 completion: {short(value)}; in TRL's signature "
                         "it must be a list with one reward for each completion")
    if listed[0] is None:
        raise ValueError("the reward of the completion is None; TRL leaves such a completion out, here every answer "
                         "needs a number")
    return listed[0]


def clean(text: str) -> str:
    """With `?` for lone surrogates, which no file of a run can hold: `clean("a\\ud800")` -> `"a?"`."""
    return text.encode("utf-8", "replace").decode()


def short(value: Any) -> str:
    """Its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _take(result: dict[str, Any], *names: str) -> Any:
    """Remove and return the first of these entries that is there; None if none is."""
    return next((result.pop(name) for name in names if name in result), None)


def _is_truth(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or _is_truth(value) or _is_scalar_array(value)


def _is_scalar_array(value: Any) -> bool:
    """A NumPy array or torch tensor of one number and no dimension."""
    return getattr(value, "shape", None) == () and hasattr(value, "item")


def _number(value: Any, what: str) -> float:
    plain = value.item() if _is_scalar_array(value) else value
    if not _is_number(plain):
        raise ValueError(f"{what} is {short(value)} of type {type(value).__name__}; it must be a number, or the "
                         "result a dict with `reward` or `score`")
    try:
        number = float(plain)
    except OverflowError as error:
        raise ValueError(f"{what} is {short(value)}; it must be finite") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; it must be finite")
    try:
        struct.pack("<f", number)  # raises where a native "f" gives infinity
    except OverflowError as error:
        raise ValueError(f"{what} is {number}; it must be finite in float32 (up to 3.4e38)") from error
    return number
