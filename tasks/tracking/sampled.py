"""Which answers of a run become MLflow traces, and what is said of them: some of each validation, and some of the
training step before it, as `viewer/` has a page of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_core.gaps import Gaps, found
from rl_core.records import read_record
from rl_core.run_dir import RunDir, read_json
from tasks.tracking.traces import Trace, TracedRun, Turn

if TYPE_CHECKING:
    from rl_core.landed_sessions import LandedSession

SHOWN = 6
"""Answers of one validation, evenly over its table, and sessions of one training step, evenly over its claim."""


def validation_traces(of: TracedRun, run: RunDir, step: int, rows: Sequence[Mapping[str, Any]]) -> list[Trace]:
    """Some rows of the table of a validation. Each has one turn."""
    from rl_core.landed_sessions import evenly  # imports pyarrow

    record = read_json(run.validation(step))
    return [_of_validation(of, step, int(record["v"]), int(record["ts_us"]), place, rows[place])
            for place in evenly(len(rows), SHOWN)]


def _of_validation(of: TracedRun, step: int, version: int, ts_us: int, place: int, row: Mapping[str, Any]) -> Trace:
    return Trace(
        of=of, place=f"{step}/{place}", name=f"validation {step}: {row['mode']}", ts_us=ts_us, truth=row.get("answer"),
        turns=[Turn(prompt=str(row["prompt"]), text=str(row["text"]))],
        outputs={name: row.get(name) for name in ("text", "reward", "correct", "extracted", "length", "finish")},
        tags={"headway.kind": "validation", "headway.step": str(step), "headway.version": str(version),
              "headway.mode": str(row["mode"]), "headway.data_source": str(row["data_source"])},
        judged={name: row[name] for name in ("reward", "correct") if row.get(name) is not None})


def training_traces(of: TracedRun, run: RunDir, step: int, gaps: Gaps) -> list[Trace]:
    """Some sessions of a training step that has a record; what cannot be read of its claim and shards is a gap."""
    from rl_core.landed_sessions import few_sessions  # imports pyarrow

    ts_us = read_record(run, step).ts_us
    sessions = found(partial(few_sessions, run, step, SHOWN, gaps), f"step {step}", gaps) or []
    return [_of_training(of, step, ts_us, session) for session in sessions]


def _of_training(of: TracedRun, step: int, ts_us: int, session: LandedSession) -> Trace:
    versions = list(dict.fromkeys(version for turn in session.turns for version in turn.versions))
    ages = [turn.age for turn in session.turns if turn.age is not None]
    judged = {"reward": session.reward, "correct": session.correct,
              **{f"part_{name}": value for name, value in session.parts.items()}}
    return Trace(
        of=of, place=f"training {step}/{session.group_id}/{session.number}", name=f"training {step}", ts_us=ts_us,
        truth=session.truth,
        turns=[Turn(prompt=turn.prompt, text=turn.text, facts={
            "length": turn.length, "finish": turn.finish, "versions": turn.versions, "age": turn.age})
            for turn in session.turns],
        outputs={"text": session.turns[-1].text, "reward": session.reward, "correct": session.correct,
                 "extracted": session.extracted, "length": session.length, "finish": session.turns[-1].finish},
        facts={"group": session.group_id, "session": session.number, "stream": session.stream, "seq": session.seq,
               "row": session.row, "versions": versions, "age": max(ages, default=None)},
        tags={"headway.kind": "training", "headway.step": str(step), "headway.version": ", ".join(map(str, versions)),
              "headway.group": session.group_id, "headway.data_source": session.data_source},
        judged={name: value for name, value in judged.items() if value is not None})
