"""Training on another run's shards: which there are, whether settings agree with them, taking them (offline.md).

    origin/run.json, revisions/, inputs.json, versions/    linked: what the shards were made with
    streams/<as there>/<seq>.arrow                         linked: the shards, where their rewards are kept
    origin/streams/...                                     linked: the shards, until they are scored anew (rescoring.py)
    outcomes/<group id>.json                               linked: how tries ended that a later landed one followed
    origin/taken.json                                      put last: which shards, for good

Before `taken.json` is there nothing is decided, and a start begins anew; behind it no start looks at the other run
again, which may go on, retire its shards, or be gone. Importable without torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from rl_core.combinations import check_baseline_landed, check_rewards_landed
from rl_core.config import CodeConfig, Config
from rl_core.errors import BrokenFile, ConfigError, ShardCorrupt
from rl_core.experience.columns import fixed_values
from rl_core.experience.discovery import SHARD_NAME, run_digests, stream_names
from rl_core.experience.ledger import (
    RetiredRow,
    claims,
    drop_files,
    put_drops,
    put_retired,
    read_drops,
    read_retired,
)
from rl_core.experience.outcomes import outcome_ids
from rl_core.experience.verify import map_shard, shard_key, verify_shard
from rl_core.plan import flatten
from rl_core.revisions import config_of, current_revision, listed
from rl_core.run_dir import RunDir, file_numbers, fsync_dir, link_file, numbered, put_if_absent, read_json, to_json
from rl_core.run_identity import read_identity
from rl_core.types import Drop, group_id, parse_group_id

Place = tuple[int, int]
"""(dataset epoch, position)."""
OF_THE_SHARDS = ("group_size", "sampling.", "data.train", "data.prompt_key", "data.answer_key", "data.max_samples",
                 "data.max_prompt_tokens", "data.overlong", "data.size", "rollout.session")
"""Settings, or beginnings of their names, that the shards were made by."""
OF_THE_REWARD = ("reward", "scoring.signature", "scoring.pattern", "scoring.weight", "scoring.parts",
                 *(f"scoring.code.{name}" for name in CodeConfig.model_fields))


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The shards that a run trains on: `Taken(run_key="sort", run_uuid="4f...", digest="9c...", ...)`."""

    run_key: str
    """Of the run that they are from."""
    run_uuid: str
    digest: str
    """Of the names and digests of all shards."""
    rescored: bool
    """Their rewards are not kept: every answer is scored anew by this run's reward."""
    scored_by: dict[str, Any]
    """Reward settings of this run, by which it trains."""
    groups: int
    """Positions with a landed group."""
    shards: dict[str, str]
    """`"<stream>/<seq>"` there -> digest."""
    superseded: tuple[Drop, ...] = ()
    """Landed tries that a later landed one followed, as that run has dropped them."""
    gone: tuple[tuple[str, int], ...] = ()
    """Shards of the same streams that are not here: retired there, quarantined, or damaged."""
    gone_rows: tuple[RetiredRow, ...] = field(default=())
    """Rows of those that something here tells of."""


def read_taken(run: RunDir) -> Taken | None:
    """None for a run that samples its own shards, or has not taken those of another one yet. Raises BrokenFile."""
    try:
        payload = read_json(run.taken)
    except FileNotFoundError:
        return None
    try:
        return Taken(
            **{name: payload[name] for name in ("run_key", "run_uuid", "digest", "rescored", "scored_by", "groups",
                                                "shards")},
            superseded=tuple(Drop(**drop) for drop in payload["superseded"]),
            gone=tuple((stream, seq) for stream, seq in payload["gone"]),
            gone_rows=tuple(RetiredRow(**row) for row in payload["gone_rows"]))
    except (KeyError, TypeError) as error:
        raise BrokenFile(f"{run.taken}: does not say which shards were taken ({error!r}); restore it") from error


# -- whether settings agree with shards


def check_agreement(source: RunDir, run_key: str, config: Config) -> None:
    """Raises ConfigError naming every setting that shards of the run fix, and that is another one here, and for an
    estimator that needs greedy baselines, or rewards, which they have not. `source`: that run, or what is kept of it.
    """
    made_by = [config_of(source, r) for r in range(current_revision(source) + 1)]
    mine, theirs = flatten(config), flatten(made_by[-1])
    fields = {name: (theirs.get(name), value) for name, value in mine.items()
              if name.startswith(OF_THE_SHARDS) and theirs.get(name) != value}
    if fields:
        raise ConfigError(f"the shards of run {run_key} were made with other settings: {listed(fields)}. Train on them "
                          "with theirs, or sample anew")
    check_baseline_landed(run_key, made_by, config)
    if is_scored_alike(source, config):
        check_rewards_landed(run_key, made_by, config)
    if config.rollout.session is not None and not is_scored_alike(source, config):
        raise ConfigError(f"rollout.session: run {run_key} has sessions, which are scored by their last answers, and "
                          "its answers would be scored anew one by one, by other reward settings; keep those settings")
    if config.greedy_baseline and not is_scored_alike(source, config):
        raise ConfigError(f"learner.advantage.name: remax needs the reward of each prompt's greedy answer, and the "
                          f"answers of run {run_key} would be scored anew, by other reward settings, where the text of "
                          "that one is in no shard; keep the reward settings, or use grpo, rloo or another estimator")


