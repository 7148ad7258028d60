"""How a request fills the parameters of a user's function, in the three signatures that people have.

* answer: `f(answer, truth, level)`. Which parameter is the model's text and which the ground truth is in roles.py;
  `prompt` and `data_source` are the row's, any other name is a column of it.
* verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`.
* trl: `f(prompts, completions, **columns) -> list`, called with lists of one.

Which one it is, the parameter names say, or `scoring.signature` (rewards.md section 2). Knows no process and no file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from rl_core.rollout.rewards.parameters import TRUTH_NAMES, Request, Take, of_answer, truth_or_column
from rl_core.rollout.rewards.results import as_score, only_reward

Signature = Literal["answer", "verl", "trl"]
TRAINER_NAMES = ("completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL's trainer hands to a reward and Headway has not."""
FORMS: Mapping[Signature, tuple[str, str]] = {
    "verl": ("solution_str", "compute_score(data_source, solution_str, ground_truth, extra_info)"),
    "trl": ("completions", "f(prompts, completions, **columns)"),
}
"""The parameter by which a signature is known, and how it is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A function that takes requests: `bound.score(bound.call(request))` -> {reward, parts, correct, extracted}."""

    signature: Signature
    needs: list[str]
    """Columns of a row without which it cannot be called."""
    call: Callable[[Request], Any]
    """Raises what the function raises, and KeyError for a column that the row lacks."""

    def score(self, value: Any) -> dict[str, Any]:
        """What it returned, as fields of a Score. Raises ValueError naming the value."""
        return as_score(self.reward_of(value), "score" if self.signature == "verl" else "reward")

    def reward_of(self, value: Any) -> Any:
        """The number or dict of the one answer. Raises ValueError for a list that is none of one."""
        return only_reward(value) if self.signature == "trl" else value


def bind(function: Callable[..., Any], signature: str = "auto", answer_key: str = "answer") -> Bound:
    """Find out how to call `function`. `answer_key` is the column that the row's ground truth came from.

    Raises ValueError for a function that cannot be called so.
    """
    parameters = [p for p in inspect.signature(function).parameters.values()
                  if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    takes_rest = len(named) < len(parameters)
    kind = _recognised({p.name for p in named}, takes_rest, signature)
    if kind == "answer" and not named:
        raise ValueError("the function takes no argument for the answer; if it takes **kwargs alone, set "
                         "scoring.signature")
    known = _known(kind, named, answer_key)
    positional: list[Take] = []
    by_name: dict[str, Take] = {}
    for parameter in named:
        take = known.get(parameter.name) or _column(parameter, answer_key, as_list=kind == "trl")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(take)
        else:
            by_name[parameter.name] = take

    def call(request: Request) -> Any:
        rest = _rest(kind, request, known, answer_key) if takes_rest else {}
        return function(*(take(request) for take in positional),
                        **{name: take(request) for name, take in by_name.items()},
                        **{name: value for name, value in rest.items() if name not in by_name})

    needs = [p.name for p in named if p.name not in known and p.default is inspect.Parameter.empty]
    if kind == "trl" and (foreign := [name for name in needs if name in TRAINER_NAMES]):
        raise ValueError(f"the function asks for `{foreign[0]}`, which TRL's trainer has and Headway has not; give the "
                         "parameter a default")
    return Bound(signature=kind, needs=needs, call=call)


def _recognised(names: set[str], takes_rest: bool, signature: str) -> Signature:
    if signature == "auto":
        found: list[Signature] = [kind for kind, (mark, _) in FORMS.items() if mark in names]
        if len(found) > 1:
            raise ValueError("the function has both `solution_str` (verl) and `completions` (TRL); set "
                             "scoring.signature to verl, trl or answer")
        return found[0] if found else "answer"
    kind = cast(Signature, signature)
    if kind in FORMS and not takes_rest and FORMS[kind][0] not in names:
        mark, form = FORMS[kind]
        raise ValueError(f"scoring.signature={kind} calls {form} by these names, and the function has "
                         f"({', '.join(sorted(names))}); name a parameter `{mark}`")
    return kind


def _known(kind: Signature, named: list[inspect.Parameter], answer_key: str) -> dict[str, Take]:
    """Names that are no plain column, by signature."""
    match kind:
        case "verl":
            return {"solution_str": lambda request: request["text"], "ground_truth": _typed_truth,
                    "data_source": lambda request: request["data_source"],
                    "extra_info": lambda request: request["columns"].get("extra_info")}
        case "trl":
            return {"prompts": lambda request: [request["prompt"]], "completions": _completions,
                    "data_source": lambda request: [request["data_source"]],
                    **{name: _in_list(truth_or_column(name)) for name in (answer_key, "answer", *TRUTH_NAMES)}}
        case "answer":
            return of_answer(named, answer_key)


def _rest(kind: Signature, request: Request, known: Mapping[str, Take], answer_key: str) -> dict[str, Any]:
    """What a function that takes **kwargs gets beside its named parameters, as the system it comes from has it."""
    if kind == "answer":
        return dict(request["columns"])
    if kind == "verl":
        return {name: take(request) for name, take in known.items()}
    columns = {name: [value] for name, value in request["columns"].items()}
    return columns | {name: known[name](request) for name in ("prompts", "completions", "data_source", answer_key)}


def _typed_truth(request: Request) -> Any:
    """verl's ground truth as the row has it, which may be a list or a number."""
    model: Any = request["columns"].get("reward_model")
    return cast("dict[str, Any]", model).get("ground_truth", request["truth"]) if isinstance(model, dict) \
        else request["truth"]


def _completions(request: Request) -> list[Any]:
    """One message of the assistant where the prompt is a chat, else the text, as in TRL."""
    text = request["text"]
    return [[{"role": "assistant", "content": text}]] if is_chat(request["prompt"]) else [text]


def is_chat(prompt: Any) -> bool:
    """Whether a row's prompt is a list of messages."""
    return isinstance(prompt, list) and bool(cast("list[Any]", prompt)) and isinstance(prompt[0], dict)


def _in_list(take: Take) -> Take:
    return lambda request: [take(request)]


def _column(parameter: inspect.Parameter, answer_key: str, *, as_list: bool) -> Take:
    def column(request: Request) -> Any:
        columns = request["columns"]
        if parameter.name in columns:
            return [columns[parameter.name]] if as_list else columns[parameter.name]
        if parameter.default is inspect.Parameter.empty:
            apart = {"prompt"} if request["prompt"] is not None else set[str]()  # a request has them beside the others
            apart |= {answer_key} if "reward_model" not in columns else set[str]()
            raise KeyError(f"parameter {parameter.name!r} is no column of the row; it has {sorted({*columns, *apart})}")
        return parameter.default

    return column
