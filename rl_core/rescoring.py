"""Scoring landed answers anew: each taken shard is landed once more, with other rewards, in a stream of this run.

    origin/streams/<stream>/<seq>.arrow  --score-->  streams/rescored-<12 hex>/<seq>.arrow   (`rl.origin` in it)
    origin/rescored.json                             put when all are: which shard has taken the place of which

Shards are immutable, so new rewards are new shards, with digests of their own, that claims name like any others. What
has landed is not scored again after a kill. An answer that cannot be scored fails its group, by a recorded outcome:
it is never a reward of 0. Importable without torch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from rl_core.config import Config
from rl_core.errors import BrokenFile, FailureBudgetSpent, RewardError, ShardCorrupt
from rl_core.experience.batch import score_columns
from rl_core.experience.columns import list_values, token_values
from rl_core.experience.discovery import SHARD_NAME, stream_names
from rl_core.experience.outcomes import outcome_ids, put_outcome
from rl_core.experience.schema import cached_schema
from rl_core.experience.shards import ShardWriter
from rl_core.experience.verify import DIGEST_PREFIX, map_shard, shard_key, verified_batch
from rl_core.offline import Taken
from rl_core.run_dir import RunDir, check_attempt, numbered, put_if_absent, read_json, to_json
from rl_core.types import FINISH_CODES, Outcome, Prompt, Score, parse_group_id

STREAM = "rescored"
ORIGIN = "rl.origin"
"""In the metadata of a rescored shard: the shard that it has taken the place of, as `<stream>/<seq>`."""
ORIGIN_DIGEST = "rl.origin.digest"


class Scorer(Protocol):
    def __call__(self, prompt: Prompt, text: str) -> Score: ...


class Prompts(Protocol):
    def of_index(self, idx: int, dataset_epoch: int, position: int) -> Prompt: ...


class Tokenizer(Protocol):
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


def rescored_shards(run: RunDir) -> dict[str, str | None]:
    """Taken shard -> the one in its place, None where no group of it could be scored. Raises FileNotFoundError before
    all are scored."""
    return read_json(run.rescored)["shards"]


@dataclass(kw_only=True)
class Rescoring:
    """`Rescoring(run=..., ...).finish()`: one start's work. `progress(done, total)` counts shards; `check` raises what
    shall end it from outside."""

    run: RunDir
    config: Config
    taken: Taken
    attempt: int
    prompts: Prompts
    tokenizer: Tokenizer
    scorer: Scorer
    progress: Callable[[int, int], None] = lambda done, total: None
    check: Callable[[], None] = lambda: None
    _failures: int = field(default=0, init=False)
    """Answers in a row that could not be scored."""
    _superseded: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Group that a later try followed -> why it was dropped."""
    _ended: set[str] = field(default_factory=set[str], init=False)
    """Groups with an outcome."""

    def finish(self) -> dict[str, str | None]:
        """Score what is not scored yet. Returns which shard has taken the place of which.

        Raises FailureBudgetSpent where too many calls in a row failed, BrokenFile for a taken shard that has rotted,
        StaleAttempt, and what `check` raises.
        """
        if self.run.rescored.exists():
            return rescored_shards(self.run)
        self._superseded = {drop.group_id: drop.reason for drop in self.taken.superseded}
        self._ended = set(outcome_ids(self.run))
        for row in self.taken.gone_rows:
            self._supersede(row.group_id, row.dataset_epoch, row.position)
        placed: dict[str, str | None] = dict(_landed(self.run))
        writer = ShardWriter(self.run, STREAM, self.attempt, {}, self.config.storage.fsync)
        with ThreadPoolExecutor(self.config.scoring.workers, thread_name_prefix="rescore") as threads:
            for done, key in enumerate(self.taken.shards):
                self.progress(done, len(self.taken.shards))
                if key not in placed:
                    placed[key] = self._place(key, writer, threads)
        self.progress(len(self.taken.shards), len(self.taken.shards))
        if not writer.next_seq:
            shutil.rmtree(self.run.stream(writer.stream), ignore_errors=True)
        shards = {key: placed[key] for key in self.taken.shards}
        put_if_absent(self.run.rescored, to_json({"shards": shards, "attempt": self.attempt}))
        shutil.rmtree(self.run.origin.streams, ignore_errors=True)
        return shards

    def _place(self, key: str, writer: ShardWriter, threads: ThreadPoolExecutor) -> str | None:
        """Land one taken shard with new rewards; returns the name of the new one."""
        stream, seq = key.rsplit("/", 1)
        path = self.run.origin.shard(stream, int(seq))
        try:
            batch, meta, digest = verified_batch(path)
        except (ShardCorrupt, FileNotFoundError) as error:
            raise BrokenFile(f"{error}: it was taken from run {self.taken.run_key}, and is not scored yet; begin "
                             "another run with --shards-from") from error
        if digest != self.taken.shards[key]:
            raise BrokenFile(f"{path}: has digest {digest}, was taken with {self.taken.shards[key]}")
        scores_G = self._scores(batch, threads)
        check_attempt(self.run, self.attempt)
        kept = [scores is not None for scores in scores_G]
        if not any(kept):
            return None
        scored = with_scores(batch if all(kept) else batch.filter(pa.array(kept)), [s for s in scores_G if s])
        new = shard_key(writer.stream, writer.next_seq)
        writer.land_batch(scored, tuple(scored.column("group_id").to_pylist()), {
            ORIGIN: key, ORIGIN_DIGEST: digest, **{k: v for k, v in meta.items() if k.startswith(DIGEST_PREFIX)}})
        return new

    def _scores(self, batch: pa.RecordBatch, threads: ThreadPoolExecutor) -> list[list[Score] | None]:
        """Scores of each group's answers; None for a group that has ended without any, which is on record."""
        outer, inner, ids = token_values(batch.column("response_ids"))
        _, finish_N = list_values(batch.column("finish_reason"))
        names = batch.column("group_id").to_pylist()
        places = [batch.column(name).to_pylist() for name in ("prompt_idx", "dataset_epoch", "position")]
        scores_G: list[list[Score] | None] = []
        for g, name in enumerate(names):
            self.check()
            idx, epoch, position = (column[g] for column in places)
            if name in self._superseded:
                self._supersede(name, epoch, position)
            if name in self._ended:
                scores_G.append(None)
                continue
            prompt = self.prompts.of_index(idx, epoch, position)
            texts = [self._text(ids[inner[j]:inner[j + 1]], int(finish_N[j])) for j in range(outer[g], outer[g + 1])]
            found = list(threads.map(partial(self._score, prompt), texts))
            failed = [answer for answer in found if isinstance(answer, RewardError)]
            if failed:
                self._end(name, epoch, position, failed[0].reason, str(failed[0]))
            self._count(found)
            scores_G.append(None if failed else [answer for answer in found if isinstance(answer, Score)])
        return scores_G

    def _text(self, token_ids: Any, finish: int) -> str:
        """The text that is scored: decoded as for a fresh answer, a stop string that ended it trimmed."""
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        hits = [(text.find(stop), stop) for stop in self.config.sampling.stop if stop in text]
        if not hits or finish != FINISH_CODES["stop"]:
            return text
        return text[:text.rfind(min(hits)[1])]

    def _score(self, prompt: Prompt, text: str) -> Score | RewardError:
        error = RewardError("not scored")
        for _ in range(self.config.failure.trajectory_tries):
            try:
                score = self.scorer(prompt, text)
                if not math.isfinite(np.float32(score.reward)):
                    raise RewardError(f"reward {score.reward} is no finite float32")
                return score
            except RewardError as failed:
                error = failed
        return error

    def _count(self, found: Sequence[Score | RewardError]) -> None:
        """Raises FailureBudgetSpent where too many answers in a row could not be scored."""
        for answer in found:
            self._failures = self._failures + 1 if isinstance(answer, RewardError) else 0
            if self._failures >= self.config.failure.reward_failures:
                raise FailureBudgetSpent(f"{self._failures} answers in a row could not be scored anew "
                                         f"(failure.reward_failures); the last one: {answer}")

    def _supersede(self, name: str, epoch: int, position: int) -> None:
        self._end(name, epoch, position, self._superseded[name],
                  f"dropped by run {self.taken.run_key}; a later try has landed")

    def _end(self, name: str, epoch: int, position: int, reason: str, error: str) -> None:
        put_outcome(self.run, Outcome(group_id=name, kind="failed", reason=reason, error=error,
                                      try_no=parse_group_id(name)[2], position=position, dataset_epoch=epoch))
        self._ended.add(name)