def check_same_inputs(source: RunDir, run_key: str, digests: Mapping[str, str]) -> None:
    """Raises ConfigError naming what of data, tokenizer and chat template is not that which the shards were made with.
    """
    theirs = run_digests(source)
    if other := [name for name in ("data", "tokenizer", "chat_template")
                 if name in digests and name in theirs and digests[name] != theirs[name]]:
        raise ConfigError(f"data.shards_from: {', '.join(other)} of run {run_key} differ from those of these settings "
                          "(by digest), and its shards hold token ids and rows of them; use data.*, the seed, and a "
                          "model with the tokenizer of that run")


def check_steps(config: Config, groups: int) -> None:
    """Raises ConfigError where the run has more steps than these groups make."""
    most = groups // config.groups_per_step
    if config.total_steps > most:
        raise ConfigError(f"total_steps: run {config.data.shards_from} has {groups} landed groups, which make {most} "
                          f"steps of groups_per_step = {config.groups_per_step}; use at most {most} (got "
                          f"{config.total_steps})")


def reward_of(config: Config) -> dict[str, Any]:
    """The settings that a stored reward depends on."""
    leaves = flatten(config)
    return {name: leaves[name] for name in OF_THE_REWARD}


def is_scored_alike(source: RunDir, config: Config) -> bool:
    """Whether every stored reward of the run was made by these reward settings, whatever it was amended by since."""
    return not config.data.rescore and all(reward_of(config_of(source, r)) == reward_of(config)
                                           for r in range(current_revision(source) + 1))


def check_scored_by(taken: Taken, config: Config) -> None:
    """Raises ConfigError for other reward settings than those that the run's shards are scored by."""
    now = reward_of(config)
    if fields := {name: (before, now[name]) for name, before in taken.scored_by.items() if now[name] != before}:
        raise ConfigError(f"the shards of this run are scored already: {listed(fields)}. Another reward needs another "
                          f"--run-key, with --shards-from {taken.run_key}")


def landed_places(run: RunDir) -> int:
    """Positions with a landed group in a shard that is there and not in quarantine. By small columns; not verified."""
    places: set[Place] = set()
    for stream in stream_names(run.streams):
        for seq, path in numbered(run.stream(stream), SHARD_NAME.pattern):
            if run.quarantined(stream, seq).exists():
                continue
            try:
                batch, _ = map_shard(path)
                places.update(zip(fixed_values(batch.column("dataset_epoch")).tolist(),
                                  fixed_values(batch.column("position")).tolist(), strict=True))
            except (ShardCorrupt, FileNotFoundError, KeyError):
                continue
    return len(places)


# -- taking them


def take_shards(parent: RunDir, run: RunDir, config: Config) -> Taken:
    """Take the shards that have landed in the parent now, unless the run has taken some: those stay. Only links are
    made, or copies on another file system; the parent may live and is not touched. For the owner of the run.

    Raises ConfigError where there is nothing to take, BrokenFile, OSError.
    """
    if (taken := read_taken(run)) is not None:
        return taken
    for directory in (run.origin.root, run.streams, run.outcomes):  # of a start that was killed before it decided
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    identity = read_identity(parent)
    _take_settings(parent, run.origin)
    rescored = not is_scored_alike(run.origin, config)
    rows = _Rows()
    missing = _take_streams(parent, run.origin if rescored else run, rows)
    if not rows.shards:
        raise ConfigError(f"data.shards_from: run {identity.run_key} has no shard that can be read")
    superseded = _end_earlier_tries(parent, run, rows)
    told = {drop.group_id for drop in superseded}
    gone_rows = tuple(row for row in read_retired(parent).rows
                      if row.group_id in told and shard_key(row.stream, row.seq) not in rows.shards)
    names = "\n".join(f"{name} {digest}" for name, digest in sorted(rows.shards.items()))
    taken = Taken(run_key=identity.run_key, run_uuid=identity.run_uuid,
                  digest=xxhash.xxh3_128_hexdigest(names.encode()), rescored=rescored, scored_by=reward_of(config),
                  groups=len(rows.last_try), shards=rows.shards, superseded=superseded,
                  gone=tuple(sorted({*missing, *((row.stream, row.seq) for row in gone_rows)})), gone_rows=gone_rows)
    for directory, _, _ in os.walk(run.root, topdown=False):
        fsync_dir(Path(directory))
    put_if_absent(run.taken, to_json(asdict(taken)))
    return taken


