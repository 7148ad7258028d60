"""What `headway status` and `audit` show, read from the run directory alone. (`inspect`: answers.py.)

Reports are JSON values: a number that does not exist is None.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from rl_core import frames
from rl_core.alarms import newest_alarm
from rl_core.errors import BrokenFile, ConfigError
from rl_core.experience.audit import audit
from rl_core.gaps import merged
from rl_core.offline import read_taken
from rl_core.records import recorded_steps
from rl_core.revisions import config_of, current_revision, revisions
from rl_core.run_dir import RunDir, json_values, newest_attempt, owner_is_alive, read_json
from rl_core.run_identity import RunIdentity, prompt_rows, read_identity
from rl_core.run_numbers import best_greedy, greedy_accuracies, mean_of_steps, metrics_of
from rl_core.summary import Summary, summarize
from tasks.paths import run_dir

RECENT_STEPS = 10
"""Steps that the status averages over."""
OF_SOURCE = ("n", "reward_mean", "correct", "length_mean")
"""What the status shows of each data source."""


def open_run(run: RunDir, run_key: str) -> RunIdentity:
    """Raises ConfigError naming the key where there is no such run."""
    try:
        return read_identity(run)
    except FileNotFoundError:
        known = sorted(p.name for p in run.root.parent.iterdir()) if run.root.parent.is_dir() else []
        raise ConfigError(f"run {run_key!r}: there is no such run under {run.root.parent}"
                          + (f"; there are {', '.join(known[-8:])}" if known else "")) from None


def read_status(run: RunDir) -> dict[str, Any]:
    """The owner's status view; empty before the first start."""
    try:
        return read_json(run.status)
    except FileNotFoundError:
        return {}


def read_result(run: RunDir) -> dict[str, Any]:
    """How the last attempt ended; empty while none has."""
    try:
        return read_json(run.result)
    except FileNotFoundError:
        return {}


def state_of(run: RunDir, view: dict[str, Any], result: dict[str, Any], *, alive: bool) -> str:
    """What a live owner does, by its status view, or how the last attempt ended: `stopped` where it did not say."""
    if alive:
        return view.get("state", "starting")
    last = result.get("attempt") == newest_attempt(run) and result.get("revision", 0) == current_revision(run)
    return result.get("status", "stopped") if last else "stopped"


def cause_of(result: dict[str, Any]) -> str:
    """Why a failed attempt failed."""
    return f"{result['error']}: {result['message']}"


def is_completed(run: RunDir) -> bool:
    """Whether the run is at its end under its current settings: an amendment re-opens it, and a start that only
    validates does not end it."""
    result = read_result(run)
    return result.get("status") == "completed" and result.get("ended") is not None \
        and result.get("revision", 0) == current_revision(run)


def steps_done(run: RunDir) -> int:
    return len(recorded_steps(run))


def summary_so_far(run_key: str, status: str, wall_s: float) -> dict[str, Any]:
    """The keys of `--json` of a run that did not complete; no numbers where its directory itself is broken."""
    try:
        return summarize(run_dir(run_key), run_key=run_key, status=status, wall_s=wall_s).as_json()
    except (BrokenFile, OSError):
        known = {"run_key": run_key, "status": status, "wall_s": round(wall_s, 3)}
        return {key.name: known.get(key.name) for key in fields(Summary)}


def run_status(run_key: str) -> dict[str, Any]:
    """What the run is doing, or how its last attempt ended, as one JSON object."""
    run = run_dir(run_key)
    identity = open_run(run, run_key)
    view, result, revision = read_status(run), read_result(run), current_revision(run)
    alive, taken = owner_is_alive(run), read_taken(run)
    state = state_of(run, view, result, alive=alive)
    cause = cause_of(result) if state == "failed" else None
    steps, validations = frames.steps(run, last=RECENT_STEPS), frames.validations(run)
    sources = frames.sources(run, last=RECENT_STEPS)
    trained = steps.index[steps["state"] == "trained"].tolist()
    by_source = [row for row in frames.rows_of(sources) if trained and row["step"] == trained[-1]]
    column, greedy = metrics_of(steps), greedy_accuracies(validations)
    accuracies, best = [each.accuracy.value for each in greedy], best_greedy(greedy)
    alarm = newest_alarm((trained[i], {name: float(values[i]) for name, values in column.items()})
                         for i in reversed(range(len(trained))))
    newest = {name: float(values[-1]) for name, values in column.items()} if trained else {}
    return json_values({
        "run_key": run_key, "state": state, "alive": alive, "steps": steps_done(run),
        "total_steps": config_of(run, revision).total_steps, "revision": revision,
        "forked_from": None if identity.forked_from is None else asdict(identity.forked_from),
        "shards_from": None if taken is None else {"run_key": taken.run_key, "run_uuid": taken.run_uuid,
                                                   "digest": taken.digest, "rescored": taken.rescored},
        "amendments": [{"revision": one.revision, "from_step": one.from_step, "changed": one.changed}
                       for one in revisions(run)],
        "accuracy": accuracies[-1] if accuracies else None, "accuracy_start": accuracies[0] if accuracies else None,
        "accuracy_best": best.accuracy.value if best else None, "best_step": best.step if best else None,
        "metrics": newest or view.get("metrics", {}), "alarm": alarm or view.get("alarm"),
        "recent": {name: mean_of_steps(values).value for name, values in column.items()},
        "by_source": {row["data_source"]: {name: row[name] for name in OF_SOURCE} for row in by_source},
        "gaps": merged(*(frame.attrs["gaps"] for frame in (steps, sources, validations))),
        "live": view.get("live", {}) if alive else {},
        "waiting": (view.get("stall") or view.get("note")) if alive else None,
        "cause": cause, "attempt": newest_attempt(run), "directory": str(run.root)})


def run_audit(run_key: str, *, each_prompt: bool = False, each_shard: bool = False) -> dict[str, Any]:
    """The partition of positions and rows of a run; `holds` is False where something is in no state or in two.
    `each_prompt` and `each_shard`: with these lists, else they are None."""
    run = run_dir(run_key)
    open_run(run, run_key)
    report = audit(run, n_prompts=prompt_rows(run), epochs=config_of(run, current_revision(run)).data.epochs,
                   each_prompt=each_prompt, each_shard=each_shard)
    return {"run_key": run_key, **report.as_json()}
