"""Forks: a new run from another one's past, `<K>~<n>` (experience-store.md 3.8).

    fork of K from step N      linked from K                         its own
    model, inputs              all of it                             run.json (run uuid, forked_from), settings
    ledger                     claims, voids and drops < N           one file of drops: what the fork fences
    records, observations      < N                                   all later ones
    versions, validations      those of step <= N                    all later ones
    checkpoints                the newest whole one c <= N           all later ones; steps c .. N-1 are replayed
    streams                    every shard that is there             streams of its own workers

Everything linked is immutable, so that K is neither changed nor in the way, whether its owner lives or not. A fork is
built aside under a hidden name and gets its own by one rename, when it is whole: a crash leaves no half of one. From
then on it is a run like any other: its start replays and goes on by the path of every start.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.checkpoint import checkpoints, read_checkpoint_state
from rl_core.combinations import check_baseline_landed, check_rewards_landed
from rl_core.config import Config
from rl_core.env_digest import differing_fields
from rl_core.errors import CheckpointDamaged, ConfigError, ForkDiverged, ShardCorrupt
from rl_core.experience.discovery import SHARD_NAME, stream_names
from rl_core.experience.ledger import (
    claimed_steps,
    drop_files,
    put_drops,
    put_retired,
    read_claim,
    read_drops,
    read_retired,
    voided_steps,
)
from rl_core.experience.outcomes import outcome_ids, read_outcome
from rl_core.experience.shards import ShardInfo, map_shard, verify_shard
from rl_core.plan import differing
from rl_core.records import read_record, recorded_steps
from rl_core.revisions import config_of, current_revision, listed, put_revision, read_revision, trained_by
from rl_core.run_dir import (
    OwnerLock,
    RunDir,
    boot_id,
    file_numbers,
    fsync_dir,
    link_file,
    newest_attempt,
    numbered,
    owner_is_alive,
    put_if_absent,
    read_json,
    to_json,
)
from rl_core.run_identity import ForkedFrom, identity_payload, read_identity
from rl_core.types import Drop, Outcome, group_id, parse_group_id
from rl_core.versions import read_versions

Place = tuple[int, int]
"""(dataset epoch, position)."""
TRIES = 1000
"""Numbers of forks that are tried, one after the other, while others take them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A fork that stands: `Fork(key="sort~1", run=..., checkpoint=8, step=10)`."""

    key: str
    run: RunDir
    checkpoint: int
    """Steps behind the checkpoint it begins with; 0 where that is the initial model."""
    step: int
    """N: its first step of its own."""


# -- what may be forked


def settings_at(run: RunDir, step: int) -> tuple[int, Config]:
    """`(revision, settings)` that step N was claimed under; those of the run now where it has no claim yet."""
    revision = read_claim(run, step).revision if run.claim(step).exists() else current_revision(run)
    return revision, config_of(run, revision)


def check_fork(run: RunDir, run_key: str, step: int, wanted: Config) -> None:
    """Raises ConfigError naming what keeps a fork of the run from step N with these settings from being made."""
    recorded = len(_past(run))
    if step > recorded:
        raise ConfigError(f"--from-step {step}: run {run_key} has {recorded} recorded steps, and a fork begins behind "
                          f"one of them; use at most {recorded}")
    if fields := differing(settings_at(run, step)[1], wanted, "identity"):
        raise ConfigError(f"a fork of run {run_key} has its identity fields: {listed(fields)}. Its past was made with "
                          "them: begin another run with the ones asked for, by headway train --run-key")
    made_by = [config_of(run, r) for r in range(current_revision(run) + 1)]
    check_baseline_landed(run_key, made_by, wanted)
    check_rewards_landed(run_key, made_by, wanted)
    if wanted.total_steps <= step:
        raise ConfigError(f"total_steps: a fork from step {step} would train nothing; use more than {step}, as in "
                          f"--set total_steps={2 * step or 1} (got {wanted.total_steps})")


def _past(run: RunDir) -> list[int]:
    """Steps 0, 1, ... that are done: each has its record, or was voided."""
    done = set(recorded_steps(run)) | set(voided_steps(run))
    return list(range(next(k for k in range(len(done) + 1) if k not in done)))


# -- making one


def make_fork(parent: RunDir, run_key: str, step: int, wanted: Config) -> Fork:
    """Make the next free `<run_key>~<n>` beside the parent: its past before step N, `wanted` from N on.

    Raises ConfigError (`check_fork`; a step before N that cannot be replayed), BrokenFile. Whatever it raises, nothing
    stands under a name of a run.
    """
    check_fork(parent, run_key, step, wanted)
    runs = parent.root.parent
    _sweep(runs, run_key)
    number = _next_number(runs, run_key)
    aside = RunDir(runs / f".{run_key}~{number}.{os.getpid()}-{secrets.token_hex(6)}.tmp")
    lock = OwnerLock(aside)  # says to a sweep that somebody is at it
    try:
        checkpoint = _Builder(parent, aside, step).build()
        for n in range(number, number + TRIES):
            key = f"{run_key}~{n}"
            _identify(parent, aside, key, step, wanted)
            _fsync_tree(aside.root)
            if _place(aside.root, runs / key):
                fsync_dir(runs)
                return Fork(key=key, run=RunDir(runs / key), checkpoint=checkpoint, step=step)
        raise ConfigError(f"{runs}: {run_key}~{number} and the {TRIES} names behind it are taken; remove some")
    finally:
        shutil.rmtree(aside.root, ignore_errors=True)
        lock.release()


def _next_number(runs: Path, run_key: str) -> int:
    return max(file_numbers(runs, rf"{_escaped(run_key)}~(\d+)"), default=0) + 1


def _escaped(run_key: str) -> str:
    return run_key.replace(".", r"\.")  # the one letter of a key that means something else in a pattern


def _sweep(runs: Path, run_key: str) -> None:
    """Remove what forks of this run left behind that died while they were built."""
    for _, path in numbered(runs, rf"\.{_escaped(run_key)}~(\d+)\.\d+-[0-9a-f]{{12}}\.tmp"):
        if not owner_is_alive(RunDir(path)):
            shutil.rmtree(path, ignore_errors=True)


def _place(aside: Path, final: Path) -> bool:
    """Rename; False where a run has that name. One of several forks wins: a directory that holds something is never
    replaced, and what is renamed is whole."""
    try:
        os.rename(aside, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True


def _fsync_tree(root: Path) -> None:
    """The names, bottom up; the files behind the links are durable already."""
    for directory, _, _ in os.walk(root, topdown=False):
        fsync_dir(Path(directory))


def _identify(parent: RunDir, fork: RunDir, key: str, step: int, wanted: Config) -> None:
    """run.json under this key, and the revisions of the settings: those of the past, and one more from N on where a
    training field differs. What is operational or of the environment is the fork's own in all of them."""
    origin, (revision, base) = read_identity(parent), settings_at(parent, step)
    fork.run_json.unlink(missing_ok=True)  # of the key before, which somebody else took
    forked_from = ForkedFrom(run_key=origin.run_key, run_uuid=origin.run_uuid, step=step)
    put_if_absent(fork.run_json, to_json(identity_payload(key, origin.preset, trained_by(origin.config, wanted),
                                                          forked_from)))
    if fork.revisions.exists():
        return
    fork.revisions.mkdir()
    for r in range(1, revision + 1):
        own = trained_by(read_revision(parent, r).config, wanted).model_dump(mode="json")
        put_if_absent(fork.settings(r), to_json(read_json(parent.settings(r)) | {"config": own}))
    put_revision(fork, trained_by(base, wanted), wanted)