def _landed(run: RunDir) -> dict[str, str]:
    """Taken shard -> the one that has landed in its place, by earlier starts."""
    found: dict[str, str] = {}
    for stream in stream_names(run.streams):
        for seq, _ in numbered(run.stream(stream), SHARD_NAME.pattern):
            if (key := origin_of(run, stream, seq)) is not None:
                found.setdefault(key, shard_key(stream, seq))
    return found


def origin_of(run: RunDir, stream: str, seq: int) -> str | None:
    """The taken shard that this one has taken the place of; None where it says nothing, or cannot be read."""
    try:
        return map_shard(run.shard(stream, seq))[1].get(ORIGIN)
    except (ShardCorrupt, FileNotFoundError):
        return None


def with_scores(batch: pa.RecordBatch, scores_G: Sequence[Sequence[Score]]) -> pa.RecordBatch:
    """The rows of a shard with these scores in place of the stored ones. Rewards of tokens and of a baseline's answer,
    which were of the former reward and whose texts are not here, are null."""
    parts = tuple(sorted({name for scores in scores_G for score in scores for name in score.parts}))
    new, schema = score_columns(scores_G, parts), cached_schema(parts)
    new |= {name: pa.nulls(batch.num_rows, schema.field(name).type) for name in ("token_reward", "baseline_reward")}
    more = [field for field in batch.schema if field.name not in schema.names]
    whole = pa.schema([*schema, *more])
    return pa.RecordBatch.from_arrays([new[name] if name in new else batch.column(name) for name in whole.names],
                                      schema=whole)
