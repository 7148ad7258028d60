"""Starting a run from a terminal: plan, services, the flow (flows/following.py), and how it ends (flows/ending.py).

Imports prefect only when the services are there: it reads its settings when it is imported.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

from flows.command import FAILED, INTERRUPTED, TERMINATED, USERS_TO_MEND, failed, hush
from flows.console import Console, amendment_text, cause_lines, failed_lines, stage, stopped_lines
from flows.ending import STOPPED_BY, Flow, Start, brief, completed, refused, said, stopped_behind
from flows.following import run_flow, set_client
from flows.presets import DEFAULT, base_of
from rl_core.config import Config
from rl_core.errors import BrokenFile, ConfigError, DeadPart, NightFailed, RunIsAlive
from rl_core.plan import describe, make_plan, parse_overrides, resolve

if TYPE_CHECKING:
    from tasks.preparation import Prepared
    from tasks.services import Services


class Terminated(BaseException):
    """SIGTERM outside the flow, where Prefect does not handle it."""


def launch(preset: str | None, overrides: Sequence[str], run_key: str | None, *, as_json: bool, verbose: bool,
           amend: bool = False, take_over: bool = False, shards_from: str | None = None) -> int:
    """Run `headway train`; returns its exit code. `preset` None: the stored settings of the run, if there is one.
    `take_over` ends a live owner of the run first; `shards_from` names the run whose shards are trained on."""
    start = Start(Console(), preset, as_json, verbose, amend, take_over=take_over, shards_from=shards_from)
    return _told(start, f"train {preset or run_key or DEFAULT}", lambda: _launch(start, overrides, run_key))


def roll_out(preset: str | None, overrides: Sequence[str], run_key: str | None, *, groups: int, as_json: bool,
             verbose: bool, take_over: bool = False) -> int:
    """Run `headway rollout`; returns its exit code. As `launch`, without training."""
    start = Start(Console(), preset, as_json, verbose, verb="rollout", groups=groups, take_over=take_over)
    return _told(start, f"rollout {preset or run_key or DEFAULT}", lambda: _launch(start, overrides, run_key))


def rerun(run_key: str, *, from_step: int | None, overrides: Sequence[str], as_json: bool, verbose: bool,
          take_over: bool = False) -> int:
    """Run `headway rerun`; returns its exit code. The run goes on by its stored settings, by the path of every start;
    with `from_step` a fork of it does, a run of its own, with the overrides from that step on. A night goes on to its
    verdict."""
    start = Start(Console(), None, as_json, verbose, verb="rerun", take_over=take_over)
    words = run_key if from_step is None else f"{run_key} from step {from_step}"
    return _told(start, f"rerun {words}", lambda: _launch_again(start, run_key, from_step, overrides))


def _told(start: Start, what: str, begin: Callable[[], int]) -> int:
    """Begin, and say what kept the run from its own end. Returns the exit code."""
    start.console.line(f"headway {version('headway')}: {what}")
    signal.signal(signal.SIGTERM, _terminated)
    code = _guarded(start, begin)
    if start.prefect_away:  # at exit Prefect would try for minutes to send its last events
        sys.stdout.flush()
        os._exit(code)
    return code


def _guarded(start: Start, begin: Callable[[], int]) -> int:
    """Begin; whatever keeps a start from its own end is told on the screen, and in the exit code."""
    console = start.console
    try:
        return begin()
    except USERS_TO_MEND as error:
        return refused(console, error)
    except (DeadPart, OSError) as error:
        if start.run_key is None:  # there is no run of which to tell anything
            console.close()
            return failed(error, FAILED)
        return said(start, ["", f"failed: {error}"], "failed", FAILED)
    except KeyboardInterrupt:
        return said(start, ["", "stopped by SIGINT before training began"], "cancelled", INTERRUPTED)
    except Terminated:
        return said(start, ["", "stopped by SIGTERM before training began"], "cancelled", TERMINATED)
    finally:
        console.close()


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _launch(start: Start, overrides: Sequence[str], run_key: str | None) -> int:
    console = start.console
    if not start.verbose:  # before anything heavy is imported
        hush()
    with stage(console, "plan"):
        changes, config, prepared = _prepare(start.preset, overrides, run_key, amend=start.amend,
                                             shards_from=start.shards_from)
        start.run_key = prepared.run_key
    from tasks.inspection import is_completed, read_result
    from tasks.night_files import waits_for_verdict
    from tasks.offline import refuse_to_sample
    from tasks.paths import headway_home, run_dir
    from tasks.preparation import check_free

    refuse_to_sample(config, start.groups)
    run = run_dir(start.run_key)
    if start.take_over and _taken_over(start, run_key):
        changes, config, prepared = _prepare(start.preset, overrides, run_key, amend=start.amend,
                                             shards_from=start.shards_from)  # it had gone on
    if start.amend and not prepared.amends:
        console.line(f"  nothing to amend: no training setting differs from those of run {start.run_key}")
    judging = waits_for_verdict(start.run_key)  # the last run of a night, whose comparison was cut short
    if is_completed(run) and not prepared.amends and not judging:
        return completed(start, _tracked(start, config, read_result(run)), str(run.figures))
    check_free(run)
    console.lines([f"  {what:<18} {value}" for what, value in _rows(config, prepared)])
    console.lines([f"  warning: {warning}" for warning in prepared.plan.warnings])
    from tasks import services

    where = services.start(run.services, headway_home(), isolated=config.isolated, deadlines=config.deadlines,
                           on_stage=lambda name, seconds: console.line(f"  {name:<12} {seconds:6.1f} s"))
    ours = True
    try:
        services.export(where)
        set_client(start)
        before = read_result(run)
        flow = run_flow(start, [run.status], lambda: _train(start, changes))
        start.prefect_away = not flow.name
        ours = not isinstance(flow.error, RunIsAlive)  # else another start was quicker
        result = read_result(run)
        news = {} if result == before and not judging else result
        if start.prefect_away and not news:
            flow = Flow("", error=_not_begun(flow.error, where))
        return _ended(start, flow, news, config)
    finally:
        console.close()
        if ours:
            services.stop(where)


def _launch_again(start: Start, run_key: str, from_step: int | None, overrides: Sequence[str]) -> int:
    """Go on with a run that exists, or with a fork of it that is made first. Raises ConfigError where there is none."""
    if from_step is None and overrides:
        raise ConfigError("--set: a rerun goes on with the stored settings; add --from-step N for a fork with other "
                          f"ones, or amend the run: headway train --run-key {run_key} --amend")
    from tasks.inspection import open_run
    from tasks.night_files import night_to_finish
    from tasks.paths import run_dir

    if from_step is None and (night := night_to_finish(run_key)) is not None:
        from flows.finishing import finish

        return finish(start, night)
    open_run(run_dir(run_key), run_key)
    if from_step is None:
        return _launch(start, (), run_key)
    if not start.verbose:  # before anything heavy is imported
        hush()
    from tasks.forking import make_fork

    with stage(start.console, "fork"):
        made = make_fork(run_key, from_step, parse_overrides(overrides))
    start.console.line(f"  {made.key}: from {run_key}, checkpoint {made.checkpoint}, steps {made.checkpoint} to "
                       f"{from_step - 1} replayed" if made.checkpoint < from_step else
                       f"  {made.key}: from {run_key}, step {from_step}")
    return _launch(start, (), made.key)


def _taken_over(start: Start, run_key: str | None) -> bool:
    """End the live owner of the run, if there is one. Raises RunIsAlive, DeadlinePassed, ConfigError without a key."""
    if run_key is None:
        raise ConfigError("--take-over: say which run, by --run-key")
    from tasks.paths import run_dir
    from tasks.takeover import take_over

    return take_over(run_dir(run_key), say=lambda text: start.console.line(f"  {text}")) is not None


def _tracked(start: Start, config: Config, result: dict[str, Any]) -> dict[str, Any]:
    """The result of a completed run, once MLflow has the run as well."""
    if result.get("tracked") or start.run_key is None:
        return result
    from tasks.paths import run_dir
    from tasks.report import track_again

    with stage(start.console, "mlflow"):
        return track_again(run_dir(start.run_key), config)


def _prepare(preset: str | None, overrides: Sequence[str], run_key: str | None, *, amend: bool,
             planned: bool = False, shards_from: str | None = None) -> tuple[dict[str, Any], Config, Prepared]:
    """Overrides, settings, run and plan of a command: all that can be known before a start. Writes nothing.

    Raises what refuses it: ConfigError, DataError, BrokenFile.
    """
    changes = parse_overrides(overrides)
    name, settings = base_of(preset, run_key, shards_from, changes)
    config = resolve(settings, changes)
    make_plan(config)  # what is wrong whatever the inputs is said before anything heavy is imported
    from tasks.preparation import prepare

    prepared = prepare(config, name, run_key, amend=amend, planned=planned)
    if shards_from is not None:  # what follows from the shards holds as it is said now, whatever lands meanwhile
        changes = {**changes, "total_steps": config.total_steps}
    return changes, config, prepared


def _rows(config: Config, prepared: Prepared) -> list[tuple[str, str]]:
    """The plan as rows for people, and which revision of its settings the run has."""
    rows, last = describe(config, prepared.plan), prepared.amendment
    rows += [("shards", prepared.shards)] if prepared.shards is not None else []
    if last is not None:
        rows.append(("revision", f"{last.revision}, {amendment_text(last.from_step, last.changed)}"))
    if prepared.amends:
        text = amendment_text(prepared.from_step, prepared.amends)
        rows.append(("amends", f"as revision {prepared.revision + 1}, {text}"))
    return rows


def _train(start: Start, changes: dict[str, Any]) -> Any:
    """Prefect's state of the flow at its end."""
    from flows.train import train  # imports prefect and ray, with the services' addresses in place

    return train(preset=start.preset, overrides=changes, run_key=start.run_key, amend=start.amend,
                 groups=start.groups, shards_from=start.shards_from, return_state=True)


