"""Validation: an engine actor of its own, at a pinned version, while the learner goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rl_core.types import WeightVersion
from rl_core.versions import pin, pinned_versions, read_versions, unpin

if TYPE_CHECKING:
    from tasks.session import Session

PIN = "validate"
AT_MOST_WAITING = 2
"""One that runs and one that waits: a third lets the learner wait, so that pinned weights do not pile up."""


@task(name="validate", task_run_name="validate-{step}", cache_policy=NO_CACHE, persist_result=False)
def validate(session: Session, step: int, version: WeightVersion) -> dict[str, Any]:
    """Accuracy of `version`, which has `step` trained steps behind it, on the held-out prompts."""
    with session.validating:  # one engine: one after the other
        record = session.validator.call("validate", version, step, deadline_s=session.config.deadlines.validation_s)
    unpin(session.run, PIN, version.v)
    session.saw_validation(record)
    return record


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
    session.validations = [future for future in session.validations if not _done(future)]
    while len(session.validations) >= AT_MOST_WAITING:
        session.validations.pop(0).result()
    _submit(session, version)


def _submit(session: Session, version: WeightVersion) -> None:
    session.validated.add(version.step)
    session.validations.append(validate.submit(session, version.step, version))


def validate_unfinished(session: Session) -> None:
    """Validations that an earlier start was stopped in: their weights are still pinned."""
    versions = read_versions(session.run)
    for v in sorted(pinned_versions(session.run)):
        version = versions[v]
        if session.run.validation(version.step).exists() or not session.run.weights(v).exists():
            unpin(session.run, PIN, v)
        elif session.config.data.validation is not None:
            _submit(session, version)


def wait_for_validations(session: Session) -> None:
    """Wait for all of them; the first error is raised."""
    for future in session.validations:
        future.result()


def _done(future: Any) -> bool:
    """Finished well; one that failed is kept, so that its error is raised."""
    return future.state.is_completed()
