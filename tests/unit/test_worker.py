"""The rollout worker: leases become landed groups or named outcomes, whatever engine and reward do."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.errors import (
    DeadPart,
    FailureBudgetSpent,
    RewardError,
    RewardNegative,
    RewardTimeout,
    WeightsDamaged,
    WorkerDead,
)
from rl_core.experience.outcomes import outcome_ids, read_outcome
from rl_core.experience.shards import verify_shard
from rl_core.experience.verify import map_shard
from rl_core.model_setup import set_up_model
from rl_core.rollout.assembly import sampling_seed
from rl_core.rollout.encoder import Limits
from rl_core.rollout.group_filter import GroupFilter
from rl_core.rollout.prompts import PromptSource, Tokenizer, load_tokenizer
from rl_core.rollout.rewards.exact import exact
from rl_core.rollout.rewards.scoring import InlineScorer, Scorer
from rl_core.rollout.sessions import SessionFunction
from rl_core.rollout.worker import RolloutWorker, open_worker
from rl_core.run_dir import RunDir
from rl_core.spans import SPANS, as_spans
from rl_core.tokenizer import VOCABULARY, write_tokenizer
from rl_core.types import (
    Completion,
    GenerateRequest,
    Lease,
    Prompt,
    Sampling,
    Score,
    VersionRuns,
    WeightVersion,
    WorkerEvents,
    group_id,
)
from rl_core.weights import publish, read_tensors

END = VOCABULARY.index("<|im_end|>")
Script = Callable[[GenerateRequest, int], "Completion | Exception | None"]
"""What the engine answers to a request at version v; None = never."""


def version(idx: int, v: int | None = None) -> WeightVersion:
    return WeightVersion(v=idx if v is None else v, step=idx, idx=idx, attempt=1, digest=f"digest-{idx}")


def completion(request: GenerateRequest, text: str, *, runs: tuple[tuple[int, int], ...] = (), v: int = 0,
               finish: Any = "stop", logprob: float = -0.5) -> Completion:
    """`text` and the end token, sampled by version v, or by the given (end, version) runs."""
    ids = [VOCABULARY.index(character) for character in text] + [END]
    pairs = runs or ((len(ids), v),)
    return Completion(request_id=request.request_id, token_ids_L=np.array(ids, np.int32),
                      logprobs_L=np.full(len(ids), logprob, np.float32), finish_reason=finish,
                      version_runs=VersionRuns(end_R=np.array([end for end, _ in pairs], np.int32),
                                               version_R=np.array([value for _, value in pairs], np.int32)))


class ScriptedEngine:
    """The Engine protocol by a script: answers come on its own thread, in order of submission, once `go` is set."""

    def __init__(self, script: Script) -> None:
        self._script, self.go = script, threading.Event()
        self.go.set()
        self.seen: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.served: WeightVersion | None = None
        self._open: dict[str, tuple[GenerateRequest, Future[Completion]]] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return len(self._open)

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        with self._lock:
            self.seen.append(request)
            self._open[request.request_id] = (request, future)
        self._queue.put(request.request_id)
        return future

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            request, future = self._open.pop(request_id, (None, None))
        if request is not None and future is not None:
            future.set_result(completion(request, "1", finish="cancelled"))

    def swap(self, version: WeightVersion, weights_dir: Path) -> str:
        self.served = version
        return version.digest

    def counters(self) -> dict[str, dict[str, float]]:
        return {"server-0": {"tokens": 3.0}}

    def close(self) -> None:
        self.go.set()
        self._queue.put(None)
        self._thread.join(1)
        for request_id in list(self._open):
            self.cancel(request_id)

    def _answer(self) -> None:
        while (request_id := self._queue.get()) is not None:
            self.go.wait(10)
            with self._lock:
                request, future = self._open.get(request_id, (None, None))
            if request is None or future is None or self.served is None:
                continue
            answer = self._script(request, self.served.v)
            if answer is None:
                continue
            with self._lock:
                self._open.pop(request_id, None)
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class ScriptedScorer:
    """Exact match, but for texts with an entry in `failures`."""

    def __init__(self, **failures: RewardError) -> None:
        self._failures = failures

    def __call__(self, prompt: Prompt, text: str) -> Score:
        if text in self._failures:
            raise self._failures[text]
        return exact(prompt, text)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 256)
    return load_tokenizer(directory)


class Stage:
    """A worker over a scripted engine in a run directory of its own."""

    def __init__(self, run: RunDir, tokenizer: Tokenizer, script: Script, *, scorer: Scorer | None = None,
                 group_filter: GroupFilter | None = None, session: SessionFunction | None = None,
                 **settings: Any) -> None:
        self.run = run
        self.config = Config.model_validate({"storage": {"fsync": False}, **settings})
        self.engine = ScriptedEngine(script)
        self.worker = RolloutWorker(run, self.config, name="rollout-0", attempt=3, engine=self.engine,
                                    tokenizer=tokenizer, scorer=scorer or InlineScorer(exact),
                                    digests={"model": "abc"}, group_filter=group_filter, session=session)

    def until(self, *, landed: int = 0, outcomes: int = 0, deadline_s: float = 5.0) -> WorkerEvents:
        """All events until so many groups landed and so many ended; asserts that no more came."""
        seen: list[WorkerEvents] = []
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            seen.append(self.worker.events(0.05))
            groups = [g for events in seen for hint in events.landed for g in hint.group_ids]
            ended = [outcome for events in seen for outcome in events.outcomes]
            if len(groups) >= landed and len(ended) >= outcomes:
                break
        events = WorkerEvents(status=seen[-1].status, landed=tuple(h for e in seen for h in e.landed),
                              outcomes=tuple(o for e in seen for o in e.outcomes),
                              cancelled=tuple(c for e in seen for c in e.cancelled))
        assert sum(len(hint.group_ids) for hint in events.landed) == landed
        assert len(events.outcomes) == outcomes, events.outcomes
        return events

    def rows(self) -> dict[str, dict[str, Any]]:
        """Every landed row by group id; every shard is verified."""
        rows: dict[str, dict[str, Any]] = {}
        for path in sorted(self.run.streams.glob("*/*.arrow")):
            verify_shard(path)
            rows |= {row["group_id"]: row for row in map_shard(path)[0].to_pylist()}
        return rows


@pytest.fixture
def stage(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(script: Script, *, idx: int = 0, **settings: Any) -> Stage:
        made.append(Stage(RunDir(tmp_path), tokenizer, script, **settings))
        made[-1].worker.swap(version(idx))
        return made[-1]

    yield make
    for each in made:
        start = time.monotonic()
        each.worker.close()
        assert time.monotonic() - start < 2.0


def lease(position: int = 0, *, n: int = 4, try_no: int = 0, min_group: int = 2) -> Lease:
    prompt = Prompt(dataset_epoch=0, position=position, prompt_idx=position, token_ids_P=np.arange(6, dtype=np.int32),
                    answer="123", data_source="sort", columns={"prompt": "sort 321"})
    return Lease(prompt=prompt, try_no=try_no, lease_no=position + 10, idx_dispatch=0, n_expected=n,
                 min_group=min_group, sampling=Sampling(max_new_tokens=8), attempt=3)


def response_and_try(request: GenerateRequest) -> tuple[int, int]:
    _, response, try_no, _ = request.request_id.split("/")
    return int(response), int(try_no)


def right(request: GenerateRequest, v: int) -> Completion:
    return completion(request, "123", v=v)


# -- landing


def test_a_lease_lands_as_one_whole_row(stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        return completion(request, ("123", "321", "1", "123")[response_and_try(request)[0]], v=v)

    s = stage(script, idx=5)
    before = time.time_ns() // 1000
    s.worker.lease([lease(7)])
    events = s.until(landed=1)
    assert events.landed[0].stream == events.status.stream and events.landed[0].group_ids == ("e0-p7-t0",)
    assert events.status.in_flight == () and events.status.running == 0
    assert events.status.tokens_generated == 4 + 4 + 2 + 4 and events.status.tokens_wasted == 0
    row = s.rows()["e0-p7-t0"]
    assert row["reward"] == row["correct"] == [1.0, 0.0, 0.0, 1.0]
    assert row["extracted"] == ["123", "321", "1", "123"]
    assert [len(ids) for ids in row["response_ids"]] == [4, 4, 2, 4] and row["response_ids"][2][-1] == END
    assert row["ver_run_end"] == [[4], [4], [2], [4]] and row["ver_run_value"] == [[5]] * 4
    assert (row["idx_min"], row["idx_max"], row["lease_no"], row["n_responses"]) == (5, 5, 17, 4)
    assert row["behavior_logprobs"][2] == [-0.5, -0.5] and row["loss_mask"][2] == [1, 1]
    assert row["sampling_seed"] == [sampling_seed(1, "e0-p7-t0", response, 0) for response in range(4)]
    dispatched, finished = (int(row[name].timestamp() * 1e6) for name in ("dispatched_at", "finished_at"))
    assert before - 1000 <= dispatched <= finished + 1
    info = verify_shard(s.run.shard(events.landed[0].stream, 0))
    assert info.digests == {"model": "abc"}


FILTER = """
import time

