"""A judge over an OpenAI-compatible address: real HTTP, and every way in which it can fail an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest

from flows.presets import load_preset
from rl_core.config import Config
from rl_core.errors import ConfigError, JudgeFailed, RewardError, RewardTimeout
from rl_core.judge_settings import JudgeConfig
from rl_core.plan import check, parse_overrides, resolve
from rl_core.rollout.rewards.judge import JudgeScorer, question_of
from rl_core.rollout.rewards.scoring import make_scorer
from rl_core.types import Prompt
from tests.judging import Judge, Reply, says, sends


def drips(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then, for much longer than anybody waits."""
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)
    except OSError:
        pass


def hangs(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(1.0)


def pours(handler: BaseHTTPRequestHandler) -> None:
    sends(b"x" * (3 << 20))(handler)


@pytest.fixture
def judge() -> Iterator[Callable[[list[Reply]], Judge]]:
    made: list[Judge] = []

    def start(replies: list[Reply]) -> Judge:
        made.append(Judge(replies))
        return made[-1]

    yield start
    for each in made:
        each.close()


def row(text: Any = "3 1 2", answer: str = "1 2 3") -> Prompt:
    return Prompt(dataset_epoch=0, position=0, prompt_idx=0, token_ids_P=np.zeros(1, np.int32), answer=answer,
                  data_source="sort", columns={"prompt": text})


def scorer(url: str, deadline_s: float = 5.0, **settings: Any) -> JudgeScorer:
    return JudgeScorer(JudgeConfig(url=url, **settings), deadline_s=deadline_s, pause_s=0.001)


def test_a_score_on_its_scale_becomes_a_reward_with_its_facts(judge: Callable[[list[Reply]], Judge]) -> None:
    server = judge([says("Right but long.\nScore: 3\nno, after all:\nScore: **7.5**")])
    with_key = scorer(server.url, low=5, high=10, right=0.5, model="m", temperature=0.2, max_tokens=9)
    score = with_key(row(), "1 2 {truth} 3")
    assert (score.reward, score.correct) == (0.5, 1.0)
    assert score.parts == {"judge_score": 7.5, "judge_nonsense": 0.0, "judge_refused": 0.0, "judge_unavailable": 0.0}
    [asked] = server.asked
    content = asked["messages"][0]["content"]
    assert (asked["path"], asked["model"], asked["temperature"], asked["max_tokens"]) == (
        "/v1/chat/completions", "m", 0.2, 9)
    assert "Question:\n3 1 2\n" in content and "Reference answer:\n1 2 3\n" in content
    assert "1 2 {truth} 3" in content and "N from 5 (worthless) to 10 (perfect)" in content


FAILS: dict[str, tuple[list[Reply], str, int]] = {
    # replies, the name of what went wrong, how often it was asked
    "no score": ([says("fine by me")], "judge_nonsense", 3),
    "a score off the scale": ([says("Score: 11")], "judge_nonsense", 3),
    "no JSON": ([sends(b"<html>")], "judge_nonsense", 3),
    "no choices": ([sends({"choices": []})], "judge_nonsense", 3),
    "no text": ([says(None)], "judge_nonsense", 3),
    "a deep nest": ([sends(b"[" * 100_000)], "judge_nonsense", 3),
    "three megabytes": ([pours], "judge_nonsense", 3),
    "a refusal": ([says(None, refusal="I will not rate that")], "judge_refused", 3),
    "a filter": ([says("Score: 5", finish_reason="content_filter")], "judge_refused", 3),
    "a filter as an error": ([sends({"error": {"code": "content_filter"}}, 400)], "judge_refused", 3),
    "a wrong key": ([sends({"error": "no"}, 401)], "judge_denied", 1),
    "no such model": ([sends({"error": "no model m"}, 404)], "judge_denied", 1),
    "too many requests": ([sends({}, 429)], "judge_unavailable", 3),
    "a broken server": ([sends({}, 503)], "judge_unavailable", 3),
}


@pytest.mark.parametrize(("replies", "reason", "asks"), FAILS.values(), ids=FAILS)
def test_what_is_no_score_fails_the_answer_by_its_name(judge: Callable[[list[Reply]], Judge], replies: list[Reply],
                                                       reason: str, asks: int) -> None:
    server = judge(replies)
    with pytest.raises(JudgeFailed, match=f"reward judge: {reason.removeprefix('judge_')}: ") as failed:
        scorer(server.url)(row(), "x")
    assert (failed.value.reason, len(server.asked)) == (reason, asks)


@pytest.mark.parametrize("reply", [hangs, drips], ids=["silence", "drop by drop"])
def test_a_judge_that_is_too_slow_is_a_time_out_at_the_deadline(judge: Callable[[list[Reply]], Judge],
                                                              reply: Reply) -> None:
    server, begun = judge([reply]), time.monotonic()
    with pytest.raises(RewardTimeout, match=r"reward judge: timeout: .*0\.2 s") as failed:
        scorer(server.url, 0.2)(row(), "x")
    assert failed.value.reason == "reward_timeout" and time.monotonic() - begun < 0.9


def test_what_passes_is_asked_again_and_counted(judge: Callable[[list[Reply]], Judge]) -> None:
    server = judge([says("hm"), says("", refusal="no"), sends({}, 500), says("hm"), says("Score: 10")])
    score = scorer(server.url, tries=5)(row(), "x")
    assert (score.reward, score.correct, len(server.asked)) == (1.0, None, 5)
    assert score.parts == {"judge_score": 10.0, "judge_nonsense": 2.0, "judge_refused": 1.0, "judge_unavailable": 1.0}


def test_nobody_at_the_address_is_named_and_a_closed_scorer_asks_nobody(judge: Callable[[list[Reply]], Judge]) -> None:
    server = judge([says("Score: 1")])
    url = server.url
    server.close()
    with pytest.raises(JudgeFailed, match=r"unavailable: ConnectError"):
        scorer(url, tries=1)(row(), "x")
    closed = scorer(judge([says("Score: 1")]).url)
    closed.close()
    with pytest.raises(RewardError, match="judge: unavailable"):
        closed(row(), "x")


def test_a_key_comes_from_the_environment_and_is_shown_nowhere(judge: Callable[[list[Reply]], Judge],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    server = judge([says("Score: 1"), sends({}, 401)])
    with pytest.raises(ConfigError, match=r"scoring.judge.key: there is no variable HEADWAY_JUDGE_KEY"):
        scorer(server.url, key="env:HEADWAY_JUDGE_KEY")
    monkeypatch.setenv("HEADWAY_JUDGE_KEY", "very-secret")
    judged = scorer(server.url, key="env:HEADWAY_JUDGE_KEY")
    judged(row(), "x")
    assert server.headers[0]["Authorization"] == "Bearer very-secret"
    with pytest.raises(JudgeFailed) as failed:
        judged(row(), "x")
    assert "very-secret" not in str(failed.value)


def test_a_chat_is_shown_message_by_message() -> None:
    assert question_of(row([{"role": "user", "content": "sort"}])) == "sort"
    assert question_of(row([{"role": "system", "content": "be brief"}, {"role": "user", "content": "sort"}])) == (
        "system: be brief\n\nuser: sort")


REFUSED = {
    "no address": (["reward=judge"], "scoring.judge.url: reward=judge needs it"),
    "an address for nobody": (["scoring.judge.url=http://h:1/v1"], "scoring.judge.url: belongs to reward=judge"),
    "a query": (["reward=judge", "scoring.judge.url=http://h:1/v1?key=x"], "scoring.judge.url: write http"),
    "the key itself": (["reward=judge", "scoring.judge={url: 'http://h:1', key: sk-1}"],
                       "scoring.judge.key: write env"),
    "no scale": (["reward=judge", "scoring.judge={url: 'http://h:1', low: 10}"], "scoring.judge.low: not below"),
    "no pattern": (["reward=judge", "scoring.judge={url: 'http://h:1', pattern: '('}"], "scoring.judge.pattern: is no"),
    "a prompt without the answer": (["reward=judge", "scoring.judge={url: 'http://h:1', prompt: rate it}"],
                                    "scoring.judge.prompt: does not show the answer"),
    "no reward model": (["reward=reward_model"], "scoring.model.path: reward=reward_model needs it"),
    "a reward model for nobody": (["scoring.model.path=m"], "scoring.model.path: belongs to reward=reward_model"),
}


def settings(*sets: str) -> Config:
    config = resolve(load_preset("tiny-cpu"), parse_overrides(sets))
    check(config)
    return config


@pytest.mark.parametrize(("sets", "message"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_judge_is_refused_in_the_plan(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.", 2)):
        settings(*sets)


def test_a_judge_may_be_one_of_several_rewards(judge: Callable[[list[Reply]], Judge]) -> None:
    server = judge([says("Score: 5")])
    made = make_scorer(settings(f"scoring.judge.url={server.url}", "scoring.parts=[{part: taste, reward: judge, "
                                "weight: 0.5}]"))
    score = made(row(), "1 2 3")
    assert (score.reward, score.parts["taste"], score.parts["taste.judge_score"]) == (1.25, 0.5, 5.0)
    made.close()
