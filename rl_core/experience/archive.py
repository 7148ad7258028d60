"""The archive: retired shards as Parquet files with zstd, outside the run directory (`retention.archive`).

`<archive>/<run key>/<stream>/<seq>.parquet`, one a shard, with the columns and the metadata of the shard: the digest of
every column in it (`rl.xxh3`) is that of the column that is read back. For people and their tools; a run does not read
it.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rl_core.errors import BrokenFile, ConfigError, ShardCorrupt
from rl_core.experience.columns import column_digests
from rl_core.experience.schema import parts_type, shard_schema
from rl_core.experience.verify import metadata_of, verified_batch
from rl_core.run_dir import RunDir, put_if_absent

PARTS = "reward_parts"
PARTS_AT = shard_schema().get_field_index(PARTS)


def try_archive(archive: str, *, make: bool) -> Path:
    """The directory of `retention.archive`, into which files can be written; with `make` it is created. Without,
    nothing is written: the nearest directory that is there must be writable.

    Raises ConfigError naming the setting, and why not.
    """
    directory = Path(archive).expanduser()
    try:
        if make:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as probe:
                probe.write(b"x")
            return directory
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
    except OSError as error:
        raise ConfigError(f"retention.archive: shards cannot be written to {directory} ({error.strerror}); name a "
                          f"directory that can be written, or null for no archive (got {archive!r})") from error
    return directory


def archive_shard(run: RunDir, archive: Path, stream: str, seq: int) -> Path:
    """Copy a shard to the archive, durably, and read it back. Returns the file.

    Raises ShardCorrupt for a shard that does not verify, BrokenFile where another file stands under its name, OSError.
    """
    path = run.archived(archive, stream, seq)
    batch, meta, _ = verified_batch(run.shard(stream, seq))
    sink = pa.BufferOutputStream()
    whole = batch.replace_schema_metadata(meta)
    if not batch.schema.field(PARTS).type.num_fields:
        whole = whole.drop_columns([PARTS])  # Parquet has no struct without fields
    pq.write_table(pa.Table.from_batches([whole]), sink, compression="zstd")
    put_if_absent(path, sink.getvalue().to_pybytes())
    _, found = read_archived(path)
    if found["rl.xxh3"] != meta["rl.xxh3"]:
        raise BrokenFile(f"{path}: holds another shard than {run.shard(stream, seq)}; archive to another directory")
    return path


def read_archived(path: Path) -> tuple[pa.RecordBatch, dict[str, str]]:
    """`(batch, metadata)` of an archived shard, every column checked by its digest. Raises BrokenFile,
    FileNotFoundError."""
    try:
        table = pq.read_table(path, partitioning=None)
        if PARTS not in table.column_names:
            none = pa.StructArray.from_arrays([pa.nulls(table.num_rows)], ["none"]).cast(parts_type(()))
            table = table.add_column(PARTS_AT, pa.field(PARTS, none.type, nullable=False), none)
        batch = table.combine_chunks().to_batches()[0]
        meta = metadata_of(path, batch)
        if json.loads(meta["rl.xxh3"]) != column_digests(batch):
            raise BrokenFile(f"{path}: the data do not match their digests")
    except FileNotFoundError:
        raise
    except (pa.ArrowException, ShardCorrupt, OSError, KeyError, IndexError, ValueError) as error:
        raise BrokenFile(f"{path}: not an archived shard ({(str(error).splitlines() or ['empty'])[0]})") from error
    return batch, meta
