"""Shards: how finished groups become an immutable Arrow file that survives whoever wrote it.

`streams/<worker>-<incarnation>/<seq>.arrow`. An incarnation is one process start, so a name is never used twice, and a
file never changes. A shard has landed when `link` has returned: everything before that is worker memory, everything
after it is for ever (experience-store.md 3.3). Verification is in verify.py.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rl_core.errors import BrokenFile, DataError, DeadlinePassed, DeadPart
from rl_core.experience.batch import group_nbytes, groups_to_batch, n_tokens
from rl_core.experience.columns import column_digests, digest_of_digests, fixed_values
from rl_core.experience.schema import MAX_BYTES, MAX_GROUPS, SCHEMA_VERSION
from rl_core.experience.staging import Staging
from rl_core.experience.verify import DIGEST_PREFIX, SEAL, ShardInfo, map_shard, shard_key, verify_shard
from rl_core.run_dir import RunDir, fsync_dir
from rl_core.types import Landed, TrajectoryGroup

__all__ = ["GroupCommit", "ShardInfo", "ShardWriter", "map_shard", "shard_key", "sweep_tmp", "verify_shard"]

JOIN_BELOW = 16384
"""Bytes: smaller pieces of a file are joined before they are written."""
LINK_TRIES = 8
"""Writes of one shard whose tmp file is swept away under it before it is called an error."""


class _Gather:
    """A file for Arrow that keeps the buffers it is given, so that one `writev` writes them without another copy."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.write = self.pieces.append
        """Arrow does not look at what `write` returns."""

    def flush(self) -> None:
        pass


def _serialise(batch: pa.RecordBatch, metadata: Mapping[str, str]) -> list[memoryview]:
    """The bytes of the shard file, in a few pieces: large columns where they lie, what is between them joined."""
    sink = _Gather()
    schema = batch.schema.with_metadata(dict(metadata))
    with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema) as writer:
        writer.write_batch(batch)
    pieces: list[memoryview] = []
    for large, run in itertools.groupby(sink.pieces, lambda piece: len(piece) >= JOIN_BELOW):
        neighbours = list(run)
        pieces += map(memoryview, neighbours if large else [b"".join(neighbours)])
    return pieces


def _write_all(fd: int, pieces: Sequence[memoryview]) -> None:
    """Every byte of `pieces`, in order; a short write goes on where it stopped."""
    rest = list(pieces)
    while rest:
        wrote = os.writev(fd, rest[:512])
        done = 0
        while done < len(rest) and wrote >= rest[done].nbytes:
            wrote -= rest[done].nbytes
            done += 1
        rest = rest[done:]
        if wrote:
            rest[0] = rest[0].cast("B")[wrote:]


