"""Leases that left no trace, for the count towards `failure.max_leases`: `lost/attempt-<a>-<i>.json`, put-if-absent.

One file for each time that a worker died with groups in flight, so that what kills its workers becomes poison whoever
owns the run. What was in flight when the owner itself died is in no file, and does not count.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from rl_core.run_dir import RunDir, put_if_absent, read_json, to_json


def put_lost(run: RunDir, attempt: int, group_ids: Sequence[str], *, fsync: bool = True) -> None:
    """Record that these leases of this attempt were lost, each once."""
    data = to_json({"groups": list(group_ids)})
    for i in itertools.count():
        if put_if_absent(run.lost_leases(attempt, i), data, fsync=fsync):
            return


def read_lost(run: RunDir) -> Counter[str]:
    """How often each group was lost so far, by id. Raises BrokenFile for a file that cannot be trusted."""
    return Counter(name for path in sorted(run.lost.glob("attempt-*.json")) for name in read_json(path)["groups"])