def mixed(group):
    if group["group_id"] == "e0-p2-t0":
        raise ValueError("not this one")
    if group["group_id"] == "e0-p3-t0":
        time.sleep(60)
    return True if group["rewards"] == [1.0, 0.0] else "all_alike"
"""


def test_a_group_that_the_filter_leaves_out_ends_with_its_reason_and_does_not_land(
        stage: Callable[..., Stage], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILTER)

    def script(request: GenerateRequest, v: int) -> Completion:
        wrong = request.request_id.startswith("e0-p0") and response_and_try(request)[0] == 1
        return completion(request, "321" if wrong else "123", v=v)

    s = stage(script, group_filter=GroupFilter("./mine.py:mixed", cwd=tmp_path, deadline_s=1.0))
    s.worker.lease([lease(i, n=2) for i in range(4)])
    events = s.until(landed=1, outcomes=3, deadline_s=20.0)
    ended = {outcome.group_id: outcome for outcome in events.outcomes}
    assert s.rows().keys() == {"e0-p0-t0"} and events.status.in_flight == ()
    assert [(ended[f"e0-p{i}-t0"].kind, ended[f"e0-p{i}-t0"].reason) for i in (1, 2, 3)] == [
        ("filtered", "all_alike"), ("failed", "filter_error"), ("failed", "filter_timeout")]
    assert "not this one (mine.py:6)" in ended["e0-p2-t0"].error and "no answer within 1 s" in ended["e0-p3-t0"].error
    assert events.status.tokens_wasted == 3 * 8 and read_outcome(s.run, "e0-p1-t0").tokens_wasted == 8
    s.worker.lease([lease(5, n=2)])  # a filter that hung is asked again, in a process of its own
    assert s.until(outcomes=1, deadline_s=20.0).outcomes[0].reason == "all_alike"


def test_every_request_has_a_seed_and_a_name_of_its_own(stage: Callable[..., Stage]) -> None:
    s = stage(right)
    s.worker.lease([lease(0), lease(1), lease(1, try_no=1)])
    s.until(landed=3)
    assert len({request.seed for request in s.engine.seen}) == 12
    assert len({request.request_id for request in s.engine.seen}) == 12


def test_a_lease_given_twice_is_one_group(stage: Callable[..., Stage]) -> None:
    s = stage(right)
    s.worker.lease([lease(0)])
    s.worker.lease([lease(0)])
    s.until(landed=1)
    s.worker.lease([lease(0)])
    assert s.worker.events(0.1).status.in_flight == () and len(s.engine.seen) == 4


def test_groups_that_finish_together_share_a_shard(stage: Callable[..., Stage]) -> None:
    s = stage(right)
    s.engine.go.clear()
    s.worker.lease([lease(i) for i in range(32)])
    assert len(s.worker.status().in_flight) == 32 and s.worker.status().running == 128
    s.engine.go.set()
    events = s.until(landed=32)
    assert len(s.rows()) == 32
    assert sorted(g for hint in events.landed for g in hint.group_ids) == sorted(group_id(0, i, 0) for i in range(32))


def test_versions_of_a_mixed_answer_are_kept(stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        mixed = response_and_try(request)[0] > 0
        return completion(request, "123", runs=((1, 0), (3, 9), (4, 11)) if mixed else ((4, 11),))

    s = stage(script)
    s.worker.swap(version(2, v=9))
    assert s.worker.swap(version(3, v=11)) == "digest-3"
    s.worker.lease([lease(0)])
    s.until(landed=1)
    row = s.rows()["e0-p0-t0"]
    assert (row["idx_min"], row["idx_max"]) == (0, 3)
    assert row["ver_run_end"] == [[4], [1, 3, 4], [1, 3, 4], [1, 3, 4]]
    assert row["ver_run_value"] == [[11], [0, 9, 11], [0, 9, 11], [0, 9, 11]]


# -- a greedy baseline

REMAX: dict[str, Any] = {"learner": {"advantage": {"name": "remax"}}}


def is_greedy(request: GenerateRequest) -> bool:
    return request.request_id.split("/")[1] == "greedy"


def test_a_greedy_answer_beside_the_group_lands_as_its_baseline_and_nothing_else_of_it(
        stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        return completion(request, "1234567" if is_greedy(request) else "123")

    s = stage(script, scorer=InlineScorer(lambda prompt, text: Score(reward=len(text) / 4)), **REMAX)
    s.worker.lease([lease(0), lease(1)])
    events = s.until(landed=2)
    asked = [request for request in s.engine.seen if is_greedy(request)]
    assert [(r.request_id, r.trained, r.sampling) for r in asked] == [
        (f"e0-p{i}-t0/greedy/0/{i}", False, Sampling(temperature=0.0, max_new_tokens=8)) for i in range(2)]
    assert all(r.trained and r.sampling.temperature == 1.0 for r in s.engine.seen if not is_greedy(r))
    row = s.rows()["e0-p0-t0"]
    assert (row["baseline_reward"], row["reward"], row["n_responses"]) == (1.75, [0.75] * 4, 4)
    assert '"greedy_tokens": 8' in row["meta_json"] and row["n_tokens"] == 6 + 4 * 4
    status = events.status
    assert (status.tokens_generated, status.tokens_wasted, status.tokens_greedy) == (2 * 24, 2 * 8, 2 * 8)


def test_without_an_estimator_that_needs_it_there_is_no_greedy_answer(stage: Callable[..., Stage]) -> None:
    s = stage(right)
    s.worker.lease([lease(0)])
    s.until(landed=1)
    assert s.rows()["e0-p0-t0"]["baseline_reward"] is None and not any(map(is_greedy, s.engine.seen))
    assert s.worker.status().tokens_greedy == 0


def test_a_greedy_answer_that_fails_is_tried_again_and_a_group_without_one_does_not_land(
        stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        group, _, try_no, _ = request.request_id.split("/")
        return completion(request, "666" if is_greedy(request) and (group == "e0-p1-t0" or try_no == "0") else "123")

    s = stage(script, scorer=ScriptedScorer(**FAILURES), **REMAX)
    s.worker.lease([lease(0), lease(1)])
    (outcome,) = s.until(landed=1, outcomes=1).outcomes
    assert s.rows()["e0-p0-t0"]["baseline_reward"] == 1.0
    assert (outcome.group_id, outcome.kind, outcome.reason) == ("e0-p1-t0", "failed", "reward_error")
    tries = s.config.failure.trajectory_tries
    assert outcome.tokens_wasted == 4 * 4 + tries * 4, "its answers, and every try of the greedy one"
    assert s.worker.status().tokens_wasted == outcome.tokens_wasted + 2 * 4


def test_a_group_past_its_deadline_without_its_greedy_answer_fails(stage: Callable[..., Stage]) -> None:
    s = stage(lambda request, v: None if is_greedy(request) else completion(request, "123"),
              deadlines={"group_s": 0.3}, **REMAX)
    s.worker.lease([lease(0)])
    (outcome,) = s.until(outcomes=1).outcomes
    assert outcome.error == "1 of 5 answers were not there after 0.3 s (deadlines.group_s)"
    assert s.engine.cancelled == ["e0-p0-t0/greedy/0/0"] and s.rows() == {}


# -- more answers than land

def test_the_first_answers_that_finish_land_and_the_others_are_cancelled(stage: Callable[..., Stage]) -> None:
    slow = {0, 3}

    def script(request: GenerateRequest, v: int) -> Completion | None:
        response, _ = response_and_try(request)
        return None if response in slow else completion(request, str(response))

    s = stage(script, rollout={"over_sampling": 2})
    s.worker.lease([lease(0)])
    events = s.until(landed=1)
    row = s.rows()["e0-p0-t0"]
    assert row["extracted"] == ["1", "2", "4", "5"] and (row["n_responses"], row["n_expected"]) == (4, 4)
    assert sorted(s.engine.cancelled) == ["e0-p0-t0/0/0/0", "e0-p0-t0/3/0/0"]
    assert events.status.tokens_wasted == 2 * 2, "what they had when they were cancelled"


def test_more_answers_than_land_take_the_places_of_those_that_fail(stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        return completion(request, "666" if response_and_try(request)[0] < 3 else "123")

    s = stage(script, scorer=ScriptedScorer(**FAILURES), rollout={"over_sampling": 2})
    s.worker.lease([lease(0, min_group=4), lease(1, min_group=3)])
    (outcome,) = s.until(landed=1, outcomes=1).outcomes
    assert (outcome.group_id, outcome.reason) == ("e0-p0-t0", "reward_error"), "three of six make no group of four"
    assert s.rows()["e0-p1-t0"]["n_responses"] == 3


# -- sessions of several answers

SESSION = """
def again(session):
    if session["answers"][-1] == "666":
        raise ValueError("no such answer")
    if len(session["answers"]) == 2:
        return None
    return session["prompts"][0] + " not " + session["answers"][0] if session["answers"] != ["123"] else None

