"""A few sessions of a training step as a person reads them: texts in place of tokens, verified, gap by gap.

Of a claim, which may hold gigabytes, only the shards of those few are read, and only their tokens are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from rl_core.gaps import Gaps, found
from rl_core.group_facts import read_group_facts
from rl_core.landed_answers import TOKEN_SCHEMA, answers_of, claimed_shards, truth_of
from rl_core.landed_groups import Shard, join_groups
from rl_core.run_dir import RunDir
from rl_core.types import ClaimedGroup

TRAINING_ORDER = ("dataset_epoch", "position", "try", "answer")
Row = dict[str, Any]
"""Of `landed_answers.answers_of`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LandedTurn:
    """One trajectory: `LandedTurn(prompt="user\\nsort 31\\nassistant\\n", text="13", length=3, finish="stop",
    versions=(4, 5), age=1)`."""

    prompt: str
    """All that it answers; of a later turn what went before is in it."""
    text: str
    length: int
    """Tokens."""
    finish: str
    versions: tuple[int, ...]
    """Weights that have sampled it, each once, in order."""
    age: int | None
    """Publications between its oldest token and the training step; None where the run did not sample it itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LandedSession:
    """What one reward has judged: a trajectory, or those of a session (`rollout.session`) in order, and where its group
    has landed."""

    group_id: str
    data_source: str
    stream: str
    seq: int
    row: int
    number: int
    """Among the sessions of its group, from 0."""
    truth: str | None
    """The ground truth of its prompt, where there is one."""
    reward: float
    correct: float | None
    extracted: str | None
    parts: dict[str, float]
    turns: tuple[LandedTurn, ...]

    @property
    def length(self) -> int:
        """Tokens of all its turns."""
        return sum(turn.length for turn in self.turns)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly over all. `evenly(12, 3)` -> [0, 4, 8]."""
    taken = min(most, count)
    return [i * count // taken for i in range(taken)]


def few_sessions(run: RunDir, step: int, most: int, gaps: Gaps) -> list[LandedSession]:
    """At most `most` sessions of the step's claim, in training order: one of each of as many groups, which lie evenly
    over the claim; of a claim of fewer groups several of a group. The same ones whenever it is asked.

    What cannot be read is a gap: a shard that is retired or corrupt, a claim, the tokenizer.
    """
    facts = found(partial(read_group_facts, run, step=step), str(run.claim(step)), gaps)
    tokenizer = found(partial(_tokenizer, run.model), f"{run.model}: tokenizer.json", gaps)
    if facts is None or tokenizer is None:
        return []
    claimed = facts.claims[step]
    few = replace(claimed, groups=tuple(claimed.groups[place] for place in evenly(len(claimed.groups), most)))
    facts.claims[step] = few
    batches = claimed_shards(run, few, gaps)
    groups = join_groups(facts, [Shard(*key, batch) for key, batch in batches.items()])
    groups = groups.filter(pc.equal(groups.column("step"), step))
    table = answers_of(run, groups, batches, tokens=True, gaps=gaps)
    sessions = _sessions(table)
    by_id = {group.group_id: group for group in few.groups}
    made: list[LandedSession] = []
    for rows in (sessions[place] for place in evenly(len(sessions), most)):
        group = by_id[rows[0]["group_id"]]
        facts_json = str(batches[group.stream, group.seq].column("meta_json")[group.row].as_py())
        turns = tuple(_turn(row, table, tokenizer) for row in rows)
        made.append(_session(rows[-1], group, truth_of(facts_json), turns))
    return made


def _sessions(table: pa.Table) -> list[list[Row]]:
    """The rows of each session, in training order, without their tokens; `place` says where those are."""
    small = table.drop_columns(TOKEN_SCHEMA.names).append_column("place", pa.array(range(len(table)), pa.int64()))
    rows: list[Row] = small.sort_by([(name, "ascending") for name in TRAINING_ORDER]).to_pylist()
    return [list(together) for _, together in groupby(rows, key=lambda row: (row["group_id"], row["session"]))]


def _turn(row: Row, table: pa.Table, tokenizer: Tokenizer) -> LandedTurn:
    prompt, answer = (str(tokenizer.decode(table.column(name)[row["place"]].as_py(), skip_special_tokens=True))
                      for name in ("prompt_ids", "response_ids"))
    return LandedTurn(prompt=prompt, text=answer, length=row["length"], finish=row["finish"], age=row["age"],
                      versions=tuple(dict.fromkeys(row["versions"])))


def _session(row: Row, group: ClaimedGroup, truth: str | None, turns: tuple[LandedTurn, ...]) -> LandedSession:
    """`row`: of any of its trajectories, which have one score."""
    parts = {name.removeprefix("part_"): _number(value) for name, value in row.items()
             if name.startswith("part_") and value is not None}
    return LandedSession(
        group_id=group.group_id, data_source=row["data_source"], stream=group.stream, seq=group.seq, row=group.row,
        number=row["session"], truth=truth, reward=_number(row["reward"]),
        correct=None if row["correct"] is None else _number(row["correct"]), extracted=row["extracted"], parts=parts,
        turns=turns)


def _number(value: float) -> float:
    """A 32-bit number as it is written: 0.1, not 0.10000000149011612."""
    return float(str(np.float32(value)))


def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_buffer((model / "tokenizer.json").read_bytes())
