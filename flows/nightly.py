"""The `nightly` flow: train, compare with the baseline, gate, register, report, notify.

    prefect: nightly(preset, overrides, ...)
      (open-matrix)              of several runs: the MLflow run that they are children of
      the steps of `train`       of each run, one after the other
      compare                    with the champion or the last good night: promote, keep or alarm, and why
      register                   the exported weights as a model version; the alias moves on a promotion
      night-report, notify       a page in MLflow, an artifact here, a webhook

What is done is read from disk: a retry, and `headway rerun` of the night, go on from there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from pydantic import Field

from flows.presets import DEFAULT, load_preset, nested, settings_of
from flows.train import train_run
from rl_core.config import Config
from rl_core.errors import BrokenFile, ConfigError
from rl_core.plan import make_plan, resolve
from tasks import signals
from tasks.inspection import is_completed
from tasks.night_end import (
    end_night,
    failures_told,
    signal_of,
    stopped_night,
    tell_failure,
    tell_trouble,
    training_failure,
    words_of,
)
from tasks.night_files import has_ended, night_tags, owned, refuse_if_busy, unfinished
from tasks.nights import NAME, Night, NightRun, Thresholds, asked_for, begin_night, begun_night, open_matrix
from tasks.notifying import ADDRESS
from tasks.paths import run_dir

Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


def _flow_run_name() -> str:
    return f"{flow_run.parameters.get('name') or 'nightly'}-{flow_run.scheduled_start_time:%Y-%m-%d-%H%M}"


@flow(name="nightly", flow_run_name=_flow_run_name, log_prints=False, retries=0)
def nightly(preset: str = DEFAULT, overrides: dict[str, Any] | None = None,
            name: Annotated[str, Field(pattern=NAME)] = "nightly", baseline: str | None = None,
            seeds: list[Seed] | None = None, matrix: list[dict[str, Any]] | None = None,
            accuracy_gain: Share = 0.0, accuracy_loss: Share = 0.02, throughput_loss: Share = 0.25,
            staleness_rise: Annotated[float, Field(ge=0)] = 1.0, waste_rise: Share = 0.1,
            register_version: Literal["always", "promoted", "never"] = "always", serve: str | None = None,
            notify: Annotated[str | None, Field(pattern=ADDRESS)] = None,
            notify_on: Literal["always", "trouble"] = "always") -> dict[str, Any] | State[Any]:
    """Train a run, or several, compare the best with the baseline, then promote it, keep the baseline, or raise an
    alarm.

    Args:
        preset: A name of deployments/presets, or the path of a YAML file.
        overrides: Settings on top of it, as in {"seed": 3, "learner.lr": 1e-4}, or as a tree.
        name: Of nights like this one. Run keys begin with it, and it is the registered model; at most 40 letters,
            digits, _ and -.
        baseline: What to compare with. `champion` is the version of the registered model with this alias,
            `last-good-night` the last one that was promoted or kept, else a run key. Empty takes the first of the two
            that there is, and a first night is compared with nothing.
        seeds: Several runs, one for each seed, one after the other.
        matrix: Several runs, one for each of these overrides, as in [{"learner.lr": 1e-4}, {"learner.lr": 3e-4}]; with
            seeds, each of them with each seed.
        accuracy_gain: Share of held-out prompts. Promoted is what is better by more, with its whole 95 % interval.
        accuracy_loss: Share of held-out prompts. Worse by more, with the whole interval, is an alarm.
        throughput_loss: Share of the baseline's answers per second. Slower by more is an alarm.
        staleness_rise: Publications. A mean staleness that is larger by more is an alarm.
        waste_rise: Share of generated tokens. More waste than the baseline's by more is an alarm.
        register_version: Which nights become a version of the registered model. Their weights are exported as a Hugging
            Face directory, which the version names.
        serve: Command that serves {model}, noted with the version; else that of an SGLang server.
        notify: Where the verdict goes, by name. `env:NAME` is a variable of the worker's environment with the address
            of a webhook, `block:TYPE/NAME` a block of Prefect. Never the address itself.
        notify_on: always, or trouble, which is alarms and nights that fail or are stopped.
    """  # in Google's form, which Prefect shows beside the fields of its form
    if (begun := begun_night()) is not None:  # a Retry: what was asked for then holds, whatever became of the preset
        try:
            return finish_night(begun)
        except (ConfigError, BrokenFile) as error:  # in the settings of a run that is not trained
            tell_failure(begun, f"{type(error).__name__}: {error}")
            raise
    try:
        wanted = asked_for(
            name=name, preset=preset, overrides=nested(overrides or {}), seeds=seeds or [],
            matrix=[nested(row) for row in matrix or []], baseline=baseline or None,
            thresholds=Thresholds(
                accuracy_gain=accuracy_gain, accuracy_loss=accuracy_loss, throughput_loss=throughput_loss,
                staleness_rise=staleness_rise, waste_rise=waste_rise),
            register_version=register_version, serve=serve or "", notify=notify or None, notify_on=notify_on)
        settings = [resolve(load_preset(preset), run.overrides) for run in wanted.runs]
        for each in settings:  # what cannot work is said before any of them trains
            make_plan(each)
        night = begin_night(wanted, settings[0])
    except Exception as error:
        tell_trouble(notify, name, f"{type(error).__name__}: {error}", "not begun")
        raise
    return run_night(night, settings[0])


def run_night(night: Night, config: Config) -> dict[str, Any] | State[Any]:
    """Train what is not trained yet, then compare; of a night that has ended nothing is done again. `config`: of the
    first run. Raises NightFailed, and RunIsAlive where another process is at the night."""
    with owned(night):
        if has_ended(night):
            return words_of(night)
        try:
            with failures_told(night, "training"):
                if night.is_matrix:
                    open_matrix(night, config)
                for run in night.runs:
                    signals.check()  # one for which the run before was too near its end
                    stopped = _trained(night, run)
                    if stopped is not None:
                        tell_failure(night, stopped.message or "", stopped=True)
                        return stopped
                return end_night(night)
        except (KeyboardInterrupt, TerminationSignal) as error:  # before a run, or between two of them
            return stopped_night(night, "training", signal_of(error) or "SIGTERM")


def finish_night(night: Night) -> dict[str, Any] | State[Any]:
    """Go on with a night that was begun, to its verdict, as Retry of its flow run does. Returns what people are told.

    Raises ConfigError for settings of what is not begun that no longer work, RunIsAlive while the night or one of its
    runs is alive, NightFailed.
    """
    refuse_if_busy(night)  # which is no failure of it
    for run in unfinished(night):
        make_plan(settings_of(night, run)[1])
    return run_night(night, settings_of(night, night.runs[0])[1])


def _trained(night: Night, run: NightRun) -> State[Any] | None:
    """Train one run to its end; one that is at its end stays as it is. Returns the state of a run that was stopped."""
    directory = run_dir(run.run_key)
    if is_completed(directory):
        return None
    try:
        preset, config = settings_of(night, run)
        ended = train_run(preset, config, run.run_key, tags=night_tags(run.run_key))
    except Exception as error:
        raise training_failure(night, run.run_key, error) from error
    return ended if isinstance(ended, State) else None