class ShardWriter:
    """Lands groups as the shards of one new stream `<worker>-<12 hex>`. One per process start; not thread-safe.

    `digests` name what the groups were made with (model, tokenizer, chat template, engine and dtype); they go into
    every footer and are checked against run.json before a claim. With `fsync=False` a landed shard survives the death
    of every process but not of the machine. `parts` are the names of the reward parts (default: those that occur).
    """

    def __init__(self, run: RunDir, worker: str, attempt: int, digests: Mapping[str, str], fsync: bool = True, *,
                 parts: Sequence[str] | None = None) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", worker):
            raise ValueError(f"worker name {worker!r}: letters, digits, '.', '_' and '-' only")
        self.stream = f"{worker}-{secrets.token_hex(6)}"
        self.stated: Callable[[], Mapping[str, str]] = dict
        """Asked by `land` for what else the metadata of the shard says."""
        self._run, self._attempt, self._digests, self._fsync = run, attempt, dict(digests), fsync
        self._parts = None if parts is None else tuple(parts)
        self._seq, self._pool = 0, Staging()
        self._linked: tuple[str, ...] | None = None
        run.stream_tmp(self.stream).mkdir(parents=True)
        if fsync:
            for directory in (run.root, run.streams, run.stream(self.stream)):
                fsync_dir(directory)

    @property
    def next_seq(self) -> int:
        """Number of the next shard; those below have landed."""
        return self._seq

    def land(self, groups: Sequence[TrajectoryGroup]) -> Landed:
        """Land these groups as one shard and return the hint for it.

        When it raises, nothing stands under a name that was not complete, and the same call may be made again: it takes
        the same number. Raises DataError for groups that a shard cannot hold (experience-store.md 3.2), OSError (ENOSPC
        for a full disk) as it came, BrokenFile if another file stands under this stream's name.
        """
        ids = tuple(group.lease.group_id for group in groups)
        tokens = sum(n_tokens(group) for group in groups)
        if self._linked is not None:
            before, seq = self._linked, self._seq
            self._settle()
            if before == ids:
                return Landed(stream=self.stream, seq=seq, group_ids=ids, n_tokens=tokens)
        self.land_batch(groups_to_batch(groups, self._parts, self._pool), ids, self.stated())
        return Landed(stream=self.stream, seq=self._seq - 1, group_ids=ids, n_tokens=tokens)

    def land_batch(self, batch: pa.RecordBatch, ids: tuple[str, ...], stated: Mapping[str, str] | None = None) -> None:
        """Land one record batch of schema.py: tmp, write, fsync, link, unlink, fsync of the directory. `stated`: what
        else the metadata of the file says."""
        pieces = _serialise(batch, self._metadata(batch, stated or {}))
        size = sum(piece.nbytes for piece in pieces)
        if size > MAX_BYTES and batch.num_rows > 1:
            raise DataError(f"{batch.num_rows} groups are {size} bytes, a shard holds {MAX_BYTES}; land fewer")
        if size > MAX_BYTES:
            raise DataError(f"group {ids[0]} alone is {size} bytes, a shard holds {MAX_BYTES}")
        for _ in range(LINK_TRIES):
            if self._write_and_link(pieces):
                self._linked = ids
                self._settle()
                return
        raise BrokenFile(f"{self._run.shard(self.stream, self._seq)}: its tmp file was removed {LINK_TRIES} times "
                         "while it was being written; is another owner sweeping this run?")

    def _write_and_link(self, pieces: Sequence[memoryview]) -> bool:
        """True once the final name is this payload; False if the tmp file vanished (it is written again)."""
        tmp, final = self._run.shard_tmp(self.stream, self._seq), self._run.shard(self.stream, self._seq)
        try:
            fd = os.open(tmp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            tmp.parent.mkdir(exist_ok=True)
            return False
        except FileExistsError:
            tmp.unlink(missing_ok=True)  # left by a try of this process: the name holds its incarnation
            return False
        try:
            try:
                _write_all(fd, pieces)
                if self._fsync:
                    os.fsync(fd)
                written = os.fstat(fd)
            finally:
                os.close(fd)
            try:
                os.link(tmp, final)
            except FileNotFoundError:
                return False
            except FileExistsError:
                stands = os.stat(final)
                if (stands.st_dev, stands.st_ino) != (written.st_dev, written.st_ino):
                    raise BrokenFile(f"{final}: another file stands under this name; a stream has one writer") from None
            return True
        finally:
            tmp.unlink(missing_ok=True)

    def _settle(self) -> None:
        """Make the linked name durable, and only then use the next number."""
        if self._fsync:
            fsync_dir(self._run.stream(self.stream))
        self._seq += 1
        self._linked = None

    def _metadata(self, batch: pa.RecordBatch, stated: Mapping[str, str]) -> dict[str, str]:
        def total(name: str) -> int:
            return int(fixed_values(batch.column(name)).sum(dtype="int64"))

        meta = {"rl.schema": SCHEMA_VERSION, "rl.stream": self.stream, "rl.seq": str(self._seq),
                "rl.groups": str(batch.num_rows), "rl.tokens": str(total("n_tokens")),
                "rl.idx_min": str(int(fixed_values(batch.column("idx_min")).min())),
                "rl.idx_max": str(int(fixed_values(batch.column("idx_max")).max())),
                "rl.attempt": str(self._attempt), "rl.xxh3": json.dumps(column_digests(batch)),
                **{DIGEST_PREFIX + name: value for name, value in self._digests.items()}, **stated}
        return meta | {SEAL: digest_of_digests(sorted(meta.items()))}


class GroupCommit:
    """Natural group commit: one thread that lands whatever finished while it landed the shard before.

    consumes: finished groups
    waits for: a group, or the disk (a failed landing is tried again every `retry_s`)
    unblocked by: `put`, `close`

    `on_landed` gets the hint of every shard; `on_refused(group, error)` a group that no shard can hold; `on_error` each
    OSError of a landing (the groups are kept). All three are called on the landing thread and must not raise.
    """

    def __init__(self, writer: ShardWriter, *, on_landed: Callable[[Landed], None],
                 on_refused: Callable[[TrajectoryGroup, DataError], None], on_error: Callable[[OSError], None],
                 cap_groups: int = MAX_GROUPS, cap_bytes: int = MAX_BYTES - 2**20, retry_s: float = 1.0) -> None:
        self._writer, self._cap_groups, self._cap_bytes, self._retry_s = writer, cap_groups, cap_bytes, retry_s
        self._on_landed, self._on_refused, self._on_error = on_landed, on_refused, on_error
        self._queue: queue.SimpleQueue[TrajectoryGroup | None] = queue.SimpleQueue()
        self._abandon = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"landing-{writer.stream}", daemon=True)
        self._thread.start()

    def put(self, group: TrajectoryGroup) -> None:
        """Hand over a finished group. Raises DeadPart if the landing thread is gone, with its cause."""
        if not self._thread.is_alive():
            raise DeadPart(f"landing thread of {self._writer.stream} is gone") from self._failure
        self._queue.put(group)

    def close(self, deadline_s: float) -> None:
        """Land what was put and stop. Raises DeadlinePassed when that takes longer than `deadline_s`."""
        self._queue.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._abandon.set()
            raise DeadlinePassed(f"{self._writer.stream}: groups are not landed after {deadline_s:g} s")

    def _run(self) -> None:
        held: TrajectoryGroup | None = None
        while not self._abandon.is_set():
            first = held if held is not None else self._queue.get()
            if first is None:
                return
            try:
                batch, held, closing = self._take(first)
                self._land(batch)
            except Exception as error:  # the thread's edge: `put` raises it, whatever it is, as the cause
                self._failure = error
                return
            if closing and held is None:
                return

    def _take(self, first: TrajectoryGroup) -> tuple[list[TrajectoryGroup], TrajectoryGroup | None, bool]:
        """What is finished now, up to the caps: (groups, the one that did not fit, whether `close` was seen)."""
        batch, size = [first], group_nbytes(first)
        while len(batch) < self._cap_groups:
            try:
                group = self._queue.get_nowait()
            except queue.Empty:
                break
            if group is None:
                return batch, None, True
            size += group_nbytes(group)
            if size > self._cap_bytes:
                return batch, group, False
            batch.append(group)
        return batch, None, False

    def _land(self, groups: list[TrajectoryGroup]) -> None:
        while not self._abandon.is_set():
            try:
                self._on_landed(self._writer.land(groups))
                return
            except DataError as error:
                if len(groups) == 1:
                    self._on_refused(groups[0], error)
                    return
                for group in groups:
                    self._land([group])
                return
            except OSError as error:
                self._on_error(error)
                self._abandon.wait(self._retry_s)


def sweep_tmp(run: RunDir, live_streams: Iterable[str]) -> int:
    """Remove what dead incarnations left half written. Returns the number of files removed.

    Only the owner calls this, with the streams of every incarnation that may still live.
    """
    live, removed = set(live_streams), 0
    try:
        streams = os.listdir(run.streams)
    except FileNotFoundError:
        return 0
    for stream in streams:
        if stream in live:
            continue
        try:
            leftovers = list(os.scandir(run.stream_tmp(stream)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in leftovers:
            os.unlink(entry.path)
            removed += 1
    return removed
