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

from rl_core.errors import DeadlinePassed, DeadPart, WorkerDead
from rl_core.types import WeightVersion
from rl_core.versions import pin, pinned_versions, read_versions, unpin
from tasks.waiting import waiting

if TYPE_CHECKING:
    from rl_core.rollout.engine import Loan
    from tasks.session import Session

PIN = "validate"
AT_MOST_WAITING = 2
"""One that runs and one that waits: a third lets the learner wait, so that pinned weights do not pile up."""
LOOK_S = 0.05


@task(name="validate", task_run_name="validate-{step}", cache_policy=NO_CACHE, persist_result=False)
def validate(session: Session, step: int, version: WeightVersion) -> dict[str, Any]:
    """Accuracy of `version`, which has `step` trained steps behind it, on the held-out prompts."""
    try:
        with session.validating:  # one engine: one after the other
            record = _measure(session, version, step)
    except BaseException as error:
        session.experience.fail(error)  # the flow ends with it now, not when it asks for this result
        raise
    unpin(session.run, PIN, version.v)
    session.saw_validation(record)
    return record


def _measure(session: Session, version: WeightVersion, step: int) -> dict[str, Any]:
    """Ask the engine; a dead one is started again once, and a lent server that died is replaced by another one."""
    try:
        return _ask(session, version, step)
    except DeadlinePassed:
        raise
    except DeadPart:
        session.restart_validator()
        return _ask(session, version, step)


def _ask(session: Session, version: WeightVersion, step: int) -> dict[str, Any]:
    deadline_s = session.config.deadlines.validation_s
    if not session.config.validates_lent:
        return session.validator.call("validate", version, step, deadline_s=deadline_s)
    with _lent(session, version) as loan:
        return session.validator.call("validate", version, step, loan, deadline_s=deadline_s)


@contextmanager
def _lent(session: Session, version: WeightVersion) -> Iterator[Loan]:
    """A server of the first rollout worker, at this version, given back at the end. A worker that dies meanwhile has
    nothing to give back: the pump starts another one, which is waited for here.

    Raises DeadlinePassed where no server can be spared in `deadlines.validation_s`.
    """
    wait_s = session.config.deadlines.validation_s
    until = time.monotonic() + wait_s
    while True:
        session.check()
        try:
            lender = session.pool.lender()
            # A loan ends by itself when nobody is left who would give it back.
            loan = lender.lend(version, max(0.0, until - time.monotonic()), wait_s + session.config.deadlines.call_s)
            break
        except WorkerDead:
            if session.stop.is_set() or time.monotonic() >= until:  # nobody starts another one then
                raise
            time.sleep(LOOK_S)
    try:
        yield loan
    finally:
        with suppress(DeadPart):
            lender.take_back(loan.id)


def validation_due(session: Session, steps_done: int) -> bool:
    """Before the first step and every `validation.every` steps; the flow adds the last one."""
    return steps_done % session.config.validation.every == 0


def validate_beside(session: Session, steps_done: int) -> None:
    """Submit the validation of the newest weights with at most `steps_done` steps behind them (the learner may have
    gone on meanwhile). Waits only if two validations are under way already."""
    behind = [version for version in read_versions(session.run).values() if version.step <= steps_done]
    version = max(behind, key=lambda version: (version.step, version.v))
    if session.config.data.validation is None or version.step in session.validated \
            or session.run.validation(version.step).exists():
        return
    pin(session.run, PIN, version.v)
    _wait(session, AT_MOST_WAITING - 1)
    _submit(session, version)


def _submit(session: Session, version: WeightVersion) -> None:
    session.validated.add(version.step)
    session.validations_left.add(version.step)
    future = validate.submit(session, version.step, version)
    session.validations.append(future)
    future.add_done_callback(lambda _: session.validations_left.discard(version.step))


def _wait(session: Session, at_most: int) -> None:
    """Until no more validations than that are under way; each of them has its deadline."""
    if len(session.validations_left) <= at_most:
        return
    with waiting("validation/0", f"validations of steps {sorted(session.validations_left)}",
                 session.config.deadlines.validation_s):
        while len(session.validations_left) > at_most:
            session.check()
            time.sleep(LOOK_S)


def validate_unfinished(session: Session) -> None:
    """Validations that an earlier start was stopped in: their weights are still pinned."""
    versions = read_versions(session.run)
    for v in sorted(pinned_versions(session.run)):
        version = versions[v]
        if session.run.validation(version.step).exists() or not session.run.weights(v).exists():
            unpin(session.run, PIN, v)
        elif session.config.data.validation is not None:
            _submit(session, version)


def validate_newest(session: Session) -> None:
    """`validation.only`: the newest weights, unless they have been validated, and what an earlier start left."""
    with session.progress.stage("validation"):
        validate_unfinished(session)
        validate_beside(session, session.first_step)
        wait_for_validations(session)


def wait_for_validations(session: Session) -> None:
    """Wait for all of them; the first error is raised."""
    _wait(session, 0)
    for future in session.validations:
        future.result()
