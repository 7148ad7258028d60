"""Rewards as users of verl and TRL write them work unchanged, in the process that a run would use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.rollout.rewards.scoring import make_scorer
from rl_core.types import Prompt, Score

VERL = '''
import re


def extract(text):
    found = re.findall(r"-?[0-9.,]+", text)
    return found[-1].replace(",", "").rstrip(".") if found else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As in verl's documentation: one function for several data sources, a dict with what to log."""
    pred = extract(solution_str)
    if data_source == "openai/gsm8k":
        acc = pred == ground_truth
    else:
        acc = solution_str.strip() in ground_truth
    score = 1.0 if acc else 0.1 if pred else 0.0
    return {"score": score, "acc": acc, "pred": pred, "format": pred is not None, "split": extra_info["split"],
            "index": extra_info["index"]}


def with_settings(data_source, solution_str, ground_truth, extra_info=None, bonus=0.5, **kwargs):
    return float(solution_str == ground_truth) + bonus * (extra_info is None) + len(kwargs)
'''

TRL = '''
import re


def format_reward(completions, **kwargs):
    """Conversational, as in TRL's documentation."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) else 0.0 for content in contents]


def accuracy_reward(prompts, completions, ground_truth, **kwargs):
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if content == truth else 0.0 for content, truth in zip(contents, ground_truth)]


def by_task(prompts, completions, task, answer, **kwargs):
    assert len(prompts) == len(completions) == len(task) == len(answer) == 1
    return [float(completion == right) if kind == "math" else -1.0
            for completion, kind, right in zip(completions, task, answer)]
'''


@pytest.fixture
def score(tmp_path: Path) -> Any:
    (tmp_path / "verl_reward.py").write_text(VERL)
    (tmp_path / "trl_reward.py").write_text(TRL)
    made: list[Any] = []

    def run(target: str, given: Prompt, text: str) -> Score:
        made.append(make_scorer(Config(reward=target), cwd=tmp_path))
        return made[-1](given, text)

    yield run
    for each in made:
        each.close()


def row(prompt: Any, answer: str, data_source: str = "mine", **columns: Any) -> Prompt:
    return Prompt(dataset_epoch=0, position=0, prompt_idx=0, token_ids_P=np.zeros(1, np.int32), answer=answer,
                  data_source=data_source, columns={**columns, "prompt": prompt})


CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "6 x 7"}]


def test_verls_compute_score(score: Callable[..., Score]) -> None:
    given = row(CHAT, "1042", "openai/gsm8k", ability="math", reward_model={"style": "rule", "ground_truth": "1042"},
                extra_info={"split": "train", "index": 7})
    target = "./verl_reward.py:compute_score"
    assert score(target, given, "that is 1,042.") == \
        Score(reward=1.0, correct=1.0, extracted="1042", parts={"format": 1.0, "index": 7.0})
    assert score(target, given, "41").reward == 0.1
    listed = row(CHAT, '["yes", "no"]', "mine", reward_model={"ground_truth": ["yes", "no"]},
                 extra_info={"split": "test", "index": 8})
    assert score(target, listed, " yes") == \
        Score(reward=1.0, correct=1.0, extracted=None, parts={"format": 0.0, "index": 8.0})


def test_verls_compute_score_with_settings_of_its_own(score: Callable[..., Score]) -> None:
    assert score("./verl_reward.py:with_settings", row("6 x 7", "42"), "42") == Score(reward=1.5)
    assert score("./verl_reward.py:with_settings", row("6 x 7", "42", extra_info={}), "41") == Score(reward=0.0)


def test_trls_conversational_reward(score: Callable[..., Score]) -> None:
    target = "./trl_reward.py:format_reward"
    assert score(target, row(CHAT, "42"), "<think>x</think><answer>42</answer>") == Score(reward=1.0)
    assert score(target, row(CHAT, "42"), "42") == Score(reward=0.0)


def test_trls_standard_reward_with_columns(score: Callable[..., Score]) -> None:
    assert score("./trl_reward.py:accuracy_reward", row("6 x 7", "42"), r"so \boxed{42}") == Score(reward=1.0)
    assert score("./trl_reward.py:by_task", row("6 x 7", "42", task="math"), "42") == Score(reward=1.0)
    assert score("./trl_reward.py:by_task", row("6 x 7", "42", task="code"), "42") == Score(reward=-1.0)
