"""`headway rerun` of a night: what is left of it is trained, it is compared, and the person sees how it goes and ends.

Imports prefect only when its address is there: it reads its settings when it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flows.command import FAILED, USERS_TO_MEND, hush
from flows.console import cause_lines, stage, stopped_lines
from flows.ending import STOPPED_BY, Flow, Start, brief, completed, refused, said, stopped_behind
from flows.following import run_flow, set_client
from flows.presets import settings_of
from rl_core.config import Config
from rl_core.errors import BrokenFile, NightFailed
from rl_core.plan import make_plan

if TYPE_CHECKING:
    from tasks.night_files import Night


def finish(start: Start, night: Night) -> int:
    """Bring a night to its verdict, from wherever it stands; returns the exit code. One that has ended is shown.

    The flow is `rerun`, as of Prefect's deployment. Each run starts a Ray head of its own; Prefect's server is the one
    that is kept, or given by address.
    """
    console = start.console
    if not start.verbose:  # before anything heavy is imported
        hush()
    from tasks import services
    from tasks.inspection import read_result
    from tasks.night_files import has_ended, refuse_if_busy, unfinished
    from tasks.paths import headway_home, run_dir

    if has_ended(night):
        return _judged(start, night)
    _take_over(start, night)
    with stage(console, "plan"):
        config = _settings(night)
    left = unfinished(night)
    start.run_key = (left[0] if left else night.runs[-1]).run_key
    refuse_if_busy(night)
    console.line(f"  night {night.key}: {len(night.runs) - len(left)} of {len(night.runs)} runs are trained")
    api, why = services.join_prefect(headway_home(), isolated=config.isolated)
    console.line(f"  prefect: {api} ({why})")
    set_client(start)
    before = {run.run_key: read_result(run_dir(run.run_key)) for run in night.runs}

    def rerun() -> Any:
        from flows.rerun import rerun  # imports prefect and ray, with the address in place

        return rerun(run_key=night.key, return_state=True)

    flow = run_flow(start, [run_dir(run.run_key).status for run in left], rerun)
    start.prefect_away = not flow.name
    stopped = [result for run in night.runs if (result := read_result(run_dir(run.run_key))) != before[run.run_key]
               and result.get("status") == "cancelled"]
    return _ended(start, night, flow, stopped[0] if stopped else None)


def _take_over(start: Start, night: Night) -> None:
    """With `--take-over`, end who is at the night, and who is at one of its runs. Raises RunIsAlive, DeadlinePassed."""
    if not start.take_over:
        return
    from tasks.night_files import owner_of
    from tasks.paths import run_dir
    from tasks.takeover import take_over

    for place in (owner_of(night), *(run_dir(run.run_key) for run in night.runs)):
        take_over(place, say=lambda text: start.console.line(f"  {text}"))


def _settings(night: Night) -> Config:
    """Those of the first run, once those of all have been seen to work. Raises ConfigError, BrokenFile."""
    from tasks.night_files import unfinished

    for run in unfinished(night):
        make_plan(settings_of(night, run)[1])
    return settings_of(night, night.runs[0])[1]


def _ended(start: Start, night: Night, flow: Flow, stopped: dict[str, Any] | None) -> int:
    """Say how it ended. Whether the night has ended, and what a run that was `stopped` wrote, stands on disk, also
    where Prefect's server is away."""
    from tasks.inspection import read_result, steps_done
    from tasks.night_files import has_ended, unfinished
    from tasks.paths import run_dir

    cause = flow.error
    if isinstance(cause, USERS_TO_MEND) and not isinstance(cause, BrokenFile):
        return refused(start.console, cause)
    if has_ended(night):
        if flow.name != "COMPLETED":
            start.console.line(f"  Prefect could not be told that the night has ended: {brief(cause)}")
        return _judged(start, night)
    left = unfinished(night)
    start.run_key = (left[0] if left else night.runs[-1]).run_key
    run = run_dir(start.run_key)
    if (flow.name == "CANCELLED" or stopped is not None) and left:
        result = stopped or read_result(run)
        name = result.get("signal", "SIGINT")
        lines = stopped_lines(run_key=start.run_key, signal=name, step=steps_done(run),
                              total=settings_of(night, left[0])[1].total_steps, resume=f"headway rerun {night.key}")
        return said(start, lines, "cancelled", STOPPED_BY[name], result.get("wall_s"))
    if flow.name == "CANCELLED":
        return stopped_behind(start, f"headway rerun {night.key}")
    text = str(cause) if isinstance(cause, NightFailed) else brief(cause)  # the night's own says what goes on with it
    more = [] if isinstance(cause, NightFailed) else [f"  go on    headway rerun {night.key}"]
    return said(start, ["", *cause_lines(text), *([f"  logs     {run.logs}"] if left else []), *more],
                 "failed" if left else "completed", FAILED)


def _judged(start: Start, night: Night) -> int:
    """The run that was judged, and the verdict."""
    from tasks.inspection import read_result
    from tasks.night_files import judged_run
    from tasks.paths import run_dir

    run = run_dir(judged_run(night))
    return completed(start, read_result(run), str(run.figures))
