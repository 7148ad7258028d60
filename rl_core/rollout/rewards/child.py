"""The process that runs a user's function: one JSON request a line on stdin, one JSON reply a line on stdout.

Started by `process.py` as `python -m rl_core.rollout.rewards.child <Task as JSON>`. It runs the function in its main
thread (scorers that set an alarm work), sends what the function prints to stderr, leaves it an empty stdin, and ends
itself when its parent is gone, also in the middle of a call.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import queue
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any, Literal, NotRequired, TextIO, TypedDict, cast

from rl_core.rollout.order_calls import OrderCalls
from rl_core.rollout.rewards.code import CodeLimits
from rl_core.rollout.rewards.parameters import Request
from rl_core.rollout.rewards.results import left_out
from rl_core.rollout.rewards.reward_model import ModelTask
from rl_core.rollout.rewards.signatures import Bound, bind, is_chat
from rl_core.rollout.session_calls import SessionCalls
from rl_core.rollout.verdicts import Verdicts


class Task(TypedDict):
    """What this process is to run."""

    kind: Literal["reward", "group_filter", "sampler", "session"]
    target: str
    """`./file.py:function` (in cwd), `package.module:function`, or a reward of Headway's by its name."""
    cwd: str
    signature: str
    """As in `scoring.signature`."""
    answer_key: str
    pattern: str | None
    code: CodeLimits | None
    """Of the reward `code`."""
    model: NotRequired[ModelTask]
    """Of the reward `reward_model`."""
    watch: bool
    """Reply with notes on what a call printed, which threads it left, and which entries of its dict are left out."""


def own_reward(task: Task) -> Callable[..., Any] | None:
    """A reward of Headway's that runs in this process; None for a user's function."""
    from rl_core.rollout.rewards import code, math_verify, reasoning_gym, regex, reward_model

    if task["target"] == "regex":
        return regex.scorer_of(task["pattern"] or "")
    if task["target"] == "math_verify":
        return math_verify.scorer()
    if task["target"] == "code":
        assert task["code"] is not None
        return code.scorer_of(task["code"])
    if task["target"] == "reward_model":
        assert "model" in task
        return reward_model.scorer_of(task["model"])
    package, _, name = task["target"].partition(":")
    return reasoning_gym.scorer_of(name) if package == "reasoning_gym" else None


def load(target: str, cwd: str, what: str = "reward", module_name: str = "headway_reward") -> Callable[..., Any]:
    """The function named by `./file.py:function` (in cwd) or `package.module:function`; `what` it is, for errors.

    Raises ValueError if the file or module has no such function, ImportError and whatever the import itself raises.
    """
    place, name = target.rsplit(":", 1)
    if place.endswith(".py"):
        path = os.path.join(cwd, place)
        spec = importlib.util.spec_from_file_location(module_name, path)
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
        raise ValueError(f"{target} is async; a {what} is an ordinary function")
    return cast(Callable[..., Any], function)


def _bound(task: Task) -> Bound | Verdicts | OrderCalls | SessionCalls:
    own = own_reward(task) if task["kind"] == "reward" else None
    if own is not None:
        return bind(own, "answer")
    sys.path.insert(0, task["cwd"])
    if task["kind"] == "group_filter":
        return Verdicts(load(task["target"], task["cwd"], "group filter"))
    if task["kind"] == "session":
        return SessionCalls(load(task["target"], task["cwd"], "session"))
    if task["kind"] == "sampler":
        return OrderCalls(load(task["target"], task["cwd"], "sampler"))
    return bind(load(task["target"], task["cwd"]), task["signature"], task["answer_key"])


class Watch:
    """What a call leaves behind beside its result. `printed` is a file that standard output goes to."""

    def __init__(self, printed: int) -> None:
        self._printed = printed
        self._read = 0
        self._threads = set(threading.enumerate())

    def notes(self) -> dict[str, Any]:
        """Since the last call: {printed: text, threads: names of those still alive}."""
        with contextlib.suppress(ValueError):  # a function that closed it
            sys.stdout.flush()
        size = os.fstat(self._printed).st_size
        text = os.pread(self._printed, min(size - self._read, 200), self._read).decode(errors="replace")
        self._read = size
        alive = set(threading.enumerate())
        left = sorted(thread.name for thread in alive - self._threads)
        self._threads |= alive
        return {"printed": text, "threads": left}


def _raised(error: BaseException) -> str:
    """`OSError: no net (reward.py:12)`: with the deepest line of the user's own files, where there is one."""
    places = [f"{os.path.relpath(frame.filename)}:{frame.lineno}"
              for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename.startswith(os.getcwd() + os.sep)
              and os.path.dirname(os.path.abspath(frame.filename)) != os.path.dirname(__file__)]
    return f"{type(error).__name__}: {error}" + (f" ({places[-1]})" if places else "")


def _hint(bound: Bound | Verdicts | OrderCalls | SessionCalls, request: Request, error: BaseException) -> str:
    """People move a TRL reward for chats to rows whose prompts are texts."""
    if bound.signature == "trl" and isinstance(error, TypeError | IndexError) and not is_chat(request["prompt"]):
        return "; the row's prompt is a text, so completions are texts, as in TRL; write prompts as chats for messages"
    return ""


def _serve(task: Task, given: TextIO, replies: TextIO) -> None:
    def reply(payload: dict[str, Any]) -> None:
        replies.write(json.dumps(payload) + "\n")
        replies.flush()

    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in given:
            requests.put(line)
        os._exit(0)  # the parent is gone or has closed us: end also a call that hangs

    threading.Thread(target=read, name="requests", daemon=True).start()
    watch = Watch(1) if task["watch"] else None
    try:
        bound = _bound(task)
    except (Exception, SystemExit) as error:  # a user's file may raise anything; the parent names it
        reply({"error": _raised(error)})
        return
    reply({"ready": True, "columns": bound.needs, "signature": bound.signature,
           "notes": watch.notes() if watch else {}})
    while True:
        request = json.loads(requests.get())
        try:
            value = bound.call(request)
        except (Exception, SystemExit) as error:  # a user's function may raise anything; the parent names it
            traceback.print_exc()
            reply({"error": f"raised {_raised(error)}{_hint(bound, request, error)}",
                   "notes": watch.notes() if watch else {}})
            continue
        notes = watch.notes() if watch else {}
        try:
            result = {"score": bound.score(value)}
            notes |= {"left_out": left_out(bound.reward_of(value))} if watch and isinstance(bound, Bound) else {}
        except ValueError as error:
            result = {"error": str(error)}
        reply({**result, "notes": notes})


def main() -> None:
    """Serve the function named on the command line until the input ends."""
    task: Task = json.loads(sys.argv[1])
    # The function and its subprocesses must neither read the requests nor print between the replies.
    given = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno() if task["watch"] else 2, 1)
    os.chdir(task["cwd"])
    _serve(task, given, replies)


if __name__ == "__main__":
    main()