def for_ever(session):
    return "sort " + str(len(session["answers"]))

def too_long(session):
    return "1" * 99
"""


@pytest.fixture
def again(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[str], SessionFunction]:
    (tmp_path / "mine.py").write_text(SESSION)
    return lambda name: SessionFunction(f"./mine.py:{name}", cwd=tmp_path, deadline_s=20.0, tokenizer=tokenizer,
                                        limits=Limits(max_tokens=64))


def test_a_session_goes_on_with_what_the_function_asks_and_its_answers_have_one_score(
        stage: Callable[..., Stage], again: Callable[[str], SessionFunction], tokenizer: Tokenizer) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        response, try_no = response_and_try(request)
        return completion(request, ("123", "3" if try_no == 0 else "123", "32", "1")[response])

    s = stage(script, session=again("again"))
    s.worker.lease([lease(0)])
    s.until(landed=1, deadline_s=30.0)
    row = s.rows()["e0-p0-t0"]
    assert row["x_session"] == [0, 1, 1, 2, 2, 3, 3] and row["n_responses"] == 7 and row["n_expected"] == 4
    assert row["reward"] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0] and row["finish_reason"] == [0] * 7
    asked = [tokenizer.decode(ids, skip_special_tokens=True) for ids in row["response_prompt_ids"]]
    assert row["response_prompt_ids"][0] == row["response_prompt_ids"][1] == row["prompt_ids"] == list(range(6))
    assert ["sort 321 not 3" in asked[2], "sort 321 not 32" in asked[4], "sort 321 not 1" in asked[6]] == [True] * 3
    assert row["sampling_seed"] == [sampling_seed(1, "e0-p0-t0", r, t) for r, t in (
        (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))]
    assert row["n_tokens"] == 6 + sum(map(len, row["response_ids"])) + sum(
        len(row["response_prompt_ids"][i]) for i in (2, 4, 6))


def test_the_greedy_baseline_is_a_session_too_and_sessions_end_at_the_most_answers(
        stage: Callable[..., Stage], again: Callable[[str], SessionFunction]) -> None:
    s = stage(right, session=again("for_ever"), rollout={"session_answers": 3}, **REMAX)
    s.worker.lease([lease(0, n=2)])
    events = s.until(landed=1, deadline_s=30.0)
    row = s.rows()["e0-p0-t0"]
    assert row["x_session"] == [0, 0, 0, 1, 1, 1] and row["baseline_reward"] == 1.0
    assert (events.status.tokens_greedy, events.status.tokens_wasted) == (3 * 4, 3 * 4)


def test_a_session_whose_function_fails_is_sampled_again_and_lost_with_all_its_answers(
        stage: Callable[..., Stage], again: Callable[[str], SessionFunction]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        response, try_no = response_and_try(request)
        return completion(request, "666" if response == 0 and try_no > 0 else "32")

    s = stage(script, session=again("again"))
    s.worker.lease([lease(0, n=2, min_group=1), lease(1, n=2, min_group=2)])
    (outcome,) = s.until(landed=1, outcomes=1, deadline_s=30.0).outcomes
    assert (outcome.group_id, outcome.reason) == ("e0-p1-t0", "session_error")
    assert "no such answer (mine.py:4)" in outcome.error
    row, tries = s.rows()["e0-p0-t0"], s.config.failure.trajectory_tries
    assert row["x_session"] == [0, 0] and row["n_expected"] == 2, "a partial group, of the session that ended"
    lost = 3 + 4 * tries  # its first answer, and every try of the second
    assert outcome.tokens_wasted == lost + 6 and s.worker.status().tokens_wasted == 2 * lost + 6


def test_what_is_asked_next_and_has_too_many_tokens_is_an_error_of_the_function(
        stage: Callable[..., Stage], again: Callable[[str], SessionFunction]) -> None:
    s = stage(right, session=again("too_long"), failure={"trajectory_tries": 1})
    s.worker.lease([lease(0, n=2)])
    (outcome,) = s.until(outcomes=1, deadline_s=30.0).outcomes
    assert outcome.reason == "session_error" and "at most data.max_prompt_tokens = 64" in outcome.error


# -- a failed trajectory is tried again, its siblings are kept


def no_token(request: GenerateRequest) -> Completion:
    """An answer that ended before its first token, its end token included."""
    none, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return replace(completion(request, ""), token_ids_L=none, logprobs_L=floats,
                   version_runs=VersionRuns(end_R=none, version_R=none))


BAD_ANSWERS: dict[str, tuple[Callable[[GenerateRequest], Completion | Exception], str]] = {
    "engine error": (lambda r: RuntimeError("no memory"), "engine_error"),
    "no version": (lambda r: completion(r, "123", runs=((3, 0),)), "sample_refused"),
    "unknown version": (lambda r: completion(r, "123", v=99), "sample_refused"),
    "index runs backwards": (lambda r: completion(r, "123", runs=((2, 1), (4, 0))), "sample_refused"),
    "no token": (lambda r: no_token(r), "sample_refused"),
    "log-prob is minus infinity": (lambda r: completion(r, "123", logprob=-math.inf), "sample_refused"),
    "log-prob is NaN": (lambda r: completion(r, "123", logprob=float("nan")), "sample_refused"),
    "log-prob above 0": (lambda r: completion(r, "123", logprob=0.5), "sample_refused"),
    "cancelled by nobody": (lambda r: completion(r, "123", finish="cancelled"), "sample_refused"),
    "reward raises": (lambda r: completion(r, "666"), "reward_error"),
    "reward hangs": (lambda r: completion(r, "777"), "reward_timeout"),
    "reward below 0 under maxrl": (lambda r: completion(r, "888"), "reward_negative"),
}
FAILURES = {"666": RewardError("reward f: raised"), "777": RewardTimeout("reward f: no answer"),
            "888": RewardNegative("the reward is -1")}


@pytest.mark.parametrize(("bad", "reason"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_failed_answer_is_tried_again_while_its_siblings_are_kept(
        bad: Callable[[GenerateRequest], Completion | Exception], reason: str, stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion | Exception:
        response, try_no = response_and_try(request)
        return bad(request) if response == 1 and try_no < 2 else completion(request, "12", v=1)

    s = stage(script, scorer=ScriptedScorer(**FAILURES))
    s.worker.swap(version(1))
    s.worker.lease([lease(0)])
    s.until(landed=1)
    assert sorted(response_and_try(r) for r in s.engine.seen) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0)]
    row = s.rows()["e0-p0-t0"]
    assert row["reward"] == [0.0] * 4 and row["n_responses"] == 4
    assert row["sampling_seed"][1] == sampling_seed(1, "e0-p0-t0", 1, 2), "of the try that landed"
    assert f'"failures": 2, "last_failure": "{reason}", "failed": {{"{reason}": 2}}' in row["meta_json"]
    failed = [r for r in s.engine.seen if response_and_try(r)[0] == 1][:2]
    expected = sum(len(c.token_ids_L) for r in failed if isinstance(c := bad(r), Completion))
    assert s.worker.status().tokens_wasted == expected


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_tries_that_are_used_up_make_a_partial_group_or_an_outcome(lost: int, stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        return completion(request, "666" if response_and_try(request)[0] < lost else "123")

    s = stage(script, scorer=ScriptedScorer(**FAILURES))
    s.worker.lease([lease(0, n=4, min_group=2)])
    if lost <= 2:
        s.until(landed=1)
        row = s.rows()["e0-p0-t0"]
        assert (row["n_responses"], row["n_expected"], row["reward"]) == (4 - lost, 4, [1.0] * (4 - lost))
        assert outcome_ids(s.run) == []
    else:
        (outcome,) = s.until(outcomes=1).outcomes
        assert (outcome.kind, outcome.reason, outcome.error) == ("failed", "reward_error", "reward f: raised")
        assert outcome == read_outcome(s.run, "e0-p0-t0") and s.rows() == {}
        assert outcome.tokens_wasted == s.worker.status().tokens_wasted > 0
    assert s.worker.status().in_flight == ()


def test_a_prompt_that_the_engine_refuses_is_poison(stage: Callable[..., Stage]) -> None:
    s = stage(lambda request, v: ValueError("token id 99 is outside the vocabulary of 58"))
    s.worker.lease([lease(0)])
    (outcome,) = s.until(outcomes=1).outcomes
    assert (outcome.kind, outcome.reason) == ("poison", "prompt_refused")
    assert "token id 99" in outcome.error
    assert len(s.engine.seen) == 4, "nothing is tried again"


def test_a_group_past_its_deadline_lands_with_what_it_has_or_fails(stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion | None:
        group, response, *_ = request.request_id.split("/")
        return completion(request, "123") if int(response) < (3 if group == "e0-p0-t0" else 1) else None

    s = stage(script, deadlines={"group_s": 0.3})
    s.worker.lease([lease(0), lease(1)])
    (outcome,) = s.until(landed=1, outcomes=1).outcomes
    assert (outcome.group_id, outcome.kind, outcome.reason) == ("e0-p1-t0", "failed", "group_deadline")
    assert outcome.error == "3 of 4 answers were not there after 0.3 s (deadlines.group_s)"
    assert s.rows()["e0-p0-t0"]["n_responses"] == 3
    assert sorted(s.engine.cancelled) == [
        "e0-p0-t0/3/0/0", "e0-p1-t0/1/0/1", "e0-p1-t0/2/0/1", "e0-p1-t0/3/0/1"]


# -- cancel


def test_cancel_says_what_became_of_each_group(stage: Callable[..., Stage]) -> None:
    s = stage(lambda request, v: None if "p1" in request.request_id else completion(request, "123"))
    s.worker.lease([lease(0), lease(1)])
    s.until(landed=1)
    assert s.worker.cancel(["e0-p0-t0", "e0-p1-t0", "e0-p2-t0"]) == {
        "e0-p0-t0": "landed", "e0-p1-t0": "cancelled", "e0-p2-t0": "unknown"}
    events = s.worker.events(0.5)
    assert events.cancelled == ("e0-p1-t0",) and events.status.in_flight == ()
    assert s.worker.cancel(["e0-p1-t0"]) == {"e0-p1-t0": "unknown"}
    deadline = time.monotonic() + 2
    while s.worker.status().tokens_wasted < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert s.worker.status().tokens_wasted == 8, "4 answers of 2 tokens each"
    assert list(s.rows()) == ["e0-p0-t0"] and outcome_ids(s.run) == []


def test_a_cancelled_group_can_be_leased_again(stage: Callable[..., Stage]) -> None:
    s = stage(right)
    s.engine.go.clear()
    s.worker.lease([lease(0)])
    assert s.worker.cancel(["e0-p0-t0"]) == {"e0-p0-t0": "cancelled"}
    s.worker.lease([lease(0)])
    s.engine.go.set()
    s.until(landed=1)
    assert s.rows()["e0-p0-t0"]["reward"] == [1.0] * 4


# -- how a worker ends


def test_a_dead_engine_ends_the_worker_by_name(stage: Callable[..., Stage]) -> None:
    s = stage(lambda request, v: DeadPart("the stepping thread is gone"))
    s.worker.lease([lease(0)])
    with pytest.raises(WorkerDead, match="engine of worker rollout-0: the stepping thread is gone"):
        s.until(landed=1)
    with pytest.raises(WorkerDead):
        s.worker.lease([lease(1)])
    assert outcome_ids(s.run) == [], "the groups are leased again"


def test_too_many_failed_rewards_in_a_row_end_the_worker_with_the_cause(stage: Callable[..., Stage]) -> None:
    s = stage(lambda request, v: completion(request, "666"), scorer=ScriptedScorer(**FAILURES),
              failure={"reward_failures": 10})
    s.worker.lease([lease(i) for i in range(4)])
    with pytest.raises(FailureBudgetSpent, match=r"10 reward calls failed in a row .*: reward f: raised"):
        s.until(outcomes=4)


def test_one_success_resets_the_count_of_failed_rewards(stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        response, try_no = response_and_try(request)
        return completion(request, "666" if response == 0 and try_no == 0 else "123")

    s = stage(script, scorer=ScriptedScorer(**FAILURES), failure={"reward_failures": 2})
    for position in range(4):
        s.worker.lease([lease(position)])
        s.until(landed=1)


class MeetingScorer(ScriptedScorer):
    """Exact match; each call waits until `parties` calls are there together, and a text of `held` for `go`."""

    def __init__(self, parties: int = 1, held: str = "") -> None:
        super().__init__()
        self._barrier, self._held, self.go = threading.Barrier(parties), held, threading.Event()

    def __call__(self, prompt: Prompt, text: str) -> Score:
        if text == self._held:
            self.go.wait(10)
        else:
            self._barrier.wait(10)
        return super().__call__(prompt, text)

    def close(self) -> None:
        self.go.set()


def test_answers_are_scored_side_by_side_and_land_in_their_order(stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        return completion(request, ("123", "321", "1", "123")[response_and_try(request)[0]], v=v)

    s = stage(script, scorer=MeetingScorer(parties=4), scoring={"workers": 4})
    s.worker.lease([lease(i) for i in range(3)])
    s.until(landed=3)
    assert [row["reward"] for row in s.rows().values()] == [[1.0, 0.0, 0.0, 1.0]] * 3
    assert [row["extracted"] for row in s.rows().values()] == [["123", "321", "1", "123"]] * 3


def test_a_reward_that_hangs_holds_its_own_group_alone_until_the_deadline(stage: Callable[..., Stage]) -> None:
    def script(request: GenerateRequest, v: int) -> Completion:
        response, _ = response_and_try(request)
        return completion(request, "666" if response == 0 and "e0-p0-" in request.request_id else "123", v=v)

    scorer = MeetingScorer(held="666")
    s = stage(script, scorer=scorer, scoring={"workers": 2}, deadlines={"group_s": 0.5})
    s.worker.lease([lease(0, n=4, min_group=4), lease(1), lease(2)])
    events = s.until(landed=2, outcomes=1)
    (outcome,) = events.outcomes
    assert (outcome.group_id, outcome.reason) == ("e0-p0-t0", "group_deadline")
    assert sorted(s.rows()) == ["e0-p1-t0", "e0-p2-t0"]
    scorer.go.set()
    assert s.worker.status().in_flight == ()


def test_failures_of_many_threads_are_counted_in_a_row(stage: Callable[..., Stage]) -> None:
    s = stage(lambda request, v: completion(request, "666"), scorer=ScriptedScorer(**FAILURES),
              failure={"reward_failures": 30}, scoring={"workers": 4})
    s.worker.lease([lease(i) for i in range(10)])
    with pytest.raises(FailureBudgetSpent, match=r"(30|31|32|33) reward calls failed in a row"):
        s.until(outcomes=10)


def test_a_worker_without_weights_takes_no_lease(tmp_path: Path, tokenizer: Tokenizer) -> None:
    s = Stage(RunDir(tmp_path), tokenizer, right)
    with pytest.raises(ValueError, match="rollout-0 serves no weight version yet"):
        s.worker.lease([lease(0)])
    s.worker.close()
    with pytest.raises(WorkerDead, match="rollout-0 is closed"):
        s.worker.events(1)


def test_close_lands_what_is_complete_and_wakes_the_poll(stage: Callable[..., Stage]) -> None:
    s = stage(lambda request, v: None if "p1" in request.request_id else completion(request, "123"))
    s.worker.lease([lease(0), lease(1)])
    s.until(landed=1)
    raised: list[BaseException] = []

    def poll() -> None:
        try:
            s.worker.events(30)
        except WorkerDead as error:
            raised.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    time.sleep(0.1)
    start = time.monotonic()
    s.worker.close()
    thread.join(1)
    assert time.monotonic() - start < 1.0 and len(raised) == 1
    assert list(s.rows()) == ["e0-p0-t0"]


def test_a_disk_that_takes_no_shard_keeps_the_groups_and_lands_them_later(stage: Callable[..., Stage]) -> None:
    s = stage(right)
    tmp = s.run.stream_tmp(s.worker.status().stream)
    tmp.rmdir()
    tmp.write_text("a file where the directory should be: every landing is an OSError")
    s.worker.lease([lease(0)])
    time.sleep(0.3)
    assert s.worker.events(0).status.in_flight == ("e0-p0-t0",), "still its duty"
    tmp.unlink()
    tmp.mkdir()
    s.until(landed=1)


# -- the books


def test_the_interval_ledger_sums_to_the_age_and_names_what_was_done(stage: Callable[..., Stage]) -> None:
    s = stage(right)
    born = time.monotonic()
    zero = s.worker.status().seconds
    s.engine.go.clear()
    s.worker.lease([lease(0)])
    time.sleep(0.3)
    s.engine.go.set()
    s.until(landed=1)
    time.sleep(0.2)
    spent = {name: seconds - zero[name] for name, seconds in s.worker.status().seconds.items()}
    assert abs(sum(spent.values()) - (time.monotonic() - born)) < 0.02
    assert 0.28 < spent["busy"] < 0.5 and spent["waiting"] > 0.18 and spent["paused"] == 0.0


def test_shards_say_where_the_time_of_their_worker_went(stage: Callable[..., Stage]) -> None:
    s = stage(right, idx=5)
    for position in (0, 1):
        s.worker.lease([lease(position)])
        s.until(landed=1)
        s.worker.swap(version(6 + position))
    s.worker.lease([lease(2)])
    s.until(landed=1)
    stream = s.worker.status().stream
    told = [json.loads(map_shard(s.run.shard(stream, seq))[1][SPANS]) for seq in range(3)]
    spans = [span for shard in told for span in as_spans(shard)]
    states = [span for span in spans if span.name != "landing"]
    assert all(a.end_us == b.begin_us for a, b in pairwise(states)), "no hole, and none twice"
    assert [(span.name, span.of) for span in states if span.name == "syncing"] == [
        ("syncing", 5), ("syncing", 6), ("syncing", 7)]
    assert [span.of for span in spans if span.name == "landing"] == [0, 1], "the last one is in no shard yet"
    told_s = sum(span.end_us - span.begin_us for span in states) / 1e6
    assert told_s <= sum(s.worker.status().seconds.values()) < told_s + 0.5
    for name, row in s.rows().items():
        answered = json.loads(row["meta_json"])["answered_at_us"]
        dispatched, finished = (int(row[at].timestamp() * 1e6) for at in ("dispatched_at", "finished_at"))
        assert dispatched - 1 <= answered <= finished + 1, name


# -- over the real engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny architecture with random weights: answers of random characters, mostly up to the limit."""
    config = Config.model_validate({"model": {"type": "tiny", "warmup_steps": 0}})
    return set_up_model(config, tmp_path_factory.mktemp("models"))


