"""A night after training: compared and judged, its version registered, its report written, people told.

Each is a step of its own, done once: a retry, or a `headway rerun` of the night, goes on from what is on disk.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from rl_core.errors import NightFailed, RunIsAlive
from rl_core.history import read_validations
from rl_core.looking.comparison import Difference, alone, caveats, changed_settings, compare
from rl_core.looking.failures import component_of, place_of
from rl_core.nightly.gates import ACCURACY, Judgement, best_of, judge, widened
from rl_core.nightly.nights import (
    Baseline,
    Compared,
    Night,
    Outcome,
    is_later,
    put_outcome,
    read_outcome,
    told_outcome,
)
from rl_core.nightly.text import failed_markdown, night_markdown, night_words
from rl_core.pages.report import night_page
from rl_core.revisions import config_of, current_revision
from rl_core.run_dir import put_if_absent, read_json, replace_file, to_json
from rl_core.summary import stored_mlflow_run
from tasks import signals, tracking
from tasks.artifacts import tell_night
from tasks.destination import Destination, destination_of
from tasks.inspection import read_result
from tasks.night_files import has_ended, night_dir, night_of, owned, put_ended, unfinished, waits_for_verdict
from tasks.nights import adopt_runs, baseline_of, close_matrix
from tasks.notifying import notify
from tasks.paths import run_dir
from tasks.report import track_again

WHY_LENGTH = 4000
"""Of a tag in MLflow."""


@task(name="compare", task_run_name="compare", cache_policy=NO_CACHE, persist_result=False)
def compare_night(night: Night) -> Outcome:
    """Compare the runs of a night with its baseline, and judge the best of them; a verdict that is there stands.

    Raises ConfigError for a baseline that is named and not there, TrackingFailed, BrokenFile.
    """
    with suppress(FileNotFoundError):
        return read_outcome(night_dir(night.key))
    keys = [run.run_key for run in night.runs]
    baseline, notes = baseline_of(night, destination_of(run_dir(keys[0])))
    base = None if baseline is None else run_dir(baseline.run_key)
    found = {key: alone(run_dir(key)) if base is None else compare(base, run_dir(key)) for key in keys}
    best = best_of(found)
    if len(keys) > 1:  # the others were looked at, too
        found[best] = tuple(widened(each, len(keys)) for each in found[best])
        notes = (*notes, f"{best} has the largest held-out accuracy of {len(keys)} runs: its intervals are as much "
                         "wider (docs/nightly.md 4)")
    compared = {key: _judged(night, key, differences, baseline) for key, differences in found.items()}
    judgement = compared[best].judgement
    return put_outcome(night_dir(night.key), Outcome(
        verdict=judgement.verdict, reasons=judgement.reasons, run_key=best, baseline=baseline,
        compared=tuple(compared.values()), ts_us=time.time_ns() // 1000,
        notes=notes if base is None else (*notes, *caveats(base, run_dir(best))),
        changed={} if base is None else changed_settings(base, run_dir(best))))


def _judged(night: Night, key: str, differences: tuple[Difference, ...], baseline: Baseline | None) -> Compared:
    judgement: Judgement = judge(differences, night.thresholds, baseline=None if baseline is None else str(baseline))
    return Compared(run_key=key, differences=differences, judgement=judgement)


def track_missed(night: Night) -> None:
    """Replay the runs of a night of which MLflow has not all, as it was away when their training ended. Raises
    TrackingFailed, RunIsAlive, BrokenFile."""
    for each in night.runs:
        run = run_dir(each.run_key)
        if read_result(run).get("tracked"):
            continue
        again = track_again(run, config_of(run, current_revision(run)))
        if not again["tracked"]:
            raise tracking.TrackingFailed(again["tracking_trouble"] or f"MLflow at {destination_of(run)}: not all of "
                                          f"{run.root} has arrived")


@task(name="register", task_run_name="register", cache_policy=NO_CACHE, persist_result=False)
def register_night(night: Night, outcome: Outcome) -> tracking.ModelVersion | None:
    """Export the judged weights, register them as a version of the night's model, and move the alias where they are
    promoted, and no later night's is champion. None where none is wanted. Raises TrackingFailed, ConfigError,
    BrokenFile, OSError."""
    if night.register_version == "never" or (night.register_version, outcome.verdict == "promote") == (
            "promoted", False):
        return None
    run = run_dir(outcome.run_key)
    where = destination_of(run)
    exported = _exported(night, outcome.run_key)
    version = tracking.register_version(run, where, exported, name=night.name, tags={
        "headway.night": night.key, "headway.serve": serve_line(night, exported["directory"])})
    why = "\n".join(outcome.reasons)[:WHY_LENGTH]
    stays = _later_champion(night, version, where) if outcome.verdict == "promote" else None
    if stays is not None:
        tracking.judge(where, version, "kept", why=f"{stays}\n{why}"[:WHY_LENGTH])
    elif outcome.verdict == "promote":
        tracking.promote(where, version, why=why)
    else:
        tracking.judge(where, version, "kept" if outcome.verdict == "keep" else "alarm", why=why)
    put_if_absent(night_dir(night.key).version, to_json({"name": version.name, "version": version.version,
                                                         "directory": version.directory, "stays": stays}))
    return version


def _later_champion(night: Night, version: tracking.ModelVersion, where: Destination) -> str | None:
    """Why a version that is promoted is not the champion: the one that there is is of a later night. None where it
    becomes it."""
    champion = tracking.champion(where, night.name)
    if champion is None or not is_later((night_of(champion.run_key), champion.version), (night, version.version)):
        return None
    return f"version {champion.version} of {night.name!r}, of run {champion.run_key}, is of a later night, and stays " \
           "champion"


def _exported(night: Night, run_key: str) -> dict[str, Any]:
    """The weights that were validated last, or the newest where none were, as a Hugging Face directory of the night."""
    place = night_dir(night.key).model
    about = place / "headway.json"
    if about.exists():  # by the start before this one
        return {**read_json(about), "directory": str(place)}
    from tasks.exporting import export_run  # imports torch

    validations = read_validations(run_dir(run_key))
    return export_run(run_key, str(place), step=validations[-1].step if validations else None)


def serve_line(night: Night, directory: str) -> str:
    """The one line that serves an exported directory."""
    return night.serve.replace("{model}", shlex.quote(directory)) if night.serve else tracking.serve_command(directory)


@task(name="night-report", task_run_name="night-report", cache_policy=NO_CACHE, persist_result=False)
def report_night(night: Night, outcome: Outcome, version: tracking.ModelVersion | None) -> None:
    """The report: a page beside the night and in MLflow, and a table in Prefect. Raises TrackingFailed."""
    place, run = night_dir(night.key), run_dir(outcome.run_key)
    facts = _facts(night, outcome, version)
    page = night_page(night, outcome, facts)
    replace_file(place.page, page.encode())
    where, kept = destination_of(run), stored_mlflow_run(run)
    tags = {"headway.night": night.key, "headway.verdict": outcome.verdict}
    if night.is_matrix:
        parent = adopt_runs(night)
        tracking.tag_run(where, parent, tags | {"headway.best": outcome.run_key})
        tracking.log_page(where, parent, page, "night/report.html")
        close_matrix(night, "FINISHED", _summary(night, outcome))
    if kept is not None:
        tracking.tag_run(where, kept, tags)
        tracking.log_page(where, kept, page, "night/report.html")
    tell_night(night_markdown(night, outcome, facts), f"{night.key}: {outcome.verdict}")


def _facts(night: Night, outcome: Outcome, version: tracking.ModelVersion | None) -> dict[str, str]:
    """Lineage and place of the judged weights, in words."""
    run = run_dir(outcome.run_key)
    facts = {"run": outcome.run_key, "directory": str(run.root), "preset": night.preset,
             "MLflow run": stored_mlflow_run(run) or "none"}
    if version is None:
        return facts | {"model version": f"none (register_version: {night.register_version})"}
    names = ("step", "weights_digest", "config_digest", "commit", "shards")
    return facts | {"model version": f"{version.name} {version.version}", "exported to": version.directory} | {
        name.replace("_", " "): version.tags[f"headway.{name}"] for name in names if f"headway.{name}" in version.tags
    } | {"serve": version.tags.get("headway.serve", "")}


def _summary(night: Night, outcome: Outcome) -> dict[str, float]:
    accuracy = next(each.value for each in outcome.differences if each.name == ACCURACY)
    known = {"night/held_out_accuracy": accuracy} if accuracy == accuracy else {}
    return {"night/runs": float(len(night.runs)), **known}


@task(name="notify", task_run_name="notify", cache_policy=NO_CACHE, persist_result=False)
def notify_night(night: Night, outcome: Outcome, version: tracking.ModelVersion | None) -> None:
    """Tell the verdict to the webhook, once; one that does not answer is a warning of the log."""
    told = night_dir(night.key).notified
    if night.notify is None or told.exists() or (night.notify_on, outcome.verdict == "alarm") == ("trouble", False):
        return
    words = night_words(night, outcome, None if version is None else version.version)
    if (trouble := notify(night.notify, words)) is None:
        put_if_absent(told, to_json({"verdict": outcome.verdict}))
    else:
        get_run_logger().warning(f"notify: {night.notify}: {trouble}; the report has all of it")


def end_night(night: Night) -> dict[str, Any] | State[Any]:
    """From trained runs to a verdict that people have heard of; returns it. Stopped by a signal it is Cancelled, which
    is told. Raises NightFailed."""
    step = "comparison"
    try:
        signals.check()  # one for which the last run was too near its end
        with signals.noted():
            outcome = compare_night(night)
            step = "tracking"
            signals.check()
            track_missed(night)
            step = "registration"
            signals.check()
            version = register_night(night, outcome)
            outcome = told_outcome(night_dir(night.key))
            step = "report"
            signals.check()
            report_night(night, outcome, version)
            notify_night(night, outcome, version)
            put_ended(night)
    except BaseException as error:
        if (signal := signal_of(error)) is not None:
            return stopped_night(night, step, signal)
        if not isinstance(error, Exception):
            raise
        raise failure_of(night, step, error) from error
    return night_words(night, outcome, None if version is None else version.version)


def words_of(night: Night) -> dict[str, Any]:
    """What people were told of a night that has ended."""
    place = night_dir(night.key)
    version = read_json(place.version)["version"] if place.version.exists() else None
    return night_words(night, told_outcome(place), version)


def after_training(run_key: str, ended: Any) -> Any:
    """What `ended`, a run that was finished by itself, is worth to its night: once all of its runs are trained, the
    comparison goes on. Returns `ended`, or Cancelled where the comparison was stopped. Raises NightFailed."""
    night = night_of(run_key)
    if night is None or isinstance(ended, State) or has_ended(night) or unfinished(night):
        return ended
    try:
        with owned(night):
            night_ended = end_night(night)
        return night_ended if isinstance(night_ended, State) else ended
    except RunIsAlive as error:  # who is at the night compares it as well
        get_run_logger().warning(str(error))
    except NightFailed as error:
        tell_failure(night, str(error))
        raise
    return ended


def judged_again(run_key: str) -> dict[str, Any] | State[Any] | None:
    """Go on with the comparison of a night whose runs are all trained; returns the summary of this one, or Cancelled,
    None where no night waits for it: then it is trained as any run. Raises NightFailed."""
    if not waits_for_verdict(run_key):
        return None
    return after_training(run_key, read_result(run_dir(run_key))["summary"])


# -- a night that fails, or is stopped

def training_failure(night: Night, run_key: str, error: BaseException) -> NightFailed:
    """As `failure_of`, of a run of the night that did not come to its end."""
    return failure_of(night, f"{place_of(run_dir(run_key))} of run {run_key}", error)


def failure_of(night: Night, place: str, error: BaseException) -> NightFailed:
    """What a failed night says: where it stands, which part failed, the cause, and what goes on with it."""
    part = "MLflow" if isinstance(error, tracking.TrackingFailed) else component_of(error)
    cause, *more = str(error).splitlines() or [""]
    first = f"night {night.key}: {place}, {part}: {type(error).__name__}: {cause}; Retry, or " \
            f"`headway rerun {night.key}`, goes on from there"
    return NightFailed("\n".join([first, *more]))


@contextmanager
def failures_told(night: Night, place: str) -> Iterator[None]:
    """Tell of whatever error ends a night. Raises NightFailed; `place` is that of any other error."""
    try:
        yield
    except NightFailed as error:
        tell_failure(night, str(error))
        raise
    except Exception as error:  # of what stands around the runs: MLflow, Prefect, the disk
        failure = failure_of(night, place, error)
        tell_failure(night, str(failure))
        raise failure from error


def signal_of(error: BaseException) -> str | None:
    """Name of the signal that an error comes of, as whatever is raised after one does; None for any other error."""
    raised = {KeyboardInterrupt: "SIGINT", TerminationSignal: "SIGTERM"}.get(type(error))
    return signals.received() or raised


def stopped_night(night: Night, place: str, signal: str) -> State[Any]:
    """Tell that a night was stopped; returns the state of its flow run."""
    why = f"night {night.key}: stopped by {signal} at its {place}; Retry, or `headway rerun {night.key}`, goes on " \
          "from there"
    tell_failure(night, why, stopped=True)
    return Cancelled(message=why)


def tell_failure(night: Night, failed: str, *, stopped: bool = False) -> None:
    """A failed or stopped night is told to MLflow's matrix, as an artifact, and to the webhook; none of them can make
    it worse."""
    if night.is_matrix:
        with suppress(Exception):
            close_matrix(night, "KILLED" if stopped else "FAILED")
    how = "stopped" if stopped else "failed"
    tell_night(failed_markdown(night, failed), f"{night.key}: {how}")
    tell_trouble(night.notify, night.key, failed, how)


def tell_trouble(address: str | None, what: str, why: str, verdict: str) -> None:
    """A few words to the webhook about a night without a verdict."""
    if address is None:
        return
    words = {"subject": f"{what}: {verdict}", "text": f"{what}: {verdict}: {why}", "night": what, "verdict": verdict,
             "reasons": [why]}
    if (trouble := notify(address, words)) is not None:
        get_run_logger().warning(f"notify: {address}: {trouble}")
