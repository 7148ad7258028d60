"""The budget of deaths of the validation engine: counted over the attempt, whatever the validation; a deadline ends at
once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_core import versions
from rl_core.config import Config
from rl_core.errors import DeadlinePassed, DeadPart, FailureBudgetSpent, RunEnded, WorkerDead
from rl_core.run_dir import RunDir
from rl_core.types import WeightVersion
from tasks.validation import ValidatorDeaths, _measure, validate_beside  # pyright: ignore

Answer = dict[str, Any] | Exception
RECORD: dict[str, Any] = {"greedy_accuracy": 0.5}
DEAD, LENT, SILENT = DeadPart("validation/0 is dead"), WorkerDead("rollout-0 is gone"), DeadlinePassed("no answer")
START = DeadPart("validation/0 did not start")
ENDED = RunEnded("nothing more is validated")
VERSION: Any = WeightVersion.__new__(WeightVersion)


class Owner:
    """What a validation needs of an owner: an engine that gives these answers, and a start that has these ends."""

    def __init__(self, allowed: int, answers: Sequence[Answer], starts: Sequence[Exception | None] = ()) -> None:
        self.config = Config.model_validate({"failure": {"validation_restarts": allowed}})
        self.validator_deaths = ValidatorDeaths(self.config.failure.validation_restarts)
        self.validator, self.started = self, 0
        self._answers, self._starts = iter(answers), iter(starts)

    def call(self, method: str, version: WeightVersion, step: int, deadline_s: float) -> dict[str, Any]:
        assert (method, deadline_s) == ("validate", self.config.deadlines.validation_s)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def restart_validator(self, death: DeadPart) -> None:
        self.validator_deaths.note(death)
        self.started += 1
        if (failure := next(self._starts, None)) is not None:
            raise failure


def measure(owner: Owner) -> dict[str, Any]:
    made: Any = owner
    return _measure(made, VERSION, 4)


def test_deaths_count_over_all_validations_of_the_attempt() -> None:
    owner = Owner(3, [DEAD, RECORD, RECORD, LENT, DEAD, RECORD, DEAD])
    assert [measure(owner) for _ in range(3)] == [RECORD] * 3
    assert owner.started == 3 and owner.validator_deaths.budget == (3, 3)
    with pytest.raises(FailureBudgetSpent) as spent:
        measure(owner)
    assert str(spent.value) == ("the validation engine died 4 times in this attempt (failure.validation_restarts = 3); "
                                "the last: validation/0 is dead")
    assert owner.started == 3 and owner.validator_deaths.budget == (4, 3)
    assert spent.value.__cause__ is DEAD, "what it wrote last is said below"


CASES: dict[str, tuple[int, list[Answer], list[Exception | None], type[Exception], int]] = {
    "none is allowed": (0, [DEAD], [], FailureBudgetSpent, 0),
    "a deadline is no death": (3, [SILENT], [], DeadlinePassed, 0),
    "one that cannot be started again": (2, [DEAD], [START] * 2, FailureBudgetSpent, 2),
    "one that is not up in time": (2, [DEAD], [SILENT], DeadlinePassed, 1),
    "the start has ended": (2, [DEAD], [ENDED], RunEnded, 1),
}


def test_what_is_validated_beside_training_is_looked_up_without_reading_every_version_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = RunDir(tmp_path), list[int]()
    made: Any = SimpleNamespace(run=run, config=Config(), versions={}, validated={0, 2, 3})
    really = versions.read_version

    def noted(of: RunDir, v: int) -> WeightVersion:
        read.append(v)
        return really(of, v)

    monkeypatch.setattr(versions, "read_version", noted)
    for v, steps_done in ((0, 0), (1, 2), (2, 3)):
        versions.put_version(run, WeightVersion(v=v, step=steps_done, idx=v, attempt=1, digest=str(v)))
        validate_beside(made, steps_done)
    assert read == [0, 1, 2]


@pytest.mark.parametrize(("allowed", "answers", "starts", "error", "started"), CASES.values(), ids=CASES)
def test_what_ends_a_validation(allowed: int, answers: list[Answer], starts: list[Exception | None],
                                error: type[Exception], started: int) -> None:
    owner = Owner(allowed, answers, starts)
    with pytest.raises(error):
        measure(owner)
    assert owner.started == started


def test_one_that_came_up_the_second_time_measures() -> None:
    owner = Owner(3, [DEAD, RECORD], [START, None])
    assert measure(owner) == RECORD and owner.validator_deaths.budget == (2, 3)
