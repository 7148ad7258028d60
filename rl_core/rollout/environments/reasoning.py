"""Rows of a task of the package reasoning-gym (extra `tasks`): about a hundred procedural tasks, each with its scorer.

Rows are made in a process of their own, with a fixed hash seed: some tasks walk through Python sets, whose order is
another one in every process otherwise. A question belongs to the held-out rows or to the training rows by its digest,
so that the two never meet, whatever their sizes and seeds (rewards.md section 5).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypedDict, cast

import xxhash

import rl_core
from rl_core.errors import ConfigError
from rl_core.reward_settings import TASK
from rl_core.rollout.rewards.function import check_package
from rl_core.rollout.rewards.reasoning_gym import library_with
from rl_core.seeds import derive

HELD_OUT_SHARE = 4
"""One question of so many is held out."""
PATIENCE = 8
"""Entries drawn at most for each question that is wanted; a task that has fewer different ones is refused."""
DEADLINE_S = 900.0


class Order(TypedDict):
    """What the process is to make: entry i of a task follows from `base + i`."""

    name: str
    size: int
    base: int
    held_out: bool


def reasoning_rows(name: str, size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """`size` rows of a task, no question twice: `{"prompt": "How many legs ...", "answer": "14", "metadata": {...}}`.

    `metadata` are the entry's, as JSON values; the reward `reasoning_gym:<name>` reads them. An entry without an answer
    of its own has an empty one. Training rows follow the seed, held-out rows are the same for all seeds; fewer rows are
    the first ones of more.

    Raises ConfigError for a package that is not installed, a name that is no task, and a task that has fewer questions.
    """
    check_package(f"{TASK}{name}")
    path = os.pathsep.join([str(Path(rl_core.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run([sys.executable, "-m", "rl_core.rollout.environments.reasoning",
                               json.dumps(order_of(name, size, seed, held_out))], cwd="/", capture_output=True,
                              env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}, text=True,
                              timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"task {TASK}{name}: {size} rows were not made within {DEADLINE_S:g} s; lower data.size or "
                          "data.validation_size") from error
    if done.returncode != 0:
        raise ConfigError(f"task {TASK}{name}: no rows could be made: {done.stderr.strip()[-500:]}")
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise ConfigError(f"task {TASK}{name}: {reply['error']}")
    return reply["rows"]


def order_of(name: str, size: int, seed: int, held_out: bool) -> Order:
    """Held-out rows have a seed of their own, whatever the run's."""
    base = derive("reasoning_gym", name, "held out") if held_out else derive(seed, "reasoning_gym", name)
    return Order(name=name, size=size, base=base % 2**31, held_out=held_out)


def rows_of(order: Order) -> list[dict[str, Any]]:
    """The rows, made in this process. Raises ValueError for a task that is not there or has fewer questions."""
    library = library_with(order["name"])
    size, held_out = order["size"], order["held_out"]
    field = "data.validation_size" if held_out else "data.size"
    rows: dict[str, dict[str, Any]] = {}
    draws = PATIENCE * size * (HELD_OUT_SHARE if held_out else 1)
    for entry in library.create_dataset(order["name"], seed=order["base"], size=draws):
        question, answer = str(entry["question"]), entry["answer"]
        if question in rows or (xxhash.xxh3_64_intdigest(question.encode()) % HELD_OUT_SHARE == 0) is not held_out:
            continue
        rows[question] = {"prompt": question, "answer": "" if answer is None else str(answer),
                          "metadata": entry["metadata"]}
        if len(rows) == size:
            return list(rows.values())
    raise ValueError(f"{size} different questions asked for ({field}), and it gave {len(rows)}; set {field} to "
                     f"{max(1, len(rows))} or less")


def main() -> None:
    """Print the rows that the command line asks for, as JSON."""
    order: Order = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a task prints must not mix with the rows
    try:
        reply = {"rows": rows_of(order)}
    except ValueError as error:
        reply = {"error": str(error)}
    replies.write(json.dumps(reply, default=_plain))
    replies.flush()


def _plain(value: Any) -> Any:
    """JSON of what tasks put into metadata beside JSON values: NumPy numbers and arrays, sets, dates, objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value), key=str)
    return str(value)


if __name__ == "__main__":
    main()