def _not_begun(cause: BaseException | None, where: Services) -> BaseException | None:
    """What to say of a flow that Prefect's engine ended before it could do anything."""
    if isinstance(cause, USERS_TO_MEND):
        return cause
    remedy = "the same command starts one anew and goes on" if "prefect" in where.pids else \
        "see that it is there, then the same command goes on"
    return DeadPart(f"Prefect at {where.where['prefect']} did not answer when the run was to begin ({brief(cause)}); "
                    f"{remedy}")


def _ended(start: Start, flow: Flow, result: dict[str, Any], config: Config) -> int:
    """Say how it ended; the exit code agrees with Prefect's state. `result`: what this start wrote, if it did.

    The result comes before Prefect's state: where its server is away, only the result is true.
    """
    from tasks.inspection import steps_done
    from tasks.paths import run_dir

    assert start.run_key is not None
    run, status, cause = run_dir(start.run_key), result.get("status"), flow.error
    if isinstance(cause, USERS_TO_MEND) and not isinstance(cause, BrokenFile):
        return refused(start.console, cause)
    if isinstance(cause, NightFailed):  # its run is trained, and the comparison behind it is not done
        return said(start, ["", *cause_lines(str(cause))], "completed", FAILED)
    if flow.name == "CANCELLED" and status == "completed":  # its run is trained, its night not told
        return stopped_behind(start, f"headway rerun {start.run_key}")
    if "completed" in (status, flow.name.lower()):
        if flow.name.lower() != "completed":
            start.console.line(f"  Prefect could not be told that the run completed: {brief(cause)}")
        return completed(start, {"summary": flow.summary, **result}, str(run.figures))
    again = [start.run_key] if start.verb == "rerun" else ["--run-key", start.run_key, *_same_command()]
    resume = shlex.join(["headway", start.verb, *again])
    wall_s = result.get("wall_s")
    if "cancelled" in (status, flow.name.lower()):
        name = result.get("signal", "SIGINT")
        lines = stopped_lines(run_key=start.run_key, signal=name, step=steps_done(run), total=config.total_steps,
                              resume=resume)
        return said(start, lines, "cancelled", STOPPED_BY[name], wall_s)
    text = f"{result['error']}: {result['message']}" if status == "failed" else brief(cause)
    lines = failed_lines(run_key=start.run_key, cause=text, logs=str(run.logs), resume=resume)
    return said(start, lines, "failed", FAILED, wall_s)


