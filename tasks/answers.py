"""What `headway inspect` shows: the answers of a step, a group or a validation, or the best and worst of a run, with
their texts; those of a step or a validation also as a page.

Read from the run directory alone, gap by gap: what cannot be read is named in `gaps`. Reports are JSON values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core import frames
from rl_core.errors import ConfigError
from rl_core.experience.ledger import read_claim
from rl_core.gaps import Gaps, found, merged
from rl_core.pages.answers import step_page, validation_page
from rl_core.records import read_record
from rl_core.run_dir import RunDir, file_numbers, json_values, put_if_absent
from rl_core.summary import stored_mlflow_run
from rl_core.validation import read_table, read_validation, validated_steps
from tasks.destination import destination_of
from tasks.inspection import open_run
from tasks.paths import run_dir
from tasks.tracking import log_page

if TYPE_CHECKING:
    import pandas as pd

Order = Literal["best", "worst"]
Row = dict[str, Any]
"""An answer by the columns of `frames.trajectories(text=True)`."""


def run_step(run_key: str, step: int | None = None) -> dict[str, Any]:
    """What training step k consumed, by default the newest claimed one. Raises ConfigError where it has no claim."""
    run = _open(run_key)
    step = _claimed(run, run_key, step)
    claim = read_claim(run, step)
    answers = frames.trajectories(run, step, text=True)
    rows, gaps = frames.rows_of(answers), merged(answers.attrs["gaps"])
    rewards: list[float] = [row["reward"] for row in rows]
    recorded = run.record(step).exists()
    record = found(partial(read_record, run, step), str(run.record(step)), gaps) if recorded else None
    return json_values({
        "run_key": run_key, "step": step, "idx": claim.idx, "recorded": recorded, "groups": _by_group(rows),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "metrics": record.metrics if record else {}, "by_source": record.by_source if record else {}, "gaps": gaps})


def _open(run_key: str) -> RunDir:
    run = run_dir(run_key)
    open_run(run, run_key)
    return run


def _claimed(run: RunDir, run_key: str, step: int | None) -> int:
    """The step, or the newest one with a claim. Raises ConfigError where there is no such claim."""
    claimed = file_numbers(run.ledger(), r"step-(\d{9})\.json")
    if claimed and step is None:
        return claimed[-1]
    if step in claimed and step is not None:
        return step
    known = f"steps {claimed[0]} to {claimed[-1]} have one" if claimed else "no step has one yet"
    raise ConfigError(f"run {run_key}: no step has a claim yet" if step is None else
                      f"--step {step}: step {step} of {run_key} has no claim; {known}")


def run_group(run_key: str, group_id: str) -> dict[str, Any]:
    """All that is known of one group: its state, and the answers of each of its rows (a duplicate is one more row).

    Raises ConfigError for a group that has left no trace.
    """
    run = _open(run_key)
    groups = frames.groups(run)
    mine = groups[groups["group_id"] == group_id]
    if not len(mine):
        raise ConfigError(f"--group {group_id}: {run_key} has no such group; group ids look like e0-p12-t1 (dataset "
                          "epoch, prompt, try), and `headway inspect KEY --step N` shows those of a step")
    rows: list[dict[str, Any]] = []
    gaps: Gaps = groups.attrs["gaps"]
    for i, facts in enumerate(frames.rows_of(mine)):
        times = {name: None if facts[name] is None else facts[name].isoformat()
                 for name in ("dispatched_at", "finished_at")}
        answers = frames.trajectories(run, of=mine.iloc[i:i + 1], text=True)
        theirs = _by_group(frames.rows_of(answers)) or [{}]
        rows.append(facts | times | {"prompt": None, "answers": []} | theirs[0] | {"age": facts["age"]})
        gaps = merged(gaps, answers.attrs["gaps"])
    return json_values({"run_key": run_key, "groups": rows, "gaps": gaps})


def run_extremes(run_key: str, order: Order, count: int, step: int | None = None) -> dict[str, Any]:
    """The answers with the largest or smallest reward, of one step or of all that landed; the first among equals."""
    run = _open(run_key)
    if step is not None:
        answers = frames.trajectories(run, _claimed(run, run_key, step), tokens=True)
        read, chosen = [answers], _first(answers, order, count)
    else:
        groups = frames.groups(run)
        landed = groups[groups["state"] != "duplicate"]
        small = frames.trajectories(run, of=landed)  # first without tokens: those are large
        ranked = _first(small, order, count)[["group_id", "answer"]]
        answers = frames.trajectories(run, of=landed[landed["group_id"].isin(ranked["group_id"])], tokens=True)
        read, chosen = [groups, small, answers], _first(answers.merge(ranked), order, count)
    kept = ("group_id", "step", "state", "data_source", "position", "prompt")
    gaps = merged(*(frame.attrs["gaps"] for frame in read))
    return json_values({"run_key": run_key, "order": order, "step": step, "gaps": gaps, "answers": [
        {name: row[name] for name in kept} | _of_answer(row)
        for row in frames.rows_of(frames.with_text(chosen, run))]})


def run_validation(run_key: str, step: int) -> dict[str, Any]:
    """The answers that the validation after `step` training steps keeps. Raises ConfigError where there is none."""
    run = _open(run_key)
    record, gaps = _validated(run, run_key, step), Gaps()
    rows = found(partial(read_table, run, step), str(run.validation_table(step)), gaps) or []
    return json_values({"run_key": run_key, "validation": step, "v": record["v"], "n": record.get("n"),
                        "greedy_accuracy": record.get("greedy_accuracy"), "answers": rows, "gaps": gaps})


def step_as_page(run_key: str, step: int | None, out: str | None, *, logprobs: bool = False,
                 tracked: bool = False) -> dict[str, Any]:
    """The answers of a step, by default the newest claimed one, as a page: in the file `out`, and, where `tracked`, as
    an artifact of the run in MLflow. Returns what was written.

    `logprobs`: train the step again first, and show what the learner says of its tokens. Raises ConfigError where there
    is no such claim, where `out` is there already, or where MLflow does not know the run; ReplayUnavailable where the
    step cannot be trained again; TrackingFailed.
    """
    run = _open(run_key)
    step = _claimed(run, run_key, step)

    def made() -> str:
        if not logprobs:
            return step_page(run, step)
        from rl_core.learner.step_logprobs import step_logprobs  # here: torch takes seconds to import

        return step_page(run, step, step_logprobs(run, step))

    return {"run_key": run_key, "step": step} | _put_page(run, f"step-{step:09d}.html", out, made, tracked=tracked)


def validation_as_page(run_key: str, step: int, out: str | None, *, tracked: bool = False) -> dict[str, Any]:
    """The answers that a validation keeps, as a page. Raises as above."""
    run = _open(run_key)
    _validated(run, run_key, step)
    return {"run_key": run_key, "validation": step} | _put_page(
        run, f"validation-{step:09d}.html", out, lambda: validation_page(run, step), tracked=tracked)


def _put_page(run: RunDir, name: str, out: str | None, make: Callable[[], str], *, tracked: bool) -> dict[str, Any]:
    """Make it, once nothing stands against it. In MLflow one of the same name is overwritten: it says no less."""
    path, run_id = Path(out) if out is not None else None, stored_mlflow_run(run) if tracked else None
    if tracked and run_id is None:
        raise ConfigError(f"--mlflow: {run.mlflow_run}: absent, so the run is not in MLflow; the same command that "
                          "trained it sends what is missing, once MLflow is there")
    if path is not None and path.exists():
        raise ConfigError(f"--html {out!r}: is there already, and nothing is overwritten; name another file")
    text = make()
    page = text.encode()
    written: dict[str, Any] = {"bytes": len(page)}
    if path is not None:
        if not put_if_absent(path, page):
            raise ConfigError(f"--html {out!r}: is there by now, and nothing is overwritten; name another file")
        written["html"] = str(path.resolve())
    if run_id is not None:
        log_page(destination_of(run), run_id, text, f"viewer/{name}")
        written |= {"mlflow_run_id": run_id, "artifact": f"viewer/{name}"}
    return written


def _validated(run: RunDir, run_key: str, step: int) -> dict[str, Any]:
    try:
        return read_validation(run, step)
    except FileNotFoundError:
        known = ", ".join(map(str, validated_steps(run)))
        raise ConfigError(f"--validation {step}: {run_key} was not validated after {step} training steps; "
                          + (f"it was after {known}" if known else "it has no validation yet")) from None


def _first(answers: pd.DataFrame, order: Order, count: int) -> pd.DataFrame:
    """The first among equals come first."""
    return answers.sort_values("reward", ascending=order == "worst", kind="stable").head(count)


def _by_group(answers: Sequence[Row]) -> list[dict[str, Any]]:
    """Consecutive answers of a group as one entry."""
    groups: list[dict[str, Any]] = []
    for group_id, members in groupby(answers, key=lambda row: row["group_id"]):
        rows = list(members)
        ages = [row["age"] for row in rows if row["age"] is not None]
        groups.append({"group_id": group_id, "position": rows[0]["position"], "data_source": rows[0]["data_source"],
                       "age": max(ages, default=None), "prompt": rows[0]["prompt"],
                       "answers": [_of_answer(row) for row in rows]})
    return groups


def _of_answer(row: dict[str, Any]) -> dict[str, Any]:
    parts = {name.removeprefix("part_"): value for name, value in row.items()
             if name.startswith("part_") and value is not None}
    return {"text": row["text"], "reward": row["reward"], "parts": parts, "correct": row["correct"],
            "extracted": row["extracted"], "finish": row["finish"], "versions": row["versions"], "age": row["age"],
            "tokens": row["length"]}