class Real:
    """`open_worker` in a run directory with versions 0 (the model) and 1 (half its weights, idx 1)."""

    def __init__(self, root: Path, model: Path, **settings: Any) -> None:
        defaults: dict[str, Any] = {"storage": {"fsync": False}, "sampling": {"max_new_tokens": 24}}
        self.config = Config.model_validate(defaults | settings)
        self.run = RunDir(root)
        self.run.model.symlink_to(model)
        tensors = read_tensors(model / "model.safetensors")
        self.versions = [publish(self.run, {name: tensor * scale for name, tensor in tensors.items()}, step, step, 1,
                                 self.config) for step, scale in enumerate((1.0, 0.5))]
        self.prompts = PromptSource.of_model(self.config, model)
        self.worker = self.open("rollout-0")

    def open(self, name: str) -> RolloutWorker:
        worker = open_worker(root=str(self.run.root), config=self.config, name=name, attempt=1, cwd=str(self.run.root))
        assert worker.swap(self.versions[0]) == self.versions[0].digest
        return worker

    def lease(self, position: int, *, n: int = 4, max_new: int = 24) -> Lease:
        return Lease(prompt=self.prompts.at(0, position), try_no=0, lease_no=position, idx_dispatch=0, n_expected=n,
                     min_group=2, sampling=Sampling(max_new_tokens=max_new), attempt=1)

    def rows(self, worker: RolloutWorker) -> dict[str, dict[str, Any]]:
        paths = sorted(self.run.stream(worker.status().stream).glob("*.arrow"))
        assert all(verify_shard(path) for path in paths)
        return {row["group_id"]: row for path in paths for row in map_shard(path)[0].to_pylist()}


