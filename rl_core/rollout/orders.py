"""The orders of a run whose prompts come by a function of a user's: `data.sampler` (docs/hooks.md 3).

An order is asked for when the first group of its dataset epoch is to be leased, and written before it is used:
`orders/epoch-<e>.json`, put-if-absent. Whatever comes later, a restart included, reads it: so a run stays exact though
the function sees what was learned so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rl_core.config import Config
from rl_core.errors import SamplerError, SamplerTimeout
from rl_core.rollout.order_calls import is_order
from rl_core.rollout.rewards.child import Task
from rl_core.rollout.rewards.function import allowed_imports, check_target
from rl_core.rollout.rewards.process import FunctionProcess
from rl_core.run_dir import RunDir, put_if_absent, read_json, to_json

FIELD = "data.sampler"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Seen:
    """A group that has landed, as a sampler sees it: `Seen(dataset_epoch=0, prompt=7, try_no=0, reward=0.5, spread=1)`.
    """

    dataset_epoch: int
    prompt: int
    try_no: int
    reward: float
    """Mean of its answers."""
    spread: float
    """Largest minus smallest reward."""


def seen(landed: Iterable[tuple[int, int, int, float, float]]) -> list[Seen]:
    """From `Experience.landed_groups`."""
    return [Seen(dataset_epoch=epoch, prompt=prompt, try_no=try_no, reward=reward, spread=spread)
            for epoch, prompt, try_no, reward, spread in landed]


class Sampler(FunctionProcess):
    """The function in a process of its own, which is started for an order and ended behind it."""

    def __init__(self, target: str, *, cwd: Path, deadline_s: float, allowed: Sequence[str] = (),
                 quiet: bool = False) -> None:
        """Raises ConfigError for a path that may not be run."""
        check_target(target, cwd, allowed, FIELD)
        task: Task = {"kind": "sampler", "target": target, "cwd": str(cwd.resolve()), "signature": "auto",
                      "answer_key": "answer", "pattern": None, "code": None, "watch": False}
        super().__init__(f"{FIELD} {target}", task, deadline_s=deadline_s, quiet=quiet, failed=SamplerError,
                         timeout=SamplerTimeout)

    def __call__(self, epoch: int, prompts: NDArray[np.int64], rows: NDArray[np.int64], seed: int,
                 history: Sequence[Seen]) -> NDArray[np.int64]:
        """The prompts of a dataset epoch in the order that the function gives. Raises SamplerError."""
        seen = [{"epoch": s.dataset_epoch, "prompt": s.prompt, "reward": s.reward, "spread": s.spread} for s in history]
        wanted = cast("list[int]", prompts.tolist())
        reply = self.ask({"epoch": epoch, "prompts": wanted, "rows": rows.tolist(), "seed": seed, "history": seen})
        order = cast("list[int]", reply["order"])
        if (problem := is_order(order, wanted)) is not None:
            raise SamplerError(f"{FIELD} {self._task['target']}: the order of dataset epoch {epoch} {problem}")
        return np.array(order, np.int64)


def make_sampler(config: Config, *, cwd: Path | None = None, quiet: bool = False) -> Sampler | None:
    """The run's sampler, or None. Raises ConfigError."""
    if config.data.sampler is None:
        return None
    return Sampler(config.data.sampler, cwd=cwd or Path.cwd(), deadline_s=config.deadlines.reward_s,
                   allowed=allowed_imports(), quiet=quiet)


class Orders:
    """The stored orders of a run: `orders.order(epoch, prompts, rows)`. `history`: what is known when one is made."""

    def __init__(self, run: RunDir, config: Config, history: Callable[[], Sequence[Seen]], *,
                 cwd: Path | None = None) -> None:
        self._run, self._config, self._history, self._cwd = run, config, history, cwd

    def order(self, epoch: int, prompts: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The order of a dataset epoch: the stored one, or a new one, stored now. Raises SamplerError, BrokenFile."""
        path = self._run.order(epoch)
        if not path.exists():
            sampler = make_sampler(self._config, cwd=self._cwd)
            assert sampler is not None
            try:
                made = sampler(epoch, prompts, rows, self._config.seed, sorted(self._history()))
            finally:
                sampler.close()
            payload: dict[str, Any] = {"epoch": epoch, "sampler": self._config.data.sampler, "order": made.tolist()}
            put_if_absent(path, to_json(payload))
        order = cast("list[int]", read_json(path)["order"])
        if (problem := is_order(order, prompts.tolist())) is not None:
            raise SamplerError(f"{path}: the stored order {problem}; the data set is another one than it was made for")
        return np.array(order, np.int64)