# -- what of the parent's past it has


@dataclass(slots=True)
class _Groups:
    """What the shards of the fork hold beside what its past has consumed."""

    claimed: set[str] = field(default_factory=set[str])
    dropped: set[str] = field(default_factory=set[str])
    """Before N."""
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Group with a landed row -> its tokens."""
    fenced: set[str] = field(default_factory=set[str])
    places: dict[str, Place] = field(default_factory=dict[str, Place])

    def fence(self, name: str) -> Drop:
        return Drop(group_id=name, reason="fenced", n_tokens=self.tokens[name])

    def last_tries(self, others: Iterable[tuple[str, Place]]) -> dict[Place, tuple[int, int]]:
        """Position -> (its highest try, its prompt)."""
        highest: dict[Place, tuple[int, int]] = {}
        for name, place in (*self.places.items(), *others):
            _, prompt_idx, try_no = parse_group_id(name)
            highest[place] = max(highest.get(place, (-1, 0)), (try_no, prompt_idx))
        return highest


class _Builder:
    """Links into `fork` what the parent's past before step N consists of."""

    def __init__(self, parent: RunDir, fork: RunDir, step: int) -> None:
        self._parent, self._fork, self._step = parent, fork, step
        self._claims = [read_claim(parent, k) for k in range(step)]
        self._checkpoint = 0

    def build(self) -> int:
        """Returns the step behind the checkpoint. Raises ConfigError, BrokenFile."""
        self._link_attempt()
        self._link_inputs()
        self._link_steps()
        self._checkpoint = self._link_checkpoint()
        self._link_shards()
        self._check_replay()
        self._fence()
        return self._checkpoint

    def _link_attempt(self) -> None:
        """One attempt of the fork's own, numbered as the parent's newest: lease numbers and attempts go on growing."""
        made_by = [claim.attempt for claim in self._claims]
        attempt = max([newest_attempt(self._parent), *made_by])
        payload = {"attempt": attempt, "host": os.uname().nodename, "pid": os.getpid(), "boot_id": boot_id(),
                   "prefect_run_id": None, "next_step": self._step, "ts_us": time.time_ns() // 1000}
        put_if_absent(self._fork.attempt(attempt), to_json(payload))

    def _link_inputs(self) -> None:
        parent, fork = self._parent, self._fork
        if parent.inputs.exists():
            link_file(parent.inputs, fork.inputs)
        link_tree(parent.model, fork.model)
        link_tree(parent.roles, fork.roles)
        link_tree(parent.orders, fork.orders)
        link_tree(parent.origin.root, fork.origin.root)  # of a run on another one's shards

    def _link_steps(self) -> None:
        parent, fork, step = self._parent, self._fork, self._step
        for k in range(step):
            link_file(parent.claim(k), fork.claim(k))
            for mine, theirs in ((parent.void(k), fork.void(k)), (parent.record(k), fork.record(k)),
                                 (parent.observation(k), fork.observation(k))):
                _link_if_there(mine, theirs)
        for k, path in numbered(parent.ledger(), r"drops-(\d{9})-\d{6}\.json"):
            if k < step:
                link_file(path, fork.ledger() / path.name)
        for k, path in numbered(parent.validations, r"step-(\d{9})\.json"):
            if k <= step:
                _link_if_there(parent.validation_table(k), fork.validation_table(k))
                link_file(path, fork.validation(k))
        for v, version in read_versions(parent).items():
            if version.step <= step:
                link_file(parent.version(v), fork.version(v))
                if not parent.weights_root.is_symlink():  # in shared memory: the fork makes what it needs itself
                    link_tree(parent.weights(v), fork.weights(v))

    def _link_checkpoint(self) -> int:
        """The newest checkpoint at or before N that is whole, and is of the weights that were recorded; else 0, for the
        initial model."""
        for n in [n for n in reversed(checkpoints(self._parent)) if n <= self._step]:
            link_tree(self._parent.checkpoint(n), self._fork.checkpoint(n))
            try:
                state = read_checkpoint_state(self._fork, n)
            except CheckpointDamaged:
                state = None
            recorded = self._fork.record(n - 1)
            if state is not None and (not recorded.exists()
                                      or read_record(self._fork, n - 1).weights_digest == state.weights_digest):
                return n
            shutil.rmtree(self._fork.checkpoint(n), ignore_errors=True)
        return 0

    def _link_shards(self) -> None:
        """Every shard that is there: those with groups that wait, those that are replayed, and those of claims."""
        parent, fork = self._parent, self._fork
        for stream in stream_names(parent.streams):
            listed_seqs = [int(hit.group(1)) for name in stream_names(parent.stream(stream))
                           if (hit := SHARD_NAME.fullmatch(name))]
            for seq in range(max(listed_seqs, default=-1) + 1):
                _link_if_there(parent.shard(stream, seq), fork.shard(stream, seq))  # absent: retired
                _link_if_there(parent.quarantined(stream, seq), fork.quarantined(stream, seq))

    def _check_replay(self) -> None:
        for claim in self._claims[self._checkpoint:]:
            for key in () if self._fork.void(claim.step).exists() else claim.shard_digests:
                stream, seq = key.rsplit("/", 1)
                if not self._fork.shard(stream, int(seq)).exists():
                    raise ConfigError(f"--from-step {self._step}: begins with checkpoint {self._checkpoint}, and step "
                                      f"{claim.step} cannot be replayed: its shard {key} is retired; use the step of a "
                                      f"checkpoint, of which there are {checkpoints(self._parent)}")

    # -- what the fork does not take up

    def _fence(self) -> None:
        """Write as drops of the fork, once for all, what no claim of it may take: groups with a token of a version past
        N, which are of a history that the fork does not have, whatever their version's number comes to mean in it; and
        tries that the parent had ended since, where a later one has landed. Outcomes: those that still count."""
        fork, groups = self._fork, self._read_groups()
        outcomes = {name: read_outcome(self._parent, name) for name in outcome_ids(self._parent)}
        kept = {name for name, outcome in outcomes.items() if outcome.kind in ("poison", "filtered")}
        ended = groups.claimed | groups.dropped
        drops = {name: groups.fence(name) for name in groups.fenced - kept}
        ended_later = self._drops_from(self._step)
        for place, (last, prompt_idx) in groups.last_tries((name, place_of(outcomes[name])) for name in kept).items():
            for name in (group_id(place[0], prompt_idx, try_no) for try_no in range(last)):
                if name in outcomes:
                    kept.add(name)
                    drops.pop(name, None)
                elif name not in drops and name not in ended and (name in ended_later or name in groups.tokens):
                    drops[name] = ended_later.get(name) or groups.fence(name)
        for name in sorted(kept):
            link_file(self._parent.outcome(name), fork.outcome(name))
        if drops:
            put_drops(fork, self._step, [drops[name] for name in sorted(drops)], attempt=newest_attempt(fork))
        self._note_retired(ended | kept | drops.keys())

    def _note_retired(self, ended: Set[str]) -> None:
        """Shards that the parent has retired: said of the fork, too, with those of their rows that have ended in it."""
        retired = read_retired(self._parent)
        gone = {shard for shard in retired.shards if not self._fork.shard(*shard).exists()}
        rows = [row for row in retired.rows if (row.stream, row.seq) in gone and row.group_id in ended]
        if gone:
            put_retired(self._fork, self._checkpoint, sorted(gone), rows, attempt=newest_attempt(self._fork))

    def _read_groups(self) -> _Groups:
        groups, rows_by_shard = _Groups(), dict[tuple[str, int], int]()
        for claim in self._claims:
            groups.dropped |= {drop.group_id for drop in claim.dropped}
            for g in claim.groups:
                groups.claimed.add(g.group_id)
                groups.places[g.group_id] = (g.dataset_epoch, g.position)
                rows_by_shard[g.stream, g.seq] = rows_by_shard.get((g.stream, g.seq), 0) + 1
        for path in drop_files(self._fork):
            groups.dropped |= {drop.group_id for drop in read_drops(path)}
        step_of = {v: version.step for v, version in read_versions(self._parent).items()}
        foreign = self._parent.taken.exists()  # versions of another run, of no history of this one
        for info in self._shards(rows_by_shard):
            for row, name in enumerate(info.group_id):
                groups.places[name] = (int(info.dataset_epoch[row]), int(info.position[row]))
                if name in groups.claimed or name in groups.dropped:
                    continue
                groups.tokens[name] = int(info.n_tokens[row])
                sampled_by = info.version[info.version_offsets[row]:info.version_offsets[row + 1]].tolist()
                if not foreign and any(step_of.get(v, self._step + 1) > self._step for v in sampled_by):
                    groups.fenced.add(name)
        return groups

    def _shards(self, rows_by_shard: Mapping[tuple[str, int], int]) -> Iterator[ShardInfo]:
        """The linked shards that verify, but for those that the past has consumed whole. One that does not verify is
        quarantined when the fork finds it."""
        for stream in stream_names(self._fork.streams):
            for seq, path in numbered(self._fork.stream(stream), SHARD_NAME.pattern):
                try:
                    if rows_by_shard.get((stream, seq)) == int(map_shard(path)[1].get("rl.groups", "0")):
                        continue
                    yield verify_shard(path)
                except ShardCorrupt:
                    continue

    def _drops_from(self, step: int) -> dict[str, Drop]:
        """What the parent has dropped at step N or later, by group."""
        later: dict[str, Drop] = {}
        for k in claimed_steps(self._parent)[step:]:
            later |= {drop.group_id: drop for drop in read_claim(self._parent, k).dropped}
        for k, path in numbered(self._parent.ledger(), r"drops-(\d{9})-\d{6}\.json"):
            later |= {drop.group_id: drop for drop in read_drops(path)} if k >= step else {}
        return later


def place_of(outcome: Outcome) -> Place:
    """Position that the outcome is of."""
    return outcome.dataset_epoch, outcome.position


def _link_if_there(source: Path, target: Path) -> None:
    if source.exists():
        with suppress(FileNotFoundError):  # retired meanwhile
            link_file(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Hard-link the files of a directory; what is removed meanwhile is left out."""
    for parent, _, names in os.walk(source):
        for name in names:
            path = Path(parent) / name
            _link_if_there(path, target / path.relative_to(source))


# -- the start of a fork


def check_replayed(run: RunDir, forked_from: ForkedFrom | None, *, first: int, attempt: int) -> None:
    """Raises ForkDiverged where this attempt replayed a step before the fork, from `first` on, to other weights than
    were recorded: then the fork would not go on from the run that it is a fork of."""
    for step in range(first, forked_from.step if forked_from is not None else first):
        path = run.divergent_record(step, attempt)
        if path.exists():
            now, then = read_json(path), read_record(run, step)
            changed = differing_fields(then.env, now["env"])
            words = "; ".join(f"{name} was {before!r}, is {after!r}" for name, (before, after) in changed.items())
            why = f" (the environment differs: {words})" if changed else " (in the same environment)"
            raise ForkDiverged(f"step {step}, replayed, gave weights {now['weights_digest']}, recorded are "
                               f"{then.weights_digest}{why}. Fork from the step of a checkpoint, where nothing is "
                               "replayed, or put back what differs")
