"""A judge over an OpenAI-compatible address: a model that reads question, reference and answer and gives a score.

    POST <url>/chat/completions  {"model": ..., "messages": [...], "temperature": ..., "max_tokens": ...}

What goes wrong has a name: `nonsense` (a reply without a score on the scale), `refused` (by the judge or its filter),
`timeout`, `unavailable` (no connection, 429, 5xx), `denied` (another 4xx). What can pass is asked again, up to `tries`
times within the deadline, and counted in the parts of the score that comes after it. An answer that gets no score is a
RewardError with the name, never a reward of 0.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, cast

import httpx

from rl_core.errors import ConfigError, JudgeFailed, RewardTimeout
from rl_core.judge_settings import PLACES, JudgeConfig
from rl_core.types import Prompt, Score

Trouble = Literal["nonsense", "refused", "timeout", "unavailable", "denied"]
PASSING: tuple[Trouble, ...] = ("nonsense", "refused", "unavailable")
"""What may be otherwise when it is asked again; each is a part of the score."""
LARGEST_REPLY = 1 << 20
"""Bytes; a longer one is nonsense."""
SCORED_END = 2000
"""Characters at the end of a reply that its score is looked for in."""
PAUSE_S = 0.25
"""Half the first pause before it is asked again where it was unavailable; each is twice as long as the one before."""


class Failed(Exception):
    """One ask that gave no score: `Failed("refused", "it said no")`."""

    def __init__(self, trouble: Trouble, text: str) -> None:
        super().__init__(trouble, text)
        self.trouble: Trouble = trouble
        self.text = text


class JudgeScorer:
    """`scorer(prompt, text)` -> Score. Thread-safe: as many calls side by side as threads call."""

    def __init__(self, settings: JudgeConfig, *, deadline_s: float, pause_s: float = PAUSE_S) -> None:
        """`pause_s`: before it is asked again where it was unavailable. Raises ConfigError for a key that is not in the
        environment, and without an address."""
        if settings.url is None:
            raise ConfigError("scoring.judge.url: reward=judge needs an address, as in http://host:8000/v1 (got None)")
        self._settings, self._deadline_s, self._pause_s = settings, deadline_s, pause_s
        self._where = f"{settings.url.rstrip('/')}/chat/completions"
        self._score = re.compile(settings.pattern)
        self._closed = threading.Event()
        self._client = httpx.Client(headers=_headers(settings), trust_env=False, follow_redirects=False)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        end, failed = time.monotonic() + self._deadline_s, Counter[str]()
        question = asked(self._settings, prompt, text)
        while True:
            try:
                value = self._ask(question, end)
            except Failed as trouble:
                failed[trouble.trouble] += 1
                if trouble.trouble not in PASSING or failed.total() >= self._settings.tries or self._closed.is_set():
                    raise self._error(trouble, failed) from None
                if trouble.trouble == "unavailable":
                    self._closed.wait(min(self._pause_s * 2 ** failed["unavailable"], max(0.0, end - time.monotonic())))
                continue
            return self._scored(value, failed)

    def close(self) -> None:
        """End calls that are under way (they raise RewardError). Idempotent, quick."""
        self._closed.set()
        self._client.close()

    def _scored(self, value: float, failed: Mapping[str, int]) -> Score:
        low, high, right = self._settings.low, self._settings.high, self._settings.right
        reward = (value - low) / (high - low)
        parts = {"judge_score": value} | {f"judge_{name}": float(failed.get(name, 0)) for name in PASSING}
        return Score(reward=reward, parts=parts, correct=None if right is None else float(reward >= right),
                     extracted=None)

    def _error(self, trouble: Failed, failed: Mapping[str, int]) -> JudgeFailed | RewardTimeout:
        counts = ", ".join(f"{count} x {name}" for name, count in failed.items())
        said = f"reward judge: {trouble.trouble}: {trouble.text} ({self._where}, {self._settings.model!r}; {counts})"
        return RewardTimeout(said) if trouble.trouble == "timeout" else JudgeFailed(said, trouble.trouble)

    def _ask(self, question: str, end: float) -> float:
        """The score of one reply. Raises Failed."""
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise Failed("timeout", f"no score within {self._deadline_s:g} s")
        body = {"model": self._settings.model, "messages": [{"role": "user", "content": question}],
                "temperature": self._settings.temperature, "max_tokens": self._settings.max_tokens}
        try:
            with self._client.stream("POST", self._where, json=body, timeout=left_s) as response:
                content = self._read(response, end)
        except httpx.TimeoutException:
            raise Failed("timeout", f"no reply within {self._deadline_s:g} s") from None
        except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:  # RuntimeError: the client was closed
            raise Failed("unavailable", f"{type(error).__name__}: {error}") from None
        return score_of(reply_of(response.status_code, content), self._score, self._settings)

    def _read(self, response: httpx.Response, end: float) -> bytes:
        content = b""
        for piece in response.iter_bytes():  # a reply that comes drop by drop ends at the deadline, too
            content += piece
            if time.monotonic() > end:
                raise Failed("timeout", f"no whole reply within {self._deadline_s:g} s")
            if len(content) > LARGEST_REPLY:
                raise Failed("nonsense", f"a reply of more than {LARGEST_REPLY} bytes")
        return content


def asked(settings: JudgeConfig, prompt: Prompt, text: str) -> str:
    """The judge's prompt for one answer; what an answer has in braces stays text."""
    places = {"question": question_of(prompt), "truth": prompt.answer, "answer": text,
              "low": f"{settings.low:g}", "high": f"{settings.high:g}"}
    return re.sub(r"\{(" + "|".join(PLACES) + r")\}", lambda match: places[match[1]], settings.prompt)


