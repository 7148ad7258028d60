"""Discovery: which shards are new, and whether they can be believed (experience-store.md 3.4).

A hint says where to look; listing is the truth. New shards are found by the next name of each stream, which costs one
`stat` a stream however many shards there are; a full listing also finds gaps and foreign files. What fails verification
is quarantined: left in place, reported, excluded, and the run goes on. One caller at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_core.errors import ShardCorrupt
from rl_core.experience.ledger import read_retired
from rl_core.experience.shards import ShardInfo, map_shard, verify_shard
from rl_core.run_dir import RunDir, numbered, put_if_absent, read_json, to_json
from rl_core.types import Landed, ShardRef

LOG = logging.getLogger("headway.experience")
RESERVE_BYTES = 64 * 2**20
SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""What says of this process or machine, not of a file, that it cannot be opened or mapped now."""
SHARD_NAME = re.compile(r"(\d{8})\.arrow")


def run_digests(run: RunDir) -> dict[str, str]:
    """What shards must have been made with (`digests` of inputs.json): model, tokenizer, chat_template ..."""
    try:
        payload: dict[str, Any] = read_json(run.inputs)
    except FileNotFoundError:
        return {}
    return dict(payload.get("digests") or {})


def stream_names(directory: Path) -> list[str]:
    """Names in a directory of streams or shards, sorted, hidden ones left out; none where there is no directory."""
    try:
        return sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


