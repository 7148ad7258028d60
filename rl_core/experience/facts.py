"""The small columns of a claim's shards: everything but the tokens, one numpy index away.

Shape suffixes as in reader.py: `_N` trajectories of the claim, `_G` its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl_core.experience.columns import (
    first_of_session,
    fixed_values,
    list_values,
    nested_offsets,
    token_values,
    valid_bits,
)


def starts_of(counts: NDArray[Any]) -> NDArray[np.int64]:
    """`starts_of([2, 3])` -> `[0, 2, 5]`."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def members_of(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`members_of([7, 2], [3, 1])` -> `[7, 8, 9, 2]`: ranges of `counts` numbers from `starts`, one after the other."""
    ends = starts_of(counts)
    return np.repeat(starts - ends[:-1], counts) + np.arange(int(ends[-1]), dtype=np.int64)


class ClaimFacts:
    """The small columns of all shards of a claim, put one after the other and read by group, response or run number.

    Everything but the token columns: cheap to copy, and then every choice of rows is one numpy index.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], shard_G: NDArray[np.int64], row_G: NDArray[np.int64]) -> None:
        self._batches = batches
        self._place_G = list(zip(shard_G.tolist(), row_G.tolist(), strict=True))
        tokens = [nested_offsets(batch.column("response_ids")) for batch in batches]
        runs = [nested_offsets(batch.column("ver_run_end"))[1] for batch in batches]
        first_row = starts_of(np.array([batch.num_rows for batch in batches]))
        first_response = starts_of(np.array([inner.size - 1 for _, inner in tokens]))
        responses_of_row = np.concatenate([outer[1:] - outer[:-1] for outer, _ in tokens]).astype(np.int64)
        runs_of_response = np.concatenate([offsets[1:] - offsets[:-1] for offsets in runs]).astype(np.int64)
        self.row_G = first_row[shard_G] + row_G
        self.n_responses_G = responses_of_row[self.row_G]
        self.response_N = members_of(starts_of(responses_of_row)[self.row_G], self.n_responses_G)
        """Number of each trajectory of the claim among the responses of all shards."""
        self.shard_N = np.searchsorted(first_response, self.response_N, side="right") - 1
        self.begin_N = np.concatenate([inner[:-1] for _, inner in tokens])[self.response_N]
        """First token of each trajectory in its shard."""
        self.length_N = np.concatenate([inner[1:] - inner[:-1] for _, inner in tokens])[self.response_N]
        self._first_run = starts_of(runs_of_response)
        self._runs_of_response = runs_of_response

    def by_group(self, name: str, child: str | None = None) -> NDArray[Any]:
        """A scalar column (or one field of a struct), one entry per group of the claim."""
        columns = [batch.column(name) if child is None else batch.column(name).field(child) for batch in self._batches]
        return np.concatenate([fixed_values(column) for column in columns])[self.row_G]

    def by_response(self, name: str) -> NDArray[Any]:
        """A column of one entry per response, one entry per trajectory of the claim."""
        return np.concatenate([list_values(batch.column(name))[1] for batch in self._batches])[self.response_N]

    def baseline(self) -> NDArray[np.float32]:
        """`baseline_reward` by group; NaN where it is null."""
        columns = [batch.column("baseline_reward") for batch in self._batches]
        found = [np.where(valid_bits(column), fixed_values(column), np.float32(np.nan)) for column in columns]
        return np.concatenate(found)[self.row_G]

    def correct(self) -> NDArray[np.float32]:
        """`correct` by trajectory; NaN for the groups where it is null."""
        parts: list[NDArray[np.float32]] = []
        for batch in self._batches:
            column = batch.column("correct")
            said = np.repeat(valid_bits(column), fixed_values(batch.column("n_responses")))
            values = np.full(said.size, np.nan, np.float32)
            values[said] = list_values(column)[1]
            parts.append(values)
        return np.concatenate(parts)[self.response_N]

    def texts(self, name: str) -> tuple[tuple[str, ...], NDArray[np.int32]]:
        """A column of texts of which few differ: (the texts, sorted; number of each group's text)."""
        texts: list[str] = [text for batch in self._batches for text in batch.column(name).to_pylist()]
        mine: list[str] = [texts[int(row)] for row in self.row_G]
        different = tuple(sorted(set(mine)))
        place = {text: i for i, text in enumerate(different)}
        return different, np.array([place[text] for text in mine], np.int32)

    def parts(self) -> dict[str, NDArray[np.float32]]:
        """Reward parts by name, one entry per trajectory; NaN where a shard has no such part."""
        columns = [batch.column("reward_parts") for batch in self._batches]
        names = sorted({child.name for column in columns for child in column.type})
        sizes = [len(batch.column("reward").values) for batch in self._batches]
        found: dict[str, NDArray[np.float32]] = {}
        for name in names:
            values = [list_values(column.field(name))[1] if column.type.get_field_index(name) >= 0
                      else np.full(size, np.nan, np.float32) for column, size in zip(columns, sizes, strict=True)]
            found[name] = np.concatenate(values)[self.response_N]
        return found

    def prompts(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(prompt ids of all groups of the claim, flat; their offsets [groups + 1])."""
        columns = [list_values(batch.column("prompt_ids")) for batch in self._batches]
        first = starts_of(np.concatenate([offsets[1:] - offsets[:-1] for offsets, _ in columns]))
        lengths = np.diff(first)[self.row_G]
        ids = np.concatenate([values for _, values in columns])[members_of(first[self.row_G], lengths)]
        return ids, starts_of(lengths).astype(np.int32)

    def sessions(self) -> NDArray[np.int32]:
        """Number of each trajectory's session among those of the claim, ascending."""
        number = np.cumsum(np.concatenate([first_of_session(batch) for batch in self._batches]))[self.response_N]
        return np.cumsum(np.diff(number, prepend=-1) != 0).astype(np.int32) - np.int32(1)

    def contexts(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """What trajectories answer: (token ids of all contexts, flat; their offsets; number of each trajectory's).

        The first ones are the prompts of the groups, in order; behind them come those that trajectories have of their
        own."""
        ids, offsets = self.prompts()
        context_N = np.repeat(np.arange(len(self._place_G), dtype=np.int32), self.n_responses_G)
        columns = [batch.column("response_prompt_ids") for batch in self._batches]
        if all(column.null_count == len(column) for column in columns):
            return ids, offsets, context_N
        pieces, starts, at = [ids], offsets.tolist(), 0
        for g, (shard, row) in enumerate(self._place_G):
            outer, inner, values = token_values(columns[shard])
            for j in range(outer[row], outer[row + 1]):
                own = values[inner[j]:inner[j + 1]]
                if not np.array_equal(own, ids[offsets[g]:offsets[g + 1]]):
                    context_N[at + j - outer[row]] = len(starts) - 1
                    pieces.append(own)
                    starts.append(starts[-1] + own.size)
            at += int(self.n_responses_G[g])
        return np.concatenate(pieces), np.array(starts, np.int32), context_N

    def runs(self, mine_N: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Version runs of the chosen trajectories, in order: (version, tokens) of each run."""
        ends = np.concatenate([fixed_values(batch.column("ver_run_end").values.values) for batch in self._batches])
        versions = np.concatenate([fixed_values(batch.column("ver_run_value").values.values)
                                   for batch in self._batches])
        tokens = np.diff(ends, prepend=np.int32(0))
        tokens[self._first_run[:-1]] = ends[self._first_run[:-1]]
        mine = self.response_N[mine_N]
        chosen = members_of(self._first_run[mine], self._runs_of_response[mine])
        return versions[chosen], tokens[chosen]
