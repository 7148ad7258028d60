"""Several rewards of one answer, with their weights: `scoring.weight` and `scoring.parts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_core.advantage_settings import PartsAdvantage
from rl_core.config import Config
from rl_core.errors import ConfigError, RewardError
from rl_core.offline import reward_of
from rl_core.plan import check, parse_overrides, resolve
from rl_core.reward_settings import estimator_of
from rl_core.rollout.rewards.scoring import Scorer, check_reward, make_scorer, make_training_scorer
from rl_core.rollout.rewards.weighted import add_up
from rl_core.types import Prompt, Score

MINE = """
def short(completion):
    return {"reward": -len(completion), "length": len(completion)}

def fails(completion):
    raise OSError("no net")

def level(completion, level):
    return level
"""
SHORT: dict[str, Any] = {"part": "short", "reward": "./mine.py:short", "weight": 0.01}
TAGS: dict[str, Any] = {"part": "tags", "reward": "regex", "weight": 0.5, "pattern": "<a>(.*)</a>"}


def prompt(answer: str = "42") -> Prompt:
    return Prompt(dataset_epoch=0, position=0, prompt_idx=0, token_ids_P=np.zeros(1, np.int32), answer=answer,
                  data_source="s", columns={})


def config(*parts: dict[str, Any], weight: float = 1.0, reward: str = "exact") -> Config:
    return Config.model_validate({"reward": reward, "scoring": {"weight": weight, "parts": parts}})


@pytest.fixture
def scorer_of(tmp_path: Path) -> Iterator[Callable[[Config], Scorer]]:
    made: list[Scorer] = []
    (tmp_path / "mine.py").write_text(MINE)

    def make(settings: Config) -> Scorer:
        made.append(make_scorer(settings, cwd=tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_rewards_are_added_with_their_weights_by_hand() -> None:
    total = add_up(Score(reward=1.0, parts={"own": 3.0}, correct=1.0, extracted="42"), 2.0,
                   [("short", 0.01, Score(reward=-20.0, parts={"length": 20.0})), ("style", -1.0, Score(reward=0.25))])
    assert total.reward == pytest.approx(2.0 - 0.2 - 0.25)
    assert total.parts == {"own": 3.0, "main": 1.0, "short": -20.0, "short.length": 20.0, "style": 0.25}
    assert (total.correct, total.extracted) == (1.0, "42"), "the first reward says what is right"


def test_a_sum_that_float32_does_not_hold_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"the weighted sum of the rewards is 3.4e\+39"):
        add_up(Score(reward=3.4e38), 10.0, [])


def test_parts_are_scored_by_rewards_of_every_kind(scorer_of: Callable[[Config], Scorer]) -> None:
    scorer = scorer_of(config(SHORT, TAGS, weight=2.0, reward="gsm8k"))
    score = scorer(prompt(), "<a>42</a>")
    assert score.reward == pytest.approx(2.0 * 1 - 0.01 * 9 + 0.5 * 1) and score.correct == 1.0
    assert score.parts == {"main": 1.0, "short": -9.0, "short.length": 9.0, "tags": 1.0}


def test_a_reward_that_fails_fails_the_answer(scorer_of: Callable[[Config], Scorer]) -> None:
    scorer = scorer_of(config({"part": "net", "reward": "./mine.py:fails", "weight": 0.0}))
    with pytest.raises(RewardError, match=r"reward ./mine.py:fails: raised OSError: no net"):
        scorer(prompt(), "42")


def test_one_reward_of_weight_one_is_scored_as_ever(scorer_of: Callable[[Config], Scorer]) -> None:
    assert scorer_of(config())(prompt(), " 42") == Score(reward=1.0, correct=1.0, extracted="42")


class Rows:
    """One row, without a column `level`."""

    def first(self) -> tuple[Prompt, str]:
        return prompt(), "rows.jsonl:1"

    def without(self, column: str) -> str | None:
        return "rows.jsonl:1" if column == "level" else None


@pytest.mark.parametrize(("part", "words"), [
    ({"part": "net", "reward": "./mine.py:fails"}, r"no net.*that was a trial on rows.jsonl:1"),
    ({"part": "none", "reward": "./mine.py:none"}, "cannot be loaded: ValueError: ./mine.py has no function 'none'"),
    ({"part": "level", "reward": "./mine.py:level"}, "asks for the column 'level', and rows.jsonl:1 has none")])
def test_every_part_is_tried_before_the_start(tmp_path: Path, part: dict[str, Any], words: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check_reward(config(SHORT, part), cwd=tmp_path, rows=Rows())
    assert check_reward(config(SHORT), cwd=tmp_path, rows=Rows()) == ()


def with_gdpo(settings: Config, *named: str) -> Config:
    return resolve(settings.model_dump(mode="json"), {"learner": {"advantage": {
        "name": "gdpo", "parts": [{"part": name} for name in named]}}})


def test_gdpo_needs_a_reward_that_gives_parts_in_its_trial(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)

    def tried(settings: Config) -> tuple[str, ...]:
        return check_reward(settings, cwd=tmp_path, rows=Rows())

    with pytest.raises(ConfigError, match=r"^learner.advantage.name: learns from the parts of a reward, and exact gave "
                                          r"none in its trial on rows.jsonl:1: .*\(got 'gdpo'\)"):
        tried(with_gdpo(config(), "main"))
    assert tried(with_gdpo(config(weight=0.5))) == (), "a reward with a weight is the part `main`"
    assert tried(with_gdpo(config(SHORT), "main", "short.length")) == ()
    assert tried(with_gdpo(config(SHORT), "main", "shrot")) == (
        "learner.advantage.parts: the reward gave main, short, short.length in its trial on rows.jsonl:1, and not "
        "shrot; a step ends the run if no answer of it has such a part",)
    assert check_reward(with_gdpo(config()), cwd=tmp_path) == (), "without a row nothing is tried"


def test_gdpo_has_the_weights_of_the_reward_unless_it_has_its_own() -> None:
    def weights(settings: Config, *recorded: str) -> dict[str, float]:
        found = estimator_of(settings, recorded)
        assert isinstance(found, PartsAdvantage)
        return {one.part: one.weight for one in found.parts}

    settings = config({**SHORT, "weight": -0.01}, TAGS, weight=2.0)
    every = ("main", "short", "short.length", "tags")
    assert weights(with_gdpo(settings), *every) == {"main": 2.0, "short": -0.01, "tags": 0.5}, "and no part of a part"
    assert weights(with_gdpo(settings), "main", "short") == {"main": 2.0, "short": -0.01}, "tags came by an amendment"
    assert set(weights(with_gdpo(settings))) == {"main", "short", "tags"}, "none of them: the estimator refuses it"
    assert weights(with_gdpo(settings, "short.length"), *every) == {"short.length": 1.0}
    assert weights(with_gdpo(config()), *every) == {}, "all of a function's own"
    assert estimator_of(settings, every) == settings.learner.advantage


def with_maxrl(settings: Config) -> Config:
    return resolve(settings.model_dump(mode="json"), {"learner": {"advantage": {"name": "maxrl"}}})


def test_a_negative_reward_fails_its_answer_by_name_under_maxrl(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    taking = config({**SHORT, "weight": 0.25})
    with closing(make_training_scorer(with_maxrl(taking), cwd=tmp_path)) as scorer:
        with pytest.raises(RewardError, match=r"^the reward is -0.75, and .*maxrl takes rewards of") as failed:
            scorer(prompt(), "123")
        assert failed.value.reason == "reward_negative"
        assert scorer(prompt(), "42").reward == 0.5, "and the next answer is scored"
    with closing(make_training_scorer(taking, cwd=tmp_path)) as scorer:
        assert scorer(prompt(), "123").reward == -0.75, "under another estimator"
    with closing(make_scorer(with_maxrl(taking), cwd=tmp_path)) as scorer:
        assert scorer(prompt(), "123").reward == -0.75, "in a validation"


def test_maxrl_is_refused_where_the_right_answer_has_a_negative_reward_in_its_trial(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ConfigError, match=r"^learner.advantage.name: takes rewards of at least 0, and it was -1 in its "
                                          r"trial on rows.jsonl:1, .*\(got 'maxrl'\)"):
        check_reward(with_maxrl(config({**SHORT, "weight": 1.0})), cwd=tmp_path, rows=Rows())
    assert check_reward(with_maxrl(config(SHORT)), cwd=tmp_path, rows=Rows()) == ()


@pytest.mark.parametrize(("settings", "words"), [
    (config(SHORT, SHORT), "scoring.parts: stands twice among the parts main, short, short"),
    (config({**SHORT, "part": "main"}), "scoring.parts: stands twice"),
    (config({**SHORT, "reward": "shrot"}), r"scoring.parts: of the part short: no reward.*\(got 'shrot'\)"),
    (config({**TAGS, "pattern": None}), "scoring.pattern: reward=regex needs a pattern"),
    (config({**SHORT, "weight": 0.0}, weight=0.0), "scoring.weight: no reward has a weight"),
    (config({**SHORT, "pattern": "x"}), "scoring.pattern: belongs to reward=regex")])
def test_parts_that_cannot_work_are_refused(settings: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(settings)


def test_parts_are_set_as_a_list_and_are_settings_that_stored_rewards_depend_on() -> None:
    made = resolve({}, parse_overrides(["scoring.parts=[{part: short, reward: './mine.py:short', weight: 0.1}]"]))
    assert made.scoring.parts[0].weight == 0.1
    assert reward_of(made)["scoring.parts"] != reward_of(Config())["scoring.parts"]
    assert {name for name in reward_of(made) if name.startswith("scoring.code.")} == {
        f"scoring.code.{name}" for name in ("time_s", "total_s", "memory_bytes", "output_bytes", "partial")}
    with pytest.raises(ConfigError, match=r"scoring.parts.0.part: .*\(got 'two words'\)"):
        resolve({}, {"scoring": {"parts": [{"part": "two words", "reward": "exact"}]}})
