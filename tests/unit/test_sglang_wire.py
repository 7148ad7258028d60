"""What goes over the wire: bodies, events cut anywhere, broken answers, and an answer that takes several tries."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from rl_core.rollout.sglang import wire
from rl_core.rollout.sglang.answering import Answering
from rl_core.rollout.sglang.wire import BadAnswer, Delta, Finish, ServerRefused, Span
from rl_core.types import GenerateRequest, Sampling

VOCABULARY = 64


def event(ids: list[int], total: int, *, finish: dict[str, Any] | None = None, spans: Any = None,
          logprobs: list[list[Any]] | None = None, **meta: Any) -> bytes:
    """One event as a server sends it: `ids` since the last one, `total` of the answer."""
    facts: dict[str, Any] = {
        "id": "r", "finish_reason": finish, "prompt_tokens": 5, "weight_version": "3", "num_retractions": 0,
        "completion_tokens": total, "cached_tokens": 4,
        "output_token_logprobs": [[-0.25 * token, token, None] for token in ids] if logprobs is None else logprobs}
    if spans is not None:
        facts["weight_versions"] = spans
    return json.dumps({"text": "", "output_ids": ids, "meta_info": facts | meta}).encode()


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


# -- requests


def test_a_request_says_all_that_a_server_could_otherwise_take_from_the_model() -> None:
    body = wire.generate_body("r", [1, 2], Sampling(temperature=0.7, stop_token_ids=(9,), stop=("\n\n",)), max_new=7,
                              seed=2**63 + 5, end_token_ids=[2], stream_interval=16, cache_key="4")
    settings = body["sampling_params"]
    assert (body["rid"], body["input_ids"], body["stream"], body["return_logprob"]) == ("r", [1, 2], True, True)
    assert body["extra_key"] == "4"
    assert (settings["max_new_tokens"], settings["temperature"], settings["stream_interval"]) == (7, 0.7, 16)
    assert (settings["stop_token_ids"], settings["stop"]) == ([2, 9], ["\n\n"])
    assert (settings["top_p"], settings["top_k"], settings["min_p"], settings["repetition_penalty"]) == (1, -1, 0, 1)
    assert settings["sampling_seed"] == 5 and "ignore_eos" not in settings


def test_a_model_without_end_tokens_ends_by_no_token() -> None:
    body = wire.generate_body("r", [1], Sampling(), max_new=7, seed=1, end_token_ids=[], stream_interval=1,
                              cache_key="")
    assert body["sampling_params"]["ignore_eos"] is True
    assert "stop_token_ids" not in body["sampling_params"]


REFUSED = {"greedy": Sampling(temperature=0), "top_p": Sampling(top_p=0.9), "top_k": Sampling(top_k=20),
           "min_p": Sampling(min_p=0.1)}


@pytest.mark.parametrize("case", REFUSED)
def test_sampling_whose_logprobs_would_be_others_is_refused_by_name(case: str) -> None:
    field = "temperature" if case == "greedy" else case
    assert f"sampling.{field} cannot be" in str(wire.refused_sampling(REFUSED[case]))
    assert wire.refused_sampling(Sampling(temperature=0.7, stop=("x",))) is None


# -- events


def test_events_are_the_same_wherever_the_stream_is_cut() -> None:
    stream = b": comment\n\n" + b"".join(b"data: " + event([i], i) + b"\n\n" for i in range(1, 4)) + b"data: [DONE]\n\n"
    whole = wire.Events().feed(stream)
    assert len(whole) == 4 and whole[-1] == wire.DONE
    for size in (1, 2, 3, 7, 100):
        events = wire.Events()
        parts = [payload for i in range(0, len(stream), size) for payload in events.feed(stream[i:i + size])]
        assert parts == whole


def test_an_event_holds_the_tokens_since_the_last_one() -> None:
    first = wire.read_event(event([5, 6], 2), 0, VOCABULARY)
    assert first == Delta([5, 6], [-1.25, -1.5], 4, None, (), 0)
    last = wire.read_event(event([7], 3, finish={"type": "stop", "matched": 7}, spans=[span("3", 0, 2),
                                                                                      span("4", 2, 3)]), 2, VOCABULARY)
    assert (last.token_ids, last.finish) == ([7], Finish("stop", 7))
    assert last.spans == (Span(2, 3), Span(3, 4))


def test_a_stream_from_the_beginning_is_read_like_one_in_parts() -> None:
    delta = wire.read_event(event([5, 6, 7], 3), 2, VOCABULARY)
    assert (delta.token_ids, delta.logprobs) == ([7], [-1.75])


def test_an_answer_aborted_while_it_waits_repeats_its_last_token_which_is_not_taken_twice() -> None:
    everything = [[-0.25 * token, token, None] for token in (5, 6, 7)]
    delta = wire.read_event(event([7], 3, finish={"type": "abort", "message": "Abort in waiting queue"},
                                  spans=[span("3", 0, 3)], logprobs=everything), 3, VOCABULARY)
    assert (delta.token_ids, delta.finish and delta.finish.kind) == ([], "abort")
    joined = wire.read_event(event([6, 7, 7], 3, finish={"type": "abort", "message": ""}, spans=[span("3", 0, 3)],
                                   logprobs=everything[1:] + everything), 1, VOCABULARY)
    assert joined.token_ids == [6, 7]


def test_an_answer_that_never_began_has_no_versions() -> None:
    delta = wire.read_event(event([], 0, finish={"type": "abort", "message": "", "status_code": 503}), 0, VOCABULARY)
    assert (delta.token_ids, delta.spans, delta.finish) == ([], (), Finish("abort", None, "", 503))


BROKEN = {
    "half a JSON": event([5], 1)[:-9],
    "a list": b"[1, 2]",
    "no meta_info": b'{"text": ""}',
    "another finish": event([5], 1, finish={"type": "tired"}, spans=[span("3", 0, 1)]),
    "fewer log-probs than tokens": event([5, 6], 2, logprobs=[[-1.0, 5, None]]),
    "fewer tokens than before": event([], -1),
    "a log-prob that is no number": event([5], 1, logprobs=[[None, 5, None]]),
    "an id outside the vocabulary": event([VOCABULARY], 1),
    "no version of its tokens": event([5], 1, finish={"type": "length", "length": 1}),
    "versions that leave tokens out": event([5, 6], 2, finish={"type": "length"}, spans=[span("3", 0, 1)]),
    "a version that is no number": event([5], 1, finish={"type": "length"}, spans=[span("main", 0, 1)]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_event_is_a_bad_answer(case: str) -> None:
    with pytest.raises(BadAnswer):
        wire.read_event(BROKEN[case], 0, VOCABULARY)


def test_an_error_in_place_of_tokens_is_a_refusal_with_its_words() -> None:
    payload = b'{"error": {"message": "The input is longer than the context", "code": 400}}'
    with pytest.raises(ServerRefused, match="longer than the context") as caught:
        wire.read_event(payload, 0, VOCABULARY)
    assert caught.value.status == 400


def test_what_is_no_sglang_server_is_said_so() -> None:
    for read in (wire.read_model_info, wire.read_server_info):
        with pytest.raises(BadAnswer, match=r"no SGLang server|no server of SGLang"):
            read({"object": "list", "data": []})


def test_checksums_of_several_ranks_keep_apart() -> None:
    ranks = [{"checksums": {"a": "01"}}, {"checksums": {"a": "02"}}]
    assert wire.read_checksums({"success": True, "ranks": ranks}) == {"a": "01", "1:a": "02"}


# -- an answer over several tries


def answering(prompt: int = 3, limit: int = 100, **sampling: Any) -> Answering:
    request = GenerateRequest(request_id="r", token_ids_P=np.arange(prompt, dtype=np.int32), seed=1,
                              sampling=Sampling(max_new_tokens=limit, **sampling))
    return Answering(request, Future(), session="s", limit=limit, ends=frozenset({2}))


def tokens(ids: list[int], finish: Finish | None = None) -> Delta:
    return Delta(ids, [-0.5] * len(ids), 0, finish, (), 0)


def runs(work: Answering) -> list[tuple[int, int]]:
    found = work.completion("length").version_runs
    return list(zip(found.end_R.tolist(), found.version_R.tolist(), strict=True))


def test_a_whole_answer_has_the_runs_that_the_server_attested() -> None:
    work = answering()
    work.begin("r0", 3)
    work.extend(tokens([5] * 10))
    work.attested([Span(6, 3), Span(10, 4)], behind=0)
    assert runs(work) == [(6, 3), (10, 4)]


def test_a_server_that_counts_late_has_its_change_of_version_one_token_later() -> None:
    work = answering()
    work.begin("r0", 3)
    work.extend(tokens([5] * 10))
    work.attested([Span(6, 3), Span(10, 4)], behind=1)
    assert runs(work) == [(7, 3), (10, 4)]


def test_an_answer_whose_context_older_weights_read_is_not_of_the_newer_ones_alone() -> None:
    for kept_cache, expected in ((True, [(1, 3), (10, 4)]), (False, [(10, 4)])):
        work = answering()
        work.begin("r0", 3)
        work.taken_over(4, slack=8)
        work.extend(tokens([5] * 10))
        work.attested([Span(10, 4)], behind=1, kept_cache=kept_cache)
        assert runs(work) == expected


def test_a_continued_answer_adds_up_its_tries_and_spends_what_is_left_of_its_budget() -> None:
    work = answering(limit=20)
    work.begin("r0", 3)
    work.extend(tokens([5] * 8))
    work.broke_off()
    assert (work.left, len(work.context), work.newest) == (12, 11, 3)
    work.begin("r1", 4)
    work.extend(tokens([6] * 12))
    work.attested([Span(12, 4)], behind=0)
    assert runs(work) == [(8, 3), (20, 4)] and work.left == 0
    assert work.completion("length").token_ids_L.tolist() == [5] * 8 + [6] * 12


def test_tokens_around_a_swap_whose_version_nobody_attested_count_as_the_older_one() -> None:
    work = answering()
    work.begin("r0", 3)
    work.extend(tokens([5] * 10))
    work.taken_over(4, slack=8)
    work.extend(tokens([5] * 5))
    work.broke_off()
    assert runs(work) == [(15, 3)]
    work.begin("r1", 4)
    work.extend(tokens([5] * 10))
    work.taken_over(5, slack=8)
    work.extend(tokens([5] * 20))
    work.broke_off()
    assert runs(work) == [(15, 3), (33, 4), (45, 5)]


def test_tokens_of_a_try_that_cannot_be_trusted_are_forgotten() -> None:
    work = answering()
    work.begin("r0", 3)
    work.extend(tokens([5] * 4))
    work.broke_off()
    work.begin("r1", 3)
    work.extend(tokens([6] * 4))
    assert work.drop_try() == 4
    assert runs(work) == [(4, 3)] and work.completion("length").token_ids_L.tolist() == [5] * 4


def test_tokens_that_may_begin_a_stop_string_are_sampled_again() -> None:
    work = answering(stop=("ab", "xyz"))
    work.begin("r0", 3)
    work.extend(tokens([5, 6]))
    work.broke_off()
    assert work.back_off() == 2 and work.made == 0 and runs(work) == []
    work.begin("r1", 4)
    work.extend(tokens([5, 6, 7, 8, 9]))
    work.broke_off()
    assert work.back_off() == 3 and runs(work) == [(2, 4)]


ENDS = {"end token of the model": ([5, 2], Finish("stop", 2), ("stop", None)),
        "end token of the tokenizer alone": ([5, 9], Finish("stop", 9), None),
        "stop string": ([5, 6], Finish("stop", "\n"), ("stop", "\n")),
        "budget": ([5, 6, 7], Finish("length"), ("length", None)),
        "cut before its budget": ([5, 6], Finish("length"), None),
        "aborted": ([5, 6], Finish("abort"), None),
        "aborted behind its end token": ([5, 2], Finish("abort"), ("stop", None))}


@pytest.mark.parametrize("case", ENDS)
def test_an_answer_ends_as_the_embedded_engine_would_end_it(case: str) -> None:
    ids, finish, expected = ENDS[case]
    work = answering(limit=3)
    work.begin("r0", 3)
    work.extend(tokens(ids))
    assert work.ended_by(finish) == expected


def test_an_answer_that_lost_only_its_last_word_is_whole() -> None:
    work = answering(limit=2)
    work.begin("r0", 3)
    work.extend(tokens([5]))
    assert work.whole() is None
    work.extend(tokens([6]))
    assert work.whole() == "length"
    stopped = answering(limit=2, stop=("a",))
    stopped.begin("r0", 3)
    stopped.extend(tokens([5, 6]))
    assert stopped.whole() is None
