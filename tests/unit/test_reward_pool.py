"""Several calls of one reward side by side, by themselves and in a rollout worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.config import Config
from rl_core.errors import RewardError, RewardTimeout
from rl_core.rollout.rewards.function import FunctionScorer
from rl_core.rollout.rewards.pool import ScorerPool
from rl_core.rollout.rewards.scoring import InlineScorer, make_scorer
from rl_core.types import Prompt

SLOW = """
import os, time
def score(answer, truth):
    if answer == "hang":
        time.sleep(60)
    time.sleep(float(answer))
    return {"reward": 1, "pid": os.getpid()}
"""


def prompt() -> Prompt:
    return Prompt(dataset_epoch=0, position=0, prompt_idx=0, token_ids_P=np.zeros(1, np.int32), answer="1",
                  data_source="s")


@pytest.fixture
def pool(tmp_path: Path) -> Any:
    (tmp_path / "reward.py").write_text(SLOW)
    made: list[Any] = []

    def make(workers: int, deadline_s: float = 5.0) -> Any:
        config = Config.model_validate({"reward": "./reward.py:score", "scoring": {"workers": workers},
                                        "deadlines": {"reward_s": deadline_s}})
        made.append(make_scorer(config, cwd=tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


def score_all(scorer: Any, texts: list[str]) -> list[Any]:
    """Scores, or what was raised, all calls at once."""
    def call(text: str) -> Any:
        try:
            return scorer(prompt(), text)
        except RewardError as error:
            return error

    with ThreadPoolExecutor(len(texts)) as threads:
        return list(threads.map(call, texts))


def test_as_many_calls_run_side_by_side_as_there_are_workers(pool: Callable[..., Any]) -> None:
    assert isinstance(pool(1), FunctionScorer)
    scorer = pool(3)
    assert isinstance(scorer, ScorerPool)
    score_all(scorer, ["0.2"] * 3)  # starts the children
    start = time.monotonic()
    scores = score_all(scorer, ["0.3"] * 6)
    assert 0.6 <= time.monotonic() - start < 1.2, "two rounds of three"
    assert [score.reward for score in scores] == [1.0] * 6
    assert len({score.parts["pid"] for score in scores}) == 3


def test_calls_one_after_the_other_keep_to_one_child(pool: Callable[..., Any]) -> None:
    scorer = pool(4)
    assert len({scorer(prompt(), "0").parts["pid"] for _ in range(5)}) == 1


def test_a_call_that_hangs_does_not_hold_the_others(pool: Callable[..., Any]) -> None:
    scorer = pool(2, deadline_s=1.0)
    score_all(scorer, ["0.2"] * 2)
    start = time.monotonic()
    hung, *others = score_all(scorer, ["hang", *["0.05"] * 8])
    assert isinstance(hung, RewardTimeout)
    assert [score.reward for score in others] == [1.0] * 8
    assert time.monotonic() - start < 2.0
    assert score_all(scorer, ["0", "0"])[0].reward == 1.0, "the child that was ended is started again"


def test_close_ends_running_and_waiting_calls(pool: Callable[..., Any]) -> None:
    scorer = pool(1) and pool(2, deadline_s=60)
    threading.Timer(1.0, scorer.close).start()
    start = time.monotonic()
    results = score_all(scorer, ["hang"] * 4)
    assert time.monotonic() - start < 3.0
    assert [type(result) for result in results] == [RewardError] * 4
    with pytest.raises(RewardError, match="closed"):
        scorer(prompt(), "0")


def test_rewards_in_place_need_no_pool() -> None:
    assert isinstance(make_scorer(Config.model_validate({"scoring": {"workers": 4}})), InlineScorer)
