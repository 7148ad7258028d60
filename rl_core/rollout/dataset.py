"""The data set of a run: its sources by name, as tables whose rows are numbered through (data.md section 1).

A source is a file (data_files.py, data_parquet.py), a data set of the Hugging Face hub, or a task whose rows are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rl_core.config import Config, DataSource
from rl_core.errors import ConfigError, DataError
from rl_core.hooks.kinds import is_function
from rl_core.hub import PREFIX, HubId, fetch, hub_id
from rl_core.rollout.data_files import read_file, table_of
from rl_core.rollout.data_rows import Keys, Row, keys_of
from rl_core.rollout.data_tables import Place, Table
from rl_core.rollout.environments.function import made_rows
from rl_core.rollout.environments.sort import held_out_rows, sort_rows

SORT = "sort"
TASK = "reasoning_gym:"
CONVERTED = "refs/convert/parquet"
"""Branch of a data set's repository that holds the hub's own conversion to Parquet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One entry of data.train or data.validation: `Source(path="a.parquet", weight=2.0, tables=(...,))`."""

    path: str
    weight: float
    tables: tuple[Table, ...]
    """More than one for a data set of the hub that has several files."""

    def __len__(self) -> int:
        return sum(map(len, self.tables))


class Dataset:
    """Rows of all sources, numbered from 0 in their order."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.tables = [table for source in sources for table in source.tables]
        self.starts = np.concatenate([[0], np.cumsum([len(table) for table in self.tables], dtype=np.int64)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _at(self, row: int) -> tuple[Table, int]:
        at = int(np.searchsorted(self.starts, row, "right")) - 1
        return self.tables[at], row - int(self.starts[at])

    def row(self, row: int) -> Row:
        """One row of the data set."""
        table, i = self._at(row)
        return table.row(i)

    def where(self, row: int) -> str:
        """`file:line` of one row."""
        table, i = self._at(row)
        return table.where(i)

    def rows(self, numbers: Iterable[int]) -> Iterator[Row]:
        """These rows, one after another."""
        return (self.row(number) for number in numbers)

    def bare(self, rows: NDArray[np.int64]) -> Iterator[Row]:
        """These rows without their other columns."""
        for row in rows.tolist():
            table, i = self._at(row)
            yield table.bare(i)

    def without(self, column: str) -> str | None:
        """Where the first row without this column stands; None if all have it."""
        found = ((table, table.without(column)) for table in self.tables)
        return next((table.where(row) for table, row in found if row is not None), None)

    @property
    def keys(self) -> NDArray[np.uint64]:
        """Hash of every prompt [rows]: equal for equal prompts."""
        return np.concatenate([np.zeros(0, np.uint64), *(table.facts.key for table in self.tables)])

    @property
    def digest(self) -> str:
        """Of all values of all rows, and of the weights. Another digest under the same path is another data set."""
        parts = [f"{source.weight} {table.form} {table.shape} {table.digest}"
                 for source in self.sources for table in source.tables]
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def training_data(config: Config, cwd: Path = Path()) -> Dataset:
    """The data set of `data.train`; a relative path starts at `cwd`. Raises DataError, ConfigError naming the place."""
    return Dataset([Source(path=source.path, weight=source.weight,
                           tables=_tables(source, config, cwd, "data.train", config.data.max_samples))
                    for source in config.data.train])


def validation_data(config: Config, cwd: Path = Path()) -> Dataset:
    """The held-out rows: the first `data.validation_size` of each source; none if there is no validation."""
    sources = config.data.validation or ()
    for source in sources:
        if source.weight != 1:
            raise ConfigError(f"data.validation: {source.path} has the weight {source.weight:g}; every held-out prompt "
                              "is answered once in a validation, so leave the weight out")
    return Dataset([Source(path=source.path, weight=1.0,
                           tables=_tables(source, config, cwd, "data.validation", config.data.validation_size))
                    for source in sources])


def _tables(source: DataSource, config: Config, cwd: Path, field: str, limit: int | None) -> tuple[Table, ...]:
    keys, held_out = keys_of(config), field == "data.validation"
    size = config.data.validation_size if held_out else min(config.data.size, limit or config.data.size)
    if source.path == SORT or source.path.startswith(TASK):
        made = _sort(config, size, held_out) if source.path == SORT else _reasoning(source.path, config, size, held_out)
        return (table_of(made, Place(path=field, source=source.path), Keys(needs_answer=source.path == SORT)),)
    if is_function(source.path):
        made = made_rows(source.path, field, config, size, held_out=held_out, cwd=cwd)
        return (table_of(made, Place(path=field, source=source.path), keys),)
    if source.path.startswith(PREFIX):
        return _hub_tables(source.path, keys, field, limit, config.deadlines.model_setup_s)
    path = cwd / Path(source.path).expanduser()
    return (read_file(path, keys, limit=limit),)


def _sort(config: Config, size: int, held_out: bool) -> list[dict[str, str]]:
    if held_out:
        return held_out_rows(size)
    return sort_rows(size, config.seed, {row["prompt"] for row in held_out_rows(config.data.validation_size)})


def _reasoning(path: str, config: Config, size: int, held_out: bool) -> list[dict[str, Any]]:
    from rl_core.rollout.environments.reasoning import reasoning_rows  # the extra `tasks`

    return reasoning_rows(path.removeprefix(TASK), size, config.seed, held_out)


# -- the hub


def _hub_tables(path: str, keys: Keys, field: str, limit: int | None, deadline_s: float) -> tuple[Table, ...]:
    """The Parquet files of `hf:owner/name[/subset][:split]`, split `train` where none is named."""
    tables: list[Table] = []
    for file in hub_files(path, field, deadline_s):
        left = None if limit is None else limit - sum(map(len, tables))
        if left != 0:
            tables.append(read_file(file, keys, shown=f"{path} {file.parent.name}/{file.name}", limit=left,
                                    source=path.removeprefix(PREFIX).partition(":")[0]))
    return tuple(tables)


def hub_files(path: str, field: str, deadline_s: float) -> list[Path]:
    """The files of a data set of the hub, downloaded, or found where they were downloaded before. Raises DataError."""
    name, _, split = path.removeprefix(PREFIX).partition(":")
    owner, _, rest = name.partition("/")
    repository, _, subset = rest.partition("/")
    wanted = hub_id(field, f"{PREFIX}{owner}/{repository}")
    assert wanted is not None
    patterns = split_patterns(subset, split or "train")
    for revision in [wanted.revision] if wanted.revision else [None, CONVERTED]:
        try:
            directory = fetch(field, HubId(wanted.name, revision), kind="dataset", patterns=patterns, cache=None,
                              deadline_s=deadline_s)
        except ConfigError as error:
            if revision == CONVERTED:  # not every data set has it
                break
            raise DataError(f"{error} (of a data set, its Parquet files)") from error
        files = sorted(file for file in directory.rglob("*.parquet") if any(
            fnmatchcase(file.relative_to(directory).as_posix(), pattern) for pattern in patterns))
        subsets = sorted({file.relative_to(directory).parts[0] for file in files} - {"data"})
        if not subset and len(subsets) > 1 and all((directory / name).is_dir() for name in subsets):
            raise DataError(f"{field}: {path} has the subsets {', '.join(subsets)}; write one, as in "
                            f"{PREFIX}{wanted.name}/{subsets[0]}:{split or 'train'}")
        if files:
            return files
    raise DataError(f"{field}: {path} has no Parquet files of a split {split or 'train'!r}; name another one, as in "
                    f"{PREFIX}{wanted.name}:test")


def split_patterns(subset: str, split: str) -> list[str]:
    """Names of a split's files as repositories have them: `data/train-00000-of-00001.parquet`, `main/train/0.parquet`.
    """
    before = f"{subset}/" if subset else ""
    names = [f"{split}.parquet", f"{split}-*.parquet", f"{split}_*.parquet", f"{split}/*.parquet"]
    return [f"{start}{name}" for name in names for start in ((before, f"{before}*/") if before else ("", "*/"))]
