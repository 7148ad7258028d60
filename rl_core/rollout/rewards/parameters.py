"""Which parameter of a function in the signature `answer` is the model's text, and which the row's ground truth.

Names say it first, places only for what no name says: a guess must never swap the two (rewards.md section 2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

Request = dict[str, Any]
"""{text, truth, prompt, data_source, columns}"""
Take = Callable[[Request], Any]

TEXT_NAMES = ("completion", "response", "solution_str", "answer", "output", "text", "solution")
"""Names of the model's text; of several the first in this order. Beside one that stands before it, `answer` is the
row's; the others are columns then."""
TRUTH_NAMES = ("ground_truth", "truth")
REMEDY = "call the model's text `completion` and the ground truth `truth`"


def of_answer(named: Sequence[inspect.Parameter], answer_key: str) -> dict[str, Take]:
    """What each parameter takes that is no plain column, by name; also names that no parameter has.

    `answer_key` is the column that the row's ground truth came from. Raises ValueError where no parameter can be the
    text. What the function takes by place may raise ValueError with a row whose columns leave it open.
    """
    names = [p.name for p in named]
    known: dict[str, Take] = {"answer": truth_or_column("answer"), answer_key: truth_or_column(answer_key),
                              **dict.fromkeys(TRUTH_NAMES, _truth),
                              "data_source": lambda request: request["data_source"],
                              "prompt": lambda request: request["prompt"]}
    unnamed = [p.name for p in named if p.name not in known and p.name not in TEXT_NAMES and _must_be_given(p)]
    text = _named_text(named, unnamed, answer_key)
    if text is not None:
        return known | {text: _text}
    if not unnamed:
        raise ValueError(f"none of the parameters ({', '.join(names)}) is the model's text; call it `completion`")
    truths = {answer_key, *TRUTH_NAMES}
    roles = (_text,) if truths.intersection(names) else (_text, _truth)
    return known | {name: _by_place(name, unnamed, roles) for name in unnamed}


def truth_or_column(name: str) -> Take:
    """A column of that name stands before the row's ground truth."""
    return lambda request: request["columns"].get(name, request["truth"])


def _must_be_given(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def _named_text(named: Sequence[inspect.Parameter], unnamed: Sequence[str], answer_key: str) -> str | None:
    """The parameter that has a name of the text; None where the text is known by its place."""
    present = {p.name for p in named if _must_be_given(p) or not unnamed}
    found = [name for name in TEXT_NAMES if name in present]
    sure = [name for name in found if name == "answer" or name != answer_key]
    if sure or not found or not unnamed:
        return next(iter([*sure, *found]), None)
    names = [p.name for p in named]
    if names.index(answer_key) < names.index(unnamed[0]):
        raise ValueError(f"`{answer_key}` may be the model's text, and it is the data's answer key, too; {REMEDY}")
    return None


def _by_place(name: str, unnamed: Sequence[str], roles: Sequence[Take]) -> Take:
    """The role of one of the parameters that no name explains, of those that are no columns of the row."""
    def take(request: Request) -> Any:
        columns = request["columns"]
        free = [each for each in unnamed if each not in columns]
        if not 1 <= len(free) <= len(roles):
            open_ = f"{', '.join(free)} are no columns" if free else f"{', '.join(unnamed)} are all columns"
            raise ValueError(f"which parameter is the model's text? {open_} of the row; {REMEDY}")
        return roles[free.index(name)](request) if name in free else columns[name]

    return take


def _text(request: Request) -> str:
    return request["text"]


def _truth(request: Request) -> str:
    return request["truth"]