def landed_groups(worker: RolloutWorker, n: int, deadline_s: float = 20.0) -> list[str]:
    seen: list[str] = []
    deadline = time.monotonic() + deadline_s
    while len(seen) < n and time.monotonic() < deadline:
        events = worker.events(0.2)
        assert events.outcomes == ()
        seen += [g for hint in events.landed for g in hint.group_ids]
    assert len(seen) == n
    return seen


def start_many(r: Real) -> None:
    """More answers than the engine has slots; returns when some have ended, so that every slot is in the middle."""
    r.worker.lease([r.lease(i, n=8, max_new=200) for i in range(32)])
    deadline = time.monotonic() + 10
    while r.worker.status().tokens_generated == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert r.worker.status().running > 64


@pytest.fixture
def real(tmp_path: Path, model: Path) -> Iterator[Callable[..., Real]]:
    made: list[Real] = []

    def make(**settings: Any) -> Real:
        made.append(Real(tmp_path, model, **settings))
        return made[-1]

    yield make
    for each in made:
        start = time.monotonic()
        each.worker.close()
        assert time.monotonic() - start < 2.0


def test_answers_do_not_depend_on_what_else_a_worker_runs(real: Callable[..., Real]) -> None:
    r = real()
    r.worker.lease([r.lease(i) for i in range(12)])
    landed_groups(r.worker, 12)
    together = r.rows(r.worker)
    alone = r.open("rollout-1")
    try:
        alone.lease([r.lease(5)])
        (name,) = landed_groups(alone, 1)
        (row,) = r.rows(alone).values()
    finally:
        alone.close()
    same = ("response_ids", "behavior_logprobs", "sampling_seed", "ver_run_value", "reward", "extracted", "prompt_ids")
    assert {column: row[column] for column in same} == {column: together[name][column] for column in same}
    lengths = [len(ids) for each in together.values() for ids in each["response_ids"]]
    assert len(lengths) == 48 and max(lengths) == 24 and len({tuple(map(tuple, each["response_ids"]))
                                                              for each in together.values()}) == 12
    status = r.worker.status()
    assert status.tokens_generated == sum(lengths) and status.tokens_wasted == 0


