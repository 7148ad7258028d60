"""Settings of the rewards that are models: a judge behind an address, and a sequence classifier. Importable without
torch."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from rl_core.settings import Part, environment, operational, training

PROMPT = """Rate an answer to a question.

Question:
{question}

Reference answer:
{truth}

Answer to rate:
{answer}

Say in one sentence what is right or wrong with it. End with one line `Score: N`, N from {low} (worthless) to {high} \
(perfect)."""
PLACES = ("question", "truth", "answer", "low", "high")
"""What stands in braces in a judge's prompt."""
KEY = re.compile(r"env:HEADWAY_[A-Z0-9_]+")
ADDRESS = re.compile(r"https?://[^/\s?#@]+(/[^\s?#@]*)?")


class JudgeConfig(Part):
    """Reward `judge`: a model behind an OpenAI-compatible address says what an answer is worth (rewards.md 9)."""

    url: str | None = environment(None, "Address that `/chat/completions` is put behind, as in http://host:8000/v1.")
    model: str = training("default", "Name of the model there.", min_length=1)
    prompt: str = training(PROMPT, "What it is asked: text with {question}, {truth}, {answer}, {low} and {high}.",
                           min_length=1)
    pattern: str = training(r"[Ss]core:\s*\**\s*(-?\d+(?:\.\d+)?)", "Pattern of the score in its reply: the first "
                            "group of the last match.", min_length=1)
    low: float = training(0.0, "Its worst score: reward 0.")
    high: float = training(10.0, "Its best score: reward 1.")
    right: float | None = training(None, "Reward from which on an answer counts as right; null = the judge does not "
                                         "say.", ge=0, le=1)
    temperature: float = training(0.0, "Its sampling temperature.", ge=0)
    max_tokens: int = training(512, "Longest reply, tokens.", ge=1)
    tries: int = operational(3, "Times that it is asked about one answer, within deadlines.reward_s.", ge=1, le=20)
    key: str | None = environment(None, "Where its key is, as in env:HEADWAY_JUDGE_KEY; never the key itself.")

    @field_validator("url")
    @classmethod
    def _url_is_an_address(cls, value: str | None) -> str | None:
        if value is not None and ADDRESS.fullmatch(value) is None:
            raise ValueError("write http://host:port/v1, without a user, a query or a fragment")
        return value

    @field_validator("key")
    @classmethod
    def _key_is_a_place(cls, value: str | None) -> str | None:
        if value is not None and KEY.fullmatch(value) is None:
            raise ValueError("write env:HEADWAY_<NAME>, a variable of the command's environment that workers get, too")
        return value


class RewardModelConfig(Part):
    """Reward `reward_model`: a sequence classifier reads prompt and answer (rewards.md 10)."""

    path: str | None = training(None, "Directory with a sequence classifier and its tokenizer.", min_length=1)
    label: int | None = training(None, "Which of its outputs is the reward; null = the only one.", ge=0)
    squash: bool = training(False, "Put it through a sigmoid.")
    right: float | None = training(None, "Reward from which on an answer counts as right; null = it does not say.")
    threads: int = environment(1, "CPU threads of each process that scores.", ge=1)
    device: Literal["cpu", "cuda"] = environment("cpu", "Where it computes; cuda = on the GPUs of the rollout worker.")
    dtype: Literal["float32", "bfloat16"] = training("float32", "Of its weights; the score is float32.")