class Discovery:
    """Names of shards seen so far, and the bytes behind them."""

    def __init__(self, run: RunDir, *, claimed_rows: dict[tuple[str, int], int] | None = None,
                 retired: Iterable[tuple[str, int]] = ()) -> None:
        """`claimed_rows`: rows claimed so far by shard. A shard whose rows are all claimed is not read again.
        `retired`: shards that are not looked for."""
        self._run = run
        self._expected = run_digests(run.origin if run.taken.exists() else run)
        self._claimed_rows = claimed_rows or {}
        self._next: dict[str, int] = {}
        self._seen: dict[str, set[int]] = {}
        for stream, seq in retired:
            self._seen.setdefault(stream, set()).add(seq)
        self._foreign: set[str] = set()
        self._sizes: dict[tuple[str, int], int] = {}
        self.landed_bytes = 0
        """Of all shards that are not retired, also quarantined ones."""
        self.measured_bytes = 0
        """Of the shards that `landed_groups` lie in. Both go on counting a shard that is retired: they say how large a
        group is."""
        self.landed_groups = 0
        self.unread: dict[ShardRef, str] = {}
        """Shard -> why it could not be read when it was looked at last, for want of files or memory; it is looked for
        again."""
        self.quarantined: dict[ShardRef, str] = {}
        """Shard -> what is wrong with it; those of earlier starts too."""
        for name in stream_names(run.quarantine):
            payload = read_json(run.quarantine / name)
            if "seq" in payload:
                self.quarantined[ShardRef(stream=payload["stream"], seq=payload["seq"])] = payload["error"]

    # -- names

    def new(self, hints: Iterable[Landed] = (), *, full: bool = False) -> list[ShardRef]:
        """Shards not returned before. With hints only their streams are looked at; without, every stream."""
        streams = sorted({hint.stream for hint in hints}) or stream_names(self._run.streams)
        found = [ref for stream in streams for ref in self._tail(stream)]
        if full:
            found += [ref for stream in streams for ref in self._listed(stream)]
        return found

    def _tail(self, stream: str) -> list[ShardRef]:
        seen, seq, found = self._seen.setdefault(stream, set()), self._next.get(stream, 0), list[ShardRef]()
        while seq in seen or self._run.shard(stream, seq).exists():
            if seq not in seen:
                seen.add(seq)
                found.append(ShardRef(stream=stream, seq=seq))
            seq += 1
        self._next[stream] = seq
        return found

    def _listed(self, stream: str) -> list[ShardRef]:
        seen, found = self._seen.setdefault(stream, set()), list[ShardRef]()
        for name in stream_names(self._run.stream(stream)):
            if (hit := SHARD_NAME.fullmatch(name)) is None:
                self._report_foreign(stream, name)
            elif (seq := int(hit.group(1))) not in seen:
                seen.add(seq)
                found.append(ShardRef(stream=stream, seq=seq))
        return found

    def _report_foreign(self, stream: str, name: str) -> None:
        if f"{stream}/{name}" not in self._foreign:
            self._foreign.add(f"{stream}/{name}")
            put_if_absent(self._run.foreign(stream, name), to_json({"stream": stream, "name": name,
                          "error": "not the name of a shard", "ts_us": time.time_ns() // 1000}))

    # -- contents

    def read(self, ref: ShardRef) -> ShardInfo | None:
        """The verified shard; None where it is quarantined, fully claimed, or absent or `unread` (then it is looked for
        again). Raises any other OSError that opening it does."""
        path, unread = self._run.shard(ref.stream, ref.seq), self.unread.pop(ref, None)
        try:
            size = path.stat().st_size
            if ref in self.quarantined:
                self._count(ref, size)
                return None
            if (rows := self._fully_claimed(ref, path)) is not None:
                self._count(ref, size, rows)
                return None
            info = verify_shard(path)
            self._check_digests(path, info)
        except FileNotFoundError:
            if (ref.stream, ref.seq) not in read_retired(self._run).shards:  # retired between listing and reading
                self._look_again(ref)
            return None
        except OSError as error:
            if error.errno not in SHORT_OF:
                raise
            self.unread[ref] = str(error)
            self._look_again(ref)
            if unread is None:
                LOG.warning("%s cannot be read now, and is looked at again: %s", path, error)
            return None
        except ShardCorrupt as error:
            self._quarantine(ref, str(error))
            self._count(ref, path.stat().st_size)
            return None
        self._count(ref, size, info.rows)
        return info

    def _look_again(self, ref: ShardRef) -> None:
        self._seen[ref.stream].discard(ref.seq)
        self._next[ref.stream] = min(self._next.get(ref.stream, 0), ref.seq)

    def _count(self, ref: ShardRef, size: int, rows: int = 0) -> None:
        self._sizes[ref.stream, ref.seq] = size
        self.landed_bytes += size
        if rows:
            self.measured_bytes, self.landed_groups = self.measured_bytes + size, self.landed_groups + rows

    def retire(self, shards: Iterable[tuple[str, int]]) -> None:
        """These shards were removed: their bytes count no longer, and they are not looked for again."""
        for stream, seq in shards:
            self._seen.setdefault(stream, set()).add(seq)
            self.landed_bytes -= self._sizes.pop((stream, seq), 0)
            self.unread.pop(ShardRef(stream=stream, seq=seq), None)

    def _fully_claimed(self, ref: ShardRef, path: Path) -> int | None:
        """Rows of a shard that claims have used up: nothing in it can be claimed, so it is not verified again."""
        claimed = self._claimed_rows.get((ref.stream, ref.seq), 0)
        if not claimed:
            return None
        try:
            _, meta = map_shard(path)
        except ShardCorrupt:
            return claimed
        return claimed if meta.get("rl.groups") == str(claimed) else None

    def _check_digests(self, path: Path, info: ShardInfo) -> None:
        for name, digest in info.digests.items():
            if self._expected.get(name, digest) != digest:
                raise ShardCorrupt(f"{path}: made with {name} {digest}, the run has {self._expected[name]}")

    def _quarantine(self, ref: ShardRef, error: str) -> None:
        self.quarantined[ref] = error
        put_if_absent(self._run.quarantined(ref.stream, ref.seq), to_json({"stream": ref.stream, "seq": ref.seq,
                      "error": error, "ts_us": time.time_ns() // 1000}))


def reserve_bytes(run: RunDir) -> int:
    """One checkpoint + one version + 64 MiB; a checkpoint that is not there yet is reckoned as three versions."""
    weights = [_dir_bytes(path) for _, path in list(numbered(run.weights_root, r"v-(\d{8})"))[-1:]]
    checkpoints = [_dir_bytes(path) for _, path in list(numbered(run.checkpoints, r"n-(\d{9})"))[-1:]]
    version = sum(weights)
    return (sum(checkpoints) or 3 * version) + version + RESERVE_BYTES


def _dir_bytes(directory: Path) -> int:
    """Bytes of the files in a directory; what is pruned meanwhile counts 0."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