def test_a_swap_in_the_middle_marks_every_later_token(real: Callable[..., Real]) -> None:
    r = real(sampling={"max_new_tokens": 200})
    start_many(r)
    assert r.worker.swap(r.versions[1]) == r.versions[1].digest
    landed_groups(r.worker, 32)
    rows = r.rows(r.worker)
    runs = [run for row in rows.values() for run in row["ver_run_value"]]
    assert all(run in ([0], [1], [0, 1]) for run in runs) and [0, 1] in runs
    for row in rows.values():
        versions = {v for run in row["ver_run_value"] for v in run}
        assert (row["idx_min"], row["idx_max"]) == (min(versions), max(versions))
    assert r.worker.status().served == r.versions[1]
    assert r.worker.status().seconds["syncing"] > 0


def test_an_older_version_swapped_in_makes_running_answers_start_again(real: Callable[..., Real]) -> None:
    r = real(sampling={"max_new_tokens": 200})
    r.worker.swap(r.versions[1])
    start_many(r)
    r.worker.swap(r.versions[0])
    landed_groups(r.worker, 32)
    rows = r.rows(r.worker)
    runs = [run for row in rows.values() for run in row["ver_run_value"]]
    assert all(run in ([0], [1]) for run in runs) and [0] in runs
    assert r.worker.status().tokens_wasted > 0
    assert any('"last_failure": "sample_refused"' in row["meta_json"] for row in rows.values())


