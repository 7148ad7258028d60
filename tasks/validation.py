"""Validation: an actor of its own, at a pinned version, while the learner goes on.

It has an engine of its own, or asks a server that rollout lends for the time of one validation (`validation.engine`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rl_core.errors import DeadlinePassed, DeadPart, FailureBudgetSpent, WeightsDamaged, WorkerDead
from rl_core.run_log import STORY
from rl_core.types import WeightVersion
from rl_core.versions import learn_versions, pin, pinned_versions, read_versions, unpin, validating_pin
from tasks.waiting import waiting

if TYPE_CHECKING:
    from rl_core.rollout.engine import Loan
    from rl_core.run_dir import RunDir
    from tasks.owner import Owner

PIN = "validate"
AT_MOST_WAITING = 2
"""One that runs and one that waits: a third lets the learner wait, so that pinned weights do not pile up."""
LOOK_S = 0.05


class ValidatorDeaths:
    """Deaths of the validation engine in one attempt, against `failure.validation_restarts`."""

    def __init__(self, allowed: int) -> None:
        self._allowed, self._count = allowed, 0

    @property
    def budget(self) -> tuple[int, int]:
        """What is spent, and what is allowed."""
        return self._count, self._allowed

    def note(self, death: DeadPart) -> None:
        """Raises FailureBudgetSpent for one too many."""
        self._count += 1
        STORY.warning("the validation engine died and is started again (%d of %d): %s", self._count, self._allowed,
                      death)
        if self._count > self._allowed:
            raise FailureBudgetSpent(f"the validation engine died {self._count} times in this attempt "
                                     f"(failure.validation_restarts = {self._allowed}); the last: {death}") from death


@task(name="validate", task_run_name="validate-{step}", cache_policy=NO_CACHE, persist_result=False)
def validate(owner: Owner, step: int, version: WeightVersion, unfinished: bool = False) -> dict[str, Any] | None:
    """Accuracy of `version`, which has `step` trained steps behind it, on the held-out prompts. None where an earlier
    start left it `unfinished` and its weights are damaged: nobody makes those again."""
    try:
        with owner.validating:  # one engine: one after the other
            record = _measure(owner, version, step)
    except BaseException as error:
        if unfinished and type(error) is WeightsDamaged:  # and not WeightsRefused, by a server that takes none now
            _give_up(owner, version, str(error))
            return None
        owner.experience.fail(error)  # the flow ends with it now, not when it asks for this result
        raise
    _let_go(owner.run, version)
    owner.saw_validation(record)
    return record


def _let_go(run: RunDir, version: WeightVersion) -> None:
    """Unpin weights that nobody validates any more, also for a validator that died before it could."""
    for name in (PIN, validating_pin(version.step)):
        unpin(run, name, version.v)


def _give_up(owner: Owner, version: WeightVersion, why: str) -> None:
    owner.progress.set(note=f"no validation after {version.step} training steps: an earlier start ended in it, and the "
                            f"weights are lost ({why})")
    owner.validated.discard(version.step)
    _let_go(owner.run, version)


def _measure(owner: Owner, version: WeightVersion, step: int) -> dict[str, Any]:
    """Ask the engine; a dead one is started again within its budget, and a lent server that died is replaced by another
    one. Raises FailureBudgetSpent, DeadlinePassed."""
    death: DeadPart | None = None
    while True:
        try:
            if death is not None:
                owner.restart_validator(death)
            return _ask(owner, version, step)
        except DeadlinePassed:
            raise
        except DeadPart as newest:  # also of the engine that was to replace it
            death = newest


def _ask(owner: Owner, version: WeightVersion, step: int) -> dict[str, Any]:
    deadline_s = owner.config.deadlines.validation_s
    if not owner.config.validates_lent:
        return owner.validator.call("validate", version, step, deadline_s=deadline_s)
    with _lent(owner, version) as loan:
        return owner.validator.call("validate", version, step, loan, deadline_s=deadline_s)


@contextmanager
def _lent(owner: Owner, version: WeightVersion) -> Iterator[Loan]:
    """A server of the first rollout worker, at this version, given back at the end. A worker that dies meanwhile has
    nothing to give back: the pump starts another one, which is waited for here.

    Raises DeadlinePassed where no server can be spared in `deadlines.validation_s`.
    """
    wait_s = owner.config.deadlines.validation_s
    until = time.monotonic() + wait_s
    while True:
        owner.check()
        try:
            lender = owner.pool.lender()
            # A loan ends by itself when nobody is left who would give it back.
            loan = lender.lend(version, max(0.0, until - time.monotonic()), wait_s + owner.config.deadlines.call_s)
            break
        except WorkerDead as dead:
            if owner.stop.is_set():  # nobody starts another one then
                raise
            if time.monotonic() >= until:
                raise DeadlinePassed(f"no server could be lent for validation in {wait_s:g} s "
                                     f"(deadlines.validation_s); the last: {dead}") from dead
            time.sleep(LOOK_S)
    try:
        yield loan
    finally:
        with suppress(DeadPart):
            lender.take_back(loan.id)


def validation_due(owner: Owner, steps_done: int) -> bool:
    """Before the first step and every `validation.every` steps; the flow adds the last one."""
    return steps_done % owner.config.validation.every == 0


def validate_beside(owner: Owner, steps_done: int) -> None:
    """Submit the validation of the newest weights with at most `steps_done` steps behind them (the learner may have
    gone on meanwhile). Waits only if two validations are under way already."""
    behind = [version for version in learn_versions(owner.run, owner.versions).values() if version.step <= steps_done]
    version = max(behind, key=lambda version: (version.step, version.v))
    if owner.config.data.validation is None or version.step in owner.validated \
            or owner.run.validation(version.step).exists():
        return
    pin(owner.run, PIN, version.v)
    _wait(owner, AT_MOST_WAITING - 1)
    _submit(owner, version)


def _submit(owner: Owner, version: WeightVersion, *, unfinished: bool = False) -> None:
    owner.validated.add(version.step)
    owner.validations_left.add(version.step)
    future = validate.submit(owner, version.step, version, unfinished)
    owner.validations.append(future)
    future.add_done_callback(lambda _: owner.validations_left.discard(version.step))


def _wait(owner: Owner, at_most: int) -> None:
    """Until no more validations than that are under way; each of them has its deadline."""
    if len(owner.validations_left) <= at_most:
        return
    with waiting("validation/0", f"validations of steps {sorted(owner.validations_left)}",
                 owner.config.deadlines.validation_s):
        while len(owner.validations_left) > at_most:
            owner.check()
            time.sleep(LOOK_S)


def validate_unfinished(owner: Owner) -> None:
    """Validations that an earlier start was stopped in: their weights are still pinned. A reboot or a power loss may
    have taken these, or torn them, which whoever serves them finds out."""
    versions = read_versions(owner.run)
    for v in sorted(pinned_versions(owner.run)):
        version = versions[v]
        if owner.run.validation(version.step).exists():
            _let_go(owner.run, version)
        elif not owner.run.weights(v).exists():
            _give_up(owner, version, f"{owner.run.weights(v)}: absent")
        elif owner.config.data.validation is not None:
            _submit(owner, version, unfinished=True)


def validate_newest(owner: Owner) -> None:
    """`validation.only`: the newest weights, unless they have been validated, and what an earlier start left."""
    with owner.progress.stage("validation"):
        validate_unfinished(owner)
        validate_beside(owner, owner.first_step)
        wait_for_validations(owner)


def wait_for_validations(owner: Owner) -> None:
    """Wait for all of them; the first error is raised."""
    _wait(owner, 0)
    for future in owner.validations:
        future.result()