def question_of(prompt: Prompt) -> str:
    """The row's prompt as text: of a chat its messages, one after the other."""
    given: Any = prompt.columns.get("prompt", "")
    if not isinstance(given, list):
        return str(given)
    messages = [cast("Mapping[str, Any]", one) for one in cast("list[Any]", given) if isinstance(one, Mapping)]
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n\n".join(f"{one.get('role', '')}: {one.get('content', '')}" for one in messages)


def reply_of(status: int, content: bytes) -> str:
    """The text of a reply. Raises Failed for what is none."""
    shown = content[:200].decode(errors="replace")
    try:
        payload: Any = json.loads(content)
    except (ValueError, RecursionError):
        payload = None
    if status == 429 or status >= 500:
        raise Failed("unavailable", f"HTTP {status}: {shown}")
    if status != 200:
        raise Failed("refused" if "content_filter" in shown or "content_policy" in shown else "denied",
                     f"HTTP {status}: {shown}")
    try:
        choice = payload["choices"][0]
        message: Any = choice["message"]
        refusal, text, finish = message.get("refusal"), message.get("content"), choice.get("finish_reason")
    except (TypeError, LookupError, AttributeError):
        raise Failed("nonsense", f"no choices[0].message in {shown!r}") from None
    if refusal or finish == "content_filter":
        raise Failed("refused", str(refusal or "its content filter ended the reply")[:200])
    if not isinstance(text, str):
        raise Failed("nonsense", f"no text in {shown!r}")
    return text


def score_of(text: str, pattern: re.Pattern[str], settings: JudgeConfig) -> float:
    """The last score in a reply. Raises Failed where there is none, or it is off the scale."""
    found = [match[1] if pattern.groups else match[0] for match in pattern.finditer(text[-SCORED_END:])]
    try:
        value = float(found[-1])
    except (IndexError, ValueError, TypeError):
        raise Failed("nonsense", f"no score in {text[-200:]!r}") from None
    if not (math.isfinite(value) and settings.low <= value <= settings.high):
        raise Failed("nonsense", f"score {value:g} is not from {settings.low:g} to {settings.high:g}")
    return value


def _headers(settings: JudgeConfig) -> dict[str, str]:
    if settings.key is None:
        return {}
    name = settings.key.removeprefix("env:")
    if not (key := os.environ.get(name)):
        raise ConfigError(f"scoring.judge.key: there is no variable {name} in the environment (got {settings.key!r})")
    return {"Authorization": f"Bearer {key}"}
