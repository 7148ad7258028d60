"""Validation of a run: how good a weight version is on held-out prompts, measured once and recorded.

What a record says: docs/validation.md 1. The measuring itself is in rl_core/measuring.py, the numbers in
rl_core/answers.py and rl_core/estimates.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import Config
from rl_core.measuring import Measuring, open_measuring
from rl_core.rollout.canary import check_adapter_served
from rl_core.rollout.engine import Loan
from rl_core.run_dir import RunDir, file_numbers, put_if_absent, read_json, to_json
from rl_core.types import WeightVersion
from rl_core.versions import pin, unpin, validating_pin

if TYPE_CHECKING:
    from rl_core.rollout.sglang.borrowing import Borrower


def read_validation(run: RunDir, step: int) -> dict[str, Any]:
    """The record of the validation after `step` training steps. Raises FileNotFoundError where there is none."""
    return read_json(run.validation(step))


def read_table(run: RunDir, step: int) -> list[dict[str, Any]]:
    """Some answers of that validation, as texts. Raises FileNotFoundError where none are kept."""
    return read_json(run.validation_table(step))["rows"]


def read_table_details(run: RunDir, step: int) -> list[dict[str, Any]]:
    """Reward parts and tokens of each of those answers (`answers.table_details`); empty where a Headway that did not
    keep them has written the table. Raises FileNotFoundError where there is none."""
    return read_json(run.validation_table(step)).get("details", [])


def validated_steps(run: RunDir) -> list[int]:
    """Steps with a validation record, ascending."""
    return file_numbers(run.validations, r"step-(\d{9})\.json")


class Validator:
    """Measures versions of one run, one after the other. Any thread; `close` may come from another one.

        validator = open_validator(root="runs/k", config=config)
        validator.validate(version, step=20)["greedy_accuracy"]     # 0.73

    With `borrower`, the engine of `measuring`, each validation is given the server that it may ask.
    """

    def __init__(self, run: RunDir, measuring: Measuring, borrower: Borrower | None = None) -> None:
        self._run, self._measuring, self._borrower = run, measuring, borrower
        self._one = threading.Lock()

    def validate(self, version: WeightVersion, step: int, loan: Loan | None = None) -> dict[str, Any]:
        """Measure `version`, served after `step` training steps, and record it; a record that exists is returned.

        The record: step, v, idx, digest, the fields of docs/validation.md 1, mean_length (= greedy_length), seconds
        (wall), ts_us. The table of answers is written before it. The version is pinned meanwhile. `loan`: the server to
        ask, which serves the version; for a validator without an engine of its own.

        Raises DeadlinePassed (deadlines.validation_s), RewardError if no answer at all could be scored, WeightsDamaged,
        DeadPart for a lent server that is gone, AdapterNotServed and EngineMismatch (rollout/canary.py).
        """
        name = validating_pin(step)
        with self._one:
            try:
                return read_validation(self._run, step)
            except FileNotFoundError:
                pin(self._run, name, version.v)
            try:
                if self._borrower is not None and loan is not None:
                    self._borrower.borrow(loan)
                self._measure(version, step)
            finally:
                if self._borrower is not None:
                    self._borrower.give_back()
                unpin(self._run, name, version.v)
            return read_validation(self._run, step)

    def close(self) -> None:
        """End the engine and the reward's process; a validation that runs raises. Idempotent."""
        self._measuring.close()

    def _measure(self, version: WeightVersion, step: int) -> None:
        start = time.monotonic()
        directory = self._run.weights(version.v)
        self._measuring.engine.swap(version, directory)
        check_adapter_served(self._measuring.engine, version, directory, self._measuring.config)
        measured = self._measuring.measure(begun=start)
        record = {"step": step, "v": version.v, "idx": version.idx, "digest": version.digest} | measured.fields
        record |= {"mean_length": record["greedy_length"], "seconds": time.monotonic() - start,
                   "ts_us": time.time_ns() // 1000, "by_prompt": measured.by_prompt}
        table = self._run.validation_table(step)
        table.unlink(missing_ok=True)  # of a start that ended before it could write its record
        if measured.table:
            put_if_absent(table, to_json({"step": step, "rows": measured.table, "details": measured.details}))
        put_if_absent(self._run.validation(step), to_json(record))


def open_validator(*, root: str, config: Config, cwd: str | None = None,
                   allowed_imports: Sequence[str] | None = None) -> Validator:
    """A validator with an engine of its own, or one that asks lent servers (`validation.engine`): what an actor starts.
    `cwd` is the working directory of the command."""
    run = RunDir(Path(root))
    borrower = None
    if config.validates_lent:
        from rl_core.rollout.sglang import borrowing

        borrower = borrowing.Borrower(run.model, config)
    return Validator(run, open_measuring(run.model, config, cwd=Path(cwd) if cwd else None,
                                         allowed_imports=allowed_imports, borrower=borrower), borrower)
