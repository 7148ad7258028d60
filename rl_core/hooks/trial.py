"""A hook tried in a process of its own, since it may do anything: `python -m rl_core.hooks.trial <kind> <target>`.

The last line of its output is a JSON list of problems.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import cast, get_args

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.hooks.kinds import FIELDS, KINDS, Kind, hooks_of
from rl_core.rollout.rewards.function import allowed_imports, check_target
from rl_core.rollout.rewards.process import child_environment

TRIAL_S = 120.0
"""Interpreter, torch, and every call of the contract."""


def whole_target(text: str) -> tuple[Kind, str]:
    """`loss=./mine.py:f` -> ("loss", "./mine.py:f"); without a kind it is the function's name: `./mine.py:loss`. Raises
    ConfigError where it is none."""
    kind, equals, target = text.partition("=")
    if not equals:
        kind, target = text.rpartition(":")[2], text
    if kind not in get_args(Kind):
        raise ConfigError(f"hook: {text!r} names no kind of hook; write KIND={target}, with a kind of "
                          f"{', '.join(KINDS)}, or call the function so")
    return cast(Kind, kind), target


def try_hook(kind: Kind, target: str, *, cwd: Path | None = None, field: str | None = None) -> list[str]:
    """What the function does not keep of its contract. Raises ConfigError for a path that may not be run."""
    where = (cwd or Path.cwd()).resolve()
    check_target(target, where, allowed_imports(), field or FIELDS[kind])
    try:
        done = subprocess.run([sys.executable, "-m", "rl_core.hooks.trial", kind, target], cwd=where, text=True,
                              env=child_environment(), capture_output=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"no end of the trial within {TRIAL_S:g} s: does a call hang?"]
    try:
        return list(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return [f"its process ended with exit code {done.returncode}: {last[:400]}"]


def check_hooks(config: Config, *, cwd: Path | None = None) -> None:
    """Try the hooks of a run that work in processes of Headway's, and its sampler. Raises ConfigError with the first
    problem of each."""
    told: list[str] = []
    for each in dict.fromkeys(hooks_of(config)):
        if each.kind != "environment":  # its rows are read and checked like a file's
            told += [f"{each.field}: {each.target}: {problem}"
                     for problem in try_hook(each.kind, each.target, cwd=cwd, field=each.field)[:1]]
    if told:
        raise ConfigError("\n".join(told))


def main() -> None:
    """The trial itself, in the working directory of the command."""
    from rl_core.hooks.contract import problems
    from rl_core.hooks.loading import hook

    kind, target = cast(Kind, sys.argv[1]), sys.argv[2]
    try:
        found = problems(kind, hook(kind, FIELDS[kind], target))
    except ConfigError as error:
        found = [str(error).removeprefix(f"{FIELDS[kind]}: ")]
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