def _same_command() -> list[str]:
    """The options of this command but the run key, `--json` and `--take-over`, to be given again."""
    words, skip = [], False
    for word in sys.argv[2:]:
        if skip or word == "--run-key":
            skip = not skip
        elif word not in ("--json", "--take-over") and not word.startswith("--run-key="):
            words.append(word)
    return words


def show_plan(preset: str | None, overrides: Sequence[str], run_key: str | None, *, as_json: bool,
              amend: bool = False, shards_from: str | None = None) -> int:
    """Run `headway plan`: resolved settings, totals, where each service would be. Starts nothing.

    What a start here and now is refused for, and a plan can do without, is a warning on stderr: devices of another
    machine, and what the preset leaves to be set.
    """
    console = Console()
    try:
        _, config, prepared = _prepare(preset, overrides, run_key, amend=amend, planned=True, shards_from=shards_from)
    except USERS_TO_MEND as error:
        return refused(console, error)
    from rl_core.plan import flatten
    from tasks.destination import destination
    from tasks.kept import prefect_api
    from tasks.paths import headway_home
    from tasks.services import ambient

    tracked = destination(config, headway_home())
    given = ambient(isolated=config.isolated, kept_api=prefect_api(headway_home()))
    places = {name: f"{given[name][0]} ({given[name][1]})" if name in given else "started for this run alone"
              for name in ("prefect", "ray")} | {"mlflow": str(tracked)}
    warnings = (*prepared.warnings, *prepared.plan.warnings)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps({"config": config.model_dump(mode="json"), "plan": prepared.plan.as_json(), "services": places,
                          "revision": prepared.revision, "amends": prepared.amends, "shards": prepared.shards,
                          "warnings": warnings},
                         allow_nan=False), file=sys.stdout)
        return 0
    console.lines(["settings", *(f"  {name:<36} {json.dumps(value)}" for name, value in flatten(config).items())])
    console.lines(["", "plan", *(f"  {what:<18} {value}" for what, value in _rows(config, prepared))])
    console.lines(["", "services", *(f"  {name:<18} {place}" for name, place in places.items())])
    return 0
