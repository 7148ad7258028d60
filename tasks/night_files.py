"""Which night a run belongs to, and where nights lie. Read from disk; imports neither Prefect nor MLflow."""

from __future__ import annotations

from contextlib import suppress

from rl_core.nightly.nights import Night, NightDir, NightRun, read_night, read_outcome
from rl_core.run_dir import read_json
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


def has_verdict(night: Night) -> bool:
    return night_dir(night.key).verdict.exists()


def unfinished(night: Night) -> list[NightRun]:
    """Runs of the night that are not trained to their end."""
    return [run for run in night.runs if not is_completed(run_dir(run.run_key))]


def waits_for_verdict(run_key: str) -> bool:
    """Whether this run is the last thing that its night waited for, and the comparison is still to come."""
    night = night_of(run_key)
    return night is not None and not has_verdict(night) and not unfinished(night)


def verdict_lines(run_key: str) -> list[str]:
    """What came out of the night of a run, for people: a line for each reason; none for any other run."""
    night = night_of(run_key)
    if night is None or not has_verdict(night):
        return []
    outcome = read_outcome(night_dir(night.key))
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