def test_a_reward_function_scores_in_its_own_process(real: Callable[..., Real], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import time\ncalls = 0\ndef score(answer, truth, prompt):\n global calls\n calls += 1\n"
        " if calls == 3: time.sleep(60)\n"
        " return {'reward': len(answer) / 100, 'digits': sum(c.isdigit() for c in answer), 'asked': len(prompt)}\n")
    r = real(reward="./reward.py:score", deadlines={"reward_s": 0.5})
    r.worker.lease([r.lease(i) for i in range(3)])
    landed_groups(r.worker, 3)
    rows = r.rows(r.worker)
    failures = [row["meta_json"] for row in rows.values() if "failures" in row["meta_json"]]
    assert len(failures) >= 1 and all("reward_timeout" in text for text in failures), "the third call of each process"
    for row in rows.values():
        assert row["n_responses"] == 4 and row["correct"] is None
        assert len(row["reward_parts"]["digits"]) == 4 and row["reward_parts"]["asked"][0] >= len("sort 123")
        assert all(digits <= 100 * reward + 1e-4
                   for digits, reward in zip(row["reward_parts"]["digits"], row["reward"], strict=True))


def test_cancel_and_close_are_quick_while_answers_run(real: Callable[..., Real]) -> None:
    r = real(sampling={"max_new_tokens": 1500})
    r.worker.lease([r.lease(i, n=8, max_new=1500) for i in range(8)])
    time.sleep(0.1)
    start = time.monotonic()
    name = r.lease(0).group_id
    assert r.worker.cancel([name]) == {name: "cancelled"}
    assert time.monotonic() - start < 0.5
    start = time.monotonic()
    r.worker.close()
    assert time.monotonic() - start < 2.0
    assert name not in r.rows(r.worker) and outcome_ids(r.run) == []


def test_a_prompt_beyond_the_context_is_poison(real: Callable[..., Real]) -> None:
    r = real()
    good = r.lease(0)
    bad = replace(good, prompt=replace(good.prompt, token_ids_P=np.full(3000, 7, np.int32)))
    r.worker.lease([bad])
    events = r.worker.events(5)
    assert [(outcome.kind, outcome.reason) for outcome in events.outcomes] == [("poison", "prompt_refused")]
    assert "3000 tokens" in events.outcomes[0].error


def test_damaged_weights_are_refused_and_the_old_ones_stay(real: Callable[..., Real]) -> None:
    r = real()
    with pytest.raises(WeightsDamaged):
        r.worker.swap(replace(r.versions[1], digest="0" * 32))
    assert r.worker.status().served == r.versions[0]
    r.worker.lease([r.lease(0)])
    landed_groups(r.worker, 1)
