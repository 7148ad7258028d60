"""The process that runs a user's reward function: one JSON request a line on stdin, one JSON reply a line on stdout.

Started by `function.py` as `python -m rl_core.rollout.rewards.child <cwd> <target>`. It runs the function in its main
thread (scorers that set an alarm work), sends what the function prints to stderr, and ends itself when its parent is
gone, also in the middle of a call.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO, cast

TEXT_NAMES = ("answer", "completion")
TRUTH_NAMES = ("ground_truth", "truth")
ROW_NAMES = ("prompt", "data_source")
Request = dict[str, Any]
"""{text, truth, prompt, data_source, columns}"""
Argument = Callable[[Request], Any]


def load(target: str, cwd: str) -> Callable[..., Any]:
    """The function named by `./file.py:function` (in cwd) or `package.module:function`.

    Raises ValueError if the file or module has no such function, ImportError and whatever the import itself raises.
    """
    place, name = target.rsplit(":", 1)
    if place.endswith(".py"):
        path = os.path.join(cwd, place)
        spec = importlib.util.spec_from_file_location("headway_reward", path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{target} is async; a reward is an ordinary function")
    return cast(Callable[..., Any], function)


def needed_columns(function: Callable[..., Any]) -> list[str]:
    """Columns of a row without which the function cannot be called: parameters of other names, without a default."""
    parameters = list(inspect.signature(function).parameters.values())
    named = any(p.name in TEXT_NAMES for p in parameters)
    known = {*TEXT_NAMES, *TRUTH_NAMES, *ROW_NAMES}
    return [p.name for i, p in enumerate(parameters)
            if p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            and p.default is inspect.Parameter.empty and p.name not in known and (named or i >= 2)]


def bind(function: Callable[..., Any]) -> tuple[list[Argument], dict[str, Argument], bool]:
    """How a request fills the function's parameters: positional, by name, and whether it takes all other columns.

    `answer` or `completion` is the model's text; `truth` or `ground_truth` the row's answer; `prompt` and `data_source`
    are the row's; any other name is a column of the row. If no parameter has a name of the text, the first is the text
    and the second the ground truth, whatever they are called.
    """
    parameters = list(inspect.signature(function).parameters.values())
    named = any(p.name in TEXT_NAMES for p in parameters)
    positional: list[Argument] = []
    by_name: dict[str, Argument] = {}
    takes_columns = False
    for i, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_columns = True
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        role = ("text", "truth")[i] if not named and i < 2 else parameter.name
        argument = _argument(role, parameter)
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(argument)
        else:
            by_name[parameter.name] = argument
    if not positional and not by_name:
        raise ValueError("the function takes no argument for the answer")
    return positional, by_name, takes_columns


def _argument(role: str, parameter: inspect.Parameter) -> Argument:
    if role in ("text", *TEXT_NAMES):
        return lambda request: request["text"]
    if role in TRUTH_NAMES:
        return lambda request: request["truth"]
    if role in ROW_NAMES:
        return lambda request: request[role]

    def column(request: Request) -> Any:
        columns = request["columns"]
        if role in columns:
            return columns[role]
        if parameter.default is inspect.Parameter.empty:
            raise KeyError(f"parameter {role!r} is no column of the row; it has {sorted(columns)}")
        return parameter.default

    return column


def as_score(value: Any) -> dict[str, Any]:
    """A function's result as {reward, parts, correct, extracted}: a number, a truth value, or a dict with `reward`.

    A truth value says `correct` too. In a dict, `correct` and `extracted` are what they say, other numbers are parts.
    Raises ValueError naming the value for anything else, NaN and infinity included.
    """
    if not isinstance(value, dict):
        reward = _number(value, "the result")
        return {"reward": reward, "parts": {}, "correct": reward if _is_truth(value) else None, "extracted": None}
    result = dict(cast(dict[str, Any], value))
    if "reward" not in result:
        raise ValueError(f"the result has no `reward`: {value!r}")
    reward = _number(result.pop("reward"), "`reward`")
    correct = result.pop("correct", None)
    extracted = result.pop("extracted", None)
    return {
        "reward": reward,
        "correct": None if correct is None else _number(correct, "`correct`"),
        "extracted": None if extracted is None else str(extracted),
        "parts": {str(name): _number(part, f"part {name!r}") for name, part in result.items()},
    }


def _is_truth(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")


def _number(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real) and not _is_truth(value):
        raise ValueError(f"{what} is {_short(value)} of type {type(value).__name__}; it must be a number, or the "
                         "result a dict with `reward`")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{what} is {_short(value)}; it must be finite") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; it must be finite")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _raised(error: BaseException) -> str:
    """`OSError: no net (reward.py:12)`: with the deepest line of the user's own files, where there is one."""
    places = [f"{os.path.relpath(frame.filename)}:{frame.lineno}"
              for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename.startswith(os.getcwd() + os.sep) and os.path.abspath(frame.filename) != __file__]
    return f"{type(error).__name__}: {error}" + (f" ({places[-1]})" if places else "")


def _serve(cwd: str, target: str, replies: TextIO) -> None:
    def reply(payload: dict[str, Any]) -> None:
        replies.write(json.dumps(payload) + "\n")
        replies.flush()

    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # the parent is gone or has closed us: end also a call that hangs

    threading.Thread(target=read, name="requests", daemon=True).start()
    try:
        function = load(target, cwd)
        positional, by_name, takes_columns = bind(function)
    except (Exception, SystemExit) as error:  # a user's file may raise anything; the parent names it
        reply({"error": _raised(error)})
        return
    reply({"ready": True, "columns": needed_columns(function)})
    while True:
        request = json.loads(requests.get())
        try:
            rest = {name: value for name, value in request["columns"].items() if name not in by_name} \
                if takes_columns else {}
            value = function(*(take(request) for take in positional),
                             **{name: take(request) for name, take in by_name.items()}, **rest)
        except (Exception, SystemExit) as error:  # a user's function may raise anything; the parent names it
            traceback.print_exc()
            reply({"error": f"raised {_raised(error)}"})
            continue
        try:
            reply({"score": as_score(value)})
        except ValueError as error:
            reply({"error": str(error)})


def main() -> None:
    """Serve the function named on the command line until the input ends."""
    cwd, target = sys.argv[1:3]
    # What the function prints must not mix with the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    _serve(cwd, target, replies)


if __name__ == "__main__":
    main()
