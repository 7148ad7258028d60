"""The answers of a validation that are kept, as columns of a page: those of its table (docs/validation.md 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.learner.token_states import NOT_SAMPLED
from rl_core.pages.columns import AnswerColumns, Group, no_answers

Row = Mapping[str, Any]
"""An answer as it stands in the table."""


def validation_answers(rows: Sequence[Row], details: Sequence[Row], version: int) -> AnswerColumns:
    """The answers by prompt, greedy first. `details`: `answers.table_details` of the same rows; empty where they are
    not kept, then answers are texts and have no tokens. `version`: that of the weights that answered."""
    if not rows:
        return no_answers()
    known = len(details) == len(rows)
    place_N: list[int] = [detail["prompt"] for detail in details] if known else _by_text(rows)
    _, first_G, group_N = np.unique(np.array(place_N, np.int64), return_index=True, return_inverse=True)
    firsts: list[int] = first_G.tolist()
    groups = tuple(_group(rows[row], place_N[row]) for row in firsts)
    ids = [np.array(detail["ids"], np.int32) for detail in details] if known else []
    behavior = [value for detail in details for value in detail["logprobs"]] if known else []
    tokens_T, length_N = np.concatenate([np.zeros(0, np.int32), *ids]), _ints(rows, "length")
    names = sorted({name for detail in details for name in detail["parts"]}) if known else []
    return AnswerColumns(
        groups=groups, group_N=group_N.astype(np.int64), reward_N=_numbers(rows, "reward"),
        correct_N=_numbers(rows, "correct"), length_N=length_N,
        finish_N=tuple(row["finish"] for row in rows), extracted_N=tuple(row["extracted"] for row in rows),
        mode_N=tuple(row["mode"] for row in rows), text_N=() if known else tuple(row["text"] for row in rows),
        parts={name: _numbers([detail["parts"] for detail in details], name) for name in names},
        runs_N=np.ones(len(rows), np.int64), run_tokens_R=length_N.astype(np.int32),
        run_version_R=np.full(len(rows), version, np.int32), token_ids_T=tokens_T,
        state_T=np.full(len(tokens_T), NOT_SAMPLED, np.uint8),
        values={"behavior": np.array(behavior, np.float32)} if known else {})


def _group(row: Row, place: int) -> Group:
    truth = None if row["answer"] is None else str(row["answer"])
    return Group(group_id=f"prompt {place}", source=str(row["data_source"]), prompt=str(row["prompt"]), truth=truth,
                 age=None)


def _by_text(rows: Sequence[Row]) -> list[int]:
    """Number of the prompt of each row, where only its text is known: rows of one prompt follow one another."""
    begins = [i > 0 and (row["prompt"], row["answer"]) != (before["prompt"], before["answer"])
              for i, (row, before) in enumerate(zip(rows, [rows[0], *rows], strict=False))]
    return list(accumulate(int(begin) for begin in begins))


def _numbers(rows: Sequence[Row], name: str) -> NDArray[np.float32]:
    """NaN for what is null or absent."""
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], np.float32)


def _ints(rows: Sequence[Row], name: str) -> NDArray[np.int64]:
    return np.array([row[name] for row in rows], np.int64)