def note_what_is_not_taken(run: RunDir, taken: Taken, attempt: int) -> None:
    """Drops of earlier tries, and shards that are not there, in the ledger, where everybody looks for them. Once."""
    if taken.gone and not run.retired(0, 0).exists() and not taken.rescored:
        put_retired(run, 0, taken.gone, taken.gone_rows, attempt=attempt)
    if taken.superseded and not run.drops(0, 0).exists() and not taken.rescored:
        put_drops(run, 0, taken.superseded, attempt=attempt)


@dataclass(slots=True)
class _Rows:
    """What the taken shards hold."""

    shards: dict[str, str] = field(default_factory=dict[str, str])
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Group with a landed row -> its tokens."""
    last_try: dict[Place, tuple[int, int]] = field(default_factory=dict[Place, tuple[int, int]])
    """Place -> (its last landed try, its prompt)."""


def _take_settings(parent: RunDir, origin: RunDir) -> None:
    """What the shards were made with; of a parent that trains on another run's shards, what that one kept of it."""
    made_with = parent.origin if parent.taken.exists() else parent
    for source, target in ((parent.run_json, origin.run_json), (made_with.inputs, origin.inputs)):
        link_file(source, target, or_copy=True)
    for r in range(1, current_revision(parent) + 1):
        link_file(parent.settings(r), origin.settings(r), or_copy=True)
    for v, path in numbered(made_with.versions, r"v-(\d{8})\.json"):
        link_file(path, origin.version(v), or_copy=True)


def _take_streams(parent: RunDir, target: RunDir, rows: _Rows) -> list[tuple[str, int]]:
    """Link every shard that verifies; returns those that are not there, before the last one of their stream."""
    missing: list[tuple[str, int]] = []
    for stream in stream_names(parent.streams):
        listed_seqs = file_numbers(parent.stream(stream), SHARD_NAME.pattern)
        absent: list[tuple[str, int]] = []
        for seq in range(max(listed_seqs, default=-1) + 1):
            if _take_shard(parent, target, stream, seq, rows):
                missing, absent = missing + absent, []
            else:
                absent.append((stream, seq))
    return missing


def _take_shard(parent: RunDir, target: RunDir, stream: str, seq: int, rows: _Rows) -> bool:
    path = target.shard(stream, seq)
    if parent.quarantined(stream, seq).exists():
        return False
    try:
        link_file(parent.shard(stream, seq), path, or_copy=True)
        info = verify_shard(path)
    except FileNotFoundError:  # retired
        return False
    except ShardCorrupt:
        path.unlink()
        return False
    rows.shards[shard_key(stream, seq)] = info.shard_digest
    for row, name in enumerate(info.group_id):
        rows.tokens[name] = int(info.n_tokens[row])
        place = (int(info.dataset_epoch[row]), int(info.position[row]))
        tried = (int(info.try_no[row]), int(info.prompt_idx[row]))
        rows.last_try[place] = max(rows.last_try.get(place, (-1, 0)), tried)
    return True


def _end_earlier_tries(parent: RunDir, run: RunDir, rows: _Rows) -> tuple[Drop, ...]:
    """Of each position the last landed try is trained. Those before it ended in the parent: outcomes are linked, landed
    ones are returned as drops, for the parent's reason."""
    earlier = [group_id(epoch, prompt_idx, try_no) for (epoch, _), (last, prompt_idx) in rows.last_try.items()
               for try_no in range(last)]
    if not earlier:
        return ()
    ended, reasons = set(outcome_ids(parent)), _drops(parent)
    for name in ended.intersection(earlier):
        link_file(parent.outcome(name), run.outcome(name), or_copy=True)
    return tuple(reasons.get(name) or Drop(group_id=name, reason="stale", n_tokens=rows.tokens[name])
                 for name in sorted(earlier, key=parse_group_id)
                 if name not in ended and (name in rows.tokens or name in reasons))


def _drops(run: RunDir) -> dict[str, Drop]:
    found = {drop.group_id: drop for claim in claims(run) for drop in claim.dropped}
    for path in drop_files(run):
        found |= {drop.group_id: drop for drop in read_drops(path)}
    return found
