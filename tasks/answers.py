"""What `headway inspect` shows: the answers of a step, of a group, or the best and worst of a run, with their texts.

Read from the run directory alone, gap by gap: what cannot be read is named in `gaps`. Reports are JSON values.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from rl_core.errors import ConfigError
from rl_core.experience.ledger import read_claim
from rl_core.frames import with_text
from rl_core.gaps import Gaps, found
from rl_core.landed_answers import answer_table, answers_of
from rl_core.landed_groups import group_table
from rl_core.records import read_record
from rl_core.run_dir import RunDir, json_values, numbered
from tasks.inspection import open_run
from tasks.paths import run_dir

Order = Literal["best", "worst"]


def run_step(run_key: str, step: int | None = None) -> dict[str, Any]:
    """What training step k consumed, by default the newest claimed one. Raises ConfigError where it has no claim."""
    run, gaps = _open(run_key), Gaps()
    step = _claimed(run, run_key, step)
    claim = read_claim(run, step)
    answers = with_text(answer_table(run, step, tokens=True, gaps=gaps), run)
    rewards: list[float] = answers.column("reward").to_pylist()
    recorded = run.record(step).exists()
    record = found(partial(read_record, run, step), str(run.record(step)), gaps) if recorded else None
    return json_values({
        "run_key": run_key, "step": step, "idx": claim.idx, "recorded": recorded, "groups": _by_group(answers),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "metrics": record.metrics if record else {}, "by_source": record.by_source if record else {}, "gaps": gaps})


def _open(run_key: str) -> RunDir:
    run = run_dir(run_key)
    open_run(run, run_key)
    return run


def _claimed(run: RunDir, run_key: str, step: int | None) -> int:
    """The step, or the newest one with a claim. Raises ConfigError where there is no such claim."""
    claimed = [k for k, _ in numbered(run.ledger(), r"step-(\d{9})\.json")]
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
    run, gaps = _open(run_key), Gaps()
    groups = group_table(run, gaps)
    mine = groups.filter(pc.equal(groups.column("group_id"), group_id))
    if not len(mine):
        raise ConfigError(f"--group {group_id}: {run_key} has no such group; group ids look like e0-p12-t1 (dataset "
                          "epoch, prompt, try), and `headway inspect KEY --step N` shows those of a step")
    pieces = [answers_of(run, mine.slice(i, 1), tokens=True, gaps=gaps) for i in range(len(mine))]
    answers = with_text(pa.concat_tables(pieces, promote_options="default"), run)
    rows: list[dict[str, Any]] = []
    at = 0
    for facts, piece in zip(mine.to_pylist(), pieces, strict=True):
        times = {name: None if facts[name] is None else facts[name].isoformat()
                 for name in ("dispatched_at", "finished_at")}
        theirs = _by_group(answers.slice(at, len(piece))) or [{}]
        rows.append(facts | times | {"prompt": None, "answers": []} | theirs[0] | {"age": facts["age"]})
        at += len(piece)
    return json_values({"run_key": run_key, "groups": rows, "gaps": gaps})


def run_extremes(run_key: str, order: Order, count: int, step: int | None = None) -> dict[str, Any]:
    """The answers with the largest or smallest reward, of one step or of all that landed; the first among equals."""
    run, gaps = _open(run_key), Gaps()
    if step is not None:
        answers = answer_table(run, _claimed(run, run_key, step), tokens=True, gaps=gaps)
        chosen = _first(answers, order, count)
    else:
        groups = group_table(run, gaps)
        groups = groups.filter(pc.not_equal(groups.column("state"), "duplicate"))
        ranked = _first(answers_of(run, groups, gaps=gaps), order, count)  # first without tokens: those are large
        theirs = groups.filter(pc.is_in(groups.column("group_id"), ranked.column("group_id").combine_chunks()))
        answers = answers_of(run, theirs, tokens=True, gaps=gaps)
        places = set(zip(*(ranked.column(name).to_pylist() for name in ("group_id", "answer")), strict=True))
        here = zip(*(answers.column(name).to_pylist() for name in ("group_id", "answer")), strict=True)
        chosen = _first(answers.filter(pa.array([place in places for place in here], pa.bool_())), order, count)
    kept = ("group_id", "step", "state", "data_source", "position", "prompt")
    return json_values({"run_key": run_key, "order": order, "step": step, "gaps": gaps, "answers": [
        {name: row[name] for name in kept} | _of_answer(row) for row in with_text(chosen, run).to_pylist()]})


def _first(answers: pa.Table, order: Order, count: int) -> pa.Table:
    direction = "descending" if order == "best" else "ascending"
    return answers.take(pc.sort_indices(answers, sort_keys=[("reward", direction)])[:count])


def _by_group(answers: pa.Table) -> list[dict[str, Any]]:
    """Consecutive answers of a group as one entry."""
    groups: list[dict[str, Any]] = []
    for group_id, members in groupby(answers.to_pylist(), key=lambda row: row["group_id"]):
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
