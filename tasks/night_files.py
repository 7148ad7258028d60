"""Which night a run belongs to, where nights lie, and who is at one. Imports neither Prefect nor MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl_core.errors import ConfigError, RunIsAlive
from rl_core.nightly.nights import Night as Night
from rl_core.nightly.nights import NightDir, read_night, read_outcome, told_outcome
from rl_core.nightly.nights import NightRun as NightRun
from rl_core.run_dir import OwnerLock, RunDir, put_if_absent, read_json, refuse_if_alive, to_json
from tasks.inspection import is_completed
from tasks.paths import headway_home, run_dir

TAG_NIGHT, TAG_PARENT = "headway.night", "mlflow.parentRunId"


def night_dir(key: str) -> NightDir:
    """What a night is on disk. Its runs lie where all runs lie."""
    return NightDir(headway_home() / "nights" / key)


def night_of(run_key: str) -> Night | None:
    """The night that a run belongs to; None for any other run."""
    for key in (run_key, run_key.rpartition(".")[0]):
        with suppress(FileNotFoundError, NotADirectoryError):
            night = read_night(night_dir(key)) if key else None
            if night is not None and any(run.run_key == run_key for run in night.runs):
                return night
    return None


def night_to_finish(key: str) -> Night | None:
    """The night that a rerun of this key finishes as a whole: by its own key a matrix, or a night whose run was never
    begun. None for a run that is there, which goes on by itself, and for what is no night.

    Raises ConfigError for a run that its night has not begun: it is the night that begins it, with its settings.
    """
    if run_dir(key).run_json.exists():
        return None
    with suppress(FileNotFoundError, NotADirectoryError):
        return read_night(night_dir(key))
    if (night := night_of(key)) is not None:
        raise ConfigError(f"run {key!r}: night {night.key} has not begun it yet; `headway rerun {night.key}` finishes "
                          "the night")
    return None


def owner_of(night: Night) -> RunDir:
    """The directory of a night, for its owner.lock."""
    return RunDir(night_dir(night.key).root)


@contextmanager
def owned(night: Night) -> Iterator[None]:
    """One process at a time brings a night on. Raises RunIsAlive for a second one."""
    try:
        lock = OwnerLock(owner_of(night))
    except RunIsAlive as error:
        raise RunIsAlive(f"night {night.key}: another process is at it ({error})") from error
    try:
        yield
    finally:
        lock.release()


def refuse_if_busy(night: Night) -> None:
    """Raises RunIsAlive while another process is at the night, or trains a run of it by itself. Takes nothing."""
    for place in (owner_of(night), *(run_dir(run.run_key) for run in unfinished(night))):
        refuse_if_alive(place)


def has_verdict(night: Night) -> bool:
    return night_dir(night.key).verdict.exists()


def judged_run(night: Night) -> str:
    """Key of the run whose verdict is the night's. Raises FileNotFoundError without a verdict, BrokenFile."""
    return read_outcome(night_dir(night.key)).run_key


def has_ended(night: Night) -> bool:
    """Whether nothing is left to do for it."""
    return night_dir(night.key).ended.exists()


def put_ended(night: Night) -> None:
    put_if_absent(night_dir(night.key).ended, to_json({"verdict": told_outcome(night_dir(night.key)).verdict}))


def unfinished(night: Night) -> list[NightRun]:
    """Runs of the night that are not trained to their end."""
    return [run for run in night.runs if not is_completed(run_dir(run.run_key))]


def waits_for_verdict(run_key: str) -> bool:
    """Whether this run is the last thing that its night waited for, and what comes behind it is not all done."""
    night = night_of(run_key)
    return night is not None and not has_ended(night) and not unfinished(night)


def verdict_lines(run_key: str) -> list[str]:
    """What came out of the night of a run, for people: a line for each reason, or what is left to do; none for any
    other run."""
    night = night_of(run_key)
    if night is None:
        return []
    if not has_verdict(night):
        done = len(night.runs) - len(unfinished(night))
        return [f"night {night.key}: {done} of {len(night.runs)} runs are trained; `headway rerun {night.key}` "
                "finishes it"]
    outcome = told_outcome(night_dir(night.key))
    return [f"night {night.key}: {outcome.verdict}", *(f"  {reason}" for reason in outcome.reasons)]


def night_tags(run_key: str) -> dict[str, str]:
    """Tags of the MLflow run of a night's run: its night, and the parent of a matrix."""
    night = night_of(run_key)
    if night is None:
        return {}
    try:
        return {TAG_NIGHT: night.key, TAG_PARENT: str(read_json(night_dir(night.key).parent)["run_id"])}
    except FileNotFoundError:
        return {TAG_NIGHT: night.key}
